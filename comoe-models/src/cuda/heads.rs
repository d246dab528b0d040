//! From projections to heads: split, norm, rotation, and the KV cache's new rows.

use std::sync::Arc;

use candle_core::DType;
use comoe_core::Result;
use cudarc::driver::CudaStream;

use super::norm::rounded;
use super::{DecodeKernels, KvRows, bad, dtype_code, grid, tokens_of, within};
use crate::arch::{Pairing, TemperaturePlan};
use crate::load::KvFormat;

/// Warps of a block, a head each.
const WARPS: usize = 4;

/// RMS norm over each head of q and k.
#[derive(Debug, Clone, Copy)]
pub struct HeadNormArgs {
    /// `[head_dim]` for q, or 0: ones.
    pub q_weight: u64,
    /// `[head_dim]` for k, or 0: ones.
    pub k_weight: u64,
    /// Added to the mean square.
    pub eps: f32,
    /// Whether it comes after the rotation.
    pub after_rope: bool,
}

/// Rotary position embedding.
#[derive(Debug, Clone, Copy)]
pub struct RopeArgs {
    /// `[rows, dim / 2]`, of the model's dtype.
    pub cos: u64,
    /// The same of sines.
    pub sin: u64,
    /// Positions in the tables.
    pub rows: usize,
    /// Elements of a head that rotate, from its beginning; even.
    pub dim: usize,
    /// Which elements are rotated together.
    pub pairing: Pairing,
}

/// Arguments of [`DecodeKernels::split_norm_rope_append`]; addresses are device memory.
#[derive(Debug, Clone, Copy)]
pub struct HeadsArgs {
    /// `[tokens, (heads + 2 kv_heads) head_dim]`: q, k, v; where values are keys, `heads + kv_heads`.
    pub qkv: u64,
    /// F32, BF16 or F16: the model's.
    pub dtype: DType,
    /// Tokens, 1 to 32.
    pub tokens: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Width of a head, up to 1024.
    pub head_dim: usize,
    /// Norm over each head of q and k.
    pub norm: Option<HeadNormArgs>,
    /// `eps` of a weightless norm over each head of v.
    pub v_norm: Option<f32>,
    /// Bound of the elements of q, k and v, before all else.
    pub clip: Option<f32>,
    /// Rotation of q and k.
    pub rope: Option<RopeArgs>,
    /// Factor on queries that grows with their position.
    pub temperature: Option<TemperaturePlan>,
    /// Whether v is what the key projection gives, before norm and rotation (Gemma 4).
    pub values_are_keys: bool,
    /// Result `[heads, tokens, head_dim]`.
    pub q: u64,
    /// `[kv_heads, capacity, head_dim]`; rows `position..position + tokens` are written.
    pub k: KvRows,
    /// The same for values.
    pub v: KvRows,
    /// How the cache is held. A row that INT8 cannot hold becomes NaN: its scale is.
    pub cache: KvFormat,
    /// Rows that the cache has room for.
    pub capacity: usize,
    /// One u32: the first token's position.
    pub position: u64,
    /// One u32, set to 1 + a token that has no room in the cache or in the tables, else left alone. Nothing of that
    /// token's head is written then.
    pub error: u64,
}

/// As kernels/heads.cu has it.
#[repr(C)]
#[derive(Clone, Copy)]
struct Device {
    qkv: u64,
    q_weight: u64,
    k_weight: u64,
    cos: u64,
    sin: u64,
    q: u64,
    k: u64,
    v: u64,
    k_scales: u64,
    v_scales: u64,
    position: u64,
    error: u64,
    k_head_stride: u64,
    v_head_stride: u64,
    k_row_stride: u32,
    v_row_stride: u32,
    heads: u32,
    kv_heads: u32,
    head_dim: u32,
    tokens: u32,
    capacity: u32,
    dtype: u32,
    int8: u32,
    norm: u32,
    v_norm: u32,
    rope_dim: u32,
    rope_rows: u32,
    neighbours: u32,
    values_are_keys: u32,
    eps: f32,
    v_eps: f32,
    clip: f32,
    period: f32,
    slope: f32,
}

