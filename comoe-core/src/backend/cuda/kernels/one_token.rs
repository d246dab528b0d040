//! The launches of kernels/one_token.cu and kernels/one_token_int4.cu: gate_up and down for one token.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::{
    CudaFunction, CudaModule, CudaStream, DeviceRepr, DriverError, LaunchConfig, PushKernelArg, sys,
};

use super::early::launch_early;
use super::{
    Act, CombineArgs, DownArgs, FORMATS, GateUpArgs, Input, Items, Kernels, Record, dtype_code, format_index,
    grid_extent, per_format,
};
use crate::error::Result;
use crate::expert::{ExpertLayout, MatrixLayout};
use crate::format::ExpertFormat;

/// Of a block of gate_up, each with two gate and two up rows; the kernel's launch bounds say as much.
const WARPS: usize = 8;
/// Rows of a block of down, whose warps take an item each.
const DOWN_ROWS: usize = 8;
/// What a warp reads of a row at a time.
const PASS_BYTES: usize = 512;

/// Of kernels/one_token_int4.cu: rows of a block of either kernel.
const DIGITS_ROWS: usize = 16;
/// Warps that share the rows of a block of gate_up, and an item's rows of a block of down.
const DIGITS_GATE_UP_SLOTS: usize = 8;
const DIGITS_DOWN_SLOTS: usize = 3;
/// Items that a block of down works on at a time.
const DIGITS_TEAMS: usize = 8;
/// `sizeof(Digits)`: a warp's piece of x.
const DIGITS_BYTES: usize = 1216;

/// The kernels, by [`format_index`].
pub(super) struct OneToken {
    gate_up: [CudaFunction; FORMATS.len()],
    down: [CudaFunction; FORMATS.len()],
    /// For INT4 in groups of 64 weights or more.
    digits_gate_up: CudaFunction,
    digits_down: CudaFunction,
    /// Whether the GPU sets up a kernel while the one before it ends: since Hopper.
    pub(super) early: bool,
}

/// Where down's results go; mirrored by `struct Output` in kernels/one_token.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct Output {
    partial: u64,
    weights: u64,
    y: u64,
    step: u64,
    dtype: u32,
    top_k: u32,
}

// SAFETY: plain integers without padding, mirrored field by field in kernels/one_token.cu.
unsafe impl DeviceRepr for Output {}

impl OneToken {
    pub(super) fn load(
        module: &Arc<CudaModule>,
        shared_limit: i32,
        early: bool,
    ) -> std::result::Result<Self, DriverError> {
        let load = |kind: &str, format: &str| {
            let f = module.load_function(&format!("one_token_{kind}_{format}"))?;
            f.set_attribute(
                sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                shared_limit,
            )?;
            Ok::<_, DriverError>(f)
        };
        Ok(Self {
            gate_up: per_format(|format| load("gate_up", format))?,
            down: per_format(|format| load("down", format))?,
            digits_gate_up: module.load_function("one_token_gate_up_int4_digits")?,
            digits_down: load("down", "int4_digits")?,
            early,
        })
    }
}

/// Shared memory for the F32 columns of one pass.
fn pass_shared(format: ExpertFormat) -> usize {
    let cols = match format {
        ExpertFormat::Bf16 => PASS_BYTES / 2,
        ExpertFormat::Int8 { .. } => PASS_BYTES,
        ExpertFormat::Int4 { .. } | ExpertFormat::Mxfp4 => 2 * PASS_BYTES,
    };
    4 * cols
}

fn gate_up_shared(format: ExpertFormat, gate: &MatrixLayout) -> usize {
    gate.row_bytes.div_ceil(PASS_BYTES) * pass_shared(format)
}

fn down_shared(format: ExpertFormat, warps: usize, combined: usize) -> usize {
    warps * pass_shared(format) + combined * DOWN_ROWS * 4
}

fn down_warps(items: usize) -> usize {
    items.clamp(1, WARPS)
}

/// Whether kernels/one_token_int4.cu does a layout: a lane's 32 weights have one scale whatever the group, but the two
/// lanes that share sums need a group of 64, and places in a record are 32 bits there.
fn takes_digits(layout: &ExpertLayout) -> bool {
    matches!(layout.format, ExpertFormat::Int4 { group } if group >= 64)
        && u32::try_from(layout.record_bytes).is_ok()
}

fn digits_teams(items: usize) -> usize {
    items.clamp(1, DIGITS_TEAMS)
}

