//! GPU memory that belongs to this crate and not to candle's pool: one plain allocation each.

use cudarc::driver::{result, sys};

use super::context::{Doing, Gpu};
use crate::error::Result;

/// One allocation at a fixed address. The slots of a pool are one, so they never fragment.
pub(super) struct Slab {
    gpu: Gpu,
    address: sys::CUdeviceptr,
    bytes: usize,
}

impl Slab {
    /// Allocates `bytes` for `what` (named in errors); 0 bytes allocate nothing.
    pub(super) fn new(gpu: &Gpu, what: &str, bytes: usize) -> Result<Self> {
        gpu.bind()?;
        let address = match bytes {
            0 => 0,
            // SAFETY: a context is bound; `Drop` frees the memory once.
            _ => unsafe { result::malloc_sync(bytes) }
                .map_err(|error| gpu.explain_allocation(what, bytes as u64, error))?,
        };
        Ok(Self { gpu: gpu.clone(), address, bytes })
    }

    pub(super) fn address(&self) -> u64 {
        self.address
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Copies `out.len()` bytes at `at` to the host, after whatever the GPU is doing.
    pub(super) fn read(&self, at: usize, out: &mut [u8]) -> Result<()> {
        self.check(at, out.len())?;
        self.gpu.ctx.synchronize().doing("waiting for the GPU")?;
        // SAFETY: `check` keeps the range inside the allocation.
        unsafe { result::memcpy_dtoh_sync(out, self.address + at as u64) }.doing("reading GPU memory")
    }

    /// Copies `bytes` to `at`, after whatever the GPU is doing.
    pub(super) fn write(&self, at: usize, bytes: &[u8]) -> Result<()> {
        self.check(at, bytes.len())?;
        self.gpu.ctx.synchronize().doing("waiting for the GPU")?;
        // SAFETY: `check` keeps the range inside the allocation.
        unsafe { result::memcpy_htod_sync(self.address + at as u64, bytes) }.doing("writing GPU memory")?;
        // A copy from pageable memory may return before it has arrived.
        self.gpu.ctx.synchronize().doing("waiting for the GPU")
    }

    fn check(&self, at: usize, len: usize) -> Result<()> {
        if at.checked_add(len).is_none_or(|end| end > self.bytes) {
            let reason = format!("{len} bytes at {at} do not lie in an allocation of {} bytes", self.bytes);
            return Err(crate::Error::BadArgument { what: "slot", reason });
        }
        Ok(())
    }
}

impl Drop for Slab {
    fn drop(&mut self) {
        if self.address == 0 {
            return;
        }
        self.gpu.ctx.record_err(self.gpu.ctx.synchronize());
        // SAFETY: allocated in `new`, freed only here, and nothing runs on the GPU that could still use it.
        self.gpu.ctx.record_err(unsafe { result::free_sync(self.address) });
    }
}
