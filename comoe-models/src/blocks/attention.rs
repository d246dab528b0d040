//! Grouped-query attention over a preallocated KV cache.

use candle_core::{CpuStorage, CustomOp1, CustomOp3, D, DType, Device, Layout, Result, Shape, Tensor};

use super::cpu;
use super::kv_cache::LayerKv;
use super::linear::Linear;
use super::norm::norm_row;
use super::rope::RotaryTable;
use crate::arch::AttentionPlan;

/// Up to this many tokens the CPU walks the cache itself; for more, matrix products win.
const WALK_UP_TO: usize = 4;

/// Scores held at once, in elements: bounds the memory of a long prompt's attention (64 MiB in F32).
pub(crate) const SCORES_AT_ONCE: usize = 16 << 20;

/// One layer's attention, between the norm before it and the residual addition after it.
#[derive(Debug, Clone)]
pub struct Attention {
    qkv: Linear,
    out: Linear,
    heads: HeadSplit,
    scale: f32,
}

impl Attention {
    /// From the rows of q, k and v one above the other, the output projection, and the weights `[head_dim]` of the
    /// q and k norms where the plan has them.
    ///
    /// # Errors
    /// Those of candle.
    pub fn new(plan: &AttentionPlan, qkv: Linear, out: Linear, qk_norm: Option<[Tensor; 2]>) -> Result<Self> {
        let norm = match (qk_norm, plan.qk_norm) {
            (Some(weights), Some(eps)) => Some(QkNorm::new(weights, eps)?),
            _ => None,
        };
        let heads = HeadSplit { heads: plan.heads, kv_heads: plan.kv_heads, head_dim: plan.head_dim, norm };
        Ok(Self { qkv, out, heads, scale: plan.scale as f32 })
    }

    /// Attends from `x [tokens, hidden]`, which begins at `position`, to itself and all before it. Appends to `kv`.
    ///
    /// # Errors
    /// Those of candle. The caller has checked that the cache has room.
    pub fn forward(&self, x: &Tensor, kv: &LayerKv, position: usize, rope: &RotaryTable) -> Result<Tensor> {
        let h = &self.heads;
        let split = h.forward(&self.qkv.forward(x)?, position, rope)?;
        let q = split.narrow(0, 0, h.heads)?;
        let (k, v) = kv.append(
            position,
            &split.narrow(0, h.heads, h.kv_heads)?,
            &split.narrow(0, h.heads + h.kv_heads, h.kv_heads)?,
        )?;
        self.out.forward(&attend(&q, &k, &v, position, self.scale)?)
    }
}

/// Takes the projections apart into heads, norms and rotates those of q and k.
#[derive(Debug, Clone)]
struct HeadSplit {
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    norm: Option<QkNorm>,
}

/// RMS norm over each head of q and of k.
#[derive(Debug, Clone)]
struct QkNorm {
    weights: [Tensor; 2],
    /// The same on the host, for the CPU path.
    host: [Vec<f32>; 2],
    eps: f32,
}

impl QkNorm {
    fn new(weights: [Tensor; 2], eps: f64) -> Result<Self> {
        let host = |w: &Tensor| w.to_dtype(DType::F32)?.to_device(&Device::Cpu)?.to_vec1();
        Ok(Self { host: [host(&weights[0])?, host(&weights[1])?], weights, eps: eps as f32 })
    }
}

impl HeadSplit {
    /// `qkv [tokens, (heads + 2 kv_heads) head_dim]` to `[heads + 2 kv_heads, tokens, head_dim]`: the heads of q,
    /// those of k, those of v.
    fn forward(&self, qkv: &Tensor, position: usize, rope: &RotaryTable) -> Result<Tensor> {
        let tokens = qkv.dim(0)?;
        match rope.host_rows(position, tokens) {
            Some((cos, sin)) if cpu::applies(qkv) => qkv.apply_op1_no_bwd(&SplitOp { split: self, cos, sin }),
            _ => self.forward_candle(qkv, position, rope),
        }
    }

