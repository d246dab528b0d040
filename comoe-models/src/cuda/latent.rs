//! Latent attention around its attention.

use std::sync::Arc;

use candle_core::DType;
use comoe_core::Result;
use cudarc::driver::CudaStream;

use super::{DecodeKernels, RopeArgs, dtype_code, grid, tokens_of, within};
use crate::arch::Pairing;

/// Threads of a block of the kernels that go over the latent.
const THREADS: usize = 128;

/// Arguments of [`DecodeKernels::latent_append`] and [`DecodeKernels::latent_queries`]; addresses are device memory,
/// elements are `dtype`.
#[derive(Debug, Clone, Copy)]
pub struct LatentArgs {
    /// `[tokens, latent + rope]`
    pub compressed: u64,
    /// `[latent]`, the weight of the latent's RMS norm.
    pub norm: u64,
    /// Added to the mean square.
    pub eps: f32,
    /// `[tokens, heads, nope + rope]`
    pub queries: u64,
    /// `[heads, nope, latent]`
    pub to_keys: u64,
    /// Rotation of the last `rope.dim` elements.
    pub rope: RopeArgs,
    /// `[capacity, latent + rope]`; rows `position..position + tokens` are written by the append.
    pub cache: u64,
    /// Rows that the cache has room for.
    pub capacity: usize,
    /// Result of the queries, `[heads, tokens, latent + rope]`.
    pub q: u64,
    /// One u32: the first token's position.
    pub position: u64,
    /// One u32, set by the append to 1 + a token that has no room in the cache or in the tables, else left alone.
    pub error: u64,
    /// Tokens, 1 to 32.
    pub tokens: usize,
    /// Query heads.
    pub heads: usize,
    /// Width of the latent.
    pub latent: usize,
    /// Width of the part of a query that is not rotated, up to 1024.
    pub nope: usize,
    /// F32, BF16 or F16.
    pub dtype: DType,
}

/// As kernels/latent.cu has it.
#[repr(C)]
#[derive(Clone, Copy)]
struct Device {
    compressed: u64,
    norm: u64,
    queries: u64,
    to_keys: u64,
    cos: u64,
    sin: u64,
    cache: u64,
    q: u64,
    position: u64,
    error: u64,
    heads: u32,
    tokens: u32,
    latent: u32,
    nope: u32,
    rope: u32,
    rope_rows: u32,
    capacity: u32,
    neighbours: u32,
    dtype: u32,
    eps: f32,
}

impl LatentArgs {
    fn device(&self) -> Result<Device> {
        let size = |what, n| within(what, n, 1, 1 << 30);
        Ok(Device {
            compressed: self.compressed,
            norm: self.norm,
            queries: self.queries,
            to_keys: self.to_keys,
            cos: self.rope.cos,
            sin: self.rope.sin,
            cache: self.cache,
            q: self.q,
            position: self.position,
            error: self.error,
            heads: within("query heads", self.heads, 1, 65_535)?,
            tokens: tokens_of(self.tokens)?,
            latent: size("width of a latent", self.latent)?,
            nope: within("width of a query", self.nope, 1, 1024)?,
            rope: within("elements that rotate", self.rope.dim, 2, 1024)?,
            rope_rows: size("rows of a rotary table", self.rope.rows)?,
            capacity: size("rows of a KV cache", self.capacity)?,
            neighbours: (self.rope.pairing == Pairing::Neighbours).into(),
            dtype: dtype_code("a latent", self.dtype)?,
            eps: self.eps,
        })
    }
}

/// As kernels/latent.cu has it.
#[repr(C)]
#[derive(Clone, Copy)]
struct Values {
    seen: u64,
    to_values: u64,
    out: u64,
    heads: u32,
    latent: u32,
    values: u32,
    dtype: u32,
}

/// Arguments of [`DecodeKernels::latent_values`]; addresses are device memory, elements are `dtype`.
#[derive(Debug, Clone, Copy)]
pub struct LatentValuesArgs {
    /// What the queries saw, `[tokens, heads, latent]`.
    pub seen: u64,
    /// `[heads, values, latent]`
    pub to_values: u64,
    /// Result `[tokens, heads, values]`.
    pub out: u64,
    /// Tokens, 1 to 32.
    pub tokens: usize,
    /// Query heads.
    pub heads: usize,
    /// Width of the latent.
    pub latent: usize,
    /// Width of a value.
    pub values: usize,
    /// F32, BF16 or F16.
    pub dtype: DType,
}

impl DecodeKernels {
    /// Enqueues the append of latents under their norm, and of rotated keys, to the cache.
    ///
    /// # Errors
    /// [`comoe_core::Error::BadArgument`] for sizes or a dtype that the kernel cannot do,
    /// [`comoe_core::Error::Device`] when the launch fails.
    ///
    /// # Safety
    /// Every address in `args` must be valid on the stream's GPU, for the sizes documented, until the kernel is done.
    pub unsafe fn latent_append(&self, stream: &Arc<CudaStream>, args: &LatentArgs) -> Result<()> {
        let (device, config) = (args.device()?, grid(args.tokens, 1, 1, THREADS, 0));
        // SAFETY: `Device` is the kernel's struct; the addresses are the caller's promise.
        unsafe { self.launch("latent_append", stream, &self.latent[0], config, &device) }
    }

    /// Enqueues the queries' change of basis, from keys to latents.
    ///
    /// # Errors
    /// As [`Self::latent_append`].
    ///
    /// # Safety
    /// As [`Self::latent_append`].
    pub unsafe fn latent_queries(&self, stream: &Arc<CudaStream>, args: &LatentArgs) -> Result<()> {
        let device = args.device()?;
        let config = grid(args.latent.div_ceil(THREADS), args.heads, args.tokens, THREADS, 4 * args.nope);
        // SAFETY: `Device` is the kernel's struct; the addresses are the caller's promise.
        unsafe { self.launch("latent_queries", stream, &self.latent[1], config, &device) }
    }

    /// Enqueues the values' making from latents.
    ///
    /// # Errors
    /// As [`Self::latent_append`].
    ///
    /// # Safety
    /// As [`Self::latent_append`].
    pub unsafe fn latent_values(&self, stream: &Arc<CudaStream>, args: &LatentValuesArgs) -> Result<()> {
        let size = |what, n| within(what, n, 1, 1 << 30);
        let tokens = tokens_of(args.tokens)? as usize;
        let device = Values {
            seen: args.seen,
            to_values: args.to_values,
            out: args.out,
            heads: within("query heads", args.heads, 1, 65_535)?,
            latent: size("width of a latent", args.latent)?,
            values: size("width of a value", args.values)?,
            dtype: dtype_code("a latent", args.dtype)?,
        };
        let config = grid(args.values.div_ceil(4), args.heads, tokens, 128, 0);
        // SAFETY: `Values` is the kernel's struct; the addresses are the caller's promise.
        unsafe { self.launch("latent_values", stream, &self.latent[2], config, &device) }
    }
}

#[cfg(test)]
mod tests {
    super::super::mirrored!(super::Device, 120);
}
