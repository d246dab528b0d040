//! Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): keys and values of all heads are made
//! from one small vector per token, and only that vector and the shared rotated key are kept.
//!
//! The projections from the latent to keys and values are applied to queries and results instead (the paper's
//! appendix C), so that heads look straight at the latents: attention with one key head of width `latent + rope_dim`,
//! whose values are the latents.

use candle_core::{Result, Tensor};

use super::attend::Attend;
use super::kv_cache::{Cached, LayerKv};
use super::linear::Linear;
use super::norm::RmsNorm;
use super::rope::RotaryTable;
use super::step::Step;
use crate::arch::{LatentPlan, Mask};

/// One layer's latent attention, between the norm before it and the residual addition after it.
#[derive(Debug, Clone)]
pub struct LatentAttention {
    query: Query,
    compress: Linear,
    latent_norm: RmsNorm,
    /// `[heads, nope_dim, latent]`
    to_keys: Tensor,
    /// `[heads, value_dim, latent]`
    to_values: Tensor,
    out: Linear,
    attend: Attend,
    plan: LatentPlan,
}

/// How queries are projected.
#[derive(Debug, Clone)]
pub enum Query {
    /// At once.
    Plain(Linear),
    /// Through a narrower vector.
    Compressed {
        /// `hidden` to `query_rank`.
        compress: Linear,
        /// Over `query_rank`.
        norm: RmsNorm,
        /// `query_rank` to all heads.
        expand: Linear,
    },
}

/// The weights of a [`LatentAttention`].
#[derive(Debug, Clone)]
pub struct LatentWeights {
    /// To `heads * (nope_dim + rope_dim)`.
    pub query: Query,
    /// To `latent + rope_dim`.
    pub compress: Linear,
    /// `[latent]`
    pub latent_norm: Tensor,
    /// `[heads * (nope_dim + value_dim), latent]`
    pub expand: Tensor,
    /// From `heads * value_dim`.
    pub out: Linear,
}

impl LatentAttention {
    /// From a plan and its weights.
    ///
    /// # Errors
    /// Those of candle.
    pub fn new(plan: &LatentPlan, weights: LatentWeights) -> Result<Self> {
        let LatentWeights { query, compress, latent_norm, expand, out } = weights;
        let expand = expand.reshape((plan.heads, plan.nope_dim + plan.value_dim, plan.latent))?;
        let to_keys = expand.narrow(1, 0, plan.nope_dim)?.contiguous()?;
        let to_values = expand.narrow(1, plan.nope_dim, plan.value_dim)?.contiguous()?;
        let latent_norm = RmsNorm::new(latent_norm, plan.norm_eps);
        let attend = Attend::new(plan.scale, Mask::Causal, None)?;
        Ok(Self { query, compress, latent_norm, to_keys, to_values, out, attend, plan: plan.clone() })
    }

    /// Attends from `x [tokens, hidden]` to itself and all before it. Appends to `kv`.
    ///
    /// # Errors
    /// Those of candle. The caller has checked that the cache has room.
    pub fn forward(&self, x: &Tensor, kv: &LayerKv, step: Step<'_>, rope: &RotaryTable) -> Result<Tensor> {
        let &LatentPlan { heads, latent, nope_dim, rope_dim, value_dim, .. } = &self.plan;
        let tokens = x.dim(0)?;
        let q = match &self.query {
            Query::Plain(project) => project.forward(x, step)?,
            Query::Compressed { compress, norm, expand } => {
                expand.forward(&norm.forward(&compress.forward(x, step)?, step)?, step)?
            }
        };
        let compressed = self.compress.forward(x, step)?;
        let position = match step {
            Step::At(position) => position,
            Step::Fused(fused) => {
                let q = fused.latent(&q, &compressed, &self.latent_norm, &self.to_keys, rope, kv)?;
                let keys = kv.rows()?;
                let values = Cached::Plain(keys.narrow(2, 0, latent)?);
                let seen = fused.attend(&q, &self.attend, &Cached::Plain(keys.clone()), &values)?;
                return self.out.forward(&fused.latent_values(&seen, &self.to_values)?, step);
            }
        };
        let q = q.reshape((tokens, heads, nope_dim + rope_dim))?.transpose(0, 1)?;
        let q_latent = q.narrow(2, 0, nope_dim)?.contiguous()?.matmul(&self.to_keys)?;
        let q_rope = rope.rotate(&q.narrow(2, nope_dim, rope_dim)?, position)?;
        let q = Tensor::cat(&[q_latent, q_rope], 2)?;

        let latents = self.latent_norm.forward(&compressed.narrow(1, 0, latent)?.contiguous()?, step)?;
        let k_rope = rope.rotate(&compressed.narrow(1, latent, rope_dim)?.unsqueeze(0)?, position)?;
        let k = kv.append_row(position, &Tensor::cat(&[latents.unsqueeze(0)?, k_rope], 2)?)?;

        let values = Cached::Plain(k.narrow(2, 0, latent)?);
        let seen = self.attend.forward(&q, &Cached::Plain(k), &values, position)?;
        let seen = seen.reshape((tokens, heads, latent))?.transpose(0, 1)?.contiguous()?;
        let values = seen.matmul(&self.to_values.t()?)?.transpose(0, 1)?;
        self.out.forward(&values.reshape((tokens, heads * value_dim))?, step)
    }
}
