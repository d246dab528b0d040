//! Packs groups of weights that share a scale: the scale is exact where an exact one exists, else that of least squares.
//!
//! Let `m` be a group's value of largest magnitude.
//! 1. If some f16 `s = m / t` with integer `t` reproduces every value as `s * q`, it is taken. Values that come from
//!    GGUF's Q8_0 or Q4_0 blocks are therefore kept exactly.
//! 2. Otherwise each divisor `t` of a small grid gives integers `q` for the scale `m / t`. For these integers the best
//!    scale is `sum(x q) / sum(q^2)`, which leaves the squared error `sum(x^2) - sum(x q)^2 / sum(q^2)`: the `t` with the
//!    greatest `sum(x q)^2 / sum(q^2)` wins (the idea of llama.cpp's `make_qx_quants`). Its best scale in f16 is
//!    fitted once more to the integers that it gives itself. Clipping the largest value a little often pays at four bits.
//! 3. Of these and the least scale that clips nothing, what leaves the least squared error is taken; so it is never more
//!    than that of plain `max / largest q`.
//!
//! Sixteen groups are packed at a time, one a lane, so that no sum goes across lanes. A group's result depends on its
//! values alone: every lane takes the same steps in the same order on every vector unit, and the one fused multiply-add
//! adds whole numbers, which is exact with and without the instruction.

use std::marker::PhantomData;

use half::f16;

use super::BadValue;
use super::loss::Loss;
use crate::simd::{LANES, Simd, Vectorised, dispatch};

/// The integers that a format can hold and the divisors that are tried for it.
pub(super) trait Levels {
    /// Least `q`.
    const LO: i32;
    /// Greatest `q`; its magnitude is at most that of `LO`.
    const HI: i32;
    /// Divisors that are tried for the scale, a multiple of four of them. They map `m` to the side of `LO`.
    const GRID: &'static [f32];
    /// Least divisor of a fitted scale, so that it stays within the documented bound.
    const MIN_DIVISOR: f32;
    /// Greatest divisor of a fitted scale.
    const MAX_DIVISOR: f32;
    /// Where the columns of a 32-bit word start, in bits.
    const SHIFTS: &'static [u32];
    /// What is added to `q` before its low bits are kept.
    const BIAS: i32;

    /// Reads as many as `out` has, times `scale`.
    fn unpack(bytes: &[u8], scale: f32, out: &mut [f32]);
}

/// Where rows are packed to: their weights and their scales, zero on entry, and the bytes from one row to the next.
pub(super) struct Packed<'a> {
    pub(super) weights: &'a mut [u8],
    pub(super) row_bytes: usize,
    pub(super) scales: &'a mut [u8],
    pub(super) scale_row_bytes: usize,
}

/// Rows of `cols` columns that fill the lanes, as far as that can be.
pub(super) fn rows_at_once(cols: usize, group: usize) -> usize {
    let groups = cols.div_ceil(group);
    // LANES is a power of two: what it shares with `groups` are the factors two of `groups`.
    LANES >> groups.trailing_zeros().min(LANES.trailing_zeros())
}

/// Encodes rows of `cols` values in groups of `group`.
pub(super) fn pack_rows<L: Levels>(
    values: &[f32],
    cols: usize,
    group: usize,
    out: &mut Packed<'_>,
) -> Result<Loss, BadValue> {
    dispatch(PackRows::<L> { values, cols, group, out, levels: PhantomData })
}

/// The inverse of [`pack_rows`], for one row.
pub(super) fn unpack_row<L: Levels>(weights: &[u8], scales: &[u8], group: usize, out: &mut [f32]) {
    let inputs = weights.chunks(group / L::SHIFTS.len() * 4).zip(scales.as_chunks::<2>().0);
    for (out, (weights, scale)) in out.chunks_mut(group).zip(inputs) {
        L::unpack(weights, f16::from_le_bytes(*scale).to_f32(), out);
    }
}

/// The largest group.
const MAX_GROUP: usize = 128;

/// Below this, a largest value cannot be told from zero: half of it is under the least f16.
const TINY: f32 = 1.0 / (1 << 26) as f32;

struct PackRows<'a, 'b, L> {
    values: &'a [f32],
    cols: usize,
    group: usize,
    out: &'a mut Packed<'b>,
    levels: PhantomData<L>,
}

