//! Under which names the dense weights are stored.

/// Names of the dense weights. Those of the model follow its root (see [`Self::ROOTS`]), those of a layer
/// `{root}layers.{number}.`; projections and norms end in `.weight` and `.bias`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorNames {
    /// Embedding table.
    pub embedding: &'static str,
    /// Last norm.
    pub final_norm: &'static str,
    /// Norm before the mixer.
    pub mixer_norm: &'static str,
    /// Norm on what the mixer gives.
    pub mixer_post_norm: &'static str,
    /// Norm before the feed-forward part.
    pub ffn_norm: &'static str,
    /// Norm on what the feed-forward part gives.
    pub ffn_post_norm: &'static str,
    /// Projections q, k, v.
    pub qkv: [&'static str; 3],
    /// Output projection of attention.
    pub attention_out: &'static str,
    /// Norms of q and k.
    pub qk_norm: [&'static str; 2],
    /// The router's projection.
    pub router: &'static str,
    /// The router's bias for the choice (the whole name).
    pub choice_bias: &'static str,
    /// Dense gate, up and down projections.
    pub dense: [&'static str; 3],
    /// The shared expert's gate, up and down projections.
    pub shared: [&'static str; 3],
}

impl TensorNames {
    /// Roots of a language model: alone, or within a model of more modalities; the one whose embedding table is there
    /// counts. Beside it, the prefix of the output head.
    pub const ROOTS: [(&'static str, &'static str); 3] =
        [("model.", ""), ("language_model.model.", "language_model."), ("model.language_model.", "")];

    /// What Llama began and most families kept.
    pub const LLAMA: Self = Self {
        embedding: "embed_tokens",
        final_norm: "norm",
        mixer_norm: "input_layernorm",
        mixer_post_norm: "post_attention_layernorm",
        ffn_norm: "post_attention_layernorm",
        ffn_post_norm: "post_feedforward_layernorm",
        qkv: ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        attention_out: "self_attn.o_proj",
        qk_norm: ["self_attn.q_norm", "self_attn.k_norm"],
        router: "mlp.gate",
        choice_bias: "mlp.gate.e_score_correction_bias",
        dense: ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"],
        shared: [
            "mlp.shared_experts.gate_proj",
            "mlp.shared_experts.up_proj",
            "mlp.shared_experts.down_proj",
        ],
    };

    /// As Mixtral has it: the same with experts under `block_sparse_moe`.
    pub const MIXTRAL: Self = Self {
        router: "block_sparse_moe.gate",
        choice_bias: "block_sparse_moe.e_score_correction_bias",
        ..Self::LLAMA
    };
}
