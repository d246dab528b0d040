//! What several tests need: random tensors, a small tokenizer, small random models.

use std::path::Path;

use candle_core::{DType, Device, Tensor};
use half::bf16;
use safetensors::Dtype;
use safetensors::tensor::TensorView;

use crate::arch::{AttentionPlan, Mask, Pairing, RopePlan, RopeScaling};
use crate::chat::Tokenizer;

/// Numbers between -1 and 1 that depend on the seed alone.
pub(crate) fn random(shape: &[usize], seed: u64) -> Tensor {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let n = shape.iter().product();
    let values: Vec<f32> = (0..n)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        })
        .collect();
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
}

/// A plain rotary embedding of this width.
pub(crate) fn rope(dim: usize) -> RopePlan {
    RopePlan { theta: 1e4, dim, pairing: Pairing::Halves, scaling: RopeScaling::None, magnitude: 1.0 }
}

/// Plain attention.
pub(crate) fn attention_plan(heads: usize, kv_heads: usize, head_dim: usize) -> AttentionPlan {
    AttentionPlan {
        heads,
        kv_heads,
        head_dim,
        qkv_bias: false,
        out_bias: false,
        values_are_keys: false,
        qk_norm: None,
        v_norm: None,
        clip: None,
        rope: Some(rope(head_dim)),
        mask: Mask::Causal,
        sinks: false,
        temperature: None,
        scale: 1.0,
    }
}

/// Same shape, and no element further apart than `within`.
#[track_caller]
pub(crate) fn close(got: &Tensor, want: &Tensor, within: f32) {
    assert_eq!(got.dims(), want.dims());
    assert_eq!((got.dtype(), want.dtype()), (DType::F32, DType::F32));
    let flat = |t: &Tensor| t.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    for (i, (g, w)) in flat(got).iter().zip(flat(want)).enumerate() {
        assert!((g - w).abs() <= within, "element {i}: {g} and {w}");
    }
}

/// Letters that stand for bytes in byte-level BPE (GPT-2's table).
fn byte_letters() -> Vec<char> {
    let printable = |b: &u32| (33..=126).contains(b) || (161..=172).contains(b) || (174..=255).contains(b);
    let mut extra = 256;
    (0..256u32)
        .map(|b| {
            let code = if printable(&b) {
                b
            } else {
                extra += 1;
                extra - 1
            };
            char::from_u32(code).unwrap()
        })
        .collect()
}

/// 256 byte tokens in byte order, then merges, then the special tokens `<|im_start|>`, `<|im_end|>`.
pub(crate) fn byte_level_json() -> String {
    let letters = byte_letters();
    let spell = |bytes: &[u8]| bytes.iter().map(|b| letters[*b as usize]).collect::<String>();
    let mut vocab = serde_json::Map::new();
    for (b, letter) in letters.iter().enumerate() {
        vocab.insert(letter.to_string(), b.into());
    }
    // Merges of ASCII, of the head of CJK and emoji characters, and of a tail with the next head.
    let merges: [(&[u8], &[u8]); 7] = [
        (b"t", b"h"),
        (b"th", b"e"),
        (b" ", b"the"),
        (&[0xf0], &[0x9f]),
        (&[0xf0, 0x9f], &[0x98]),
        (&[0xe4], &[0xb8]),
        (&[0xad], &[0xe5]),
    ];
    for (a, b) in merges {
        vocab.insert(spell(a) + &spell(b), vocab.len().into());
    }
    let merges: Vec<_> = merges.iter().map(|(a, b)| [spell(a), spell(b)]).collect();
    let special = |id: usize, content: &str| {
        serde_json::json!({"id": id, "content": content, "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": true})
    };
    let n = vocab.len();
    let byte_level = serde_json::json!({"type": "ByteLevel", "add_prefix_space": false,
        "trim_offsets": false, "use_regex": false});
    let json = serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [special(n, "<|im_start|>"), special(n + 1, "<|im_end|>")],
        "normalizer": null, "pre_tokenizer": byte_level, "post_processor": null, "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    });
    json.to_string()
}

/// The tokenizer of [`byte_level_json`].
pub(crate) fn byte_level() -> Tokenizer {
    Tokenizer::from_inner(tokenizers::Tokenizer::from_bytes(byte_level_json()).unwrap())
}

/// `config.json` of a small Qwen3-MoE model in the hub's spelling: head width unlike `hidden / heads`, fewer kv heads.
pub(crate) fn tiny_config() -> serde_json::Value {
    serde_json::json!({
        "model_type": "qwen3_moe", "vocab_size": 272, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "attention_bias": false, "max_position_embeddings": 1024, "sliding_window": null,
        "max_window_layers": 3, "use_sliding_window": false, "tie_word_embeddings": false,
        "rope_theta": 10000.0, "rms_norm_eps": 1e-6, "hidden_act": "silu", "decoder_sparse_step": 1,
        "moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": true,
        "eos_token_id": 264
    })
}

