//! Residual addition and norm.

use std::sync::Arc;

use candle_core::DType;
use comoe_core::Result;
use cudarc::driver::{CudaFunction, CudaModule, CudaStream, DriverError};

use super::{DecodeKernels, dtype_code, grid, tokens_of, within};

/// Widest row that a block's registers hold, and the widest of which a thread has eight columns.
const MOST_WIDTH: usize = 16_384;
const NARROW: usize = 8_192;

/// Whether a norm subtracts the mean.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Centre {
    /// RMS norm (arXiv 1910.07467).
    No,
    /// Layer norm (arXiv 1607.06450).
    Yes,
}

/// Arguments of [`DecodeKernels::add_norm`]; addresses are device memory, elements are `dtype`.
#[derive(Debug, Clone, Copy)]
pub struct NormArgs {
    /// `[tokens, width]`, rows `x_stride` elements apart.
    pub x: u64,
    /// At least `width`.
    pub x_stride: usize,
    /// `[tokens, width]`, or 0: nothing is added.
    pub delta: u64,
    /// Factor on `delta`; 1 is none.
    pub delta_scale: f32,
    /// Factor on the sum; 1 is none.
    pub sum_scale: f32,
    /// Result `[tokens, width]`: `(x + delta_scale delta) sum_scale`; 0 where it is not wanted. It may be `x` or `delta`.
    pub sum: u64,
    /// `[width]`, or 0: ones.
    pub weight: u64,
    /// `[width]`, or 0.
    pub bias: u64,
    /// Added to the mean square or the variance.
    pub eps: f32,
    /// Which norm.
    pub centre: Centre,
    /// Result `[tokens, width]`, the sum under the norm, rows `normed_stride` elements apart; 0 where it is not wanted.
    /// It may be `x` or `delta`.
    pub normed: u64,
    /// At least `width`.
    pub normed_stride: usize,
    /// Tokens, 1 to 32.
    pub tokens: usize,
    /// Columns, up to 16,384.
    pub width: usize,
    /// F32, BF16 or F16, of all of these.
    pub dtype: DType,
}

impl NormArgs {
    /// `sum = x + delta` and `normed`, its RMS norm with a weight, all `[tokens, width]` without gaps.
    pub fn rms(tokens: usize, width: usize, dtype: DType, eps: f32) -> Self {
        Self {
            x: 0,
            x_stride: width,
            delta: 0,
            delta_scale: 1.0,
            sum_scale: 1.0,
            sum: 0,
            weight: 0,
            bias: 0,
            eps,
            centre: Centre::No,
            normed: 0,
            normed_stride: width,
            tokens,
            width,
            dtype,
        }
    }
}

/// As kernels/norm.cu has it.
#[repr(C)]
#[derive(Clone, Copy)]
struct Device {
    x: u64,
    delta: u64,
    sum: u64,
    weight: u64,
    bias: u64,
    normed: u64,
    x_stride: u32,
    normed_stride: u32,
    width: u32,
    dtype: u32,
    centred: u32,
    eps: f32,
    delta_scale: f32,
    sum_scale: f32,
}

/// By dtype (F32, BF16, F16), then for rows of up to [`NARROW`] and wider ones.
pub(super) struct NormKernels([[CudaFunction; 2]; 3]);

impl NormKernels {
    pub(super) fn load(module: &Arc<CudaModule>) -> std::result::Result<Self, DriverError> {
        let two = |dtype: &str| {
            let load = |name: String| module.load_function(&name);
            Ok::<_, DriverError>([
                load(format!("add_norm_{dtype}"))?,
                load(format!("add_norm_{dtype}_wide"))?,
            ])
        };
        Ok(Self([two("f32")?, two("bf16")?, two("f16")?]))
    }
}

impl DecodeKernels {
    /// Enqueues the residual addition and the norm behind it. Factors are rounded to the dtype first, as candle does.
    ///
    /// # Errors
    /// [`comoe_core::Error::BadArgument`] for sizes or a dtype that the kernel cannot do,
    /// [`comoe_core::Error::Device`] when the launch fails.
    ///
    /// # Safety
    /// Every address in `args` must be valid on the stream's GPU, for the sizes documented, until the kernel is done.
    /// `weight` and `bias` are not written by what is in front of it on the stream.
    pub unsafe fn add_norm(&self, stream: &Arc<CudaStream>, args: &NormArgs) -> Result<()> {
        let width = within("width of a norm", args.width, 1, MOST_WIDTH)?;
        let stride = |n| within("stride of a norm's rows", n, args.width, u32::MAX as usize);
        let device = Device {
            x: args.x,
            delta: args.delta,
            sum: args.sum,
            weight: args.weight,
            bias: args.bias,
            normed: args.normed,
            x_stride: stride(args.x_stride)?,
            normed_stride: stride(args.normed_stride)?,
            width,
            dtype: dtype_code("a norm's rows", args.dtype)?,
            centred: (args.centre == Centre::Yes).into(),
            eps: args.eps,
            delta_scale: rounded(args.delta_scale, args.dtype),
            sum_scale: rounded(args.sum_scale, args.dtype),
        };
        let tokens = tokens_of(args.tokens)? as usize;
        let threads = args.width.div_ceil(8).next_multiple_of(32).min(1024);
        let function = &self.norm.0[device.dtype as usize][usize::from(args.width > NARROW)];
        // SAFETY: `Device` is the kernel's struct; the addresses are the caller's promise.
        unsafe { self.launch("add_norm", stream, function, grid(tokens, 1, 1, threads, 0), &device) }
    }
}

/// A factor as candle takes it: in the dtype of what it multiplies.
pub(super) fn rounded(factor: f32, dtype: DType) -> f32 {
    match dtype {
        DType::BF16 => half::bf16::from_f32(factor).to_f32(),
        DType::F16 => half::f16::from_f32(factor).to_f32(),
        _ => factor,
    }
}

#[cfg(test)]
mod tests {
    super::super::mirrored!(super::Device, 80);
}
