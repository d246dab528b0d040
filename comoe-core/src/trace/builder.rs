//! Puts a trace together, token by token.

use super::{Phase, Token, Trace, TraceInfo};

/// What a token did in one layer.
#[derive(Debug, Clone, Copy, Default)]
pub struct Choice<'a> {
    /// Experts, in order of choice.
    pub experts: &'a [u32],
    /// Their weights; of all tokens or of none.
    pub weights: Option<&'a [f32]>,
    /// What was guessed for the layer one layer earlier, likeliest first; see [`Trace::guesses`].
    pub guesses: &'a [u32],
}

/// Makes a [`Trace`] in memory.
#[derive(Debug)]
pub struct TraceBuilder {
    trace: Trace,
}

impl TraceBuilder {
    /// An empty trace.
    pub fn new(info: TraceInfo) -> Self {
        let trace = Trace {
            info,
            tokens: Vec::new(),
            ends: Vec::new(),
            experts: Vec::new(),
            weights: Vec::new(),
            guess_ends: Vec::new(),
            guesses: Vec::new(),
        };
        Self { trace }
    }

    /// Adds a token. `chosen` says what it did in a layer, by ordinal; an expert named twice counts once, with the sum of
    /// its weights.
    pub fn token<'a>(&mut self, token: Token, chosen: impl Fn(usize) -> Choice<'a>) {
        let trace = &mut self.trace;
        for layer in 0..trace.info.directory.layers().len() {
            let start = trace.experts.len();
            let Choice { experts, weights, guesses } = chosen(layer);
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
            trace.guesses.extend_from_slice(guesses);
            trace.guess_ends.push(trace.guesses.len());
        }
        trace.tokens.push(token);
    }

    /// The trace. Weights that only some tokens had are dropped.
    pub fn finish(mut self) -> Trace {
        if self.trace.weights.len() != self.trace.experts.len() {
            self.trace.weights.clear();
        }
        if self.trace.guesses.is_empty() {
            self.trace.guess_ends.clear();
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
