//! CUDA: slots in one range of addresses, records in page-locked memory, copies on streams of their own, fused kernels.
//!
//! Reading order: `context` (devices), `slab`, `mapping` and `pinned` (memory), `arena` (records in page-locked memory), `later` (where they
//! are locked while steps are served), `tier`
//! (RAM that holds some of them, page-locked),
//! `timeline` (streams and tickets), `batch`, `expand`, `sender`, `bounce` and `copies` (the copy queues), `compute` and
//! `upload` (the compute queue), `kernels`, and the backend that puts them together, with `ffn` for the experts' work and `many` for steps of many tokens.
//! `device`, `tables` and `resolve` are the driver whose tables live on the GPU, `ahead` is what it brings before it is asked
//! for, and `correlate` what it learns to guess that. `spans` takes down when all of that happens, while somebody wants to
//! know, and `stamps` tells the time on a stream. A backend serves one GPU and nothing here
//! is global, so several GPUs are several backends, and `peers` is what is between them.

#[cfg(feature = "cuda")]
mod ahead;
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
mod correlate;
#[cfg(feature = "cuda")]
mod device;
#[cfg(feature = "cuda")]
mod expand;
#[cfg(feature = "cuda")]
mod ffn;
#[cfg(feature = "cuda")]
pub mod kernels;
#[cfg(feature = "cuda")]
mod later;
#[cfg(feature = "cuda")]
mod many;
#[cfg(feature = "cuda")]
mod mapping;
pub mod measure;
mod options;
#[cfg(feature = "cuda")]
mod peers;
#[cfg(feature = "cuda")]
mod pinned;
#[cfg(feature = "cuda")]
mod pool_memory;
#[cfg(feature = "cuda")]
mod probe;
#[cfg(feature = "cuda")]
mod probe_peers;
#[cfg(feature = "cuda")]
mod resolve;
#[cfg(feature = "cuda")]
mod sender;
#[cfg(feature = "cuda")]
mod slab;
#[cfg(any(feature = "cuda", test))]
mod span_log;
#[cfg(feature = "cuda")]
mod spans;
#[cfg(feature = "cuda")]
mod stamps;
#[cfg(feature = "cuda")]
mod tables;
#[cfg(feature = "cuda")]
mod tier;
#[cfg(feature = "cuda")]
mod timeline;
#[cfg(feature = "cuda")]
mod upload;
mod workspace;

#[cfg(feature = "cuda")]
pub use ahead::SideStream;
#[cfg(feature = "cuda")]
pub use backend::CudaBackend;
#[cfg(feature = "cuda")]
pub(crate) use context::candle_is_out_of_memory;
#[cfg(feature = "cuda")]
pub use context::{cuda_device, cuda_device_count, cuda_give_back, cuda_memory};
#[doc(hidden)]
pub use options::Faults;
pub use options::{CudaOptions, Progress, ResidentFormat};
#[cfg(feature = "cuda")]
pub(crate) use peers::Peers;
#[cfg(feature = "cuda")]
pub use pool_memory::cuda_pool;
#[cfg(feature = "cuda")]
pub use stamps::Stamps;
pub use workspace::{MOST_GEMV_TOKENS, handed_bytes, learned_bytes, workspace_bytes};

#[cfg(not(feature = "cuda"))]
fn not_built(asked: String) -> crate::Error {
    let reason = "this build has no CUDA: build with --features cuda, or use the CPU".to_owned();
    crate::Error::Device { asked, reason }
}

/// Opens a GPU; this build cannot.
///
/// # Errors
/// [`Error::Device`](crate::Error::Device), always.
#[cfg(not(feature = "cuda"))]
pub fn cuda_device(ordinal: usize) -> crate::Result<candle_core::Device> {
    Err(not_built(format!("cuda:{ordinal}")))
}

/// How many GPUs there are for this build: none.
///
/// # Errors
/// [`Error::Device`](crate::Error::Device), always.
#[cfg(not(feature = "cuda"))]
pub fn cuda_device_count() -> crate::Result<usize> {
    Err(not_built("cuda".to_owned()))
}

/// Free and total memory of a CUDA device; this build knows none.
///
/// # Errors
/// [`Error::Device`](crate::Error::Device), always.
#[cfg(not(feature = "cuda"))]
pub fn cuda_memory(device: &candle_core::Device) -> crate::Result<(u64, u64)> {
    Err(not_built(format!("{:?}", device.location())))
}

/// Gives device memory that tensors have left back to the driver; this build has no device that keeps any.
///
/// # Errors
/// Never.
#[cfg(not(feature = "cuda"))]
pub fn cuda_give_back(_: &candle_core::Device) -> crate::Result<()> {
    Ok(())
}

/// What the memory pool of a CUDA device holds; this build knows none.
///
/// # Errors
/// [`Error::Device`](crate::Error::Device), always.
#[cfg(not(feature = "cuda"))]
pub fn cuda_pool(device: &candle_core::Device) -> crate::Result<crate::plan::PoolBytes> {
    Err(not_built(format!("{:?}", device.location())))
}
