//! Hunyuan (Hunyuan-A13B).
//!
//! As `transformers` 5 computes it (`models/hunyuan_v1_moe`): grouped-query attention with an RMS norm per head after
//! RoPE; softmax over all experts in F32, top-k (which may differ by layer), divided by the sum; a shared expert.

use super::outline::{Defaults, Outline};
use super::{
    DecoderPlan, Family, FfnPlan, LayerPlan, MixerPlan, QkNormKind, QkNormPlan, RouterPlan, RouterPrecision,
    SharedPlan, TensorNames,
};
use crate::error::Result;
use crate::load::ConfigFile;

/// This family.
pub(super) const FAMILY: Family = Family { model_types: &["hunyuan_v1_moe"], plan };

/// A number for all layers, or one for each.
#[derive(serde::Deserialize)]
#[serde(untagged)]
enum PerLayer {
    All(usize),
    Each(Vec<usize>),
}

fn per_layer(c: &ConfigFile, fields: &[&str], layers: usize) -> Result<Vec<usize>> {
    let numbers = match c.first(fields)? {
        Some(PerLayer::All(n)) => vec![n; layers],
        Some(PerLayer::Each(list)) => list,
        None => Vec::new(),
    };
    if numbers.len() != layers {
        return Err(c.bad(fields[0], format!("expected a number, or one for each of {layers} layers")));
    }
    Ok(numbers)
}

fn plan(c: &ConfigFile) -> Result<DecoderPlan> {
    let defaults = Defaults { eps: 1e-5, ..Defaults::default() };
    let o = Outline::read(c, &defaults)?;
    o.refuse(&["mlp_bias", "use_cla"])?;
    let mut attention = o.attention(&defaults)?;
    attention.qk_norm = Some(QkNormPlan { eps: o.eps, kind: QkNormKind::HeadAfterRope });
    let top_k = per_layer(c, &["moe_topk", "num_experts_per_tok"], o.layers)?;
    let width = per_layer(c, &["moe_intermediate_size", "intermediate_size"], o.layers)?;
    let shared = c.size("intermediate_size")?;
    let layer = |l: usize| -> Result<LayerPlan> {
        let router = RouterPlan { precision: RouterPrecision::F32, ..RouterPlan::softmax(top_k[l], true) };
        let mut moe = o.moe(width[l], router)?;
        moe.shared = SharedPlan::Mlp(shared);
        Ok(LayerPlan::pre_norm(MixerPlan::Attention(attention.clone()), FfnPlan::Moe(moe)))
    };
    let layers = (0..o.layers).map(layer).collect::<Result<_>>()?;
    let names = TensorNames {
        qk_norm: ["self_attn.query_layernorm", "self_attn.key_layernorm"],
        router: "mlp.gate.wg",
        shared: ["mlp.shared_mlp.gate_proj", "mlp.shared_mlp.up_proj", "mlp.shared_mlp.down_proj"],
        ..TensorNames::LLAMA
    };
    o.decoder(layers, names, &defaults)
}
