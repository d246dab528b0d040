//! This crate's CUDA kernels (`kernels/*.cu`, one fatbin), with typed launches.
//!
//! Everything in device memory is passed by address, so that a slot, a bounce buffer and page-locked host memory are
//! the same to a kernel. A launch enqueues on the stream it is given and waits for nothing.

use std::sync::Arc;

use candle_core::DType;
use cudarc::driver::{CudaContext, CudaFunction, CudaStream, DriverError, LaunchConfig, PushKernelArg, sys};
use cudarc::nvrtc::Ptx;

pub use self::args::{CombineArgs, DequantArgs, DeviceItem, DownArgs, GateUpArgs, GatherArgs, Items};
use self::by_value::{Act, Input, Record};
use self::gemm::Gemm;
pub use self::gemm::{GemmDownArgs, GemmGateUpArgs, GemmItems, GemmRoundArgs, GemmTile, gemm_stride};
use self::one_token::OneToken;
use self::peers::PeerKernels;

use super::ahead::FETCH_SHARED_BYTES;
use crate::error::{Error, Result};
use crate::expert::{Activation, ExpertLayout, MatrixLayout};
use crate::format::ExpertFormat;

mod args;
mod by_value;
mod early;
mod gemm;
mod one_token;
mod peers;

pub(super) use early::launch_early;
pub(super) use peers::{Back, Hand, MOST_MEMBERS, Sum, Take, copy, in_words};

static FATBIN: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/kernels.fatbin"));

/// Warps of a GEMV's block, at most.
const MOST_WARPS: usize = 4;

/// Blocks that share the rows of a record to be dequantised: enough to fill the link with one record, few enough that
/// items to be skipped cost little.
const DEQUANT_BLOCKS: usize = 256;

/// Shared memory for x in one block of a GEMV; what is longer is cut into segments.
const X_BYTES: usize = 40 << 10;

/// The number by which the kernels know an element type.
fn dtype_code(what: &'static str, dtype: DType) -> Result<u32> {
    match dtype {
        DType::F32 => Ok(0),
        DType::BF16 => Ok(1),
        DType::F16 => Ok(2),
        other => {
            Err(Error::BadArgument { what, reason: format!("expected F32, BF16 or F16, found {other:?}") })
        }
    }
}

/// A grid's second and third extent end at 65,535.
fn grid_extent(what: &'static str, n: usize) -> Result<u32> {
    match u32::try_from(n) {
        Ok(n) if n <= 65_535 => Ok(n),
        _ => Err(Error::BadArgument {
            what,
            reason: format!("{n} are too many for one launch (65535); split the step"),
        }),
    }
}

/// How a GEMV's block is cut. A function of the matrix's shape and format alone, except for `segment`, which changes
/// no sum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Cut {
    warps: usize,
    segment: usize,
    shared_bytes: usize,
}

impl Cut {
    /// For `tokens` tokens a pass, with at most `most_warps` warps.
    fn new(format: ExpertFormat, m: &MatrixLayout, tokens: usize, most_warps: usize) -> Self {
        let (chunk_cols, parts) = match format {
            ExpertFormat::Bf16 => (8, 3),
            ExpertFormat::Int8 { .. } => (16, 2),
            ExpertFormat::Int4 { .. } | ExpertFormat::Mxfp4 => (32, 2),
        };
        let steps = m.row_bytes.div_ceil(128).max(1);
        // Few idle warps in the last round; of equals, more warps.
        let least = most_warps.div_ceil(2).min(steps);
        let warps = (least..=most_warps.min(steps)).rev().min_by_key(|&w| steps.div_ceil(w) * w).unwrap_or(1);
        let step_bytes = tokens * parts * 2 * 8 * chunk_cols;
        let segment = (X_BYTES / step_bytes / warps).clamp(1, steps.div_ceil(warps)) * warps;
        let x = tokens * parts * 2 * (segment * 8 * chunk_cols + 8);
        let scales = if m.scale_row_bytes == 0 { 0 } else { 32 * (m.scale_row_bytes + 16) };
        // The compiler reads the maxima four at a time, also where there are fewer.
        let sums = warps * tokens * 32 * 4 + (warps * tokens * 4).next_multiple_of(16);
        Self { warps, segment, shared_bytes: x + scales + sums }
    }
}

/// One kernel for one token a pass, one for [`Gemv::MANY`].
struct Gemv {
    one: CudaFunction,
    many: CudaFunction,
}

impl Gemv {
    const MANY: usize = 4;
}

