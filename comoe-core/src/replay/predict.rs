//! How good would guesses have been?

use std::fmt;
use std::str::FromStr;

use super::Partition;
use crate::error::Error;
use crate::policy::PolicyKind;
use crate::predict::{Combined, Correlation, Frequency, Predictor, PreviousToken, Scored};
use crate::trace::{Phase, Trace};

/// The predictors that can be tried on a trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PredictorKind {
    /// [`PreviousToken`].
    Previous,
    /// [`Frequency`].
    Frequency,
    /// [`Correlation`].
    Correlation,
    /// [`Combined`].
    Combined,
}

impl PredictorKind {
    /// Every predictor.
    pub const ALL: [Self; 4] = [Self::Previous, Self::Frequency, Self::Correlation, Self::Combined];

    /// Makes the predictor for layers with so many `experts` each, `depth` layers ahead.
    ///
    /// # Panics
    /// When `depth` is 0.
    pub fn build(self, experts: &[usize], depth: usize) -> Box<dyn Predictor> {
        match self {
            Self::Previous => Box::new(PreviousToken::new()),
            Self::Frequency => Box::new(Frequency::new(experts)),
            Self::Correlation => Box::new(Correlation::new(experts, depth)),
            Self::Combined => Box::new(Combined::new(experts, depth)),
        }
    }
}

impl fmt::Display for PredictorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Previous => "previous",
            Self::Frequency => "frequency",
            Self::Correlation => "correlation",
            Self::Combined => "combined",
        })
    }
}

impl FromStr for PredictorKind {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self, Error> {
        Self::ALL.into_iter().find(|p| p.to_string() == s).ok_or_else(|| Error::BadArgument {
            what: "predictor",
            reason: format!("{s:?} is unknown: use previous, frequency, correlation or combined"),
        })
    }
}

/// What is tried.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PredictOptions {
    /// Who guesses.
    pub predictor: PredictorKind,
    /// How many layers ahead, at least 1.
    pub depth: usize,
    /// Guesses per layer step.
    pub k: usize,
    /// Slots of each layer's LRU, whose misses are what a prefetch could save.
    pub slots: usize,
}

/// What guesses were worth, over generated tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PredictScore {
    /// Accesses.
    pub accesses: u64,
    /// Accesses that were among the guesses.
    pub guessed: u64,
    /// Accesses that the LRU missed.
    pub misses: u64,
    /// Misses that were among the guesses.
    pub misses_guessed: u64,
    /// Bytes of guessed records that were not resident and were used.
    pub useful_bytes: u64,
    /// Bytes of guessed records that were not resident and were not used.
    pub wasted_bytes: u64,
}

impl PredictScore {
    /// Guessed accesses per access, 0 to 1.
    pub fn recall(&self) -> f64 {
        ratio(self.guessed, self.accesses)
    }

    /// Guessed misses per miss, 0 to 1.
    pub fn recall_on_misses(&self) -> f64 {
        ratio(self.misses_guessed, self.misses)
    }

    /// Bytes wasted per byte useful; `None` when none was useful.
    pub fn wasted_per_useful(&self) -> Option<f64> {
        (self.useful_bytes > 0).then(|| ratio(self.wasted_bytes, self.useful_bytes))
    }

    fn add(&mut self, other: &Self) {
        self.accesses += other.accesses;
        self.guessed += other.guessed;
        self.misses += other.misses;
        self.misses_guessed += other.misses_guessed;
        self.useful_bytes += other.useful_bytes;
        self.wasted_bytes += other.wasted_bytes;
    }
}

fn ratio(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

/// Tries a predictor on a trace; see [`recall_by_layer`].
pub fn evaluate(trace: &Trace, options: &PredictOptions) -> PredictScore {
    let mut sum = PredictScore::default();
    recall_by_layer(trace, options).iter().for_each(|l| sum.add(l));
    sum
}

/// Tries a predictor on a trace and counts by layer. The guess for a layer is made when the layer `depth` before it (of
/// the token before, for the first layers) has been routed, and nothing later is known.
pub fn recall_by_layer(trace: &Trace, options: &PredictOptions) -> Vec<PredictScore> {
    let entries = trace.info().directory.layers();
    let (layers, tokens) = (entries.len(), trace.tokens().len());
    let experts: Vec<usize> = entries.iter().map(|e| e.experts).collect();
    let depth = options.depth.max(1);
    let mut predictor = options.predictor.build(&experts, depth);
    let mut caches: Vec<Partition> = experts
        .iter()
        .map(|&n| {
            let slots = options.slots.min(n);
            Partition::new(PolicyKind::Lru.build(slots, n, 1), n, slots)
        })
        .collect();
    let mut scores = vec![PredictScore::default(); layers];
    let mut guesses: Vec<Scored> = Vec::new();
    // Steps are (token, layer) pairs in order; while step `at` is scored, steps up to `at - depth` have been told.
    let mut told = 0;
    for at in 0..tokens * layers {
        while told + depth <= at {
            let (token, layer) = (told / layers, told % layers);
            let set = trace.chosen(token, layer);
            if !set.is_empty() {
                predictor.observe(layer, set, set.len());
            }
            told += 1;
        }
        let (token, layer) = (at / layers, at % layers);
        let set = trace.chosen(token, layer);
        if trace.tokens()[token].phase == Phase::Decode {
            predictor.predict(layer, &mut guesses);
            guesses.truncate(options.k);
            let (score, cache) = (&mut scores[layer], &caches[layer]);
            let bytes = entries[layer].record_bytes as u64;
            let guessed = |e: u32| guesses.iter().any(|g| g.expert == e);
            for &e in set {
                score.accesses += 1;
                score.guessed += u64::from(guessed(e));
                if !cache.holds(e) {
                    score.misses += 1;
                    score.misses_guessed += u64::from(guessed(e));
                }
            }
            for guess in guesses.iter().filter(|g| !cache.holds(g.expert)) {
                match set.contains(&guess.expert) {
                    true => score.useful_bytes += bytes,
                    false => score.wasted_bytes += bytes,
                }
            }
        }
        caches[layer].step(set);
    }
    scores
}
