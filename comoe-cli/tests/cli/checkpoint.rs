//! Writes small Qwen3-MoE checkpoints with random weights, whole or damaged.
//!
//! Greedy answers consist of lower-case letters, whatever the weights: the output head's other rows are zero, so the
//! best of 26 random logits wins. The stop token is among the zeros: an answer ends at its limit.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use safetensors::{Dtype, tensor::TensorView};
use serde_json::{Value, json};

/// Name of the first of the two shards, which holds the even layers' tensors and what is no layer's.
pub(crate) const FIRST_SHARD: &str = "model-00001-of-00002.safetensors";
/// Name of the second.
pub(crate) const SECOND_SHARD: &str = "model-00002-of-00002.safetensors";
/// Name of the index.
pub(crate) const INDEX: &str = "model.safetensors.index.json";
/// Id of the token that ends an answer.
pub(crate) const STOP: u32 = 258;

const CHAT_TEMPLATE: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
                             {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

/// A tensor to be written.
#[derive(Clone)]
pub(crate) struct Stored {
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: Vec<u8>,
}

/// Sizes of a model, and everything that goes into its files.
pub(crate) struct Checkpoint {
    pub(crate) config: Value,
    pub(crate) generation_config: Value,
    pub(crate) tensors: BTreeMap<String, Stored>,
}

/// Sizes that tests choose.
#[derive(Clone, Copy)]
pub(crate) struct Sizes {
    pub(crate) layers: usize,
    pub(crate) experts: usize,
    pub(crate) hidden: usize,
    pub(crate) intermediate: usize,
    pub(crate) context: usize,
}

impl Default for Sizes {
    /// 24 experts of 6 KiB in 3 layers, two for each token.
    fn default() -> Self {
        Self { layers: 3, experts: 8, hidden: 32, intermediate: 32, context: 512 }
    }
}

impl Sizes {
    /// Bytes of one expert.
    pub(crate) fn expert_bytes(&self) -> usize {
        3 * self.hidden * self.intermediate * 2
    }
}

const VOCAB: usize = 260;
const HEADS: usize = 2;
const HEAD_DIM: usize = 16;
pub(crate) const TOP_K: usize = 2;

impl Checkpoint {
    pub(crate) fn new(sizes: Sizes) -> Self {
        let Sizes { layers, experts, hidden, intermediate, context } = sizes;
        let mut random = Random(1);
        let mut tensors = BTreeMap::new();
        let mut put = |name: String, shape: &[usize], scale: f32| {
            let bytes = (0..shape.iter().product()).flat_map(|_| bf16(random.next() * scale)).collect();
            tensors.insert(name, Stored { dtype: Dtype::BF16, shape: shape.to_vec(), bytes });
        };
        let of = |inputs: usize| 1.7 / (inputs as f32).sqrt();
        put("model.embed_tokens.weight".into(), &[VOCAB, hidden], 1.0);
        put("lm_head.weight".into(), &[VOCAB, hidden], 1.0);
        for l in 0..layers {
            let p = format!("model.layers.{l}");
            let (q, kv) = (HEADS * HEAD_DIM, HEAD_DIM);
            put(format!("{p}.self_attn.q_proj.weight"), &[q, hidden], of(hidden));
            put(format!("{p}.self_attn.k_proj.weight"), &[kv, hidden], of(hidden));
            put(format!("{p}.self_attn.v_proj.weight"), &[kv, hidden], of(hidden));
            put(format!("{p}.self_attn.o_proj.weight"), &[hidden, q], of(q));
            put(format!("{p}.mlp.gate.weight"), &[experts, hidden], 1.0);
            for e in 0..experts {
                let p = format!("{p}.mlp.experts.{e}");
                put(format!("{p}.gate_proj.weight"), &[intermediate, hidden], of(hidden));
                put(format!("{p}.up_proj.weight"), &[intermediate, hidden], of(hidden));
                put(format!("{p}.down_proj.weight"), &[hidden, intermediate], of(intermediate));
            }
        }
        let ones = |n: usize| Stored {
            dtype: Dtype::BF16,
            shape: vec![n],
            bytes: (0..n).flat_map(|_| bf16(1.0)).collect(),
        };
        tensors.insert("model.norm.weight".into(), ones(hidden));
        for l in 0..layers {
            for (name, n) in [
                ("input_layernorm", hidden),
                ("post_attention_layernorm", hidden),
                ("self_attn.q_norm", HEAD_DIM),
                ("self_attn.k_norm", HEAD_DIM),
            ] {
                tensors.insert(format!("model.layers.{l}.{name}.weight"), ones(n));
            }
        }
        let head = &mut tensors.get_mut("lm_head.weight").unwrap().bytes;
        for (id, row) in head.chunks_mut(2 * hidden).enumerate() {
            if !(usize::from(b'a')..=usize::from(b'z')).contains(&id) {
                row.fill(0);
            }
        }
        let config = json!({
            "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": VOCAB,
            "hidden_size": hidden, "intermediate_size": 2 * hidden, "moe_intermediate_size": intermediate,
            "num_hidden_layers": layers, "num_attention_heads": HEADS, "num_key_value_heads": 1,
            "head_dim": HEAD_DIM, "num_experts": experts, "num_experts_per_tok": TOP_K, "norm_topk_prob": true,
            "decoder_sparse_step": 1, "mlp_only_layers": [], "hidden_act": "silu", "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0, "max_position_embeddings": context, "tie_word_embeddings": false,
            "torch_dtype": "bfloat16", "eos_token_id": STOP,
        });
        let generation_config =
            json!({"do_sample": true, "temperature": 0.8, "top_p": 0.9, "eos_token_id": STOP});
        Self { config, generation_config, tensors }
    }

    /// Makes every answer end after its first token.
    pub(crate) fn that_stops_at_once(mut self) -> Self {
        let letters: Vec<u32> = (b'a'..=b'z').map(u32::from).collect();
        self.generation_config["eos_token_id"] = json!(letters);
        self
    }

    pub(crate) fn tensor(&mut self, name: &str) -> &mut Stored {
        self.tensors.get_mut(name).unwrap()
    }

    /// Writes the model into `folder`, which is made if needed.
    pub(crate) fn write(&self, folder: &Path) -> PathBuf {
        std::fs::create_dir_all(folder).unwrap();
        let put = |name: &str, value: &Value| std::fs::write(folder.join(name), value.to_string()).unwrap();
        put("config.json", &self.config);
        put("generation_config.json", &self.generation_config);
        put("tokenizer.json", &tokenizer());
        put("tokenizer_config.json", &json!({"chat_template": CHAT_TEMPLATE, "eos_token": "<|im_end|>"}));
        let (mut shards, mut map) = ([Vec::new(), Vec::new()], serde_json::Map::new());
        for (name, t) in &self.tensors {
            let odd =
                name.split('.').nth(2).and_then(|n| n.parse::<usize>().ok()).is_some_and(|l| l % 2 == 1);
            let view = TensorView::new(t.dtype, t.shape.clone(), &t.bytes).unwrap();
            shards[usize::from(odd)].push((name.clone(), view));
            map.insert(name.clone(), [FIRST_SHARD, SECOND_SHARD][usize::from(odd)].into());
        }
        for (tensors, file) in shards.into_iter().zip([FIRST_SHARD, SECOND_SHARD]) {
            safetensors::serialize_to_file(tensors, None, &folder.join(file)).unwrap();
        }
        put(INDEX, &json!({"metadata": {}, "weight_map": map}));
        folder.to_owned()
    }
}

/// Byte-level tokens: 256 bytes, in their order, then the special tokens.
fn tokenizer() -> Value {
    // GPT-2's letters for bytes: printable ones stand for themselves.
    let printable = |b: u32| (33..=126).contains(&b) || (161..=172).contains(&b) || (174..=255).contains(&b);
    let mut next = 255;
    let letter = |b: u32| {
        let code = if printable(b) {
            b
        } else {
            next += 1;
            next
        };
        char::from_u32(code).unwrap().to_string()
    };
    let vocab: serde_json::Map<_, _> = (0..256).map(letter).zip((0..256).map(Value::from)).collect();
    let special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"].iter().enumerate().map(|(i, content)| {
        json!({"id": 256 + i, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true})
    });
    let byte_level =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false});
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": special.collect::<Vec<_>>(),
        "normalizer": null, "pre_tokenizer": byte_level, "post_processor": null, "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    })
}

fn bf16(value: f32) -> [u8; 2] {
    ((value.to_bits() >> 16) as u16).to_le_bytes()
}

/// SplitMix64, uniform in -1..1.
struct Random(u64);

impl Random {
    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }
}
