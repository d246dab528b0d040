//! GPU memory that belongs to this crate and not to candle's pool: one range of addresses each, plainly allocated or, where
//! slots come and go, mapped chunk by chunk.

use std::ops::Range;

use cudarc::driver::{DriverError, result, sys};

use super::context::{Doing, Gpu};
use super::mapping::Mapping;
use crate::backend::Chunks;
use crate::error::Result;

/// Memory at a fixed address. The slots of a pool are one, so they never fragment.
pub(super) struct Slab {
    gpu: Gpu,
    address: sys::CUdeviceptr,
    bytes: usize,
    /// Present where it is no plain allocation.
    mapping: Option<Mapping>,
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
        Ok(Self { gpu: gpu.clone(), address, bytes, mapping: None })
    }

    /// Memory for slots, which can be given back in part where the driver can do that.
    pub(super) fn of_slots(gpu: &Gpu, what: &str, slots: usize, slot_bytes: usize) -> Result<Self> {
        let asked = slots * slot_bytes;
        let mapping = match Mapping::new(gpu, slots, slot_bytes) {
            Ok(Some(mapping)) => mapping,
            Ok(None) | Err(DriverError(sys::cudaError_enum::CUDA_ERROR_NOT_SUPPORTED)) => {
                return Self::new(gpu, what, asked);
            }
            Err(error) => return Err(gpu.explain_allocation(what, asked as u64, error)),
        };
        Ok(Self { gpu: gpu.clone(), address: mapping.address(), bytes: asked, mapping: Some(mapping) })
    }

    pub(super) fn address(&self) -> u64 {
        self.address
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// How it comes and goes; `None` where it is one allocation.
    pub(super) fn chunks(&self) -> Option<Chunks> {
        self.mapping.as_ref().map(Mapping::chunks)
    }

    /// Backs all slots but `unused`, once the GPU is idle, and returns how many bytes are backed now.
    ///
    /// # Errors
    /// [`Error::OutOfDeviceMemory`](crate::Error::OutOfDeviceMemory), and then nothing has changed.
    pub(super) fn set_unused(&mut self, unused: &Range<u32>) -> Result<u64> {
        let Some(mapping) = &mut self.mapping else { return Ok(self.bytes as u64) };
        let (chunks, before) = (mapping.chunks(), mapping.backed());
        let wanted = chunks.bytes_without(unused);
        mapping.back_all_but(chunks.within(unused)).map_err(|error| {
            let more = wanted.saturating_sub(before);
            self.gpu.explain_allocation("slots that come back", more as u64, error)
        })?;
        Ok(wanted as u64)
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
        if self.address == 0 || self.mapping.is_some() {
            return;
        }
        self.gpu.ctx.record_err(self.gpu.ctx.synchronize());
        // SAFETY: allocated in `new`, freed only here, and nothing runs on the GPU that could still use it.
        self.gpu.ctx.record_err(unsafe { result::free_sync(self.address) });
    }
}
