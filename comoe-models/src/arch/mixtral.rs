//! Mixtral (Mixtral-8x7B, Mixtral-8x22B), in place of candle-transformers' `mixtral` (which cannot run in BF16).
//!
//! As `transformers` 5 computes it (`models/mixtral`): grouped-query attention with half-style RoPE, in some releases
//! over a sliding window; softmax over all experts, top-k, always divided by the sum.

use super::outline::{Defaults, Outline};
use super::{
    DecoderPlan, Family, FfnPlan, LayerPlan, Mask, MixerPlan, RouterPlan, RouterPrecision, TensorNames,
};
use crate::error::Result;
use crate::load::ConfigFile;

/// This family.
pub(super) const FAMILY: Family = Family { model_types: &["mixtral"], plan };

fn plan(c: &ConfigFile) -> Result<DecoderPlan> {
    let defaults = Defaults { eps: 1e-5, theta: 1e6, ..Defaults::default() };
    let o = Outline::read(c, &defaults)?;
    let mut attention = o.attention(&defaults)?;
    (attention.qkv_bias, attention.out_bias) = (false, false);
    if let Some(window) = c.get("sliding_window")? {
        attention.mask = Mask::Sliding(window);
    }
    let router =
        RouterPlan { precision: RouterPrecision::ModelLogits, ..RouterPlan::softmax(o.top_k()?, true) };
    let moe = o.moe(c.size("intermediate_size")?, router)?;
    let layer = LayerPlan::pre_norm(MixerPlan::Attention(attention), FfnPlan::Moe(moe));
    o.decoder(vec![layer; o.layers], TensorNames::MIXTRAL, &defaults)
}
