//! Least frequently used since the start.

use super::ranked::{Ranked, Ranking};

/// Evicts the record with the fewest accesses since the start (accesses before an eviction count on), ties by the
/// access that is longest ago.
pub type Lfu = Ranked<Uses>;

/// Ranks by count, then by the tick of the last access.
#[derive(Debug)]
pub struct Uses;

impl Ranking for Uses {
    type Rank = (u64, u64);

    fn accessed(&self, (count, _): (u64, u64), tick: u64) -> (u64, u64) {
        (count + 1, tick)
    }
}

impl Lfu {
    /// For a store of `records` records.
    pub fn new(records: usize) -> Self {
        Self::by(Uses, records)
    }
}
