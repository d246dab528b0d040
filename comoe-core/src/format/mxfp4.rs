//! MXFP4 (OCP Microscaling Formats 1.0, section 5.3.3): E2M1 numbers that share a power of two per 32, kept as one
//! E8M0 byte: `2^(byte - 127)`. What gpt-oss is published in, held without loss.
//!
//! Columns lie in words as INT4's do (see `int4`), so that `(w >> 4i) & 0x000f000f` are two neighbouring columns. Codes
//! 0 to 7 are 0, 0.5, 1, 1.5, 2, 3, 4, 6; bit 3 is the sign. An E2M1 number times a power of two is a BF16 number.
//! Padding is zero bytes.
//!
//! Exponent bytes above 252 are refused: six times such a power passes the range of F32 (255 is E8M0's NaN).
//!
//! Error bound, with `m` the group's largest magnitude: no weight is off by more than `m / 4 + 2^-129`. Of the two
//! powers that bring `m` to 4..8 and to 2..4 the one with the less squared error is taken, and the first if it
//! keeps everything. A weight beyond `6 * 2^125` is refused.

use super::BadValue;
use super::loss::Loss;
use crate::simd::NIBBLE_SHIFTS;

/// Numbers that share an exponent.
pub(crate) const BLOCK: usize = 32;

/// E2M1 by its code.
pub(crate) const VALUES: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// The greatest exponent byte whose numbers all are finite.
pub(crate) const MAX_EXPONENT: u8 = 252;

/// E8M0: `2^(byte - 127)`. Its NaN (255) comes out as infinity, which no record takes.
#[inline(always)]
pub(crate) fn power_of_two(byte: u8) -> f32 {
    f32::from_bits(if byte == 0 { 1 << 22 } else { u32::from(byte) << 23 })
}

/// The code nearest to `a >= 0`, ties to the even one.
#[inline(always)]
fn nearest(a: f32) -> u32 {
    let above = [a > 0.25, a >= 0.75, a > 1.25, a >= 1.75, a > 2.5, a >= 3.5, a > 5.0];
    above.into_iter().map(u32::from).sum()
}

pub(super) fn pack_row(values: &[f32], weights: &mut [u8], scales: &mut [u8]) -> Result<Loss, BadValue> {
    if let Some(bad) = BadValue::first_not_finite(values) {
        return Err(bad);
    }
    let mut loss = Loss::default();
    for (g, ((values, weights), exponent)) in
        values.chunks(BLOCK).zip(weights.chunks_mut(BLOCK / 2)).zip(scales).enumerate()
    {
        let best = best_exponent(values).map_err(|e| BadValue { at: g * BLOCK + e.at, ..e })?;
        *exponent = best.0;
        loss += Loss { error: best.1, norm: values.iter().map(|v| f64::from(*v).powi(2)).sum() };
        let inverse = power_of_two(254 - *exponent);
        for (word, values) in weights.as_chunks_mut::<4>().0.iter_mut().zip(values.chunks(8)) {
            let code = |v: f32| nearest(v.abs() * inverse) | (v.to_bits() >> 28 & 8);
            let bits = values.iter().zip(NIBBLE_SHIFTS).fold(0, |w, (&v, at)| w | code(v) << at);
            *word = bits.to_le_bytes();
        }
    }
    Ok(loss)
}

/// The exponent byte for a group of finite values, and the squared error that it leaves.
fn best_exponent(values: &[f32]) -> Result<(u8, f64), BadValue> {
    let (at, m) = values.iter().enumerate().fold((0, 0.0f32), |(at, m), (i, v)| match v.abs() > m {
        true => (i, v.abs()),
        false => (at, m),
    });
    if m > 6.0 * power_of_two(MAX_EXPONENT) {
        return Err(BadValue { at, value: values[at], reason: BadValue::TOO_LARGE });
    }
    // Subnormal numbers have the byte 0, and so has zero.
    let first = ((m.to_bits() >> 23) as u8).saturating_sub(2);
    let error = |exponent: u8| {
        let (scale, inverse) = (power_of_two(exponent), power_of_two(254 - exponent));
        let off = |v: &f32| {
            let e = v.abs() - scale * VALUES[nearest(v.abs() * inverse) as usize];
            // Relative to the scale, so that no square leaves the range of F32.
            (e * inverse).powi(2)
        };
        values.iter().map(off).sum::<f32>() * if exponent == first { 1.0 } else { 4.0 }
    };
    let (mut best, mut least) = (first, error(first));
    if first < MAX_EXPONENT && least > 0.0 {
        let coarser = error(first + 1);
        if coarser < least {
            (best, least) = (first + 1, coarser);
        }
    }
    Ok((best, f64::from(least) * f64::from(power_of_two(first)).powi(2)))
}

pub(super) fn unpack_row(weights: &[u8], scales: &[u8], out: &mut [f32]) {
    for ((out, weights), exponent) in out.chunks_mut(BLOCK).zip(weights.chunks(BLOCK / 2)).zip(scales) {
        let scale = power_of_two(*exponent);
        for (out, word) in out.chunks_mut(8).zip(weights.as_chunks::<4>().0) {
            let word = u32::from_le_bytes(*word);
            for (v, at) in out.iter_mut().zip(NIBBLE_SHIFTS) {
                *v = scale * VALUES[(word >> at & 15) as usize];
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exponents_are_those_of_e8m0() {
        assert_eq!(
            [0, 1, 126, 127, 130, 254].map(power_of_two),
            [-127, -126, -1, 0, 3, 127].map(|e| 2f32.powi(e))
        );
        assert!(power_of_two(255).is_infinite());
    }

    #[test]
    fn every_code_with_every_exponent_is_kept() {
        for exponent in 0..=MAX_EXPONENT {
            let scale = power_of_two(exponent);
            let row: Vec<f32> = (0..40).map(|i| VALUES[i % 16] * scale).collect();
            let (mut weights, mut scales, mut out) = ([0; 32], [0; 16], [f32::NAN; 40]);
            pack_row(&row, &mut weights, &mut scales).unwrap();
            unpack_row(&weights, &scales, &mut out);
            assert_eq!(out.map(f32::to_bits).as_slice(), row.iter().map(|v| v.to_bits()).collect::<Vec<_>>());
            assert_eq!(scales[0], exponent);
            assert_eq!(weights[20..], [0; 12], "words without columns are zero");
        }
    }

    #[test]
    fn rounding_is_to_the_nearest_and_ties_go_to_even_codes() {
        for a in 0..1000 {
            let a = a as f32 / 128.0;
            let code = nearest(a) as usize;
            let distance = |code: usize| (VALUES[code] - a).abs();
            let best = (0..8).map(distance).fold(f32::INFINITY, f32::min);
            assert_eq!(distance(code), best, "{a}");
            let tied = (0..8).filter(|&c| distance(c) == best).count() > 1;
            assert!(!tied || code.is_multiple_of(2), "{a}");
        }
    }
}
