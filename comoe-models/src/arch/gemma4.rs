//! Gemma 4's language model with experts (gemma-4-26B-A4B).
//!
//! As `transformers` 5 computes it (`models/gemma4`): norms before and behind each branch and a factor on each layer;
//! RMS norms per head of q and k, and a weightless one of v; five layers over a sliding window for one over all
//! positions, which has wider heads, fewer keys, in some models no values but its keys, and rotates a quarter of each
//! head; a dense part and experts beside each other, each under norms of its own; the router on the residual stream,
//! softmax over all experts, top-k, divided by the sum, times a factor for each expert; capped logits.

use comoe_core::store::StackedLayout;

use super::outline::{Defaults, Outline};
use super::rope::rope;
use super::{
    AttentionPlan, BlockShape, DecoderPlan, Family, FfnPlan, LayerPlan, Mask, MixerPlan, Normalise, Pairing,
    QkNormKind, QkNormPlan, RouterPlan, RouterPrecision, SharedPlan, TensorNames, sliding_layers,
};
use crate::error::Result;
use crate::load::ConfigFile;

/// This family.
pub(super) const FAMILY: Family = Family { model_types: &["gemma4_text"], plan };

fn plan(c: &ConfigFile) -> Result<DecoderPlan> {
    let defaults = Defaults { tied: true, ..Defaults::default() };
    let o = Outline::read(c, &defaults)?;
    o.refuse(&["use_double_wide_mlp"])?;
    for field in ["hidden_size_per_layer_input", "num_kv_shared_layers"] {
        if c.or(field, 0usize)? != 0 {
            return Err(c.bad(field, "is not 0, which is not supported: no release with experts has that"));
        }
    }
    if c.get::<String>("use_bidirectional_attention")?.is_some_and(|over| over == "all") {
        return Err(c.bad("use_bidirectional_attention", "\"all\" is not supported"));
    }
    if !c.or("enable_moe_block", false)? {
        return Err(o.no_experts("enable_moe_block is false"));
    }
    c.require::<serde_json::Value>("rope_parameters")?;
    let router = RouterPlan {
        normalise: Normalise::Sum { eps: 0.0 },
        expert_scale: true,
        own_input: true,
        precision: RouterPrecision::ModelLogits,
        ..RouterPlan::softmax(o.top_k()?, true)
    };
    let mut moe = o.moe(c.size("moe_intermediate_size")?, router)?;
    moe.shared = SharedPlan::Parallel(c.size("intermediate_size")?);

    let plain = AttentionPlan {
        qk_norm: Some(QkNormPlan { eps: o.eps, kind: QkNormKind::Head }),
        v_norm: Some(o.eps),
        scale: 1.0,
        rope: None,
        ..o.attention(&Defaults::default())?
    };
    let values_are_keys = c.or("attention_k_eq_v", false)?;
    let layer = |(l, mask): (usize, Mask)| -> Result<LayerPlan> {
        let mut attention = AttentionPlan { mask, ..plain.clone() };
        let full = mask == Mask::Causal;
        let kind = if full { "full_attention" } else { "sliding_attention" };
        if full {
            // transformers 5 lists what differs by layer.
            let here = |field: &str, hub: &str| -> Result<Option<usize>> {
                c.first(&[&format!("per_layer_config.{l}.{field}"), hub])
            };
            attention.head_dim = here("head_dim", "global_head_dim")?.unwrap_or(512);
            attention.values_are_keys = values_are_keys;
            if values_are_keys {
                let heads = here("num_key_value_heads", "num_global_key_value_heads")?;
                attention.kv_heads = heads.unwrap_or(o.kv_heads);
            }
            if attention.kv_heads == 0 || !o.heads.is_multiple_of(attention.kv_heads) {
                let reason = format!("{} does not divide the {} heads", attention.kv_heads, o.heads);
                return Err(c.bad("num_global_key_value_heads", reason));
            }
        }
        let object = format!("rope_parameters.{kind}");
        attention.rope = Some(rope(c, &[&object], attention.head_dim, Pairing::Halves, &defaults)?);
        Ok(LayerPlan {
            mixer: MixerPlan::Attention(attention),
            ffn: FfnPlan::Moe(moe.clone()),
            shape: BlockShape::Sandwich,
            residual_scale: 1.0,
            scalar: true,
        })
    };
    let masks = sliding_layers(c, o.layers, |l| !(l + 1).is_multiple_of(6))?;
    let layers = masks.into_iter().enumerate().map(layer).collect::<Result<_>>()?;
    let names =
        TensorNames { ffn_norm: "pre_feedforward_layernorm", router: "router.proj", ..TensorNames::LLAMA };
    let plan = o.decoder(layers, names, &defaults)?;
    Ok(DecoderPlan {
        embedding_scale: (o.hidden as f64).sqrt(),
        logit_cap: c.get("final_logit_softcapping")?,
        stacked_experts: Some(StackedLayout::Normal),
        ..plan
    })
}
