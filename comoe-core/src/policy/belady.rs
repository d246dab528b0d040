//! Belady's optimum: an oracle that knows every access to come.

use std::cmp::Reverse;

use super::ranked::{Ranked, Ranking};
use crate::store::RecordIndex;

const NEVER: usize = usize::MAX;

/// Evicts the record whose next access lies furthest in the future (Belady 1966, IBM Systems Journal 5(2)): the upper
/// bound that no policy passes, for comparing others with. Ties (never used again) by smaller record number.
///
/// The accesses must arrive in exactly the order that it was made with.
pub type Belady = Ranked<Future>;

/// Ranks by the next access.
#[derive(Debug)]
pub struct Future {
    /// For each access to come, the position of the same record's next one.
    next: Vec<usize>,
}

impl Ranking for Future {
    type Rank = Reverse<usize>;

    fn accessed(&self, _: Reverse<usize>, tick: u64) -> Reverse<usize> {
        Reverse(self.next.get(tick as usize - 1).copied().unwrap_or(NEVER))
    }
}

impl Belady {
    /// For the accesses `future`, in order, over a store of `records` records.
    pub fn new(future: &[RecordIndex], records: usize) -> Self {
        let mut next = vec![NEVER; future.len()];
        let mut seen = vec![NEVER; records];
        for (i, r) in future.iter().enumerate().rev() {
            next[i] = std::mem::replace(&mut seen[r.0 as usize], i);
        }
        Self::by(Future { next }, records)
    }
}
