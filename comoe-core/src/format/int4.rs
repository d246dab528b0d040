//! INT4: nibble `n` in 0..=15 with `q = n - 8`, half a byte a weight, an f16 scale (little-endian) per group.
//!
//! A row is a sequence of little-endian 32-bit words; word `j` holds columns `8j .. 8j + 8`. Bits `4i .. 4i + 4` hold
//! column `8j + 2i` and bits `16 + 4i .. 20 + 4i` column `8j + 2i + 1`, for `i` in 0..4: `(w >> 4i) & 0x000f000f` is
//! two neighbouring columns, which GPU kernels turn into two f16 at once, and column `8j + c` is
//! `(w >> NIBBLE_SHIFTS[c]) & 15`. Groups are multiples of 8, so a word has one scale.
//!
//! Padding: nibbles beyond `cols` in a word that holds a column are 8 (`q = 0`); words that hold none are zero
//! bytes. Kernels give columns beyond `cols` no weight in a result.
//!
//! Error bound, with `m` the group's largest magnitude and `s0` the least f16 that is not below `m / 7`: the group's
//! root mean square error is at most `s0 / 2`, and no weight is off by more than `0.27 m + 2^-22` (a clipped one; an
//! unclipped one by at most half its scale). This holds up to `m = 458,528`, and a weight beyond
//! 524,032 is refused. Below `m = 2^-25` all decodes to about
//! zero. GGUF's Q4_0 is held without loss at group 32.

use super::scale::Levels;
use crate::simd::NIBBLE_SHIFTS;

pub(super) struct Int4;

impl Levels for Int4 {
    const LO: i32 = -8;
    const HI: i32 = 7;
    const GRID: &'static [f32] = &[6.75, 7.0, 7.25, 7.5, 7.75, 8.0, 8.25, 8.5, 8.75, 9.0, 9.25, 9.5];
    const MIN_DIVISOR: f32 = 6.0;
    const MAX_DIVISOR: f32 = 9.5;
    const SHIFTS: &'static [u32] = &NIBBLE_SHIFTS;
    const BIAS: i32 = 8;

    fn unpack(bytes: &[u8], scale: f32, out: &mut [f32]) {
        for (out, word) in out.chunks_mut(8).zip(bytes.as_chunks::<4>().0) {
            let word = u32::from_le_bytes(*word);
            for (v, at) in out.iter_mut().zip(NIBBLE_SHIFTS) {
                *v = scale * ((word >> at & 15) as i32 - 8) as f32;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use half::f16;

    use crate::ExpertFormat;

    #[test]
    fn nibbles_lie_where_the_gpu_kernels_expect_them() {
        // One scale of exactly 1, q = column - 8 for 16 columns, then 3 columns of a partly used word.
        let values: Vec<f32> = (0..16).chain([15, 0, 1]).map(|n| n as f32 - 8.0).collect();
        let (mut weights, mut scales) = ([0; 16], [0; 16]);
        ExpertFormat::Int4 { group: 32 }.pack_rows(&values, 19, &mut weights, &mut scales).unwrap();
        assert_eq!(f16::from_le_bytes([scales[0], scales[1]]).to_f32(), 1.0);
        let word = |j: usize| u32::from_le_bytes(weights.as_chunks::<4>().0[j]);
        for j in 0..2 {
            for i in 0..4 {
                let pair = word(j) >> (4 * i) & 0x000f_000f;
                let column = (8 * j + 2 * i) as u32;
                assert_eq!((pair & 0xffff, pair >> 16), (column, column + 1));
            }
        }
        // Columns 16, 17, 18 are n = 15, 0, 1 in nibbles 0, 4, 1; the five unused nibbles are 8.
        assert_eq!(word(2), 0x8880_881f);
        assert_eq!(word(3), 0, "a word without columns is zero bytes");
    }
}
