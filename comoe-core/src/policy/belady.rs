//! Belady's optimum: an oracle that knows every access to come.

use std::collections::BTreeSet;

use super::EvictionPolicy;
use crate::store::RecordIndex;

const NEVER: usize = usize::MAX;

/// Evicts the record whose next access lies furthest in the future (Belady 1966, IBM Systems Journal 5(2)): the upper
/// bound that no policy passes, for comparing others with. Ties (never used again) by smaller record number.
///
/// The accesses must arrive in exactly the order that it was made with. O(log n) per access.
#[derive(Debug)]
pub struct Belady {
    /// For each access of the future, the position of the same record's next one.
    next: Vec<usize>,
    at: usize,
    /// Next access of every resident record.
    next_of: Vec<usize>,
    /// Furthest first.
    resident: BTreeSet<(std::cmp::Reverse<usize>, RecordIndex)>,
}

impl Belady {
    /// For the accesses `future`, in order, over a store of `records` records.
    pub fn new(future: &[RecordIndex], records: usize) -> Self {
        let mut next = vec![NEVER; future.len()];
        let mut seen = vec![NEVER; records];
        for (i, r) in future.iter().enumerate().rev() {
            next[i] = std::mem::replace(&mut seen[r.0 as usize], i);
        }
        Self { next, at: 0, next_of: vec![NEVER; records], resident: BTreeSet::new() }
    }
}

impl EvictionPolicy for Belady {
    fn hit(&mut self, record: RecordIndex) {
        self.remove(record);
        self.insert(record);
    }

    fn pass(&mut self, record: RecordIndex) {
        self.next_of[record.0 as usize] = self.next.get(self.at).copied().unwrap_or(NEVER);
        self.at += 1;
    }

    fn insert(&mut self, record: RecordIndex) {
        self.pass(record);
        self.resident.insert((std::cmp::Reverse(self.next_of[record.0 as usize]), record));
    }

    fn remove(&mut self, record: RecordIndex) {
        self.resident.remove(&(std::cmp::Reverse(self.next_of[record.0 as usize]), record));
    }

    fn victim(&self, may_leave: &dyn Fn(RecordIndex) -> bool) -> Option<RecordIndex> {
        self.resident.iter().map(|key| key.1).find(|&r| may_leave(r))
    }

    fn eviction_order(&self) -> Vec<RecordIndex> {
        self.resident.iter().map(|key| key.1).collect()
    }
}
