//! MiniMax-M2.
//!
//! As `transformers` 5 computes it (`models/minimax_m2`): grouped-query attention with an RMS norm over all heads of q
//! and k together, RoPE over the first `rotary_dim` of each head; the sigmoid of the logits, top-k under a bias, weights
//! without the bias divided by their sum.

use super::outline::{Defaults, Outline};
use super::{
    DecoderPlan, Family, FfnPlan, LayerPlan, MixerPlan, QkNormKind, QkNormPlan, RouterPlan, RouterPrecision,
    Score, TensorNames,
};
use crate::error::Result;
use crate::load::ConfigFile;

/// This family.
pub(super) const FAMILY: Family = Family { model_types: &["minimax_m2"], plan };

fn plan(c: &ConfigFile) -> Result<DecoderPlan> {
    let defaults = Defaults { theta: 5e6, ..Defaults::default() };
    let o = Outline::read(c, &defaults)?;
    let mut attention = o.attention(&defaults)?;
    (attention.qkv_bias, attention.out_bias) = (false, false);
    attention.qk_norm = Some(QkNormPlan { eps: o.eps, kind: QkNormKind::Full });
    let router = RouterPlan {
        score: Score::Sigmoid,
        choice_bias: true,
        precision: RouterPrecision::ModelLogits,
        ..RouterPlan::softmax(o.top_k()?, true)
    };
    let moe = o.moe(c.size("intermediate_size")?, router)?;
    let layer = LayerPlan::pre_norm(MixerPlan::Attention(attention), FfnPlan::Moe(moe));
    o.decoder(vec![layer; o.layers], TensorNames::MIXTRAL, &defaults)
}
