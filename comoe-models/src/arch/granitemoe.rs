//! Granite MoE (granite-3.0 and 3.1 1b-a400m, 3b-a800m).
//!
//! As `transformers` 5 computes it (`models/granitemoe`): grouped-query attention with a softmax scale of its own; top-k
//! of the logits, then a softmax over the chosen; factors on embeddings, on what each branch adds, and on logits.

use comoe_core::store::StackedLayout;

use super::outline::{Defaults, Outline};
use super::{DecoderPlan, Family, FfnPlan, LayerPlan, MixerPlan, RouterPlan, Score, TensorNames};
use crate::error::Result;
use crate::load::ConfigFile;

/// This family.
pub(super) const FAMILY: Family = Family { model_types: &["granitemoe"], plan };

fn plan(c: &ConfigFile) -> Result<DecoderPlan> {
    let defaults = Defaults::default();
    let o = Outline::read(c, &defaults)?;
    let mut attention = o.attention(&defaults)?;
    attention.scale = c.or("attention_multiplier", 1.0)?;
    let router = RouterPlan { score: Score::SoftmaxOfChosen, ..RouterPlan::softmax(o.top_k()?, false) };
    let moe = o.moe(c.size("intermediate_size")?, router)?;
    let layer = LayerPlan {
        residual_scale: c.or("residual_multiplier", 1.0)?,
        ..LayerPlan::pre_norm(MixerPlan::Attention(attention), FfnPlan::Moe(moe))
    };
    let logits_scaling: f64 = c.or("logits_scaling", 1.0)?;
    if logits_scaling == 0.0 {
        return Err(c.bad("logits_scaling", "0 is no divisor"));
    }
    let names = TensorNames { router: "block_sparse_moe.router.layer", ..TensorNames::LLAMA };
    let plan = o.decoder(vec![layer; o.layers], names, &defaults)?;
    Ok(DecoderPlan {
        embedding_scale: c.or("embedding_multiplier", 1.0)?,
        logit_scale: 1.0 / logits_scaling,
        stacked_experts: Some(StackedLayout::Normal),
        ..plan
    })
}
