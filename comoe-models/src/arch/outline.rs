//! What nearly every family's configuration says in the same words.

use comoe_core::{Activation, ExpertSpec};

use super::limits::MAX_LAYERS;
use super::plan::{
    AttentionPlan, DecoderPlan, FfnPlan, LayerPlan, Mask, MoePlan, NormKind, NormPlan, Pairing, RouterPlan,
    SharedPlan,
};
use super::rope::rope;
use super::{RopePlan, TensorNames};
use crate::error::{Error, Result};
use crate::load::ConfigFile;

/// The sizes that all families have, and plans that begin with them.
pub(super) struct Outline<'a> {
    pub(super) c: &'a ConfigFile,
    pub(super) hidden: usize,
    pub(super) layers: usize,
    /// `eps` of the norms.
    pub(super) eps: f64,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) head_dim: usize,
    pub(super) activation: Activation,
}

/// What the family's configuration class assumes where a field is absent.
pub(super) struct Defaults {
    pub(super) eps: f64,
    pub(super) theta: f64,
    /// How much of a head rotates.
    pub(super) partial: f64,
    pub(super) tied: bool,
}

impl Default for Defaults {
    fn default() -> Self {
        Self { eps: 1e-6, theta: 10_000.0, partial: 1.0, tied: false }
    }
}

impl<'a> Outline<'a> {
    /// Reads and checks the sizes.
    pub(super) fn read(c: &'a ConfigFile, defaults: &Defaults) -> Result<Self> {
        let hidden = c.size("hidden_size")?;
        let act = c.first(&["hidden_act", "hidden_activation"])?.unwrap_or_else(|| "silu".to_owned());
        let activation = match act.as_str() {
            "silu" | "swish" => Activation::Silu,
            "gelu_pytorch_tanh" => Activation::GeluTanh,
            other => {
                let reason = format!("{other:?} is not supported; silu and gelu_pytorch_tanh are");
                return Err(c.bad("hidden_act", reason));
            }
        };
        let heads = c.size("num_attention_heads")?;
        let kv_heads = c.count_or("num_key_value_heads", heads)?;
        if kv_heads == 0 || heads % kv_heads != 0 {
            let reason = format!("{kv_heads} does not divide the {heads} heads");
            return Err(c.bad("num_key_value_heads", reason));
        }
        let layers = c.size("num_hidden_layers")?;
        if layers > MAX_LAYERS {
            let reason = format!("{layers} is more than any model has; the limit is {MAX_LAYERS}");
            return Err(c.bad("num_hidden_layers", reason));
        }
        Ok(Self {
            c,
            hidden,
            layers,
            eps: c.or("rms_norm_eps", defaults.eps)?,
            heads,
            kv_heads,
            head_dim: c.count_or("head_dim", hidden / heads)?,
            activation,
        })
    }

    /// Attention over all positions before, with RoPE over `partial_rotary_factor` of a head's halves, and biases on
    /// all four projections if `attention_bias` says so.
    pub(super) fn attention(&self, defaults: &Defaults) -> Result<AttentionPlan> {
        if self.head_dim == 0 || !self.head_dim.is_multiple_of(2) {
            return Err(self.c.bad("head_dim", format!("{} is not a positive even number", self.head_dim)));
        }
        let bias = self.c.or("attention_bias", false)?;
        Ok(AttentionPlan {
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            qkv_bias: bias,
            out_bias: bias,
            values_are_keys: false,
            qk_norm: None,
            v_norm: None,
            clip: None,
            rope: Some(self.rope(self.head_dim, Pairing::Halves, defaults)?),
            mask: Mask::Causal,
            sinks: false,
            temperature: None,
            scale: (self.head_dim as f64).powf(-0.5),
        })
    }

    /// The rotary embedding of a head of this width.
    pub(super) fn rope(&self, width: usize, pairing: Pairing, defaults: &Defaults) -> Result<RopePlan> {
        rope(self.c, &["rope_parameters", "rope_scaling"], width, pairing, defaults)
    }

    /// Experts with this intermediate size behind this router.
    pub(super) fn moe(&self, intermediate: usize, router: RouterPlan) -> Result<MoePlan> {
        let experts = self.c.count_or("num_experts", 0)?;
        if experts == 0 {
            return Err(self.no_experts("num_experts is 0 or absent"));
        }
        if router.top_k > experts || router.top_k == 0 {
            let reason = format!("{} of {experts} experts", router.top_k);
            return Err(self.c.bad("num_experts_per_tok", reason));
        }
        if let Some(g) = router.groups {
            let fits = g.count > 0 && g.keep > 0 && g.keep <= g.count && experts.is_multiple_of(g.count);
            let size = if fits { experts / g.count } else { 0 };
            if size < 2 || router.top_k > g.keep * size {
                let reason = format!(
                    "{} experts in the best {} of {} groups of {experts} experts cannot be",
                    router.top_k, g.keep, g.count
                );
                return Err(self.c.bad("n_group", reason));
            }
        }
        let activation = self.activation;
        let expert = ExpertSpec { activation, ..ExpertSpec::swiglu(self.hidden, intermediate) };
        Ok(MoePlan { experts, router, expert, shared: SharedPlan::None })
    }

    /// Experts per token.
    pub(super) fn top_k(&self) -> Result<usize> {
        self.c.size("num_experts_per_tok")
    }

    /// A dense part of `intermediate_size`.
    pub(super) fn dense(&self) -> Result<FfnPlan> {
        Ok(FfnPlan::Dense { intermediate: self.c.size("intermediate_size")?, activation: self.activation })
    }

    /// Refuses a flag that would change what is computed, where no release sets it.
    pub(super) fn refuse(&self, fields: &[&str]) -> Result<()> {
        for field in fields {
            if self.c.or(field, false)? {
                return Err(self.c.bad(field, "true is not supported in this family"));
            }
        }
        Ok(())
    }

    /// The whole from its layers.
    pub(super) fn decoder(
        &self,
        layers: Vec<LayerPlan>,
        names: TensorNames,
        defaults: &Defaults,
    ) -> Result<DecoderPlan> {
        let plan = DecoderPlan {
            vocab: self.c.size("vocab_size")?,
            hidden: self.hidden,
            max_positions: self.c.size("max_position_embeddings")?,
            norm: NormPlan { kind: NormKind::Rms, eps: self.eps },
            tied_head: self.c.or("tie_word_embeddings", defaults.tied)?,
            head_bias: false,
            embedding_scale: 1.0,
            logit_scale: 1.0,
            logit_cap: None,
            layers,
            names,
            stacked_experts: None,
        };
        if plan.moe_layers().next().is_none() {
            return Err(self.no_experts("its configuration leaves no layer with experts"));
        }
        Ok(plan)
    }

    /// A model without routed experts, and how that was seen.
    pub(super) fn no_experts(&self, reason: &str) -> Error {
        Error::NoExperts { path: self.c.path().to_owned(), reason: reason.to_owned() }
    }
}
