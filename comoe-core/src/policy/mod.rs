//! Who leaves? One trait, one file per policy, all pure: no threads, no clocks, no device.

mod belady;
mod lfru;
mod lfu;
mod lru;

use std::fmt;
use std::str::FromStr;

pub use belady::Belady;
pub use lfru::Lfru;
pub use lfu::Lfu;
pub use lru::Lru;

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

    /// A record left its slot.
    fn remove(&mut self, record: RecordIndex);

    /// The first record, in eviction order, that `may_leave`. Does not remove it. `None` when none may leave.
    fn victim(&self, may_leave: &dyn Fn(RecordIndex) -> bool) -> Option<RecordIndex>;

    /// Resident records, next victim first. For tests and pictures, not for speed.
    fn eviction_order(&self) -> Vec<RecordIndex>;
}

/// The policies that can be chosen by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum PolicyKind {
    /// Least recently used.
    #[default]
    Lru,
    /// Least frequently used since the start.
    Lfu,
    /// Frequency with exponential decay; see [`Lfru`].
    Lfru,
}

impl PolicyKind {
    /// Every policy.
    pub const ALL: [Self; 3] = [Self::Lru, Self::Lfu, Self::Lfru];

    /// The name, as it is given on a command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Lru => "lru",
            Self::Lfu => "lfu",
            Self::Lfru => "lfru",
        }
    }

    /// Makes the policy for a partition of `slots` slots, with `records` records in the whole store.
    pub fn build(self, slots: usize, records: usize) -> Box<dyn EvictionPolicy> {
        match self {
            Self::Lru => Box::new(Lru::new(records)),
            Self::Lfu => Box::new(Lfu::new(records)),
            Self::Lfru => Box::new(Lfru::for_slots(slots, records)),
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
