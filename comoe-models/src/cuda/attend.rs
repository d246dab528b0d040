//! Attention of few tokens over the KV cache.

use std::sync::Arc;

use candle_core::DType;
use comoe_core::Result;
use cudarc::driver::{CudaFunction, CudaModule, CudaStream, DriverError};

use super::{DecodeKernels, KvRows, bad, dtype_code, grid, tokens_of, within};
use crate::arch::Mask;
use crate::blocks::attend::pieces;
use crate::load::KvFormat;

const WARPS: usize = 8;
const COMBINE_WARPS: usize = 16;
/// Blocks for each multiprocessor, all together; more pieces are taken one after the other.
const BLOCKS_PER_MULTIPROCESSOR: usize = 2;

/// Arguments of [`DecodeKernels::attend`]; addresses are device memory.
#[derive(Debug, Clone, Copy)]
pub struct AttendArgs {
    /// `[heads, tokens, key_width]`
    pub q: u64,
    /// F32, BF16 or F16, of q and the result: the model's.
    pub dtype: DType,
    /// `[kv_heads, capacity, key_width]`; rows up to the last token's position are there.
    pub k: KvRows,
    /// `[kv_heads, capacity, value_width]`; it may be a part of the keys' rows (MLA).
    pub v: KvRows,
    /// How the cache is held.
    pub cache: KvFormat,
    /// Rows that the cache has room for.
    pub capacity: usize,
    /// Positions that the launch, or the graph that it is captured in, may see: at most `capacity`. Short sequences
    /// attend a little faster, and with less memory, when this is not much more than they need. It changes no result.
    pub reach: usize,
    /// Tokens, 1 to 32.
    pub tokens: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Up to 768.
    pub key_width: usize,
    /// Up to 768.
    pub value_width: usize,
    /// Which keys a query sees.
    pub mask: Mask,
    /// `[heads]` F32: logits that take part in the softmax and bring no value; or 0.
    pub sinks: u64,
    /// Factor on `q k` before the softmax.
    pub scale: f32,
    /// One u32: the first token's position.
    pub position: u64,
    /// Result `[tokens, heads * value_width]`.
    pub out: u64,
    /// [`AttendArgs::workspace_bytes`] of memory, a multiple of 16, that nobody else uses before the launch is done.
    pub workspace: u64,
    /// One u32, set to 1 + a token whose position is not below `reach`, else left alone; that token's result is not
    /// written then.
    pub error: u64,
}

impl AttendArgs {
    fn pieces(&self) -> usize {
        pieces(self.reach, self.mask)
    }

    fn sums_bytes(&self) -> usize {
        (4 * self.tokens * self.heads * self.pieces() * self.value_width).next_multiple_of(16)
    }

    /// Memory that a launch needs, in bytes.
    pub fn workspace_bytes(&self) -> usize {
        self.sums_bytes() + 8 * self.tokens * self.heads * self.pieces()
    }
}

/// A kernel's shape: lanes that share a row, pieces of 8 columns of each, heads of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Shape {
    lanes: usize,
    pieces: usize,
    heads: usize,
}

/// Those of kernels/attend.cu.
const SHAPES: [Shape; 6] = {
    const fn shape(lanes: usize, pieces: usize, heads: usize) -> Shape {
        Shape { lanes, pieces, heads }
    }
    [shape(8, 1, 8), shape(16, 1, 1), shape(16, 1, 4), shape(32, 1, 4), shape(32, 2, 4), shape(32, 3, 2)]
};

impl Shape {
    fn width(self) -> usize {
        8 * self.lanes * self.pieces
    }

    /// The narrowest that holds the rows; of equals the one with the fewest blocks, then with the fewest idle heads.
    fn index_for(key_width: usize, value_width: usize, group: usize) -> Option<usize> {
        let fits = |s: &Shape| s.width() >= key_width.max(value_width);
        let cost = |s: &Shape| (s.width(), group.div_ceil(s.heads), s.heads);
        (0..SHAPES.len()).filter(|i| fits(&SHAPES[*i])).min_by_key(|i| cost(&SHAPES[*i]))
    }
}

/// By the cache's format (F32, BF16, F16, INT8) and [`SHAPES`].
pub(super) struct AttendKernels {
    pieces: Vec<Vec<CudaFunction>>,
    combine: CudaFunction,
}

impl AttendKernels {
    pub(super) fn load(
        module: &Arc<CudaModule>,
        shared_limit: i32,
    ) -> std::result::Result<Self, DriverError> {
        let of = |format: &str| -> std::result::Result<Vec<_>, DriverError> {
            let name = |s: &Shape| format!("attend_{format}_{}x{}_g{}", s.lanes, s.pieces, s.heads);
            // Room beside what the kernels have anyway.
            let load = |s| super::with_shared(module, &name(s), shared_limit - 4096);
            SHAPES.iter().map(load).collect()
        };
        let pieces =
            ["f32", "bf16", "f16", "int8"].into_iter().map(of).collect::<std::result::Result<_, _>>()?;
        Ok(Self { pieces, combine: module.load_function("attend_combine")? })
    }
}

