//! The scale of one group of quantised weights: exact where an exact one exists, else least squares over a grid.
//!
//! Let `m` be the value of largest magnitude.
//! 1. If some f16 `s = m / t` with integer `t` reproduces every value as `s * q`, it is taken. Values that come from
//!    GGUF's Q8_0 or Q4_0 blocks are therefore kept exactly.
//! 2. Otherwise every `m / t` of a small grid of divisors is rounded to f16 and tried, then the least squares fit
//!    `sum(x q) / sum(q^2)` for the best one's `q`, and what leaves the least squared error is taken. Clipping the
//!    largest value a little often pays at four bits (the same idea as llama.cpp's `make_qx_quants`).
//!
//! The grid holds a scale that clips nothing (unless that passes the range of f16), so the group's squared error is never more than that of plain
//! `max / largest q`. The result depends on the values alone: the same sums in the same order on every machine.

use std::marker::PhantomData;

use half::f16;

use super::BadValue;
use crate::simd::{LANES, Simd, Vectorised, dispatch};

/// The integers that a format can hold and the divisors that are tried for it.
pub(super) trait Levels {
    /// Least `q`.
    const LO: i32;
    /// Greatest `q`; its magnitude is at most that of `LO`.
    const HI: i32;
    /// Divisors of `m`; negative ones map `m` to the side of `LO`.
    const GRID: &'static [f32];
    /// Least magnitude of a divisor, so that a fitted scale stays within the documented bound.
    const MIN_DIVISOR: f32;
    /// Greatest magnitude of a divisor.
    const MAX_DIVISOR: f32;
    /// Bits of a weight.
    const BITS: usize;

    /// Writes a group's integers, padded with 0 to a multiple of 8, to its bytes, which may end before the padding.
    fn pack(q: &[i8], bytes: &mut [u8]);

    /// Reads as many as `out` has, times `scale`.
    fn unpack(bytes: &[u8], scale: f32, out: &mut [f32]);
}

/// Encodes a row in groups of `group`: integers to `weights`, a scale each to `scales`, both zero on entry.
pub(super) fn pack_row<L: Levels>(
    values: &[f32],
    group: usize,
    weights: &mut [u8],
    scales: &mut [u8],
) -> Result<(), BadValue> {
    if let Some(bad) = BadValue::first_not_finite(values) {
        return Err(bad);
    }
    let mut packed = Group::new();
    let outputs = weights.chunks_mut(group * L::BITS / 8).zip(scales.as_chunks_mut::<2>().0);
    for (g, (values, (weights, scale))) in values.chunks(group).zip(outputs).enumerate() {
        let s = packed.quantise::<L>(values).map_err(|e| BadValue { col: g * group + e.col, ..e })?;
        *scale = s.to_le_bytes();
        L::pack(&packed.q[..values.len().next_multiple_of(8)], weights);
    }
    Ok(())
}

/// The inverse of [`pack_row`].
pub(super) fn unpack_row<L: Levels>(weights: &[u8], scales: &[u8], group: usize, out: &mut [f32]) {
    let inputs = weights.chunks(group * L::BITS / 8).zip(scales.as_chunks::<2>().0);
    for (out, (weights, scale)) in out.chunks_mut(group).zip(inputs) {
        L::unpack(weights, f16::from_le_bytes(*scale).to_f32(), out);
    }
}

/// The largest group.
const MAX_GROUP: usize = 128;

/// One group on its way: the values, zero-padded, and their integers.
struct Group {
    values: [f32; MAX_GROUP],
    /// `q` of each value; 0 beyond the group.
    q: [i8; MAX_GROUP],
}

impl Group {
    fn new() -> Self {
        Self { values: [0.0; MAX_GROUP], q: [0; MAX_GROUP] }
    }

    /// Chooses the scale of `values` (finite, at most [`MAX_GROUP`]) and sets `self.q`.
    fn quantise<L: Levels>(&mut self, values: &[f32]) -> Result<f16, BadValue> {
        self.values[..values.len()].copy_from_slice(values);
        self.values[values.len()..].fill(0.0);
        let (col, m) =
            values.iter().enumerate().fold((0, 0.0f32), |(at, m), (i, &v)| match v.abs() > m.abs() {
                true => (i, v),
                false => (at, m),
            });
        if m.abs() > f16::MAX.to_f32() * L::LO.abs() as f32 {
            return Err(BadValue { col, value: m, reason: BadValue::TOO_LARGE });
        }
        let blocks = values.len().div_ceil(LANES);
        let work =
            Quantise::<L> { x: &self.values.as_chunks().0[..blocks], m, q: &mut self.q, levels: PhantomData };
        Ok(dispatch(work))
    }
}

struct Quantise<'a, L> {
    x: &'a [[f32; LANES]],
    m: f32,
    q: &'a mut [i8; MAX_GROUP],
    levels: PhantomData<L>,
}