    fn forward_candle(&self, qkv: &Tensor, position: usize, rope: &RotaryTable) -> Result<Tensor> {
        let (tokens, head_dim) = (qkv.dim(0)?, self.head_dim);
        let (cos, sin) = rope.rows(position, tokens)?;
        let all = qkv.reshape((tokens, self.heads + 2 * self.kv_heads, head_dim))?.transpose(0, 1)?;
        let turned = |from: usize, heads: usize, which: usize| {
            let mut t = all.narrow(0, from, heads)?.contiguous()?;
            if let Some(norm) = &self.norm {
                t = candle_nn::ops::rms_norm(&t, &norm.weights[which], norm.eps)?;
            }
            candle_nn::rotary_emb::rope(&t.unsqueeze(0)?, &cos, &sin)?.squeeze(0)
        };
        let q = turned(0, self.heads, 0)?;
        let k = turned(self.heads, self.kv_heads, 1)?;
        let v = all.narrow(0, self.heads + self.kv_heads, self.kv_heads)?;
        Tensor::cat(&[q, k, v.contiguous()?], 0)
    }
}

struct SplitOp<'a> {
    split: &'a HeadSplit,
    /// `[tokens, head_dim / 2]`
    cos: &'a [f32],
    sin: &'a [f32],
}

impl CustomOp1 for SplitOp<'_> {
    fn name(&self) -> &'static str {
        "split-norm-rope"
    }

    fn cpu_fwd(&self, qkv: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let qkv = cpu::slice(qkv, layout)?;
        let &HeadSplit { heads, kv_heads, head_dim, ref norm } = self.split;
        let (tokens, width) = layout.shape().dims2()?;
        let (all, half) = (heads + 2 * kv_heads, head_dim / 2);
        if width != all * head_dim {
            candle_core::bail!("{width} columns are not {all} heads of {head_dim}");
        }
        let mut out = vec![0f32; qkv.len()];
        cpu::for_chunks(&mut out, tokens * head_dim, qkv.len(), |head, out| {
            for (t, out) in out.chunks_exact_mut(head_dim).enumerate() {
                let row = &qkv[t * width + head * head_dim..][..head_dim];
                if head >= heads + kv_heads {
                    out.copy_from_slice(row);
                    continue;
                }
                match norm {
                    Some(n) => norm_row(row, &n.host[usize::from(head >= heads)], n.eps, out),
                    None => out.copy_from_slice(row),
                }
                let (low, high) = out.split_at_mut(half);
                let angles = self.cos[t * half..][..half].iter().zip(&self.sin[t * half..][..half]);
                for ((l, h), (cos, sin)) in low.iter_mut().zip(high).zip(angles) {
                    (*l, *h) = (*l * cos - *h * sin, *h * cos + *l * sin);
                }
            }
        });
        Ok((CpuStorage::F32(out), (all, tokens, head_dim).into()))
    }
}

/// Causal attention: `q [heads, tokens, head_dim]` from `position` on, over `k` and `v`
/// `[kv_heads, position + tokens, head_dim]` (views of the cache), to `[tokens, heads * head_dim]`.
fn attend(q: &Tensor, k: &Tensor, v: &Tensor, position: usize, scale: f32) -> Result<Tensor> {
    if cpu::applies(q) && q.dim(1)? <= WALK_UP_TO {
        return q.apply_op3_no_bwd(k, v, &Walk { position, scale });
    }
    attend_candle(q, k, v, position, scale)
}

fn attend_candle(q: &Tensor, k: &Tensor, v: &Tensor, position: usize, scale: f32) -> Result<Tensor> {
    let (heads, tokens, head_dim) = q.dims3()?;
    let kv_heads = k.dim(0)?;
    let group = heads / kv_heads;
    let q = q.reshape((kv_heads, group, tokens, head_dim))?;
    let mut parts = Vec::new();
    let mut from = 0;
    while from < tokens {
        // Rows see no further than themselves, so later keys are left out rather than masked. How many rows fit
        // depends on the model and the position alone.
        let seen = |rows: usize| position + from + rows;
        let mut rows = tokens - from;
        while rows > 1 && heads * rows * seen(rows) > SCORES_AT_ONCE {
            rows = rows.div_ceil(2);
        }
        let seen = seen(rows);
        let q = q.narrow(2, from, rows)?.contiguous()?.reshape((kv_heads, group * rows, head_dim))?;
        let scores = (q.matmul(&k.narrow(1, 0, seen)?.t()?)? * f64::from(scale))?;
        let scores = scores.reshape((heads, rows, seen))?.to_dtype(DType::F32)?;
        let scores = match rows {
            1 => scores,
            _ => scores.broadcast_add(&causal_mask(rows, seen, q.device())?)?,
        };
        let p = candle_nn::ops::softmax(&scores, D::Minus1)?.to_dtype(q.dtype())?;
        let y = p.reshape((kv_heads, group * rows, seen))?.matmul(&v.narrow(1, 0, seen)?)?;
        parts.push(y.reshape((heads, rows, head_dim))?.transpose(0, 1)?.reshape((rows, heads * head_dim))?);
        from += rows;
    }
    match parts.as_slice() {
        [one] => Ok(one.clone()),
        many => Tensor::cat(many, 0),
    }
}

