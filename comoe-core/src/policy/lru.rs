//! Least recently used: a doubly linked list threaded through the record numbers.

use super::EvictionPolicy;
use crate::store::RecordIndex;

const NONE: u32 = u32::MAX;

/// Evicts the record whose last access is longest ago. O(1) per access.
#[derive(Debug)]
pub struct Lru {
    /// `(older, newer)` neighbours of each resident record.
    links: Vec<(u32, u32)>,
    oldest: u32,
    newest: u32,
}

impl Lru {
    /// For a store of `records` records.
    pub fn new(records: usize) -> Self {
        Self { links: vec![(NONE, NONE); records], oldest: NONE, newest: NONE }
    }

    fn unlink(&mut self, r: u32) {
        let (older, newer) = self.links[r as usize];
        match older {
            NONE => self.oldest = newer,
            o => self.links[o as usize].1 = newer,
        }
        match newer {
            NONE => self.newest = older,
            n => self.links[n as usize].0 = older,
        }
    }

    fn push_newest(&mut self, r: u32) {
        self.links[r as usize] = (self.newest, NONE);
        match self.newest {
            NONE => self.oldest = r,
            n => self.links[n as usize].1 = r,
        }
        self.newest = r;
    }

    fn iter(&self) -> impl Iterator<Item = RecordIndex> + '_ {
        let next = |&r: &u32| Some(self.links[r as usize].1).filter(|&r| r != NONE);
        std::iter::successors(Some(self.oldest).filter(|&r| r != NONE), next).map(RecordIndex)
    }
}

impl EvictionPolicy for Lru {
    fn hit(&mut self, record: RecordIndex) {
        self.unlink(record.0);
        self.push_newest(record.0);
    }

    fn insert(&mut self, record: RecordIndex) {
        self.push_newest(record.0);
    }

    fn adopt(&mut self, record: RecordIndex) {
        self.push_newest(record.0);
    }

    fn pass(&mut self, _record: RecordIndex) {}

    fn remove(&mut self, record: RecordIndex) {
        self.unlink(record.0);
    }

    fn victim(&self, may_leave: &dyn Fn(RecordIndex) -> bool) -> Option<RecordIndex> {
        self.iter().find(|&r| may_leave(r))
    }

    fn eviction_order(&self) -> Vec<RecordIndex> {
        self.iter().collect()
    }
}
