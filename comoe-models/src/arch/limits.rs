//! What no model goes beyond: a configuration is a file like any other, and its numbers are multiplied and allocated by.

use super::plan::{DecoderPlan, FfnPlan, LayerPlan, Mask, MixerPlan, SharedPlan};
use crate::error::Result;
use crate::load::{ConfigFile, MAX_SIZE};

/// Layers of a model; published ones end at 126.
pub(crate) const MAX_LAYERS: usize = 1 << 10;
/// Experts of a layer; the cache's own limit.
const MAX_EXPERTS: usize = 1 << 16;

/// Sees that sizes that a plan has by multiplying are still sizes.
///
/// # Errors
/// [`Error::BadField`](crate::Error::BadField), naming what is too large.
pub(super) fn check(c: &ConfigFile, plan: &DecoderPlan) -> Result<()> {
    plan.layers.iter().try_for_each(|layer| check_layer(c, layer))
}

fn check_layer(c: &ConfigFile, layer: &LayerPlan) -> Result<()> {
    let size = |field: &str, n: usize, most: usize| match (1..=most).contains(&n) {
        true => Ok(()),
        false => Err(c.bad(field, format!("makes {n}, expected 1 to {most}"))),
    };
    match &layer.mixer {
        MixerPlan::Attention(a) => {
            size("num_attention_heads", a.heads.saturating_mul(a.head_dim), MAX_SIZE)?;
            match a.mask {
                Mask::Causal => {}
                Mask::Sliding(window) => size("sliding_window", window, usize::MAX)?,
                Mask::Chunked(chunk) => size("attention_chunk_size", chunk, usize::MAX)?,
            }
        }
        MixerPlan::Latent(a) => {
            let head = [a.nope_dim + a.rope_dim, a.nope_dim + a.value_dim, a.latent + a.rope_dim];
            for width in head {
                size("num_attention_heads", a.heads.saturating_mul(width), MAX_SIZE)?;
            }
            if let Some(rank) = a.query_rank {
                size("q_lora_rank", rank, MAX_SIZE)?;
            }
        }
        MixerPlan::Conv(conv) => size("conv_L_cache", conv.taps, MAX_SIZE)?,
    }
    if let FfnPlan::Moe(moe) = &layer.ffn {
        size("num_experts", moe.experts, MAX_EXPERTS)?;
        match moe.shared {
            SharedPlan::None => {}
            SharedPlan::Mlp(width) | SharedPlan::Gated(width) | SharedPlan::Parallel(width) => {
                size("n_shared_experts", width, MAX_SIZE)?;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::json;

    use super::*;
    use crate::arch;
    use crate::testing::tiny_config;

    #[test]
    fn numbers_beyond_any_model_are_refused_by_their_field() {
        for (field, value) in [
            ("num_hidden_layers", json!(4_000_000_000u64)),
            ("num_hidden_layers", json!(2000)),
            ("hidden_size", json!(1u64 << 40)),
            ("num_attention_heads", json!(1 << 23)),
            ("head_dim", json!(1u64 << 62)),
            ("num_experts", json!(1 << 20)),
            ("vocab_size", json!(1u64 << 33)),
            ("max_position_embeddings", json!(u64::MAX)),
        ] {
            let mut config = tiny_config();
            config[field] = value;
            // Divides every number of heads.
            config["num_key_value_heads"] = json!(1);
            let config = ConfigFile::parse(Path::new("config.json"), &config.to_string()).unwrap();
            let e = arch::plan(&config).unwrap_err().to_string();
            assert!(e.contains(field) && e.contains("config.json"), "{field}: {e}");
        }
    }
}
