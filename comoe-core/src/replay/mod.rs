//! What would have happened? Policies and predictors played over a recorded [`Trace`], with the optimum beside them.
//!
//! A step is one token, steps in order, layers ascending. The set is what is chosen at (step, layer); an access is a hit if
//! its record was resident before the set is brought in. Then the set's members are gone through in the order of choice:
//! hits are stamped, the missing inserted. A member of the current set is never a victim, and a set larger than the
//! capacity leaves its surplus uninserted. Accesses are counted over generated tokens, the prompt warms.

mod batch;
mod pins;
mod predict;
#[cfg(test)]
mod tests;

use std::cmp::Reverse;
use std::fmt;
use std::ops::Range;
use std::str::FromStr;

pub use batch::{BatchOptions, BatchScore, Eviction, Grouping, replay_batches};
pub use pins::replay_pinned;
pub use predict::{PredictOptions, PredictScore, PredictorKind, evaluate, recall_by_layer};

use crate::cache::Scope;
use crate::error::Error;
use crate::policy::{Belady, EvictionPolicy, Lfru, PolicyKind};
use crate::store::RecordIndex;
use crate::trace::{Phase, Trace};

/// A policy that can be replayed: those that can run live, and those that need to know the future.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum ReplayPolicy {
    /// One that needs no foresight.
    Online(PolicyKind),
    /// LFRU with a half-life of so many tokens; for finding the best.
    LfruWith(f64),
    /// LFRU that leaves a missed record out when its score is below that of the record that would have to leave.
    LfruAdmit,
    /// The optimum among policies that bring in what misses: evicts what is used furthest in the future.
    Belady,
    /// Preloaded with the most used records of the whole trace (ties by smaller number), and never changed. Hindsight
    /// again, and no demand policy: it may do better than Belady, who must bring in every miss.
    Static,
}

impl fmt::Display for ReplayPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Online(kind) => kind.fmt(f),
            Self::LfruWith(tokens) => write!(f, "lfru:{tokens}"),
            Self::LfruAdmit => f.write_str("lfru-admit"),
            Self::Belady => f.write_str("belady"),
            Self::Static => f.write_str("static"),
        }
    }
}

impl FromStr for ReplayPolicy {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self, Error> {
        match s {
            "belady" => Ok(Self::Belady),
            "static" => Ok(Self::Static),
            "lfru-admit" => Ok(Self::LfruAdmit),
            _ => {
                let half_life = s.strip_prefix("lfru:").and_then(|a| a.parse().ok());
                match half_life.filter(|a: &f64| a.is_finite() && *a > 0.0) {
                    Some(tokens) => Ok(Self::LfruWith(tokens)),
                    None => s.parse().map(Self::Online).map_err(|_| Error::BadArgument {
                        what: "policy",
                        reason: format!(
                            "{s:?} is unknown: use {}, belady, static, lfru-admit, or lfru:TOKENS with its half-life",
                            PolicyKind::ALL.map(PolicyKind::name).join(", ")
                        ),
                    }),
                }
            }
        }
    }
}

/// What a replay counted, over generated tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Score {
    /// Accesses that found their record resident.
    pub hits: u64,
    /// Accesses.
    pub accesses: u64,
    /// Bytes of the records of the others.
    pub bytes_missed: u64,
}

impl Score {
    /// Hits per access, 0 to 1; 0 without accesses.
    pub fn hit_rate(&self) -> f64 {
        if self.accesses == 0 { 0.0 } else { self.hits as f64 / self.accesses as f64 }
    }
}

/// Which generated tokens are counted. All before them warm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Span {
    /// All.
    #[default]
    All,
    /// The first half: where parameters are fitted.
    FirstHalf,
    /// The second half: where they are judged.
    SecondHalf,
}

impl Span {
    /// Token numbers of the span.
    fn tokens(self, trace: &Trace) -> Range<usize> {
        let (first, second) = trace.halves();
        match self {
            Self::All => 0..trace.tokens().len(),
            Self::FirstHalf => first,
            Self::SecondHalf => second,
        }
    }
}

