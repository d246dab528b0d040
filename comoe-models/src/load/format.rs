//! In which formats what is not an expert's is held: weights, keys and values.

use crate::error::{Error, Result};

/// How the projections outside the experts are held: those of attention and convolutions, of dense and shared
/// feed-forward parts, and the output head.
///
/// Embedding, norms, biases, routers and latent attention's projection to keys and values stay in the model's dtype
/// whatever the format, and so does a head that is the embedding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum DenseFormat {
    /// In the dtype that the model computes in, which is BF16 on a GPU unless F32 is asked for. Called `bf16`.
    #[default]
    Plain,
    /// INT8 with an f16 scale for 128 inputs of a row: 1.02 bytes a weight, packed while the model is loaded. No weight is
    /// off by more than half its scale, 1/254 of the largest of the 128.
    Int8,
}

impl DenseFormat {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Plain, Self::Int8];

    /// As it is written on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Plain => "bf16",
            Self::Int8 => "int8",
        }
    }
}

impl std::str::FromStr for DenseFormat {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|f| f.name() == s).ok_or_else(|| Error::BadOption {
            option: "dense format",
            value: s.to_owned(),
            expected: "use bf16 or int8",
        })
    }
}

/// How keys and values of the tokens so far are held.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum KvFormat {
    /// In the dtype that the model computes in. Called `bf16`.
    #[default]
    Plain,
    /// INT8 with an f16 scale for each position and key head, keys and values apart: `scale * q` with q in -127..=127 and
    /// the least scale that clips nothing. Half of BF16's memory and 2 bytes a row more. No element is off by more than
    /// half its scale, 1/254 of the largest of its row.
    ///
    /// Attention reads what is held, also for a prompt's own tokens. A row with a number that is none, or of 8.3 million
    /// or more, becomes NaN as a whole, which the next router or the logits report. What latent attention and
    /// convolutions keep stays in the model's dtype.
    Int8,
}

impl KvFormat {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Plain, Self::Int8];

    /// As it is written on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Plain => "bf16",
            Self::Int8 => "int8",
        }
    }
}

impl std::str::FromStr for KvFormat {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|f| f.name() == s).ok_or_else(|| Error::BadOption {
            option: "KV cache format",
            value: s.to_owned(),
            expected: "use bf16 or int8",
        })
    }
}
