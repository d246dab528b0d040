//! Puts a trace together, token by token.

use super::{Phase, Token, Trace, TraceInfo};

/// Makes a [`Trace`] in memory.
#[derive(Debug)]
pub struct TraceBuilder {
    trace: Trace,
}

impl TraceBuilder {
    /// An empty trace.
    pub fn new(info: TraceInfo) -> Self {
        let trace =
            Trace { info, tokens: Vec::new(), ends: Vec::new(), experts: Vec::new(), weights: Vec::new() };
        Self { trace }
    }

    /// Adds a token. `chosen` gives, for a layer ordinal, the experts in order of choice and their weights (for all
    /// tokens or for none); an expert named twice counts once, with the sum of its weights.
    pub fn token<'a>(&mut self, token: Token, chosen: impl Fn(usize) -> (&'a [u32], Option<&'a [f32]>)) {
        let trace = &mut self.trace;
        for layer in 0..trace.info.directory.layers().len() {
            let start = trace.experts.len();
            let (experts, weights) = chosen(layer);
            for (j, &expert) in experts.iter().enumerate() {
                let weight = weights.and_then(|w| w.get(j).copied());
                match trace.experts[start..].iter().position(|&e| e == expert) {
                    None => {
                        trace.experts.push(expert);
                        trace.weights.extend(weight);
                    }
                    Some(twice) => {
                        if let (Some(sum), Some(w)) = (trace.weights.get_mut(start + twice), weight) {
                            *sum += w;
                        }
                    }
                }
            }
            trace.ends.push(trace.experts.len());
        }
        trace.tokens.push(token);
    }

    /// The trace. Weights that only some tokens had are dropped.
    pub fn finish(mut self) -> Trace {
        if self.trace.weights.len() != self.trace.experts.len() {
            self.trace.weights.clear();
        }
        self.trace
    }

    /// Says what is missing from the token that was added last, if anything: generated tokens run through every layer,
    /// prompt tokens through all but the last at least.
    pub(super) fn missing_layer(&self) -> Option<usize> {
        let trace = &self.trace;
        let token = trace.tokens.len().checked_sub(1)?;
        let needed = match trace.tokens[token].phase {
            Phase::Decode => trace.layers(),
            Phase::Prompt => trace.layers().saturating_sub(1).max(1),
        };
        let layer = (0..needed.min(trace.layers())).find(|&l| trace.chosen(token, l).is_empty())?;
        Some(trace.info.directory.layers()[layer].layer)
    }
}
