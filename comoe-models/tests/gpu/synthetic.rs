//! A small random model that is written when it is wanted: four layers of 16 experts, longer sequences than comoe-tiny has.

use std::collections::HashMap;
use std::path::Path;

use candle_core::{DType, Device, Tensor};

pub(crate) const VOCAB: usize = 1024;
pub(crate) const LAYERS: usize = 4;
pub(crate) const EXPERTS: usize = 16;
pub(crate) const TOP_K: usize = 4;
const HIDDEN: usize = 256;
pub(crate) const INTERMEDIATE: usize = 128;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 64;

/// Uniform in -1..1, by the seed alone, times `scale`, in BF16.
fn random(shape: &[usize], seed: u64, scale: f64) -> Tensor {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / 8_388_608.0 - 1.0
    };
    let values: Vec<f32> = (0..shape.iter().product()).map(|_| next()).collect();
    let t = Tensor::from_vec(values, shape, &Device::Cpu).and_then(|t| (t * scale)?.to_dtype(DType::BF16));
    t.expect("a tensor")
}

/// Tokens that depend on the seed alone.
pub(crate) fn tokens(n: usize, seed: u64) -> Vec<u32> {
    let t = random(&[n], seed, 1.0).to_dtype(DType::F32).and_then(|t| t.to_vec1::<f32>()).expect("values");
    t.into_iter().map(|v| ((v + 1.0) / 2.0 * (VOCAB - 1) as f32) as u32).collect()
}

/// Writes `config.json` and the weights: deviation `1 / sqrt(columns)`, routers thrice that so that choices are decisive,
/// norms of ones. Experts are `intermediate` wide.
pub(crate) fn write(folder: &Path, intermediate: usize) {
    let config = serde_json::json!({
        "model_type": "qwen3_moe", "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 3 * HIDDEN,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM, "attention_bias": false, "max_position_embeddings": 4096, "rope_theta": 10_000.0,
        "rms_norm_eps": 1e-6, "hidden_act": "silu", "decoder_sparse_step": 1, "mlp_only_layers": [],
        "moe_intermediate_size": intermediate, "num_experts": EXPERTS, "num_experts_per_tok": TOP_K,
        "norm_topk_prob": true, "tie_word_embeddings": false
    });
    std::fs::write(folder.join("config.json"), config.to_string()).expect("config.json");
    let mut all = HashMap::new();
    let mut put = |name: String, rows: usize, columns: usize, times: f64| {
        let tensor = random(&[rows, columns], all.len() as u64 + 1, times * (3.0 / columns as f64).sqrt());
        all.insert(name, tensor);
    };
    // An embedding of deviation 1.
    put("model.embed_tokens.weight".into(), VOCAB, HIDDEN, (HIDDEN as f64).sqrt());
    put("lm_head.weight".into(), VOCAB, HIDDEN, 1.0);
    let (q, kv) = (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM);
    for l in 0..LAYERS {
        let name = |rest: &str| format!("model.layers.{l}.{rest}.weight");
        put(name("self_attn.q_proj"), q, HIDDEN, 1.0);
        put(name("self_attn.k_proj"), kv, HIDDEN, 1.0);
        put(name("self_attn.v_proj"), kv, HIDDEN, 1.0);
        put(name("self_attn.o_proj"), HIDDEN, q, 1.0);
        put(name("mlp.gate"), EXPERTS, HIDDEN, 3.0);
        for e in 0..EXPERTS {
            put(name(&format!("mlp.experts.{e}.gate_proj")), intermediate, HIDDEN, 1.0);
            put(name(&format!("mlp.experts.{e}.up_proj")), intermediate, HIDDEN, 1.0);
            put(name(&format!("mlp.experts.{e}.down_proj")), HIDDEN, intermediate, 1.0);
        }
    }
    let mut ones = |name: String, n: usize| {
        all.insert(name, Tensor::ones(n, DType::BF16, &Device::Cpu).expect("ones"));
    };
    ones("model.norm.weight".into(), HIDDEN);
    for l in 0..LAYERS {
        for (norm, n) in [("input_layernorm", HIDDEN), ("post_attention_layernorm", HIDDEN)] {
            ones(format!("model.layers.{l}.{norm}.weight"), n);
        }
        for norm in ["q_norm", "k_norm"] {
            ones(format!("model.layers.{l}.self_attn.{norm}.weight"), HEAD_DIM);
        }
    }
    candle_core::safetensors::save(&all, folder.join("model.safetensors")).expect("weights");
}
