//! The token before.

use super::{History, Predictor, Scored};

/// Guesses that a token chooses what the token before it chose in the same layer.
#[derive(Debug, Default)]
pub struct PreviousToken {
    history: History,
}

impl PreviousToken {
    /// Knows nothing yet.
    pub fn new() -> Self {
        Self::default()
    }
}

impl Predictor for PreviousToken {
    fn observe(&mut self, layer: usize, choices: &[u32], top_k: usize) {
        self.history.observe(layer, choices, top_k);
    }

    fn predict(&mut self, layer: usize, out: &mut Vec<Scored>) {
        out.clear();
        out.extend(self.history.last_token(layer).iter().map(|&expert| Scored { expert, score: 1.0 }));
        out.sort_unstable_by_key(|s| s.expert);
    }
}
