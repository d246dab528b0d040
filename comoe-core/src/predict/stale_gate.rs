//! What the model itself guesses: the next layer's router applied to this layer's input.

use super::{Correlation, Predictor, Scored};

/// Guesses what the model hinted at for the layer ([`Predictor::hint`]), in the model's order; and what a table says, if
/// there is one, as long as there has been no hint at all.
///
/// Models change the residual stream little from layer to layer, so the next layer's router says nearly the same about
/// this layer's input as it will about its own (Eliseev and Mazur, "Fast Inference of Mixture-of-Experts Language Models
/// with Offloading", 2023).
#[derive(Debug, Default)]
pub struct StaleGate {
    /// The hint for a layer that has not been observed since.
    hint: Option<(usize, Vec<u32>)>,
    /// For models that give no hints; gone with the first one.
    table: Option<Correlation>,
}

impl StaleGate {
    /// Without hints it guesses nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// Until a first hint it guesses what `table` does.
    pub fn or(table: Correlation) -> Self {
        Self { hint: None, table: Some(table) }
    }
}

impl Predictor for StaleGate {
    fn observe(&mut self, layer: usize, choices: &[u32], top_k: usize) {
        self.hint = None;
        if let Some(table) = &mut self.table {
            table.observe(layer, choices, top_k);
        }
    }

    fn hint(&mut self, layer: usize, guesses: &[u32]) {
        if !guesses.is_empty() {
            self.hint = Some((layer, guesses.to_vec()));
            self.table = None;
        }
    }

    fn predict(&mut self, layer: usize, out: &mut Vec<Scored>) {
        out.clear();
        if let Some((_, guesses)) = self.hint.as_ref().filter(|(of, _)| *of == layer) {
            let likeliest_first = guesses.iter().enumerate();
            out.extend(likeliest_first.map(|(i, &expert)| Scored { expert, score: 1.0 / (i + 1) as f32 }));
        } else if let Some(table) = &mut self.table {
            table.predict(layer, out);
        }
    }

    fn takes_hints(&self) -> bool {
        true
    }

    fn table(&mut self) -> Option<&mut Correlation> {
        self.table.as_mut()
    }
}