impl<L: Levels> Vectorised for PackRows<'_, '_, L> {
    type Output = Result<Loss, BadValue>;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> Self::Output {
        let Self { values, cols, group, out, .. } = self;
        if let Some(bad) = BadValue::first_not_finite(values) {
            return Err(bad);
        }
        let in_row = cols.div_ceil(group);
        let groups = values.len() / cols * in_row;
        let per_word = L::SHIFTS.len();
        let mut lanes = [[0.0; LANES]; MAX_GROUP];
        let mut loss = Loss::default();
        for first in (0..groups).step_by(LANES) {
            let used = LANES.min(groups - first);
            let place = |at: usize| {
                let (row, g) = (at / in_row, at % in_row);
                Place {
                    from: row * cols + g * group,
                    len: group.min(cols - g * group),
                    to: row * out.row_bytes + 4 * g * (group / per_word),
                    scale_to: row * out.scale_row_bytes + 2 * g,
                }
            };
            let places: [Place; LANES] =
                std::array::from_fn(|lane| if lane < used { place(first + lane) } else { Place::default() });
            let x = &mut lanes[..places.iter().fold(0, |a, p| a.max(p.len)).next_multiple_of(8)];
            if places.iter().any(|p| p.len < x.len()) {
                x.fill([0.0; LANES]);
            }
            for (lane, p) in places.iter().enumerate() {
                for (x, &v) in x.iter_mut().zip(&values[p.from..][..p.len]) {
                    x[lane] = v;
                }
            }
            let chosen = choose::<L, S>(simd, x).map_err(|lane| {
                let Place { from, len, .. } = places[lane];
                let size = |at: &usize| values[*at].abs();
                let at = (from..from + len).max_by(|a, b| size(a).total_cmp(&size(b))).unwrap_or(from);
                BadValue { at, value: values[at], reason: BadValue::TOO_LARGE }
            })?;
            for (lane, p) in places[..used].iter().enumerate() {
                loss += Loss { error: chosen.error[lane].into(), norm: chosen.norm[lane].into() };
                let scale = f16::from_f32(chosen.scale[lane]).to_le_bytes();
                out.scales[p.scale_to..][..2].copy_from_slice(&scale);
            }
            let inverse = inverses(&chosen.scale);
            for (j, x) in x.chunks_exact(per_word).enumerate() {
                let words = words::<L, S>(simd, x, &inverse);
                for (p, word) in places.iter().zip(words).filter(|(p, _)| j * per_word < p.len) {
                    out.weights[p.to + 4 * j..][..4].copy_from_slice(&word.to_le_bytes());
                }
            }
        }
        Ok(loss)
    }
}

/// What was chosen for each lane's group.
struct Chosen {
    /// An f16 number.
    scale: [f32; LANES],
    /// Squared error, and the sum of squares of the values.
    error: [f32; LANES],
    norm: [f32; LANES],
}

/// Where one lane's group is.
#[derive(Clone, Copy, Default)]
struct Place {
    /// Its first value, and how many there are; none in a lane that is not used.
    from: usize,
    len: usize,
    /// Its first word's and its scale's first byte.
    to: usize,
    scale_to: usize,
}

/// Chooses for sixteen zero-padded groups, `x[i][lane]` value `i` of a lane's; or names a lane whose values are too large.
#[inline(always)]
fn choose<L: Levels, S: Simd>(simd: S, x: &[[f32; LANES]]) -> Result<Chosen, usize> {
    let zero = simd.splat(0.0);
    let (mut m, mut most, mut norm) = (zero, zero, zero);
    for x in x {
        let x = simd.load(x);
        let size = simd.abs(x);
        m = simd.select_gt(size, most, x, m);
        most = simd.max(most, size);
        norm = simd.add(norm, simd.mul(x, x));
    }
    let m = array(simd, m);
    if let Some(lane) = m.iter().position(|m| m.abs() > MAX_F16 * L::LO.abs() as f32) {
        return Err(lane);
    }
    let mut inverse = m.map(|m| if m.abs() < TINY { 0.0 } else { 1.0 / m });
    let mut scale = [0.0; LANES];
    exact_scales::<L, S>(simd, x, &m, &inverse, &mut scale);
    for (inverse, scale) in inverse.iter_mut().zip(scale) {
        if scale != 0.0 {
            *inverse = 0.0;
        }
    }
    if inverse.iter().all(|i| *i == 0.0) {
        // Exact, or all zero.
        let error = Fit::of::<L, S>(simd, x, &scale).error;
        return Ok(Chosen { scale, error: array(simd, error), norm: array(simd, norm) });
    }
    let mut best = Best { scale: simd.load(&scale), error: norm };
    if scale.iter().any(|s| *s != 0.0) {
        let error = Fit::of::<L, S>(simd, x, &scale).error;
        best.error = simd.select_gt(simd.abs(best.scale), zero, error, best.error);
    }
    let fitted = if S::WIDE {
        search::<L, S, 4>(simd, x, simd.load(&inverse))
    } else {
        search::<L, S, 2>(simd, x, simd.load(&inverse))
    };
    let unclipped = m.map(|m| not_below(m.abs() / L::HI as f32));
    best.consider(simd, &unclipped, Fit::of::<L, S>(simd, x, &unclipped));
    let fitted = within::<L>(&fitted, &m, &inverse);
    let fit = Fit::of::<L, S>(simd, x, &fitted);
    let refitted = within::<L>(&fit.scale(simd), &m, &inverse);
    best.consider(simd, &fitted, fit);
    best.consider(simd, &refitted, Fit::of::<L, S>(simd, x, &refitted));
    Ok(Chosen { scale: array(simd, best.scale), error: array(simd, best.error), norm: array(simd, norm) })
}

