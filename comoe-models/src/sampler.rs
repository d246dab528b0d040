//! Chooses the next token from logits.

use crate::error::{Error, Result};

/// How the next token is chosen.
///
/// The steps and their order are those of `transformers`: repetition penalty, temperature, top-k, top-p, min-p, then
/// one draw from what is left. Tokens of equal logit are ranked by id, the lowest first.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplerOptions {
    /// 0 chooses the most likely token always (greedy); otherwise logits are divided by it.
    pub temperature: f64,
    /// Keeps the `k` most likely tokens; `None` keeps all.
    pub top_k: Option<usize>,
    /// Keeps the fewest tokens whose probabilities sum to at least this (Holtzman et al. 2019, arXiv 1904.09751);
    /// 1 keeps all.
    pub top_p: f64,
    /// Drops tokens less likely than this fraction of the most likely one (arXiv 2407.01082); 0 keeps all.
    pub min_p: f64,
    /// Divides positive logits of tokens that occurred before, multiplies negative ones (Keskar et al. 2019,
    /// arXiv 1909.05858); 1 changes nothing.
    pub repetition_penalty: f64,
    /// How many of the last tokens count as "before", prompt included; `None` counts all.
    pub repetition_window: Option<usize>,
    /// Start of the random sequence: the same seed, options and logits give the same tokens.
    pub seed: u64,
}

impl Default for SamplerOptions {
    /// Greedy, without penalty.
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: None,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            repetition_window: None,
            seed: 0,
        }
    }
}

impl SamplerOptions {
    /// Checks every value's range.
    ///
    /// # Errors
    /// [`Error::BadOption`], naming the option.
    pub fn check(&self) -> Result<()> {
        let ensure = |ok: bool, option, value: String, expected| {
            if ok { Ok(()) } else { Err(Error::BadOption { option, value, expected }) }
        };
        let (t, p, m, r) = (self.temperature, self.top_p, self.min_p, self.repetition_penalty);
        ensure(t.is_finite() && t >= 0.0, "temperature", t.to_string(), "expected 0 or a positive number")?;
        ensure(self.top_k != Some(0), "top_k", "0".into(), "expected at least 1, or nothing to keep all")?;
        ensure(p > 0.0 && p <= 1.0, "top_p", p.to_string(), "expected more than 0 and at most 1")?;
        ensure((0.0..=1.0).contains(&m), "min_p", m.to_string(), "expected 0 to 1")?;
        ensure(r.is_finite() && r > 0.0, "repetition_penalty", r.to_string(), "expected a positive number")?;
        let w = self.repetition_window;
        ensure(w != Some(0), "repetition_window", "0".into(), "expected at least 1, or nothing to count all")
    }
}

/// A sampler and its random state.
#[derive(Debug, Clone)]
pub struct Sampler {
    options: SamplerOptions,
    random: SplitMix64,
    logits: Vec<f32>,
    ranked: Vec<(u32, f64)>,
}

impl Sampler {
    /// Makes a sampler.
    ///
    /// # Errors
    /// As [`SamplerOptions::check`].
    pub fn new(options: SamplerOptions) -> Result<Self> {
        options.check()?;
        let random = SplitMix64::new(options.seed);
        Ok(Self { options, random, logits: Vec::new(), ranked: Vec::new() })
    }

    /// Chooses a token. `logits` is `[vocab]`; `history` holds the tokens so far, the latest last.
    ///
    /// # Errors
    /// [`Error::BadLogits`] when a logit is NaN or infinite (minus infinity is allowed and never chosen), or none
    /// is left.
    pub fn sample(&mut self, logits: &[f32], history: &[u32]) -> Result<u32> {
        let broken = logits.iter().position(|l| l.is_nan() || *l == f32::INFINITY);
        if let Some(id) = broken {
            return Err(Error::BadLogits { id, value: logits[id] });
        }
        self.logits.clear();
        self.logits.extend_from_slice(logits);
        self.penalise(history);

        let (best, top) = argmax(&self.logits).ok_or(Error::BadLogits { id: 0, value: f32::NEG_INFINITY })?;
        if self.options.temperature == 0.0 {
            return Ok(best);
        }
        // Probabilities relative to the best token's, in f64: no overflow, and a tiny temperature ends as greedy.
        let scale = 1.0 / self.options.temperature;
        self.ranked.clear();
        self.ranked.extend(self.logits.iter().enumerate().filter_map(|(id, &l)| {
            let p = ((f64::from(l) - f64::from(top)) * scale).exp();
            (p > 0.0).then_some((id as u32, p))
        }));
        self.keep_top_k();
        self.keep_top_p();
        // The best token has p = 1, so it always stays.
        self.ranked.retain(|(_, p)| *p >= self.options.min_p);

        let total: f64 = self.ranked.iter().map(|(_, p)| p).sum();
        let mut left = self.random.unit() * total;
        for &(id, p) in &self.ranked {
            left -= p;
            if left < 0.0 {
                return Ok(id);
            }
        }
        // Rounding can leave a crumb: it belongs to the last candidate.
        Ok(self.ranked.last().map_or(best, |(id, _)| *id))
    }

