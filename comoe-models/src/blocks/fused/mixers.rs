//! How tokens look at each other in a fused step: heads, attention over the cache, latents, convolution.

use candle_core::{DType, Result, Tensor};

use super::{Step, address, failed};
use crate::arch::TemperaturePlan;
use crate::blocks::attend::Attend;
use crate::blocks::heads::{HeadNorm, HeadSplit};
use crate::blocks::kv_cache::{Cached, LayerKv};
use crate::blocks::norm::RmsNorm;
use crate::blocks::rope::RotaryTable;
use crate::cuda::{
    AttendArgs, ConvArgs, HeadNormArgs, HeadsArgs, KvRows, LatentArgs, LatentValuesArgs, RopeArgs,
};

/// What stands between an attention layer's projections and its attention.
pub(in crate::blocks) struct Heads<'a> {
    pub(in crate::blocks) split: &'a HeadSplit,
    pub(in crate::blocks) clip: Option<f64>,
    pub(in crate::blocks) rope: Option<&'a RotaryTable>,
    pub(in crate::blocks) temperature: Option<TemperaturePlan>,
}

impl Step<'_> {
    /// All heads' rows of a cache `[heads, capacity, width]` of a model in `dtype`, which may be a part of wider rows.
    fn cached(&self, cached: &Cached, dtype: DType) -> Result<KvRows> {
        let (rows, scales) = cached.parts();
        if scales.is_none() && rows.dtype() != dtype {
            candle_core::bail!("a KV cache in {:?} for a model in {dtype:?}", rows.dtype());
        }
        let &[head_stride, row_stride, 1] = rows.stride() else {
            candle_core::bail!("a KV cache of layout {:?}", rows.layout());
        };
        let scales = self.at_or_0(scales)?;
        Ok(KvRows { data: address(rows, &self.stream)?, head_stride, row_stride, scales })
    }

    fn rope(&self, table: &RotaryTable) -> Result<RopeArgs> {
        Ok(RopeArgs {
            cos: self.at(&table.cos)?,
            sin: self.at(&table.sin)?,
            rows: table.cos.dim(0)?,
            dim: table.dim,
            pairing: table.pairing,
        })
    }

    /// From `qkv [tokens, (heads + 2 kv_heads) head_dim]` to queries `[heads, tokens, head_dim]`; keys and values are
    /// appended to `kv`.
    pub(in crate::blocks) fn split_append(
        &self,
        qkv: &Tensor,
        op: &Heads<'_>,
        kv: &LayerKv,
    ) -> Result<Tensor> {
        let &HeadSplit { heads, kv_heads, head_dim, ref norms, norm_after_rope } = op.split;
        let (tokens, width) = qkv.dims2()?;
        let (k, v) = kv.whole()?;
        let (_, capacity, key_width) = k.dims3()?;
        if width != (heads + 2 * kv_heads) * head_dim || key_width != head_dim || v.dims3()?.2 != head_dim {
            candle_core::bail!("{width} columns are not {heads} and twice {kv_heads} heads of {head_dim}");
        }
        let q = self.rows((heads, tokens, head_dim), qkv.dtype())?;
        let norm = |q: &HeadNorm, k: &HeadNorm| {
            Ok::<_, candle_core::Error>(HeadNormArgs {
                q_weight: self.at(&q.weight)?,
                k_weight: self.at(&k.weight)?,
                eps: q.eps,
                after_rope: norm_after_rope,
            })
        };
        let norm = match norms {
            [Some(q), Some(k), _] => Some(norm(q, k)?),
            _ => None,
        };
        let args = HeadsArgs {
            qkv: self.at(qkv)?,
            dtype: qkv.dtype(),
            tokens,
            heads,
            kv_heads,
            head_dim,
            norm,
            v_norm: norms[2].as_ref().map(|n| n.eps),
            clip: op.clip.map(|bound| bound as f32),
            rope: op.rope.map(|table| self.rope(table)).transpose()?,
            temperature: op.temperature,
            // The key projection's rows are there twice.
            values_are_keys: false,
            q: self.at(&q)?,
            k: self.cached(k, qkv.dtype())?,
            v: self.cached(v, qkv.dtype())?,
            cache: k.format(),
            capacity,
            position: self.place()?,
            error: self.error_word(None)?,
        };
        // SAFETY: tensors of the shapes that were checked, on the stream's GPU; the kernel checks the position against
        // the capacity and the table's rows.
        unsafe { self.fused.kernels.split_norm_rope_append(&self.stream, &args) }.map_err(failed)?;
        self.mark("split, norm, rotate, append", 0)?;
        Ok(q)
    }

    /// Attention of `q [heads, tokens, key width]` over a cache `k [kv_heads, capacity, key width]` and
    /// `v [kv_heads, capacity, value width]` to `[tokens, heads * value width]`.
    pub(in crate::blocks) fn attend(
        &self,
        q: &Tensor,
        how: &Attend,
        k: &Cached,
        v: &Cached,
    ) -> Result<Tensor> {
        let ((heads, tokens, key_width), (kv_heads, capacity, value_width)) = (q.dims3()?, v.dims3()?);
        if k.dims3()? != (kv_heads, capacity, key_width)
            || k.format() != v.format()
            || how.sinks.as_ref().is_some_and(|s| s.elem_count() != heads)
        {
            candle_core::bail!("queries {:?} over keys {k:?} and values {v:?}", q.dims());
        }
        let out = self.rows((tokens, heads * value_width), q.dtype())?;
        let mut args = AttendArgs {
            q: self.at(q)?,
            dtype: q.dtype(),
            k: self.cached(k, q.dtype())?,
            v: self.cached(v, q.dtype())?,
            cache: k.format(),
            capacity,
            reach: self.reach.min(capacity),
            tokens,
            heads,
            kv_heads,
            key_width,
            value_width,
            mask: how.mask,
            sinks: self.at_or_0(how.sinks.as_ref())?,
            scale: how.scale,
            position: self.place()?,
            out: self.at(&out)?,
            workspace: 0,
            error: self.error_word(None)?,
        };
        let words = args.workspace_bytes().div_ceil(4);
        let workspace = match tokens {
            1 => self.arena.take(words, words, DType::F32)?,
            // Of many tokens it is large, and no graph holds it.
            // SAFETY: the kernels write what they read of it.
            _ => unsafe { Tensor::empty(words, DType::F32, q.device()) }?,
        };
        args.workspace = self.at(&workspace)?;
        // SAFETY: tensors of the shapes that were checked, on the stream's GPU; the cache holds every row up to the
        // last token's position, which the kernel checks against `reach`.
        unsafe { self.fused.kernels.attend(&self.stream, &args) }.map_err(failed)?;
        self.mark("attention", 0)?;
        Ok(out)
    }

    /// Latent attention's queries `[heads, tokens, latent + rope]` from `q [tokens, heads (nope + rope)]`; the latents
    /// and rotated keys of `compressed [tokens, latent + rope]` are appended to `kv`.
    pub(in crate::blocks) fn latent(
        &self,
        q: &Tensor,
        compressed: &Tensor,
        norm: &RmsNorm,
        to_keys: &Tensor,
        rope: &RotaryTable,
        kv: &LayerKv,
    ) -> Result<Tensor> {
        let ((heads, nope, latent), (tokens, width)) = (to_keys.dims3()?, compressed.dims2()?);
        let cache = kv.rows()?;
        if width != latent + rope.dim
            || q.dims() != [tokens, heads * (nope + rope.dim)]
            || cache.dim(2)? != width
            || norm.weight.dims() != [latent]
        {
            candle_core::bail!(
                "latents {:?} and queries {:?} for {:?}",
                compressed.dims(),
                q.dims(),
                to_keys.dims()
            );
        }
        let out = self.rows((heads, tokens, width), q.dtype())?;
        let args = LatentArgs {
            compressed: self.at(compressed)?,
            norm: self.at(&norm.weight)?,
            eps: norm.eps,
            queries: self.at(q)?,
            to_keys: self.at(to_keys)?,
            rope: self.rope(rope)?,
            cache: self.at(cache)?,
            capacity: cache.dim(1)?,
            q: self.at(&out)?,
            position: self.place()?,
            error: self.error_word(None)?,
            tokens,
            heads,
            latent,
            nope,
            dtype: q.dtype(),
        };
        // SAFETY: tensors of the shapes that were checked, on the stream's GPU; the kernels check the position against
        // the capacity and the table's rows.
        unsafe {
            self.fused.kernels.latent_append(&self.stream, &args).map_err(failed)?;
            self.fused.kernels.latent_queries(&self.stream, &args).map_err(failed)?;
        }
        self.mark("latents and queries", 0)?;
        Ok(out)
    }

    /// Values of all heads, `[tokens, heads * values]`, from what they saw, `[tokens, heads * latent]`, through
    /// `to_values [heads, values, latent]`.
    pub(in crate::blocks) fn latent_values(&self, seen: &Tensor, to_values: &Tensor) -> Result<Tensor> {
        let ((tokens, width), (heads, values, latent)) = (seen.dims2()?, to_values.dims3()?);
        if width != heads * latent {
            candle_core::bail!("{width} columns are not {heads} latents of {latent}");
        }
        let out = self.rows((tokens, heads * values), seen.dtype())?;
        let args = LatentValuesArgs {
            seen: self.at(seen)?,
            to_values: self.at(to_values)?,
            out: self.at(&out)?,
            tokens,
            heads,
            latent,
            values,
            dtype: seen.dtype(),
        };
        // SAFETY: tensors of the shapes that were checked, on the stream's GPU.
        unsafe { self.fused.kernels.latent_values(&self.stream, &args) }.map_err(failed)?;
        self.mark("latent values", 0)?;
        Ok(out)
    }

    /// LFM2's convolution of `parts [tokens, 3 width]` with `taps [width, n]`; gated inputs are appended to `kv`.
    pub(in crate::blocks) fn short_conv(
        &self,
        parts: &Tensor,
        taps: &Tensor,
        bias: Option<&Tensor>,
        kv: &LayerKv,
    ) -> Result<Tensor> {
        let ((tokens, columns), (width, n)) = (parts.dims2()?, taps.dims2()?);
        let cache = kv.rows()?;
        if columns != 3 * width || cache.dim(2)? != width {
            candle_core::bail!("{columns} columns for {width} channels");
        }
        let out = self.rows((tokens, width), parts.dtype())?;
        let args = ConvArgs {
            parts: self.at(parts)?,
            taps: self.at(taps)?,
            bias: self.at_or_0(bias)?,
            cache: self.at(cache)?,
            capacity: cache.dim(1)?,
            out: self.at(&out)?,
            position: self.place()?,
            error: self.error_word(None)?,
            tokens,
            width,
            n,
            dtype: parts.dtype(),
        };
        // SAFETY: tensors of the shapes that were checked, on the stream's GPU; the kernel checks the position against
        // the capacity.
        unsafe { self.fused.kernels.short_conv(&self.stream, &args) }.map_err(failed)?;
        self.mark("convolution", 0)?;
        Ok(out)
    }
}
