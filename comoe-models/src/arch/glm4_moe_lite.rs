//! GLM-4.7-Flash: DeepSeek-V3 with other names in its configuration.
//!
//! As `transformers` 5 computes it (`models/glm4_moe_lite`): see [`super::deepseek_v3`].

use super::deepseek_v3::{interleaved_latent, sigmoid_moe};
use super::outline::{Defaults, Outline};
use super::{DecoderPlan, Family, FfnPlan, LayerPlan, TensorNames};
use crate::error::Result;
use crate::load::ConfigFile;

/// This family.
pub(super) const FAMILY: Family = Family { model_types: &["glm4_moe_lite"], plan };

fn plan(c: &ConfigFile) -> Result<DecoderPlan> {
    let defaults = Defaults { eps: 1e-5, ..Defaults::default() };
    let o = Outline::read(c, &defaults)?;
    let mixer = interleaved_latent(&o, &defaults)?;
    let moe = sigmoid_moe(&o, true)?;
    let first_dense: usize = c.or("first_k_dense_replace", 1)?;
    let kinds: Option<Vec<String>> = c.get("mlp_layer_types")?;
    if let Some(kinds) = kinds.as_ref().filter(|k| k.len() != o.layers) {
        let reason = format!("has {} entries for {} layers", kinds.len(), o.layers);
        return Err(c.bad("mlp_layer_types", reason));
    }
    let layer = |l: usize| -> Result<LayerPlan> {
        let sparse = match &kinds {
            Some(kinds) => kinds[l] == "sparse",
            None => l >= first_dense,
        };
        let ffn = if sparse { FfnPlan::Moe(moe.clone()) } else { o.dense()? };
        Ok(LayerPlan::pre_norm(mixer.clone(), ffn))
    };
    let layers = (0..o.layers).map(layer).collect::<Result<_>>()?;
    o.decoder(layers, TensorNames::LLAMA, &defaults)
}
