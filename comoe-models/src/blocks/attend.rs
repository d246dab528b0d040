//! Queries over a cache of keys and values.

use candle_core::{
    CpuStorage, CustomOp3, D, DType, Device, Layout, Result, Shape, Storage, Tensor, WithDType,
};
use half::f16;

use super::cpu;
use super::int8_rows::Int8Rows;
use super::kv_cache::Cached;
use super::prefill_attention::{Look, PrefillAttention};
use crate::arch::Mask;

/// Up to this many tokens the CPU walks the cache itself; for more, matrix products win.
const WALK_UP_TO: usize = 4;

/// Scores held at once, in elements, where they are held at all: bounds the memory of a long prompt's attention (64 MiB in
/// F32).
pub(crate) const SCORES_AT_ONCE: usize = 16 << 20;

/// Elements of an INT8 cache that are expanded at once where attention needs tensors of the model's dtype, but at least
/// one head's.
pub(crate) const KEPT_AT_ONCE: usize = 16 << 20;

/// Keys of a piece of a fused step's attention: its softmax is one block's.
const PIECE: usize = 64;

/// Pieces of keys that a token of a fused step can see, of `reach` positions.
pub(crate) fn pieces(reach: usize, mask: Mask) -> usize {
    let all = reach.div_ceil(PIECE);
    match mask {
        Mask::Causal => all,
        Mask::Sliding(span) | Mask::Chunked(span) => all.min(span.div_ceil(PIECE) + 1),
    }
}

/// How queries look at keys.
#[derive(Debug, Clone)]
pub(super) struct Attend {
    pub(super) scale: f32,
    pub(super) mask: Mask,
    /// A logit for each head `[heads, 1, 1]` that takes part in the softmax and brings no value.
    pub(super) sinks: Option<Tensor>,
    /// The same on the host.
    host_sinks: Option<Vec<f32>>,
    /// On a GPU: for many queries.
    prefill: Option<PrefillAttention>,
}

impl Attend {
    /// `sinks` is `[heads]`.
    pub(super) fn new(scale: f64, mask: Mask, sinks: Option<Tensor>) -> Result<Self> {
        let sinks = sinks.map(|s| s.to_dtype(DType::F32)).transpose()?;
        let host_sinks = sinks.as_ref().map(|s| s.to_device(&Device::Cpu)?.to_vec1()).transpose()?;
        let sinks = sinks.map(|s| s.reshape(((), 1, 1))).transpose()?;
        Ok(Self { scale: scale as f32, mask, sinks, host_sinks, prefill: None })
    }

    /// With a kernel for many queries.
    pub(super) fn with_prefill(self, prefill: Option<PrefillAttention>) -> Self {
        Self { prefill, ..self }
    }

    /// `q [heads, tokens, key width]` from `position` on, over `k [kv_heads, position + tokens, key width]` and
    /// `v [kv_heads, position + tokens, value width]` (views of the cache), to `[tokens, heads * value width]`.
    pub(super) fn forward(&self, q: &Tensor, k: &Cached, v: &Cached, position: usize) -> Result<Tensor> {
        if cpu::applies(q) && q.dim(1)? <= WALK_UP_TO {
            let ((k, k_scales), (v, v_scales)) = (k.parts(), v.parts());
            let scales = k_scales.zip(v_scales);
            return q.apply_op3_no_bwd(k, v, &Walk { attend: self, position, scales });
        }
        if let Some(prefill) = &self.prefill
            && prefill.takes(q, k, v)?
        {
            let look = Look { scale: self.scale, mask: self.mask, sinks: self.sinks.as_ref(), position };
            return prefill.forward(q, k, v, look);
        }
        self.forward_candle(q, k, v, position)
    }

    fn forward_candle(&self, q: &Tensor, k: &Cached, v: &Cached, position: usize) -> Result<Tensor> {
        match (k, v) {
            (Cached::Plain(k), Cached::Plain(v)) => {
                self.over(q, &Keys { k, v, scales: None, base: 0, sinks: self.sinks.clone() }, position)
            }
            (Cached::Int8(k), Cached::Int8(v)) => self.over_int8(q, k, v, position),
            _ => candle_core::bail!("keys {:?} and values {:?} differ", k.format(), v.format()),
        }
    }

