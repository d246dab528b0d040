//! Products of few tokens with a dense matrix.

use std::sync::Arc;

use candle_core::DType;
use comoe_core::Result;
use cudarc::driver::{CudaFunction, CudaModule, CudaStream, DriverError};

use super::{DecodeKernels, Int8Layout, bad, dtype_code, grid, tokens_of, within};

/// Rows that a warp takes; warps of a block.
const ROWS: usize = 4;
const WARPS: usize = 8;
/// Warps that fill a large GPU; a constant, so that no sum depends on the GPU.
const ENOUGH_WARPS: usize = 2048;
/// Tokens that one pass over the weights serves, by kernel.
const TOKENS: [usize; 4] = [1, 2, 4, 8];
/// Shared memory for x where more of it would change nothing.
const X_BYTES: usize = 40 << 10;

/// A matrix `[outputs, inputs]` in device memory.
#[derive(Debug, Clone, Copy)]
pub enum GemvWeight {
    /// Row-major, F32, BF16 or F16, without gaps. Fast where rows are a multiple of 16 bytes.
    Dense {
        /// Address of the first row.
        data: u64,
        /// Element type.
        dtype: DType,
    },
    /// As [`Int8Layout`] has it.
    Int8 {
        /// Address of the quantised rows, a multiple of 16.
        weights: u64,
        /// Address of the rows of scales.
        scales: u64,
    },
}

/// Arguments of [`DecodeKernels::gemv`]; addresses are device memory.
#[derive(Debug, Clone, Copy)]
pub struct GemvArgs {
    /// `[tokens, inputs]`
    pub x: u64,
    /// F32, BF16 or F16.
    pub x_dtype: DType,
    /// `[outputs, inputs]`
    pub weight: GemvWeight,
    /// `[outputs]` of `y_dtype`, or 0. It is added to the rounded product, as candle does.
    pub bias: u64,
    /// Result `[tokens, outputs]`.
    pub y: u64,
    /// F32, BF16 or F16.
    pub y_dtype: DType,
    /// Tokens, 1 to 32. Up to 8 share one pass over the weights.
    pub tokens: usize,
    /// Columns.
    pub inputs: usize,
    /// Rows.
    pub outputs: usize,
}

pub(super) struct GemvKernels {
    /// By format (F32, BF16, F16, INT8) and [`TOKENS`].
    aligned: [[CudaFunction; 4]; 4],
    /// For rows at any address, a token at a time; INT8 has none.
    unaligned: [CudaFunction; 3],
}

impl GemvKernels {
    pub(super) fn load(module: &Arc<CudaModule>) -> std::result::Result<Self, DriverError> {
        // The most that `Cut` asks for: 64 KiB and a little.
        let load = |name: &str| super::with_shared(module, &format!("gemv_{name}"), 64 << 10);
        let four = |format: &str| {
            let load = |tokens| load(&format!("{format}_t{tokens}"));
            Ok::<_, DriverError>([load(1)?, load(2)?, load(4)?, load(8)?])
        };
        Ok(Self {
            aligned: [four("f32")?, four("bf16")?, four("f16")?, four("int8")?],
            unaligned: [load("f32_unaligned")?, load("bf16_unaligned")?, load("f16_unaligned")?],
        })
    }
}

/// As kernels/gemv.cu has it.
#[repr(C)]
#[derive(Clone, Copy)]
struct Device {
    x: u64,
    weights: u64,
    scales: u64,
    bias: u64,
    y: u64,
    inputs: u32,
    outputs: u32,
    tokens: u32,
    x_dtype: u32,
    y_dtype: u32,
    row_bytes: u32,
    scale_row_bytes: u32,
    slices: u32,
    segment: u32,
    pad: u32,
}

/// How the columns are shared out. `slices` is a function of the matrix alone; `segment` changes no sum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Cut {
    slices: usize,
    segment: usize,
    shared_bytes: usize,
}

impl Cut {
    /// For a format (its index in [`GemvKernels`]) and `tokens` of [`TOKENS`].
    fn new(format: usize, inputs: usize, outputs: usize, tokens: usize) -> Self {
        let columns = 32 * [4, 8, 8, 16][format];
        let passes = inputs.div_ceil(columns);
        let groups = outputs.div_ceil(ROWS);
        let wanted = [1, 2, 4].into_iter().find(|s| groups * s >= ENOUGH_WARPS).unwrap_or(4);
        let slices = if passes >= wanted { wanted } else { 1 << passes.ilog2() };
        // kDepth of the kernel.
        let depth = match (format, tokens) {
            (_, 1 | 2) => 4,
            (3, 8) => 1,
            _ => 2,
        };
        let pass_bytes = 4 * columns * tokens;
        let round = depth * slices;
        let segment = (X_BYTES / pass_bytes / round).max(1) * round;
        Self { slices, segment, shared_bytes: segment.min(passes) * pass_bytes }
    }
}

