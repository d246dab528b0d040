//! INT8: `q` in -127..=127 as one signed byte a weight in column order, an f16 scale (little-endian) per group;
//! padding bytes are zero.
//!
//! Error bound, with `m` the group's largest magnitude and `s0` the least f16 that is not below `m / 127`:
//! the group's root mean square error is at most `s0 / 2`, and no weight is off by more than `0.024 m + 2^-18`
//! (a clipped one; an unclipped one by at most half its scale). `m` may be up to 8.3 million. Below `m = 2^-25` all
//! decodes to about zero. GGUF's Q8_0 is held without loss at group 32.

use super::scale::Levels;

pub(super) struct Int8;

impl Levels for Int8 {
    const LO: i32 = -127;
    const HI: i32 = 127;
    const GRID: &'static [f32] =
        &[127.0, 126.0, 125.0, 124.0, 123.0, 122.0, 121.0, 120.0, 119.0, 118.0, 117.0, 116.0];
    const MIN_DIVISOR: f32 = 115.0;
    const MAX_DIVISOR: f32 = 130.0;
    const SHIFTS: &'static [u32] = &[0, 8, 16, 24];
    const BIAS: i32 = 0;

    fn unpack(bytes: &[u8], scale: f32, out: &mut [f32]) {
        out.iter_mut().zip(bytes).for_each(|(v, &w)| *v = scale * f32::from(w as i8));
    }
}