#[inline(always)]
fn array<S: Simd>(simd: S, v: S::V) -> [f32; LANES] {
    let mut out = [0.0; LANES];
    simd.store(v, &mut out);
    out
}

/// The greatest f16.
const MAX_F16: f32 = 65504.0;

/// The nearest f16, ties to even, of a number within its range.
#[inline(always)]
fn nearest_f16(s: f32) -> f32 {
    // A number so much larger than `s` that their sum ends where an f16 does (2^-24 at the least).
    let exponent = (s.to_bits() & 0x7f80_0000).max(113 << 23);
    let round = 1.5 * f32::from_bits(exponent + (13 << 23));
    (s + round) - round
}

/// The least f16 that is not below `s`, for `s >= 0`.
#[inline(always)]
fn not_below(s: f32) -> f32 {
    let s = s.min(MAX_F16);
    let near = nearest_f16(s);
    let ulp = f32::from_bits((s.to_bits() & 0x7f80_0000).max(113 << 23) - (10 << 23));
    if near < s { near + ulp } else { near }
}

/// The nearest f16 of each scale with its divisor held within the documented range; 0 where `inverse` is.
#[inline(always)]
fn within<L: Levels>(scale: &[f32; LANES], m: &[f32; LANES], inverse: &[f32; LANES]) -> [f32; LANES] {
    std::array::from_fn(|l| {
        // The largest magnitude is on the side of `LO`, so the scale has the other sign than `m`.
        let divisor = (-m[l] / scale[l]).clamp(L::MIN_DIVISOR, L::MAX_DIVISOR);
        if inverse[l] == 0.0 { 0.0 } else { nearest_f16((-m[l] / divisor).clamp(-MAX_F16, MAX_F16)) }
    })
}

/// Adding and taking away 1.5 * 2^23 rounds in the addition.
const ROUND: f32 = 12_582_912.0;

/// Clamps to the levels and rounds to the nearest integer, ties to even.
#[inline(always)]
fn nearest<L: Levels, S: Simd>(simd: S, v: S::V) -> S::V {
    simd.sub(shifted::<L, S>(simd, v), simd.splat(ROUND))
}

/// The same with [`ROUND`] still in it: the low bits are those of the integer.
#[inline(always)]
fn shifted<L: Levels, S: Simd>(simd: S, v: S::V) -> S::V {
    simd.add(simd.clamp(v, L::LO as f32, L::HI as f32), simd.splat(ROUND))
}

/// The best scale of the best divisor's integers; NaN where `inverse` is 0.
#[inline(always)]
fn search<L: Levels, S: Simd, const AT_ONCE: usize>(
    simd: S,
    x: &[[f32; LANES]],
    inverse: S::V,
) -> [f32; LANES] {
    let zero = simd.splat(0.0);
    let (mut scale, mut score) = (zero, zero);
    for divisors in L::GRID.as_chunks::<AT_ONCE>().0 {
        let inverses: [S::V; AT_ONCE] = std::array::from_fn(|c| simd.mul(inverse, simd.splat(-divisors[c])));
        let (mut xq, mut qq) = ([zero; AT_ONCE], [zero; AT_ONCE]);
        for x in x {
            let x = simd.load(x);
            for ((inverse, xq), qq) in inverses.iter().zip(&mut xq).zip(&mut qq) {
                let q = nearest::<L, S>(simd, simd.mul(x, *inverse));
                *xq = simd.add(*xq, simd.mul(x, q));
                *qq = simd.fma(q, q, *qq);
            }
        }
        for (xq, qq) in xq.into_iter().zip(qq) {
            let fitted = simd.div(xq, qq);
            let this = simd.mul(xq, fitted);
            scale = simd.select_gt(this, score, fitted, scale);
            score = simd.select_gt(this, score, this, score);
        }
    }
    array(simd, scale)
}

/// What a scale gives: its squared error, and the sums from which its integers' best scale follows.
struct Fit<V> {
    error: V,
    xq: V,
    qq: V,
}

