//! How many tokens of a prompt go through a model at once.

use candle_core::DType;
use comoe_core::backend::cuda::workspace_bytes;

use crate::arch::DecoderPlan;

/// On the CPU, where no record crosses a link: enough for matrix products, few enough that a prompt can be cancelled.
const ON_CPU: usize = 512;

/// Chunks on a GPU are powers of two in this range.
const LEAST: usize = 2048;
const MOST: usize = 8192;

/// What a chunk's work in the experts may take of a device's memory, in bytes.
const WORKSPACE: u64 = 512 << 20;

/// Tokens of a chunk. On a GPU each chunk brings every expert over the link once, so more are faster, and activations in
/// the experts bound them. A function of the model, the context and the kind of device alone, never of slots or free
/// memory, so that output does not depend on those.
pub(crate) fn chunk_tokens(plan: &DecoderPlan, context: usize, on_gpu: bool) -> usize {
    if !on_gpu {
        return ON_CPU;
    }
    let fits = |tokens: usize| {
        let of = |expert, top_k| workspace_bytes(expert, DType::BF16, tokens, top_k);
        plan.moe_layers().all(|(_, moe)| of(&moe.expert, moe.router.top_k) <= WORKSPACE)
    };
    let mut chunk = MOST;
    while chunk > LEAST && (!fits(chunk) || chunk / 2 >= context) {
        chunk /= 2;
    }
    chunk
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::load::ConfigFile;
    use crate::testing::tiny_config;

    fn plan(change: impl FnOnce(&mut DecoderPlan)) -> DecoderPlan {
        let config = ConfigFile::parse(Path::new("config.json"), &tiny_config().to_string()).unwrap();
        let mut plan = crate::arch::plan(&config).unwrap();
        change(&mut plan);
        plan
    }

    /// Every MoE layer with experts of this shape.
    fn with_experts(hidden: usize, intermediate: usize, top_k: usize) -> DecoderPlan {
        plan(|plan| {
            for layer in &mut plan.layers {
                if let crate::arch::FfnPlan::Moe(moe) = &mut layer.ffn {
                    (moe.expert.hidden, moe.expert.intermediate) = (hidden, intermediate);
                    moe.router.top_k = top_k;
                }
            }
        })
    }

    #[test]
    fn chunks_follow_model_and_context() {
        // Qwen3-30B-A3B, Mixtral-8x7B, GLM-4.5-Air.
        let of = |shape: (usize, usize, usize), context| {
            chunk_tokens(&with_experts(shape.0, shape.1, shape.2), context, true)
        };
        let qwen = [512, 2048, 2049, 4096, 40_960].map(|c| of((2048, 768, 8), c));
        assert_eq!(qwen, [2048, 2048, 4096, 4096, 4096]);
        assert_eq!(of((4096, 14336, 2), 32_768), 4096);
        assert_eq!(of((4096, 1408, 8), 131_072), 2048);
        assert_eq!([true, false].map(|gpu| chunk_tokens(&plan(|_| {}), 100_000, gpu)), [8192, 512]);
    }
}
