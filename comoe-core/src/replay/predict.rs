//! How good would guesses have been?

use std::fmt;
use std::str::FromStr;

use super::Partition;
use crate::error::{Error, Result};
use crate::policy::PolicyKind;
use crate::predict::{Combined, Correlation, Frequency, Predictor, PreviousToken, Scored, StaleGate};
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
    /// [`StaleGate`], with the guesses that the trace has.
    StaleGate,
}

impl PredictorKind {
    /// Every predictor.
    pub const ALL: [Self; 5] =
        [Self::Previous, Self::Frequency, Self::Correlation, Self::Combined, Self::StaleGate];

    /// Those that `trace` has all for.
    pub fn for_trace(trace: &Trace) -> Vec<Self> {
        Self::ALL.into_iter().filter(|p| p.check(trace, 1).is_ok()).collect()
    }

    /// Sees that the predictor can be tried on `trace`, `depth` layers ahead.
    ///
    /// # Errors
    /// [`Error::BadArgument`] for the stale gate, when the trace has no guesses or they are of another depth.
    pub fn check(self, trace: &Trace, depth: usize) -> Result<()> {
        let bad = |reason: String| Err(Error::BadArgument { what: "predictor", reason });
        match self {
            Self::StaleGate if !trace.has_guesses() => bad(
                "the trace has no guesses of the model; record them with `comoe trace record --stale-gate`"
                    .to_owned(),
            ),
            Self::StaleGate if depth != 1 => {
                bad(format!("the stale gate's guesses are for one layer ahead, not {depth}: use depth 1"))
            }
            _ => Ok(()),
        }
    }

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
            Self::StaleGate => Box::new(StaleGate::new()),
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
            Self::StaleGate => "stale-gate",
        })
    }
}

impl FromStr for PredictorKind {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|p| p.to_string() == s).ok_or_else(|| Error::BadArgument {
            what: "predictor",
            reason: format!("{s:?} is unknown: use previous, frequency, correlation, combined or stale-gate"),
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
///
/// # Errors
/// As [`PredictorKind::check`].
pub fn evaluate(trace: &Trace, options: &PredictOptions) -> Result<PredictScore> {
    let mut sum = PredictScore::default();
    recall_by_layer(trace, options)?.iter().for_each(|l| sum.add(l));
    Ok(sum)
}

/// Tries a predictor on a trace and counts by layer. The guess for a layer is made when the layer `depth` before it (of
/// the token before, for the first layers) has been routed, and nothing later is known.
///
/// # Errors
/// As [`PredictorKind::check`].
pub fn recall_by_layer(trace: &Trace, options: &PredictOptions) -> Result<Vec<PredictScore>> {
    let entries = trace.info().directory.layers();
    let (layers, tokens) = (entries.len(), trace.tokens().len());
    let experts: Vec<usize> = entries.iter().map(|e| e.experts).collect();
    let depth = options.depth.max(1);
    options.predictor.check(trace, depth)?;
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
            predictor.hint(layer, trace.guesses(token, layer));
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
    Ok(scores)
}
