//! Counts which experts are used, from behind the cache.

use std::any::Any;
use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use candle_core::Tensor;
use comoe_core::Result;
use comoe_core::backend::{
    Backend, BackendInfo, BackendMemory, Chunks, DeviceDriver, DeviceSpans, Fill, Queue, SlotId, SpanZero,
    Ticket, TransferTime, Work, WorkItem,
};
use comoe_core::store::{Directory, RecordIndex};

/// How often each record was used, by its number.
pub type Uses = Arc<[AtomicU64]>;

/// A backend that counts for which records it computes, in steps that the host drives: what a device decides by itself
/// is not seen.
pub struct Counting {
    inner: Box<dyn Backend>,
    uses: Uses,
}

impl Counting {
    /// Counts what `inner`, which serves a store of `records` records, is asked for.
    pub fn new(inner: Box<dyn Backend>, records: usize) -> (Self, Uses) {
        let uses: Uses = (0..records).map(|_| AtomicU64::new(0)).collect();
        (Self { inner, uses: uses.clone() }, uses)
    }
}

impl Backend for Counting {
    fn info(&self) -> BackendInfo {
        self.inner.info()
    }

    fn allocate(&mut self, slots: usize, slot_bytes: usize) -> Result<()> {
        self.inner.allocate(slots, slot_bytes)
    }

    fn chunks(&self) -> std::result::Result<Chunks, String> {
        self.inner.chunks()
    }

    fn set_unused(&mut self, unused: Range<u32>) -> Result<u64> {
        self.inner.set_unused(unused)
    }

    fn reserve(&mut self, work: &Work<'_>) -> Result<()> {
        self.inner.reserve(work)
    }

    fn fill(&mut self, queue: Queue, after: &[Ticket], fills: &[Fill]) -> Result<Ticket> {
        self.inner.fill(queue, after, fills)
    }

    fn wait(&mut self, ticket: Ticket) -> Result<()> {
        self.inner.wait(ticket)
    }

    fn mark(&mut self) -> Result<Ticket> {
        self.inner.mark()
    }

    fn is_done(&mut self, ticket: Ticket) -> Result<bool> {
        self.inner.is_done(ticket)
    }

    fn begin(&mut self, work: Work<'_>) -> Result<()> {
        self.inner.begin(work)
    }

    fn run(&mut self, items: &[WorkItem]) -> Result<()> {
        for item in items {
            self.uses[item.record.0 as usize].fetch_add(item.assignments.len() as u64, Ordering::Relaxed);
        }
        self.inner.run(items)
    }

    fn copy(&mut self, slots: &[(SlotId, SlotId)]) -> Result<()> {
        self.inner.copy(slots)
    }

    fn finish(&mut self) -> Result<Tensor> {
        self.inner.finish()
    }

    fn begin_rows(&mut self, work: Work<'_>) -> Result<()> {
        self.inner.begin_rows(work)
    }

    fn finish_rows(&mut self, assignments: &[u32]) -> Result<Tensor> {
        self.inner.finish_rows(assignments)
    }

    fn accept(&mut self, assignments: &[u32], rows: &Tensor) -> Result<()> {
        self.inner.accept(assignments, rows)
    }

    fn as_any(&mut self) -> Option<&mut dyn Any> {
        self.inner.as_any()
    }

    fn synchronize(&mut self) -> Result<()> {
        self.inner.synchronize()
    }

    fn read_slot(&mut self, slot: SlotId, out: &mut [u8]) -> Result<()> {
        self.inner.read_slot(slot, out)
    }

    fn write_slot(&mut self, slot: SlotId, bytes: &[u8]) -> Result<()> {
        self.inner.write_slot(slot, bytes)
    }

    fn slot_image<'a>(&self, record: RecordIndex, stored: &'a [u8]) -> Result<Cow<'a, [u8]>> {
        self.inner.slot_image(record, stored)
    }

    fn memory(&self) -> BackendMemory {
        self.inner.memory()
    }

    fn transfer_time(&self) -> TransferTime {
        self.inner.transfer_time()
    }

    fn begin_spans(&mut self) -> Result<Option<SpanZero>> {
        self.inner.begin_spans()
    }

    fn take_spans(&mut self) -> Result<DeviceSpans> {
        self.inner.take_spans()
    }

    fn device_driver(&mut self) -> std::result::Result<&mut dyn DeviceDriver, String> {
        self.inner.device_driver()
    }
}

/// How evenly experts were used: entropy over its maximum, 1 when all were used alike.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Evenness {
    /// Mean over the layers.
    pub mean: f64,
    /// Of the least even layer.
    pub least: f64,
    /// What as many independent uniform draws would give on average (Miller 1955: the entropy of a sample falls short
    /// by `(experts - 1) / (2 draws)` nats).
    pub uniform: f64,
}

impl Evenness {
    /// Of counted uses; layers that were not used do not count.
    pub fn of(directory: &Directory, uses: &[AtomicU64]) -> Self {
        let mut layers = Vec::new();
        let mut uniform = Vec::new();
        for layer in directory.layers() {
            let counts = &uses[layer.first as usize..][..layer.experts];
            let counts: Vec<f64> = counts.iter().map(|c| c.load(Ordering::Relaxed) as f64).collect();
            let all: f64 = counts.iter().sum();
            let most = (layer.experts as f64).ln();
            if all == 0.0 || most == 0.0 {
                continue;
            }
            let used = counts.iter().filter(|c| **c > 0.0);
            layers.push(used.map(|c| -(c / all) * (c / all).ln()).sum::<f64>() / most);
            uniform.push(1.0 - (layer.experts as f64 - 1.0) / (2.0 * all) / most);
        }
        let mean = |v: &[f64]| v.iter().sum::<f64>() / v.len().max(1) as f64;
        Self {
            mean: mean(&layers),
            least: layers.iter().copied().fold(1.0, f64::min),
            uniform: mean(&uniform).max(0.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn evenness_is_one_for_equal_use_and_zero_for_one_expert() {
        let directory = Directory::new([(0, 4, 512), (3, 4, 512)]).unwrap();
        let uses: Vec<AtomicU64> = [1000, 1000, 1000, 1000, 0, 7, 0, 0].map(AtomicU64::new).into();
        let e = Evenness::of(&directory, &uses);
        assert!((e.mean - 0.5).abs() < 1e-9 && e.least.abs() < 1e-9, "{e:?}");
        assert!(e.uniform < 1.0 && e.uniform > 0.9, "{e:?}");
    }
}
