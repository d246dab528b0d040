//! What a step needs of GPU memory beside slots. Present in every build: a plan is made before a device is opened.

use crate::expert::{ExpertLayout, ExpertSpec};
use crate::format::ExpertFormat;

/// Up to this many tokens a record is dequantised while it is multiplied; for more it is dequantised first and
/// multiplied as a dense matrix. The call's own token count decides, nothing else, so output does not depend on slots.
pub const MOST_GEMV_TOKENS: usize = 32;
/// Dequantised records at a time, in bytes (at least one record).
pub(super) const DENSE_BYTES: usize = 256 << 20;

/// GPU memory in bytes that a step of `tokens` tokens with `top_k` experts each needs beside the slots and the model's
/// own tensors, for experts of `spec` in `format`.
pub fn workspace_bytes(spec: &ExpertSpec, format: ExpertFormat, tokens: usize, top_k: usize) -> u64 {
    let rows = (tokens * top_k) as u64;
    let activations = 4 * rows * (spec.intermediate + spec.hidden) as u64;
    let dense = match format {
        ExpertFormat::Bf16 => 0,
        _ if tokens <= MOST_GEMV_TOKENS => 0,
        _ => {
            let record = ExpertLayout::new(spec, ExpertFormat::Bf16).record_bytes;
            (DENSE_BYTES / record).max(1) * record
        }
    };
    activations + dense as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_needs_room_to_dequantise_and_a_token_does_not() {
        let spec = ExpertSpec::swiglu(2048, 768);
        let one = workspace_bytes(&spec, ExpertFormat::INT4, 1, 8);
        assert_eq!(one, 4 * 8 * (2048 + 768));
        let dense = workspace_bytes(&spec, ExpertFormat::INT4, 512, 8) - 512 * one;
        assert!(dense > 200 << 20 && dense <= DENSE_BYTES as u64, "{dense}");
        assert_eq!(workspace_bytes(&spec, ExpertFormat::Bf16, 512, 8), 512 * one);
    }
}
