//! Words in page-locked memory that kernels write and the host reads.

use std::ptr::NonNull;
use std::sync::Arc;

use cudarc::driver::{CudaContext, result, sys};

use super::capture::doing;
use crate::error::Result;

/// Page-locked words, mapped into the GPU's address space.
pub(super) struct PinnedWords {
    ctx: Arc<CudaContext>,
    start: NonNull<u32>,
    len: usize,
}

// SAFETY: plain memory that is read with volatile loads only; it belongs to no thread.
unsafe impl Send for PinnedWords {}

impl PinnedWords {
    /// `len` zeros.
    pub(super) fn new(ctx: &Arc<CudaContext>, len: usize) -> Result<Self> {
        ctx.bind_to_thread().map_err(doing("using the GPU"))?;
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: a context is bound; `Drop` frees the memory once.
        let start = unsafe { result::malloc_host(4 * len.max(1), flags) };
        let start = start.map_err(doing("allocating page-locked words"))?.cast::<u32>();
        let Some(start) = NonNull::new(start) else {
            return Err(doing("allocating page-locked words")(cudarc::driver::DriverError(
                sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY,
            )));
        };
        // SAFETY: valid for `len` words, which nobody else knows yet.
        unsafe { start.as_ptr().write_bytes(0, len.max(1)) };
        Ok(Self { ctx: ctx.clone(), start, len })
    }

    /// What is in a word now.
    pub(super) fn get(&self, at: usize) -> u32 {
        assert!(at < self.len, "word {at} of {}", self.len);
        // SAFETY: inside the allocation; volatile, because the GPU writes at any time.
        unsafe { self.start.as_ptr().add(at).read_volatile() }
    }

    /// Where kernels write it.
    pub(super) fn device_address(&self) -> Result<u64> {
        let mut address = 0;
        // SAFETY: allocated with DEVICEMAP in `new`.
        unsafe { sys::cuMemHostGetDevicePointer_v2(&mut address, self.start.as_ptr().cast(), 0) }
            .result()
            .map_err(doing("mapping host memory for the GPU"))?;
        Ok(address)
    }
}

impl Drop for PinnedWords {
    fn drop(&mut self) {
        self.ctx.record_err(self.ctx.bind_to_thread());
        self.ctx.record_err(self.ctx.synchronize());
        // SAFETY: allocated in `new`, freed only here, and nothing runs on the GPU that could still write it.
        self.ctx.record_err(unsafe { result::free_host(self.start.as_ptr().cast()) });
    }
}