/// Plays `policy` over `trace` with `slots_per_layer` slots a layer: each layer's own, or that times the layers in all.
pub fn replay(trace: &Trace, policy: ReplayPolicy, scope: Scope, slots_per_layer: usize) -> Score {
    replay_span(trace, policy, scope, slots_per_layer, Span::All)
}

/// As [`replay`], counted over a part of the tokens.
pub fn replay_span(
    trace: &Trace,
    policy: ReplayPolicy,
    scope: Scope,
    slots_per_layer: usize,
    span: Span,
) -> Score {
    let span = span.tokens(trace);
    match scope {
        Scope::Layer => {
            let mut sum = Score::default();
            for l in 0..trace.layers() {
                let score = play(trace, policy, l..l + 1, slots_per_layer, &span);
                sum.hits += score.hits;
                sum.accesses += score.accesses;
                sum.bytes_missed += score.bytes_missed;
            }
            sum
        }
        Scope::Global => {
            play(trace, policy, 0..trace.layers(), slots_per_layer.saturating_mul(trace.layers()), &span)
        }
    }
}

/// A policy and the residency that follows from it, for one partition.
pub(crate) struct Partition<P: EvictionPolicy + ?Sized = dyn EvictionPolicy> {
    policy: Box<P>,
    resident: Vec<bool>,
    held: usize,
    slots: usize,
    /// Step in which each record was last a member of the set: members of the current one may not leave.
    member: Vec<u32>,
    now: u32,
    /// Records that never leave.
    kept: Vec<bool>,
}

impl<P: EvictionPolicy + ?Sized> Partition<P> {
    pub(crate) fn new(policy: Box<P>, records: usize, slots: usize) -> Self {
        let (resident, kept) = (vec![false; records], vec![false; records]);
        Self { policy, resident, held: 0, slots, member: vec![0; records], now: 0, kept }
    }

    /// Brings `records`, which are not there, for good.
    fn keep(&mut self, records: &[u32]) {
        for &r in records {
            self.policy.adopt(RecordIndex(r));
            (self.resident[r as usize], self.kept[r as usize]) = (true, true);
            self.held += 1;
        }
    }

    /// Whether the record is in a slot.
    pub(crate) fn holds(&self, record: u32) -> bool {
        self.resident[record as usize]
    }

    /// Brings the set in, and returns how many of it were there.
    pub(crate) fn step(&mut self, set: &[u32]) -> u64 {
        self.step_with(set, |_, _, _| true)
    }

    /// As [`Self::step`]; `admits(policy, record, victim)` may leave a missed record out.
    fn step_with(&mut self, set: &[u32], admits: impl Fn(&P, RecordIndex, RecordIndex) -> bool) -> u64 {
        self.now += 1;
        let now = self.now;
        set.iter().for_each(|&r| self.member[r as usize] = now);
        let mut hits = 0;
        for &r in set {
            let record = RecordIndex(r);
            if self.holds(r) {
                hits += 1;
                self.policy.hit(record);
                continue;
            }
            if self.held == self.slots {
                let (member, kept) = (&self.member, &self.kept);
                let victim = self.policy.victim(&|v| member[v.0 as usize] != now && !kept[v.0 as usize]);
                match victim.filter(|&v| admits(&self.policy, record, v)) {
                    Some(victim) => self.evict(victim),
                    None => {
                        self.policy.pass(record);
                        continue;
                    }
                }
            }
            self.policy.insert(record);
            self.resident[r as usize] = true;
            self.held += 1;
        }
        hits
    }

    fn evict(&mut self, victim: RecordIndex) {
        self.policy.remove(victim);
        self.resident[victim.0 as usize] = false;
        self.held -= 1;
    }

    /// As [`Self::step`], but room is made by groups: with a victim leaves all that was last used in the same step.
    pub(crate) fn step_evicting_groups(&mut self, set: &[u32]) -> u64 {
        let missing = set.iter().filter(|&&r| !self.holds(r)).count();
        while self.held + missing > self.slots {
            let Some(victim) = self.policy.victim(&|v| !set.contains(&v.0)) else { break };
            let group = self.member[victim.0 as usize];
            for r in 0..self.resident.len() as u32 {
                if self.holds(r) && self.member[r as usize] == group && !set.contains(&r) {
                    self.evict(RecordIndex(r));
                }
            }
        }
        self.step(set)
    }
}

