//! DeepSeek-V2 (DeepSeek-V2-Lite, DeepSeek-V2, V2.5, Coder-V2), in place of candle-transformers' `deepseek2` (whose
//! choice among groups is wrong, and whose cache holds the keys and values of every head).
//!
//! As `transformers` 5 computes it (`models/deepseek_v2`): latent attention; softmax over all experts in F32, top-k
//! (in the larger models within the groups whose best expert is best), times a factor; a shared expert.

use super::deepseek_v3::{dense_first, latent};
use super::outline::{Defaults, Outline};
use super::{
    DecoderPlan, Family, GroupScore, Groups, Pairing, RouterPlan, RouterPrecision, SharedPlan, TensorNames,
};
use crate::error::Result;
use crate::load::ConfigFile;

/// This family.
pub(super) const FAMILY: Family = Family { model_types: &["deepseek_v2"], plan };

fn plan(c: &ConfigFile) -> Result<DecoderPlan> {
    let defaults = Defaults::default();
    let o = Outline::read(c, &defaults)?;
    o.refuse(&["mlp_bias", "norm_topk_prob"])?;
    let method: String = c.or("topk_method", "greedy".to_owned())?;
    let groups = match method.as_str() {
        "greedy" => None,
        "group_limited_greedy" => {
            Some(Groups { count: c.size("n_group")?, keep: c.size("topk_group")?, by: GroupScore::Best })
        }
        other => {
            let reason = format!("{other:?} is not supported; greedy and group_limited_greedy are");
            return Err(c.bad("topk_method", reason));
        }
    };
    let router = RouterPlan {
        groups,
        scale: c.or("routed_scaling_factor", 1.0)?,
        precision: RouterPrecision::F32,
        ..RouterPlan::softmax(o.top_k()?, false)
    };
    let intermediate = c.size("moe_intermediate_size")?;
    let mut moe = o.moe(intermediate, router)?;
    moe.shared = SharedPlan::of(intermediate * c.count_or("n_shared_experts", 2)?);
    let layers = dense_first(&o, latent(&o, Pairing::Neighbours, &defaults)?, moe, 0)?;
    o.decoder(layers, TensorNames::LLAMA, &defaults)
}
