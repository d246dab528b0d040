//! Frequency with decay and recency.

use std::f64::consts::{LN_2, LOG2_E};

use super::Decayed;
use super::ranked::{Ranked, Ranking};
use crate::store::RecordIndex;

/// Evicts the record with the smallest decayed count of accesses.
///
/// An access at tick `t` is worth `2^(-(now - t) / half_life)` at tick `now`, ticks being the accesses of the
/// partition; a record's score is the sum over all its accesses, those before an eviction too. A short half-life
/// behaves like LRU, an endless one like LFU (the "combined recency and frequency" of Lee et al., LRFU, IEEE
/// Transactions on Computers 50(12), 2001).
///
/// All scores decay alike, so their order changes only by accesses: what is kept is `log2` of the score with every
/// access valued at tick 0, `s' = log2(2^s + 2^(t / half_life))`. Ties by smaller record number.
pub type Lfru = Ranked<HalfLife>;

/// Ranks by the bits of that logarithm, whose order is its order since it is positive; 0 before the first access.
#[derive(Debug)]
pub struct HalfLife(f64);

impl Ranking for HalfLife {
    type Rank = u64;

    fn accessed(&self, score: u64, tick: u64) -> u64 {
        let now = tick as f64 / self.0;
        if score == 0 { now.to_bits() } else { log2_of_sum(f64::from_bits(score), now).to_bits() }
    }

    fn decayed<'a>(&self, tick: u64, scores: &'a [u64]) -> Option<Decayed<'a>> {
        Some(Decayed { half_life: self.0, tick, scores })
    }

    fn scores_mut(scores: &mut [u64]) -> Option<&mut [u64]> {
        Some(scores)
    }
}

impl Lfru {
    /// With a half-life of `half_life` accesses of the partition, for a store of `records` records.
    ///
    /// # Panics
    /// When `half_life` is not positive.
    pub fn new(half_life: f64, records: usize) -> Self {
        assert!(half_life > 0.0, "half-life {half_life}");
        Self::by(HalfLife(half_life), records)
    }

    /// With the default half-life of a partition of `slots` slots: four times as many accesses.
    pub fn for_slots(slots: usize, records: usize) -> Self {
        Self::new(4.0 * slots.max(1) as f64, records)
    }

    /// Whether an access of `record` now would raise its score above that of `other`.
    pub fn would_outrank(&self, record: RecordIndex, other: RecordIndex) -> bool {
        let raised = self.ranking.accessed(self.ranks[record.0 as usize], self.tick + 1);
        raised > self.ranks[other.0 as usize]
    }
}

/// Below this difference the smaller power does not show in the sum.
const NOTHING: f64 = -64.0;
/// `1 / k!` for `exp` on `-0.35..0.35`.
const EXP: [f64; 13] = [
    1.0,
    1.0,
    1.0 / 2.0,
    1.0 / 6.0,
    1.0 / 24.0,
    1.0 / 120.0,
    1.0 / 720.0,
    1.0 / 5040.0,
    1.0 / 40320.0,
    1.0 / 362880.0,
    1.0 / 3628800.0,
    1.0 / 39916800.0,
    1.0 / 479001600.0,
];
/// `1 / (2k + 1)` for `atanh` on `0..1/3`.
const ATANH: [f64; 14] = [
    1.0,
    1.0 / 3.0,
    1.0 / 5.0,
    1.0 / 7.0,
    1.0 / 9.0,
    1.0 / 11.0,
    1.0 / 13.0,
    1.0 / 15.0,
    1.0 / 17.0,
    1.0 / 19.0,
    1.0 / 21.0,
    1.0 / 23.0,
    1.0 / 25.0,
    1.0 / 27.0,
];

/// `log2(2^a + 2^b)` out of operations that IEEE 754 defines to the last bit, because kernels/resolve.cu decides with
/// the same ones, one by one: `max + log2(1 + 2^-d)`, with 2^-d as a power of two times a series, and the logarithm as
/// `2 atanh(t / (2 + t))`.
fn log2_of_sum(a: f64, b: f64) -> f64 {
    let (high, low) = if a > b { (a, b) } else { (b, a) };
    let difference = low - high;
    if difference < NOTHING {
        return high;
    }
    let series = |coefficients: &[f64], x: f64| coefficients.iter().rev().fold(0.0, |sum, c| sum * x + c);
    let whole = (difference + 0.5).floor();
    let power = series(&EXP, (difference - whole) * LN_2);
    let t = power * f64::from_bits(((1023 + whole as i64) as u64) << 52);
    let u = t / (2.0 + t);
    high + (2.0 * LOG2_E) * (u * series(&ATANH, u * u))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_of_powers_are_those_of_the_library() {
        for a in [0.0, 0.017, 3.5, 700.25, 1e6] {
            for step in 0..=2000 {
                let b = a + f64::from(step) * 0.033;
                let want = b + (a - b).exp2().ln_1p() * LOG2_E;
                let got = log2_of_sum(a, b);
                assert!((got - want).abs() <= 1e-14 + 4e-16 * want, "{a} {b}: {got} {want}");
                assert_eq!(got, log2_of_sum(b, a));
            }
        }
    }
}
