//! Activations of a model's largest step on a GPU: computed before anything is loaded.

use candle_core::DType;
use comoe_core::backend::cuda;

use super::{DenseFormat, KvFormat, LoadOptions};
use crate::arch::{DecoderPlan, MixerPlan, MoePlan};
use crate::blocks::attend::{KEPT_AT_ONCE, SCORES_AT_ONCE};
use crate::blocks::int8_matrix::EXPANDED_AT_ONCE;
use crate::blocks::prefill_attention::takes_heads;
use crate::chunk::chunk_tokens;

/// Activations of the largest step within the experts, which every device with experts has.
pub(super) fn experts_bytes(plan: &DecoderPlan, context: usize, dtype: DType) -> u64 {
    let tokens = chunk_tokens(plan, context, true).min(context);
    let of =
        |(_, moe): (usize, &MoePlan)| cuda::workspace_bytes(&moe.expert, dtype, tokens, moe.router.top_k);
    plan.moe_layers().map(of).max().unwrap_or(0)
}

/// Activations of the largest step: a chunk of a prompt.
pub(super) fn workspace_bytes(plan: &DecoderPlan, context: usize, options: &LoadOptions) -> u64 {
    let tokens = chunk_tokens(plan, context, true).min(context);
    let element = options.dtype.size_in_bytes();
    let experts = experts_bytes(plan, context, options.dtype);
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
    experts + (expanded + mixer.max().unwrap_or(0) + stream + logits) as u64
}

#[cfg(test)]
mod tests {
    use std::path::Path;

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
}
