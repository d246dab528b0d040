//! INT8: `q` in -127..=127 as one signed byte a weight in column order, an f16 scale (little-endian) per group;
//! padding bytes are zero.
//!
//! Error bound, with `m` the group's largest magnitude and `s0` the least f16 that is not below `m / 127`:
//! the group's root mean square error is at most `s0 / 2`, and no weight is off by more than `0.024 m + 2^-18`
//! (a clipped one; an unclipped one by at most half its scale). `m` may be up to 8.3 million. Below `m = 2^-25` all
//! decodes to about zero. GGUF's Q8_0 is held without loss at group 32.

use half::f16;

use super::BadValue;
use super::scale::{Group, Levels};

struct Int8;

impl Levels for Int8 {
    const LO: i32 = -127;
    const HI: i32 = 127;
    const GRID: &'static [f32] =
        &[127.0, 126.0, 125.0, 124.0, 123.0, 122.0, 121.0, 120.0, 128.0, 129.0, 130.0];
    const MIN_DIVISOR: f32 = 120.0;
    const MAX_DIVISOR: f32 = 130.0;
}

pub(super) fn pack_row(
    values: &[f32],
    group: usize,
    weights: &mut [u8],
    scales: &mut [u8],
) -> Result<(), BadValue> {
    if let Some(bad) = BadValue::first_not_finite(values) {
        return Err(bad);
    }
    let mut packed = Group::new();
    let outputs = weights.chunks_mut(group).zip(scales.as_chunks_mut::<2>().0);
    for (g, (values, (weights, scale))) in values.chunks(group).zip(outputs).enumerate() {
        let s = packed.quantise::<Int8>(values).map_err(|e| BadValue { col: g * group + e.col, ..e })?;
        *scale = s.to_le_bytes();
        for (w, q) in weights.iter_mut().zip(&packed.q[..values.len()]) {
            *w = *q as u8;
        }
    }
    Ok(())
}

pub(super) fn unpack_row(weights: &[u8], scales: &[u8], group: usize, out: &mut [f32]) {
    let inputs = weights.chunks(group).zip(scales.as_chunks::<2>().0);
    for (out, (weights, scale)) in out.chunks_mut(group).zip(inputs) {
        let scale = f16::from_le_bytes(*scale).to_f32();
        for (v, w) in out.iter_mut().zip(weights) {
            *v = scale * f32::from(*w as i8);
        }
    }
}
