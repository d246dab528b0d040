//! Frequency with a short and a long memory.

use super::EvictionPolicy;
use crate::store::RecordIndex;

/// Evicts the record with the smallest blend of two decayed frequencies.
///
/// A frequency is an exponentially decayed count of a record's accesses, as in [`Lfru`](super::Lfru), divided by what
/// the count of a record accessed at every tick would come to: `sum over its accesses of (1 - 2^(-1/h)) * 2^(-age/h)`
/// for a half-life of `h` ticks, ticks being the accesses of the partition. The score is the short memory's frequency
/// plus [`Self::LONG_WEIGHT`] times the long memory's. One half-life must choose: short ones follow a text that drifts
/// where few slots hold little more than the set at hand, long ones tell lasting favourites apart where there are many.
/// Of the two, the one that has something to say about the candidates for leaving decides: among records that were all
/// used just now it is the long one.
///
/// Accesses before an eviction count on. Ties by smaller record number. A hit is O(1); a victim is found by one pass
/// over the resident records, two multiplications each.
#[derive(Debug)]
pub struct Blend {
    short: Memory,
    long: Memory,
    resident: Vec<RecordIndex>,
    /// Place of each resident record in `resident`.
    place: Vec<u32>,
}

/// Decayed counts of all records, scaled up by the weight of an access now, so that no ageing pass is needed.
#[derive(Debug)]
struct Memory {
    counts: Vec<f64>,
    /// What an access now counts.
    weight: f64,
    /// Its growth per tick.
    growth: f64,
}

/// Beyond this, counts are scaled down: what is left of older ones by then is far below any difference that matters.
const RESCALE: f64 = 1e150;

impl Memory {
    fn new(half_life: f64, records: usize) -> Self {
        Self { counts: vec![0.0; records], weight: 1.0, growth: half_life.recip().exp2() }
    }

    fn access(&mut self, record: RecordIndex) {
        self.weight *= self.growth;
        if self.weight > RESCALE {
            self.counts.iter_mut().for_each(|c| *c /= self.weight);
            self.weight = 1.0;
        }
        self.counts[record.0 as usize] += self.weight;
    }

    /// From a count to a frequency.
    fn scale(&self) -> f64 {
        (1.0 - self.growth.recip()) / self.weight
    }
}

impl Blend {
    /// Half-life of the short memory, in tokens. This one and the two below were fitted together on the first halves of
    /// three recorded traces (comoe-bench/RESULTS-routing.md).
    pub const SHORT_TOKENS: f64 = 1.25;
    /// Half-life of the long memory, in tokens.
    pub const LONG_TOKENS: f64 = 14.0;
    /// Weight of the long memory's frequency.
    pub const LONG_WEIGHT: f64 = 4.0;

    /// For a store of `records` records, to whose partition a token makes `per_token` accesses.
    pub fn new(records: usize, per_token: usize) -> Self {
        let ticks = per_token.max(1) as f64;
        Self {
            short: Memory::new(Self::SHORT_TOKENS * ticks, records),
            long: Memory::new(Self::LONG_TOKENS * ticks, records),
            resident: Vec::new(),
            place: vec![0; records],
        }
    }

    /// Scores resident records as they are now.
    fn score(&self) -> impl Fn(RecordIndex) -> f64 + '_ {
        let (short, long) = (self.short.scale(), self.long.scale() * Self::LONG_WEIGHT);
        move |r| self.short.counts[r.0 as usize] * short + self.long.counts[r.0 as usize] * long
    }
}

impl EvictionPolicy for Blend {
    fn hit(&mut self, record: RecordIndex) {
        self.pass(record);
    }

    fn pass(&mut self, record: RecordIndex) {
        self.short.access(record);
        self.long.access(record);
    }

    fn insert(&mut self, record: RecordIndex) {
        self.pass(record);
        self.adopt(record);
    }

    fn adopt(&mut self, record: RecordIndex) {
        self.place[record.0 as usize] = self.resident.len() as u32;
        self.resident.push(record);
    }

    fn remove(&mut self, record: RecordIndex) {
        let at = self.place[record.0 as usize];
        self.resident.swap_remove(at as usize);
        if let Some(moved) = self.resident.get(at as usize) {
            self.place[moved.0 as usize] = at;
        }
    }

    fn victim(&self, may_leave: &dyn Fn(RecordIndex) -> bool) -> Option<RecordIndex> {
        let score = self.score();
        let mut least: Option<(f64, RecordIndex)> = None;
        for &record in &self.resident {
            let key = (score(record), record);
            // Few are below all before them, so few are asked whether they may leave.
            if least.is_none_or(|least| key < least) && may_leave(record) {
                least = Some(key);
            }
        }
        least.map(|l| l.1)
    }

    fn eviction_order(&self) -> Vec<RecordIndex> {
        let score = self.score();
        let mut order = self.resident.clone();
        order.sort_unstable_by(|&a, &b| score(a).total_cmp(&score(b)).then(a.cmp(&b)));
        order
    }
}
