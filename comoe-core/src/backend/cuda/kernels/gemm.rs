//! Launches of the grouped GEMM: gate_up and down for many tokens.

use std::sync::Arc;

use candle_core::DType;
use cudarc::driver::{
    CudaFunction, CudaModule, CudaStream, DeviceRepr, DriverError, LaunchConfig, PushKernelArg, sys,
};

use super::by_value::{Act, Input, Record};
use super::{FORMATS, Kernels, dtype_code, format_index, grid_extent, per_format};
use crate::error::{Error, Result};
use crate::expert::{Activation, ExpertLayout};
use crate::format::ExpertFormat;

/// Assignments of a tile.
const TILE_TOKENS: u32 = 64;
/// Weight rows of a tile.
const TILE_ROWS: usize = 128;
const STAGES: u32 = 3;

/// Up to 64 assignments of one item, computed by the blocks of one row of the grid.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GemmTile {
    /// Number of the item in the launch.
    pub item: u32,
    /// First of the tile's assignments among the item's.
    pub first: u32,
}

impl GemmTile {
    /// The tiles of items that serve so many assignments each.
    pub fn of(counts: impl IntoIterator<Item = u32>) -> Vec<Self> {
        let of_item = |(item, count): (usize, u32)| {
            (0..count).step_by(TILE_TOKENS as usize).map(move |first| Self { item: item as u32, first })
        };
        counts.into_iter().enumerate().flat_map(of_item).collect()
    }
}

/// Elements from one row of x or h to the next: rows start at multiples of 16 bytes.
pub fn gemm_stride(cols: usize) -> usize {
    cols.next_multiple_of(8)
}

/// The records that a grouped GEMM reads.
#[derive(Debug, Clone, Copy)]
pub struct GemmItems<'a> {
    /// Where the parts of every record lie.
    pub layout: &'a ExpertLayout,
    /// Device address of [`DeviceItem`](super::DeviceItem)s; `dst` is not looked at.
    pub items: u64,
    /// Device address of the list of assignments, u32 each.
    pub assignments: u64,
    /// Device address of `[len]` [`GemmTile`]s.
    pub tiles: u64,
    /// Tiles.
    pub len: usize,
}

/// Arguments of [`Kernels::gemm_gate_up`].
#[derive(Debug, Clone, Copy)]
pub struct GemmGateUpArgs<'a> {
    /// The records.
    pub items: GemmItems<'a>,
    /// The gate's non-linearity.
    pub activation: Activation,
    /// Device address of x in BF16, rows of [`gemm_stride`]`(hidden)` elements, aligned to 16 bytes.
    pub x: u64,
    /// Assignment `a` reads row `a / per_row` of x.
    pub per_row: usize,
    /// Device address of the result in BF16, `[assignments]` rows of [`gemm_stride`]`(intermediate)` elements, aligned
    /// to 16 bytes.
    pub h: u64,
}

/// Arguments of [`Kernels::gemm_down`].
#[derive(Debug, Clone, Copy)]
pub struct GemmDownArgs<'a> {
    /// The records.
    pub items: GemmItems<'a>,
    /// What [`Kernels::gemm_gate_up`] wrote.
    pub h: u64,
    /// Device address of the result `[assignments, hidden]`, F32.
    pub partial: u64,
}