impl<L: Levels> Vectorised for Quantise<'_, L> {
    type Output = f16;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> f16 {
        self.q.fill(0);
        if self.m == 0.0 {
            return f16::ZERO;
        }
        let x = self.x;
        let exact = exact_scale::<L>(x, self.m);
        let scale = exact.unwrap_or_else(|| best_scale::<L, S>(simd, x, self.m));
        let s = scale.to_f32();
        if s != 0.0 {
            for (&v, q) in x.as_flattened().iter().zip(self.q) {
                *q = nearest::<L>(v * (1.0 / s)) as i8;
            }
        }
        scale
    }
}

/// Clamps to the levels and rounds to the nearest integer, ties to even.
#[inline(always)]
fn nearest<L: Levels>(v: f32) -> f32 {
    (v.clamp(L::LO as f32, L::HI as f32) + ROUND) - ROUND
}

/// Adding and taking away 1.5 * 2^23 rounds in the addition.
const ROUND: f32 = 12_582_912.0;

/// The same on sixteen lanes.
#[inline(always)]
fn nearest_lanes<L: Levels, S: Simd>(simd: S, v: S::V) -> S::V {
    let round = simd.splat(ROUND);
    simd.sub(simd.add(simd.clamp(v, L::LO as f32, L::HI as f32), round), round)
}

/// The f16 scale `m / t` that reproduces every value, if there is one.
#[inline(always)]
fn exact_scale<L: Levels>(x: &[[f32; LANES]], m: f32) -> Option<f16> {
    // Where |t| <= HI, a scale and its negative hold the same values, so one sign of t suffices.
    for t in (L::LO..-L::HI).rev().chain((1..=L::HI).rev()) {
        let s = m / t as f32;
        // A normal f16 leaves the 13 low bits of an f32 zero; most candidates end here.
        if s.to_bits() & 0x1fff != 0 && s.abs() >= f16::MIN_POSITIVE.to_f32() {
            continue;
        }
        let scale = f16::from_f32(s);
        let holds = |v: f32| nearest::<L>(v / s) * s == v;
        if scale.to_f32() == s && s != 0.0 && x.as_flattened().iter().all(|&v| holds(v)) {
            return Some(scale);
        }
    }
    None
}

/// The best candidate so far and its squared error.
struct Best {
    scale: f16,
    error: f32,
}

impl Best {
    #[inline(always)]
    fn consider<L: Levels, S: Simd>(&mut self, simd: S, x: &[[f32; LANES]], scale: f16) {
        let error = squared_error::<L, S>(simd, x, scale.to_f32());
        if scale.is_finite() && error < self.error {
            *self = Self { scale, error };
        }
    }
}

#[inline(always)]
fn best_scale<L: Levels, S: Simd>(simd: S, x: &[[f32; LANES]], m: f32) -> f16 {
    let mut best = Best { scale: f16::ZERO, error: squared_error::<L, S>(simd, x, 0.0) };
    best.consider::<L, S>(simd, x, rounded_up(m.abs() / L::HI as f32));
    for t in L::GRID {
        best.consider::<L, S>(simd, x, f16::from_f32(m / t));
    }
    let (least, most) = (m.abs() / L::MAX_DIVISOR, m.abs() / L::MIN_DIVISOR);
    for _ in 0..2 {
        let fitted = least_squares::<L, S>(simd, x, best.scale.to_f32());
        if fitted == best.scale || fitted.to_f32().abs() < least || fitted.to_f32().abs() > most {
            break;
        }
        best.consider::<L, S>(simd, x, fitted);
    }
    best.scale
}

/// The least f16 that is not below `s`, for `s > 0`.
fn rounded_up(s: f32) -> f16 {
    let near = f16::from_f32(s);
    if near.to_f32() < s { f16::from_bits(near.to_bits() + 1) } else { near }
}

// No fused multiply-add here: a packed file must not depend on the machine that packed it.
#[inline(always)]
fn squared_error<L: Levels, S: Simd>(simd: S, x: &[[f32; LANES]], s: f32) -> f32 {
    let (scale, inverse) = (simd.splat(s), simd.splat(if s == 0.0 { 0.0 } else { 1.0 / s }));
    let mut sum = simd.splat(0.0);
    for block in x {
        let x = simd.load(block);
        let e = simd.sub(x, simd.mul(scale, nearest_lanes::<L, S>(simd, simd.mul(x, inverse))));
        sum = simd.add(sum, simd.mul(e, e));
    }
    simd.sum(sum)
}

/// The scale that fits best the integers that `s` gives, in f16; 0 when they are all 0.
#[inline(always)]
fn least_squares<L: Levels, S: Simd>(simd: S, x: &[[f32; LANES]], s: f32) -> f16 {
    if s == 0.0 {
        return f16::ZERO;
    }
    let inverse = simd.splat(1.0 / s);
    let (mut xq, mut qq) = (simd.splat(0.0), simd.splat(0.0));
    for block in x {
        let x = simd.load(block);
        let q = nearest_lanes::<L, S>(simd, simd.mul(x, inverse));
        xq = simd.add(xq, simd.mul(x, q));
        qq = simd.add(qq, simd.mul(q, q));
    }
    let qq = simd.sum(qq);
    if qq == 0.0 { f16::ZERO } else { f16::from_f32(simd.sum(xq) / qq) }
}
