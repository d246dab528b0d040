//! What steps of few tokens keep on a GPU: their results, made once and used again by every layer, and tables.
//!
//! Results are counted as `blocks/arena.rs` makes them: what a layer takes, in its order, in two sets by turns. The order is
//! that of `blocks/fused`; a test on a GPU compares.

use candle_core::DType;
use comoe_core::backend::MOST_DEVICE_TOKENS;
use comoe_core::backend::cuda;
use comoe_core::store::Directory;

use crate::arch::{
    AttentionPlan, BlockShape, DecoderPlan, FfnPlan, LayerPlan, Mask, MixerPlan, MoePlan, NormKind,
    QkNormKind, RopePlan, RouterPrecision, SharedPlan,
};
use crate::blocks::attend::pieces;
use crate::blocks::step::LEAST_REACH;

/// What the experts' driver keeps whatever the model: a ring for work items, lists of a step.
const DRIVER: u64 = (1 << 20) + (128 << 10);
/// And for each record: its address, uses, score, slot, and what is in that.
const DRIVER_RECORD: u64 = 8 + 4 + 8 + 4 + 12;
/// What the sampler keeps whatever the model: random numbers, bins.
const SAMPLER: u64 = 64 << 10;

/// Bytes of all that a decoder with these experts keeps for steps of few tokens.
pub(super) fn buffer_bytes(
    plan: &DecoderPlan,
    directory: &Directory,
    context: usize,
    dtype: DType,
    batch: usize,
) -> u64 {
    let element = dtype.size_in_bytes();
    let mut ropes: Vec<&RopePlan> = Vec::new();
    for rope in plan.layers.iter().filter_map(|l| l.mixer.rope()) {
        if !ropes.contains(&rope) {
            ropes.push(rope);
        }
    }
    // Cosines and sines of each pair.
    let rotary: usize = ropes.iter().map(|r| context * r.dim * element).sum();
    // History by position.
    let sequence = (4 * (context + 1)) as u64 + SAMPLER;
    let all = result_bytes(plan, context, dtype) + rotary as u64 + driver_bytes(plan, directory);
    all.saturating_add((batch as u64).saturating_mul(sequence))
}

/// Bytes of what a device keeps that drives steps of few tokens.
pub(super) fn driver_bytes(plan: &DecoderPlan, directory: &Directory) -> u64 {
    let experts = plan
        .moe_layers()
        .map(|(_, moe)| cuda::workspace_bytes(&moe.expert, DType::F32, MOST_DEVICE_TOKENS, moe.router.top_k));
    experts.max().unwrap_or(0) + DRIVER + DRIVER_RECORD * directory.len() as u64
}

/// Bytes of the results alone.
pub(crate) fn result_bytes(plan: &DecoderPlan, context: usize, dtype: DType) -> u64 {
    let mut arena = Arena::default();
    // A short prompt goes through at once, before the first token of an answer.
    arena.step(plan, dtype, None);
    let mut reach = LEAST_REACH;
    loop {
        arena.step(plan, dtype, Some(reach.min(context)));
        if reach >= context {
            return arena.bytes();
        }
        reach *= 2;
    }
}

/// The n-th result of a layer lies in one of the n-th buffers.
#[derive(Default)]
struct Arena {
    sets: [Vec<Vec<(DType, usize)>>; 2],
    turn: usize,
    next: usize,
}

impl Arena {
    fn bytes(&self) -> u64 {
        let all = self.sets.iter().flatten().flatten();
        all.map(|(dtype, elements)| (dtype.size_in_bytes() * elements) as u64).sum()
    }

    fn turn(&mut self) {
        (self.turn, self.next) = (1 - self.turn, 0);
    }

    fn take(&mut self, elements: usize, dtype: DType) {
        let (set, n) = (&mut self.sets[self.turn], self.next);
        self.next += 1;
        if set.len() <= n {
            set.resize_with(n + 1, Vec::new);
        }
        if !set[n].iter().any(|&(of, room)| of == dtype && room >= elements) {
            set[n].push((dtype, elements));
        }
    }

    /// Results with a row of each of these widths for every token.
    fn rows(&mut self, widths: &[usize], dtype: DType) {
        widths.iter().for_each(|w| self.take(w * MOST_DEVICE_TOKENS, dtype));
    }

    /// A step that sees `reach` positions; `None`: of several tokens, whose attention keeps its sums elsewhere.
    fn step(&mut self, plan: &DecoderPlan, dtype: DType, reach: Option<usize>) {
        let hidden = plan.hidden;
        self.turn();
        self.rows(&[hidden], dtype);
        let mut branch = false;
        for layer in &plan.layers {
            self.turn();
            self.add_norm(plan, layer.shape.has_pre(), branch, dtype);
            self.mixer(&layer.mixer, hidden, dtype, reach);
            self.leave(layer, hidden, dtype);
            self.add_norm(plan, layer.shape.has_pre(), true, dtype);
            match &layer.ffn {
                FfnPlan::Dense { intermediate, .. } => self.dense(*intermediate, hidden, dtype),
                FfnPlan::Moe(moe) => self.moe(moe, hidden, dtype),
            }
            self.leave(layer, hidden, dtype);
            branch = !layer.scalar;
        }
        self.turn();
        self.add_norm(plan, true, branch, dtype);
        self.rows(&[plan.vocab], dtype);
    }

