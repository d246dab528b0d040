//! Qwen3-MoE (Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder, comoe-tiny), in place of candle-transformers' `qwen3_moe`.
//!
//! As `transformers` 5 computes it (`models/qwen3_moe`): grouped-query attention with an RMS norm per head before
//! half-style RoPE; softmax over all experts, then top-k, then an optional division by the sum.

use super::outline::{Defaults, Outline};
use super::{
    DecoderPlan, Family, FfnPlan, LayerPlan, MixerPlan, QkNormKind, QkNormPlan, RouterPlan, TensorNames,
    sparse_steps,
};
use crate::error::Result;
use crate::load::ConfigFile;

/// This family.
pub(super) const FAMILY: Family = Family { model_types: &["qwen3_moe"], plan };

fn plan(c: &ConfigFile) -> Result<DecoderPlan> {
    let defaults = Defaults::default();
    let o = Outline::read(c, &defaults)?;
    o.refuse(&["use_sliding_window"])?;
    let mut attention = o.attention(&defaults)?;
    attention.qk_norm = Some(QkNormPlan { eps: o.eps, kind: QkNormKind::Head });
    let router = RouterPlan::softmax(o.top_k()?, c.or("norm_topk_prob", false)?);
    let moe = o.moe(c.size("moe_intermediate_size")?, router)?;
    let sparse = sparse_steps(c, o.layers)?;
    let layer = |sparse: bool| -> Result<LayerPlan> {
        let ffn = if sparse { FfnPlan::Moe(moe.clone()) } else { o.dense()? };
        Ok(LayerPlan::pre_norm(MixerPlan::Attention(attention.clone()), ffn))
    };
    let layers = sparse.into_iter().map(layer).collect::<Result<_>>()?;
    o.decoder(layers, TensorNames::LLAMA, &defaults)
}
