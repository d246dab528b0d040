//! gpt-oss (gpt-oss-20b, gpt-oss-120b), from checkpoints whose experts are MXFP4 (as published) or BF16.
//!
//! As `transformers` 5 computes it (`models/gpt_oss`): attention with biases and sinks, every other layer over a
//! sliding window; top-k of the logits, then a softmax over the chosen; experts with biases and a clamped SwiGLU.

use comoe_core::store::StackedLayout;
use comoe_core::{Activation, ExpertSpec};

use super::outline::{Defaults, Outline};
use super::{
    DecoderPlan, Family, FfnPlan, LayerPlan, Mask, MixerPlan, RouterPlan, Score, TensorNames, sliding_layers,
};
use crate::error::Result;
use crate::load::ConfigFile;

/// This family.
pub(super) const FAMILY: Family = Family { model_types: &["gpt_oss"], plan };

fn plan(c: &ConfigFile) -> Result<DecoderPlan> {
    let defaults = Defaults { eps: 1e-5, theta: 150_000.0, ..Defaults::default() };
    let o = Outline::read(c, &defaults)?;
    let mut attention = o.attention(&defaults)?;
    let bias = c.or("attention_bias", true)?;
    (attention.qkv_bias, attention.out_bias, attention.sinks) = (bias, bias, true);
    let router = RouterPlan {
        score: Score::SoftmaxOfChosen,
        logit_bias: true,
        ..RouterPlan::softmax(o.top_k()?, false)
    };
    let mut moe = o.moe(c.size("intermediate_size")?, router)?;
    let activation =
        Activation::SwigluClamped { limit: c.or("swiglu_limit", 7.0)?, alpha: c.or("swiglu_alpha", 1.702)? };
    moe.expert = ExpertSpec { activation, bias: true, ..moe.expert };
    let layer = |mask: Mask| {
        let mut attention = attention.clone();
        attention.mask = mask;
        LayerPlan::pre_norm(MixerPlan::Attention(attention), FfnPlan::Moe(moe.clone()))
    };
    let layers = sliding_layers(c, o.layers, |l| l % 2 == 0)?.into_iter().map(layer).collect();
    let plan = o.decoder(layers, TensorNames { router: "mlp.router", ..TensorNames::LLAMA }, &defaults)?;
    Ok(DecoderPlan { stacked_experts: Some(StackedLayout::TransposedInterleaved), ..plan })
}
