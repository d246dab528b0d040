//! LFM2-MoE (LFM2-8B-A1B).
//!
//! As `transformers` 5 computes it (`models/lfm2_moe`): short convolutions, and in some layers grouped-query attention
//! with an RMS norm per head; the sigmoid of the logits, top-k under a bias, weights without the bias divided by their
//! sum; the first layers dense.

use super::outline::{Defaults, Outline};
use super::{
    ConvPlan, DecoderPlan, Family, FfnPlan, LayerPlan, MixerPlan, Normalise, QkNormKind, QkNormPlan,
    RouterPlan, Score, TensorNames,
};
use crate::error::Result;
use crate::load::ConfigFile;

/// This family.
pub(super) const FAMILY: Family = Family { model_types: &["lfm2_moe"], plan };

fn plan(c: &ConfigFile) -> Result<DecoderPlan> {
    let defaults = Defaults { eps: 1e-5, theta: 1e6, tied: true, ..Defaults::default() };
    let o = Outline::read(c, &defaults)?;
    let mut attention = o.attention(&defaults)?;
    (attention.qkv_bias, attention.out_bias) = (false, false);
    attention.qk_norm = Some(QkNormPlan { eps: o.eps, kind: QkNormKind::Head });
    let conv =
        ConvPlan { width: o.hidden, taps: c.count_or("conv_L_cache", 3)?, bias: c.or("conv_bias", false)? };
    let router = RouterPlan {
        score: Score::Sigmoid,
        choice_bias: c.or("use_expert_bias", true)?,
        normalise: match c.or("norm_topk_prob", true)? {
            true => Normalise::Sum { eps: 1e-6 },
            false => Normalise::No,
        },
        scale: c.or("routed_scaling_factor", 1.0)?,
        ..RouterPlan::softmax(o.top_k()?, false)
    };
    let moe = o.moe(c.size("moe_intermediate_size")?, router)?;
    let dense: usize = c.or("num_dense_layers", 2)?;
    let kinds: Vec<String> = c.require("layer_types")?;
    if kinds.len() != o.layers {
        return Err(c.bad("layer_types", format!("has {} entries for {} layers", kinds.len(), o.layers)));
    }
    let layer = |(l, kind): (usize, &String)| -> Result<LayerPlan> {
        let mixer = match kind.as_str() {
            "conv" => MixerPlan::Conv(conv.clone()),
            "full_attention" => MixerPlan::Attention(attention.clone()),
            other => return Err(c.bad("layer_types", format!("{other:?} is not supported in this family"))),
        };
        let ffn = if l < dense { o.dense()? } else { FfnPlan::Moe(moe.clone()) };
        Ok(LayerPlan::pre_norm(mixer, ffn))
    };
    let layers = kinds.iter().enumerate().map(layer).collect::<Result<_>>()?;
    let names = TensorNames {
        final_norm: "embedding_norm",
        mixer_norm: "operator_norm",
        ffn_norm: "ffn_norm",
        attention_out: "self_attn.out_proj",
        qk_norm: ["self_attn.q_layernorm", "self_attn.k_layernorm"],
        router: "feed_forward.gate",
        choice_bias: "feed_forward.expert_bias",
        dense: ["feed_forward.w1", "feed_forward.w3", "feed_forward.w2"],
        ..TensorNames::LLAMA
    };
    o.decoder(layers, names, &defaults)
}
