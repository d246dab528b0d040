//! How far logits are apart, for the tests on the CPU and those on a GPU.

use comoe_models::{Decoder, Rows};

/// Logits of every token, this many at a time.
pub(crate) fn logits(decoder: &Decoder, ids: &[u32], step: usize) -> Vec<Vec<f32>> {
    let mut kv = decoder.new_kv().expect("a KV cache");
    let rows = |part: &[u32]| {
        let logits = decoder.forward(part, &mut kv, Rows::All).expect("a step");
        logits.to_vec2::<f32>().expect("logits")
    };
    ids.chunks(step).flat_map(rows).collect()
}

/// The largest difference of two logits; a NaN counts as infinite.
pub(crate) fn largest_difference(a: &[Vec<f32>], b: &[Vec<f32>]) -> f32 {
    let pairs = a.iter().flatten().zip(b.iter().flatten());
    pairs.fold(0.0, |worst, (a, b)| if (a - b).is_nan() { f32::INFINITY } else { worst.max((a - b).abs()) })
}

/// `KL(p || q)` of the next token, in nats.
pub(crate) fn divergence(p: &[f32], q: &[f32]) -> f64 {
    let log_softmax = |logits: &[f32]| -> Vec<f64> {
        let most = logits.iter().fold(f32::NEG_INFINITY, |m, l| m.max(*l));
        let sum: f64 = logits.iter().map(|l| f64::from(l - most).exp()).sum();
        logits.iter().map(|l| f64::from(l - most) - sum.ln()).collect()
    };
    log_softmax(p).iter().zip(log_softmax(q)).map(|(p, q)| p.exp() * (p - q)).sum()
}
