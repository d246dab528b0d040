//! ERNIE 4.5 (ERNIE-4.5-21B-A3B, ERNIE-4.5-300B-A47B).
//!
//! As `transformers` 5 computes it (`models/ernie4_5_moe`): grouped-query attention with RoPE of neighbours; softmax
//! over all experts in F32, top-k under a bias, weights without the bias divided by their sum; shared experts as one;
//! the first layers, or all but every n-th, dense.

use super::outline::{Defaults, Outline};
use super::{
    DecoderPlan, Family, FfnPlan, LayerPlan, MixerPlan, Normalise, Pairing, RouterPlan, RouterPrecision,
    SharedPlan, TensorNames,
};
use crate::error::Result;
use crate::load::ConfigFile;

/// This family.
pub(super) const FAMILY: Family = Family { model_types: &["ernie4_5_moe"], plan };

fn plan(c: &ConfigFile) -> Result<DecoderPlan> {
    let defaults = Defaults { eps: 1e-5, theta: 500_000.0, tied: true, ..Defaults::default() };
    let o = Outline::read(c, &defaults)?;
    o.refuse(&["use_bias"])?;
    let mut attention = o.attention(&defaults)?;
    attention.rope = Some(o.rope(o.head_dim, Pairing::Neighbours, &defaults)?);
    let router = RouterPlan {
        choice_bias: true,
        normalise: Normalise::AtLeast(c.or("moe_norm_min", 1e-12)?),
        precision: RouterPrecision::F32Logits,
        ..RouterPlan::softmax(o.top_k()?, false)
    };
    let intermediate = c.size("moe_intermediate_size")?;
    let mut moe = o.moe(intermediate, router)?;
    moe.shared = SharedPlan::of(intermediate * c.count_or("moe_num_shared_experts", 2)?);
    let interval: usize = c.or("moe_layer_interval", 1)?;
    let first: usize = c.or("moe_layer_start_index", 1)?;
    // -1 is the last layer.
    let last = usize::try_from(c.or("moe_layer_end_index", -1i64)?).unwrap_or(o.layers);
    let layer = |l: usize| -> Result<LayerPlan> {
        let sparse = interval > 0 && (l + 1).is_multiple_of(interval) && (first..=last).contains(&l);
        let ffn = if sparse { FfnPlan::Moe(moe.clone()) } else { o.dense()? };
        Ok(LayerPlan::pre_norm(MixerPlan::Attention(attention.clone()), ffn))
    };
    let layers = (0..o.layers).map(layer).collect::<Result<_>>()?;
    let choice_bias = "mlp.moe_statics.e_score_correction_bias";
    o.decoder(layers, TensorNames { choice_bias, ..TensorNames::LLAMA }, &defaults)
}