/// Arguments of [`Kernels::gemm_round`].
#[derive(Debug, Clone, Copy)]
pub struct GemmRoundArgs {
    /// Device address of x `[rows, cols]`.
    pub x: u64,
    /// F32, BF16 or F16.
    pub dtype: DType,
    /// Rows of the result: those of x, or assignments where there are weights.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// Device address of a factor for each assignment (F32), or 0.
    pub weights: u64,
    /// Assignments per row of x, where there are weights.
    pub top_k: usize,
    /// Device address of the result in BF16, rows of [`gemm_stride`]`(cols)` elements.
    pub out: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct GemmInput {
    data: u64,
    stride: u32,
    per_row: u32,
}

// SAFETY: plain numbers without padding, mirrored by the structs of the same names in kernels/gemm.cu.
unsafe impl DeviceRepr for GemmInput {}
// SAFETY: as above.
unsafe impl DeviceRepr for GemmTile {}

/// One kernel of each format.
pub(super) struct Gemm {
    gate_up: [CudaFunction; FORMATS.len()],
    down: [CudaFunction; FORMATS.len()],
    round: CudaFunction,
}

impl Gemm {
    pub(super) fn load(module: &Arc<CudaModule>) -> std::result::Result<Self, DriverError> {
        let all = |kind: &str| {
            per_format(|format| {
                let f = module.load_function(&format!("gemm_{kind}_{format}"))?;
                // A limit, so the largest will do for all.
                let bytes = shared_bytes(ExpertFormat::Bf16) as i32;
                f.set_attribute(
                    sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                    bytes,
                )?;
                Ok::<_, DriverError>(f)
            })
        };
        Ok(Self { gate_up: all("gate_up")?, down: all("down")?, round: module.load_function("gemm_round")? })
    }
}

/// Shared memory of a block, as `Gemm` in kernels/gemm.cu has it: x, weights and scales of three steps.
fn shared_bytes(format: ExpertFormat) -> u32 {
    let (row, scales) = match format {
        ExpertFormat::Bf16 => (128, 0),
        ExpertFormat::Int8 { .. } => (64, 16),
        ExpertFormat::Int4 { .. } | ExpertFormat::Mxfp4 => (32, 16),
    };
    STAGES * (TILE_TOKENS * 128 + TILE_ROWS as u32 * (row + scales))
}

impl Kernels {
    /// Enqueues `h[a] = act(gate x) * (up x)` for every assignment of every tile, as a grouped GEMM on tensor cores:
    /// x and h in BF16, weights as they are, sums in F32.
    ///
    /// A result depends on its record, its row of x and the layout alone.
    ///
    /// # Errors
    /// [`Error::BadArgument`] for more tiles than a launch has, [`Error::Device`] when the launch fails.
    ///
    /// # Safety
    /// Every address in `args` and in the items must be valid on the stream's GPU, for the sizes documented, until the
    /// kernel is done; records are aligned to 16 bytes; assignments are below the rows of h, and tiles within items.
    pub unsafe fn gemm_gate_up(&self, stream: &Arc<CudaStream>, args: &GemmGateUpArgs<'_>) -> Result<()> {
        let layout = args.items.layout;
        let (rows, hidden) = (layout.gate.rows, layout.gate.cols);
        let input =
            GemmInput { data: args.x, stride: gemm_stride(hidden) as u32, per_row: args.per_row as u32 };
        let function = &self.gemm.gate_up[format_index(layout.format)];
        let (blocks, stride) = (rows.div_ceil(TILE_ROWS / 2), gemm_stride(rows));
        // SAFETY: the caller keeps this function's contract.
        unsafe {
            self.gemm(
                "gemm_gate_up",
                stream,
                function,
                &args.items,
                blocks,
                input,
                args.activation,
                (args.h, stride),
            )
        }
    }

    /// Enqueues `partial[a] = down h[a]` (plus its bias) for every assignment of every tile.
    ///
    /// # Errors
    /// As [`Kernels::gemm_gate_up`].
    ///
    /// # Safety
    /// As [`Kernels::gemm_gate_up`].
    pub unsafe fn gemm_down(&self, stream: &Arc<CudaStream>, args: &GemmDownArgs<'_>) -> Result<()> {
        let layout = args.items.layout;
        let (rows, intermediate) = (layout.down.rows, layout.down.cols);
        let input = GemmInput { data: args.h, stride: gemm_stride(intermediate) as u32, per_row: 1 };
        let function = &self.gemm.down[format_index(layout.format)];
        let blocks = rows.div_ceil(TILE_ROWS);
        // SAFETY: the caller keeps this function's contract.
        unsafe {
            self.gemm(
                "gemm_down",
                stream,
                function,
                &args.items,
                blocks,
                input,
                Activation::Silu,
                (args.partial, rows),
            )
        }
    }

