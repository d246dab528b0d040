//! Who comes next? Predictors of a layer's experts, pure like the policies.

mod combined;
mod correlation;
mod frequency;
mod gate;
mod history;
mod learned;
mod previous;
mod stale_gate;
mod table;
#[cfg(test)]
mod tests;

use std::fmt;
use std::str::FromStr;

pub use combined::Combined;
pub use correlation::Correlation;
pub use frequency::Frequency;
pub use gate::{Evidence, EvidenceGate, GateOptions};
pub use history::History;
pub use learned::{LastStep, Learned};
pub use previous::PreviousToken;
pub use stale_gate::StaleGate;
pub use table::{TABLE_MAGIC, TABLE_VERSION};

use crate::error::Error;

/// An expert and how likely it is thought to be, in any unit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Scored {
    /// Expert number within its layer.
    pub expert: u32,
    /// Larger is likelier.
    pub score: f32,
}

/// Guesses the experts that the token at hand will choose in a layer ahead. Layers are ordinals (layers without
/// experts do not count), experts are numbers within their layer.
///
/// The caller tells of every layer step, in order: layers ascend within a chunk of tokens, and a layer that is not above
/// the one before begins the next chunk. One sequence at a time.
pub trait Predictor: Send {
    /// A chunk of tokens chose `choices`, `[tokens, top_k]`, in layer `layer`.
    fn observe(&mut self, layer: usize, choices: &[u32], top_k: usize);

    /// Writes the guesses for layer `layer`, which has not been observed for the token at hand, to `out`: best first,
    /// ties by smaller expert. Experts that nothing speaks for are left out.
    fn predict(&mut self, layer: usize, out: &mut Vec<Scored>);

    /// The model itself guesses that the token at hand will choose `guesses`, likeliest first, in layer `layer`. Told
    /// after the layer before was observed, of the layers for which there is such a guess; most predictors have no use
    /// for it.
    fn hint(&mut self, _layer: usize, _guesses: &[u32]) {}

    /// Whether [`Self::hint`] is of use, so that it is worth computing.
    fn takes_hints(&self) -> bool {
        false
    }

    /// The table that it learns, if it does: what can be kept for the next run.
    fn table(&mut self) -> Option<&mut Correlation> {
        None
    }
}

/// Writes what `scores` (one per expert) says to `out`, in the order that [`Predictor::predict`] promises.
fn rank(scores: &[f32], out: &mut Vec<Scored>) {
    out.clear();
    let spoken_for = scores.iter().enumerate().filter(|(_, s)| **s > 0.0);
    out.extend(spoken_for.map(|(e, &score)| Scored { expert: e as u32, score }));
    out.sort_unstable_by(|a, b| b.score.total_cmp(&a.score).then(a.expert.cmp(&b.expert)));
}

/// What is prefetched while a layer computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Prefetch {
    /// Nothing.
    #[default]
    Off,
    /// What [`Correlation`] predicts for the next layer. Where the device drives steps, it learns and guesses as well.
    Correlation,
    /// What the model's own next router says; see [`StaleGate`]. Nothing where the caller gives no guesses
    /// ([`CacheLayer::with_guess`](crate::CacheLayer::with_guess), and in steps that the device drives
    /// [`CacheLayer::with_device_guess`](crate::CacheLayer::with_device_guess)).
    StaleGate,
    /// [`StaleGate`] with callers that give guesses and [`Correlation`] with others, in layers where it pays: judged all the
    /// time by an [`EvidenceGate`], or where the device drives steps, by how often a layer's guesses were right; there whoever makes
    /// guesses finds out by the clock whether that pays ([`judges_device_guesses`](crate::ExpertCache::judges_device_guesses)).
    /// (Measured: comoe-bench/RESULTS-predictors.md. [`Combined`] guesses more accesses than [`Correlation`], but no more of
    /// those that miss.)
    Auto,
}

impl Prefetch {
    /// Every way.
    pub const ALL: [Self; 4] = [Self::Off, Self::Correlation, Self::StaleGate, Self::Auto];

    /// The name, as it is given on a command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Correlation => "correlation",
            Self::StaleGate => "stale-gate",
            Self::Auto => "auto",
        }
    }
}

impl fmt::Display for Prefetch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Prefetch {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self, Error> {
        Self::ALL.into_iter().find(|p| p.name() == s).ok_or_else(|| Error::BadArgument {
            what: "prefetch",
            reason: format!("{s:?} is unknown: use {}", Self::ALL.map(Self::name).join(", ")),
        })
    }
}