    /// Key heads one after the other, or as many at a time as may be expanded at once.
    fn over_int8(&self, q: &Tensor, k: &Int8Rows, v: &Int8Rows, position: usize) -> Result<Tensor> {
        let ((heads, _, key_width), (kv_heads, seen, value_width)) = (q.dims3()?, v.q().dims3()?);
        let group = heads / kv_heads;
        // What no query sees any more is not expanded.
        let base = self.mask.first(position);
        let rows = (base, seen - base);
        let at_once = (KEPT_AT_ONCE / (rows.1 * (key_width + value_width))).max(1);
        let mut parts = Vec::new();
        for first in (0..kv_heads).step_by(at_once) {
            let n = at_once.min(kv_heads - first);
            let expanded = |rows_of: &Int8Rows| rows_of.part((first, n), rows)?.expand(q.dtype());
            let ((k, k_scales), (v, v_scales)) = (expanded(k)?, expanded(v)?);
            let sinks = self.sinks.as_ref().map(|s| s.narrow(0, first * group, n * group)).transpose()?;
            let keys = Keys { k: &k, v: &v, scales: Some([k_scales, v_scales]), base, sinks };
            parts.push(self.over(&q.narrow(0, first * group, n * group)?, &keys, position)?);
        }
        match parts.as_slice() {
            [one] => Ok(one.clone()),
            many => Tensor::cat(many, 1),
        }
    }

    fn over(&self, q: &Tensor, keys: &Keys<'_>, position: usize) -> Result<Tensor> {
        let &Keys { k, v, ref scales, base, ref sinks } = keys;
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
            let scores = q.matmul(&k.narrow(1, first - base, seen)?.t()?)?;
            // Of whole numbers they are scaled in F32 alone.
            let scores = match scales {
                None => (scores * f64::from(self.scale))?.to_dtype(DType::F32)?,
                Some([of_keys, _]) => (scores.to_dtype(DType::F32)? * f64::from(self.scale))?
                    .broadcast_mul(&of_keys.narrow(2, first - base, seen)?)?,
            };
            let scores = scores.reshape((heads, rows, seen))?;
            let scores = match self.mask_rows(position + from, rows, first, seen) {
                Some(mask) => scores.broadcast_add(&Tensor::from_vec(mask, (rows, seen), q.device())?)?,
                None => scores,
            };
            let p = match sinks {
                None => candle_nn::ops::softmax(&scores, D::Minus1)?,
                Some(sinks) => {
                    let with =
                        Tensor::cat(&[scores, sinks.broadcast_as((heads, rows, 1))?.contiguous()?], 2)?;
                    candle_nn::ops::softmax(&with, D::Minus1)?.narrow(2, 0, seen)?.contiguous()?
                }
            };
            let mut p = p.reshape((kv_heads, group * rows, seen))?;
            if let Some([_, of_values]) = scales {
                p = p.broadcast_mul(&of_values.narrow(2, first - base, seen)?)?;
            }
            let p = p.to_dtype(q.dtype())?;
            let mut v = v.narrow(1, first - base, seen)?;
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

/// What queries look at, as tensors of their dtype.
struct Keys<'a> {
    /// `[kv_heads, positions, key width]`
    k: &'a Tensor,
    /// `[kv_heads, positions, value width]`
    v: &'a Tensor,
    /// Of keys and values that are whole numbers, `[kv_heads, 1, positions]` in F32.
    scales: Option<[Tensor; 2]>,
    /// The first of the positions.
    base: usize,
    /// `[heads, 1, 1]`
    sinks: Option<Tensor>,
}

/// Attention of a few tokens, straight over the cache.
struct Walk<'a> {
    attend: &'a Attend,
    position: usize,
    /// Of keys and values in INT8.
    scales: Option<(&'a Tensor, &'a Tensor)>,
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
        let (heads, tokens, width) = q_layout.shape().dims3()?;
        let (kv_heads, seen, key_width) = k_layout.shape().dims3()?;
        let (v_heads, v_seen, value_width) = v_layout.shape().dims3()?;
        if (kv_heads, seen, width) != (v_heads, v_seen, key_width) || self.position + tokens != seen {
            candle_core::bail!("decode-attention: keys {k_layout:?} and values {v_layout:?} do not match");
        }
        let Attend { scale, mask, .. } = *self.attend;
        let group = heads / kv_heads;
        let mut out = vec![0f32; tokens * heads * value_width];
        let work = heads * tokens * seen * (width + value_width);
        // One chunk per token and head, so the result lies as `[tokens, heads * value width]`.
        let each = |out: &mut [f32], one: &OneHead<'_>| {
            cpu::for_chunks(out, value_width, work, |i, out| {
                let (t, head) = (i / heads, i % heads);
                let position = self.position + t;
                let sink = self.attend.host_sinks.as_ref().map(|s| s[head]);
                let seen = Seen { first: mask.first(position), end: position + 1, sink };
                one(&q[(head * tokens + t) * width..][..width], head / group, seen, out);
            });
        };
        match self.scales {
            None => {
                let (k, v) = (Rows::<f32>::of(k, k_layout)?, Rows::<f32>::of(v, v_layout)?);
                each(&mut out, &|q, kv_head, seen, out| {
                    let (k, v) = (k.head(kv_head), v.head(kv_head));
                    let score = |r| scale * cpu::dot(q, k.row(r));
                    attend_head(seen, score, |p, r, out| cpu::axpy(p, v.row(r), out), out);
                });
            }
            Some((k_scales, v_scales)) => {
                let (k, v) = (Rows::<u8>::of(k, k_layout)?, Rows::<u8>::of(v, v_layout)?);
                let (k_scales, v_scales) = (Scales::of(k_scales)?, Scales::of(v_scales)?);
                each(&mut out, &|q, kv_head, seen, out| {
                    let (k, v) = (k.head(kv_head), v.head(kv_head));
                    let (k_scales, v_scales) = (k_scales.head(kv_head), v_scales.head(kv_head));
                    let score = |r| scale * cpu::dot_bytes(k.row(r), q) * k_scales[r].to_f32();
                    let add = |p: f32, r: usize, out: &mut [f32]| {
                        cpu::axpy_bytes(p * v_scales[r].to_f32(), v.row(r), out);
                    };
                    attend_head(seen, score, add, out);
                });
            }
        }
        Ok((CpuStorage::F32(out), (tokens, heads * value_width).into()))
    }
}