impl<V: Copy> Fit<V> {
    #[inline(always)]
    fn of<L: Levels, S: Simd<V = V>>(simd: S, x: &[[f32; LANES]], scale: &[f32; LANES]) -> Self {
        let inverse = simd.load(&inverses(scale));
        let scale = simd.load(scale);
        let zero = simd.splat(0.0);
        let mut this = Self { error: zero, xq: zero, qq: zero };
        for x in x {
            let x = simd.load(x);
            let q = nearest::<L, S>(simd, simd.mul(x, inverse));
            let e = simd.sub(x, simd.mul(scale, q));
            this.error = simd.add(this.error, simd.mul(e, e));
            this.xq = simd.add(this.xq, simd.mul(x, q));
            this.qq = simd.fma(q, q, this.qq);
        }
        this
    }

    #[inline(always)]
    fn scale<S: Simd<V = V>>(&self, simd: S) -> [f32; LANES] {
        array(simd, simd.div(self.xq, self.qq))
    }
}

#[inline(always)]
fn inverses(scale: &[f32; LANES]) -> [f32; LANES] {
    scale.map(|s| if s == 0.0 { 0.0 } else { 1.0 / s })
}

/// The best scales so far and their squared errors.
struct Best<V> {
    scale: V,
    error: V,
}

impl<V: Copy> Best<V> {
    #[inline(always)]
    fn consider<S: Simd<V = V>>(&mut self, simd: S, scale: &[f32; LANES], fit: Fit<V>) {
        self.scale = simd.select_gt(self.error, fit.error, simd.load(scale), self.scale);
        self.error = simd.select_gt(self.error, fit.error, fit.error, self.error);
    }
}

/// Sets the scales of lanes where an f16 `m / t` reproduces every value.
#[inline(always)]
fn exact_scales<L: Levels, S: Simd>(
    simd: S,
    x: &[[f32; LANES]],
    m: &[f32; LANES],
    inverse: &[f32; LANES],
    scale: &mut [f32; LANES],
) {
    // Every value a multiple of `m / t` is one of `m / (2 t)` too, as long as that is an f16.
    let least =
        m.iter().zip(inverse).filter(|(_, i)| **i != 0.0).fold(f32::INFINITY, |a, (m, _)| a.min(m.abs()));
    // Where |t| <= HI, a scale and its negative hold the same values, so one sign of t suffices.
    for t in (L::LO..-L::HI).rev().chain((1..=L::HI).rev()) {
        let halved_is_f16 = least >= t as f32 / (1 << 13) as f32;
        if (1..=L::HI / 2).contains(&t) && L::LO == -L::HI && halved_is_f16 {
            return;
        }
        let (up, down) = (t as f32, 1.0 / t as f32);
        let s: [f32; LANES] = std::array::from_fn(|l| nearest_f16((m[l] * down).clamp(-MAX_F16, MAX_F16)));
        let off = std::array::from_fn(|l| {
            let open = inverse[l] != 0.0 && scale[l] == 0.0;
            if open { (s[l] * up - m[l]).abs() } else { 1.0 }
        });
        if !any_zero(&off) {
            continue;
        }
        let (mut off, by, s_) =
            (simd.load(&off), simd.mul(simd.load(inverse), simd.splat(up)), simd.load(&s));
        let mut open = true;
        for x in x.chunks_exact(2) {
            for x in x {
                let x = simd.load(x);
                let q = nearest::<L, S>(simd, simd.mul(x, by));
                off = simd.max(off, simd.abs(simd.sub(x, simd.mul(s_, q))));
            }
            open = any_zero(&array(simd, off));
            if !open {
                break;
            }
        }
        if open {
            for (l, off) in array(simd, off).into_iter().enumerate() {
                if off == 0.0 {
                    scale[l] = s[l];
                }
            }
        }
    }
}

#[inline(always)]
fn any_zero(v: &[f32; LANES]) -> bool {
    v.iter().fold(false, |any, v| any | (*v == 0.0))
}

/// The words of as many columns as a word holds.
#[inline(always)]
fn words<L: Levels, S: Simd>(simd: S, x: &[[f32; LANES]], inverse: &[f32; LANES]) -> [u32; LANES] {
    let inverse = simd.load(inverse);
    let mask = u32::MAX >> (32 - 32 / L::SHIFTS.len());
    let mut words = [0; LANES];
    for (x, shift) in x.iter().zip(L::SHIFTS) {
        let q = array(simd, shifted::<L, S>(simd, simd.mul(simd.load(x), inverse)));
        for (word, q) in words.iter_mut().zip(q) {
            let q = q.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_add(L::BIAS as u32);
            *word |= (q & mask) << shift;
        }
    }
    words
}
