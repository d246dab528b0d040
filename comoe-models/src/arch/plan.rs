//! What a family declares: which blocks a decoder is made of, and under which names their weights are stored.

use comoe_core::store::StackedLayout;
use comoe_core::{Activation, ExpertSpec};

use super::names::TensorNames;
use crate::error::{Error, Result};
use crate::load::KvFormat;

/// A decoder-only model as a list of blocks.
#[derive(Debug, Clone, PartialEq)]
pub struct DecoderPlan {
    /// Rows of the embedding table.
    pub vocab: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Longest sequence that the model was made for, in tokens.
    pub max_positions: usize,
    /// Every norm over the residual stream.
    pub norm: NormPlan,
    /// Whether the output head is the embedding table.
    pub tied_head: bool,
    /// Whether the output head has a bias.
    pub head_bias: bool,
    /// Factor on the embeddings.
    pub embedding_scale: f64,
    /// Factor on the logits.
    pub logit_scale: f64,
    /// Logits become `cap * tanh(logits / cap)`.
    pub logit_cap: Option<f64>,
    /// The layers, first to last.
    pub layers: Vec<LayerPlan>,
    /// Where the weights are.
    pub names: TensorNames,
    /// How tensors that hold all experts of a layer are laid out; `None` when the family has one tensor per expert.
    pub stacked_experts: Option<StackedLayout>,
}

impl DecoderPlan {
    /// The layers with routed experts: layer number and its plan.
    pub fn moe_layers(&self) -> impl Iterator<Item = (usize, &MoePlan)> {
        self.layers.iter().enumerate().filter_map(|(l, layer)| match &layer.ffn {
            FfnPlan::Moe(moe) => Some((l, moe)),
            FfnPlan::Dense { .. } => None,
        })
    }

    /// Most tokens that a sequence planned for `context` can grow to: the model's limit, or the bound above which its
    /// rotary embedding would have other angles for the tokens that are there already.
    pub fn most_context(&self, context: usize) -> usize {
        let bound = |rope: &RopePlan| match rope.scaling {
            RopeScaling::Long { original, .. } if context <= original => original,
            _ => self.max_positions,
        };
        let bounds = self.layers.iter().filter_map(|l| l.mixer.rope()).map(bound);
        bounds.min().unwrap_or(self.max_positions).clamp(context, self.max_positions.max(context))
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

    /// Bytes of KV cache for one token, at `element` bytes a value of the model's dtype.
    pub fn kv_bytes_per_token(&self, element: usize, format: KvFormat) -> usize {
        self.layers.iter().map(|l| l.mixer.kept_bytes(element, format)).sum()
    }
}

/// A norm over the residual stream.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NormPlan {
    /// Which.
    pub kind: NormKind,
    /// Added to the variance.
    pub eps: f64,
}

/// Kinds of norm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormKind {
    /// RMS norm with a weight (arXiv 1910.07467).
    Rms,
    /// Layer norm with a weight and a bias (arXiv 1607.06450).
    Layer,
}

/// One layer: `x += mixer(x); x += ffn(x)`, with norms as the shape says.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerPlan {
    /// How tokens look at each other.
    pub mixer: MixerPlan,
    /// What happens to each token.
    pub ffn: FfnPlan,
    /// Where the norms are.
    pub shape: BlockShape,
    /// Factor on what a branch adds to the residual stream.
    pub residual_scale: f64,
    /// Whether the layer's result is multiplied with a number of the checkpoint.
    pub scalar: bool,
}

impl LayerPlan {
    /// A pre-norm layer without factors.
    pub fn pre_norm(mixer: MixerPlan, ffn: FfnPlan) -> Self {
        Self { mixer, ffn, shape: BlockShape::Pre, residual_scale: 1.0, scalar: false }
    }
}

/// Where a layer has norms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockShape {
    /// Before each branch.
    Pre,
    /// On what each branch gives.
    Post,
    /// Both.
    Sandwich,
}

impl BlockShape {
    /// Whether a norm comes before a branch.
    pub fn has_pre(self) -> bool {
        self != Self::Post
    }

