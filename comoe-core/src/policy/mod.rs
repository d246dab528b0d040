//! Who leaves? One trait, one file per policy, all pure: no threads, no clocks, no device.

mod belady;
mod blend;
mod lfru;
mod lfu;
mod lru;
mod ranked;

use std::fmt;
use std::str::FromStr;

pub use belady::Belady;
pub use blend::Blend;
pub use lfru::Lfru;
pub use lfu::Lfu;
pub use lru::Lru;
pub use ranked::{Ranked, Ranking};

use crate::error::Error;
use crate::store::RecordIndex;

/// Chooses which resident record gives up its slot.
///
/// A policy sees one partition of the pool (a layer, or everything). The caller guarantees that `insert` is called
/// for records that are not resident, `hit` and `remove` only for resident ones, and that accesses arrive in the
/// order of the step set.
pub trait EvictionPolicy: Send {
    /// A resident record was accessed.
    fn hit(&mut self, record: RecordIndex);

    /// A record was accessed, was not resident, and is now.
    fn insert(&mut self, record: RecordIndex);

    /// A record was accessed, was not resident, and is not now either (there was no room for it, or it was not
    /// admitted).
    fn pass(&mut self, record: RecordIndex);

    /// A record is resident that was not accessed now: it comes last in the order of what has come so. For taking over
    /// what another has kept.
    fn adopt(&mut self, record: RecordIndex);

    /// A record left its slot.
    fn remove(&mut self, record: RecordIndex);

    /// The first record, in eviction order, that `may_leave`. Does not remove it. `None` when none may leave.
    fn victim(&self, may_leave: &dyn Fn(RecordIndex) -> bool) -> Option<RecordIndex>;

    /// Resident records, next victim first. For tests and pictures, not for speed.
    fn eviction_order(&self) -> Vec<RecordIndex>;

    /// Decayed counts, where the policy goes by them: a device can go on from there.
    fn decayed(&self) -> Option<Decayed<'_>> {
        None
    }

    /// Replaces them by a device's, while nothing is resident. Other policies have nothing to replace.
    fn set_decayed(&mut self, _tick: u64, _scores: &[u64]) {}
}

/// What [`Lfru`] knows of the past.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Decayed<'a> {
    /// Accesses after which one counts half.
    pub half_life: f64,
    /// Accesses so far.
    pub tick: u64,
    /// By record: the bits of the score's logarithm (F64, see [`Lfru`]), 0 before the first access.
    pub scores: &'a [u64],
}

/// The policies that can be chosen by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum PolicyKind {
    /// The best on recorded routing that can be had: [`Self::Blend`], or [`Self::Aged`] where a GPU decides by itself.
    /// Where every record has a slot nobody ever leaves, and it is [`Self::Lru`], which costs least.
    #[default]
    Auto,
    /// Least recently used.
    Lru,
    /// Least frequently used since the start.
    Lfu,
    /// Frequency with exponential decay, by accesses per slot; see [`Lfru`].
    Lfru,
    /// Frequency with exponential decay, by tokens: [`Lfru`] with a half-life of [`Self::AGED_TOKENS`].
    Aged,
    /// Frequency with a short and a long memory; see [`Blend`].
    Blend,
}

impl PolicyKind {
    /// Every policy.
    pub const ALL: [Self; 6] = [Self::Auto, Self::Lru, Self::Lfu, Self::Lfru, Self::Aged, Self::Blend];

    /// Half-life of [`Self::Aged`] in tokens: routing drifts with the text, whatever the number of slots. Fitted on the
    /// first halves of three recorded traces (comoe-bench/RESULTS-routing.md).
    pub const AGED_TOKENS: f64 = 6.0;

    /// The name, as it is given on a command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Lru => "lru",
            Self::Lfu => "lfu",
            Self::Lfru => "lfru",
            Self::Aged => "aged",
            Self::Blend => "blend",
        }
    }

    /// What is in force when this is asked for; `resident`: every record has a slot, `on_gpu`: a GPU may decide.
    pub fn in_force(self, resident: bool, on_gpu: bool) -> Self {
        match self {
            Self::Auto if resident => Self::Lru,
            Self::Auto if on_gpu => Self::Aged,
            Self::Auto => Self::Blend,
            other => other,
        }
    }

    /// Whether a device knows it, too.
    pub fn is_a_devices(self) -> bool {
        !matches!(self, Self::Lfu | Self::Blend)
    }

    /// Makes the policy for a partition of `slots` slots, with `records` records in the whole store, to which a token
    /// makes `per_token` accesses: the model's top-k, times the layers that share the partition.
    pub fn build(self, slots: usize, records: usize, per_token: usize) -> Box<dyn EvictionPolicy> {
        match self {
            Self::Lru => Box::new(Lru::new(records)),
            Self::Lfu => Box::new(Lfu::new(records)),
            Self::Lfru => Box::new(Lfru::for_slots(slots, records)),
            Self::Aged => Box::new(Lfru::new(Self::AGED_TOKENS * per_token.max(1) as f64, records)),
            Self::Auto | Self::Blend => Box::new(Blend::new(records, per_token)),
        }
    }
}

impl fmt::Display for PolicyKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for PolicyKind {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self, Error> {
        let known = Self::ALL.into_iter().find(|kind| kind.name() == s);
        known.ok_or_else(|| Error::BadArgument {
            what: "policy",
            reason: format!("{s:?} is unknown: use one of {}", Self::ALL.map(Self::name).join(", ")),
        })
    }
}

#[cfg(test)]
mod tests;