/// The kernels of one GPU, loaded once.
pub struct Kernels {
    ordinal: usize,
    shared_limit: usize,
    gate_up: [Gemv; FORMATS.len()],
    down: [Gemv; FORMATS.len()],
    one_token: OneToken,
    dequant: [CudaFunction; FORMATS.len()],
    gemm: Gemm,
    combine: CudaFunction,
    gather: CudaFunction,
    pull: CudaFunction,
    resolve: CudaFunction,
    fetch: CudaFunction,
    correlate: CudaFunction,
    tell_time: CudaFunction,
    peers: PeerKernels,
}

/// Formats as kernels are named after them, in the order of [`format_index`].
const FORMATS: [&str; 4] = ["bf16", "int8", "int4", "mxfp4"];

/// Something of every format.
fn per_format<T, E>(
    make: impl Fn(&str) -> std::result::Result<T, E>,
) -> std::result::Result<[T; FORMATS.len()], E> {
    let [a, b, c, d] = FORMATS.map(make);
    Ok([a?, b?, c?, d?])
}

fn format_index(format: ExpertFormat) -> usize {
    match format {
        ExpertFormat::Bf16 => 0,
        ExpertFormat::Int8 { .. } => 1,
        ExpertFormat::Int4 { .. } => 2,
        ExpertFormat::Mxfp4 => 3,
    }
}

/// Why kernels of a fatbin could not be loaded into `ctx`'s GPU, and what to do.
pub fn load_error(ctx: &CudaContext, error: DriverError) -> Error {
    use sys::CUresult as R;
    let reason = match error.0 {
        R::CUDA_ERROR_NO_BINARY_FOR_GPU | R::CUDA_ERROR_INVALID_IMAGE => {
            let (major, minor) = ctx.compute_capability().unwrap_or((0, 0));
            format!(
                "this build has no kernels for compute capability {major}.{minor}; CoMoE runs on 8.0 (Ampere) and later"
            )
        }
        R::CUDA_ERROR_UNSUPPORTED_PTX_VERSION | R::CUDA_ERROR_INVALID_PTX => {
            "the driver is older than this build's CUDA and cannot compile its kernels for this GPU: update the driver"
                .to_owned()
        }
        _ => format!("loading the kernels failed: {error}"),
    };
    Error::Device { asked: format!("cuda:{}", ctx.ordinal()), reason }
}

impl Kernels {
    /// Loads the kernels into `ctx`'s GPU.
    ///
    /// # Errors
    /// [`Error::Device`] when this build has no kernels for the GPU, or its driver is too old for them.
    pub fn load(ctx: &Arc<CudaContext>) -> Result<Self> {
        let fail = |error| load_error(ctx, error);
        let module = ctx.load_module(Ptx::from_binary(FATBIN.to_vec())).map_err(fail)?;
        let shared_limit = ctx
            .attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
            .map_err(fail)?;
        let (major, _) = ctx.compute_capability().map_err(fail)?;
        let function = |name: &str| module.load_function(name).map_err(fail);
        let one = |kind: &str, format: &str, tokens: usize| {
            let f = function(&format!("{kind}_{format}_t{tokens}"))?;
            f.set_attribute(
                sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                shared_limit,
            )
            .map_err(fail)?;
            Ok::<_, Error>(f)
        };
        let gemv = |kind: &str, format: &str| {
            Ok::<_, Error>(Gemv { one: one(kind, format, 1)?, many: one(kind, format, Gemv::MANY)? })
        };
        Ok(Self {
            ordinal: ctx.ordinal(),
            shared_limit: shared_limit as usize,
            gate_up: per_format(|format| gemv("gate_up", format))?,
            down: per_format(|format| gemv("down", format))?,
            one_token: OneToken::load(&module, shared_limit, major >= 9).map_err(fail)?,
            dequant: per_format(|format| function(&format!("dequant_{format}")))?,
            gemm: Gemm::load(&module).map_err(fail)?,
            combine: function("combine")?,
            gather: function("gather")?,
            pull: function("pull")?,
            resolve: function("resolve")?,
            fetch: {
                let fetch = function("fetch")?;
                let most = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
                fetch.set_attribute(most, FETCH_SHARED_BYTES as i32).map_err(fail)?;
                fetch
            },
            correlate: function("correlate")?,
            tell_time: function("tell_time")?,
            peers: PeerKernels::load(&module).map_err(fail)?,
        })
    }

    /// Whether the GPU sets up a kernel while the one before it on the stream ends.
    pub(super) fn starts_early(&self) -> bool {
        self.one_token.early
    }

    pub(super) fn resolve_function(&self) -> &CudaFunction {
        &self.resolve
    }

    pub(super) fn fetch_function(&self) -> &CudaFunction {
        &self.fetch
    }

