//! INT8 for dense matrices (`--dense-format int8`): `w = scale * q`, one f16 scale per row and group of 128 inputs.
//!
//! Planar, as the experts' INT8 is: all rows of q, then all rows of scales, both padded to 16 bytes, so that every load
//! is aligned.

use comoe_core::{Error, Result};
use half::f16;
use rayon::prelude::*;

use super::cpu;

/// Inputs that share a scale.
pub const INT8_GROUP: usize = 128;

/// Where things are in a packed matrix, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Int8Layout {
    /// Rows of the matrix.
    pub outputs: usize,
    /// Columns of the matrix.
    pub inputs: usize,
    /// From one row of q to the next; a multiple of 16.
    pub row_bytes: usize,
    /// From one row of scales to the next; a multiple of 16.
    pub scale_row_bytes: usize,
    /// Where the scales begin.
    pub scales: usize,
    /// All of it.
    pub bytes: usize,
}

impl Int8Layout {
    /// Of a matrix `[outputs, inputs]`.
    pub fn new(outputs: usize, inputs: usize) -> Self {
        let row_bytes = inputs.next_multiple_of(16);
        let scale_row_bytes = (2 * inputs.div_ceil(INT8_GROUP)).next_multiple_of(16);
        let scales = outputs * row_bytes;
        let bytes = scales + outputs * scale_row_bytes;
        Self { outputs, inputs, row_bytes, scale_row_bytes, scales, bytes }
    }
}

/// Packs a row-major matrix `[outputs, inputs]`, on every thread: the scale is the least f16 that is not below a group's
/// largest magnitude over 127, so that none is clipped and no weight is off by more than half its scale.
///
/// # Errors
/// [`comoe_core::Error::BadArgument`] for another length, or a value that is not finite or above f16's reach
/// (8.3 million).
pub fn pack_int8(values: &[f32], outputs: usize, inputs: usize) -> Result<Vec<u8>> {
    const WHAT: &str = "matrix to be packed as INT8";
    if inputs == 0 || values.len() != outputs * inputs {
        return bad(WHAT, format!("expected {outputs} rows of {inputs}, found {} values", values.len()));
    }
    let layout = Int8Layout::new(outputs, inputs);
    let mut packed = vec![0u8; layout.bytes];
    let (weights, scales) = packed.split_at_mut(layout.scales);
    let rows = values.par_chunks_exact(inputs);
    let outs = weights
        .par_chunks_exact_mut(layout.row_bytes)
        .zip(scales.par_chunks_exact_mut(layout.scale_row_bytes));
    rows.zip(outs).enumerate().try_for_each(|(r, (row, (weights, scales)))| {
        let groups = row.chunks(INT8_GROUP).zip(weights.chunks_mut(INT8_GROUP));
        for (g, ((group, to), scale_to)) in groups.zip(scales.as_chunks_mut::<2>().0).enumerate() {
            let scale = quantise(group, to);
            if scale.is_nan() {
                let largest = group.iter().fold(0f32, |m, v| m.max(v.abs()));
                let found = group.iter().copied().find(|v| v.is_nan()).unwrap_or(largest);
                let reason = format!("row {r}, columns from {}: found {found}", g * INT8_GROUP);
                return bad(WHAT, format!("{reason}; a value must be finite and below 8.3 million"));
            }
            *scale_to = scale.to_le_bytes();
        }
        Ok(())
    })?;
    Ok(packed)
}

/// q of `values`, and their scale: the least f16 that clips none of them. NaN, with q of 0, where there is none: for a NaN
/// or a value of 8.3 million or more.
pub(super) fn quantise(values: &[f32], q: &mut [u8]) -> f16 {
    // `max` passes over a NaN, so that is looked for.
    let largest = values.iter().fold(0f32, |m, v| m.max(v.abs()));
    let scale = scale_not_below(largest / 127.0);
    if !scale.is_finite() || values.iter().any(|v| v.is_nan()) {
        q.fill(0);
        return f16::NAN;
    }
    let divisor = scale.to_f32();
    for (q, v) in q.iter_mut().zip(values) {
        let r = if divisor > 0.0 { (v / divisor).round_ties_even().clamp(-127.0, 127.0) } else { 0.0 };
        *q = (r as i8).cast_unsigned();
    }
    scale
}

/// What [`pack_int8`] made, as `[outputs, inputs]`.
///
/// # Errors
/// [`comoe_core::Error::BadArgument`] for another length.
pub fn unpack_int8(packed: &[u8], outputs: usize, inputs: usize) -> Result<Vec<f32>> {
    unpack_rows(packed, &Int8Layout::new(outputs, inputs), 0, outputs)
}

/// Some rows of it.
///
/// # Errors
/// [`comoe_core::Error::BadArgument`] for another length, or rows that are not there.
pub(super) fn unpack_rows(packed: &[u8], layout: &Int8Layout, first: usize, rows: usize) -> Result<Vec<f32>> {
    check_length(packed, layout)?;
    if first + rows > layout.outputs {
        let reason = format!("expected rows of {}, found {first} and {rows} on", layout.outputs);
        return bad("packed INT8 matrix", reason);
    }
    let mut values = vec![0f32; rows * layout.inputs];
    let work = values.len();
    cpu::for_chunks(&mut values, layout.inputs, work, |r, values| {
        for (values, (weights, scale)) in values.chunks_mut(INT8_GROUP).zip(groups(packed, layout, first + r))
        {
            for (value, q) in values.iter_mut().zip(weights) {
                *value = scale * f32::from(q.cast_signed());
            }
        }
    });
    Ok(values)
}

