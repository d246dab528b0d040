//! Sixteen F32 lanes on whatever vector unit the processor has, chosen once at run time.
//!
//! Code is written once against [`Simd`] and compiled for each implementation. The lane structure is the same in
//! all of them, so AVX2 and AVX-512 give the same bits. [`Simd::fma`] rounds once where the processor can (x86 with
//! AVX2 and FMA, aarch64); elsewhere it rounds twice and results differ in the last bits between machines, never on one.
//!
//! A value of an implementation's type is the proof that the processor has its instructions: [`dispatch`] alone
//! makes one, after asking the processor.

use crate::format::mxfp4::VALUES as E2M1;

/// Lanes of a vector.
pub(crate) const LANES: usize = 16;

/// Where column `c` of a word of eight 4-bit weights starts, in bits (see `format::int4`).
pub(crate) const NIBBLE_SHIFTS: [u32; 8] = [0, 16, 4, 20, 8, 24, 12, 28];

/// A vector unit. Every method is inlined into the function that [`dispatch`] enters.
pub(crate) trait Simd: Copy {
    /// Sixteen F32.
    type V: Copy;
    /// What one scale makes of the sixteen 4-bit weights.
    type Nibbles: Copy;
    /// Whether there are registers for a tile of 16 accumulators.
    const WIDE: bool;

    fn splat(self, x: f32) -> Self::V;
    fn load(self, x: &[f32; LANES]) -> Self::V;
    fn store(self, v: Self::V, out: &mut [f32; LANES]);
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    /// The greater of two numbers.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// `x` where `a > b`, else `y`; so `y` where `a` or `b` is NaN.
    fn select_gt(self, a: Self::V, b: Self::V, x: Self::V, y: Self::V) -> Self::V;
    /// `a * b + c`
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// Clamps finite values.
    fn clamp(self, v: Self::V, lo: f32, hi: f32) -> Self::V;
    /// Sixteen BF16.
    fn bf16(self, bytes: &[u8; 32]) -> Self::V;
    /// Sixteen signed bytes.
    fn int8(self, bytes: &[u8; 16]) -> Self::V;
    /// Prepares [`Self::int4`].
    fn nibbles(self, scale: f32) -> Self::Nibbles;
    /// Sixteen 4-bit weights times the scale.
    fn int4(self, bytes: &[u8; 8], scale: Self::Nibbles) -> Self::V;
    /// Prepares [`Self::mxfp4`].
    fn codes(self, scale: f32) -> Self::Nibbles;
    /// Sixteen E2M1 numbers times the scale.
    fn mxfp4(self, bytes: &[u8; 8], scale: Self::Nibbles) -> Self::V;

    /// Magnitudes.
    #[inline(always)]
    fn abs(self, v: Self::V) -> Self::V {
        self.max(v, self.sub(self.splat(0.0), v))
    }

    /// The sum of the lanes, halves onto halves.
    #[inline(always)]
    fn sum(self, v: Self::V) -> f32 {
        let mut a = [0.0; LANES];
        self.store(v, &mut a);
        let b: [f32; 8] = std::array::from_fn(|i| a[i] + a[i + 8]);
        let c: [f32; 4] = std::array::from_fn(|i| b[i] + b[i + 4]);
        (c[0] + c[2]) + (c[1] + c[3])
    }
}

/// Work that is compiled for every vector unit. `run` must be `#[inline(always)]`, and so must what it calls: only
/// code inlined into [`dispatch`]'s functions gets their instructions (closures do not).
pub(crate) trait Vectorised {
    type Output;
    fn run<S: Simd>(self, simd: S) -> Self::Output;
}

/// A vector unit by name: tests choose one.
#[derive(Debug, Clone, Copy, PartialEq)]
#[cfg_attr(not(test), allow(dead_code, reason = "only tests ask for less than the widest"))]
pub(crate) enum Unit {
    Portable,
    Avx2,
    Avx512,
}

