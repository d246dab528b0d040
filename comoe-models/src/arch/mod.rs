//! The model families: one short file each, that turns `config.json` into a list of blocks.

mod deepseek_v2;
mod deepseek_v3;
mod dots1;
mod ernie4_5_moe;
mod flex_olmo;
mod gemma4;
mod glm4_moe;
mod glm4_moe_lite;
mod gpt_oss;
mod granitemoe;
mod hunyuan_v1_moe;
mod lfm2_moe;
mod limits;
mod llama4;
mod minimax_m2;
mod mixtral;
mod names;
mod olmoe;
mod outline;
mod phimoe;
mod plan;
mod qwen2_moe;
mod qwen3_moe;
mod rope;
#[cfg(test)]
mod tests;

pub(crate) use limits::MAX_LAYERS;
pub use names::TensorNames;
pub use plan::*;

use crate::error::{Error, Result};
use crate::load::ConfigFile;

/// A family of models: the `model_type` values it answers to, and its declaration.
#[derive(Debug, Clone, Copy)]
pub struct Family {
    /// Values of `model_type` in `config.json`.
    pub model_types: &'static [&'static str],
    /// Reads the configuration into blocks.
    pub plan: fn(&ConfigFile) -> Result<DecoderPlan>,
}

/// Every family that is implemented.
pub const FAMILIES: &[Family] = &[
    deepseek_v2::FAMILY,
    deepseek_v3::FAMILY,
    dots1::FAMILY,
    ernie4_5_moe::FAMILY,
    flex_olmo::FAMILY,
    gemma4::FAMILY,
    glm4_moe::FAMILY,
    glm4_moe_lite::FAMILY,
    gpt_oss::FAMILY,
    granitemoe::FAMILY,
    hunyuan_v1_moe::FAMILY,
    lfm2_moe::FAMILY,
    llama4::FAMILY,
    minimax_m2::FAMILY,
    mixtral::FAMILY,
    olmoe::FAMILY,
    phimoe::FAMILY,
    qwen2_moe::FAMILY,
    qwen3_moe::FAMILY,
];

/// MoE families with layers that are no attention, and what those are.
const HYBRIDS: &[(&[&str], &str)] = &[
    (
        &["qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text", "kimi_linear", "minimax", "minimax_text_01"],
        "linear attention",
    ),
    (&["granitemoehybrid", "jamba", "nemotron_h", "bamba"], "Mamba"),
];

/// Finds the family of a configuration and reads its plan.
///
/// # Errors
/// [`Error::UnsupportedFamily`], listing those that work; whatever the family's declaration refuses.
pub fn plan(config: &ConfigFile) -> Result<DecoderPlan> {
    let config = &config.language_model();
    let model_type: String = config.require("model_type")?;
    if let Some(family) = FAMILIES.iter().find(|f| f.model_types.contains(&model_type.as_str())) {
        let plan = (family.plan)(config)?;
        limits::check(config, &plan)?;
        return Ok(plan);
    }
    let hybrid = HYBRIDS.iter().find(|(types, _)| types.contains(&model_type.as_str()));
    let reason = match hybrid {
        Some((_, layers)) => format!("has {layers} layers, which are not supported yet"),
        None => "is not supported".to_owned(),
    };
    Err(Error::UnsupportedFamily {
        path: config.path().to_owned(),
        model_type,
        reason,
        supported: FAMILIES.iter().flat_map(|f| f.model_types).map(|s| (*s).to_owned()).collect(),
    })
}

/// Qwen's rule for which layers have experts.
fn sparse_steps(c: &ConfigFile, layers: usize) -> Result<Vec<bool>> {
    let step: usize = c.or("decoder_sparse_step", 1)?;
    let dense_only: Vec<usize> = c.or("mlp_only_layers", Vec::new())?;
    let sparse = |l: usize| !dense_only.contains(&l) && step > 0 && (l + 1).is_multiple_of(step);
    let sparse: Vec<bool> = (0..layers).map(sparse).collect();
    if !sparse.contains(&true) {
        let reason = format!(
            "\"decoder_sparse_step\" {step} and \"mlp_only_layers\" {dense_only:?} leave none of {layers} layers with experts"
        );
        return Err(Error::NoExperts { path: c.path().to_owned(), reason });
    }
    Ok(sparse)
}

/// Each layer's mask by `layer_types` and `sliding_window`; without the list, `sliding` tells.
fn sliding_layers(c: &ConfigFile, layers: usize, sliding: impl Fn(usize) -> bool) -> Result<Vec<Mask>> {
    let kinds: Option<Vec<String>> = c.get("layer_types")?;
    if let Some(kinds) = kinds.as_ref().filter(|k| k.len() != layers) {
        return Err(c.bad("layer_types", format!("has {} entries for {layers} layers", kinds.len())));
    }
    let mask = |l: usize| match kinds.as_ref().map(|k| k[l].as_str()) {
        Some("full_attention") => Ok(Mask::Causal),
        None if !sliding(l) => Ok(Mask::Causal),
        Some("sliding_attention") | None => Ok(Mask::Sliding(c.size("sliding_window")?)),
        Some(other) => Err(c.bad("layer_types", format!("{other:?} is not supported in this family"))),
    };
    (0..layers).map(mask).collect()
}