impl DecodeKernels {
    /// Enqueues what stands between the projections of an attention layer and its attention: the split into heads, clip,
    /// norms, rotation and temperature, and the append of keys and values to the cache.
    ///
    /// # Errors
    /// [`comoe_core::Error::BadArgument`] for sizes or a dtype that the kernel cannot do,
    /// [`comoe_core::Error::Device`] when the launch fails.
    ///
    /// # Safety
    /// Every address in `args` must be valid on the stream's GPU, for the sizes documented, until the kernel is done.
    pub unsafe fn split_norm_rope_append(&self, stream: &Arc<CudaStream>, args: &HeadsArgs) -> Result<()> {
        let dtype = dtype_code("q, k and v", args.dtype)?;
        args.k.check(args.cache)?;
        args.v.check(args.cache)?;
        let head_dim = within("width of a head", args.head_dim, 1, 1024)?;
        let size = |what, n| within(what, n, 1, 1 << 30);
        let (rope_dim, rope_rows) = match args.rope {
            None => (0, 0),
            Some(rope) if !rope.dim.is_multiple_of(2) => {
                return bad(
                    "elements of a head that rotate",
                    format!("expected an even number, found {}", rope.dim),
                );
            }
            Some(rope) => (
                within("elements of a head that rotate", rope.dim, 2, args.head_dim)?,
                size("rows of a rotary table", rope.rows)?,
            ),
        };
        let device = Device {
            qkv: args.qkv,
            q_weight: args.norm.map_or(0, |n| n.q_weight),
            k_weight: args.norm.map_or(0, |n| n.k_weight),
            cos: args.rope.map_or(0, |r| r.cos),
            sin: args.rope.map_or(0, |r| r.sin),
            q: args.q,
            k: args.k.data,
            v: args.v.data,
            k_scales: args.k.scales,
            v_scales: args.v.scales,
            position: args.position,
            error: args.error,
            k_head_stride: args.k.head_stride as u64,
            v_head_stride: args.v.head_stride as u64,
            k_row_stride: size("stride of a cache's rows", args.k.row_stride)?,
            v_row_stride: size("stride of a cache's rows", args.v.row_stride)?,
            heads: size("query heads", args.heads)?,
            kv_heads: size("key heads", args.kv_heads)?,
            head_dim,
            tokens: tokens_of(args.tokens)?,
            capacity: size("rows of a KV cache", args.capacity)?,
            dtype,
            int8: (args.cache == KvFormat::Int8).into(),
            norm: args.norm.map_or(0, |n| if n.after_rope { 2 } else { 1 }),
            v_norm: args.v_norm.is_some().into(),
            rope_dim,
            rope_rows,
            neighbours: args.rope.is_some_and(|r| r.pairing == Pairing::Neighbours).into(),
            values_are_keys: args.values_are_keys.into(),
            eps: args.norm.map_or(0.0, |n| n.eps),
            v_eps: args.v_norm.unwrap_or(0.0),
            clip: args.clip.map_or(f32::INFINITY, |bound| rounded(bound, args.dtype)),
            period: args.temperature.map_or(0.0, |t| t.period as f32),
            slope: args.temperature.map_or(0.0, |t| t.slope as f32),
        };
        let blocks = (args.heads + 2 * args.kv_heads).div_ceil(WARPS);
        let config = grid(blocks, args.tokens, 1, 32 * WARPS, 4 * WARPS * args.head_dim);
        // SAFETY: `Device` is the kernel's struct; the addresses are the caller's promise.
        unsafe { self.launch("split_norm_rope_append", stream, &self.heads, config, &device) }
    }
}

#[cfg(test)]
mod tests {
    super::super::mirrored!(super::Device, 192);
}
