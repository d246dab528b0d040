//! How fast tokens may come: bytes that a token moves and reads, over bandwidths.

use serde::{Deserialize, Serialize};

/// What a layer of a decode step takes beside reading its weights, in microseconds: measured on an H200 with
/// Qwen3-30B-A3B's shape and no miss, 2.34 to 2.38 ms a token less 3.1 GB at 4.5 TB/s, over 48 layers, is 34 to 35; beside
/// records that are read over the link some of it is hidden (comoe-bench/RESULTS.md).
pub const STEP_OVERHEAD_US: f64 = 32.0;

/// The slow end of a range takes so much longer than computed. Misses on the link took 1.00 to 1.15 times their bytes over
/// its bandwidth there.
const SLOW: f64 = 1.25;

/// Share of a layer's experts that has a slot, and hits in percent, on recorded routing: `aged` with layers apart
/// (comoe-bench/RESULTS-routing.md).
type Curve = &'static [(f64, f64)];
/// Qwen3-30B-A3B, top-6 of 128.
const LARGE: Curve =
    &[(0.0625, 45.88), (0.125, 64.30), (0.1875, 75.28), (0.25, 82.66), (0.375, 91.98), (0.5, 95.90)];
/// comoe-tiny, top-2 of 16.
const SMALL: Curve =
    &[(0.125, 24.50), (0.1875, 35.34), (0.25, 43.82), (0.375, 56.72), (0.5, 67.83), (0.75, 86.53)];

/// Hits per access, between the two: 0 to 1.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct HitRates {
    /// At worst.
    pub low: f64,
    /// At best.
    pub high: f64,
}

impl HitRates {
    /// One that is known.
    pub fn known(rate: f64) -> Self {
        Self { low: rate, high: rate }
    }

    /// What may be expected when `share` of the experts have slots: from what comoe-tiny's recorded routing gives, whose 16
    /// experts a layer are used much alike, to what Qwen3-30B-A3B's does.
    pub fn assumed(share: f64) -> Self {
        Self { low: on(SMALL, share), high: on(LARGE, share) }
    }
}

/// A curve from (0, 0) to (1, 100), straight between its points, as a rate.
fn on(curve: Curve, share: f64) -> f64 {
    let share = share.clamp(0.0, 1.0);
    let mut from = (0.0, 0.0);
    for &to in curve.iter().chain(&[(1.0, 100.0)]) {
        if share <= to.0 {
            let part = (share - from.0) / (to.0 - from.0);
            return (from.1 + part * (to.1 - from.1)) / 100.0;
        }
        from = to;
    }
    1.0
}

/// What a machine can move, in GB/s (10^9 bytes).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Bandwidths {
    /// From host memory to the device.
    pub link: f64,
    /// The device's own memory.
    pub memory: f64,
}

/// Bytes that a token of every sequence makes a step move and read.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct TokenBytes {
    /// Dense weights and keys and values that the step reads.
    pub dense: u64,
    /// Experts that the step reads, hits and misses.
    pub experts: u64,
    /// Layers.
    pub layers: usize,
    /// Sequences side by side, a token of each.
    pub batch: usize,
}

/// A stated range of speeds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct TokensPerSecond {
    /// At worst.
    pub low: f64,
    /// At best.
    pub high: f64,
}

impl TokenBytes {
    /// Bytes that a step brings to the device at this hit rate.
    pub fn missed(&self, hit_rate: f64) -> f64 {
        self.experts as f64 * (1.0 - hit_rate.clamp(0.0, 1.0))
    }

    /// Tokens a second of all sequences together. Reading what is there, what every layer takes besides
    /// ([`STEP_OVERHEAD_US`]) and bringing what is missing follow each other; at worst, hits are at their worst and all
    /// takes a quarter longer.
    pub fn tokens_per_second(&self, hits: HitRates, of: Bandwidths) -> TokensPerSecond {
        let seconds = |rate: f64| {
            let read = self.dense as f64 + self.experts as f64;
            read / (of.memory * 1e9)
                + self.layers as f64 * STEP_OVERHEAD_US * 1e-6
                + self.missed(rate) / (of.link * 1e9)
        };
        let speed = |rate, slower: f64| self.batch as f64 / (seconds(rate) * slower);
        TokensPerSecond { low: speed(hits.low, SLOW), high: speed(hits.high, 1.0) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hit_rates_are_the_recorded_ones_and_grow_with_the_share() {
        let at = HitRates::assumed;
        assert!((at(0.25).high - 0.8266).abs() < 1e-12 && (at(0.5).low - 0.6783).abs() < 1e-12);
        assert_eq!((at(0.0), at(1.0)), (HitRates::known(0.0), HitRates::known(1.0)));
        assert_eq!(at(7.0), HitRates::known(1.0));
        let rates: Vec<HitRates> = (0..=100).map(|i| at(f64::from(i) / 100.0)).collect();
        assert!(rates.windows(2).all(|w| w[0].low <= w[1].low && w[0].high <= w[1].high));
        assert!(rates.iter().all(|r| r.low <= r.high));
    }

    /// Figures of comoe-bench/RESULTS.md, H200: Qwen3-30B-A3B's shape in INT4, from position 512 on.
    #[test]
    fn measured_speeds_lie_in_the_range() {
        let h200 = Bandwidths { link: 51.2, memory: 4500.0 };
        let step = |top_k: u64| TokenBytes {
            dense: 2_400_000_000,
            experts: 48 * top_k * 2_509_824,
            layers: 48,
            batch: 1,
        };
        for (top_k, hits, measured) in
            [(6, 1.0, 420.8), (6, 0.978, 367.8), (6, 0.824, 202.3), (6, 0.614, 127.6), (8, 0.0, 47.3)]
        {
            let range = step(top_k).tokens_per_second(HitRates::known(hits), h200);
            assert!(range.low <= measured && measured <= range.high, "{measured}: {range:?}");
        }
    }
}
