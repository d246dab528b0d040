//! What policies have in common that give every record a rank: the lowest leaves.

use std::collections::BTreeSet;

use super::{Decayed, EvictionPolicy};
use crate::store::RecordIndex;

/// How accesses move a record up.
pub trait Ranking: Send {
    /// Of a record; the default before its first access.
    type Rank: Ord + Copy + Default + Send;

    /// The rank of a record, which was `rank`, after the partition's access number `tick`, from 1.
    fn accessed(&self, rank: Self::Rank, tick: u64) -> Self::Rank;

    /// The ranks as a device can use them, with what it must know to go on; `None` where none knows how.
    fn decayed<'a>(&self, _tick: u64, _ranks: &'a [Self::Rank]) -> Option<Decayed<'a>> {
        None
    }

    /// The ranks to be replaced by a device's.
    fn scores_mut(_ranks: &mut [Self::Rank]) -> Option<&mut [u64]> {
        None
    }
}

/// Evicts the record with the lowest rank, ties by smaller record number. A record keeps its rank while it is not
/// resident. O(log n) per access.
#[derive(Debug)]
pub struct Ranked<R: Ranking> {
    pub(super) ranking: R,
    pub(super) ranks: Vec<R::Rank>,
    pub(super) tick: u64,
    resident: BTreeSet<(R::Rank, RecordIndex)>,
}

impl<R: Ranking> Ranked<R> {
    pub(super) fn by(ranking: R, records: usize) -> Self {
        Self { ranking, ranks: vec![R::Rank::default(); records], tick: 0, resident: BTreeSet::new() }
    }

    fn key(&self, record: RecordIndex) -> (R::Rank, RecordIndex) {
        (self.ranks[record.0 as usize], record)
    }
}

impl<R: Ranking> EvictionPolicy for Ranked<R> {
    fn hit(&mut self, record: RecordIndex) {
        self.remove(record);
        self.insert(record);
    }

    fn pass(&mut self, record: RecordIndex) {
        self.tick += 1;
        let rank = &mut self.ranks[record.0 as usize];
        *rank = self.ranking.accessed(*rank, self.tick);
    }

    fn insert(&mut self, record: RecordIndex) {
        self.pass(record);
        self.adopt(record);
    }

    fn adopt(&mut self, record: RecordIndex) {
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

    fn decayed(&self) -> Option<Decayed<'_>> {
        self.ranking.decayed(self.tick, &self.ranks)
    }

    fn set_decayed(&mut self, tick: u64, scores: &[u64]) {
        debug_assert!(self.resident.is_empty(), "ranks of resident records are keys");
        if let Some(own) = R::scores_mut(&mut self.ranks) {
            own.copy_from_slice(scores);
            self.tick = tick;
        }
    }
}
