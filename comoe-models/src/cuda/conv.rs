//! LFM2's short convolution.

use std::sync::Arc;

use candle_core::DType;
use comoe_core::Result;
use cudarc::driver::CudaStream;

use super::{DecodeKernels, dtype_code, grid, tokens_of, within};

/// Channels of a block.
const THREADS: usize = 128;

/// Arguments of [`DecodeKernels::short_conv`]; addresses are device memory, elements are `dtype`.
#[derive(Debug, Clone, Copy)]
pub struct ConvArgs {
    /// `[tokens, 3 width]`: b, c and x.
    pub parts: u64,
    /// `[width, n]`, oldest tap first.
    pub taps: u64,
    /// `[width]`, or 0.
    pub bias: u64,
    /// Gated inputs `[capacity, width]`; rows `position..position + tokens` are written.
    pub cache: u64,
    /// Rows that the cache has room for.
    pub capacity: usize,
    /// Result `[tokens, width]`.
    pub out: u64,
    /// One u32: the first token's position.
    pub position: u64,
    /// One u32, set to 1 + a token that has no room in the cache, else left alone.
    pub error: u64,
    /// Tokens, 1 to 32.
    pub tokens: usize,
    /// Channels.
    pub width: usize,
    /// Taps.
    pub n: usize,
    /// F32, BF16 or F16.
    pub dtype: DType,
}

/// As kernels/conv.cu has it.
#[repr(C)]
#[derive(Clone, Copy)]
struct Device {
    parts: u64,
    taps: u64,
    bias: u64,
    cache: u64,
    out: u64,
    position: u64,
    error: u64,
    width: u32,
    n: u32,
    tokens: u32,
    capacity: u32,
    dtype: u32,
    pad: u32,
}

impl DecodeKernels {
    /// Enqueues the convolution of gated inputs, which are appended to the cache.
    ///
    /// # Errors
    /// [`comoe_core::Error::BadArgument`] for sizes or a dtype that the kernel cannot do,
    /// [`comoe_core::Error::Device`] when the launch fails.
    ///
    /// # Safety
    /// Every address in `args` must be valid on the stream's GPU, for the sizes documented, until the kernel is done.
    pub unsafe fn short_conv(&self, stream: &Arc<CudaStream>, args: &ConvArgs) -> Result<()> {
        let size = |what, n| within(what, n, 1, 1 << 30);
        let device = Device {
            parts: args.parts,
            taps: args.taps,
            bias: args.bias,
            cache: args.cache,
            out: args.out,
            position: args.position,
            error: args.error,
            width: size("channels", args.width)?,
            n: size("taps", args.n)?,
            tokens: tokens_of(args.tokens)?,
            capacity: size("rows of a cache", args.capacity)?,
            dtype: dtype_code("channels", args.dtype)?,
            pad: 0,
        };
        let config = grid(args.width.div_ceil(THREADS), 1, 1, THREADS, 0);
        // SAFETY: `Device` is the kernel's struct; the addresses are the caller's promise.
        unsafe { self.launch("short_conv", stream, &self.conv, config, &device) }
    }
}

#[cfg(test)]
mod tests {
    super::super::mirrored!(super::Device, 80);
}
