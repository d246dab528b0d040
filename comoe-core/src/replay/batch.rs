//! Several sequences side by side.

use super::{Numbering, Partition, Score};
use crate::cache::Scope;
use crate::error::{Error, Result};
use crate::policy::PolicyKind;
use crate::trace::{Phase, Trace};

/// Which sequences share a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Grouping {
    /// Always the same, in the order of the trace.
    None,
    /// Anew at every step: those whose sets of the step before overlap most.
    Similar,
}

/// What leaves when a slot is needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Eviction {
    /// The policy's victim.
    Expert,
    /// The policy's victim and all that was last used in the same step as it.
    Group,
}

/// How sequences are played side by side.
#[derive(Debug, Clone, PartialEq)]
pub struct BatchOptions {
    /// Who leaves.
    pub policy: PolicyKind,
    /// Who competes.
    pub scope: Scope,
    /// Slots of a layer; that times the layers in all for [`Scope::Global`].
    pub slots_per_layer: usize,
    /// Sequences to take turns; see [`replay_batches`].
    pub sequences: usize,
    /// Sequences of a batch. Must divide `sequences`.
    pub batch: usize,
    /// Which share a batch.
    pub grouping: Grouping,
    /// What leaves.
    pub eviction: Eviction,
}

/// What a batched replay counted. An access is one expert of a layer's union over the batch.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct BatchScore {
    /// Hits, accesses and bytes.
    pub score: Score,
    /// Tokens played.
    pub tokens: u64,
    /// Mean size of a layer's union.
    pub union: f64,
}

/// Plays generated tokens of `options.sequences` sequences, `options.batch` of them at a time; all advance alike.
///
/// Sequences are the trace's turns where there are as many; otherwise the generated tokens are cut into as many runs
/// of neighbours. What is left over at the end is not played. The cache starts cold, and every step counts.
///
/// # Errors
/// [`Error::BadArgument`] when the trace has too few generated tokens or the batch does not divide the sequences.
pub fn replay_batches(trace: &Trace, options: &BatchOptions) -> Result<BatchScore> {
    let bad = |reason| Err(Error::BadArgument { what: "batch", reason });
    let (sequences, batch) = (options.sequences, options.batch);
    if batch == 0 || !sequences.is_multiple_of(batch) {
        return bad(format!("{batch} does not divide the {sequences} sequences"));
    }
    let runs = sequences_of(trace, sequences);
    let steps = runs.iter().map(Vec::len).min().unwrap_or(0);
    if steps == 0 {
        let have = trace.tokens().iter().filter(|t| t.phase == Phase::Decode).count();
        return bad(format!("{sequences} sequences need as many generated tokens, the trace has {have}"));
    }
    let layers = trace.layers();
    let (numberings, slots): (Vec<Numbering>, usize) = match options.scope {
        Scope::Layer => {
            ((0..layers).map(|l| Numbering::new(trace, l..l + 1)).collect(), options.slots_per_layer)
        }
        Scope::Global => {
            (vec![Numbering::new(trace, 0..layers)], options.slots_per_layer.saturating_mul(layers))
        }
    };
    let mut partitions: Vec<Partition> = numberings
        .iter()
        .map(|n| {
            let slots = slots.min(n.records);
            Partition::new(options.policy.build(slots, n.records, n.per_token(trace)), n.records, slots)
        })
        .collect();

    let mut result = BatchScore::default();
    let mut unions = 0u64;
    let mut order: Vec<usize> = (0..sequences).collect();
    for step in 0..steps {
        if options.grouping == Grouping::Similar && step > 0 {
            order = similar(trace, &runs, step - 1, batch);
        }
        for group in order.chunks(batch) {
            for l in 0..layers {
                let at = if options.scope == Scope::Layer { l } else { 0 };
                let mut union = Vec::new();
                for &s in group {
                    for r in numberings[at].set(trace, runs[s][step], l) {
                        if !union.contains(&r) {
                            union.push(r);
                        }
                    }
                }
                let hits = match options.eviction {
                    Eviction::Expert => partitions[at].step(&union),
                    Eviction::Group => partitions[at].step_evicting_groups(&union),
                };
                let accesses = union.len() as u64;
                result.score.hits += hits;
                result.score.accesses += accesses;
                let bytes = trace.info().directory.layers()[l].record_bytes as u64;
                result.score.bytes_missed += (accesses - hits) * bytes;
                unions += 1;
            }
            result.tokens += group.len() as u64;
        }
    }
    result.union = result.score.accesses as f64 / unions.max(1) as f64;
    Ok(result)
}

/// Token numbers of each sequence.
fn sequences_of(trace: &Trace, sequences: usize) -> Vec<Vec<usize>> {
    let decode: Vec<usize> =
        (0..trace.tokens().len()).filter(|&t| trace.tokens()[t].phase == Phase::Decode).collect();
    let turns: Vec<Vec<usize>> = decode
        .chunk_by(|&a, &b| trace.tokens()[a].turn == trace.tokens()[b].turn)
        .map(<[usize]>::to_vec)
        .collect();
    if turns.len() >= sequences {
        return turns.into_iter().take(sequences).collect();
    }
    let each = decode.len() / sequences.max(1);
    (0..sequences).map(|s| decode[s * each..(s + 1) * each].to_vec()).collect()
}

/// Sequences ordered so that neighbours belong together: the first one left begins a batch, and whoever shares most
/// experts with the batch joins (ties: the first).
fn similar(trace: &Trace, runs: &[Vec<usize>], step: usize, batch: usize) -> Vec<usize> {
    let directory = &trace.info().directory;
    let sets: Vec<Vec<bool>> = runs
        .iter()
        .map(|run| {
            let mut set = vec![false; directory.len()];
            for (l, entry) in directory.layers().iter().enumerate() {
                trace.chosen(run[step], l).iter().for_each(|e| set[(entry.first + e) as usize] = true);
            }
            set
        })
        .collect();
    let mut left: Vec<usize> = (0..runs.len()).collect();
    let mut order = Vec::with_capacity(runs.len());
    while !left.is_empty() {
        let first = left.remove(0);
        let mut union = sets[first].clone();
        order.push(first);
        for _ in 1..batch.min(left.len() + 1) {
            let shared = |s: usize| sets[s].iter().zip(&union).filter(|(a, b)| **a && **b).count();
            let best = (0..left.len()).max_by_key(|&i| (shared(left[i]), std::cmp::Reverse(i)));
            let Some(best) = best else { break };
            let next = left.remove(best);
            union.iter_mut().zip(&sets[next]).for_each(|(u, s)| *u |= s);
            order.push(next);
        }
    }
    order
}