/// Shared memory of down with its digits of x, and sums per assignment, or per team where they are not `combined`.
fn digits_down_shared(teams: usize, combined: usize) -> usize {
    DIGITS_DOWN_SLOTS * (teams * DIGITS_BYTES + combined.max(teams) * DIGITS_ROWS * 4)
}

impl Kernels {
    /// Whether a call's shape and tokens are those of one_token.cu, which holds all of x in shared memory.
    pub(super) fn takes_one_token(&self, items: &Items<'_>) -> bool {
        let layout = items.layout;
        items.tokens == 1
            && (takes_digits(layout)
                || gate_up_shared(layout.format, &layout.gate) <= self.shared_limit
                    && down_shared(layout.format, WARPS, 0) <= self.shared_limit)
    }

    /// Whether the kernels of a call read what there is at an item's `staged`, for one that has a `dst`.
    pub fn takes_parts(&self, items: &Items<'_>) -> bool {
        items.tokens == 1 && takes_digits(items.layout)
    }

    /// Whether down's sums of all experts fit into shared memory.
    pub(super) fn combines_in_place(&self, items: &Items<'_>, combine: &CombineArgs) -> bool {
        let shared = match takes_digits(items.layout) {
            true => digits_down_shared(digits_teams(items.len), combine.top_k),
            false => down_shared(items.layout.format, down_warps(items.len), combine.top_k),
        };
        items.len > 0 && items.most > 0 && shared <= self.shared_limit
    }

    /// # Safety
    /// As [`Kernels::gate_up`].
    pub(super) unsafe fn one_token_gate_up(
        &self,
        stream: &Arc<CudaStream>,
        args: &GateUpArgs<'_>,
        input: Input,
    ) -> Result<()> {
        let (items, layout) = (&args.items, args.items.layout);
        if items.len == 0 || items.most == 0 {
            return Ok(());
        }
        let (function, rows, warps, shared) = match takes_digits(layout) {
            true => (&self.one_token.digits_gate_up, DIGITS_ROWS, DIGITS_GATE_UP_SLOTS, 0),
            false => (
                &self.one_token.gate_up[format_index(layout.format)],
                2 * WARPS,
                WARPS,
                gate_up_shared(layout.format, &layout.gate),
            ),
        };
        let config = LaunchConfig {
            grid_dim: (layout.gate.rows.div_ceil(rows) as u32, grid_extent("items", items.len)?, 1),
            block_dim: (32 * warps as u32, 1, 1),
            shared_mem_bytes: shared as u32,
        };
        let (record, act) = (Record::new(layout), Act::new(args.activation));
        let launched = if self.one_token.early && takes_digits(layout) {
            let mut arguments = [
                address(&items.items),
                address(&items.assignments),
                address(&record),
                address(&input),
                address(&act),
                address(&args.h),
            ];
            // SAFETY: types and order are those of one_token_gate_up_int4_digits, which waits for the kernel before it
            // first of all; the addresses are the caller's promise.
            unsafe { launch_early(stream, function, config, &mut arguments) }
        } else {
            let mut launch = stream.launch_builder(function);
            launch.arg(&items.items).arg(&items.assignments).arg(&record).arg(&input).arg(&act).arg(&args.h);
            // SAFETY: types and order are those of ONE_TOKEN in kernels/one_token.cu, and of
            // one_token_gate_up_int4_digits; the addresses are the caller's promise.
            unsafe { launch.launch(config) }.map(|_| ())
        };
        launched.map_err(|error| self.launch_error("one_token_gate_up", error))
    }

    /// Down alone, or with the weighted sum over the token's experts.
    ///
    /// # Safety
    /// As [`Kernels::down`], or [`Kernels::down_combine`].
    pub(super) unsafe fn one_token_down(
        &self,
        stream: &Arc<CudaStream>,
        args: &DownArgs<'_>,
        combine: Option<&CombineArgs>,
    ) -> Result<()> {
        let output = match combine {
            None => Output { partial: args.partial, weights: 0, y: 0, step: 0, dtype: 0, top_k: 0 },
            Some(c) => Output {
                partial: args.partial,
                weights: c.weights,
                y: c.y,
                step: 0,
                dtype: dtype_code("y", c.y_dtype)?,
                top_k: c.top_k as u32,
            },
        };
        // SAFETY: the caller's promise.
        unsafe { self.one_token_down_to(stream, args, output) }
    }

