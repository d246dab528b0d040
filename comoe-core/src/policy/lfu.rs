//! Least frequently used since the start.

use std::collections::BTreeSet;

use super::EvictionPolicy;
use crate::store::RecordIndex;

/// Evicts the record with the fewest accesses since the start (accesses before an eviction count on), ties by the
/// access that is longest ago. O(log n) per access.
#[derive(Debug)]
pub struct Lfu {
    /// `(accesses, tick of the last one)` of every record.
    uses: Vec<(u64, u64)>,
    tick: u64,
    resident: BTreeSet<(u64, u64, RecordIndex)>,
}

impl Lfu {
    /// For a store of `records` records.
    pub fn new(records: usize) -> Self {
        Self { uses: vec![(0, 0); records], tick: 0, resident: BTreeSet::new() }
    }

    fn key(&self, record: RecordIndex) -> (u64, u64, RecordIndex) {
        let (count, last) = self.uses[record.0 as usize];
        (count, last, record)
    }
}

impl EvictionPolicy for Lfu {
    fn hit(&mut self, record: RecordIndex) {
        self.remove(record);
        self.insert(record);
    }

    fn pass(&mut self, record: RecordIndex) {
        self.tick += 1;
        let uses = &mut self.uses[record.0 as usize];
        *uses = (uses.0 + 1, self.tick);
    }

    fn insert(&mut self, record: RecordIndex) {
        self.pass(record);
        self.resident.insert(self.key(record));
    }

    fn remove(&mut self, record: RecordIndex) {
        self.resident.remove(&self.key(record));
    }

    fn victim(&self, may_leave: &dyn Fn(RecordIndex) -> bool) -> Option<RecordIndex> {
        self.resident.iter().map(|key| key.2).find(|&r| may_leave(r))
    }

    fn eviction_order(&self) -> Vec<RecordIndex> {
        self.resident.iter().map(|key| key.2).collect()
    }
}
