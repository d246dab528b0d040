//! Qwen3-MoE (Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder, comoe-tiny).
//!
//! As `transformers` 5 computes it (`models/qwen3_moe`): grouped-query attention with an RMS norm per head before
//! half-style RoPE; softmax over all experts, then top-k, then an optional division by the sum.

use comoe_core::ExpertSpec;

use super::{AttentionPlan, DecoderPlan, Family, FfnPlan, LayerPlan, MoePlan, RouterPlan, TensorNames};
use crate::error::{Error, Result};
use crate::load::ConfigFile;

/// This family.
pub const FAMILY: Family = Family { model_types: &["qwen3_moe"], plan };

fn plan(c: &ConfigFile) -> Result<DecoderPlan> {
    let no_experts = |reason: &str| Error::NoExperts { path: c.path().to_owned(), reason: reason.to_owned() };
    let hidden = c.size("hidden_size")?;
    let layers = c.size("num_hidden_layers")?;
    let norm_eps: f64 = c.or("rms_norm_eps", 1e-6)?;

    if c.or("use_sliding_window", false)? {
        return Err(c.bad("use_sliding_window", "sliding windows are not supported in this family"));
    }
    let rope: String = c.or("rope_type", "default".to_owned())?;
    if rope != "default" {
        return Err(c.bad("rope_type", format!("{rope:?} is not supported; only \"default\" is")));
    }
    let act: String = c.or("hidden_act", "silu".to_owned())?;
    if act != "silu" {
        return Err(c.bad("hidden_act", format!("{act:?} is not supported; only \"silu\" is")));
    }

    let heads = c.size("num_attention_heads")?;
    let kv_heads = c.or("num_key_value_heads", heads)?;
    if kv_heads == 0 || heads % kv_heads != 0 {
        return Err(c.bad("num_key_value_heads", format!("{kv_heads} does not divide the {heads} heads")));
    }
    let head_dim = c.or("head_dim", hidden / heads)?;
    if head_dim == 0 || head_dim % 2 != 0 {
        return Err(c.bad("head_dim", format!("{head_dim} is not a positive even number")));
    }
    let bias = c.or("attention_bias", false)?;
    let attention = AttentionPlan {
        heads,
        kv_heads,
        head_dim,
        qkv_bias: bias,
        out_bias: bias,
        qk_norm: Some(norm_eps),
        rope_theta: c.or("rope_theta", 10_000.0)?,
        scale: (head_dim as f64).powf(-0.5),
    };

    let experts: usize = c.or("num_experts", 0)?;
    if experts == 0 {
        return Err(no_experts("num_experts is 0 or absent"));
    }
    let top_k = c.size("num_experts_per_tok")?;
    if top_k > experts {
        return Err(c.bad("num_experts_per_tok", format!("{top_k} of only {experts} experts")));
    }
    let moe = MoePlan {
        experts,
        router: RouterPlan { top_k, normalise: c.or("norm_topk_prob", false)? },
        expert: ExpertSpec::swiglu(hidden, c.size("moe_intermediate_size")?),
    };

    let step: usize = c.or("decoder_sparse_step", 1)?;
    let dense_only: Vec<usize> = c.or("mlp_only_layers", Vec::new())?;
    let ffn = |layer: usize| -> Result<FfnPlan> {
        let sparse = !dense_only.contains(&layer) && step > 0 && (layer + 1).is_multiple_of(step);
        Ok(if sparse {
            FfnPlan::Moe(moe.clone())
        } else {
            FfnPlan::Dense { intermediate: c.size("intermediate_size")? }
        })
    };
    let layers = (0..layers)
        .map(|l| Ok(LayerPlan { attention: attention.clone(), ffn: ffn(l)? }))
        .collect::<Result<Vec<_>>>()?;

    let plan = DecoderPlan {
        vocab: c.size("vocab_size")?,
        hidden,
        max_positions: c.size("max_position_embeddings")?,
        norm_eps,
        tied_head: c.or("tie_word_embeddings", false)?,
        layers,
        names: TensorNames::LLAMA,
    };
    if plan.moe_layers().next().is_none() {
        return Err(no_experts("decoder_sparse_step and mlp_only_layers leave no layer with experts"));
    }
    Ok(plan)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    const HUB: &str = r#"{"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": false, "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 40960,
        "max_window_layers": 48, "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": true,
        "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
        "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000.0,
        "sliding_window": null, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
        "use_sliding_window": false, "vocab_size": 151936}"#;

    fn read(text: &str) -> Result<DecoderPlan> {
        super::super::plan(&ConfigFile::parse(Path::new("config.json"), text)?)
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
        assert_eq!((moe.experts, moe.router), (128, RouterPlan { top_k: 8, normalise: true }));
        assert_eq!(moe.expert, ExpertSpec::swiglu(2048, 768));
        let a = &p.layers[0].attention;
        assert_eq!((a.heads, a.kv_heads, a.head_dim, a.rope_theta), (32, 4, 128, 1e6));
        assert_eq!(p.kv_bytes_per_token(2), 48 * 2 * 4 * 128 * 2);
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
            ("rope_scaling", serde_json::json!({"type": "yarn", "factor": 4.0})),
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
}
