//! Co-activation of neighbouring layers, counted online.

use super::{History, Predictor, Scored, rank};

/// How often expert `f` of layer `l` was chosen by a token that chose `e` in layer `l - depth`.
///
/// The guess for a token is the mean of the rows of what it chose, each row divided by the times that its expert was
/// chosen: an estimate of the chance of `f`, in which a rare expert speaks as loudly as a common one. Old observations
/// fade: each observed token weighs `1 / decay` of the next. Without a layer `l - depth`, the token before is asked: its
/// last layers come right ahead of the first of this one.
#[derive(Debug, Clone)]
pub struct Correlation {
    /// One table per layer: from the layer `depth` before it.
    pub(super) tables: Vec<Table>,
    pub(super) depth: usize,
    /// Tokens that the tables were learned from.
    pub(super) tokens: u64,
    decay: f32,
    pub(super) history: History,
    scratch: Vec<f32>,
    /// The first layers' guides of the token at hand: what the token before chose, as long as it is known.
    wrapped: Vec<Vec<u32>>,
}

#[derive(Debug, Clone)]
pub(super) struct Table {
    pub(super) to: usize,
    /// `[from experts, to experts]`
    pub(super) counts: Vec<f32>,
    /// `[from experts]`
    pub(super) totals: Vec<f32>,
    /// Weight of the next observation; grows instead of the table being scaled down each time.
    pub(super) weight: f32,
}

/// Beyond this the table is scaled down, far from the limit of f32.
const RESCALE: f32 = 1e12;

impl Table {
    fn new(from: usize, to: usize) -> Self {
        Self { to, counts: vec![0.0; from * to], totals: vec![0.0; from], weight: 1.0 }
    }

    fn learn(&mut self, from: &[u32], to: &[u32], decay: f32) {
        for &e in from {
            let row = &mut self.counts[e as usize * self.to..][..self.to];
            for &f in to {
                row[f as usize] += self.weight;
            }
            self.totals[e as usize] += self.weight;
        }
        self.weight *= decay;
        if self.weight > RESCALE {
            self.counts.iter_mut().chain(&mut self.totals).for_each(|c| *c /= RESCALE);
            self.weight /= RESCALE;
        }
    }
}

impl Correlation {
    /// Weight of an observation relative to the one before it.
    pub const DECAY: f32 = 1.0 / 0.9995;

    /// `experts[l]` is the number of experts of the `l`-th layer that has experts; guesses look `depth` layers ahead.
    ///
    /// # Panics
    /// When `depth` is 0.
    pub fn new(experts: &[usize], depth: usize) -> Self {
        assert!(depth > 0, "a layer cannot be predicted from itself");
        let layers = experts.len();
        let guide = |layer: usize| (layer + layers - depth.min(layers)) % layers;
        let tables = experts.iter().enumerate().map(|(l, &to)| Table::new(experts[guide(l)], to));
        Self {
            tables: tables.collect(),
            depth: depth.min(layers),
            tokens: 0,
            decay: Self::DECAY,
            history: History::default(),
            scratch: Vec::new(),
            wrapped: vec![Vec::new(); depth.min(layers)],
        }
    }

    /// Writes the estimated chance of every expert of `layer` to `out`; all zero when there is nothing to go by.
    pub(super) fn chances<'s>(&'s mut self, layer: usize, out: &'s mut Vec<f32>) {
        out.clear();
        let Some(table) = self.tables.get(layer) else { return };
        out.resize(table.to, 0.0);
        let from = match layer.checked_sub(self.depth) {
            Some(guide) => self.history.of_chunk(guide).and_then(Iterator::last).unwrap_or_default(),
            None => self.history.of_token_before(layer, layer + self.tables.len() - self.depth),
        };
        let known = from.iter().filter(|&&e| table.totals[e as usize] > 0.0).count();
        for &e in from {
            let total = table.totals[e as usize];
            if total > 0.0 {
                let row = &table.counts[e as usize * table.to..][..table.to];
                let scale = 1.0 / (total * known as f32);
                out.iter_mut().zip(row).for_each(|(s, c)| *s += c * scale);
            }
        }
    }
}

impl Predictor for Correlation {
    fn observe(&mut self, layer: usize, choices: &[u32], top_k: usize) {
        let (layers, top_k) = (self.tables.len(), top_k.max(1));
        if layer >= layers {
            return;
        }
        if layer < self.depth {
            // The guide is about to be overwritten when the layers are as few as the depth: taken first.
            let guide = &mut self.wrapped[layer];
            guide.clear();
            guide.extend_from_slice(self.history.of_token_before(layer, layer + layers - self.depth));
        }
        self.history.observe(layer, choices, top_k);
        // Only the last layer may run for fewer tokens than went in.
        self.tokens += if layer == 0 { (choices.len() / top_k) as u64 } else { 0 };
        let table = &mut self.tables[layer];
        match layer.checked_sub(self.depth) {
            Some(guide) => {
                let Some(from) = self.history.of_chunk(guide) else { return };
                let from: Vec<&[u32]> = from.collect();
                // A layer that computed fewer tokens did so for the last ones.
                let to = choices.chunks(top_k);
                let skip = from.len().saturating_sub(to.len());
                for (from, to) in from.into_iter().skip(skip).zip(to) {
                    table.learn(from, to, self.decay);
                }
            }
            // Within a chunk of a prompt the token before has not come that far yet.
            None if choices.len() == top_k => table.learn(&self.wrapped[layer], choices, self.decay),
            None => {}
        }
    }

    fn predict(&mut self, layer: usize, out: &mut Vec<Scored>) {
        let mut scratch = std::mem::take(&mut self.scratch);
        self.chances(layer, &mut scratch);
        rank(&scratch, out);
        self.scratch = scratch;
    }

    fn table(&mut self) -> Option<&mut Correlation> {
        Some(self)
    }
}