/// `y = W x` for one `x [inputs]`. A group's products are summed before they are scaled, groups in ascending order.
///
/// # Errors
/// [`comoe_core::Error::BadArgument`] for other lengths.
pub(super) fn multiply(packed: &[u8], layout: &Int8Layout, x: &[f32]) -> Result<Vec<f32>> {
    /// Outputs that a thread takes at a time.
    const ROWS: usize = 16;
    check_length(packed, layout)?;
    if x.len() != layout.inputs {
        return bad("x of an INT8 product", format!("expected {} values, found {}", layout.inputs, x.len()));
    }
    let mut y = vec![0f32; layout.outputs];
    cpu::for_chunks(&mut y, ROWS, layout.outputs * layout.inputs, |chunk, y| {
        for (i, y) in y.iter_mut().enumerate() {
            let groups = groups(packed, layout, chunk * ROWS + i).zip(x.chunks(INT8_GROUP));
            *y = groups.map(|((weights, scale), x)| scale * cpu::dot_bytes(weights, x)).sum();
        }
    });
    Ok(y)
}

fn check_length(packed: &[u8], layout: &Int8Layout) -> Result<()> {
    if packed.len() != layout.bytes {
        let reason = format!("expected {} bytes, found {}", layout.bytes, packed.len());
        return bad("packed INT8 matrix", reason);
    }
    Ok(())
}

/// The groups of a row: q and its scale.
fn groups<'a>(packed: &'a [u8], layout: &Int8Layout, row: usize) -> impl Iterator<Item = (&'a [u8], f32)> {
    let (weights, scales) = packed.split_at(layout.scales);
    let weights = &weights[row * layout.row_bytes..][..layout.inputs];
    let scales = scales[row * layout.scale_row_bytes..].as_chunks::<2>().0;
    weights.chunks(INT8_GROUP).zip(scales.iter().map(|s| f16::from_le_bytes(*s).to_f32()))
}

fn bad<T>(what: &'static str, reason: String) -> Result<T> {
    Err(Error::BadArgument { what, reason })
}

/// The least f16 that is not below `v`; NaN for NaN, infinity where there is none.
fn scale_not_below(v: f32) -> f16 {
    let near = f16::from_f32(v);
    if near.to_f32() < v { f16::from_bits(near.to_bits() + 1) } else { near }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::random;

    #[test]
    fn no_weight_is_off_by_more_than_half_its_scale() {
        for (outputs, inputs, magnitude) in
            [(3, 128, 1.0f32), (2, 300, 1e-3), (5, 17, 1e5), (1, 1, 0.0), (2, 256, 1e-9)]
        {
            let values = random(&[outputs, inputs], 5).flatten_all().unwrap().to_vec1::<f32>().unwrap();
            let values: Vec<f32> = values.iter().map(|v| v * magnitude).collect();
            let packed = pack_int8(&values, outputs, inputs).unwrap();
            assert_eq!(packed.len(), Int8Layout::new(outputs, inputs).bytes);
            let back = unpack_int8(&packed, outputs, inputs).unwrap();
            for (row, back) in values.chunks(inputs).zip(back.chunks(inputs)) {
                for (group, back) in row.chunks(INT8_GROUP).zip(back.chunks(INT8_GROUP)) {
                    let largest = group.iter().fold(0f32, |m, v| m.max(v.abs()));
                    let scale = scale_not_below(largest / 127.0).to_f32();
                    // The least f16 above 0 is 2^-24: what is smaller counts as that.
                    assert!(scale <= largest / 127.0 * (1.0 + 1.0 / 1024.0) + f32::powi(2.0, -24));
                    for (v, b) in group.iter().zip(back) {
                        assert!((v - b).abs() <= scale * 0.5001, "{v} {b} {scale}");
                    }
                }
            }
        }
        // Whole numbers of a scale are kept.
        let whole: Vec<f32> = (-127..=127).map(|q| q as f32 * 0.25).collect();
        let packed = pack_int8(&whole[..128], 1, 128).unwrap();
        assert_eq!(unpack_int8(&packed, 1, 128).unwrap(), whole[..128]);
    }

    #[test]
    fn what_cannot_be_held_is_refused() {
        for bad in [f32::NAN, f32::INFINITY, 1e7] {
            let e = pack_int8(&[0.0, 1.0, bad, 0.0], 2, 2).unwrap_err().to_string();
            assert!(e.contains("row 1"), "{e}");
        }
        assert!(pack_int8(&[0.0; 5], 2, 2).is_err() && unpack_int8(&[0; 5], 2, 2).is_err());
    }

    #[test]
    fn products_and_parts_are_those_of_what_is_unpacked() {
        for (outputs, inputs) in [(1, 1), (5, 17), (40, 300), (3, 128)] {
            let flat =
                |shape: &[usize], seed| random(shape, seed).flatten_all().unwrap().to_vec1::<f32>().unwrap();
            let layout = Int8Layout::new(outputs, inputs);
            let packed = pack_int8(&flat(&[outputs, inputs], 3), outputs, inputs).unwrap();
            let whole = unpack_int8(&packed, outputs, inputs).unwrap();
            let x = flat(&[inputs], 4);
            let y = multiply(&packed, &layout, &x).unwrap();
            for (row, y) in whole.chunks(inputs).zip(y) {
                let want: f64 = row.iter().zip(&x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
                assert!((f64::from(y) - want).abs() < 1e-4, "{y} {want}");
            }
            let last = unpack_rows(&packed, &layout, outputs - 1, 1).unwrap();
            assert_eq!(last, whole[(outputs - 1) * inputs..]);
            assert!(unpack_rows(&packed, &layout, outputs, 1).is_err());
            assert!(multiply(&packed, &layout, &[]).is_err());
        }
    }
}
