//! Grouped-query attention over a preallocated KV cache.

use candle_core::{DType, Result, Tensor};

use super::attend::Attend;
use super::fused::Heads;
use super::heads::HeadSplit;
use super::kv_cache::LayerKv;
use super::linear::Linear;
use super::norm::RmsNorm;
use super::prefill_attention::PrefillAttention;
use super::rope::RotaryTable;
use super::step::Step;
use crate::arch::{AttentionPlan, QkNormKind, TemperaturePlan};

/// One layer's attention, between the norm before it and the residual addition after it.
#[derive(Debug, Clone)]
pub struct Attention {
    qkv: Linear,
    out: Linear,
    /// Norms over the full width of q and k.
    full_norm: Option<[RmsNorm; 2]>,
    clip: Option<f64>,
    heads: HeadSplit,
    temperature: Option<TemperaturePlan>,
    attend: Attend,
}

/// The weights of an [`Attention`].
#[derive(Debug, Clone)]
pub struct AttentionWeights {
    /// The rows of q, k and v one above the other.
    pub qkv: Linear,
    /// The output projection.
    pub out: Linear,
    /// Norms of q and k, where the plan has them with weights: `[head_dim]` each, or as wide as all their heads.
    pub qk_norm: Option<[Tensor; 2]>,
    /// `[heads]`, where the plan has sinks.
    pub sinks: Option<Tensor>,
}

impl Attention {
    /// From a plan and its weights, in the model's dtype.
    ///
    /// # Errors
    /// Those of candle.
    pub fn new(plan: &AttentionPlan, weights: AttentionWeights, dtype: DType) -> Result<Self> {
        let AttentionWeights { qkv, out, qk_norm, sinks } = weights;
        let (full_norm, head_norm) = match (plan.qk_norm, qk_norm) {
            (Some(norm), Some(weights)) if norm.kind == QkNormKind::Full => {
                (Some(weights.map(|w| RmsNorm::new(w, norm.eps))), None)
            }
            (_, weights) => (None, weights),
        };
        let heads = HeadSplit::new(plan, head_norm, dtype, out.device())?;
        let attend = Attend::new(plan.scale, plan.mask, sinks)?;
        Ok(Self { qkv, out, full_norm, clip: plan.clip, heads, temperature: plan.temperature, attend })
    }

    /// With a kernel for prompts.
    pub(crate) fn with_prefill(self, prefill: Option<PrefillAttention>) -> Self {
        Self { attend: self.attend.with_prefill(prefill), ..self }
    }

    /// Attends from `x [tokens, hidden]` to itself and all before it. Appends to `kv`.
    ///
    /// # Errors
    /// Those of candle. The caller has checked that the cache has room.
    pub fn forward(
        &self,
        x: &Tensor,
        kv: &LayerKv,
        step: Step<'_>,
        rope: Option<&RotaryTable>,
    ) -> Result<Tensor> {
        let h = &self.heads;
        let mut qkv = self.qkv.forward(x, step)?;
        if let Some([q_norm, k_norm]) = &self.full_norm {
            let (q, k) = (q_norm.width()?, k_norm.width()?);
            let part = |from, width| qkv.narrow(1, from, width)?.contiguous();
            qkv = Tensor::cat(
                &[q_norm.forward(&part(0, q)?, step)?, k_norm.forward(&part(q, k)?, step)?, part(q + k, k)?],
                1,
            )?;
        }
        let position = match step {
            Step::At(position) => position,
            Step::Fused(fused) => {
                let op = Heads { split: h, clip: self.clip, rope, temperature: self.temperature };
                let q = fused.split_append(&qkv, &op, kv)?;
                let (k, v) = kv.whole()?;
                return self.out.forward(&fused.attend(&q, &self.attend, k, v)?, step);
            }
        };
        if let Some(bound) = self.clip {
            qkv = qkv.clamp(-bound, bound)?;
        }
        let split = h.forward(&qkv, position, rope)?;
        let mut q = split.narrow(0, 0, h.heads)?;
        if let Some(plan) = self.temperature {
            q = q.broadcast_mul(&temperatures(plan, position, &q)?)?;
        }
        let (k, v) = kv.append(
            position,
            &split.narrow(0, h.heads, h.kv_heads)?,
            &split.narrow(0, h.heads + h.kv_heads, h.kv_heads)?,
        )?;
        self.out.forward(&self.attend.forward(&q, &k, &v, position)?, step)
    }
}

/// A factor for each of the queries `[heads, tokens, width]`: `[tokens, 1]`, of their dtype.
fn temperatures(plan: TemperaturePlan, position: usize, q: &Tensor) -> Result<Tensor> {
    let tokens = q.dim(1)?;
    let factor = |p: usize| {
        let periods = ((p as f32 + 1.0) / plan.period as f32).floor();
        periods.ln_1p() * plan.slope as f32 + 1.0
    };
    let factors: Vec<f32> = (position..position + tokens).map(factor).collect();
    Tensor::from_vec(factors, (tokens, 1), q.device())?.to_dtype(q.dtype())
}
