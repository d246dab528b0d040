//! Queries over a cache of keys and values.

use candle_core::{CpuStorage, CustomOp3, D, DType, Device, Layout, Result, Shape, Tensor};

use super::cpu;
use crate::arch::Mask;

/// Up to this many tokens the CPU walks the cache itself; for more, matrix products win.
const WALK_UP_TO: usize = 4;

/// Scores held at once, in elements: bounds the memory of a long prompt's attention (64 MiB in F32).
pub(crate) const SCORES_AT_ONCE: usize = 16 << 20;

/// How queries look at keys.
#[derive(Debug, Clone)]
pub(super) struct Attend {
    pub(super) scale: f32,
    pub(super) mask: Mask,
    /// A logit for each head `[heads, 1, 1]` that takes part in the softmax and brings no value.
    pub(super) sinks: Option<Tensor>,
    /// The same on the host.
    host_sinks: Option<Vec<f32>>,
}

impl Attend {
    /// `sinks` is `[heads]`.
    pub(super) fn new(scale: f64, mask: Mask, sinks: Option<Tensor>) -> Result<Self> {
        let sinks = sinks.map(|s| s.to_dtype(DType::F32)).transpose()?;
        let host_sinks = sinks.as_ref().map(|s| s.to_device(&Device::Cpu)?.to_vec1()).transpose()?;
        let sinks = sinks.map(|s| s.reshape(((), 1, 1))).transpose()?;
        Ok(Self { scale: scale as f32, mask, sinks, host_sinks })
    }

    /// `q [heads, tokens, key width]` from `position` on, over `k [kv_heads, position + tokens, key width]` and
    /// `v [kv_heads, position + tokens, value width]` (views of the cache), to `[tokens, heads * value width]`.
    pub(super) fn forward(&self, q: &Tensor, k: &Tensor, v: &Tensor, position: usize) -> Result<Tensor> {
        if cpu::applies(q) && q.dim(1)? <= WALK_UP_TO {
            return q.apply_op3_no_bwd(k, v, &Walk { attend: self, position });
        }
        self.forward_candle(q, k, v, position)
    }

    fn forward_candle(&self, q: &Tensor, k: &Tensor, v: &Tensor, position: usize) -> Result<Tensor> {
        let (heads, tokens, width) = q.dims3()?;
        let (kv_heads, _, value_width) = v.dims3()?;
        let group = heads / kv_heads;
        let q = q.reshape((kv_heads, group, tokens, width))?;
        let mut parts = Vec::new();
        let mut from = 0;
        while from < tokens {
            // Rows see no further than themselves, so later keys are left out rather than masked, as are those that
            // no row sees any more. How many rows fit depends on the model and the position alone.
            let first = self.mask.first(position + from);
            let seen = |rows: usize| position + from + rows - first;
            let mut rows = tokens - from;
            while rows > 1 && heads * rows * seen(rows) > SCORES_AT_ONCE {
                rows = rows.div_ceil(2);
            }
            let seen = seen(rows);
            let q = q.narrow(2, from, rows)?.contiguous()?.reshape((kv_heads, group * rows, width))?;
            let scores = (q.matmul(&k.narrow(1, first, seen)?.t()?)? * f64::from(self.scale))?;
            let scores = scores.reshape((heads, rows, seen))?.to_dtype(DType::F32)?;
            let scores = match self.mask_rows(position + from, rows, first, seen) {
                Some(mask) => scores.broadcast_add(&Tensor::from_vec(mask, (rows, seen), q.device())?)?,
                None => scores,
            };
            let p = match &self.sinks {
                None => candle_nn::ops::softmax(&scores, D::Minus1)?,
                Some(sinks) => {
                    let with =
                        Tensor::cat(&[scores, sinks.broadcast_as((heads, rows, 1))?.contiguous()?], 2)?;
                    candle_nn::ops::softmax(&with, D::Minus1)?.narrow(2, 0, seen)?.contiguous()?
                }
            };
            let p = p.to_dtype(q.dtype())?.reshape((kv_heads, group * rows, seen))?;
            let mut v = v.narrow(1, first, seen)?;
            if v.stride()[1] != value_width {
                // Values that are part of their keys: matrix products want rows without gaps.
                v = v.contiguous()?;
            }
            let y = p.matmul(&v)?.reshape((heads, rows, value_width))?.transpose(0, 1)?;
            parts.push(y.reshape((rows, heads * value_width))?);
            from += rows;
        }
        match parts.as_slice() {
            [one] => Ok(one.clone()),
            many => Tensor::cat(many, 0),
        }
    }