/// As kernels/attend.cu has it.
#[repr(C)]
#[derive(Clone, Copy)]
struct Device {
    q: u64,
    k: u64,
    v: u64,
    k_scales: u64,
    v_scales: u64,
    sinks: u64,
    position: u64,
    out: u64,
    sums: u64,
    tops: u64,
    error: u64,
    k_head_stride: u64,
    v_head_stride: u64,
    k_row_stride: u32,
    v_row_stride: u32,
    heads: u32,
    kv_heads: u32,
    key_width: u32,
    value_width: u32,
    tokens: u32,
    capacity: u32,
    dtype: u32,
    mask: u32,
    span: u32,
    reach: u32,
    pieces: u32,
    vectors: u32,
    scale: f32,
    pad: u32,
}

impl DecodeKernels {
    /// Enqueues `out = softmax(scale q kᵀ) v` for every token and head, in two kernels.
    ///
    /// # Errors
    /// [`comoe_core::Error::BadArgument`] for sizes or a dtype that the kernels cannot do,
    /// [`comoe_core::Error::Device`] when a launch fails.
    ///
    /// # Safety
    /// Every address in `args` must be valid on the stream's GPU, for the sizes documented, until the kernels are done.
    pub unsafe fn attend(&self, stream: &Arc<CudaStream>, args: &AttendArgs) -> Result<()> {
        let size = |what, n| within(what, n, 1, 1 << 30);
        if args.kv_heads == 0 || !args.heads.is_multiple_of(args.kv_heads) {
            return bad(
                "query heads",
                format!("{} are no multiple of {} key heads", args.heads, args.kv_heads),
            );
        }
        args.k.check(args.cache)?;
        args.v.check(args.cache)?;
        let group = args.heads / args.kv_heads;
        let Some(shape) = Shape::index_for(args.key_width, args.value_width, group) else {
            let reason = format!(
                "expected at most 768, found keys of {} and values of {}",
                args.key_width, args.value_width
            );
            return bad("width of a head", reason);
        };
        let (element, code) = match args.cache {
            KvFormat::Plain => (args.dtype.size_in_bytes() as u64, dtype_code("a KV cache", args.dtype)?),
            KvFormat::Int8 => (1, 3),
        };
        let whole = |rows: &KvRows, width: usize| {
            let sizes = [rows.head_stride, rows.row_stride, width];
            rows.data.is_multiple_of(8 * element.min(2)) && sizes.iter().all(|n| n.is_multiple_of(8))
        };
        let (mask, span) = match args.mask {
            Mask::Causal => (0, 0),
            Mask::Sliding(span) => (1, size("window of a mask", span)?),
            Mask::Chunked(span) => (2, size("chunk of a mask", span)?),
        };
        let device = Device {
            q: args.q,
            k: args.k.data,
            v: args.v.data,
            k_scales: args.k.scales,
            v_scales: args.v.scales,
            sinks: args.sinks,
            position: args.position,
            out: args.out,
            sums: args.workspace,
            tops: args.workspace + args.sums_bytes() as u64,
            error: args.error,
            k_head_stride: args.k.head_stride as u64,
            v_head_stride: args.v.head_stride as u64,
            k_row_stride: size("stride of a cache's rows", args.k.row_stride)?,
            v_row_stride: size("stride of a cache's rows", args.v.row_stride)?,
            heads: within("query heads", args.heads, 1, 65_535)?,
            kv_heads: args.kv_heads as u32,
            key_width: size("width of a key", args.key_width)?,
            value_width: size("width of a value", args.value_width)?,
            tokens: tokens_of(args.tokens)?,
            capacity: size("rows of a KV cache", args.capacity)?,
            dtype: dtype_code("queries", args.dtype)?,
            mask,
            span,
            reach: within("reach of an attention", args.reach, 1, args.capacity)?,
            pieces: args.pieces() as u32,
            vectors: (whole(&args.k, args.key_width) && whole(&args.v, args.value_width)).into(),
            scale: args.scale,
            pad: 0,
        };
        let Shape { heads, .. } = SHAPES[shape];
        let shared = 4 * WARPS * heads * SHAPES[shape].width();
        let rows = args.kv_heads * group.div_ceil(heads);
        let at_once = (self.multiprocessors * BLOCKS_PER_MULTIPROCESSOR).div_ceil(rows * args.tokens);
        let config = grid(args.pieces().min(at_once), rows, args.tokens, 32 * WARPS, shared);
        let function = &self.attend.pieces[code as usize][shape];
        // SAFETY: `Device` is the kernels' struct; the addresses are the caller's promise.
        unsafe {
            self.launch("attend", stream, function, config, &device)?;
            let config = grid(args.heads, args.tokens, args.value_width.div_ceil(32), 32 * COMBINE_WARPS, 0);
            self.launch("attend_combine", stream, &self.attend.combine, config, &device)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    super::super::mirrored!(Device, 168);

    #[test]
    fn every_family_has_a_shape() {
        let shape = |key, value, group| Shape::index_for(key, value, group).map(|i| SHAPES[i]);
        let of = |lanes, pieces, heads| Some(Shape { lanes, pieces, heads });
        assert_eq!(shape(128, 128, 8), of(16, 1, 4));
        assert_eq!(shape(128, 128, 5), of(16, 1, 4));
        assert_eq!(shape(128, 128, 1), of(16, 1, 1));
        assert_eq!(shape(64, 64, 8), of(8, 1, 8));
        assert_eq!(shape(512, 512, 8), of(32, 2, 4));
        assert_eq!(shape(576, 512, 16), of(32, 3, 2));
        assert_eq!(shape(800, 512, 16), None);
    }
}