    fn penalise(&mut self, history: &[u32]) {
        let penalty = self.options.repetition_penalty as f32;
        if penalty == 1.0 {
            return;
        }
        let window = self.options.repetition_window.unwrap_or(history.len()).min(history.len());
        let mut seen = history[history.len() - window..].to_vec();
        seen.sort_unstable();
        seen.dedup();
        for id in seen {
            if let Some(l) = self.logits.get_mut(id as usize) {
                *l = if *l > 0.0 { *l / penalty } else { *l * penalty };
            }
        }
    }

    fn keep_top_k(&mut self) {
        let Some(k) = self.options.top_k.filter(|k| *k < self.ranked.len()) else { return };
        self.ranked.select_nth_unstable_by(k - 1, by_rank);
        self.ranked.truncate(k);
        // Back to id order, so that the draw does not depend on how the selection shuffled.
        self.ranked.sort_unstable_by_key(|(id, _)| *id);
    }

    fn keep_top_p(&mut self) {
        if self.options.top_p >= 1.0 {
            return;
        }
        let total: f64 = self.ranked.iter().map(|(_, p)| p).sum();
        let wanted = self.options.top_p * total;
        // A token below this cannot be in the nucleus: all such tokens together do not reach what it leaves over.
        let floor = (total - wanted) / self.ranked.len() as f64;
        let mut nucleus: Vec<_> = self.ranked.iter().copied().filter(|(_, p)| *p >= floor).collect();
        nucleus.sort_unstable_by(by_rank);
        let mut sum = 0.0;
        let keep = nucleus.iter().take_while(|(_, p)| {
            let before = sum;
            sum += p;
            before < wanted
        });
        let keep = keep.count().max(1);
        nucleus.truncate(keep);
        self.ranked = nucleus;
    }
}

fn by_rank(a: &(u32, f64), b: &(u32, f64)) -> std::cmp::Ordering {
    b.1.total_cmp(&a.1).then(a.0.cmp(&b.0))
}

/// The first largest logit, unless all are minus infinity.
fn argmax(logits: &[f32]) -> Option<(u32, f32)> {
    let mut best: Option<(u32, f32)> = None;
    for (id, &l) in logits.iter().enumerate() {
        if l > best.map_or(f32::NEG_INFINITY, |(_, b)| b) {
            best = Some((id as u32, l));
        }
    }
    best
}

/// SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators"): small, and its sequence
/// will never change under us.
#[derive(Debug, Clone)]
pub(crate) struct SplitMix64(u64);

impl SplitMix64 {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in 0..1, 53 bits.
    pub(crate) fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sampler(options: SamplerOptions) -> Sampler {
        Sampler::new(options).unwrap()
    }

    /// How often each of the tokens is drawn in `n` tries.
    fn counts(options: SamplerOptions, logits: &[f32], n: usize) -> Vec<usize> {
        let mut s = sampler(options);
        let mut counts = vec![0; logits.len()];
        for _ in 0..n {
            counts[s.sample(logits, &[]).unwrap() as usize] += 1;
        }
        counts
    }

    #[test]
    fn splitmix64_is_the_published_sequence() {
        // First outputs for seed 1234567, from the authors' reference implementation.
        let mut r = SplitMix64::new(1_234_567);
        assert_eq!([r.next(), r.next()], [6_457_827_717_110_365_317, 3_203_168_211_198_807_973]);
    }

    #[test]
    fn greedy_takes_the_lowest_id_among_equals() {
        let mut s = sampler(SamplerOptions::default());
        assert_eq!(s.sample(&[1.0, 3.0, 3.0, -1.0], &[]).unwrap(), 1);
        assert_eq!(s.sample(&[f32::NEG_INFINITY, -2.0], &[]).unwrap(), 1);
    }

    #[test]
    fn broken_logits_are_refused() {
        let mut s = sampler(SamplerOptions { temperature: 1.0, ..Default::default() });
        for bad in [f32::NAN, f32::INFINITY] {
            assert!(matches!(s.sample(&[0.0, bad], &[]), Err(Error::BadLogits { id: 1, .. })));
        }
        assert!(s.sample(&[f32::NEG_INFINITY; 3], &[]).is_err());
        assert!(s.sample(&[], &[]).is_err());
    }