    /// Down alone, whose results go to `words` (kernels/words.cuh) of the step whose number is at `step`.
    ///
    /// # Safety
    /// As [`Kernels::down`]; there are as many words as results.
    pub(super) unsafe fn one_token_down_in_words(
        &self,
        stream: &Arc<CudaStream>,
        args: &DownArgs<'_>,
        words: u64,
        step: u64,
    ) -> Result<()> {
        let output = Output { partial: words, weights: 0, y: 0, step, dtype: 0, top_k: 0 };
        // SAFETY: the caller's promise.
        unsafe { self.one_token_down_to(stream, args, output) }
    }

    /// # Safety
    /// As [`Kernels::down`], with results where `output` says.
    unsafe fn one_token_down_to(
        &self,
        stream: &Arc<CudaStream>,
        args: &DownArgs<'_>,
        output: Output,
    ) -> Result<()> {
        let (items, layout) = (&args.items, args.items.layout);
        if items.len == 0 || items.most == 0 {
            return Ok(());
        }
        let combined = output.top_k as usize;
        let (function, rows, warps, shared) = if takes_digits(layout) {
            let teams = digits_teams(items.len);
            let shared = digits_down_shared(teams, combined);
            (&self.one_token.digits_down, DIGITS_ROWS, teams * DIGITS_DOWN_SLOTS, shared)
        } else {
            let warps = down_warps(items.len);
            let function = &self.one_token.down[format_index(layout.format)];
            (function, DOWN_ROWS, warps, down_shared(layout.format, warps, combined))
        };
        let config = LaunchConfig {
            grid_dim: (layout.down.rows.div_ceil(rows) as u32, 1, 1),
            block_dim: (32 * warps as u32, 1, 1),
            shared_mem_bytes: shared as u32,
        };
        let (record, len) = (Record::new(layout), grid_extent("items", items.len)?);
        let launched = if self.one_token.early && takes_digits(layout) {
            let mut arguments = [
                address(&items.items),
                address(&items.assignments),
                address(&record),
                address(&args.h),
                address(&len),
                address(&output),
            ];
            // SAFETY: types and order are those of one_token_down_int4_digits, which waits for the kernel before it
            // before it reads h or writes results; that that kernel writes nothing else it reads, and the addresses,
            // are the caller's promise.
            unsafe { launch_early(stream, function, config, &mut arguments) }
        } else {
            let mut launch = stream.launch_builder(function);
            launch.arg(&items.items).arg(&items.assignments).arg(&record).arg(&args.h).arg(&len).arg(&output);
            // SAFETY: types and order are those of ONE_TOKEN in kernels/one_token.cu, and of
            // one_token_down_int4_digits; the addresses are the caller's promise.
            unsafe { launch.launch(config) }.map(|_| ())
        };
        launched.map_err(|error| self.launch_error("one_token_down", error))
    }
}

/// Where an argument of a kernel lies on the host.
fn address<T: DeviceRepr>(argument: &T) -> *mut c_void {
    std::ptr::from_ref(argument).cast_mut().cast()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::expert::{ExpertLayout, ExpertSpec};

    #[test]
    fn one_tokens_x_fits_every_gpu_at_the_shapes_of_models() {
        for format in ExpertFormat::all_for_tests() {
            for (hidden, intermediate) in [(2048, 768), (2880, 2880), (7168, 2048), (4096, 14336), (1, 1)] {
                let layout = ExpertLayout::new(&ExpertSpec::swiglu(hidden, intermediate), format);
                // 99 KiB is the least of the supported generations.
                assert!(gate_up_shared(format, &layout.gate) <= 99 << 10, "{format} {hidden}");
                assert!(down_shared(format, WARPS, 16) <= 99 << 10, "{format} {hidden}");
                let of_64 = matches!(format, ExpertFormat::Int4 { group: 64 | 128 });
                assert_eq!(takes_digits(&layout), of_64, "{format} {hidden}");
            }
        }
        assert!(digits_down_shared(DIGITS_TEAMS, 64) <= 48 << 10);
        let qwen = ExpertLayout::new(&ExpertSpec::swiglu(2048, 768), ExpertFormat::INT4);
        assert_eq!(gate_up_shared(qwen.format, &qwen.gate), 4 * 2048);
    }

    #[test]
    fn output_is_as_long_as_on_the_device() {
        assert_eq!(size_of::<Output>(), 40);
    }
}
