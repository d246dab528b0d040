//! Element-wise pieces of a feed-forward part.

use std::sync::Arc;

use candle_core::DType;
use comoe_core::{Activation, Result};
use cudarc::driver::CudaStream;

use super::{DecodeKernels, bad, dtype_code, grid, tokens_of, within};

/// Columns of a block.
const COLUMNS: usize = 8 * 128;

/// Arguments of [`DecodeKernels::gate`]; addresses are device memory.
#[derive(Debug, Clone, Copy)]
pub struct GateArgs {
    /// `[tokens, 2 width]`: gates, then what they multiply.
    pub x: u64,
    /// Result `[tokens, width]`.
    pub y: u64,
    /// Silu or the tanh form of gelu.
    pub activation: Activation,
    /// Tokens, 1 to 32.
    pub tokens: usize,
    /// Columns of the result.
    pub width: usize,
    /// F32, BF16 or F16.
    pub dtype: DType,
}

/// Arguments of [`DecodeKernels::add_gated`]; addresses are device memory.
#[derive(Debug, Clone, Copy)]
pub struct AddGatedArgs {
    /// `[tokens, width]`
    pub x: u64,
    /// `[tokens, width]`
    pub y: u64,
    /// `[tokens]`, or 0: `y` is added as it is.
    pub gate: u64,
    /// Result `[tokens, width]`; it may be `x` or `y`.
    pub out: u64,
    /// Tokens, 1 to 32.
    pub tokens: usize,
    /// Columns.
    pub width: usize,
    /// F32, BF16 or F16.
    pub dtype: DType,
}

/// As kernels/gate.cu has them.
#[repr(C)]
#[derive(Clone, Copy)]
struct Gate {
    x: u64,
    y: u64,
    width: u32,
    dtype: u32,
    activation: u32,
    pad: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct AddGated {
    x: u64,
    y: u64,
    gate: u64,
    out: u64,
    width: u32,
    dtype: u32,
}

impl DecodeKernels {
    /// Enqueues `y = act(x[.., ..width]) * x[.., width..]`.
    ///
    /// # Errors
    /// [`comoe_core::Error::BadArgument`] for sizes, a dtype or an activation that the kernel cannot do,
    /// [`comoe_core::Error::Device`] when the launch fails.
    ///
    /// # Safety
    /// Every address in `args` must be valid on the stream's GPU, for the sizes documented, until the kernel is done.
    pub unsafe fn gate(&self, stream: &Arc<CudaStream>, args: &GateArgs) -> Result<()> {
        let activation = match args.activation {
            Activation::Silu => 0,
            Activation::GeluTanh => 1,
            other => {
                let reason = format!("expected silu or gelu, found {other:?}, one of routed experts only");
                return bad("activation of a dense part", reason);
            }
        };
        let device = Gate {
            x: args.x,
            y: args.y,
            width: within("width of a gate", args.width, 1, 1 << 24)?,
            dtype: dtype_code("gates", args.dtype)?,
            activation,
            pad: 0,
        };
        let tokens = tokens_of(args.tokens)? as usize;
        let config = grid(args.width.div_ceil(COLUMNS), tokens, 1, COLUMNS / 8, 0);
        // SAFETY: `Gate` is the kernel's struct; the addresses are the caller's promise.
        unsafe { self.launch("gate", stream, &self.gate, config, &device) }
    }

    /// Enqueues `out = x + sigmoid(gate) y`, or `x + y`.
    ///
    /// # Errors
    /// As [`Self::gate`].
    ///
    /// # Safety
    /// As [`Self::gate`].
    pub unsafe fn add_gated(&self, stream: &Arc<CudaStream>, args: &AddGatedArgs) -> Result<()> {
        let device = AddGated {
            x: args.x,
            y: args.y,
            gate: args.gate,
            out: args.out,
            width: within("width of a sum", args.width, 1, 1 << 24)?,
            dtype: dtype_code("summands", args.dtype)?,
        };
        let tokens = tokens_of(args.tokens)? as usize;
        let config = grid(args.width.div_ceil(COLUMNS), tokens, 1, COLUMNS / 8, 0);
        // SAFETY: `AddGated` is the kernel's struct; the addresses are the caller's promise.
        unsafe { self.launch("add_gated", stream, &self.add_gated, config, &device) }
    }
}

#[cfg(test)]
mod tests {
    super::super::mirrored!((super::Gate, super::AddGated), 72);
}