    #[test]
    fn every_bad_option_is_refused_by_name() {
        let d = SamplerOptions::default;
        for (name, o) in [
            ("temperature", SamplerOptions { temperature: -0.1, ..d() }),
            ("temperature", SamplerOptions { temperature: f64::NAN, ..d() }),
            ("temperature", SamplerOptions { temperature: f64::INFINITY, ..d() }),
            ("top_k", SamplerOptions { top_k: Some(0), ..d() }),
            ("top_p", SamplerOptions { top_p: 0.0, ..d() }),
            ("top_p", SamplerOptions { top_p: 1.01, ..d() }),
            ("top_p", SamplerOptions { top_p: f64::NAN, ..d() }),
            ("min_p", SamplerOptions { min_p: -0.1, ..d() }),
            ("min_p", SamplerOptions { min_p: f64::NAN, ..d() }),
            ("repetition_penalty", SamplerOptions { repetition_penalty: 0.0, ..d() }),
            ("repetition_window", SamplerOptions { repetition_window: Some(0), ..d() }),
        ] {
            let e = Sampler::new(o).unwrap_err().to_string();
            assert!(e.starts_with(name), "{name}: {e}");
        }
    }

    #[test]
    fn draws_follow_the_probabilities() {
        let p = [0.5f32, 0.3, 0.15, 0.05];
        let logits = p.map(f32::ln);
        let n = 40_000;
        let o = SamplerOptions { temperature: 1.0, seed: 7, ..Default::default() };
        for (count, p) in counts(o, &logits, n).iter().zip(p) {
            // Six standard deviations of a binomial.
            let sigma = (n as f64 * f64::from(p) * (1.0 - f64::from(p))).sqrt();
            assert!((*count as f64 - n as f64 * f64::from(p)).abs() < 6.0 * sigma, "{count} of {n} at {p}");
        }
    }

    #[test]
    fn each_filter_keeps_exactly_what_it_says() {
        let logits = [0.05f32, 0.5, 0.15, 0.3].map(f32::ln);
        let o = |top_k, top_p, min_p| SamplerOptions {
            temperature: 1.0,
            top_k,
            top_p,
            min_p,
            ..Default::default()
        };
        let drawn = |o| counts(o, &logits, 2000).iter().map(|c| *c > 0).collect::<Vec<_>>();
        assert_eq!(drawn(o(None, 1.0, 0.0)), [true, true, true, true]);
        assert_eq!(drawn(o(Some(2), 1.0, 0.0)), [false, true, false, true]);
        assert_eq!(drawn(o(None, 0.75, 0.0)), [false, true, false, true]);
        assert_eq!(drawn(o(None, 0.85, 0.0)), [false, true, true, true]);
        assert_eq!(drawn(o(None, 1.0, 0.2)), [false, true, true, true]);
        assert_eq!(drawn(o(None, 1e-9, 0.0)), [false, true, false, false]);
        // Equal probabilities: the lowest ids stay.
        let tied = counts(o(Some(2), 1.0, 0.0), &[1.0; 5], 500);
        assert!(tied[0] > 0 && tied[1] > 0 && tied[2..].iter().all(|c| *c == 0), "{tied:?}");
    }

    #[test]
    fn repetition_is_penalised_within_the_window() {
        let o = |window| SamplerOptions {
            repetition_penalty: 2.0,
            repetition_window: window,
            ..Default::default()
        };
        // 4/2 < 3: the second token wins once the first has occurred; a negative logit falls further.
        assert_eq!(sampler(o(None)).sample(&[4.0, 3.0], &[0]).unwrap(), 1);
        assert_eq!(sampler(o(Some(1))).sample(&[4.0, 3.0], &[0, 5]).unwrap(), 0);
        assert_eq!(sampler(o(None)).sample(&[-1.0, -1.5], &[0, 0]).unwrap(), 1);
        assert_eq!(sampler(o(None)).sample(&[4.0, 3.0], &[99]).unwrap(), 0);
    }

    proptest! {
        #[test]
        fn a_seed_fixes_the_tokens_and_filters_never_empty_the_choice(
            logits in prop::collection::vec(-30f32..30.0, 1..60),
            temperature in 0.0f64..3.0,
            top_k in prop::option::of(1usize..70),
            top_p in 0.001f64..=1.0,
            min_p in 0.0f64..=1.0,
            seed: u64,
        ) {
            let o = SamplerOptions { temperature, top_k, top_p, min_p, seed, ..Default::default() };
            let draw = || {
                let mut s = sampler(o.clone());
                (0..8).map(|_| s.sample(&logits, &[]).unwrap()).collect::<Vec<_>>()
            };
            let first = draw();
            prop_assert_eq!(&first, &draw());
            // Nothing outside the top-k (by rank) is ever drawn.
            let mut ranked: Vec<u32> = (0..logits.len() as u32).collect();
            ranked.sort_by(|a, b| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b)));
            let k = top_k.unwrap_or(logits.len()).min(logits.len());
            for id in first {
                prop_assert!(ranked[..k].contains(&id));
            }
        }
    }
}
