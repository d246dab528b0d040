//! What the host's schedule brings ahead of its layer: guessed, staged, and judged once the layer's set is known.

use super::{Engine, Split};
use crate::backend::WorkItem;
use crate::backend::{Fill, Queue};
use crate::error::Result;
use crate::predict::{Evidence, EvidenceGate, Predictor, Scored};
use crate::store::RecordIndex;

/// When the prefetch for the next layer is issued. The default costs least where guesses are wrong (measured on a GPU:
/// comoe-bench/RESULTS.md).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum PrefetchTrigger {
    /// As soon as the layer's own misses are enqueued.
    AfterRouting,
    /// Once the work of the hits is enqueued.
    MidLayer,
    /// Once all of the layer's work is enqueued.
    #[default]
    EndOfLayer,
}

/// What a predictor is told of a step.
#[derive(Clone, Copy)]
pub(super) struct Seen<'a> {
    pub(super) layer: usize,
    pub(super) choices: &'a [u32],
    pub(super) top_k: usize,
    pub(super) guess: &'a [u32],
}

pub(crate) struct PrefetchEngine {
    pub(super) predictor: Box<dyn Predictor>,
    trigger: PrefetchTrigger,
    /// Most records prefetched per layer.
    width: usize,
    /// Decides how many; without one always `width`.
    pub(super) gate: Option<EvidenceGate>,
    guesses: Vec<Scored>,
    /// Guesses for the next layer that were not in the pool, likeliest first, and whether they were sent for.
    pending: Vec<(RecordIndex, bool)>,
    /// Layer that they are for.
    pending_for: usize,
}

impl PrefetchEngine {
    pub(crate) fn new(
        predictor: Box<dyn Predictor>,
        trigger: PrefetchTrigger,
        width: usize,
        gate: Option<EvidenceGate>,
    ) -> Self {
        Self { predictor, trigger, width, gate, guesses: Vec::new(), pending: Vec::new(), pending_for: 0 }
    }

    /// What was sent for is not there any more.
    pub(super) fn forget_pending(&mut self) {
        self.pending.clear();
    }

    /// Tells the gate what became of the guesses for `layer`, now that its set is known.
    pub(super) fn judge(&mut self, layer: usize, split: &Split) {
        let pending = std::mem::take(&mut self.pending);
        let Some(gate) = self.gate.as_mut().filter(|_| self.pending_for == layer && !pending.is_empty())
        else {
            return;
        };
        let has = |items: &[WorkItem], record| items.iter().any(|i| i.record == record);
        let evidence: Vec<Evidence> = pending
            .iter()
            .map(|&(record, sent)| match sent {
                true if has(&split.hits, record) => Evidence::Saved,
                true if has(&split.late, record) => Evidence::Late,
                true => Evidence::Wasted,
                false if split.missing.iter().any(|m| m.need.record == record) => Evidence::WouldHaveSaved,
                false => Evidence::WouldHaveWasted,
            })
            .collect();
        // What a guess that was not sent would have spared is no demand of its own.
        let spared = evidence.iter().filter(|e| **e == Evidence::WouldHaveSaved).count();
        gate.judge(layer, &evidence, split.missing.len() > spared);
    }
}

impl Engine {
    /// Sends for what is guessed for the layer after `seen`, if `point` is when that is done.
    pub(super) fn prefetch_at(&mut self, point: PrefetchTrigger, seen: Seen<'_>) -> Result<()> {
        let Seen { layer, choices, top_k, guess } = seen;
        let Some(prefetch) = self.prefetch.as_mut().filter(|p| p.trigger == point) else { return Ok(()) };
        prefetch.predictor.observe(layer, choices, top_k);
        // A prompt's union is no guide to the next layer's, and its transfers leave the link no idle time.
        if choices.len() > top_k || layer + 1 >= self.directory.layers().len() {
            return Ok(());
        }
        prefetch.predictor.hint(layer + 1, guess);
        prefetch.predictor.predict(layer + 1, &mut prefetch.guesses);
        let next = &self.directory.layers()[layer + 1];
        let mut fills = Vec::new();
        prefetch.pending.clear();
        prefetch.pending_for = layer + 1;
        let (width, guesses) = match &prefetch.gate {
            // Likely ones that are cached cost nothing: the gate counts those that are not.
            Some(gate) => (gate.width(layer + 1), prefetch.guesses.as_slice()),
            None => (prefetch.width, &prefetch.guesses[..prefetch.width.min(prefetch.guesses.len())]),
        };
        for guess in guesses {
            if prefetch.pending.len() >= prefetch.width {
                break;
            }
            let record = RecordIndex(next.first + guess.expert);
            if self.pool.locate(record).is_some() {
                continue;
            }
            let slot = if prefetch.pending.len() < width { self.pool.stage(record) } else { None };
            fills.extend(slot.map(|slot| Fill { record, slot }));
            prefetch.pending.push((record, slot.is_some()));
        }
        if fills.is_empty() {
            return Ok(());
        }
        self.fill(Queue::Prefetch, &fills)?;
        self.stats.prefetched += fills.len() as u64;
        self.stats.prefetched_bytes += self.bytes(&fills);
        Ok(())
    }
}