/// Attention of one head of one token: its query, its key head, the positions it sees, the result.
type OneHead<'a> = dyn Fn(&[f32], usize, Seen, &mut [f32]) + Sync + 'a;

/// A view `[heads, rows, width]` of the cache.
#[derive(Clone, Copy)]
struct Rows<'a, T> {
    data: &'a [T],
    head_stride: usize,
    row_stride: usize,
    width: usize,
}

impl<'a, T: WithDType> Rows<'a, T> {
    fn of(storage: &'a CpuStorage, layout: &Layout) -> Result<Self> {
        let &[head_stride, row_stride, 1] = layout.stride() else {
            candle_core::bail!("decode-attention: cache layout {layout:?}");
        };
        let data = &storage.as_slice::<T>()?[layout.start_offset()..];
        Ok(Self { data, head_stride, row_stride, width: layout.dims()[2] })
    }

    fn head(self, head: usize) -> Self {
        Self { data: &self.data[head * self.head_stride..], ..self }
    }

    fn row(self, row: usize) -> &'a [T] {
        &self.data[row * self.row_stride..][..self.width]
    }
}

/// A view `[heads, rows]` of the scales, copied: little beside the rows.
struct Scales {
    values: Vec<f16>,
    rows: usize,
}

impl Scales {
    fn of(scales: &Tensor) -> Result<Self> {
        let (heads, rows) = scales.dims2()?;
        let (storage, layout) = scales.storage_and_layout();
        let (Storage::Cpu(storage), &[stride, 1]) = (&*storage, layout.stride()) else {
            candle_core::bail!("decode-attention: scales {scales:?} of a KV cache");
        };
        let all = &storage.as_slice::<f16>()?[layout.start_offset()..];
        let values = (0..heads).flat_map(|head| &all[head * stride..][..rows]).copied().collect();
        Ok(Self { values, rows })
    }

    fn head(&self, head: usize) -> &[f16] {
        &self.values[head * self.rows..][..self.rows]
    }
}

/// The keys that a query sees.
#[derive(Clone, Copy)]
struct Seen {
    first: usize,
    end: usize,
    /// A logit that takes part and brings no value.
    sink: Option<f32>,
}

