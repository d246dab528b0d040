//! What a model needs of GPU memory beside its experts: computed before anything is loaded.

use comoe_core::backend::cuda;

use super::{DenseFormat, KvFormat, LoadOptions};
use crate::arch::{DecoderPlan, MixerPlan};
use crate::blocks::attend::{KEPT_AT_ONCE, SCORES_AT_ONCE};
use crate::blocks::int8_matrix::EXPANDED_AT_ONCE;
use crate::blocks::prefill_attention::takes_heads;
use crate::chunk::chunk_tokens;

/// GPU memory as it was planned, in bytes. What is left is for experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceMemory {
    /// Free when the model was opened.
    pub free: u64,
    /// Dense weights.
    pub weights: u64,
    /// KV cache of one sequence.
    pub kv: u64,
    /// Largest activations of a step, in the experts and outside.
    pub workspace: u64,
    /// For what cannot be computed: the libraries' own memory, modules, rounding.
    pub margin: u64,
}

impl DeviceMemory {
    /// The safety margin: cuBLAS takes 32 MiB and more of workspace, kernels are loaded when they are first used, and
    /// the driver's pool rounds up.
    pub const MARGIN: u64 = 512 << 20;

    /// All but the experts.
    pub fn reserve(&self) -> u64 {
        self.weights + self.kv + self.workspace + self.margin
    }
}

/// Activations of the largest step: a chunk of a prompt.
pub(super) fn workspace_bytes(plan: &DecoderPlan, context: usize, options: &LoadOptions) -> u64 {
    let tokens = chunk_tokens(plan, context, true).min(context);
    let element = options.dtype.size_in_bytes();
    let experts = plan
        .moe_layers()
        .map(|(_, moe)| cuda::workspace_bytes(&moe.expert, options.dtype, tokens, moe.router.top_k));
    // Where they are held: scores in the model's dtype, and about four copies in F32 on the way to probabilities.
    let softmax = |heads: usize, key_width: usize, value_width: usize| {
        if takes_heads(options.dtype, key_width, value_width) {
            return 0;
        }
        (heads * tokens * context).min(SCORES_AT_ONCE.max(heads * context)) * (2 * element + 4 * 4)
    };
    // Keys and values in INT8 that are made the model's dtype for matrix products.
    let expanded_kv = |kv_heads: usize, width: usize| match options.kv {
        KvFormat::Int8 if !takes_heads(options.dtype, width, width) => {
            let head = 2 * context * width;
            (kv_heads * head).min(KEPT_AT_ONCE.max(head)) * element
        }
        _ => 0,
    };
    let mixer = plan.layers.iter().map(|l| match &l.mixer {
        // q, k and v, split, rotated and joined; the output and its transposes.
        MixerPlan::Attention(a) => {
            softmax(a.heads, a.head_dim, a.head_dim)
                + expanded_kv(a.kv_heads, a.head_dim)
                + tokens * (a.heads + 2 * a.kv_heads) * a.head_dim * element * 6
        }
        // Queries and results as wide as the latent, and the latents without their rotated keys.
        MixerPlan::Latent(a) => {
            let wide = tokens * a.heads * (a.latent + a.rope_dim) * element * 6;
            softmax(a.heads, a.latent + a.rope_dim, a.latent) + wide + context * a.latent * element
        }
        MixerPlan::Conv(c) => tokens * c.width * element * 8,
    });
    let stream = tokens * plan.hidden * element * 6;
    // One row of logits, in the model's dtype and in F32.
    let logits = plan.vocab * (element + 4);
    let expanded = match options.dense {
        DenseFormat::Plain => 0,
        DenseFormat::Int8 => EXPANDED_AT_ONCE * element,
    };
    experts.max().unwrap_or(0) + (expanded + mixer.max().unwrap_or(0) + stream + logits) as u64
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use candle_core::DType;

    use super::*;
    use crate::load::ConfigFile;
    use crate::testing::tiny_config;

    #[test]
    fn workspace_grows_with_the_context_up_to_the_scores_held_at_once() {
        let config = ConfigFile::parse(Path::new("config.json"), &tiny_config().to_string()).unwrap();
        let plan = crate::arch::plan(&config).unwrap();
        // F16 has no kernel without scores.
        let options = LoadOptions { dtype: DType::F16, ..LoadOptions::default() };
        let bytes = |context| workspace_bytes(&plan, context, &options);
        assert!(bytes(16) < bytes(512) && bytes(512) < bytes(4096));
        let MixerPlan::Attention(attention) = &plan.layers[0].mixer else { panic!("attention") };
        let heads = attention.heads;
        let scores = (SCORES_AT_ONCE * (2 * 2 + 16)) as u64;
        let long = SCORES_AT_ONCE / heads;
        assert!((scores..2 * scores).contains(&bytes(long)), "{} of {scores}", bytes(long));
    }

    #[test]
    fn the_reserve_is_the_sum_of_its_parts() {
        let memory = DeviceMemory { free: 1 << 40, weights: 1, kv: 20, workspace: 300, margin: 4000 };
        assert_eq!(memory.reserve(), 4321);
    }
}