    /// Whether a norm is on what a branch gives.
    pub fn has_post(self) -> bool {
        self != Self::Pre
    }
}

/// How tokens look at each other.
#[derive(Debug, Clone, PartialEq)]
pub enum MixerPlan {
    /// Heads of queries, keys and values.
    Attention(AttentionPlan),
    /// Keys and values compressed to one latent vector.
    Latent(LatentPlan),
    /// A short convolution.
    Conv(ConvPlan),
}

impl MixerPlan {
    /// What is kept of every token: heads, and the widths of a head's key and value.
    pub fn cached(&self) -> (usize, usize, usize) {
        match self {
            Self::Attention(a) => (a.kv_heads, a.head_dim, a.head_dim),
            Self::Latent(l) => (1, l.latent + l.rope_dim, 0),
            Self::Conv(c) => (1, c.width, 0),
        }
    }

    /// The format in force where `format` is asked for: INT8 is for keys and values of heads.
    pub fn kept_in(&self, format: KvFormat) -> KvFormat {
        match self {
            Self::Attention(_) => format,
            Self::Latent(_) | Self::Conv(_) => KvFormat::Plain,
        }
    }

    /// Bytes that are kept of every token, with `element` bytes for a number in the model's dtype.
    pub fn kept_bytes(&self, element: usize, format: KvFormat) -> usize {
        let (heads, key, value) = self.cached();
        match self.kept_in(format) {
            KvFormat::Plain => heads * (key + value) * element,
            // A scale for each of both.
            KvFormat::Int8 => heads * (key + value + 2 * 2),
        }
    }

    /// The rotary embedding, where there is one.
    pub fn rope(&self) -> Option<&RopePlan> {
        match self {
            Self::Attention(a) => a.rope.as_ref(),
            Self::Latent(l) => Some(&l.rope),
            Self::Conv(_) => None,
        }
    }
}

/// Grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245).
#[derive(Debug, Clone, PartialEq)]
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
    /// Whether the values are those of the key projection, before norm and rotation.
    pub values_are_keys: bool,
    /// RMS norm of q and k.
    pub qk_norm: Option<QkNormPlan>,
    /// `eps` of a weightless RMS norm over each head of v.
    pub v_norm: Option<f64>,
    /// Bound of the elements of q, k and v (after a norm over their full width).
    pub clip: Option<f64>,
    /// The rotary embedding.
    pub rope: Option<RopePlan>,
    /// Which keys a query sees.
    pub mask: Mask,
    /// Whether each head has an extra logit that takes part in the softmax and brings no value.
    pub sinks: bool,
    /// Factor on queries that grows with their position.
    pub temperature: Option<TemperaturePlan>,
    /// Factor on `q k` before the softmax.
    pub scale: f64,
}

/// RMS norm of q and k.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct QkNormPlan {
    /// Added to the mean square.
    pub eps: f64,
    /// What it goes over, and when.
    pub kind: QkNormKind,
}

/// What an RMS norm of q and k goes over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QkNormKind {
    /// Each head, before RoPE.
    Head,
    /// Each head, after RoPE.
    HeadAfterRope,
    /// Each head, after RoPE, without a weight.
    PlainAfterRope,
    /// All heads together, before RoPE.
    Full,
}

/// Queries times `1 + slope * ln(1 + floor((position + 1) / period))` (arXiv 2501.19399).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TemperaturePlan {
    /// In tokens.
    pub period: f64,
    /// Of the logarithm.
    pub slope: f64,
}

/// Which keys a query sees: never later ones, and among the others these.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mask {
    /// All.
    Causal,
    /// The last so many, its own included.
    Sliding(usize),
    /// Those of its chunk of so many positions.
    Chunked(usize),
}

impl Mask {
    /// The first position that a query at `position` sees.
    pub fn first(self, position: usize) -> usize {
        match self {
            Self::Causal => 0,
            Self::Sliding(window) => (position + 1).saturating_sub(window),
            Self::Chunked(chunk) => position - position % chunk,
        }
    }
}

/// Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).
#[derive(Debug, Clone, PartialEq)]
pub struct LatentPlan {
    /// Heads.
    pub heads: usize,
    /// Width of the compressed query; `None` projects at once.
    pub query_rank: Option<usize>,
    /// Width of the latent from which keys and values are made.
    pub latent: usize,
    /// Width of the part of a head that is not rotated.
    pub nope_dim: usize,
    /// Width of the rotated part; the keys' is shared by all heads.
    pub rope_dim: usize,
    /// Width of a value.
    pub value_dim: usize,
    /// Whether the compressing and the output projections have biases.
    pub bias: bool,
    /// `eps` of the RMS norms of the compressed query and of the latent.
    pub norm_eps: f64,
    /// The rotary embedding, of `rope_dim`.
    pub rope: RopePlan,
    /// Factor on `q k` before the softmax.
    pub scale: f64,
}

/// LFM2's mixer: `out(c * conv(b * x))` with `b, c, x = in(input)`, a causal convolution of each channel.
#[derive(Debug, Clone, PartialEq)]
pub struct ConvPlan {
    /// Channels: the width of the residual stream.
    pub width: usize,
    /// Taps: positions that a result sees, its own included.
    pub taps: usize,
    /// Whether projections and convolution have biases.
    pub bias: bool,
}

/// Rotary position embedding (Su et al. 2021, arXiv 2104.09864).
#[derive(Debug, Clone, PartialEq)]
pub struct RopePlan {
    /// Base of the wavelengths.
    pub theta: f64,
    /// How much of a head rotates, from its beginning; even.
    pub dim: usize,
    /// Which elements are rotated together.
    pub pairing: Pairing,
    /// What is done to the wavelengths.
    pub scaling: RopeScaling,
    /// Factor on cosines and sines.
    pub magnitude: f64,
}

/// Which elements are rotated together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pairing {
    /// Element `i` with `i + dim / 2` (GPT-NeoX).
    Halves,
    /// Element `2i` with `2i + 1` (GPT-J).
    Neighbours,
}

/// What is done to the wavelengths of a rotary embedding.
#[derive(Debug, Clone, PartialEq)]
pub enum RopeScaling {
    /// Nothing.
    None,
    /// All are longer by this factor (arXiv 2306.15595).
    Linear(f64),
    /// YaRN (arXiv 2309.00071).
    Yarn {
        /// By how much long wavelengths grow.
        factor: f64,
        /// Context before stretching, in tokens.
        original: f64,
        /// Rotations over that context above which a wavelength stays.
        fast: f64,
        /// Rotations below which it grows fully.
        slow: f64,
        /// Whether the bounds are rounded to whole pairs.
        truncate: bool,
    },
    /// As Llama 3.1 has it (`transformers`, `rope_type: llama3`).
    Llama3 {
        /// By how much long wavelengths grow.
        factor: f64,
        /// `original` over this is the wavelength from which on they grow fully.
        low: f64,
        /// `original` over this is the wavelength up to which they stay.
        high: f64,
        /// Context before stretching, in tokens.
        original: f64,
    },
    /// A factor for each pair (LongRoPE, arXiv 2402.13753): other ones for sequences longer than `original` tokens.
    Long {
        /// Factors up to `original` tokens.
        short: Vec<f64>,
        /// Factors, when the context is longer.
        long: Vec<f64>,
        /// Factor on cosines and sines then, in place of `magnitude`.
        long_magnitude: f64,
        /// In tokens.
        original: usize,
    },
    /// Only the first pairs rotate, at wavelengths of the whole width (Gemma 4).
    Proportional {
        /// Pairs that rotate.
        pairs: usize,
        /// By how much wavelengths grow.
        factor: f64,
    },
}

/// The feed-forward part of a layer.
#[derive(Debug, Clone, PartialEq)]
pub enum FfnPlan {
    /// `down(act(gate x) * up x)`.
    Dense {
        /// Width between the projections.
        intermediate: usize,
        /// The gate's non-linearity.
        activation: Activation,
    },
    /// A router and experts.
    Moe(MoePlan),
}

/// A router and the experts behind it.
#[derive(Debug, Clone, PartialEq)]
pub struct MoePlan {
    /// Experts of the layer.
    pub experts: usize,
    /// How experts are chosen and weighted.
    pub router: RouterPlan,
    /// What an expert computes.
    pub expert: ExpertSpec,
    /// What every token gets besides.
    pub shared: SharedPlan,
}