    pub(super) fn correlate_function(&self) -> &CudaFunction {
        &self.correlate
    }

    pub(super) fn tell_time_function(&self) -> &CudaFunction {
        &self.tell_time
    }

    pub(super) fn launch_error(&self, what: &str, error: DriverError) -> Error {
        Error::Device {
            asked: format!("cuda:{}", self.ordinal),
            reason: format!("launching the kernel {what} failed: {error}"),
        }
    }

    /// Enqueues `h[a] = act(gate x) * (up x)` for every assignment of every item, reading each record once for up to
    /// four assignments and from its `dst`, where it has one, for more.
    ///
    /// A result depends on its record, its row of x, the layout and whether the call has one token: not on the other
    /// items or assignments, nor on where the record lies.
    ///
    /// # Errors
    /// [`Error::BadArgument`] for a dtype or shape that the kernel cannot do, [`Error::Device`] when the launch fails.
    ///
    /// # Safety
    /// Every address in `args` and in the items must be valid on the stream's GPU, for the sizes documented, until the
    /// kernel is done; records are aligned to 16 bytes; assignments are below the rows of h; no two items share a
    /// `dst`, and no `dst` is another item's `src`.
    pub unsafe fn gate_up(&self, stream: &Arc<CudaStream>, args: &GateUpArgs<'_>) -> Result<()> {
        let layout = args.items.layout;
        let input = self.x_input(args)?;
        if self.takes_one_token(&args.items) {
            // SAFETY: the caller keeps this function's contract.
            return unsafe { self.one_token_gate_up(stream, args, input) };
        }
        let kernel = &self.gate_up[format_index(layout.format)];
        let blocks = layout.gate.rows.div_ceil(16);
        // SAFETY: the caller keeps this function's contract.
        unsafe {
            self.gemv(
                "gate_up",
                stream,
                kernel,
                &args.items,
                &layout.gate,
                blocks,
                input,
                args.activation,
                args.h,
            )
        }
    }

    /// Enqueues `partial[a] = down h[a]` (plus its bias) for every assignment of every item.
    ///
    /// # Errors
    /// As [`Kernels::gate_up`].
    ///
    /// # Safety
    /// As [`Kernels::gate_up`]. A kernel right before this on the stream, of which h may come, must not write the items,
    /// the assignments or the records' down parts: they may be read while it ends.
    pub unsafe fn down(&self, stream: &Arc<CudaStream>, args: &DownArgs<'_>) -> Result<()> {
        let layout = args.items.layout;
        if self.takes_one_token(&args.items) {
            // SAFETY: the caller keeps this function's contract.
            return unsafe { self.one_token_down(stream, args, None) };
        }
        let input = Input { data: args.h, row_weights: 0, dtype: 0, per_row: 1 };
        let kernel = &self.down[format_index(layout.format)];
        let blocks = layout.down.rows.div_ceil(32);
        // SAFETY: the caller keeps this function's contract.
        unsafe {
            self.gemv(
                "down",
                stream,
                kernel,
                &args.items,
                &layout.down,
                blocks,
                input,
                Activation::Silu,
                args.partial,
            )
        }
    }

    /// Enqueues [`Kernels::down`] and [`Kernels::combine`], in one kernel for one token; the same bits. The items serve
    /// every assignment of the call.
    ///
    /// # Errors
    /// As these; [`Error::BadArgument`] when they are not about the same call.
    ///
    /// # Safety
    /// As these, and for one token `partial` is not written.
    pub unsafe fn down_combine(
        &self,
        stream: &Arc<CudaStream>,
        down: &DownArgs<'_>,
        combine: &CombineArgs,
    ) -> Result<()> {
        let of_down = (down.items.tokens, down.items.layout.down.rows, down.partial);
        let of_combine = (combine.tokens, combine.hidden, combine.partial);
        if of_down != of_combine {
            let reason = format!(
                "down has (tokens, hidden, partial) {of_down:?}, combine has {of_combine:?}: they are of one call"
            );
            return Err(Error::BadArgument { what: "down_combine", reason });
        }
        if self.takes_one_token(&down.items) && self.combines_in_place(&down.items, combine) {
            // SAFETY: the caller keeps this function's contract.
            return unsafe { self.one_token_down(stream, down, Some(combine)) };
        }
        // SAFETY: as above.
        unsafe {
            self.down(stream, down)?;
            self.combine(stream, combine)
        }
    }

    fn x_input(&self, args: &GateUpArgs<'_>) -> Result<Input> {
        let dtype = dtype_code("x", args.x_dtype)?;
        if args.top_k == 0 {
            return Err(Error::BadArgument {
                what: "top_k",
                reason: "expected at least 1, found 0".to_owned(),
            });
        }
        Ok(Input { data: args.x, row_weights: args.input_weights, dtype, per_row: args.top_k as u32 })
    }

