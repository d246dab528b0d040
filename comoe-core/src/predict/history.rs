//! What the chunk at hand chose so far, and the token before it.

/// The choices of the chunk of tokens that is under way, layer by layer.
#[derive(Debug, Clone, Default)]
pub struct History {
    /// Choices of the last chunk that reached each layer.
    layers: Vec<Seen>,
    chunk: u64,
    /// The layer observed last.
    last: Option<usize>,
}

#[derive(Debug, Clone)]
struct Seen {
    /// Number of the chunk, from 1; 0 before the first.
    chunk: u64,
    choices: Vec<u32>,
    top_k: usize,
}

impl Default for Seen {
    fn default() -> Self {
        Self { chunk: 0, choices: Vec::new(), top_k: 1 }
    }
}

impl History {
    /// Takes note of a layer step; see [`Predictor::observe`](super::Predictor::observe).
    pub fn observe(&mut self, layer: usize, choices: &[u32], top_k: usize) {
        if self.last.is_none_or(|last| layer <= last) {
            self.chunk += 1;
        }
        self.last = Some(layer);
        if layer >= self.layers.len() {
            self.layers.resize_with(layer + 1, Seen::default);
        }
        let seen = &mut self.layers[layer];
        seen.chunk = self.chunk;
        seen.top_k = top_k.max(1);
        seen.choices.clear();
        seen.choices.extend_from_slice(choices);
    }

    /// What the chunk at hand chose in `layer`, one slice a token; `None` if it was not there.
    pub fn of_chunk(&self, layer: usize) -> Option<impl Iterator<Item = &[u32]>> {
        let seen = self.layers.get(layer).filter(|s| s.chunk == self.chunk && s.chunk > 0)?;
        Some(seen.choices.chunks(seen.top_k))
    }

    /// What the token before the one that is about to run `layer` chose in `guide`; empty if it was not there.
    pub fn of_token_before(&self, layer: usize, guide: usize) -> &[u32] {
        let begins = self.last.is_none_or(|last| layer <= last);
        let before = if begins { self.chunk } else { self.chunk.saturating_sub(1) };
        match self.layers.get(guide) {
            Some(seen) if seen.chunk == before => self.last_token(guide),
            _ => &[],
        }
    }

    /// The layer step that was observed last: its layer, `[tokens, top_k]` choices and top-k.
    pub fn last_step(&self) -> Option<(usize, &[u32], usize)> {
        let layer = self.last?;
        self.layers.get(layer).map(|seen| (layer, seen.choices.as_slice(), seen.top_k))
    }

    /// What the last token that reached `layer` chose there; empty if none did.
    pub fn last_token(&self, layer: usize) -> &[u32] {
        let last = self.layers.get(layer).and_then(|s| s.choices.chunks(s.top_k).last());
        last.unwrap_or_default()
    }
}