/// `out = softmax(scores) values` for one query: `score` of a position, and `add` of a position's values, weighted, to `out`.
#[inline(always)]
fn attend_head(
    seen: Seen,
    score: impl Fn(usize) -> f32,
    add: impl Fn(f32, usize, &mut [f32]),
    out: &mut [f32],
) {
    let Seen { first, end, sink } = seen;
    let mut p: Vec<f32> = (first..end).map(score).collect();
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
    for (p, r) in p.iter().zip(first..) {
        add(p / sum, r, out);
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

    /// Over six heads.
    fn attends() -> [Attend; 4] {
        [
            (Mask::Causal, None),
            (Mask::Causal, Some(random(&[6], 9))),
            (Mask::Sliding(7), Some(random(&[6], 9))),
            (Mask::Chunked(8), None),
        ]
        .map(|(mask, sinks)| Attend::new(0.25, mask, sinks).unwrap())
    }

    #[test]
    fn both_attentions_agree_with_the_plain_one_over_cache_views() {
        let capacity = 90;
        for a in attends() {
            for (tokens, position) in [(1, 0), (1, 60), (3, 7), (4, 0), (30, 0), (25, 50)] {
                let seen = position + tokens;
                let q = random(&[6, tokens, 16], 1);
                let view = |seed| random(&[2, capacity, 16], seed).narrow(1, 0, seen).unwrap();
                let k = view(2);
                // Values of their own, and values that are part of the keys.
                for v in [view(3), k.narrow(2, 0, 12).unwrap()] {
                    let want = plain(&q, &k, &v, position, &a);
                    let (k, v) = (Cached::Plain(k.clone()), Cached::Plain(v));
                    close(&a.forward(&q, &k, &v, position).unwrap(), &want, 1e-5);
                    close(&a.forward_candle(&q, &k, &v, position).unwrap(), &want, 1e-5);
                }
            }
        }
    }

    /// Both ways over an INT8 cache attend to the numbers that it holds, however many heads are expanded at once.
    #[test]
    fn attention_over_int8_is_that_over_its_numbers() {
        let (kv_heads, capacity) = (2, 90);
        for a in attends() {
            for (tokens, position) in [(1, 0), (1, 60), (3, 7), (4, 0), (30, 0), (25, 50)] {
                let seen = position + tokens;
                let q = random(&[6, tokens, 16], 1);
                let kept = |seed| {
                    let rows = Int8Rows::zeros(kv_heads, capacity, 16, &Device::Cpu).unwrap();
                    rows.write(0, &random(&[kv_heads, seen, 16], seed)).unwrap();
                    let rows = rows.part((0, kv_heads), (0, seen)).unwrap();
                    let (q, scales) = rows.expand(DType::F32).unwrap();
                    let numbers = q.broadcast_mul(&scales.transpose(1, 2).unwrap()).unwrap();
                    (Cached::Int8(rows), numbers)
                };
                let ((k, k_numbers), (v, v_numbers)) = (kept(2), kept(3));
                let want = plain(&q, &k_numbers, &v_numbers, position, &a);
                close(&a.forward(&q, &k, &v, position).unwrap(), &want, 1e-5);
                close(&a.forward_candle(&q, &k, &v, position).unwrap(), &want, 1e-5);
            }
        }
    }

    #[test]
    fn heads_of_a_long_int8_cache_are_expanded_one_after_the_other() {
        let (kv_heads, width) = (3, 64);
        let seen = KEPT_AT_ONCE / (2 * 2 * width) + 1;
        let a = Attend::new(0.25, Mask::Causal, Some(random(&[6], 9))).unwrap();
        let kept = |seed| {
            let rows = Int8Rows::zeros(kv_heads, seen, width, &Device::Cpu).unwrap();
            rows.write(0, &random(&[kv_heads, seen, width], seed)).unwrap();
            Cached::Int8(rows)
        };
        let (k, v) = (kept(2), kept(3));
        let q = random(&[6, 1, width], 1);
        // One token over the cache as it is, and with its heads expanded in turn.
        let want = a.forward(&q, &k, &v, seen - 1).unwrap();
        close(&a.forward_candle(&q, &k, &v, seen - 1).unwrap(), &want, 1e-5);
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
            let (kept_k, kept_v) = (Cached::Plain(k.clone()), Cached::Plain(v.clone()));
            close(&a.forward(&q, &kept_k, &kept_v, 0).unwrap(), &plain(&q, &k, &v, 0, &a), 1e-5);
        }
    }

    #[test]
    fn later_keys_are_never_seen() {
        let q = random(&[2, 3, 8], 1);
        let (k, v) = (random(&[1, 9, 8], 2), random(&[1, 9, 8], 3));
        let cut = |t: &Tensor, n| Cached::Plain(t.narrow(1, 0, n).unwrap());
        let a = plain_attend(1.0);
        let all = a.forward(&q, &cut(&k, 9), &cut(&v, 9), 6).unwrap();
        let one = a.forward(&q.narrow(1, 0, 1).unwrap().contiguous().unwrap(), &cut(&k, 7), &cut(&v, 7), 6);
        close(&all.narrow(0, 0, 1).unwrap(), &one.unwrap(), 0.0);
    }
}
