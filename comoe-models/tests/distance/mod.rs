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