/// Records of some neighbouring layers, numbered from 0.
struct Numbering {
    layers: Range<usize>,
    first: u32,
    records: usize,
}

impl Numbering {
    fn new(trace: &Trace, layers: Range<usize>) -> Self {
        let entries = &trace.info().directory.layers()[layers.clone()];
        let first = entries.first().map_or(0, |e| e.first);
        Self { layers, first, records: entries.iter().map(|e| e.experts).sum() }
    }

    /// Accesses that a token makes.
    fn per_token(&self, trace: &Trace) -> usize {
        trace.info().top_k.max(1) * self.layers.len()
    }

    /// The set of (token, layer).
    fn set<'t>(&self, trace: &'t Trace, token: usize, layer: usize) -> impl Iterator<Item = u32> + use<'t> {
        let base = trace.info().directory.layers()[layer].first - self.first;
        trace.chosen(token, layer).iter().map(move |e| base + e)
    }

    /// Every access, in order.
    fn accesses<'t>(&'t self, trace: &'t Trace) -> impl Iterator<Item = u32> + 't {
        (0..trace.tokens().len())
            .flat_map(move |t| self.layers.clone().flat_map(move |l| self.set(trace, t, l)))
    }

    /// Calls `step`, which says how many of a set were hits, with every set, and counts.
    fn count(&self, trace: &Trace, span: &Range<usize>, mut step: impl FnMut(&[u32]) -> u64) -> Score {
        let mut score = Score::default();
        let mut set = Vec::new();
        for (t, token) in trace.tokens().iter().enumerate() {
            for l in self.layers.clone() {
                set.clear();
                set.extend(self.set(trace, t, l));
                let hits = step(&set);
                if token.phase == Phase::Decode && span.contains(&t) {
                    score.hits += hits;
                    score.accesses += set.len() as u64;
                    let bytes = trace.info().directory.layers()[l].record_bytes as u64;
                    score.bytes_missed += (set.len() as u64 - hits) * bytes;
                }
            }
        }
        score
    }
}

fn play(
    trace: &Trace,
    policy: ReplayPolicy,
    layers: Range<usize>,
    slots: usize,
    span: &Range<usize>,
) -> Score {
    let numbering = Numbering::new(trace, layers);
    let records = numbering.records;
    let slots = slots.min(records);
    let per_token = numbering.per_token(trace);
    let policy: Box<dyn EvictionPolicy> = match policy {
        ReplayPolicy::Static => {
            let mut uses = vec![0u64; records];
            numbering.accesses(trace).for_each(|r| uses[r as usize] += 1);
            let mut order: Vec<u32> = (0..records as u32).collect();
            order.sort_by_key(|&r| (Reverse(uses[r as usize]), r));
            let mut held = vec![false; records];
            order.iter().take(slots).for_each(|&r| held[r as usize] = true);
            return numbering
                .count(trace, span, |set| set.iter().filter(|&&r| held[r as usize]).count() as u64);
        }
        ReplayPolicy::LfruAdmit => {
            let policy = Box::new(Lfru::for_slots(slots, records));
            let mut partition = Partition::new(policy, records, slots);
            let admits = |p: &Lfru, record, victim| p.would_outrank(record, victim);
            return numbering.count(trace, span, |set| partition.step_with(set, admits));
        }
        ReplayPolicy::Online(kind) => kind.build(slots, records, per_token),
        ReplayPolicy::LfruWith(tokens) => Box::new(Lfru::new(tokens * per_token as f64, records)),
        ReplayPolicy::Belady => {
            let future: Vec<_> = numbering.accesses(trace).map(RecordIndex).collect();
            Box::new(Belady::new(&future, records))
        }
    };
    let mut partition = Partition::new(policy, records, slots);
    numbering.count(trace, span, |set| partition.step(set))
}
