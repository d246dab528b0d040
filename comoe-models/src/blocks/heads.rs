//! From projections to heads: taken apart, normed, rotated.

use candle_core::{CpuStorage, CustomOp1, DType, Device, Layout, Result, Shape, Tensor};

use super::cpu;
use super::norm::norm_row;
use super::rope::{Angles, RotaryTable};
use crate::arch::{AttentionPlan, QkNormKind};

/// Takes the projections apart into heads, norms and rotates those of q and k.
#[derive(Debug, Clone)]
pub(super) struct HeadSplit {
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) head_dim: usize,
    /// Norms over each head of q, k and v.
    pub(super) norms: [Option<HeadNorm>; 3],
    /// Whether those of q and k come after RoPE.
    pub(super) norm_after_rope: bool,
}

/// RMS norm over each head.
#[derive(Debug, Clone)]
pub(super) struct HeadNorm {
    /// `[head_dim]`
    pub(super) weight: Tensor,
    /// The same on the host, for the CPU path.
    host: Vec<f32>,
    pub(super) eps: f32,
}

impl HeadNorm {
    fn new(weight: Tensor, eps: f64) -> Result<Self> {
        let host = weight.to_dtype(DType::F32)?.to_device(&Device::Cpu)?.to_vec1()?;
        Ok(Self { host, weight, eps: eps as f32 })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        candle_nn::ops::rms_norm(&x.contiguous()?, &self.weight, self.eps)
    }
}

impl HeadSplit {
    /// For a plan whose norms over each head have these weights, `[head_dim]` each.
    pub(super) fn new(
        plan: &AttentionPlan,
        weights: Option<[Tensor; 2]>,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        let plain = || Tensor::ones(plan.head_dim, dtype, device);
        let (q, k) = match (plan.qk_norm, weights) {
            (Some(norm), Some([q, k])) if norm.kind != QkNormKind::Full => {
                (Some(HeadNorm::new(q, norm.eps)?), Some(HeadNorm::new(k, norm.eps)?))
            }
            (Some(norm), None) if norm.kind == QkNormKind::PlainAfterRope => {
                let norm = HeadNorm::new(plain()?, norm.eps)?;
                (Some(norm.clone()), Some(norm))
            }
            _ => (None, None),
        };
        let v = plan.v_norm.map(|eps| HeadNorm::new(plain()?, eps)).transpose()?;
        let after = |n: crate::arch::QkNormPlan| {
            matches!(n.kind, QkNormKind::HeadAfterRope | QkNormKind::PlainAfterRope)
        };
        let norm_after_rope = plan.qk_norm.is_some_and(after);
        let AttentionPlan { heads, kv_heads, head_dim, .. } = *plan;
        Ok(Self { heads, kv_heads, head_dim, norms: [q, k, v], norm_after_rope })
    }

    /// `qkv [tokens, (heads + 2 kv_heads) head_dim]` to `[heads + 2 kv_heads, tokens, head_dim]`: the heads of q,
    /// those of k, those of v.
    pub(super) fn forward(
        &self,
        qkv: &Tensor,
        position: usize,
        rope: Option<&RotaryTable>,
    ) -> Result<Tensor> {
        if !cpu::applies(qkv) {
            return self.forward_candle(qkv, position, rope);
        }
        let angles = rope.map(|r| r.host_rows(position, qkv.dims()[0]));
        match angles {
            None => qkv.apply_op1_no_bwd(&SplitOp { split: self, angles: None }),
            Some(angles @ Some(_)) => qkv.apply_op1_no_bwd(&SplitOp { split: self, angles }),
            Some(None) => self.forward_candle(qkv, position, rope),
        }
    }

