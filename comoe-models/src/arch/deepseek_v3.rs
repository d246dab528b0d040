//! DeepSeek-V3 and its kin (DeepSeek-V3, R1, V3.1; Moonlight; Kimi-K2).
//!
//! As `transformers` 5 computes it (`models/deepseek_v3`): latent attention; the sigmoid of the logits in F32, top-k
//! under a bias within the groups whose best two experts are best, weights without the bias divided by their sum and
//! times a factor; a shared expert; the first layers dense.

use super::outline::{Defaults, Outline};
use super::rope::{Fields, yarn_growth};
use super::{
    DecoderPlan, Family, FfnPlan, GroupScore, Groups, LatentPlan, LayerPlan, MixerPlan, MoePlan, Normalise,
    Pairing, RopeScaling, RouterPlan, RouterPrecision, Score, SharedPlan, TensorNames,
};
use crate::error::Result;
use crate::load::ConfigFile;

/// This family.
pub(super) const FAMILY: Family = Family { model_types: &["deepseek_v3", "kimi_k2"], plan };

fn plan(c: &ConfigFile) -> Result<DecoderPlan> {
    let defaults = Defaults::default();
    let o = Outline::read(c, &defaults)?;
    let moe = sigmoid_moe(&o, true)?;
    let layers = dense_first(&o, interleaved_latent(&o, &defaults)?, moe, 3)?;
    o.decoder(layers, TensorNames::LLAMA, &defaults)
}

/// Experts behind the router of DeepSeek-V3, with its shared expert.
pub(super) fn sigmoid_moe(o: &Outline<'_>, normalise: bool) -> Result<MoePlan> {
    let c = o.c;
    let scoring: String = c.or("scoring_func", "sigmoid".to_owned())?;
    if scoring != "sigmoid" {
        return Err(c.bad("scoring_func", format!("{scoring:?} is not supported; only \"sigmoid\" is")));
    }
    let (count, keep) = (c.count_or("n_group", 1)?, c.count_or("topk_group", 1)?);
    let router = RouterPlan {
        score: Score::Sigmoid,
        choice_bias: true,
        // One group of all is no choice.
        groups: (count != 1).then_some(Groups { count, keep, by: GroupScore::BestTwo }),
        normalise: match c.or("norm_topk_prob", normalise)? {
            true => Normalise::Sum { eps: 1e-20 },
            false => Normalise::No,
        },
        scale: c.or("routed_scaling_factor", 1.0)?,
        precision: RouterPrecision::F32,
        ..RouterPlan::softmax(o.top_k()?, false)
    };
    let intermediate = c.size("moe_intermediate_size")?;
    let shared = SharedPlan::of(intermediate * c.count_or("n_shared_experts", 1)?);
    Ok(MoePlan { shared, ..o.moe(intermediate, router)? })
}

/// The first `first_k_dense_replace` layers dense, the others with experts.
pub(super) fn dense_first(
    o: &Outline<'_>,
    mixer: MixerPlan,
    moe: MoePlan,
    default: usize,
) -> Result<Vec<LayerPlan>> {
    let dense: usize = o.c.or("first_k_dense_replace", default)?;
    let layer = |l: usize| -> Result<LayerPlan> {
        let ffn = if l < dense { o.dense()? } else { FfnPlan::Moe(moe.clone()) };
        Ok(LayerPlan::pre_norm(mixer.clone(), ffn))
    };
    (0..o.layers).map(layer).collect()
}

/// Latent attention whose rotated elements are neighbours, unless the configuration says otherwise.
pub(super) fn interleaved_latent(o: &Outline<'_>, defaults: &Defaults) -> Result<MixerPlan> {
    let neighbours = o.c.or("rope_interleave", true)?;
    latent(o, if neighbours { Pairing::Neighbours } else { Pairing::Halves }, defaults)
}

/// Latent attention.
pub(super) fn latent(o: &Outline<'_>, pairing: Pairing, defaults: &Defaults) -> Result<MixerPlan> {
    let c = o.c;
    let (nope_dim, rope_dim) = (c.size("qk_nope_head_dim")?, c.size("qk_rope_head_dim")?);
    let rope = o.rope(rope_dim, pairing, defaults)?;
    let mut scale = ((nope_dim + rope_dim) as f64).powf(-0.5);
    if let RopeScaling::Yarn { factor, .. } = rope.scaling {
        let fields = Fields { c, objects: &["rope_parameters", "rope_scaling"] };
        if let Some(all) = fields.number("mscale_all_dim")?.filter(|all| *all != 0.0) {
            scale *= yarn_growth(factor, all).powi(2);
        }
    }
    Ok(MixerPlan::Latent(LatentPlan {
        heads: o.heads,
        query_rank: c.get("q_lora_rank")?,
        latent: c.size("kv_lora_rank")?,
        nope_dim,
        rope_dim,
        value_dim: c.size("v_head_dim")?,
        bias: c.or("attention_bias", false)?,
        // Not the configuration's `rms_norm_eps`: the published code leaves it at its class's default.
        norm_eps: 1e-6,
        rope,
        scale,
    }))
}