impl DecodeKernels {
    /// Enqueues `y = x Wᵀ + bias`.
    ///
    /// # Errors
    /// [`comoe_core::Error::BadArgument`] for sizes or a dtype that the kernel cannot do,
    /// [`comoe_core::Error::Device`] when the launch fails.
    ///
    /// # Safety
    /// Every address in `args` must be valid on the stream's GPU, for the sizes documented, until the kernel is done.
    /// The weights and scales are not written by what is in front of it on the stream.
    pub unsafe fn gemv(&self, stream: &Arc<CudaStream>, args: &GemvArgs) -> Result<()> {
        let inputs = within("columns of a matrix", args.inputs, 1, 1 << 24)?;
        let outputs = within("rows of a matrix", args.outputs, 1, 1 << 26)?;
        let (format, weights, scales, row_bytes, scale_row_bytes) = match args.weight {
            GemvWeight::Dense { data, dtype } => {
                let code = dtype_code("a matrix", dtype)?;
                if data % dtype.size_in_bytes() as u64 != 0 {
                    return bad("a matrix", format!("address {data:#x} is no multiple of {dtype:?}'s size"));
                }
                (code as usize, data, 0, args.inputs * dtype.size_in_bytes(), 0)
            }
            GemvWeight::Int8 { weights, scales } => {
                if weights % 16 != 0 || scales % 2 != 0 {
                    let reason =
                        format!("expected multiples of 16 and 2, found {weights:#x} and {scales:#x}");
                    return bad("addresses of an INT8 matrix", reason);
                }
                let layout = Int8Layout::new(args.outputs, args.inputs);
                (3, weights, scales, layout.row_bytes, layout.scale_row_bytes)
            }
        };
        let all = tokens_of(args.tokens)?;
        let (function, at_once) = if row_bytes.is_multiple_of(16) && weights % 16 == 0 {
            let which = TOKENS.iter().position(|t| *t >= args.tokens).unwrap_or(TOKENS.len() - 1);
            (&self.gemv.aligned[format][which], TOKENS[which])
        } else {
            (&self.gemv.unaligned[format], 1)
        };
        let cut = Cut::new(format, args.inputs, args.outputs, at_once);
        let device = Device {
            x: args.x,
            weights,
            scales,
            bias: args.bias,
            y: args.y,
            inputs,
            outputs,
            tokens: all,
            x_dtype: dtype_code("x of a product", args.x_dtype)?,
            y_dtype: dtype_code("y of a product", args.y_dtype)?,
            row_bytes: row_bytes as u32,
            scale_row_bytes: scale_row_bytes as u32,
            slices: cut.slices as u32,
            segment: cut.segment as u32,
            pad: 0,
        };
        let blocks = args.outputs.div_ceil(WARPS / cut.slices * ROWS);
        let config = grid(blocks, args.tokens.div_ceil(at_once), 1, 32 * WARPS, cut.shared_bytes);
        // SAFETY: `Device` is the kernel's struct; the addresses are the caller's promise.
        unsafe { self.launch("gemv", stream, function, config, &device) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    super::super::mirrored!(Device, 80);

    #[test]
    fn a_matrix_is_cut_by_its_shape_alone_and_fits_every_gpu() {
        for format in 0..4 {
            for (outputs, inputs) in
                [(128, 2048), (5120, 2048), (2048, 4096), (151_936, 2048), (7, 3), (1, 40_000)]
            {
                let cuts = TOKENS.map(|tokens| Cut::new(format, inputs, outputs, tokens));
                for cut in cuts {
                    assert_eq!(cut.slices, cuts[0].slices, "{format} {outputs}x{inputs}");
                    assert!(cut.shared_bytes <= 64 << 10, "{format} {outputs}x{inputs}: {cut:?}");
                    assert!(cut.segment > 0 && cut.segment.is_multiple_of(cut.slices));
                }
            }
        }
        let slices = |outputs, inputs| Cut::new(1, inputs, outputs, 1).slices;
        assert_eq!((slices(151_936, 2048), slices(5120, 2048), slices(128, 2048)), (1, 2, 4));
    }
}