impl MoePlan {
    /// For messages.
    pub(crate) fn describe(&self) -> String {
        let ExpertSpec { hidden, intermediate, bias, .. } = self.expert;
        let bias = if bias { ", with biases" } else { "" };
        format!("{} experts of hidden {hidden}, intermediate {intermediate}{bias}", self.experts)
    }
}

/// What is added to the routed experts' sum. It has their activation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SharedPlan {
    /// Nothing.
    None,
    /// An expert that every token uses, of this intermediate width.
    Mlp(usize),
    /// The same, times the sigmoid of a projection to one number.
    Gated(usize),
    /// Gemma 4: a dense part beside the experts, on the residual stream under norms of its own; the router sees the
    /// residual stream, too.
    Parallel(usize),
}

impl SharedPlan {
    /// A shared expert of this width, or none for 0.
    pub fn of(width: usize) -> Self {
        if width == 0 { Self::None } else { Self::Mlp(width) }
    }
}

/// How experts are chosen and weighted. In this order: logits, scores, choice, weights.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RouterPlan {
    /// Experts per token.
    pub top_k: usize,
    /// Logits to scores.
    pub score: Score,
    /// Whether the projection has a bias.
    pub logit_bias: bool,
    /// Whether a bias is added to the scores for the choice alone (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).
    pub choice_bias: bool,
    /// Choice among the best groups of experts only.
    pub groups: Option<Groups>,
    /// What is done to the chosen weights.
    pub normalise: Normalise,
    /// Factor on the weights.
    pub scale: f64,
    /// Whether each expert has a factor on its weight.
    pub expert_scale: bool,
    /// Whether the router sees the residual stream under a norm of its own (Gemma 4), not what the experts see.
    pub own_input: bool,
    /// What is computed in which precision.
    pub precision: RouterPrecision,
}

impl RouterPlan {
    /// Softmax over all experts, then top-k; weights in the model's dtype.
    pub fn softmax(top_k: usize, normalise: bool) -> Self {
        Self {
            top_k,
            score: Score::Softmax,
            logit_bias: false,
            choice_bias: false,
            groups: None,
            normalise: if normalise { Normalise::Sum { eps: 0.0 } } else { Normalise::No },
            scale: 1.0,
            expert_scale: false,
            own_input: false,
            precision: RouterPrecision::Model,
        }
    }
}

/// How logits become the scores that experts are chosen by.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Score {
    /// Softmax over all experts.
    Softmax,
    /// The sigmoid of each.
    Sigmoid,
    /// The logits themselves; weights are the softmax over the chosen.
    SoftmaxOfChosen,
    /// SparseMixer's inference (Phi-3.5-MoE, arXiv 2409.12136): each of two experts is weighted by a softmax over those
    /// whose logit is within twice this tolerance.
    SparseMixer {
        /// `router_jitter_noise`.
        tolerance: f64,
    },
}

/// Choice among the best groups of experts only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Groups {
    /// Groups of equally many experts, in order.
    pub count: usize,
    /// Groups that are kept.
    pub keep: usize,
    /// How a group is judged.
    pub by: GroupScore,
}

/// How a group of experts is judged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GroupScore {
    /// By its best expert (DeepSeek-V2).
    Best,
    /// By the sum of its best two (DeepSeek-V3).
    BestTwo,
}

/// What is done to the weights of a token's experts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Normalise {
    /// Nothing.
    No,
    /// Divided by their sum plus `eps`.
    Sum {
        /// Keeps from dividing by 0.
        eps: f64,
    },
    /// Divided by their sum, or by this if it is more.
    AtLeast(f64),
}

/// What a router computes in which precision.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RouterPrecision {
    /// Logits in the model's dtype, scores in F32, weights rounded to the model's dtype.
    Model,
    /// The same, but weights stay F32.
    ModelLogits,
    /// Everything in F32, the projection too; weights stay F32.
    F32,
    /// Everything in F32, but weights are rounded to the model's dtype.
    F32Logits,
}
