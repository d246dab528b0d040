//! OLMoE (OLMoE-1B-7B).
//!
//! As `transformers` 5 computes it (`models/olmoe`): q and k under an RMS norm over all heads together, q, k and v
//! optionally clipped; softmax over all experts, then top-k, then an optional division by the sum.

use super::outline::{Defaults, Outline};
use super::{
    DecoderPlan, Family, FfnPlan, LayerPlan, MixerPlan, QkNormKind, QkNormPlan, RouterPlan, TensorNames,
};
use crate::error::Result;
use crate::load::ConfigFile;

/// This family.
pub(super) const FAMILY: Family = Family { model_types: &["olmoe"], plan };

fn plan(c: &ConfigFile) -> Result<DecoderPlan> {
    let defaults = Defaults { eps: 1e-5, ..Defaults::default() };
    let o = Outline::read(c, &defaults)?;
    let mut attention = o.attention(&defaults)?;
    attention.qk_norm = Some(QkNormPlan { eps: o.eps, kind: QkNormKind::Full });
    attention.clip = c.get("clip_qkv")?;
    let router = RouterPlan::softmax(o.top_k()?, c.or("norm_topk_prob", false)?);
    let moe = o.moe(c.size("intermediate_size")?, router)?;
    let layer = LayerPlan::pre_norm(MixerPlan::Attention(attention), FfnPlan::Moe(moe));
    o.decoder(vec![layer; o.layers], TensorNames::LLAMA, &defaults)
}
