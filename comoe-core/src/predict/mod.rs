//! Who comes next? Predictors of the next layer's step set, pure like the policies.

mod correlation;

use std::fmt;
use std::str::FromStr;

pub use correlation::Correlation;

use crate::error::Error;

/// An expert of the next layer and how likely it is thought to be, in any unit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Scored {
    /// Expert number within its layer.
    pub expert: u32,
    /// Larger is likelier.
    pub score: f32,
}

/// Guesses the experts of layer `layer + 1` from those of layer `layer`. Layers are ordinals (layers without experts
/// do not count), experts are numbers within their layer.
pub trait Predictor: Send {
    /// One token chose `from` in layer `layer` and `to` in layer `layer + 1`.
    fn observe(&mut self, layer: usize, from: &[u32], to: &[u32]);

    /// Writes the guesses for layer `layer + 1` to `out`, best first, ties by smaller expert. Experts that were never
    /// seen after any of `from` are left out.
    fn predict(&mut self, layer: usize, from: &[u32], out: &mut Vec<Scored>);
}

/// What is prefetched while a layer computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Prefetch {
    /// Nothing.
    #[default]
    Off,
    /// What [`Correlation`] predicts for the next layer.
    Correlation,
}

impl fmt::Display for Prefetch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Off => "off",
            Self::Correlation => "correlation",
        })
    }
}

impl FromStr for Prefetch {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self, Error> {
        match s {
            "off" => Ok(Self::Off),
            "correlation" => Ok(Self::Correlation),
            _ => Err(Error::BadArgument {
                what: "prefetch",
                reason: format!("{s:?} is unknown: use off or correlation"),
            }),
        }
    }
}
