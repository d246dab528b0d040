//! BF16: two bytes a weight, little-endian, in column order; padding bytes are zero.
//!
//! Error bound: nothing is lost from BF16 input. From F32 or F16 the nearest BF16 (ties to even) is taken:
//! `|decoded - x| <= 2^-8 |x|` for normal `x`, and at most 2^-134 below the smallest normal number.

use half::bf16;

use super::BadValue;
use super::loss::Loss;

pub(super) fn pack_row(values: &[f32], weights: &mut [u8]) -> Result<Loss, BadValue> {
    if let Some(bad) = BadValue::first_not_finite(values) {
        return Err(bad);
    }
    let mut overflow = false;
    let (mut error, mut norm) = (0.0f32, 0.0f32);
    for (&v, out) in values.iter().zip(weights.as_chunks_mut::<2>().0) {
        let w = bf16::from_f32(v);
        overflow |= w.is_infinite();
        *out = w.to_le_bytes();
        (error, norm) = (error + (v - w.to_f32()).powi(2), norm + v * v);
    }
    match values.iter().position(|&v| overflow && bf16::from_f32(v).is_infinite()) {
        Some(at) => Err(BadValue { at, value: values[at], reason: "beyond the range of BF16" }),
        None => Ok(Loss { error: error.into(), norm: norm.into() }),
    }
}

pub(super) fn unpack_row(weights: &[u8], out: &mut [f32]) {
    for (bytes, v) in weights.as_chunks::<2>().0.iter().zip(out) {
        *v = bf16::from_le_bytes(*bytes).to_f32();
    }
}
