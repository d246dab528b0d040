//! Phi-3.5-MoE.
//!
//! As `transformers` 5 computes it (`models/phimoe`): layer norms with biases; grouped-query attention with biases and
//! LongRoPE; two experts by SparseMixer; an output head with a bias. `transformers` keeps the short factors in sequences
//! of any length; here, as in the published code, a context longer than the original one takes the long ones.

use super::outline::{Defaults, Outline};
use super::{
    DecoderPlan, Family, FfnPlan, LayerPlan, Mask, MixerPlan, NormKind, NormPlan, RouterPlan, Score,
    TensorNames,
};
use crate::error::Result;
use crate::load::ConfigFile;

/// This family.
pub(super) const FAMILY: Family = Family { model_types: &["phimoe"], plan };

fn plan(c: &ConfigFile) -> Result<DecoderPlan> {
    let defaults = Defaults { eps: 1e-5, theta: 1e6, ..Defaults::default() };
    let o = Outline::read(c, &defaults)?;
    let mut attention = o.attention(&defaults)?;
    if let Some(window) = c.get("sliding_window")? {
        attention.mask = Mask::Sliding(window);
    }
    let top_k = o.top_k()?;
    if top_k != 2 {
        return Err(c.bad("num_experts_per_tok", format!("SparseMixer chooses 2 experts, not {top_k}")));
    }
    let score = Score::SparseMixer { tolerance: c.or("router_jitter_noise", 0.01)? };
    let moe = o.moe(c.size("intermediate_size")?, RouterPlan { score, ..RouterPlan::softmax(2, false) })?;
    let layer = LayerPlan::pre_norm(MixerPlan::Attention(attention), FfnPlan::Moe(moe));
    let plan = o.decoder(vec![layer; o.layers], TensorNames::MIXTRAL, &defaults)?;
    let norm = NormPlan { kind: NormKind::Layer, eps: o.eps };
    Ok(DecoderPlan { norm, head_bias: c.or("lm_head_bias", false)?, ..plan })
}
