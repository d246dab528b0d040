//! Several predictors weighed against each other.

use super::{Correlation, History, Predictor, Scored, rank};

/// Logistic regression over what the simple predictors say, learned online for each layer: the log-odds of
/// [`Correlation`]'s estimate and of the expert's decayed frequency, and whether the one, two, and three tokens before
/// chose it. One step of stochastic gradient descent on the log loss per token, after the layer's routing is known.
#[derive(Debug)]
pub struct Combined {
    correlation: Correlation,
    history: History,
    layers: Vec<Layer>,
    /// Features of the guess for the token at hand, `[experts, FEATURES]`.
    features: Vec<[f32; FEATURES]>,
    chances: Vec<f32>,
    scores: Vec<f32>,
}

const FEATURES: usize = 6;
/// Step size of the descent.
const RATE: f32 = 0.02;
/// Memory of the frequency, in tokens.
const MEMORY: f32 = 64.0;
/// Where a new layer starts: every feature speaks for the expert, the base rate is below even.
const START: [f32; FEATURES] = [-0.5, 0.6, 0.4, 0.6, 0.3, 0.2];

#[derive(Debug)]
struct Layer {
    weights: [f32; FEATURES],
    /// Decayed part of tokens that chose each expert.
    frequency: Vec<f32>,
    /// Tokens since each expert was chosen, saturating.
    age: Vec<u8>,
}

/// Log-odds of a chance, kept away from the infinities.
fn logit(p: f32) -> f32 {
    let p = p.clamp(1e-3, 0.999);
    (p / (1.0 - p)).ln()
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

impl Combined {
    /// As [`Correlation::new`].
    ///
    /// # Panics
    /// When `depth` is 0.
    pub fn new(experts: &[usize], depth: usize) -> Self {
        let layer = |&n: &usize| Layer { weights: START, frequency: vec![0.0; n], age: vec![u8::MAX; n] };
        Self {
            correlation: Correlation::new(experts, depth),
            history: History::default(),
            layers: experts.iter().map(layer).collect(),
            features: Vec::new(),
            chances: Vec::new(),
            scores: Vec::new(),
        }
    }

    /// Scores every expert of `layer` for the token at hand.
    fn score(&mut self, layer: usize) {
        self.correlation.chances(layer, &mut self.chances);
        let this = &self.layers[layer];
        self.features.clear();
        self.scores.clear();
        for (e, &chance) in self.chances.iter().enumerate() {
            let ago = |n| f32::from(this.age[e] == n);
            let f = [1.0, logit(chance), logit(this.frequency[e]), ago(0), ago(1), ago(2)];
            self.scores.push(sigmoid(f.iter().zip(&this.weights).map(|(x, w)| x * w).sum()));
            self.features.push(f);
        }
    }
}

impl Predictor for Combined {
    fn observe(&mut self, layer: usize, choices: &[u32], top_k: usize) {
        let top_k = top_k.max(1);
        if layer >= self.layers.len() {
            return;
        }
        // Prompts train the tables; weights are learned where they are used, on single tokens.
        if choices.len() == top_k {
            self.score(layer);
            let this = &mut self.layers[layer];
            for (e, (features, p)) in self.features.iter().zip(&self.scores).enumerate() {
                let error = f32::from(choices.contains(&(e as u32))) - p;
                this.weights.iter_mut().zip(features).for_each(|(w, x)| *w += RATE * error * x);
            }
        }
        let this = &mut self.layers[layer];
        for token in choices.chunks(top_k) {
            this.frequency.iter_mut().for_each(|f| *f *= 1.0 - 1.0 / MEMORY);
            this.age.iter_mut().for_each(|a| *a = a.saturating_add(1));
            for &e in token {
                this.frequency[e as usize] += 1.0 / MEMORY;
                this.age[e as usize] = 0;
            }
        }
        self.correlation.observe(layer, choices, top_k);
        self.history.observe(layer, choices, top_k);
    }

    fn predict(&mut self, layer: usize, out: &mut Vec<Scored>) {
        out.clear();
        if layer < self.layers.len() && !self.history.last_token(layer).is_empty() {
            self.score(layer);
            rank(&self.scores, out);
        }
    }
}
