//! Many copies in one driver call.

use std::ffi::c_void;
use std::sync::OnceLock;

use cudarc::driver::{CudaStream, sys};

use super::context::Doing;
use crate::error::Result;

/// `cuMemcpyBatchAsync` as CUDA 12.8 has it. Resolved at run time: linking it would keep the program from starting on
/// an older driver.
type BatchAsync = unsafe extern "C" fn(
    dsts: *mut sys::CUdeviceptr,
    srcs: *mut sys::CUdeviceptr,
    sizes: *mut usize,
    count: usize,
    attrs: *mut Attributes,
    attr_indices: *mut usize,
    attr_count: usize,
    fail_index: *mut usize,
    stream: sys::CUstream,
) -> sys::CUresult;

/// `CUmemcpyAttributes`.
#[repr(C)]
struct Attributes {
    source_order: u32,
    source_hint: [i32; 2],
    destination_hint: [i32; 2],
    flags: u32,
}

/// The source is read in stream order: when the batch's turn has come and before its event is reached.
const IN_STREAM_ORDER: u32 = 1;
const SINCE: i32 = 12080;

fn resolve() -> Option<BatchAsync> {
    static FOUND: OnceLock<Option<BatchAsync>> = OnceLock::new();
    *FOUND.get_or_init(|| {
        let mut address: *mut c_void = std::ptr::null_mut();
        let mut status = sys::CUdriverProcAddressQueryResult::CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
        let name = c"cuMemcpyBatchAsync";
        // SAFETY: valid places for the answers; the name ends in a nul.
        let answer = unsafe { sys::cuGetProcAddress_v2(name.as_ptr(), &mut address, SINCE, 0, &mut status) };
        if answer != sys::CUresult::CUDA_SUCCESS || address.is_null() {
            return None;
        }
        // SAFETY: the driver says that this is the function as of CUDA 12.8, whose signature `BatchAsync` is.
        Some(unsafe { std::mem::transmute::<*mut c_void, BatchAsync>(address) })
    })
}

/// Whether the driver takes many copies in one call.
pub(super) fn has_batches() -> bool {
    resolve().is_some()
}

/// Copies from page-locked memory to the GPU, gathered before they are enqueued. Kept and reused, so that nothing is
/// allocated per batch.
#[derive(Default)]
pub(super) struct Batch {
    to: Vec<sys::CUdeviceptr>,
    from: Vec<sys::CUdeviceptr>,
    bytes: Vec<usize>,
}

impl Batch {
    /// # Safety
    /// `from` must be readable and `to` writable for `bytes` until what [`Batch::enqueue`] enqueues is done.
    pub(super) unsafe fn push(&mut self, to: u64, from: u64, bytes: usize) {
        self.to.push(to);
        self.from.push(from);
        self.bytes.push(bytes);
    }

    /// Enqueues the copies on `stream`, in one call where the driver can, and starts anew. They are not ordered among
    /// each other.
    pub(super) fn enqueue(&mut self, stream: &CudaStream, single: bool) -> Result<()> {
        stream.context().bind_to_thread().doing("using the GPU")?;
        let done = match resolve() {
            Some(batch) if self.bytes.len() > 1 && !single => self.enqueue_batch(batch, stream),
            _ => self.enqueue_singly(stream),
        };
        self.to.clear();
        self.from.clear();
        self.bytes.clear();
        done
    }

    fn enqueue_batch(&mut self, batch: BatchAsync, stream: &CudaStream) -> Result<()> {
        let mut attributes = Attributes {
            source_order: IN_STREAM_ORDER,
            source_hint: [0; 2],
            destination_hint: [0; 2],
            flags: 0,
        };
        let (mut first, mut failed) = (0, usize::MAX);
        // SAFETY: the three lists are equally long; one attribute holds from copy 0 on; the ranges are valid as
        // `push` asks.
        unsafe {
            batch(
                self.to.as_mut_ptr(),
                self.from.as_mut_ptr(),
                self.bytes.as_mut_ptr(),
                self.bytes.len(),
                &mut attributes,
                &mut first,
                1,
                &mut failed,
                stream.cu_stream(),
            )
        }
        .result()
        .doing("copying a batch of experts")
    }

    fn enqueue_singly(&self, stream: &CudaStream) -> Result<()> {
        for ((&to, &from), &bytes) in self.to.iter().zip(&self.from).zip(&self.bytes) {
            // SAFETY: the range is valid as `push` asks.
            unsafe { sys::cuMemcpyHtoDAsync_v2(to, from as *const c_void, bytes, stream.cu_stream()) }
                .result()
                .doing("copying an expert")?;
        }
        Ok(())
    }
}
