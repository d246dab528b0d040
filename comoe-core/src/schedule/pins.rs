//! Records that stay in their slots for good, and how often each record was asked for.

use super::Engine;
use crate::backend::{Fill, Queue};
use crate::error::Result;
use crate::store::RecordIndex;

/// Records that are sent for together.
const AT_ONCE: usize = 64;

impl Engine {
    /// Brings `records` to slots of their layers and keeps them there. None of them may be anywhere yet, and each must
    /// find a free slot. Counters start anew.
    ///
    /// # Errors
    /// When a record cannot be brought.
    pub(crate) fn keep(&mut self, records: &[RecordIndex]) -> Result<()> {
        let mut fills = Vec::with_capacity(records.len());
        for &record in records {
            let slot = self.pool.keep(self.directory.ordinal_of(record), record);
            fills.extend(slot.map(|slot| Fill { record, slot }));
        }
        if fills.is_empty() {
            return Ok(());
        }
        for fills in fills.chunks(AT_ONCE) {
            let ticket = self.fill(Queue::Demand, fills)?;
            self.compute_waits(ticket)?;
        }
        self.backend.synchronize()?;
        fills.iter().for_each(|f| self.pool.arrived(f.slot));
        self.reset_stats();
        Ok(())
    }

    /// Accesses by record since the cache was built, whoever drove the steps.
    pub(crate) fn uses(&mut self) -> Vec<u64> {
        let mut all = self.uses.clone();
        let device = self.device_uses();
        all.iter_mut().zip(device).for_each(|(all, n)| *all += n);
        all
    }
}
