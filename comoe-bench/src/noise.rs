//! Random numbers that cost next to nothing and depend on their seed alone.

/// SplitMix64 (Steele et al. 2014, OOPSLA).
#[derive(Debug, Clone)]
pub struct Noise(u64);

const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

impl Noise {
    /// The stream of `seed`.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// A stream of its own for each `(seed, part)`.
    pub fn of(seed: u64, part: u64) -> Self {
        let mut mix = Self(seed ^ part.wrapping_mul(0xd134_2543_de82_ef95));
        Self(mix.word())
    }

    /// 64 random bits.
    #[inline(always)]
    pub fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(GOLDEN);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `n`, which is at least 1.
    pub fn below(&mut self, n: usize) -> usize {
        ((u128::from(self.word()) * n as u128) >> 64) as usize
    }

    /// Uniform in -1..1.
    pub fn float(&mut self) -> f32 {
        (self.word() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    /// `n` numbers uniform in -1..1.
    pub fn floats(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.float()).collect()
    }

    /// `k` different numbers below `n`, every subset equally likely. `k` is at most `n`.
    pub fn distinct(&mut self, n: usize, k: usize) -> Vec<u32> {
        let mut chosen: Vec<u32> = Vec::with_capacity(k);
        while chosen.len() < k {
            let next = self.below(n) as u32;
            if !chosen.contains(&next) {
                chosen.push(next);
            }
        }
        chosen
    }

    /// Fills `out` with words passed through `shape`; bytes behind the last whole word stay as they are.
    #[inline(always)]
    pub fn fill(&mut self, out: &mut [u8], shape: impl Fn(u64) -> u64) {
        for word in out.as_chunks_mut::<8>().0 {
            *word = shape(self.word()).to_le_bytes();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_are_distinct_and_uniform() {
        let mut noise = Noise::new(1);
        let mut counts = [0u32; 16];
        for _ in 0..8000 {
            let mut set = noise.distinct(16, 4);
            set.iter().for_each(|&e| counts[e as usize] += 1);
            set.sort_unstable();
            set.dedup();
            assert_eq!(set.len(), 4);
        }
        // 2,000 each, a standard deviation of 39.
        assert!(counts.iter().all(|&c| (1800..2200).contains(&c)), "{counts:?}");
        let mean = noise.floats(10_000).iter().sum::<f32>() / 10_000.0;
        assert!(mean.abs() < 0.03, "{mean}");
        assert_ne!(Noise::of(1, 2).word(), Noise::of(2, 1).word());
    }
}
