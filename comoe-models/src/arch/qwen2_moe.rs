//! Qwen2-MoE (Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B), in place of candle-transformers' `qwen2_moe`.
//!
//! As `transformers` 5 computes it (`models/qwen2_moe`): grouped-query attention with biases on q, k and v; softmax
//! over all experts, top-k, an optional division by the sum; a shared expert times the sigmoid of its own gate.

use super::outline::{Defaults, Outline};
use super::{
    DecoderPlan, Family, FfnPlan, LayerPlan, MixerPlan, RouterPlan, SharedPlan, TensorNames, sparse_steps,
};
use crate::error::Result;
use crate::load::ConfigFile;

/// This family.
pub(super) const FAMILY: Family = Family { model_types: &["qwen2_moe"], plan };

fn plan(c: &ConfigFile) -> Result<DecoderPlan> {
    let defaults = Defaults::default();
    let o = Outline::read(c, &defaults)?;
    o.refuse(&["use_sliding_window"])?;
    let mut attention = o.attention(&defaults)?;
    (attention.qkv_bias, attention.out_bias) = (c.or("qkv_bias", true)?, false);
    let router = RouterPlan::softmax(o.top_k()?, c.or("norm_topk_prob", false)?);
    let mut moe = o.moe(c.size("moe_intermediate_size")?, router)?;
    moe.shared = SharedPlan::Gated(c.size("shared_expert_intermediate_size")?);
    let sparse = sparse_steps(c, o.layers)?;
    let layer = |sparse: bool| -> Result<LayerPlan> {
        let ffn = if sparse { FfnPlan::Moe(moe.clone()) } else { o.dense()? };
        Ok(LayerPlan::pre_norm(MixerPlan::Attention(attention.clone()), ffn))
    };
    let layers = sparse.into_iter().map(layer).collect::<Result<_>>()?;
    let shared = ["mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj", "mlp.shared_expert.down_proj"];
    o.decoder(layers, TensorNames { shared, ..TensorNames::LLAMA }, &defaults)
}
