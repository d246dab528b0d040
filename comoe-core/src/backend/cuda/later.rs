//! Records that are page-locked while steps are served already, and when steps hear of them.
//!
//! The copy queues look a record up when they copy it, so they use what is there at once. Kernels read the tables in GPU
//! memory, which are written here, between tokens: what runs on the GPU by itself sees one state of them.

use super::backend::CudaBackend;
use super::context::Doing;
use super::upload::bytes_of;
use crate::error::Result;
use crate::store::RecordIndex;

impl CudaBackend {
    /// Where kernels read each record; 0 where only the host can.
    pub(super) fn addresses(&self) -> Vec<u64> {
        let place = |r| self.arena.place(RecordIndex(r)).map_or(0, |p| p.device);
        (0..self.source.directory().len() as u32).map(place).collect()
    }

    /// Tells the tables what was page-locked since the last call. Says whether more is to come.
    pub(super) fn take_page_locked(&mut self) -> Result<bool> {
        let Some(seen) = self.seen_locked else { return Ok(false) };
        // Asked before the rest: what comes in between is the next call's.
        let (goes_on, locked) = (self.arena.goes_on(), self.arena.locked());
        if let Some(error) = self.arena.take_failure() {
            return Err(error);
        }
        if locked > seen
            && let Some(tables) = &self.tables
        {
            self.gpu.bind()?;
            self.compute.stream().synchronize().doing("waiting for kernels")?;
            tables.slab.write(tables.at.address, bytes_of(&self.addresses()))?;
        }
        self.seen_locked = goes_on.then_some(locked);
        if !goes_on {
            self.whole = self.arena.is_whole();
            match self.whole {
                true => self.copies()?.need_no_bounce(),
                false => tracing::warn!("{}", self.memory_note()),
            }
        }
        Ok(goes_on)
    }
}
