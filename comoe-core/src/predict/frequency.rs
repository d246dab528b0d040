//! What was chosen most.

use super::{Predictor, Scored, rank};

/// Guesses the experts that were chosen most often in the layer so far.
#[derive(Debug)]
pub struct Frequency {
    /// Choices by layer and expert.
    counts: Vec<Vec<f32>>,
}

impl Frequency {
    /// `experts[l]` is the number of experts of the `l`-th layer that has experts.
    pub fn new(experts: &[usize]) -> Self {
        Self { counts: experts.iter().map(|&n| vec![0.0; n]).collect() }
    }
}

impl Predictor for Frequency {
    fn observe(&mut self, layer: usize, choices: &[u32], _top_k: usize) {
        let Some(counts) = self.counts.get_mut(layer) else { return };
        for &e in choices {
            counts[e as usize] += 1.0;
        }
        // Whole numbers are exact in f32 up to 2^24: halved before that.
        if counts.iter().any(|&c| c >= (1 << 23) as f32) {
            counts.iter_mut().for_each(|c| *c /= 2.0);
        }
    }

    fn predict(&mut self, layer: usize, out: &mut Vec<Scored>) {
        rank(self.counts.get(layer).map_or(&[], Vec::as_slice), out);
    }
}
