//! What a model needs of a device's memory beside its experts, computed before anything is loaded.

use candle_core::DType;
use comoe_core::backend::cuda::{handed_bytes, learned_bytes};
use comoe_core::plan::DeviceBytes;
use comoe_core::store::Directory;
use comoe_core::{CacheOptions, DriverKind, Prefetch};

use super::buffers::{buffer_bytes, driver_bytes};
use super::workspace::{experts_bytes, workspace_bytes};
use super::{DenseWeights, KvFormat, LoadOptions};
use crate::arch::{DecoderPlan, Mask, MixerPlan};

/// Kept of a GPU's memory for what cannot be computed: cuBLAS takes 32 MiB and more of workspace, kernels are loaded when
/// they are first used, graphs have nodes, and the driver's pool rounds up.
pub const DEVICE_MARGIN: u64 = 512 << 20;

/// What layers of one kind keep of a sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvPart {
    /// The kind, for people.
    pub what: String,
    /// Layers of it.
    pub layers: usize,
    /// Bytes of all of them, all sequences.
    pub bytes: u64,
}

/// Bytes of the caches of `batch` sequences of up to `context` tokens, by kind of layer, in order of first appearance.
pub(super) fn kv_parts(
    plan: &DecoderPlan,
    context: usize,
    batch: usize,
    dtype: DType,
    format: KvFormat,
) -> Vec<KvPart> {
    let mut parts: Vec<KvPart> = Vec::new();
    for layer in &plan.layers {
        let what = match &layer.mixer {
            MixerPlan::Attention(a) => {
                let heads = format!("{} KV heads of {}", a.kv_heads, a.head_dim);
                match a.mask {
                    Mask::Causal => heads,
                    // They hold every position, whatever they look at.
                    Mask::Sliding(window) => format!("{heads}, window {window} (held in full)"),
                    Mask::Chunked(chunk) => format!("{heads}, chunks of {chunk} (held in full)"),
                }
            }
            MixerPlan::Latent(l) => format!("latents of {} and keys of {}", l.latent, l.rope_dim),
            MixerPlan::Conv(c) => format!("convolution of {} channels", c.width),
        };
        // What is too much to count does not fit either.
        let kept = layer.mixer.kept_bytes(dtype.size_in_bytes(), format) as u64;
        let bytes = (batch as u64).saturating_mul(context as u64).saturating_mul(kept);
        match parts.iter_mut().find(|p| p.what == what) {
            Some(part) => {
                (part.layers, part.bytes) = (part.layers + 1, part.bytes.saturating_add(bytes));
            }
            None => parts.push(KvPart { what, layers: 1, bytes }),
        }
    }
    parts
}

/// Device memory of everything but slots, and the margin; `options` have the experts' format that will be in force. On a
/// CPU only what is held from step to step counts.
pub(super) fn device_needs(
    plan: &DecoderPlan,
    weights: &DenseWeights<'_>,
    directory: &Directory,
    context: usize,
    batch: usize,
    options: &LoadOptions,
    on_gpu: bool,
) -> (DeviceBytes, u64) {
    let kv = kv_parts(plan, context, batch, options.dtype, options.kv);
    let kv = kv.iter().fold(0, |sum: u64, part| sum.saturating_add(part.bytes));
    let held = DeviceBytes { dense: weights.device_bytes(), kv, ..DeviceBytes::default() };
    if !on_gpu {
        return (held, 0);
    }
    let workspace = workspace_bytes(plan, context, options);
    let buffers = buffer_bytes(plan, directory, context, options.dtype, batch);
    (DeviceBytes { workspace, buffers, ..held }, DEVICE_MARGIN)
}

/// Device memory of everything but slots on the first of `devices` devices, of which one alone would need `alone`, and on every
/// other one, which has experts alone; `directory` is of all of them.
pub(super) fn needs_of_several(
    plan: &DecoderPlan,
    alone: DeviceBytes,
    directory: &Directory,
    (context, dtype): (usize, DType),
    devices: usize,
    on_gpu: bool,
) -> [DeviceBytes; 2] {
    if !on_gpu {
        return [alone, DeviceBytes::default()];
    }
    let handed = plan.moe_layers().map(|(_, moe)| handed_bytes(&moe.expert, moe.router.top_k));
    let [first, other] = handed.reduce(|a, b| [a[0].max(b[0]), a[1].max(b[1])]).unwrap_or_default();
    let members = devices.saturating_sub(1) as u64;
    let elsewhere = DeviceBytes {
        workspace: experts_bytes(plan, context, dtype),
        buffers: driver_bytes(plan, directory) + other,
        ..DeviceBytes::default()
    };
    [DeviceBytes { buffers: alone.buffers.saturating_add(members * first), ..alone }, elsewhere]
}

