//! Llama 4's language model (Scout, Maverick).
//!
//! As `transformers` 5 computes it (`models/llama4`): most layers with RoPE of neighbours, in Scout a weightless RMS
//! norm per head after it, and a mask of chunks; every fourth without RoPE, over all positions, with queries that grow
//! with their position; one expert, chosen by its logit, whose *input* is weighted by the logit's sigmoid; a shared
//! expert; in Maverick every other layer dense.

use comoe_core::store::StackedLayout;
use comoe_core::{ExpertSpec, WeightOn};

use super::outline::{Defaults, Outline};
use super::{
    DecoderPlan, Family, FfnPlan, LayerPlan, Mask, MixerPlan, Pairing, QkNormKind, QkNormPlan, RouterPlan,
    Score, SharedPlan, TemperaturePlan, TensorNames,
};
use crate::error::Result;
use crate::load::ConfigFile;

/// This family.
pub(super) const FAMILY: Family = Family { model_types: &["llama4_text"], plan };

fn plan(c: &ConfigFile) -> Result<DecoderPlan> {
    let defaults = Defaults { eps: 1e-5, theta: 500_000.0, ..Defaults::default() };
    let o = Outline::read(c, &defaults)?;
    let plain = o.attention(&defaults)?;
    let rope = o.rope(o.head_dim, Pairing::Neighbours, &defaults)?;
    let rms = QkNormPlan { eps: o.eps, kind: QkNormKind::PlainAfterRope };
    let qk_norm = c.or("use_qk_norm", true)?.then_some(rms);
    let tuned = c.first::<serde_json::Value>(&["attn_temperature_tuning"])?;
    let temperature = match tuned.is_none_or(|v| v.as_bool().unwrap_or(v.as_f64() != Some(0.0))) {
        true => {
            Some(TemperaturePlan { period: c.or("floor_scale", 8192.0)?, slope: c.or("attn_scale", 0.1)? })
        }
        false => None,
    };
    if temperature.is_some_and(|t| t.period <= 0.0) {
        return Err(c.bad("floor_scale", "expected a positive number of tokens"));
    }
    let router = RouterPlan { score: Score::Sigmoid, ..RouterPlan::softmax(o.top_k()?, false) };
    let width = c.size("intermediate_size")?;
    let mut moe = o.moe(width, router)?;
    moe.expert = ExpertSpec { weight_on: WeightOn::Input, ..moe.expert };
    moe.shared = SharedPlan::Mlp(width);

    let step: usize = c.or("interleave_moe_layer_step", 1)?;
    let sparse: Option<Vec<usize>> = c.get("moe_layers")?;
    let interval: usize = c.or("no_rope_layer_interval", 4)?;
    let rotated: Vec<usize> = c.or("no_rope_layers", Vec::new())?;
    if !rotated.is_empty() && rotated.len() != o.layers {
        return Err(c.bad("no_rope_layers", format!("has {} entries for {} layers", rotated.len(), o.layers)));
    }
    let chunk: Option<usize> = c.get("attention_chunk_size")?;
    let kinds: Option<Vec<String>> = c.get("layer_types")?;
    let layer = |l: usize| -> Result<LayerPlan> {
        let mut attention = plain.clone();
        // The field's name says the opposite: 1 is with RoPE.
        if rotated.get(l).map_or(!(l + 1).is_multiple_of(interval), |on| *on != 0) {
            (attention.rope, attention.qk_norm) = (Some(rope.clone()), qk_norm);
        } else {
            (attention.rope, attention.temperature) = (None, temperature);
        }
        let chunked = match kinds.as_ref().and_then(|k| k.get(l)) {
            Some(kind) => kind == "chunked_attention",
            None => attention.rope.is_some(),
        };
        attention.mask = match chunk {
            Some(0) => return Err(c.bad("attention_chunk_size", "0 is no size")),
            Some(chunk) if chunked => Mask::Chunked(chunk),
            _ => Mask::Causal,
        };
        let has_experts = match &sparse {
            Some(list) => list.contains(&l),
            None => step > 0 && (l + 1).is_multiple_of(step),
        };
        let intermediate = || c.size("intermediate_size_mlp");
        let ffn = match has_experts {
            true => FfnPlan::Moe(moe.clone()),
            false => FfnPlan::Dense { intermediate: intermediate()?, activation: o.activation },
        };
        Ok(LayerPlan::pre_norm(MixerPlan::Attention(attention), ffn))
    };
    let layers = (0..o.layers).map(layer).collect::<Result<_>>()?;
    let names = TensorNames {
        router: "feed_forward.router",
        dense: ["feed_forward.gate_proj", "feed_forward.up_proj", "feed_forward.down_proj"],
        shared: [
            "feed_forward.shared_expert.gate_proj",
            "feed_forward.shared_expert.up_proj",
            "feed_forward.shared_expert.down_proj",
        ],
        ..TensorNames::LLAMA
    };
    let plan = o.decoder(layers, names, &defaults)?;
    Ok(DecoderPlan { stacked_experts: Some(StackedLayout::Transposed), ..plan })
}