/// Runs `work` on the best vector unit that there is.
#[inline]
pub(crate) fn dispatch<W: Vectorised>(work: W) -> W::Output {
    #[cfg(test)]
    let widest = tests::WIDEST.get();
    #[cfg(not(test))]
    let widest = Unit::Avx512;
    if widest == Unit::Portable {
        return work.run(Portable);
    }
    #[cfg(target_arch = "x86_64")]
    {
        if widest == Unit::Avx512 && x86::Avx512::available() {
            // SAFETY: the processor has the instructions, asked in the line above.
            return unsafe { x86::avx512(work) };
        }
        if x86::Avx2::available() {
            // SAFETY: the processor has the instructions, asked in the line above.
            return unsafe { x86::avx2(work) };
        }
    }
    work.run(Portable)
}

/// The vector unit in force, for people to read.
pub(crate) fn name() -> &'static str {
    #[cfg(target_arch = "x86_64")]
    {
        if x86::Avx512::available() {
            return "AVX-512";
        }
        if x86::Avx2::available() {
            return "AVX2";
        }
    }
    "no vector unit of its own"
}

/// Arrays, for processors without a unit of their own here; the compiler vectorises what it can.
#[derive(Clone, Copy)]
pub(crate) struct Portable;

#[inline(always)]
fn map2(a: [f32; LANES], b: [f32; LANES], f: impl Fn(f32, f32) -> f32) -> [f32; LANES] {
    std::array::from_fn(|l| f(a[l], b[l]))
}

impl Simd for Portable {
    type V = [f32; LANES];
    type Nibbles = f32;
    const WIDE: bool = false;