/// Device memory of what a GPU learns of routing that drives by itself, alone. With several, the host learns; of `auto`, too,
/// nothing is learned, since models give guesses.
pub(super) fn table_bytes(directory: &Directory, cache: &CacheOptions, on_gpu: bool) -> u64 {
    if !on_gpu || cache.prefetch != Prefetch::Correlation || cache.driver == DriverKind::Host {
        return 0;
    }
    learned_bytes(&directory.layers().iter().map(|l| l.experts).collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::json;

    use super::*;
    use crate::load::ConfigFile;
    use crate::testing::tiny_config;

    fn plan(config: &serde_json::Value) -> DecoderPlan {
        crate::arch::plan(&ConfigFile::parse(Path::new("config.json"), &config.to_string()).unwrap()).unwrap()
    }

    #[test]
    fn a_table_is_counted_where_the_gpu_learns_it() {
        let directory = Directory::new([(0, 4, 512), (1, 6, 512)]).unwrap();
        let of = |prefetch, driver, on_gpu| {
            table_bytes(&directory, &CacheOptions { prefetch, driver, ..CacheOptions::default() }, on_gpu)
        };
        assert_eq!(of(Prefetch::Correlation, DriverKind::Auto, true), learned_bytes(&[4, 6]));
        for (prefetch, driver, on_gpu) in [
            (Prefetch::Auto, DriverKind::Auto, true),
            (Prefetch::Correlation, DriverKind::Host, true),
            (Prefetch::Correlation, DriverKind::Auto, false),
        ] {
            assert_eq!(of(prefetch, driver, on_gpu), 0);
        }
    }

    #[test]
    fn more_sequences_than_can_be_counted_fit_nowhere() {
        for batch in [1 << 62, usize::MAX] {
            let parts = kv_parts(&plan(&tiny_config()), 1024, batch, DType::F32, KvFormat::Plain);
            assert_eq!(parts[0].bytes, u64::MAX);
        }
        let directory = Directory::new([(0, 4, 512)]).unwrap();
        let buffers = buffer_bytes(&plan(&tiny_config()), &directory, 1024, DType::BF16, usize::MAX);
        assert_eq!(buffers, u64::MAX);
    }

    #[test]
    fn kv_caches_are_counted_by_kind_of_layer() {
        let parts = kv_parts(&plan(&tiny_config()), 100, 3, DType::BF16, KvFormat::Plain);
        let bytes = 3 * 3 * 100 * 2 * (16 + 16) * 2;
        assert_eq!(parts, [KvPart { what: "2 KV heads of 16".into(), layers: 3, bytes }]);
        let parts = kv_parts(&plan(&tiny_config()), 100, 3, DType::BF16, KvFormat::Int8);
        assert_eq!(parts[0].bytes, 3 * 3 * 100 * 2 * (16 + 16 + 2 * 2));

        let mut mixed = plan(&tiny_config());
        for (l, layer) in mixed.layers.iter_mut().enumerate() {
            if let (MixerPlan::Attention(a), 1) = (&mut layer.mixer, l) {
                a.mask = Mask::Sliding(64);
            }
        }
        let parts = kv_parts(&mixed, 100, 1, DType::F32, KvFormat::Plain);
        assert_eq!(parts.iter().map(|p| p.layers).collect::<Vec<_>>(), [2, 1]);
        assert!(parts[1].what.contains("window 64"), "{parts:?}");
        // Every layer holds every position.
        assert_eq!(parts[0].bytes, 2 * parts[1].bytes);
        let all: u64 = parts.iter().map(|p| p.bytes).sum();
        assert_eq!(all, (100 * mixed.kv_bytes_per_token(4, KvFormat::Plain)) as u64);

        let latent = plan(&json!({
            "model_type": "deepseek_v3", "vocab_size": 272, "hidden_size": 32, "intermediate_size": 48,
            "moe_intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 4, "n_shared_experts": 1, "n_routed_experts": 8, "num_experts_per_tok": 2,
            "kv_lora_rank": 24, "q_lora_rank": null, "qk_rope_head_dim": 8, "v_head_dim": 16,
            "qk_nope_head_dim": 16, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
            "norm_topk_prob": true, "routed_scaling_factor": 2.5, "max_position_embeddings": 512,
            "rope_theta": 10000.0, "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": false,
            "attention_bias": false, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "eos_token_id": 1
        }));
        let parts = kv_parts(&latent, 100, 1, DType::BF16, KvFormat::Plain);
        let bytes = 2 * 100 * (24 + 8) * 2;
        assert_eq!(parts, [KvPart { what: "latents of 24 and keys of 8".into(), layers: 2, bytes }]);
    }
}
