//! dots.llm1.
//!
//! As `transformers` 5 computes it (`models/dots1`): attention with an RMS norm per head, in some layers over a sliding
//! window; the router, shared expert and dense first layers of DeepSeek-V3.

use super::deepseek_v3::{dense_first, sigmoid_moe};
use super::outline::{Defaults, Outline};
use super::{DecoderPlan, Family, MixerPlan, QkNormKind, QkNormPlan, TensorNames, sliding_layers};
use crate::error::Result;
use crate::load::ConfigFile;

/// This family.
pub(super) const FAMILY: Family = Family { model_types: &["dots1"], plan };

fn plan(c: &ConfigFile) -> Result<DecoderPlan> {
    let defaults = Defaults::default();
    let o = Outline::read(c, &defaults)?;
    let mut attention = o.attention(&defaults)?;
    attention.qk_norm = Some(QkNormPlan { eps: o.eps, kind: QkNormKind::Head });
    let mut layers = dense_first(&o, MixerPlan::Attention(attention.clone()), sigmoid_moe(&o, false)?, 0)?;
    let window: Option<usize> = c.get("sliding_window")?;
    let from = c.or("max_window_layers", o.layers)?;
    let masks = sliding_layers(c, o.layers, |l| window.is_some() && l >= from)?;
    for (layer, mask) in layers.iter_mut().zip(masks) {
        attention.mask = mask;
        layer.mixer = MixerPlan::Attention(attention.clone());
    }
    o.decoder(layers, TensorNames::LLAMA, &defaults)
}
