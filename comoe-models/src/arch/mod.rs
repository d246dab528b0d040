//! The model families: one short file each, that turns `config.json` into a list of blocks.

mod plan;
pub mod qwen3_moe;

pub use plan::{AttentionPlan, DecoderPlan, FfnPlan, LayerPlan, MoePlan, RouterPlan, TensorNames};

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
pub const FAMILIES: &[Family] = &[qwen3_moe::FAMILY];

/// Finds the family of a configuration and reads its plan.
///
/// # Errors
/// [`Error::UnsupportedFamily`], listing those that work; whatever the family's declaration refuses.
pub fn plan(config: &ConfigFile) -> Result<DecoderPlan> {
    let model_type: String = config.require("model_type")?;
    let family = FAMILIES.iter().find(|f| f.model_types.contains(&model_type.as_str()));
    let Some(family) = family else {
        return Err(Error::UnsupportedFamily {
            path: config.path().to_owned(),
            model_type,
            supported: FAMILIES.iter().flat_map(|f| f.model_types).map(|s| (*s).to_owned()).collect(),
        });
    };
    (family.plan)(config)
}
