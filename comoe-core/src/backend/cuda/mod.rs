//! CUDA: slots in one allocation, records in page-locked memory, copies on streams of their own, fused kernels.
//!
//! Reading order: `context` (devices), `slab` and `pinned` (memory), `arena` (records in page-locked memory),
//! `timeline` (streams and tickets), `batch`, `expand`, `sender`, `bounce` and `copies` (the copy queues), `compute` and `upload` (the
//! compute queue), `kernels`, and the backend that puts them together. A backend serves one GPU and nothing here is
//! global, so several GPUs are several backends.

#[cfg(feature = "cuda")]
mod arena;
#[cfg(feature = "cuda")]
mod backend;
#[cfg(feature = "cuda")]
mod batch;
#[cfg(feature = "cuda")]
mod bounce;
#[cfg(feature = "cuda")]
mod compute;
#[cfg(feature = "cuda")]
mod context;
#[cfg(feature = "cuda")]
mod copies;
#[cfg(feature = "cuda")]
mod expand;
#[cfg(feature = "cuda")]
pub mod kernels;
#[cfg(feature = "cuda")]
pub mod measure;
mod options;
#[cfg(feature = "cuda")]
mod pinned;
#[cfg(feature = "cuda")]
mod sender;
#[cfg(feature = "cuda")]
mod slab;
#[cfg(feature = "cuda")]
mod timeline;
#[cfg(feature = "cuda")]
mod upload;

#[cfg(feature = "cuda")]
pub use backend::{CudaBackend, MOST_GEMV_TOKENS, workspace_bytes};
#[cfg(feature = "cuda")]
pub use context::{cuda_device, cuda_device_count};
#[doc(hidden)]
pub use options::Faults;
pub use options::{CudaOptions, Progress, ResidentFormat};

/// Opens a GPU; this build cannot.
///
/// # Errors
/// [`Error::Device`](crate::Error::Device), always.
#[cfg(not(feature = "cuda"))]
pub fn cuda_device(ordinal: usize) -> crate::Result<candle_core::Device> {
    Err(crate::Error::Device {
        asked: format!("cuda:{ordinal}"),
        reason: "this build has no CUDA: build with --features cuda, or use the CPU".to_owned(),
    })
}

/// How many GPUs there are for this build: none.
///
/// # Errors
/// [`Error::Device`](crate::Error::Device), always.
#[cfg(not(feature = "cuda"))]
pub fn cuda_device_count() -> crate::Result<usize> {
    Err(crate::Error::Device {
        asked: "cuda".to_owned(),
        reason: "this build has no CUDA: build with --features cuda, or use the CPU".to_owned(),
    })
}