/// `[rows, seen]`: 0 where the last `rows` positions may look, minus infinity after them.
fn causal_mask(rows: usize, seen: usize, device: &Device) -> Result<Tensor> {
    let first = seen - rows;
    let mask: Vec<f32> = (0..rows)
        .flat_map(|r| (0..seen).map(move |c| if c <= first + r { 0.0 } else { f32::NEG_INFINITY }))
        .collect();
    Tensor::from_vec(mask, (rows, seen), device)
}

/// Attention of a few tokens, straight over the cache.
struct Walk {
    position: usize,
    scale: f32,
}

impl CustomOp3 for Walk {
    fn name(&self) -> &'static str {
        "decode-attention"
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_layout: &Layout,
        k: &CpuStorage,
        k_layout: &Layout,
        v: &CpuStorage,
        v_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let q = cpu::slice(q, q_layout)?;
        let (k, v) = (rows_of(k, k_layout)?, rows_of(v, v_layout)?);
        let (heads, tokens, head_dim) = q_layout.shape().dims3()?;
        let (kv_heads, seen, _) = k_layout.shape().dims3()?;
        if v_layout.dims() != k_layout.dims() || self.position + tokens != seen {
            candle_core::bail!("decode-attention: keys {k_layout:?} and values {v_layout:?} do not match");
        }
        let group = heads / kv_heads;
        let mut out = vec![0f32; q.len()];
        // One chunk per token and head, so the result lies as `[tokens, heads * head_dim]`.
        cpu::for_chunks(&mut out, head_dim, 2 * heads * tokens * seen * head_dim, |i, out| {
            let (t, head) = (i / heads, i % heads);
            let q = &q[(head * tokens + t) * head_dim..][..head_dim];
            let visible = self.position + t + 1;
            let (k, v) = (k.head(head / group, visible), v.head(head / group, visible));
            attend_head(q, k, v, self.scale, out);
        });
        Ok((CpuStorage::F32(out), (tokens, heads * head_dim).into()))
    }
}

/// A view `[heads, rows, width]` of the cache: rows are contiguous within a head, heads are apart.
struct Rows<'a> {
    data: &'a [f32],
    head_stride: usize,
    width: usize,
}

impl<'a> Rows<'a> {
    fn head(&self, head: usize, rows: usize) -> &'a [f32] {
        &self.data[head * self.head_stride..][..rows * self.width]
    }
}

fn rows_of<'a>(storage: &'a CpuStorage, layout: &Layout) -> Result<Rows<'a>> {
    let &[head_stride, row_stride, 1] = layout.stride() else {
        candle_core::bail!("decode-attention: cache layout {layout:?}");
    };
    let width = layout.dims()[2];
    if row_stride != width {
        candle_core::bail!("decode-attention: cache layout {layout:?}");
    }
    Ok(Rows { data: &storage.as_slice::<f32>()?[layout.start_offset()..], head_stride, width })
}

