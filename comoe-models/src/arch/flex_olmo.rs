//! FlexOlmo (FlexOlmo-7x7B).
//!
//! As `transformers` 5 computes it (`models/flex_olmo`): norms on what the branches give instead of before them; q and k
//! under an RMS norm over all heads together; softmax over all experts, then top-k, then an optional division.

use super::outline::{Defaults, Outline};
use super::{
    BlockShape, DecoderPlan, Family, FfnPlan, LayerPlan, MixerPlan, QkNormKind, QkNormPlan, RouterPlan,
    TensorNames,
};
use crate::error::Result;
use crate::load::ConfigFile;

/// This family.
pub(super) const FAMILY: Family = Family { model_types: &["flex_olmo"], plan };

fn plan(c: &ConfigFile) -> Result<DecoderPlan> {
    let defaults = Defaults { theta: 500_000.0, ..Defaults::default() };
    let o = Outline::read(c, &defaults)?;
    let mut attention = o.attention(&defaults)?;
    attention.qk_norm = Some(QkNormPlan { eps: o.eps, kind: QkNormKind::Full });
    let router = RouterPlan::softmax(o.top_k()?, c.or("norm_topk_prob", false)?);
    let moe = o.moe(c.size("intermediate_size")?, router)?;
    let layer = LayerPlan {
        shape: BlockShape::Post,
        ..LayerPlan::pre_norm(MixerPlan::Attention(attention), FfnPlan::Moe(moe))
    };
    o.decoder(vec![layer; o.layers], TensorNames::LLAMA, &defaults)
}
