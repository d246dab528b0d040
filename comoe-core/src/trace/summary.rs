//! What a trace looks like, in numbers.

use super::{Phase, Trace};

/// Numbers of one layer, over all tokens.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerSummary {
    /// The model's layer number.
    pub layer: usize,
    /// Experts of the layer.
    pub experts: usize,
    /// Experts that were chosen at least once.
    pub used: usize,
    /// Choices by expert.
    pub counts: Vec<u64>,
    /// Entropy of the choices in bits: `log2(experts)` when all are chosen alike (Shannon 1948).
    pub entropy: f64,
    /// Part of a token's experts that the token before chose as well, 0 to 1; `None` without neighbouring tokens.
    pub overlap: Option<f64>,
    /// Distinct experts of the layer used since an expert's last use, itself not counted: the LRU stack distance (Mattson et al. 1970).
    /// An LRU of more slots than this hits. Median and 90th percentile over all accesses but first uses.
    pub reuse_median: Option<usize>,
    /// See [`Self::reuse_median`].
    pub reuse_p90: Option<usize>,
}

/// Numbers of a trace.
#[derive(Debug, Clone, PartialEq)]
pub struct Summary {
    /// Tokens of prompts.
    pub prompt_tokens: usize,
    /// Tokens generated.
    pub decode_tokens: usize,
    /// Conversation turns.
    pub turns: usize,
    /// By layer.
    pub layers: Vec<LayerSummary>,
}

impl Summary {
    /// Of `trace`.
    pub fn of(trace: &Trace) -> Self {
        let tokens = trace.tokens();
        let decode_tokens = tokens.iter().filter(|t| t.phase == Phase::Decode).count();
        let turns = tokens.chunk_by(|a, b| a.turn == b.turn).count();
        let layers = (0..trace.layers()).map(|l| layer(trace, l)).collect();
        Self { prompt_tokens: tokens.len() - decode_tokens, decode_tokens, turns, layers }
    }

    /// Mean over layers of what `field` gives, of those where it gives something.
    pub fn mean(&self, field: impl Fn(&LayerSummary) -> Option<f64>) -> Option<f64> {
        let values: Vec<f64> = self.layers.iter().filter_map(field).collect();
        (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
    }
}

fn layer(trace: &Trace, l: usize) -> LayerSummary {
    let entry = &trace.info().directory.layers()[l];
    let mut counts = vec![0u64; entry.experts];
    // Most recent first.
    let mut stack: Vec<u32> = Vec::new();
    let mut distances = Vec::new();
    let (mut kept, mut could_keep) = (0usize, 0usize);
    let mut before: Option<(u32, &[u32])> = None;
    for (t, token) in trace.tokens().iter().enumerate() {
        let set = trace.chosen(t, l);
        if let Some((turn, last)) = before
            && turn == token.turn
            && !last.is_empty()
        {
            kept += set.iter().filter(|e| last.contains(e)).count();
            could_keep += set.len();
        }
        before = Some((token.turn, set));
        for &e in set {
            counts[e as usize] += 1;
            if let Some(at) = stack.iter().position(|&s| s == e) {
                distances.push(at);
                stack.remove(at);
            }
            stack.insert(0, e);
        }
    }
    distances.sort_unstable();
    let quantile =
        |q: f64| distances.get(((distances.len() as f64 - 1.0) * q).round().max(0.0) as usize).copied();
    let total: u64 = counts.iter().sum();
    let entropy = counts.iter().filter(|c| **c > 0).map(|&c| {
        let p = c as f64 / total as f64;
        -p * p.log2()
    });
    LayerSummary {
        layer: entry.layer,
        experts: entry.experts,
        used: counts.iter().filter(|c| **c > 0).count(),
        entropy: entropy.sum(),
        overlap: (could_keep > 0).then(|| kept as f64 / could_keep as f64),
        reuse_median: quantile(0.5),
        reuse_p90: quantile(0.9),
        counts,
    }
}