    /// `[rows, seen]`: 0 where the queries from `position` on see keys from `first` on, else minus infinity; `None`
    /// when they see all.
    fn mask_rows(&self, position: usize, rows: usize, first: usize, seen: usize) -> Option<Vec<f32>> {
        if rows == 1 {
            return None;
        }
        let sees = |q: usize, k: usize| k <= q && k >= self.mask.first(q);
        let row = |r: usize| {
            (first..first + seen).map(move |k| if sees(position + r, k) { 0.0 } else { f32::NEG_INFINITY })
        };
        Some((0..rows).flat_map(row).collect())
    }
}

/// Attention of a few tokens, straight over the cache.
struct Walk<'a> {
    attend: &'a Attend,
    position: usize,
}

impl CustomOp3 for Walk<'_> {
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
        let (k, v) = (Rows::of(k, k_layout)?, Rows::of(v, v_layout)?);
        let (heads, tokens, width) = q_layout.shape().dims3()?;
        let (kv_heads, seen, key_width) = k_layout.shape().dims3()?;
        let (v_heads, v_seen, value_width) = v_layout.shape().dims3()?;
        if (kv_heads, seen, width) != (v_heads, v_seen, key_width) || self.position + tokens != seen {
            candle_core::bail!("decode-attention: keys {k_layout:?} and values {v_layout:?} do not match");
        }
        let group = heads / kv_heads;
        let mut out = vec![0f32; tokens * heads * value_width];
        let work = heads * tokens * seen * (width + value_width);
        // One chunk per token and head, so the result lies as `[tokens, heads * value width]`.
        cpu::for_chunks(&mut out, value_width, work, |i, out| {
            let (t, head) = (i / heads, i % heads);
            let q = &q[(head * tokens + t) * width..][..width];
            let position = self.position + t;
            let range = self.attend.mask.first(position)..position + 1;
            let sink = self.attend.host_sinks.as_ref().map(|s| s[head]);
            let (k, v) = (k.head(head / group), v.head(head / group));
            attend_head(
                q,
                range.clone().map(|r| k.row(r)),
                range.map(|r| v.row(r)),
                self.attend.scale,
                sink,
                out,
            );
        });
        Ok((CpuStorage::F32(out), (tokens, heads * value_width).into()))
    }
}

/// A view `[heads, rows, width]` of the cache.
#[derive(Clone, Copy)]
struct Rows<'a> {
    data: &'a [f32],
    head_stride: usize,
    row_stride: usize,
    width: usize,
}

impl<'a> Rows<'a> {
    fn of(storage: &'a CpuStorage, layout: &Layout) -> Result<Self> {
        let &[head_stride, row_stride, 1] = layout.stride() else {
            candle_core::bail!("decode-attention: cache layout {layout:?}");
        };
        let data = &storage.as_slice::<f32>()?[layout.start_offset()..];
        Ok(Self { data, head_stride, row_stride, width: layout.dims()[2] })
    }

    fn head(self, head: usize) -> Self {
        Self { data: &self.data[head * self.head_stride..], ..self }
    }

    fn row(self, row: usize) -> &'a [f32] {
        &self.data[row * self.row_stride..][..self.width]
    }
}

