//! Configurations as the hub spells them.

use std::path::Path;

use super::*;
use crate::load::KvFormat;
use comoe_core::ExpertSpec;

const HUB: &str = r#"{"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": false, "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 40960,
    "max_window_layers": 48, "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": true,
    "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
    "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000.0,
    "sliding_window": null, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
    "use_sliding_window": false, "vocab_size": 151936}"#;

fn read(text: &str) -> Result<DecoderPlan> {
    plan(&ConfigFile::parse(Path::new("config.json"), text)?)
}

fn with(field: &str, value: serde_json::Value) -> Result<DecoderPlan> {
    let mut v: serde_json::Value = serde_json::from_str(HUB).unwrap();
    v[field] = value;
    read(&v.to_string())
}

#[test]
fn the_hub_config_of_qwen3_30b_a3b() {
    let p = read(HUB).unwrap();
    assert_eq!((p.vocab, p.hidden, p.layers.len(), p.max_positions), (151936, 2048, 48, 40960));
    assert_eq!(p.moe_layers().count(), 48);
    let (_, moe) = p.moe_layers().next().unwrap();
    assert_eq!((moe.experts, moe.router), (128, RouterPlan::softmax(8, true)));
    assert_eq!(moe.expert, ExpertSpec::swiglu(2048, 768));
    let MixerPlan::Attention(a) = &p.layers[0].mixer else { panic!("attention") };
    assert_eq!((a.heads, a.kv_heads, a.head_dim, a.rope.as_ref().unwrap().theta), (32, 4, 128, 1e6));
    assert_eq!(p.kv_bytes_per_token(2, KvFormat::Plain), 48 * 2 * 4 * 128 * 2);
    assert_eq!(p.kv_bytes_per_token(2, KvFormat::Int8), 48 * 2 * 4 * (128 + 2));
}

#[test]
fn dense_layers_follow_the_two_rules() {
    let moe = |p: DecoderPlan| p.moe_layers().map(|(l, _)| l).collect::<Vec<_>>();
    let mut v: serde_json::Value = serde_json::from_str(HUB).unwrap();
    v["num_hidden_layers"] = 6.into();
    v["decoder_sparse_step"] = 2.into();
    assert_eq!(moe(read(&v.to_string()).unwrap()), [1, 3, 5]);
    v["mlp_only_layers"] = serde_json::json!([3]);
    assert_eq!(moe(read(&v.to_string()).unwrap()), [1, 5]);
    v["mlp_only_layers"] = serde_json::json!([1, 3, 5]);
    assert!(matches!(read(&v.to_string()), Err(Error::NoExperts { .. })));
}

#[test]
fn what_is_not_supported_is_refused_by_name() {
    for (field, value) in [
        ("use_sliding_window", true.into()),
        ("rope_scaling", serde_json::json!({"type": "spiral", "factor": 4.0})),
        ("hidden_act", "gelu".into()),
        ("num_key_value_heads", 5.into()),
        ("head_dim", 7.into()),
        ("num_experts_per_tok", 129.into()),
        ("hidden_size", 0.into()),
    ] {
        let e = with(field, value).unwrap_err();
        assert!(matches!(e, Error::BadField { .. }), "{field}: {e}");
    }
    assert!(matches!(with("num_experts", 0.into()), Err(Error::NoExperts { .. })));
    let e = with("model_type", "llama".into()).unwrap_err().to_string();
    assert!(e.contains("llama") && e.contains("qwen3_moe"), "{e}");
}

/// What a family's release says, and where that ends up. Everything else is compared with transformers' own spelling in
/// `tests/golden.rs`.
#[test]
fn yarn_scales_the_softmax_twice() {
    // DeepSeek-V3, with its published rope_scaling.
    let v3 = r#"{"model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
        "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
        "num_key_value_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256, "routed_scaling_factor": 2.5,
        "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128,
        "n_group": 8, "topk_group": 4, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
        "num_experts_per_tok": 8, "first_k_dense_replace": 3, "norm_topk_prob": true, "rms_norm_eps": 1e-06,
        "max_position_embeddings": 163840, "rope_theta": 10000, "rope_scaling": {"beta_fast": 32, "beta_slow": 1,
        "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
        "type": "yarn"}}"#;
    let p = read(v3).unwrap();
    assert_eq!((p.moe_layers().count(), p.moe_layers().next().unwrap().0), (58, 3));
    let MixerPlan::Latent(a) = &p.layers[0].mixer else { panic!("latent attention") };
    let growth: f64 = 0.1 * 40f64.ln() + 1.0;
    assert!((a.scale - growth * growth / 192f64.sqrt()).abs() < 1e-12);
    assert_eq!(a.rope.magnitude, 1.0);
    // Per token 512 + 64 numbers a layer, not 128 heads of 320.
    // The latents stay as they are.
    assert!(KvFormat::ALL.iter().all(|f| p.kv_bytes_per_token(2, *f) == 61 * 576 * 2));
    let refused = |from: &str, to: &str| read(&v3.replace(from, to)).unwrap_err().to_string();
    assert!(refused(r#""n_group": 8"#, r#""n_group": 7"#).contains("n_group"));
    assert!(refused(r#""topk_group": 4"#, r#""topk_group": 9"#).contains("n_group"));
    assert!(refused(r#""sigmoid""#, r#""softmax""#).contains("scoring_func"));
    assert!(refused(r#""mscale": 1.0, "#, r#""mscale": "x", "#).contains("rope_scaling.mscale"));
}

#[test]
fn hybrids_are_refused_by_what_they_have() {
    for (name, layers) in
        [("qwen3_next", "linear attention"), ("jamba", "Mamba"), ("granitemoehybrid", "Mamba")]
    {
        let e = with("model_type", name.into()).unwrap_err().to_string();
        assert!(e.contains(name) && e.contains(layers) && e.contains("deepseek_v3"), "{e}");
    }
}
