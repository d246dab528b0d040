//! Frequency with decay and recency.

use std::collections::BTreeSet;

use super::EvictionPolicy;
use crate::store::RecordIndex;

/// Evicts the record with the smallest decayed count of accesses.
///
/// An access at tick `t` is worth `2^(-(now - t) / half_life)` at tick `now`, ticks being the accesses of the
/// partition; a record's score is the sum over all its accesses, those before an eviction too. A short half-life
/// behaves like LRU, an endless one like LFU (the "combined recency and frequency" of Lee et al., LRFU, IEEE
/// Transactions on Computers 50(12), 2001).
///
/// All scores decay alike, so their order changes only by accesses: what is kept is `log2` of the score with every
/// access valued at tick 0, `s' = log2(2^s + 2^(t / half_life))`. Ties by smaller record number. O(log n) per access.
#[derive(Debug)]
pub struct Lfru {
    half_life: f64,
    /// `log2` of the undecayed score of every record; negative infinity before the first access.
    scores: Vec<f64>,
    tick: u64,
    /// Keyed by the score's bits, whose order is the score's order since scores of accessed records are positive.
    resident: BTreeSet<(u64, RecordIndex)>,
}

impl Lfru {
    /// With a half-life of `half_life` accesses of the partition, for a store of `records` records.
    ///
    /// # Panics
    /// When `half_life` is not positive.
    pub fn new(half_life: f64, records: usize) -> Self {
        assert!(half_life > 0.0, "half-life {half_life}");
        Self { half_life, scores: vec![f64::NEG_INFINITY; records], tick: 0, resident: BTreeSet::new() }
    }

    /// With the default half-life of a partition of `slots` slots: four times as many accesses.
    pub fn for_slots(slots: usize, records: usize) -> Self {
        Self::new(4.0 * slots.max(1) as f64, records)
    }

    /// Whether an access of `record` now would raise its score above that of `other`.
    pub fn would_outrank(&self, record: RecordIndex, other: RecordIndex) -> bool {
        self.raised(record, self.tick + 1) > self.scores[other.0 as usize]
    }

    /// The score of `record` after an access at `tick`.
    fn raised(&self, record: RecordIndex, tick: u64) -> f64 {
        let now = tick as f64 / self.half_life;
        now + (self.scores[record.0 as usize] - now).exp2().ln_1p() * std::f64::consts::LOG2_E
    }

    fn key(&self, record: RecordIndex) -> (u64, RecordIndex) {
        (self.scores[record.0 as usize].to_bits(), record)
    }
}

impl EvictionPolicy for Lfru {
    fn hit(&mut self, record: RecordIndex) {
        self.remove(record);
        self.insert(record);
    }

    fn pass(&mut self, record: RecordIndex) {
        self.tick += 1;
        self.scores[record.0 as usize] = self.raised(record, self.tick);
    }

    fn insert(&mut self, record: RecordIndex) {
        self.pass(record);
        self.resident.insert(self.key(record));
    }

    fn remove(&mut self, record: RecordIndex) {
        self.resident.remove(&self.key(record));
    }

    fn victim(&self, may_leave: &dyn Fn(RecordIndex) -> bool) -> Option<RecordIndex> {
        self.resident.iter().map(|key| key.1).find(|&r| may_leave(r))
    }

    fn eviction_order(&self) -> Vec<RecordIndex> {
        self.resident.iter().map(|key| key.1).collect()
    }
}