/// ChatML, as most small models have it.
pub(crate) const CHATML: &str = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + \
    '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

/// Names, shapes and BF16 values of a model of this configuration: matrices scaled by `1 / sqrt(fan in)`, routers
/// thrice that so that choices are decisive, norms around 1.
pub(crate) fn tiny_weights(c: &serde_json::Value) -> Vec<(String, Vec<usize>, Vec<bf16>)> {
    let n = |field: &str| c[field].as_u64().unwrap() as usize;
    let flag = |field: &str| c[field].as_bool().unwrap();
    let (hidden, q) = (n("hidden_size"), n("num_attention_heads") * n("head_dim"));
    let kv = n("num_key_value_heads") * n("head_dim");
    let mut shapes: Vec<(String, Vec<usize>)> = vec![
        ("model.embed_tokens.weight".into(), vec![n("vocab_size"), hidden]),
        ("model.norm.weight".into(), vec![hidden]),
    ];
    if !flag("tie_word_embeddings") {
        shapes.push(("lm_head.weight".into(), vec![n("vocab_size"), hidden]));
    }
    for l in 0..n("num_hidden_layers") {
        let mut put = |name: &str, shape: &[usize]| {
            shapes.push((format!("model.layers.{l}.{name}"), shape.to_vec()));
        };
        for (name, rows, cols) in
            [("q_proj", q, hidden), ("k_proj", kv, hidden), ("v_proj", kv, hidden), ("o_proj", hidden, q)]
        {
            put(&format!("self_attn.{name}.weight"), &[rows, cols]);
            if flag("attention_bias") {
                put(&format!("self_attn.{name}.bias"), &[rows]);
            }
        }
        for name in ["self_attn.q_norm", "self_attn.k_norm"] {
            put(&format!("{name}.weight"), &[n("head_dim")]);
        }
        for name in ["input_layernorm", "post_attention_layernorm"] {
            put(&format!("{name}.weight"), &[hidden]);
        }
        let mut ffn = |prefix: &str, width: usize| {
            put(&format!("{prefix}.gate_proj.weight"), &[width, hidden]);
            put(&format!("{prefix}.up_proj.weight"), &[width, hidden]);
            put(&format!("{prefix}.down_proj.weight"), &[hidden, width]);
        };
        if (l + 1).is_multiple_of(n("decoder_sparse_step")) {
            for e in 0..n("num_experts") {
                ffn(&format!("mlp.experts.{e}"), n("moe_intermediate_size"));
            }
            put("mlp.gate.weight", &[n("num_experts"), hidden]);
        } else {
            ffn("mlp", n("intermediate_size"));
        }
    }
    let fill = |(i, (name, shape)): (usize, (String, Vec<usize>))| {
        // Uniform in -1..1 has a deviation of 1 / sqrt(3).
        let scale = match shape.as_slice() {
            [_] => 0.3,
            _ if name.contains("embed_tokens") => 1.7,
            [_, cols] if name.ends_with("mlp.gate.weight") => 5.2 / (*cols as f64).sqrt(),
            [_, cols] => 1.7 / (*cols as f64).sqrt(),
            _ => 1.0,
        };
        let offset = if name.ends_with("norm.weight") { 1.0 } else { 0.0 };
        let values = random(&shape, i as u64 + 1).affine(scale, offset).unwrap();
        let values = values.to_dtype(DType::BF16).unwrap().flatten_all().unwrap().to_vec1().unwrap();
        (name, shape, values)
    };
    shapes.into_iter().enumerate().map(fill).collect()
}

/// Writes weights as one safetensors file.
pub(crate) fn write_weights(folder: &Path, weights: &[(String, Vec<usize>, Vec<bf16>)]) {
    let bytes: Vec<Vec<u8>> =
        weights.iter().map(|(_, _, v)| v.iter().flat_map(|b| b.to_le_bytes()).collect()).collect();
    let views = weights.iter().zip(&bytes).map(|((name, shape, _), bytes)| {
        (name.as_str(), TensorView::new(Dtype::BF16, shape.clone(), bytes).unwrap())
    });
    safetensors::serialize_to_file(views, None, &folder.join("model.safetensors")).unwrap();
}

/// Writes a whole model folder.
pub(crate) fn write_model(folder: &Path, config: &serde_json::Value) {
    let put = |name: &str, text: &str| std::fs::write(folder.join(name), text).unwrap();
    put("config.json", &config.to_string());
    put("tokenizer.json", &byte_level_json());
    put("tokenizer_config.json", &serde_json::json!({"chat_template": CHATML}).to_string());
    write_weights(folder, &tiny_weights(config));
}
