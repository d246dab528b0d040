//! The shapes of published models: how many experts, how large, and what surrounds them.

use comoe_core::{Activation, ExpertSpec};
use serde_json::{Value, json};

use crate::error::{Error, Result};

/// A model's sizes. Weights come from elsewhere.
#[derive(Debug, Clone, PartialEq)]
pub struct Shape {
    /// As it is asked for.
    pub name: &'static str,
    /// What an expert computes.
    pub spec: ExpertSpec,
    /// Experts of a layer.
    pub experts: usize,
    /// Experts that a token uses in a layer.
    pub top_k: usize,
    /// Number of the first layer with experts; those before are dense.
    pub first: usize,
    /// Layers with experts.
    pub layers: usize,
    /// What surrounds the experts, where it can be made.
    pub dense: Option<DenseShape>,
}

/// Attention, embedding and head of a Qwen3-MoE model, or of Mixtral.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DenseShape {
    /// Rows of the embedding table and of the head.
    pub vocab: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Whether q and k are normed: Qwen3-MoE has it so, Mixtral has not.
    pub qk_norm: bool,
}

impl Shape {
    /// The shapes that can be asked for by name. Sizes as the models' `config.json` has them.
    pub fn all() -> Vec<Self> {
        let plain = |name, layers, experts, top_k, hidden, intermediate| Self {
            name,
            spec: ExpertSpec::swiglu(hidden, intermediate),
            experts,
            top_k,
            first: 0,
            layers,
            dense: None,
        };
        let dense = |vocab, kv_heads, qk_norm| {
            Some(DenseShape { vocab, heads: 32, kv_heads, head_dim: 128, qk_norm })
        };
        let gpt_oss = ExpertSpec {
            activation: Activation::SwigluClamped { limit: 7.0, alpha: 1.702 },
            bias: true,
            ..ExpertSpec::swiglu(2880, 2880)
        };
        vec![
            Self { dense: dense(151_936, 4, true), ..plain("qwen3-30b-a3b", 48, 128, 8, 2048, 768) },
            Self { dense: dense(32_000, 8, false), ..plain("mixtral-8x7b", 32, 8, 2, 4096, 14336) },
            Self { first: 1, ..plain("deepseek-v2-lite", 26, 64, 6, 2048, 1408) },
            plain("olmoe-1b-7b", 16, 64, 8, 2048, 1024),
            Self { spec: gpt_oss, ..plain("gpt-oss-20b", 24, 32, 4, 2880, 2880) },
        ]
    }

    /// The shape of this name.
    ///
    /// # Errors
    /// [`Error::UnknownShape`], with those that there are.
    pub fn named(name: &str) -> Result<Self> {
        let all = Self::all();
        let known = all.iter().map(|s| s.name).collect::<Vec<_>>().join(", ");
        let found = all.into_iter().find(|s| s.name == name);
        found.ok_or_else(|| Error::UnknownShape { asked: name.to_owned(), known })
    }

    /// A model that takes no time: for tests, and to load kernels and libraries before something is measured.
    pub fn small() -> Self {
        Self {
            name: "small",
            spec: ExpertSpec::swiglu(256, 128),
            experts: 8,
            top_k: 2,
            first: 0,
            layers: 2,
            dense: Some(DenseShape { vocab: 512, heads: 4, kv_heads: 2, head_dim: 64, qk_norm: true }),
        }
    }

    /// The same with its first `layers` layers of experts only.
    ///
    /// # Errors
    /// [`Error::BadOption`] when there are not so many, or none is asked for.
    pub fn with_layers(self, layers: usize) -> Result<Self> {
        if layers == 0 || layers > self.layers {
            return Err(Error::BadOption {
                option: "--layers",
                value: layers.to_string(),
                expected: format!("{} has {} layers with experts, use 1 to that", self.name, self.layers),
            });
        }
        Ok(Self { layers, ..self })
    }

    /// Numbers of the layers with experts.
    pub fn moe_layers(&self) -> std::ops::Range<usize> {
        self.first..self.first + self.layers
    }

    /// `config.json` as the hub has it.
    ///
    /// # Errors
    /// [`Error::NoDensePart`] where what surrounds the experts is not known.
    pub fn config(&self) -> Result<Value> {
        let dense = self.dense_part()?;
        let mut config = json!({
            "vocab_size": dense.vocab, "hidden_size": self.spec.hidden, "num_hidden_layers": self.layers,
            "num_attention_heads": dense.heads, "num_key_value_heads": dense.kv_heads, "head_dim": dense.head_dim,
            "rope_theta": 1_000_000.0, "hidden_act": "silu", "num_experts_per_tok": self.top_k,
            "tie_word_embeddings": false
        });
        let family = if dense.qk_norm {
            json!({
                "model_type": "qwen3_moe", "intermediate_size": 3 * self.spec.hidden, "attention_bias": false,
                "max_position_embeddings": 40_960, "rms_norm_eps": 1e-6, "decoder_sparse_step": 1,
                "mlp_only_layers": [], "moe_intermediate_size": self.spec.intermediate,
                "num_experts": self.experts, "norm_topk_prob": true
            })
        } else {
            json!({
                "model_type": "mixtral", "intermediate_size": self.spec.intermediate,
                "max_position_embeddings": 32_768, "rms_norm_eps": 1e-5, "num_local_experts": self.experts,
                "sliding_window": null
            })
        };
        if let (Some(all), Value::Object(family)) = (config.as_object_mut(), family) {
            all.extend(family);
        }
        Ok(config)
    }

    /// What surrounds the experts.
    ///
    /// # Errors
    /// [`Error::NoDensePart`] where it is not known.
    pub fn dense_part(&self) -> Result<DenseShape> {
        self.dense.ok_or_else(|| Error::NoDensePart { shape: self.name.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use comoe_core::{ExpertFormat, ExpertLayout};

    use super::*;

    /// Published sizes of all experts in BF16, GiB.
    #[test]
    fn the_experts_add_up_to_the_published_sizes() {
        let sizes = [
            ("qwen3-30b-a3b", 54.0),
            ("mixtral-8x7b", 84.0),
            ("deepseek-v2-lite", 26.8),
            ("olmoe-1b-7b", 12.0),
            ("gpt-oss-20b", 35.6),
        ];
        for (name, gib) in sizes {
            let shape = Shape::named(name).unwrap();
            let record = ExpertLayout::new(&shape.spec, ExpertFormat::Bf16).record_bytes;
            let all = (shape.layers * shape.experts * record) as f64 / f64::from(1 << 30);
            assert!((all - gib).abs() < 0.1, "{name}: {all}");
            assert_eq!((shape.spec.hidden % 16, shape.spec.intermediate % 16), (0, 0), "{name}");
        }
        let error = Shape::named("gpt-5").unwrap_err().to_string();
        assert!(error.contains("gpt-5") && error.contains("qwen3-30b-a3b"), "{error}");
        let error = Shape::named("olmoe-1b-7b").unwrap().with_layers(17).unwrap_err().to_string();
        assert!(error.contains("16 layers"), "{error}");
    }
}