    #[expect(clippy::too_many_arguments, reason = "one place for the two GEMMs, private")]
    unsafe fn gemm(
        &self,
        what: &'static str,
        stream: &Arc<CudaStream>,
        function: &CudaFunction,
        items: &GemmItems<'_>,
        blocks: usize,
        input: GemmInput,
        activation: Activation,
        (out, out_stride): (u64, usize),
    ) -> Result<()> {
        if items.len == 0 {
            return Ok(());
        }
        let config = LaunchConfig {
            grid_dim: (blocks as u32, grid_extent("tiles of 64 assignments", items.len)?, 1),
            block_dim: (128, 1, 1),
            shared_mem_bytes: shared_bytes(items.layout.format),
        };
        let (record, act, out_stride) = (Record::new(items.layout), Act::new(activation), out_stride as u32);
        let mut launch = stream.launch_builder(function);
        launch.arg(&items.items).arg(&items.assignments).arg(&items.tiles).arg(&record).arg(&input);
        launch.arg(&act).arg(&out).arg(&out_stride);
        // SAFETY: types and order are those of GEMM in kernels/gemm.cu; the addresses are the caller's promise.
        unsafe { launch.launch(config) }.map_err(|error| self.launch_error(what, error))?;
        Ok(())
    }

    /// Enqueues the rounding of x to what [`Kernels::gemm_gate_up`] reads. Not needed where x is that already.
    ///
    /// # Errors
    /// [`Error::BadArgument`] for another dtype or `top_k` 0, [`Error::Device`] when the launch fails.
    ///
    /// # Safety
    /// Every address must be valid on the stream's GPU for the sizes documented until the kernel is done.
    pub unsafe fn gemm_round(&self, stream: &Arc<CudaStream>, args: &GemmRoundArgs) -> Result<()> {
        let dtype = dtype_code("x", args.dtype)?;
        if args.top_k == 0 {
            let reason = "expected at least 1, found 0".to_owned();
            return Err(Error::BadArgument { what: "top_k", reason });
        }
        if args.rows == 0 {
            return Ok(());
        }
        let config =
            LaunchConfig { grid_dim: (args.rows as u32, 1, 1), block_dim: (256, 1, 1), shared_mem_bytes: 0 };
        let input = Input { data: args.x, row_weights: args.weights, dtype, per_row: args.top_k as u32 };
        let (cols, stride) = (args.cols as u32, gemm_stride(args.cols) as u32);
        let mut launch = stream.launch_builder(&self.gemm.round);
        launch.arg(&input).arg(&cols).arg(&stride).arg(&args.out);
        // SAFETY: types and order are those of kernels/gemm.cu; the addresses are the caller's promise.
        unsafe { launch.launch(config) }.map_err(|error| self.launch_error("gemm_round", error))?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_cover_every_assignment_once() {
        let at = |item, first| GemmTile { item, first };
        assert_eq!(
            GemmTile::of([0, 1, 64, 65, 0, 130]),
            [at(1, 0), at(2, 0), at(3, 0), at(3, 64), at(5, 0), at(5, 64), at(5, 128)]
        );
        assert_eq!((size_of::<GemmTile>(), size_of::<GemmInput>()), (8, 16));
    }

    #[test]
    fn a_block_fits_every_gpu_twice() {
        // 100 KiB of a multiprocessor of the smaller generations, 1 KiB of it taken by each block.
        let twice = |format| 2 * (shared_bytes(format) + 1024) <= 100 << 10;
        assert!(twice(ExpertFormat::INT4));
        // 99 KiB is the most of one block.
        assert!(ExpertFormat::all_for_tests().into_iter().all(|f| shared_bytes(f) <= 99 << 10));
    }
}