    #[inline(always)]
    fn splat(self, x: f32) -> Self::V {
        [x; LANES]
    }
    #[inline(always)]
    fn load(self, x: &[f32; LANES]) -> Self::V {
        *x
    }
    #[inline(always)]
    fn store(self, v: Self::V, out: &mut [f32; LANES]) {
        *out = v;
    }
    #[inline(always)]
    fn add(self, a: Self::V, b: Self::V) -> Self::V {
        map2(a, b, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, a: Self::V, b: Self::V) -> Self::V {
        map2(a, b, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, a: Self::V, b: Self::V) -> Self::V {
        map2(a, b, |a, b| a * b)
    }
    #[inline(always)]
    fn div(self, a: Self::V, b: Self::V) -> Self::V {
        map2(a, b, |a, b| a / b)
    }
    #[inline(always)]
    fn max(self, a: Self::V, b: Self::V) -> Self::V {
        map2(a, b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn select_gt(self, a: Self::V, b: Self::V, x: Self::V, y: Self::V) -> Self::V {
        std::array::from_fn(|l| if a[l] > b[l] { x[l] } else { y[l] })
    }
    #[inline(always)]
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        // Without an instruction for it, mul_add is a slow library call.
        const FUSED: bool = cfg!(any(target_arch = "aarch64", target_feature = "fma"));
        std::array::from_fn(|l| if FUSED { a[l].mul_add(b[l], c[l]) } else { a[l] * b[l] + c[l] })
    }
    #[inline(always)]
    fn clamp(self, v: Self::V, lo: f32, hi: f32) -> Self::V {
        v.map(|v| v.clamp(lo, hi))
    }
    #[inline(always)]
    fn bf16(self, bytes: &[u8; 32]) -> Self::V {
        std::array::from_fn(|l| {
            f32::from_bits(u32::from(u16::from_le_bytes([bytes[2 * l], bytes[2 * l + 1]])) << 16)
        })
    }
    #[inline(always)]
    fn int8(self, bytes: &[u8; 16]) -> Self::V {
        bytes.map(|b| f32::from(b as i8))
    }
    #[inline(always)]
    fn nibbles(self, scale: f32) -> f32 {
        scale
    }
    #[inline(always)]
    fn int4(self, bytes: &[u8; 8], scale: f32) -> Self::V {
        let words = bytes.as_chunks::<4>().0;
        let words = [u32::from_le_bytes(words[0]), u32::from_le_bytes(words[1])];
        std::array::from_fn(|l| {
            let n = words[l / 8] >> NIBBLE_SHIFTS[l % 8] & 15;
            (n as i32 - 8) as f32 * scale
        })
    }
    #[inline(always)]
    fn codes(self, scale: f32) -> f32 {
        scale
    }
    #[inline(always)]
    fn mxfp4(self, bytes: &[u8; 8], scale: f32) -> Self::V {
        let words = bytes.as_chunks::<4>().0;
        let words = [u32::from_le_bytes(words[0]), u32::from_le_bytes(words[1])];
        std::array::from_fn(|l| E2M1[(words[l / 8] >> NIBBLE_SHIFTS[l % 8] & 15) as usize] * scale)
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{E2M1, LANES, NIBBLE_SHIFTS, Simd, Vectorised};

    #[target_feature(enable = "avx2,fma")]
    pub(super) fn avx2<W: Vectorised>(work: W) -> W::Output {
        work.run(Avx2(()))
    }

    #[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")]
    pub(super) fn avx512<W: Vectorised>(work: W) -> W::Output {
        work.run(Avx512(()))
    }

    /// Two 256-bit registers. Made only where AVX2 and FMA are there.
    #[derive(Clone, Copy)]
    pub(super) struct Avx2(());

    impl Avx2 {
        #[inline]
        pub(super) fn available() -> bool {
            is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")
        }
    }

    /// One 512-bit register. Made only where AVX-512 F, BW, DQ and VL are there.
    #[derive(Clone, Copy)]
    pub(super) struct Avx512(());

    impl Avx512 {
        #[inline]
        pub(super) fn available() -> bool {
            is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
                && Avx2::available()
        }
    }

    impl Simd for Avx2 {
        type V = [__m256; 2];
        type Nibbles = [__m256; 2];
        const WIDE: bool = false;

        #[inline(always)]
        fn splat(self, x: f32) -> Self::V {
            // SAFETY: an `Avx2` exists only where the processor has AVX2 and FMA.
            unsafe { [_mm256_set1_ps(x); 2] }
        }
        #[inline(always)]
        fn load(self, x: &[f32; LANES]) -> Self::V {
            // SAFETY: as in `splat`; `x` holds 16 floats and the loads need no alignment.
            unsafe { [_mm256_loadu_ps(x.as_ptr()), _mm256_loadu_ps(x.as_ptr().add(8))] }
        }
        #[inline(always)]
        fn store(self, v: Self::V, out: &mut [f32; LANES]) {
            // SAFETY: as in `splat`; `out` holds 16 floats and the stores need no alignment.
            unsafe {
                _mm256_storeu_ps(out.as_mut_ptr(), v[0]);
                _mm256_storeu_ps(out.as_mut_ptr().add(8), v[1]);
            }
        }
        #[inline(always)]
        fn add(self, a: Self::V, b: Self::V) -> Self::V {
            // SAFETY: as in `splat`.
            unsafe { [_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])] }
        }
        #[inline(always)]
        fn sub(self, a: Self::V, b: Self::V) -> Self::V {
            // SAFETY: as in `splat`.
            unsafe { [_mm256_sub_ps(a[0], b[0]), _mm256_sub_ps(a[1], b[1])] }
        }
        #[inline(always)]
        fn mul(self, a: Self::V, b: Self::V) -> Self::V {
            // SAFETY: as in `splat`.
            unsafe { [_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])] }
        }
        #[inline(always)]
        fn div(self, a: Self::V, b: Self::V) -> Self::V {
            // SAFETY: as in `splat`.
            unsafe { [_mm256_div_ps(a[0], b[0]), _mm256_div_ps(a[1], b[1])] }
        }
        #[inline(always)]
        fn max(self, a: Self::V, b: Self::V) -> Self::V {
            // SAFETY: as in `splat`.
            unsafe { [_mm256_max_ps(a[0], b[0]), _mm256_max_ps(a[1], b[1])] }
        }
        #[inline(always)]
        fn select_gt(self, a: Self::V, b: Self::V, x: Self::V, y: Self::V) -> Self::V {
            // SAFETY: as in `splat`.
            unsafe { [0, 1].map(|i| _mm256_blendv_ps(y[i], x[i], _mm256_cmp_ps::<_CMP_GT_OQ>(a[i], b[i]))) }
        }
        #[inline(always)]
        fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
            // SAFETY: as in `splat`.
            unsafe { [_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])] }
        }
        #[inline(always)]
        fn clamp(self, v: Self::V, lo: f32, hi: f32) -> Self::V {
            // SAFETY: as in `splat`.
            unsafe {
                let (lo, hi) = (_mm256_set1_ps(lo), _mm256_set1_ps(hi));
                [_mm256_min_ps(_mm256_max_ps(v[0], lo), hi), _mm256_min_ps(_mm256_max_ps(v[1], lo), hi)]
            }
        }
        #[inline(always)]
        fn bf16(self, bytes: &[u8; 32]) -> Self::V {
            // SAFETY: as in `splat`; the two loads read 16 bytes each of 32, without alignment.
            unsafe {
                let halves = [bytes.as_ptr().cast(), bytes.as_ptr().add(16).cast()];
                halves.map(|p| {
                    let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(p));
                    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
                })
            }
        }
        #[inline(always)]
        fn int8(self, bytes: &[u8; 16]) -> Self::V {
            // SAFETY: as in `splat`; the two loads read 8 bytes each of 16, without alignment.
            unsafe {
                let halves = [bytes.as_ptr().cast(), bytes.as_ptr().add(8).cast()];
                halves.map(|p| _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(p))))
            }
        }
        #[inline(always)]
        fn nibbles(self, scale: f32) -> Self::Nibbles {
            // SAFETY: as in `splat`.
            unsafe { [_mm256_set1_ps(scale), _mm256_set1_ps(-8.0 * scale)] }
        }
        #[inline(always)]
        fn int4(self, bytes: &[u8; 8], scale: Self::Nibbles) -> Self::V {
            // n * scale - 8 * scale in one rounding is exact, as (n - 8) * scale is.
            // SAFETY: as in `splat`; the load reads 8 unaligned u32 of an array of 8.
            unsafe {
                let shifts = _mm256_loadu_si256(NIBBLE_SHIFTS.as_ptr().cast());
                let low = _mm256_set1_epi32(15);
                let words = [
                    i32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
                    i32::from_le_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]),
                ];
                words.map(|w| {
                    let n = _mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32(w), shifts), low);
                    _mm256_fmadd_ps(_mm256_cvtepi32_ps(n), scale[0], scale[1])
                })
            }
        }
        #[inline(always)]
        fn codes(self, scale: f32) -> Self::Nibbles {
            let table = self.mul(self.load(&E2M1), self.splat(scale));
            [table[0]; 2]
        }
        #[inline(always)]
        fn mxfp4(self, bytes: &[u8; 8], scale: Self::Nibbles) -> Self::V {
            // The table look-up reads the three low bits of each lane only; the fourth is the sign.
            // SAFETY: as in `splat`; the load reads 8 unaligned u32 of an array of 8.
            unsafe {
                let shifts = _mm256_loadu_si256(NIBBLE_SHIFTS.as_ptr().cast());
                let sign = _mm256_set1_epi32(i32::MIN);
                let words = [
                    i32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
                    i32::from_le_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]),
                ];
                words.map(|w| {
                    let n = _mm256_srlv_epi32(_mm256_set1_epi32(w), shifts);
                    let sign = _mm256_and_si256(_mm256_slli_epi32::<28>(n), sign);
                    _mm256_xor_ps(_mm256_permutevar8x32_ps(scale[0], n), _mm256_castsi256_ps(sign))
                })
            }
        }
    }

    impl Simd for Avx512 {
        type V = __m512;
        type Nibbles = __m512;
        const WIDE: bool = true;

        #[inline(always)]
        fn splat(self, x: f32) -> Self::V {
            // SAFETY: an `Avx512` exists only where the processor has AVX-512 F, BW, DQ and VL.
            unsafe { _mm512_set1_ps(x) }
        }
        #[inline(always)]
        fn load(self, x: &[f32; LANES]) -> Self::V {
            // SAFETY: as in `splat`; `x` holds 16 floats and the load needs no alignment.
            unsafe { _mm512_loadu_ps(x.as_ptr()) }
        }
        #[inline(always)]
        fn store(self, v: Self::V, out: &mut [f32; LANES]) {
            // SAFETY: as in `splat`; `out` holds 16 floats and the store needs no alignment.
            unsafe { _mm512_storeu_ps(out.as_mut_ptr(), v) }
        }
        #[inline(always)]
        fn add(self, a: Self::V, b: Self::V) -> Self::V {
            // SAFETY: as in `splat`.
            unsafe { _mm512_add_ps(a, b) }
        }
        #[inline(always)]
        fn sub(self, a: Self::V, b: Self::V) -> Self::V {
            // SAFETY: as in `splat`.
            unsafe { _mm512_sub_ps(a, b) }
        }
        #[inline(always)]
        fn mul(self, a: Self::V, b: Self::V) -> Self::V {
            // SAFETY: as in `splat`.
            unsafe { _mm512_mul_ps(a, b) }
        }
        #[inline(always)]
        fn div(self, a: Self::V, b: Self::V) -> Self::V {
            // SAFETY: as in `splat`.
            unsafe { _mm512_div_ps(a, b) }
        }
        #[inline(always)]
        fn max(self, a: Self::V, b: Self::V) -> Self::V {
            // SAFETY: as in `splat`.
            unsafe { _mm512_max_ps(a, b) }
        }
        #[inline(always)]
        fn select_gt(self, a: Self::V, b: Self::V, x: Self::V, y: Self::V) -> Self::V {
            // SAFETY: as in `splat`.
            unsafe { _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_GT_OQ>(a, b), y, x) }
        }
        #[inline(always)]
        fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
            // SAFETY: as in `splat`.
            unsafe { _mm512_fmadd_ps(a, b, c) }
        }
        #[inline(always)]
        fn clamp(self, v: Self::V, lo: f32, hi: f32) -> Self::V {
            // SAFETY: as in `splat`.
            unsafe { _mm512_min_ps(_mm512_max_ps(v, _mm512_set1_ps(lo)), _mm512_set1_ps(hi)) }
        }
        #[inline(always)]
        fn bf16(self, bytes: &[u8; 32]) -> Self::V {
            // SAFETY: as in `splat`; the load reads the 32 bytes, without alignment.
            unsafe {
                let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(bytes.as_ptr().cast()));
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
            }
        }
        #[inline(always)]
        fn int8(self, bytes: &[u8; 16]) -> Self::V {
            // SAFETY: as in `splat`; the load reads the 16 bytes, without alignment.
            unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(bytes.as_ptr().cast()))) }
        }
        #[inline(always)]
        fn nibbles(self, scale: f32) -> Self::Nibbles {
            const LEVELS: [f32; 16] = {
                let mut levels = [0.0; 16];
                let mut n = 0;
                while n < 16 {
                    levels[n] = n as f32 - 8.0;
                    n += 1;
                }
                levels
            };
            self.mul(self.load(&LEVELS), self.splat(scale))
        }
        #[inline(always)]
        fn int4(self, bytes: &[u8; 8], scale: Self::Nibbles) -> Self::V {
            // The table look-up reads the four low bits of each lane only.
            // SAFETY: as in `splat`; the load reads 8 unaligned u32 of an array of 8.
            unsafe {
                let shifts = _mm512_broadcast_i32x8(_mm256_loadu_si256(NIBBLE_SHIFTS.as_ptr().cast()));
                let low = i32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
                let high = i32::from_le_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]);
                let words = _mm512_mask_set1_epi32(_mm512_set1_epi32(low), 0xff00, high);
                _mm512_permutexvar_ps(_mm512_srlv_epi32(words, shifts), scale)
            }
        }
        #[inline(always)]
        fn codes(self, scale: f32) -> Self::Nibbles {
            self.mul(self.load(&E2M1), self.splat(scale))
        }
        #[inline(always)]
        fn mxfp4(self, bytes: &[u8; 8], scale: Self::Nibbles) -> Self::V {
            // As INT4, with another table.
            self.int4(bytes, scale)
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    thread_local! {
        /// The widest unit that this thread may use.
        pub(crate) static WIDEST: std::cell::Cell<Unit> = const { std::cell::Cell::new(Unit::Avx512) };
    }

    /// Every operation on a few vectors, as bits.
    struct Everything;

    impl Vectorised for Everything {
        type Output = Vec<u32>;

        #[inline(always)]
        fn run<S: Simd>(self, s: S) -> Vec<u32> {
            let bytes: [u8; 32] = std::array::from_fn(|i| (i * 37 + 11) as u8);
            // Exponents kept in range, so that no sum is NaN.
            let halves: [u8; 32] =
                std::array::from_fn(|i| if i % 2 == 1 { 0x3e + (i % 4) as u8 } else { bytes[i] });
            let (low, _) = bytes.as_chunks::<16>();
            let (nibbles, _) = bytes.as_chunks::<8>();
            let x = s.bf16(&halves);
            let q = s.int8(&low[1]);
            let n = s.int4(&nibbles[2], s.nibbles(0.375));
            let e = s.mxfp4(&nibbles[1], s.codes(0.125));
            let nan = s.splat(f32::NAN);
            let mut out = Vec::new();
            let arithmetic = [s.add(x, q), s.sub(x, n), s.mul(q, n), s.div(n, x), s.clamp(q, -8.0, 7.0)];
            let choices = [s.max(x, q), s.abs(q), s.select_gt(x, n, q, x), s.select_gt(nan, n, q, x)];
            for v in [x, q, n, e, s.splat(0.1)].into_iter().chain(arithmetic).chain(choices) {
                let mut a = [0.0; LANES];
                s.store(v, &mut a);
                out.extend(a.map(f32::to_bits));
                out.push(s.sum(v).to_bits());
            }
            out
        }
    }

    struct Fused([f32; LANES], [f32; LANES], [f32; LANES]);

    impl Vectorised for Fused {
        type Output = [f32; LANES];

        #[inline(always)]
        fn run<S: Simd>(self, s: S) -> Self::Output {
            let mut out = [0.0; LANES];
            s.store(s.fma(s.load(&self.0), s.load(&self.1), s.load(&self.2)), &mut out);
            out
        }
    }

    #[test]
    fn every_unit_gives_the_same_bits() {
        let expected = Everything.run(Portable);
        assert_eq!(dispatch(Everything), expected);
        let lanes = |k: f32| std::array::from_fn(|l| (l as f32 * k).sin() + 1.0 / 3.0);
        let (a, b, c): ([f32; LANES], _, _) = (lanes(0.7), lanes(1.3), lanes(2.9));
        let fused: [f32; LANES] = std::array::from_fn(|l| a[l].mul_add(b[l], c[l]));
        #[cfg(target_arch = "x86_64")]
        {
            if x86::Avx2::available() {
                // SAFETY: asked in the line above.
                assert_eq!(unsafe { x86::avx2(Everything) }, expected);
                // SAFETY: asked above.
                assert_eq!(unsafe { x86::avx2(Fused(a, b, c)) }, fused);
            }
            if x86::Avx512::available() {
                // SAFETY: asked in the line above.
                assert_eq!(unsafe { x86::avx512(Everything) }, expected);
                // SAFETY: asked above.
                assert_eq!(unsafe { x86::avx512(Fused(a, b, c)) }, fused);
            }
        }
        for (x, y) in Fused(a, b, c).run(Portable).iter().zip(fused) {
            assert!((x - y).abs() <= f32::EPSILON * 4.0);
        }
    }
}
