//! What a step needs of GPU memory beside slots. Present in every build: a plan is made before a device is opened.

use candle_core::DType;

use crate::backend::{MOST_DEVICE_ASSIGNMENTS, MOST_DEVICE_TOKENS};
use crate::expert::{ExpertSpec, WeightOn};

/// Up to this many tokens a record is multiplied with each token's row in turn; for more, tensor cores multiply it with
/// all of its tokens at once (in BF16; a step in F32 stays with the first). The call's own token count decides, nothing
/// else, so output does not depend on slots.
pub const MOST_GEMV_TOKENS: usize = 32;

/// GPU memory in bytes that a step of `tokens` tokens in `dtype` with `top_k` experts each needs beside the slots and
/// the model's own tensors, for experts of `spec`.
pub fn workspace_bytes(spec: &ExpertSpec, dtype: DType, tokens: usize, top_k: usize) -> u64 {
    let many = tokens > MOST_GEMV_TOKENS && dtype != DType::F32;
    let hidden = if many { 2 * spec.intermediate.next_multiple_of(8) } else { 4 * spec.intermediate };
    // x is multiplied as it comes where that is in bf16 and without weights.
    let rounded = match (spec.weight_on, dtype) {
        _ if !many => 0,
        (WeightOn::Input, _) => tokens * top_k,
        (_, DType::BF16) => 0,
        _ => tokens,
    };
    let rounded = rounded * 2 * spec.hidden.next_multiple_of(8);
    (tokens * top_k * (hidden + 4 * spec.hidden) + rounded) as u64
}

/// GPU memory in bytes for what several GPUs hand to each other in steps of few tokens, for experts of `spec`: on the first
/// GPU for each of the others, and on each of the others.
pub fn handed_bytes(spec: &ExpertSpec, top_k: usize) -> [u64; 2] {
    let rows = MOST_DEVICE_TOKENS * top_k;
    let handed = 8 * MOST_DEVICE_ASSIGNMENTS + 4 * MOST_DEVICE_TOKENS * spec.hidden;
    // Twice as much in words (kernels/words.cuh); a member has a copy besides.
    [(2 * 4 * rows * spec.hidden) as u64, (3 * handed) as u64]
}

/// Guesses of a layer that are kept.
pub(super) const MOST_RANKED: usize = 32;

/// GPU memory in bytes of what is learned of routing ([`Prefetch::Correlation`](crate::Prefetch::Correlation)) where steps are
/// driven by the GPU, for layers of so many `experts`.
pub fn learned_bytes(experts: &[usize]) -> u64 {
    let before = experts.last().into_iter().chain(experts);
    let counts: usize = before.zip(experts).map(|(before, own)| before * (1 + own)).sum();
    // The last step, and for each layer a weight, guesses, and what was chosen.
    let steps = 6 + MOST_DEVICE_ASSIGNMENTS + experts.len() * (1 + MOST_RANKED + 4 + MOST_DEVICE_ASSIGNMENTS);
    4 * (steps + counts) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_keeps_hidden_activations_and_outputs() {
        let spec = ExpertSpec::swiglu(2048, 768);
        let bytes = |dtype, tokens| workspace_bytes(&spec, dtype, tokens, 8);
        assert_eq!(bytes(DType::BF16, 1), 4 * 8 * (2048 + 768));
        assert_eq!(bytes(DType::BF16, 512), 512 * 8 * (4 * 2048 + 2 * 768));
        assert_eq!(bytes(DType::F32, 512), 512 * bytes(DType::F32, 1));
        assert_eq!(bytes(DType::F16, 512), bytes(DType::BF16, 512) + 512 * 2 * 2048);
    }

    #[test]
    fn what_is_learned_is_counted_by_pairs_of_layers() {
        assert_eq!(learned_bytes(&[4, 6]), 4 * (6 + 1024 + 2 * 1061 + 6 * 5 + 4 * 7));
        // DeepSeek-V3: 15 MB.
        assert_eq!(learned_bytes(&[256; 58]) - 4 * 58 * 256 * 257, 4 * (1030 + 58 * 1061));
    }

    #[test]
    fn what_is_handed_over_is_counted_for_the_most_tokens() {
        let spec = ExpertSpec::swiglu(2048, 768);
        // 32 x 8 rows in F32, and ids, weights and 32 rows of x; a word has eight bytes for four.
        assert_eq!(handed_bytes(&spec, 8), [4 << 20, 3 * ((8 << 10) + (256 << 10))]);
    }
}
