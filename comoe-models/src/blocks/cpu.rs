//! Helpers of the CPU paths: slices of tensors, and the vector loops that matter.

use candle_core::{CpuStorage, DType, Layout, Result, Tensor, bail};
use rayon::prelude::*;

/// Whether the slice path serves `t`.
pub(super) fn applies(t: &Tensor) -> bool {
    t.device().is_cpu() && t.dtype() == DType::F32
}

/// The elements of a contiguous F32 tensor.
pub(super) fn slice<'a>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [f32]> {
    match layout.contiguous_offsets() {
        Some((start, end)) => Ok(&storage.as_slice::<f32>()?[start..end]),
        None => bail!("expected a contiguous tensor, got {layout:?}"),
    }
}

/// Fewer elements than this are not worth waking another thread for (some tens of microseconds of work).
const PARALLEL_FROM: usize = 1 << 16;

/// Runs `f` over chunks of `out`, on several threads when `work` (elements touched in all) is worth it. Chunks are
/// independent, so the result does not depend on the threads.
pub(super) fn for_chunks<F>(out: &mut [f32], chunk: usize, work: usize, f: F)
where
    F: Fn(usize, &mut [f32]) + Send + Sync,
{
    if work < PARALLEL_FROM {
        out.chunks_mut(chunk).enumerate().for_each(|(i, c)| f(i, c));
    } else {
        out.par_chunks_mut(chunk).enumerate().for_each(|(i, c)| f(i, c));
    }
}

const LANES: usize = 16;

/// `sum a[i] b[i]`, in a fixed order, so that the bits do not depend on the machine's vector width.
#[inline(always)]
pub(super) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let (a16, a_rest) = a.as_chunks::<LANES>();
    let (b16, b_rest) = b.as_chunks::<LANES>();
    let mut acc = [0f32; LANES];
    for (x, y) in a16.iter().zip(b16) {
        for i in 0..LANES {
            acc[i] += x[i] * y[i];
        }
    }
    fold(acc) + a_rest.iter().zip(b_rest).map(|(x, y)| x * y).sum::<f32>()
}

/// The same with the bytes of `a` as signed numbers.
#[inline(always)]
pub(super) fn dot_bytes(a: &[u8], b: &[f32]) -> f32 {
    let (a16, a_rest) = a.as_chunks::<LANES>();
    let (b16, b_rest) = b.as_chunks::<LANES>();
    let mut acc = [0f32; LANES];
    for (x, y) in a16.iter().zip(b16) {
        for i in 0..LANES {
            acc[i] += f32::from(x[i].cast_signed()) * y[i];
        }
    }
    let rest = a_rest.iter().zip(b_rest).map(|(x, y)| f32::from(x.cast_signed()) * y);
    fold(acc) + rest.sum::<f32>()
}

/// `y += a x` with the bytes of `x` as signed numbers.
#[inline(always)]
pub(super) fn axpy_bytes(a: f32, x: &[u8], y: &mut [f32]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y += a * f32::from(x.cast_signed());
    }
}

/// The sum of all lanes, halves onto halves.
#[inline(always)]
fn fold(mut acc: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            acc[i] += acc[i + width];
        }
        width /= 2;
    }
    acc[0]
}

/// `y += a x`.
#[inline(always)]
pub(super) fn axpy(a: f32, x: &[f32], y: &mut [f32]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y += a * x;
    }
}
