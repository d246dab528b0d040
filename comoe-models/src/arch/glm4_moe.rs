//! GLM-4.5 and its successors (GLM-4.5, GLM-4.5-Air, GLM-4.6, GLM-4.7).
//!
//! As `transformers` 5 computes it (`models/glm4_moe`): grouped-query attention with biases on q, k and v, in some an
//! RMS norm per head, RoPE over half of each head; the router, shared expert and dense first layers of DeepSeek-V3.

use super::deepseek_v3::{dense_first, sigmoid_moe};
use super::outline::{Defaults, Outline};
use super::{DecoderPlan, Family, MixerPlan, QkNormKind, QkNormPlan, TensorNames};
use crate::error::Result;
use crate::load::ConfigFile;

/// This family.
pub(super) const FAMILY: Family = Family { model_types: &["glm4_moe"], plan };

fn plan(c: &ConfigFile) -> Result<DecoderPlan> {
    let defaults = Defaults { eps: 1e-5, partial: 0.5, ..Defaults::default() };
    let o = Outline::read(c, &defaults)?;
    let mut attention = o.attention(&defaults)?;
    attention.out_bias = false;
    if c.or("use_qk_norm", false)? {
        attention.qk_norm = Some(QkNormPlan { eps: o.eps, kind: QkNormKind::Head });
    }
    let layers = dense_first(&o, MixerPlan::Attention(attention), sigmoid_moe(&o, true)?, 1)?;
    o.decoder(layers, TensorNames::LLAMA, &defaults)
}
