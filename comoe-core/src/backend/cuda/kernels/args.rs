//! What the launches of [`Kernels`](super::Kernels) are given.

use candle_core::DType;
use cudarc::driver::{DeviceRepr, ValidAsZeroBits};

#[cfg(doc)]
use super::Kernels;
use crate::expert::{Activation, ExpertLayout};

/// One record of a launch, as the kernels read it from device memory.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DeviceItem {
    /// Address of the record: a slot, or page-locked host memory.
    pub src: u64,
    /// 0, or the address of a slot that [`Kernels::gate_up`] and [`Kernels::down`] together fill with the record's
    /// bytes as they read them.
    pub dst: u64,
    /// Address of the record's first `ready` bytes, where some of it is nearer than `src`; see
    /// [`Kernels::takes_parts`].
    pub staged: u64,
    /// First of its assignments in the launch's list.
    pub first: u32,
    /// How many assignments it serves; 0 skips the item.
    pub count: u32,
    /// Bytes at `staged`.
    pub ready: u32,
    /// 0.
    pub unused: u32,
    /// Where it is taken down when an item with a `dst` is read: two u64 that begin as all ones and 0. 0: it is not.
    pub span: u64,
}

// SAFETY: plain integers without padding, mirrored by `struct Item` in kernels/record.cuh.
unsafe impl DeviceRepr for DeviceItem {}
// SAFETY: all zeros is an item to be skipped.
unsafe impl ValidAsZeroBits for DeviceItem {}

/// The records that a launch reads.
#[derive(Debug, Clone, Copy)]
pub struct Items<'a> {
    /// Where the parts of every record lie.
    pub layout: &'a ExpertLayout,
    /// Device address of `[len]` [`DeviceItem`]s.
    pub items: u64,
    /// Items, those with count 0 included.
    pub len: usize,
    /// Device address of the list of assignments, u32 each.
    pub assignments: u64,
    /// About how many assignments an item serves at most: a GEMV chooses its kernel by it, never the result.
    pub most: usize,
    /// Rows of x in the call that the launch is part of. One token has kernels of its own, whose sums are in another
    /// order: the bits of a result depend on this, and on nothing else that changes from step to step.
    pub tokens: usize,
}

/// Arguments of [`Kernels::gate_up`].
#[derive(Debug, Clone, Copy)]
pub struct GateUpArgs<'a> {
    /// The records.
    pub items: Items<'a>,
    /// The gate's non-linearity.
    pub activation: Activation,
    /// Device address of x `[tokens, hidden]`.
    pub x: u64,
    /// F32, BF16 or F16.
    pub x_dtype: DType,
    /// Experts per token: assignment `a` reads row `a / top_k` of x.
    pub top_k: usize,
    /// Device address of `[assignments]` F32 weights that x is multiplied with first, or 0.
    pub input_weights: u64,
    /// Device address of the result `[assignments, intermediate]`, F32.
    pub h: u64,
}

/// Arguments of [`Kernels::down`].
#[derive(Debug, Clone, Copy)]
pub struct DownArgs<'a> {
    /// The records.
    pub items: Items<'a>,
    /// Device address of `[assignments, intermediate]`, F32.
    pub h: u64,
    /// Device address of the result `[assignments, hidden]`, F32.
    pub partial: u64,
}

/// Arguments of [`Kernels::combine`].
#[derive(Debug, Clone, Copy)]
pub struct CombineArgs {
    /// Device address of `[tokens * top_k, hidden]`, F32.
    pub partial: u64,
    /// Device address of `[tokens * top_k]` F32 weights, or 0: all ones.
    pub weights: u64,
    /// Rows of the result.
    pub tokens: usize,
    /// Experts per token.
    pub top_k: usize,
    /// Columns of the result.
    pub hidden: usize,
    /// F32, BF16 or F16.
    pub y_dtype: DType,
    /// Device address of the result `[tokens, hidden]`.
    pub y: u64,
}

/// Arguments of [`Kernels::dequant`].
#[derive(Debug, Clone, Copy)]
pub struct DequantArgs<'a> {
    /// Layout at `src`, of any format.
    pub from: &'a ExpertLayout,
    /// Layout at `dst`: the same expert in BF16.
    pub to: &'a ExpertLayout,
    /// Device address of `[len]` [`DeviceItem`]s; those with `dst` 0 are skipped, assignments are not looked at.
    pub items: u64,
    /// Items.
    pub len: usize,
}

/// Arguments of [`Kernels::gather`].
#[derive(Debug, Clone, Copy)]
pub struct GatherArgs {
    /// Device address of `[len]` [`DeviceItem`]s.
    pub items: u64,
    /// Items.
    pub len: usize,
    /// Device address of the list of assignments, u32 each.
    pub assignments: u64,
    /// Bytes that are taken of every record, from its start.
    pub bytes: usize,
    /// Device address of the result `[assignments, bytes]`, aligned to 16 bytes.
    pub out: u64,
}