/// `out = softmax(scale q kᵀ) v` for one query, over as many keys as `k` holds.
fn attend_head(q: &[f32], k: &[f32], v: &[f32], scale: f32, out: &mut [f32]) {
    let mut p: Vec<f32> = k.chunks_exact(q.len()).map(|k| scale * cpu::dot(q, k)).collect();
    let top = p.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0.0;
    for p in &mut p {
        *p = (*p - top).exp();
        sum += *p;
    }
    out.fill(0.0);
    for (p, v) in p.iter().zip(v.chunks_exact(q.len())) {
        cpu::axpy(p / sum, v, out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{close, random};

    fn split(norm: bool) -> HeadSplit {
        let weights = [random(&[8], 10), random(&[8], 11)];
        let norm = norm.then(|| QkNorm::new(weights, 1e-6).unwrap());
        HeadSplit { heads: 6, kv_heads: 2, head_dim: 8, norm }
    }

    #[test]
    fn splitting_norming_and_rotating_agrees_with_candle() {
        let rope = RotaryTable::new(1e4, 8, 700, DType::F32, &Device::Cpu).unwrap();
        for norm in [false, true] {
            for (tokens, position) in [(1, 0), (1, 37), (5, 3), (600, 100)] {
                let qkv = random(&[tokens, 10 * 8], 1);
                let s = split(norm);
                let want = s.forward_candle(&qkv, position, &rope).unwrap();
                close(&s.forward(&qkv, position, &rope).unwrap(), &want, 1e-5);
            }
        }
    }

    /// Attention written out over whole tensors: repeat the kv heads, mask, softmax.
    fn plain(q: &Tensor, k: &Tensor, v: &Tensor, position: usize, scale: f32) -> Tensor {
        let (heads, tokens, head_dim) = q.dims3().unwrap();
        let (kv_heads, seen, _) = k.dims3().unwrap();
        let repeat = |t: &Tensor| {
            let shape = (kv_heads, heads / kv_heads, seen, head_dim);
            let t = t.contiguous().unwrap().unsqueeze(1).unwrap().expand(shape).unwrap();
            t.reshape((heads, seen, head_dim)).unwrap()
        };
        let scores =
            (q.contiguous().unwrap().matmul(&repeat(k).t().unwrap()).unwrap() * f64::from(scale)).unwrap();
        let mask: Vec<f32> = (0..tokens)
            .flat_map(|t| (0..seen).map(move |c| if c <= position + t { 0.0 } else { -1e30 }))
            .collect();
        let mask = Tensor::from_vec(mask, (1, tokens, seen), &Device::Cpu).unwrap();
        let p = candle_nn::ops::softmax(&scores.broadcast_add(&mask).unwrap(), D::Minus1).unwrap();
        let y = p.matmul(&repeat(v)).unwrap().transpose(0, 1).unwrap();
        y.reshape((tokens, heads * head_dim)).unwrap()
    }

    #[test]
    fn both_attentions_agree_with_the_plain_one_over_cache_views() {
        let capacity = 90;
        for (tokens, position) in [(1, 0), (1, 60), (3, 7), (4, 0), (30, 0), (25, 50)] {
            let seen = position + tokens;
            let q = random(&[6, tokens, 16], 1);
            let view = |seed| random(&[2, capacity, 16], seed).narrow(1, 0, seen).unwrap();
            let (k, v) = (view(2), view(3));
            let want = plain(&q, &k, &v, position, 0.25);
            close(&attend(&q, &k, &v, position, 0.25).unwrap(), &want, 1e-5);
            close(&attend_candle(&q, &k, &v, position, 0.25).unwrap(), &want, 1e-5);
        }
    }

    #[test]
    fn a_long_prompt_is_cut_into_rows_and_gives_the_same() {
        // 4 heads x 2,100 rows x 2,100 keys exceed what is held at once.
        let (tokens, heads) = (2100, 4);
        assert!(heads * tokens * tokens > SCORES_AT_ONCE);
        let q = random(&[heads, tokens, 4], 1);
        let (k, v) = (random(&[1, tokens, 4], 2), random(&[1, tokens, 4], 3));
        close(&attend(&q, &k, &v, 0, 0.5).unwrap(), &plain(&q, &k, &v, 0, 0.5), 1e-5);
    }

    #[test]
    fn later_keys_are_never_seen() {
        let q = random(&[2, 3, 8], 1);
        let (k, v) = (random(&[1, 9, 8], 2), random(&[1, 9, 8], 3));
        let cut = |t: &Tensor, n| t.narrow(1, 0, n).unwrap();
        let all = attend(&q, &k, &v, 6, 1.0).unwrap();
        let one = attend(&q.narrow(1, 0, 1).unwrap().contiguous().unwrap(), &cut(&k, 7), &cut(&v, 7), 6, 1.0);
        close(&all.narrow(0, 0, 1).unwrap(), &one.unwrap(), 0.0);
    }
}