    fn forward_candle(&self, qkv: &Tensor, position: usize, rope: Option<&RotaryTable>) -> Result<Tensor> {
        let (tokens, head_dim) = (qkv.dim(0)?, self.head_dim);
        let all = qkv.reshape((tokens, self.heads + 2 * self.kv_heads, head_dim))?.transpose(0, 1)?;
        let normed = |t: Tensor, norm: &Option<HeadNorm>, now: bool| match norm {
            Some(norm) if now => norm.forward(&t),
            _ => Ok(t),
        };
        let part = |from: usize, heads: usize, which: usize| {
            let norm = &self.norms[which];
            let mut t = all.narrow(0, from, heads)?;
            if which == 2 {
                return normed(t, norm, true)?.contiguous();
            }
            t = normed(t, norm, !self.norm_after_rope)?;
            if let Some(rope) = rope {
                t = rope.rotate(&t, position)?;
            }
            normed(t, norm, self.norm_after_rope)?.contiguous()
        };
        let (heads, kv) = (self.heads, self.kv_heads);
        Tensor::cat(&[part(0, heads, 0)?, part(heads, kv, 1)?, part(heads + kv, kv, 2)?], 0)
    }
}

struct SplitOp<'a> {
    split: &'a HeadSplit,
    angles: Option<Angles<'a>>,
}

impl CustomOp1 for SplitOp<'_> {
    fn name(&self) -> &'static str {
        "split-norm-rope"
    }

    fn cpu_fwd(&self, qkv: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let qkv = cpu::slice(qkv, layout)?;
        let &HeadSplit { heads, kv_heads, head_dim, ref norms, norm_after_rope } = self.split;
        let (tokens, width) = layout.shape().dims2()?;
        let all = heads + 2 * kv_heads;
        if width != all * head_dim {
            candle_core::bail!("{width} columns are not {all} heads of {head_dim}");
        }
        let mut out = vec![0f32; qkv.len()];
        cpu::for_chunks(&mut out, tokens * head_dim, qkv.len(), |head, out| {
            let which = usize::from(head >= heads) + usize::from(head >= heads + kv_heads);
            let norm = norms[which].as_ref();
            for (t, out) in out.chunks_exact_mut(head_dim).enumerate() {
                let row = &qkv[t * width + head * head_dim..][..head_dim];
                match norm {
                    Some(n) if which == 2 || !norm_after_rope => norm_row(row, &n.host, n.eps, out),
                    _ => out.copy_from_slice(row),
                }
                if which == 2 {
                    continue;
                }
                if let Some(angles) = &self.angles {
                    angles.rotate(t, out);
                }
                if let (Some(n), true) = (norm, norm_after_rope) {
                    let rotated = out.to_vec();
                    norm_row(&rotated, &n.host, n.eps, out);
                }
            }
        });
        Ok((CpuStorage::F32(out), (all, tokens, head_dim).into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::{Pairing, QkNormPlan, RopePlan};
    use crate::testing::{attention_plan, close, random, rope};

    #[test]
    fn splitting_norming_and_rotating_agrees_with_candle() {
        let kinds =
            [None, Some(QkNormKind::Head), Some(QkNormKind::HeadAfterRope), Some(QkNormKind::PlainAfterRope)];
        let ropes = [None, Some(rope(8)), Some(RopePlan { pairing: Pairing::Neighbours, ..rope(4) })];
        for (kind, v_norm) in kinds.into_iter().zip([None, Some(1e-6), None, Some(1e-5)]) {
            for rope in &ropes {
                let plan = AttentionPlan {
                    qk_norm: kind.map(|kind| QkNormPlan { eps: 1e-6, kind }),
                    v_norm,
                    rope: rope.clone(),
                    ..attention_plan(6, 2, 8)
                };
                let weights = matches!(kind, Some(QkNormKind::Head | QkNormKind::HeadAfterRope));
                let weights = weights.then(|| [random(&[8], 10), random(&[8], 11)]);
                let split = HeadSplit::new(&plan, weights, DType::F32, &Device::Cpu).unwrap();
                let table =
                    rope.as_ref().map(|r| RotaryTable::new(r, 700, DType::F32, &Device::Cpu).unwrap());
                for (tokens, position) in [(1, 0), (1, 37), (5, 3), (600, 100)] {
                    let qkv = random(&[tokens, 10 * 8], 1);
                    let want = split.forward_candle(&qkv, position, table.as_ref()).unwrap();
                    close(&split.forward(&qkv, position, table.as_ref()).unwrap(), &want, 1e-5);
                }
            }
        }
    }
}
