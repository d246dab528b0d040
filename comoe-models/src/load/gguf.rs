//! A GGUF file as a model: its metadata in the words of `config.json`, so that each family is declared once.
//!
//! Keys are those of llama.cpp (`gguf-py/gguf/constants.py`); what a family does beyond its metadata is what llama.cpp's
//! graph of that architecture does, and is written down per architecture below.

use std::path::{Path, PathBuf};

use comoe_core::store::{ARCHITECTURES, Gguf, GgufValue};
use serde_json::{Map, Value, json};

use super::ConfigFile;
use super::files::gguf_of;
use crate::arch::MAX_LAYERS;
use crate::chat::{ChatTemplate, Tokenizer, gguf_tokenizer};
use crate::error::{Error, Result};

/// An opened GGUF file.
pub(crate) struct GgufModel {
    gguf: Gguf,
}

impl GgufModel {
    pub(crate) fn open(path: &Path) -> Result<Self> {
        Ok(Self { gguf: Gguf::open(path)? })
    }

    /// The GGUF file that `path` stands for, opened; `None` for a model of another kind.
    pub(crate) fn of(path: &Path) -> Result<Option<Self>> {
        gguf_of(path).map(|file| Self::open(&file)).transpose()
    }

    /// The tokenizer that the file describes.
    pub(crate) fn tokenizer(&self) -> Result<Tokenizer> {
        gguf_tokenizer(&self.gguf)
    }

    /// The file's chat template.
    pub(crate) fn template(&self) -> Result<Option<ChatTemplate>> {
        let Some(source) = self.gguf.text("tokenizer.chat_template") else { return Ok(None) };
        let token = |name: &str| -> Option<(String, String)> {
            let id = self.gguf.number(&format!("tokenizer.ggml.{name}_token_id"))?;
            let Some(GgufValue::Texts(tokens)) = self.gguf.get("tokenizer.ggml.tokens") else { return None };
            Some((format!("{name}_token"), tokens.get(usize::try_from(id).ok()?)?.clone()))
        };
        let special = ["bos", "eos"].into_iter().filter_map(token).collect();
        ChatTemplate::new(source, special).map(Some)
    }

    /// The metadata as a `config.json` of the family.
    ///
    /// # Errors
    /// [`Error::BadFile`] for an architecture that is not known, or for metadata that is missing.
    pub(crate) fn config(&self) -> Result<ConfigFile> {
        let architecture = self.gguf.architecture()?.to_owned();
        let metadata = Metadata { gguf: &self.gguf, prefix: format!("{architecture}."), root: Map::new() };
        metadata.config(&architecture)
    }
}

struct Metadata<'a> {
    gguf: &'a Gguf,
    prefix: String,
    root: Map<String, Value>,
}

