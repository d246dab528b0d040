//! With experts that stay in their slots for good.

use std::cmp::Reverse;
use std::ops::Range;

use super::{Numbering, Partition, Score};
use crate::cache::Scope;
use crate::policy::PolicyKind;
use crate::pool::most_pinned;
use crate::trace::Trace;

/// As [`replay`](super::replay) of `policy`, with the hottest records of the trace's first half pinned, in up to `part` (0 to 1)
/// of the slots that compete, as a cache pins them; counted over the second half, of which they know nothing.
pub fn replay_pinned(
    trace: &Trace,
    policy: PolicyKind,
    scope: Scope,
    slots_per_layer: usize,
    part: f64,
) -> Score {
    let (first, second) = trace.halves();
    let play = |layers: Range<usize>, slots: usize| {
        let numbering = Numbering::new(trace, layers);
        let (records, per_token) = (numbering.records, numbering.per_token(trace));
        let slots = slots.min(records);
        let mut uses = vec![0u64; records];
        for t in first.clone() {
            for l in numbering.layers.clone() {
                numbering.set(trace, t, l).for_each(|r| uses[r as usize] += 1);
            }
        }
        let mut hottest: Vec<u32> = (0..records as u32).filter(|&r| uses[r as usize] > 0).collect();
        hottest.sort_by_key(|&r| (Reverse(uses[r as usize]), r));
        hottest.truncate(most_pinned(slots, trace.info().top_k, part));
        let mut partition = Partition::new(policy.build(slots, records, per_token), records, slots);
        partition.keep(&hottest);
        numbering.count(trace, &second, |set| partition.step(set))
    };
    match scope {
        Scope::Global => play(0..trace.layers(), slots_per_layer.saturating_mul(trace.layers())),
        Scope::Layer => (0..trace.layers()).fold(Score::default(), |sum, l| {
            let score = play(l..l + 1, slots_per_layer);
            Score {
                hits: sum.hits + score.hits,
                accesses: sum.accesses + score.accesses,
                bytes_missed: sum.bytes_missed + score.bytes_missed,
            }
        }),
    }
}