    #[expect(clippy::too_many_arguments, reason = "one place for the two GEMVs, private")]
    unsafe fn gemv(
        &self,
        what: &'static str,
        stream: &Arc<CudaStream>,
        kernel: &Gemv,
        items: &Items<'_>,
        matrix: &MatrixLayout,
        blocks: usize,
        input: Input,
        activation: Activation,
        out: u64,
    ) -> Result<()> {
        if items.len == 0 || items.most == 0 {
            return Ok(());
        }
        let (function, tokens) = if items.most == 1 { (&kernel.one, 1) } else { (&kernel.many, Gemv::MANY) };
        let cut = Cut::new(items.layout.format, matrix, tokens, MOST_WARPS);
        if cut.shared_bytes > self.shared_limit {
            let reason = format!(
                "rows of {} columns need {} bytes of shared memory, this GPU has {}",
                matrix.cols, cut.shared_bytes, self.shared_limit
            );
            return Err(Error::BadArgument { what: "expert shape", reason });
        }
        let config = LaunchConfig {
            grid_dim: (blocks as u32, grid_extent("items", items.len)?, 1),
            block_dim: (32 * cut.warps as u32, 1, 1),
            shared_mem_bytes: cut.shared_bytes as u32,
        };
        let (record, act, segment) = (Record::new(items.layout), Act::new(activation), cut.segment as u32);
        let mut launch = stream.launch_builder(function);
        launch
            .arg(&items.items)
            .arg(&items.assignments)
            .arg(&record)
            .arg(&input)
            .arg(&act)
            .arg(&segment)
            .arg(&out);
        // SAFETY: types and order are those of GEMV in kernels/gemv.cu; the addresses are the caller's promise.
        unsafe { launch.launch(config) }.map_err(|error| self.launch_error(what, error))?;
        Ok(())
    }

    /// Enqueues dequantisation on load: every item's record becomes a BF16 record at its `dst`, padding and biases
    /// included.
    ///
    /// # Errors
    /// [`Error::BadArgument`] when `to` is not the BF16 layout of the same expert, [`Error::Device`] when the launch
    /// fails.
    ///
    /// # Safety
    /// Items, sources and destinations must be valid on the stream's GPU until the kernel is done, and not overlap.
    pub unsafe fn dequant(&self, stream: &Arc<CudaStream>, args: &DequantArgs<'_>) -> Result<()> {
        if args.to.format != ExpertFormat::Bf16 {
            let reason = format!("expected bf16 to expand to, found {}", args.to.format);
            return Err(Error::BadArgument { what: "expert format", reason });
        }
        let shape = |l: &ExpertLayout| (l.down.rows, l.down.cols, l.bias.is_some());
        if shape(args.from) != shape(args.to) {
            let reason = format!(
                "expected the same (hidden, intermediate, bias), found {:?} and {:?}",
                shape(args.from),
                shape(args.to)
            );
            return Err(Error::BadArgument { what: "expert layout", reason });
        }
        if args.len == 0 {
            return Ok(());
        }
        let rows = 2 * args.from.gate.rows + args.from.down.rows + 1;
        let config = LaunchConfig {
            grid_dim: (rows.min(DEQUANT_BLOCKS) as u32, grid_extent("items", args.len)?, 1),
            block_dim: (128, 1, 1),
            shared_mem_bytes: 0,
        };
        let (from, to) = (Record::new(args.from), Record::new(args.to));
        let mut launch = stream.launch_builder(&self.dequant[format_index(args.from.format)]);
        launch.arg(&args.items).arg(&from).arg(&to);
        // SAFETY: types and order are those of kernels/dequant.cu; the addresses are the caller's promise.
        unsafe { launch.launch(config) }.map_err(|error| self.launch_error("dequant", error))?;
        Ok(())
    }

