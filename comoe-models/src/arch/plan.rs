//! What a family declares: which blocks a decoder is made of, and under which names their weights are stored.

use comoe_core::ExpertSpec;

use crate::error::{Error, Result};

/// A decoder-only model as a list of blocks.
#[derive(Debug, Clone)]
pub struct DecoderPlan {
    /// Rows of the embedding table.
    pub vocab: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Longest sequence that the model was made for, in tokens.
    pub max_positions: usize,
    /// `eps` of every RMS norm over the residual stream.
    pub norm_eps: f64,
    /// Whether the output head is the embedding table.
    pub tied_head: bool,
    /// The layers, first to last.
    pub layers: Vec<LayerPlan>,
    /// Where the weights are.
    pub names: TensorNames,
}

impl DecoderPlan {
    /// The layers with routed experts: layer number and its plan.
    pub fn moe_layers(&self) -> impl Iterator<Item = (usize, &MoePlan)> {
        self.layers.iter().enumerate().filter_map(|(l, layer)| match &layer.ffn {
            FfnPlan::Moe(moe) => Some((l, moe)),
            FfnPlan::Dense { .. } => None,
        })
    }

    /// Whether a sequence can have `context` tokens.
    ///
    /// # Errors
    /// [`Error::ContextTooLarge`], or [`Error::BadOption`] for 0.
    pub fn check_context(&self, context: usize) -> Result<()> {
        if context > self.max_positions {
            return Err(Error::ContextTooLarge { asked: context, available: self.max_positions });
        }
        if context == 0 {
            let expected = "expected at least 1 token";
            return Err(Error::BadOption { option: "context", value: "0".into(), expected });
        }
        Ok(())
    }

    /// Bytes of KV cache for one token, at `element` bytes a value.
    pub fn kv_bytes_per_token(&self, element: usize) -> usize {
        self.layers.iter().map(|l| 2 * l.attention.kv_heads * l.attention.head_dim * element).sum()
    }
}

/// One pre-norm layer: `x += attention(norm(x)); x += ffn(norm(x))`.
#[derive(Debug, Clone)]
pub struct LayerPlan {
    /// How tokens look at each other.
    pub attention: AttentionPlan,
    /// What happens to each token.
    pub ffn: FfnPlan,
}

/// Grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245).
#[derive(Debug, Clone)]
pub struct AttentionPlan {
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Whether the q, k and v projections have biases.
    pub qkv_bias: bool,
    /// Whether the output projection has a bias.
    pub out_bias: bool,
    /// RMS norm over each head of q and k before RoPE: its `eps`.
    pub qk_norm: Option<f64>,
    /// Base of the rotary embedding's wavelengths; all of `head_dim` rotates, halves paired.
    pub rope_theta: f64,
    /// Factor on `q k` before the softmax.
    pub scale: f64,
}

/// The feed-forward part of a layer.
#[derive(Debug, Clone)]
pub enum FfnPlan {
    /// `down(silu(gate x) * up x)`.
    Dense {
        /// Width between the projections.
        intermediate: usize,
    },
    /// A router and experts.
    Moe(MoePlan),
}

/// A router and the experts behind it.
#[derive(Debug, Clone)]
pub struct MoePlan {
    /// Experts of the layer.
    pub experts: usize,
    /// How experts are chosen and weighted.
    pub router: RouterPlan,
    /// What an expert computes.
    pub expert: ExpertSpec,
}

impl MoePlan {
    /// For messages.
    pub(crate) fn describe(&self) -> String {
        let ExpertSpec { hidden, intermediate, .. } = self.expert;
        format!("{} experts of hidden {hidden}, intermediate {intermediate}", self.experts)
    }
}

/// Softmax over all experts in F32, top-k of the probabilities (ties to the lowest number), optionally divided by
/// their sum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RouterPlan {
    /// Experts per token.
    pub top_k: usize,
    /// Whether a token's weights are made to sum to 1.
    pub normalise: bool,
}

/// Names of the dense weights. Within a layer they follow `{layers}.{number}.`; projections end in `.weight` and
/// `.bias`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorNames {
    /// Embedding table.
    pub embedding: &'static str,
    /// Last norm.
    pub final_norm: &'static str,
    /// Output head, unless tied.
    pub head: &'static str,
    /// Prefix of the layers.
    pub layers: &'static str,
    /// Norm before attention.
    pub attention_norm: &'static str,
    /// Norm before the feed-forward part.
    pub ffn_norm: &'static str,
    /// Projections q, k, v.
    pub qkv: [&'static str; 3],
    /// Output projection of attention.
    pub attention_out: &'static str,
    /// Norms of q and k.
    pub qk_norm: [&'static str; 2],
    /// The router's projection.
    pub router: &'static str,
    /// Dense gate, up and down projections.
    pub dense: [&'static str; 3],
}

impl TensorNames {
    /// What Llama began and most families kept.
    pub const LLAMA: Self = Self {
        embedding: "model.embed_tokens.weight",
        final_norm: "model.norm.weight",
        head: "lm_head.weight",
        layers: "model.layers",
        attention_norm: "input_layernorm",
        ffn_norm: "post_attention_layernorm",
        qkv: ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        attention_out: "self_attn.o_proj",
        qk_norm: ["self_attn.q_norm", "self_attn.k_norm"],
        router: "mlp.gate",
        dense: ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"],
    };
}