    fn add_norm(&mut self, plan: &DecoderPlan, normed: bool, branch: bool, dtype: DType) {
        if !normed {
            return;
        }
        self.rows(&[plan.hidden], dtype);
        // The sum comes with an RMS norm; before a layer norm it is made apart.
        if branch && plan.norm.kind == NormKind::Rms {
            self.rows(&[plan.hidden], dtype);
        }
    }

    fn leave(&mut self, layer: &LayerPlan, hidden: usize, dtype: DType) {
        if layer.shape != BlockShape::Pre {
            self.rows(&[hidden], dtype);
        }
    }

    fn attend(&mut self, heads: usize, value: usize, mask: Mask, dtype: DType, reach: Option<usize>) {
        self.rows(&[heads * value], dtype);
        if let Some(reach) = reach {
            let pieces = pieces(reach, mask);
            let sums = (4 * heads * pieces * value).next_multiple_of(16);
            self.take((sums + 8 * heads * pieces).div_ceil(4), DType::F32);
        }
    }

    fn mixer(&mut self, mixer: &MixerPlan, hidden: usize, dtype: DType, reach: Option<usize>) {
        match mixer {
            MixerPlan::Attention(a) => {
                let AttentionPlan { heads, kv_heads, head_dim, mask, .. } = *a;
                self.rows(&[(heads + 2 * kv_heads) * head_dim], dtype);
                if a.qk_norm.is_some_and(|n| n.kind == QkNormKind::Full) {
                    self.rows(&[heads * head_dim, kv_heads * head_dim], dtype);
                }
                self.rows(&[heads * head_dim], dtype);
                self.attend(heads, head_dim, mask, dtype, reach);
            }
            MixerPlan::Latent(l) => {
                let queries = l.heads * (l.nope_dim + l.rope_dim);
                match l.query_rank {
                    None => self.rows(&[queries], dtype),
                    Some(rank) => self.rows(&[rank, rank, queries], dtype),
                }
                self.rows(&[l.latent + l.rope_dim, l.heads * (l.latent + l.rope_dim)], dtype);
                self.attend(l.heads, l.latent, Mask::Causal, dtype, reach);
                self.rows(&[l.heads * l.value_dim], dtype);
            }
            MixerPlan::Conv(c) => self.rows(&[3 * c.width, c.width], dtype),
        }
        self.rows(&[hidden], dtype);
    }

    fn dense(&mut self, width: usize, hidden: usize, dtype: DType) {
        self.rows(&[2 * width, width, hidden], dtype);
    }

    fn moe(&mut self, moe: &MoePlan, hidden: usize, dtype: DType) {
        match moe.shared {
            SharedPlan::None => self.routed(moe, hidden, dtype),
            SharedPlan::Mlp(width) | SharedPlan::Gated(width) => {
                self.routed(moe, hidden, dtype);
                self.dense(width, hidden, dtype);
                if matches!(moe.shared, SharedPlan::Gated(_)) {
                    self.rows(&[1], dtype);
                }
                self.rows(&[hidden], dtype);
            }
            SharedPlan::Parallel(width) => {
                self.dense(width, hidden, dtype);
                self.rows(&[hidden, hidden], dtype);
                self.routed(moe, hidden, dtype);
                self.rows(&[hidden, hidden], dtype);
            }
        }
    }

    fn routed(&mut self, moe: &MoePlan, hidden: usize, dtype: DType) {
        let router = &moe.router;
        if router.own_input {
            self.rows(&[hidden], dtype);
        }
        let logits = match router.precision {
            RouterPrecision::F32 | RouterPrecision::F32Logits => DType::F32,
            RouterPrecision::Model | RouterPrecision::ModelLogits => dtype,
        };
        self.rows(&[moe.experts], logits);
        self.rows(&[router.top_k], DType::U32);
        self.rows(&[router.top_k], DType::F32);
        self.rows(&[hidden], dtype);
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::load::ConfigFile;
    use crate::testing::tiny_config;

    #[test]
    fn results_are_counted_by_hand() {
        let config = ConfigFile::parse(Path::new("config.json"), &tiny_config().to_string()).unwrap();
        let mut plan = crate::arch::plan(&config).unwrap();
        plan.layers.truncate(1);
        let MixerPlan::Attention(a) = &plan.layers[0].mixer else { panic!("attention") };
        let FfnPlan::Moe(moe) = &plan.layers[0].ffn else { panic!("experts") };
        let (hidden, heads, width) = (plan.hidden, a.heads, a.head_dim);
        assert_eq!(moe.shared, SharedPlan::None);
        // The layer: norm, qkv, q, attention's result, its projection; sum, norm, logits, experts, weights, result.
        let layer = hidden + (heads + 2 * a.kv_heads) * width + 2 * heads * width + hidden;
        let layer = layer + 2 * hidden + moe.experts + hidden;
        let words = 2 * moe.router.top_k;
        // The embedding's set is also the head's: sum and norm, of which the first lies where the embedding does.
        let ends = 2 * hidden + plan.vocab;
        let several = 4 * 32 * (layer + words + ends);
        let mut arena = Arena::default();
        arena.step(&plan, DType::F32, None);
        assert_eq!(arena.bytes(), several as u64);
        // One token keeps attention's sums among them, so what comes behind is elsewhere.
        assert!(result_bytes(&plan, 512, DType::F32) > several as u64);
        assert!(result_bytes(&plan, 4096, DType::F32) > result_bytes(&plan, 512, DType::F32));
    }
}