impl Metadata<'_> {
    fn path(&self) -> PathBuf {
        self.gguf.path().to_owned()
    }

    fn number(&self, key: &str) -> Option<u64> {
        self.gguf.number(&format!("{}{key}", self.prefix))
    }

    fn float(&self, key: &str) -> Option<f64> {
        // Files hold F32; the shortest decimal number that is the same is what was meant.
        let value = self.gguf.float(&format!("{}{key}", self.prefix))?;
        (value as f32).to_string().parse().ok()
    }

    fn need(&self, key: &str) -> Result<u64> {
        self.number(key).ok_or_else(|| {
            let reason = format!(
                "has no number at {:?} in its metadata; convert the model again",
                self.prefix.clone() + key
            );
            Error::bad_file(self.path(), reason)
        })
    }

    fn put(&mut self, field: &str, value: impl Into<Value>) {
        self.root.insert(field.to_owned(), value.into());
    }

    /// A field that is left out when the file does not have the key.
    fn copy(&mut self, field: &str, key: &str) {
        match self.gguf.get(&format!("{}{key}", self.prefix)) {
            Some(GgufValue::Unsigned(n)) => self.put(field, *n),
            Some(GgufValue::Bool(b)) => self.put(field, *b),
            Some(GgufValue::Float(_)) => {
                if let Some(v) = self.float(key) {
                    self.put(field, v);
                }
            }
            _ => {}
        }
    }

    /// A dimension of a tensor of the first layer that has it.
    fn dim(&self, tensor: &str, at: usize, layers: u64) -> Option<usize> {
        let shape = (0..layers).find_map(|l| self.gguf.tensor_shape(&format!("blk.{l}.{tensor}")))?;
        shape.get(at).copied()
    }

    fn config(mut self, architecture: &str) -> Result<ConfigFile> {
        let layers =
            self.need("block_count")?.saturating_sub(self.number("nextn_predict_layers").unwrap_or(0));
        // Tensors of each are looked for.
        if layers > MAX_LAYERS as u64 {
            let reason =
                format!("has {layers} layers, which is more than any model has; the limit is {MAX_LAYERS}");
            return Err(Error::bad_file(self.path(), reason));
        }
        let heads = self.need("attention.head_count")?;
        let hidden = self.need("embedding_length")?;
        self.put("num_hidden_layers", layers);
        self.put("num_attention_heads", heads);
        self.put("hidden_size", hidden);
        self.put("num_key_value_heads", self.number("attention.head_count_kv").unwrap_or(heads));
        self.put("max_position_embeddings", self.need("context_length")?);
        if let Some(shape) = self.gguf.tensor_shape("token_embd.weight") {
            self.put("vocab_size", shape[0]);
        }
        self.copy("intermediate_size", "feed_forward_length");
        self.copy("head_dim", "attention.key_length");
        self.copy("rms_norm_eps", "attention.layer_norm_rms_epsilon");
        self.copy("num_experts_per_tok", "expert_used_count");
        self.put("num_experts", self.number("expert_count").unwrap_or(0));
        if let Some(width) = self.dim("ffn_gate_exps.weight", 1, layers) {
            self.put("moe_intermediate_size", width);
        }
        self.put("tie_word_embeddings", !self.gguf.has_tensor("output.weight"));
        self.put("attention_bias", self.gguf.has_tensor("blk.0.attn_q.bias"));
        self.rope()?;
        let stops = ["eos", "eot"].map(|t| self.gguf.number(&format!("tokenizer.ggml.{t}_token_id")));
        self.put("eos_token_id", json!(stops.into_iter().flatten().collect::<Vec<_>>()));
        self.family(architecture, layers, hidden / heads.max(1))?;
        Ok(ConfigFile::of_values(self.gguf.path(), self.root))
    }

    fn rope(&mut self) -> Result<()> {
        self.copy("rope_theta", "rope.freq_base");
        let kind = self.gguf.text(&format!("{}rope.scaling.type", self.prefix)).unwrap_or("none").to_owned();
        let mut scaling = Map::new();
        match kind.as_str() {
            "none" => return Ok(()),
            "linear" | "yarn" => {}
            other => {
                let reason =
                    format!("has the RoPE scaling {other:?}; none, linear and yarn are read from GGUF files");
                return Err(Error::bad_file(self.path(), reason));
            }
        }
        scaling.insert("rope_type".into(), kind.into());
        for (field, key) in [
            ("factor", "factor"),
            ("original_max_position_embeddings", "original_context_length"),
            ("beta_fast", "yarn_beta_fast"),
            ("beta_slow", "yarn_beta_slow"),
        ] {
            if let Some(value) = self.float(&format!("rope.scaling.{key}")) {
                scaling.insert(field.into(), value.into());
            }
        }
        // Conversion stores a tenth of mscale_all_dim, which equals mscale in every release.
        if let Some(tenth) = self.float("rope.scaling.yarn_log_multiplier") {
            let mscale = ((tenth * 10.0) as f32).to_string().parse::<f64>().unwrap_or(tenth * 10.0);
            scaling.insert("mscale".into(), mscale.into());
            scaling.insert("mscale_all_dim".into(), mscale.into());
        }
        self.put("rope_scaling", scaling);
        Ok(())
    }

    fn family(&mut self, architecture: &str, layers: u64, plain_head: u64) -> Result<()> {
        match architecture {
            "qwen3moe" | "qwen2moe" => {
                let qwen3 = architecture == "qwen3moe";
                self.put("model_type", if qwen3 { "qwen3_moe" } else { "qwen2_moe" });
                self.put("norm_topk_prob", qwen3);
                let is_dense = |l: &u64| !self.gguf.has_tensor(&format!("blk.{l}.ffn_gate_inp.weight"));
                let dense: Vec<u64> = (0..layers).filter(is_dense).collect();
                self.put("mlp_only_layers", dense);
                if !qwen3 {
                    self.put("qkv_bias", self.gguf.has_tensor("blk.0.attn_q.bias"));
                    if let Some(width) = self.dim("ffn_gate_shexp.weight", 0, layers) {
                        self.put("shared_expert_intermediate_size", width);
                    }
                }
            }
            "llama" => self.put("model_type", "mixtral"),
            "olmoe" => {
                self.put("model_type", "olmoe");
                self.put("norm_topk_prob", false);
                self.copy("clip_qkv", "attention.clamp_kqv");
            }
            "gpt-oss" => {
                self.put("model_type", "gpt_oss");
                self.copy("sliding_window", "attention.sliding_window");
                if let Some(width) = self.root.get("moe_intermediate_size").cloned() {
                    self.put("intermediate_size", width);
                }
                if let Some(Value::Object(scaling)) = self.root.get_mut("rope_scaling") {
                    scaling.insert("truncate".into(), false.into());
                }
            }
            "deepseek2" => self.deepseek(layers)?,
            "glm4moe" => {
                self.put("model_type", "glm4_moe");
                self.put("use_qk_norm", self.gguf.has_tensor("blk.0.attn_q_norm.weight"));
                let head = self.number("attention.key_length").unwrap_or(plain_head).max(1);
                if let Some(rotated) = self.number("rope.dimension_count") {
                    self.put("partial_rotary_factor", rotated as f64 / head as f64);
                }
                self.sigmoid_router(layers);
            }
            "dots1" => {
                self.put("model_type", "dots1");
                self.sigmoid_router(layers);
            }
            "minimax-m2" => {
                self.put("model_type", "minimax_m2");
                self.copy("rotary_dim", "rope.dimension_count");
                if let Some(width) = self.root.get("moe_intermediate_size").cloned() {
                    self.put("intermediate_size", width);
                }
            }
            other => {
                let reason = format!(
                    "holds a model of architecture {other:?}, which is not supported as GGUF; supported are {}",
                    ARCHITECTURES.join(", ")
                );
                return Err(Error::bad_file(self.path(), reason));
            }
        }
        Ok(())
    }

    /// DeepSeek-V3's router and the dense first layers before it.
    fn sigmoid_router(&mut self, layers: u64) {
        self.copy("n_shared_experts", "expert_shared_count");
        self.copy("routed_scaling_factor", "expert_weights_scale");
        self.copy("norm_topk_prob", "expert_weights_norm");
        self.copy("first_k_dense_replace", "leading_dense_block_count");
        self.put("n_group", self.number("expert_group_count").unwrap_or(1));
        self.put("topk_group", self.number("expert_group_used_count").unwrap_or(1));
        // A family's own default is more than none.
        if self.number("leading_dense_block_count").is_none() {
            let dense =
                (0..layers).take_while(|l| !self.gguf.has_tensor(&format!("blk.{l}.ffn_gate_inp.weight")));
            let dense = dense.count();
            self.put("first_k_dense_replace", dense);
        }
        if self.number("expert_shared_count").is_none() {
            self.put("n_shared_experts", 0);
        }
    }

    fn deepseek(&mut self, layers: u64) -> Result<()> {
        let sigmoid = match self.number("expert_gating_func") {
            // Files of DeepSeek-V2 do not say.
            None | Some(0 | 1) => false,
            Some(2) => true,
            Some(other) => {
                let reason =
                    format!("has the gating function {other}; 1 (softmax) and 2 (sigmoid) are known");
                return Err(Error::bad_file(self.path(), reason));
            }
        };
        self.put("model_type", if sigmoid { "deepseek_v3" } else { "deepseek_v2" });
        self.sigmoid_router(layers);
        if !sigmoid {
            let grouped = self.number("expert_group_count").is_some_and(|n| n > 1);
            self.put("topk_method", if grouped { "group_limited_greedy" } else { "greedy" });
        }
        let rotated = self.need("rope.dimension_count")?;
        // Files whose keys and values are the latent give their true widths under names of their own.
        let key =
            self.number("attention.key_length_mla").map_or_else(|| self.need("attention.key_length"), Ok)?;
        let value = self
            .number("attention.value_length_mla")
            .map_or_else(|| self.need("attention.value_length"), Ok)?;
        self.put("qk_rope_head_dim", rotated);
        self.put("qk_nope_head_dim", key.saturating_sub(rotated));
        self.put("v_head_dim", value);
        self.put("kv_lora_rank", self.need("attention.kv_lora_rank")?);
        self.copy("q_lora_rank", "attention.q_lora_rank");
        let heads = self.need("attention.head_count")?;
        self.put("num_key_value_heads", heads);
        self.root.remove("head_dim");
        Ok(())
    }
}