/// `out = softmax(scale q kᵀ) v` for one query, over as many keys as there are.
#[inline(always)]
fn attend_head<'a>(
    q: &[f32],
    k: impl Iterator<Item = &'a [f32]>,
    v: impl Iterator<Item = &'a [f32]>,
    scale: f32,
    sink: Option<f32>,
    out: &mut [f32],
) {
    let mut p: Vec<f32> = k.map(|k| scale * cpu::dot(q, k)).collect();
    let top = p.iter().copied().fold(sink.unwrap_or(f32::NEG_INFINITY), f32::max);
    let mut sum = 0.0;
    for p in &mut p {
        *p = (*p - top).exp();
        sum += *p;
    }
    if let Some(sink) = sink {
        sum += (sink - top).exp();
    }
    out.fill(0.0);
    for (p, v) in p.iter().zip(v) {
        cpu::axpy(p / sum, v, out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{close, random};

    fn plain_attend(scale: f64) -> Attend {
        Attend::new(scale, Mask::Causal, None).unwrap()
    }

    /// Attention written out over whole tensors: repeat the kv heads, mask, softmax.
    fn plain(q: &Tensor, k: &Tensor, v: &Tensor, position: usize, a: &Attend) -> Tensor {
        let (heads, tokens, _) = q.dims3().unwrap();
        let (kv_heads, seen, _) = k.dims3().unwrap();
        let repeat = |t: &Tensor| {
            let width = t.dims()[2];
            let t = t.contiguous().unwrap().unsqueeze(1).unwrap();
            let t = t.expand((kv_heads, heads / kv_heads, seen, width)).unwrap();
            t.reshape((heads, seen, width)).unwrap()
        };
        let scores = q.contiguous().unwrap().matmul(&repeat(k).t().unwrap()).unwrap();
        let scores = (scores * f64::from(a.scale)).unwrap();
        let sees = |t: usize, c: usize| c <= position + t && c >= a.mask.first(position + t);
        let mask: Vec<f32> =
            (0..tokens).flat_map(|t| (0..seen).map(move |c| if sees(t, c) { 0.0 } else { -1e30 })).collect();
        let mask = Tensor::from_vec(mask, (1, tokens, seen), &Device::Cpu).unwrap();
        let mut scores = scores.broadcast_add(&mask).unwrap();
        if let Some(sinks) = &a.sinks {
            let sinks = sinks.broadcast_as((heads, tokens, 1)).unwrap().contiguous().unwrap();
            scores = Tensor::cat(&[scores, sinks], 2).unwrap();
        }
        let p = candle_nn::ops::softmax(&scores, D::Minus1).unwrap().narrow(2, 0, seen).unwrap();
        let y = p.contiguous().unwrap().matmul(&repeat(v)).unwrap().transpose(0, 1).unwrap();
        y.flatten_from(1).unwrap()
    }

    #[test]
    fn both_attentions_agree_with_the_plain_one_over_cache_views() {
        let capacity = 90;
        for (mask, sinks) in [
            (Mask::Causal, None),
            (Mask::Causal, Some(random(&[6], 9))),
            (Mask::Sliding(7), Some(random(&[6], 9))),
            (Mask::Chunked(8), None),
        ] {
            let a = Attend::new(0.25, mask, sinks).unwrap();
            for (tokens, position) in [(1, 0), (1, 60), (3, 7), (4, 0), (30, 0), (25, 50)] {
                let seen = position + tokens;
                let q = random(&[6, tokens, 16], 1);
                let view = |seed| random(&[2, capacity, 16], seed).narrow(1, 0, seen).unwrap();
                let k = view(2);
                // Values of their own, and values that are part of the keys.
                for v in [view(3), k.narrow(2, 0, 12).unwrap()] {
                    let want = plain(&q, &k, &v, position, &a);
                    close(&a.forward(&q, &k, &v, position).unwrap(), &want, 1e-5);
                    close(&a.forward_candle(&q, &k, &v, position).unwrap(), &want, 1e-5);
                }
            }
        }
    }

    #[test]
    fn a_long_prompt_is_cut_into_rows_and_gives_the_same() {
        // 4 heads x 2,100 rows x 2,100 keys exceed what is held at once.
        let (tokens, heads) = (2100, 4);
        assert!(heads * tokens * tokens > SCORES_AT_ONCE);
        let q = random(&[heads, tokens, 4], 1);
        let (k, v) = (random(&[1, tokens, 4], 2), random(&[1, tokens, 4], 3));
        for mask in [Mask::Causal, Mask::Sliding(100)] {
            let a = Attend::new(0.5, mask, None).unwrap();
            close(&a.forward(&q, &k, &v, 0).unwrap(), &plain(&q, &k, &v, 0, &a), 1e-5);
        }
    }

    #[test]
    fn later_keys_are_never_seen() {
        let q = random(&[2, 3, 8], 1);
        let (k, v) = (random(&[1, 9, 8], 2), random(&[1, 9, 8], 3));
        let cut = |t: &Tensor, n| t.narrow(1, 0, n).unwrap();
        let a = plain_attend(1.0);
        let all = a.forward(&q, &k, &v, 6).unwrap();
        let one = a.forward(&q.narrow(1, 0, 1).unwrap().contiguous().unwrap(), &cut(&k, 7), &cut(&v, 7), 6);
        close(&all.narrow(0, 0, 1).unwrap(), &one.unwrap(), 0.0);
    }
}