    /// Enqueues `y[t] = sum over j, in order, of weights[t, j] * partial[t, j]`.
    ///
    /// # Errors
    /// [`Error::BadArgument`] for another dtype, [`Error::Device`] when the launch fails.
    ///
    /// # Safety
    /// Every address must be valid on the stream's GPU for the sizes documented until the kernel is done.
    pub unsafe fn combine(&self, stream: &Arc<CudaStream>, args: &CombineArgs) -> Result<()> {
        let dtype = dtype_code("y", args.y_dtype)?;
        if args.tokens == 0 || args.hidden == 0 {
            return Ok(());
        }
        let config = LaunchConfig {
            grid_dim: (args.hidden.div_ceil(256) as u32, grid_extent("tokens", args.tokens)?, 1),
            block_dim: (256, 1, 1),
            shared_mem_bytes: 0,
        };
        let (top_k, hidden) = (args.top_k as u32, args.hidden as u32);
        let mut launch = stream.launch_builder(&self.combine);
        launch.arg(&args.partial).arg(&args.weights).arg(&top_k).arg(&hidden).arg(&dtype).arg(&args.y);
        // SAFETY: types and order are those of kernels/combine.cu; the addresses are the caller's promise.
        unsafe { launch.launch(config) }.map_err(|error| self.launch_error("combine", error))?;
        Ok(())
    }

    /// Enqueues a copy of `bytes` bytes, rounded up to 16, from page-locked memory at `from`.
    ///
    /// # Errors
    /// [`Error::Device`] when the launch fails.
    ///
    /// # Safety
    /// Both addresses are aligned to 16 bytes, and valid on the stream's GPU for the bytes rounded up until the kernel is
    /// done.
    pub unsafe fn pull(&self, stream: &Arc<CudaStream>, from: u64, to: u64, bytes: usize) -> Result<()> {
        let pieces = bytes.div_ceil(16) as u32;
        if pieces == 0 {
            return Ok(());
        }
        let config = LaunchConfig {
            grid_dim: (pieces.div_ceil(256).min(32), 1, 1),
            block_dim: (256, 1, 1),
            shared_mem_bytes: 0,
        };
        let mut launch = stream.launch_builder(&self.pull);
        launch.arg(&from).arg(&to).arg(&pieces);
        // SAFETY: types and order are those of kernels/combine.cu; the addresses are the caller's promise.
        unsafe { launch.launch(config) }.map_err(|error| self.launch_error("pull", error))?;
        Ok(())
    }

    /// Enqueues `out[a] = the first bytes of the record of assignment a`.
    ///
    /// # Errors
    /// [`Error::BadArgument`] for too many items, [`Error::Device`] when the launch fails.
    ///
    /// # Safety
    /// Every address must be valid on the stream's GPU for the sizes documented until the kernel is done.
    pub unsafe fn gather(&self, stream: &Arc<CudaStream>, args: &GatherArgs) -> Result<()> {
        if args.len == 0 || args.bytes == 0 {
            return Ok(());
        }
        let config = LaunchConfig {
            grid_dim: (args.bytes.div_ceil(4096) as u32, grid_extent("items", args.len)?, 1),
            block_dim: (256, 1, 1),
            shared_mem_bytes: 0,
        };
        let bytes = args.bytes as u64;
        let mut launch = stream.launch_builder(&self.gather);
        launch.arg(&args.items).arg(&args.assignments).arg(&bytes).arg(&args.out);
        // SAFETY: types and order are those of kernels/combine.cu; the addresses are the caller's promise.
        unsafe { launch.launch(config) }.map_err(|error| self.launch_error("gather", error))?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::expert::ExpertSpec;

    #[test]
    fn a_gemv_is_cut_by_shape_and_fits_every_gpu() {
        for format in ExpertFormat::all_for_tests() {
            for (hidden, intermediate) in
                [(2048, 768), (2880, 2880), (4096, 14336), (704, 1408), (16, 20), (1, 1)]
            {
                let layout = ExpertLayout::new(&ExpertSpec::swiglu(hidden, intermediate), format);
                for m in [&layout.gate, &layout.down] {
                    for most in [1, 2, 4, 8] {
                        let (one, many) =
                            (Cut::new(format, m, 1, most), Cut::new(format, m, Gemv::MANY, most));
                        assert_eq!(one.warps, many.warps, "{format} {hidden}x{intermediate}");
                        for cut in [one, many] {
                            assert_eq!(cut.segment % cut.warps, 0);
                            assert!(cut.segment > 0 && cut.warps <= most);
                            // Every part before the maxima is a multiple of 16, so there is room to read
                            // them in fours.
                            assert_eq!(cut.shared_bytes % 16, 0, "{format} {hidden}x{intermediate} {cut:?}");
                            // 99 KiB is the least of the supported generations.
                            assert!(cut.shared_bytes <= 99 << 10, "{format} {hidden}x{intermediate} {cut:?}");
                        }
                    }
                }
            }
        }
        let qwen = ExpertLayout::new(&ExpertSpec::swiglu(2048, 768), ExpertFormat::INT4);
        assert_eq!(Cut::new(qwen.format, &qwen.gate, 1, 4).warps, 4);
        assert_eq!(Cut::new(qwen.format, &qwen.down, 1, 4).warps, 3);
    }
}
