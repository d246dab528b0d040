//! The places of a RAM tier, page-locked: copies start from where records are, and no buffer is between.

use std::sync::Arc;

use cudarc::driver::{DriverError, sys};

use super::context::{Doing, Gpu};
use super::options::CudaOptions;
use super::pinned::{locks_no_more, register};
use crate::error::Result;
use crate::store::{Held, RecordIndex, TieredSource};

/// Most bytes registered at once, as far as places allow it.
const CHUNK: usize = 1 << 30;
/// So many places end at the end of a page, whatever their size.
const PLACES_OF_PAGES: usize = 8;

/// A [`TieredSource`] whose places are page-locked as long as this lives.
pub(super) struct LockedTier {
    gpu: Gpu,
    tier: Arc<TieredSource>,
    /// Where each registered range begins.
    chunks: Vec<*mut u8>,
    /// What kernels add to an address to find the same bytes.
    device_offset: u64,
    bytes: usize,
}

// SAFETY: the pointers are addresses of memory that `tier` owns and are only given back to the driver.
unsafe impl Send for LockedTier {}
// SAFETY: as for `Send`; nothing is changed through a shared reference.
unsafe impl Sync for LockedTier {}

impl LockedTier {
    /// Page-locks the places; `None` when that is not wanted or the driver does not lock so much.
    pub(super) fn new(gpu: &Gpu, tier: &Arc<TieredSource>, options: &CudaOptions) -> Result<Option<Self>> {
        let ((start, place_bytes), places) = (tier.memory(), tier.stats().places);
        let bytes = places * place_bytes;
        let limits = [options.page_lock_limit, options.page_lock_fails_at];
        if limits.into_iter().flatten().any(|most| most < bytes as u64) {
            return Ok(None);
        }
        tier.populate();
        gpu.bind()?;
        let of_a_chunk = (CHUNK / place_bytes / PLACES_OF_PAGES).max(1) * PLACES_OF_PAGES * place_bytes;
        let mut this =
            Self { gpu: gpu.clone(), tier: tier.clone(), chunks: Vec::new(), device_offset: 0, bytes };
        for at in (0..bytes).step_by(of_a_chunk) {
            // SAFETY: inside the tier's memory.
            let chunk = unsafe { start.add(at) };
            // SAFETY: the range stays mapped as long as `tier`, which this keeps, and `Drop` unregisters it before.
            match unsafe { register(chunk, of_a_chunk.min(bytes - at)) } {
                Ok(()) => this.chunks.push(chunk),
                Err(error) if locks_no_more(error) => return Ok(None),
                Err(error) => return Err(error).doing("page-locking the RAM tier"),
            }
            let mut address = 0;
            // SAFETY: the range is registered with DEVICEMAP.
            unsafe { sys::cuMemHostGetDevicePointer_v2(&mut address, chunk.cast(), 0) }
                .result()
                .doing("mapping the RAM tier for the GPU")?;
            let offset = address.wrapping_sub(chunk as u64);
            if at > 0 && offset != this.device_offset {
                return Ok(None);
            }
            this.device_offset = offset;
        }
        Ok(Some(this))
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes as u64
    }

    pub(super) fn places(&self) -> usize {
        self.tier.stats().places
    }

    pub(super) fn device_offset(&self) -> u64 {
        self.device_offset
    }

    /// Waits until `record` is in RAM, where it stays as long as what is handed out lives.
    pub(super) fn hold(&self, record: RecordIndex) -> Result<Held> {
        self.tier.hold(record)
    }
}

impl Drop for LockedTier {
    fn drop(&mut self) {
        self.gpu.ctx.record_err(self.gpu.ctx.synchronize());
        for &chunk in &self.chunks {
            // SAFETY: registered in `new`, and nothing runs on the GPU that could still read it.
            let done: std::result::Result<(), DriverError> =
                unsafe { sys::cuMemHostUnregister(chunk.cast()) }.result();
            self.gpu.ctx.record_err(done);
        }
    }
}
