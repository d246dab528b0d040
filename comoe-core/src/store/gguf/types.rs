//! ggml's element types: how their blocks are laid out and what they decode to (`ggml-common.h`, `ggml-quants.c`).

use half::{bf16, f16};

use crate::format::mxfp4::{VALUES, power_of_two};

/// A type of a GGUF tensor's elements, of those that are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
#[allow(non_camel_case_types, reason = "the names that everybody knows them by")]
#[expect(missing_docs, reason = "the variants are the names that llama.cpp gives its types")]
pub enum GgmlType {
    F32,
    F16,
    BF16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    MXFP4,
}

/// Number in a file, type, name, weights of a block, bytes of a block.
const TYPES: [(u32, GgmlType, &str, usize, usize); 14] = [
    (0, GgmlType::F32, "F32", 1, 4),
    (1, GgmlType::F16, "F16", 1, 2),
    (2, GgmlType::Q4_0, "Q4_0", 32, 18),
    (3, GgmlType::Q4_1, "Q4_1", 32, 20),
    (6, GgmlType::Q5_0, "Q5_0", 32, 22),
    (7, GgmlType::Q5_1, "Q5_1", 32, 24),
    (8, GgmlType::Q8_0, "Q8_0", 32, 34),
    (10, GgmlType::Q2_K, "Q2_K", 256, 84),
    (11, GgmlType::Q3_K, "Q3_K", 256, 110),
    (12, GgmlType::Q4_K, "Q4_K", 256, 144),
    (13, GgmlType::Q5_K, "Q5_K", 256, 176),
    (14, GgmlType::Q6_K, "Q6_K", 256, 210),
    (30, GgmlType::BF16, "BF16", 1, 2),
    (39, GgmlType::MXFP4, "MXFP4", 32, 17),
];

/// Types that files may hold and that are not read.
const OTHERS: [(u32, &str); 24] = [
    (9, "Q8_1"),
    (15, "Q8_K"),
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (20, "IQ4_NL"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
    (23, "IQ4_XS"),
    (24, "I8"),
    (25, "I16"),
    (26, "I32"),
    (27, "I64"),
    (28, "F64"),
    (29, "IQ1_M"),
    (31, "Q4_0_4_4"),
    (32, "Q4_0_4_8"),
    (33, "Q4_0_8_8"),
    (34, "TQ1_0"),
    (35, "TQ2_0"),
    (36, "IQ4_NL_4_4"),
    (37, "IQ4_NL_4_8"),
    (38, "IQ4_NL_8_8"),
];

impl GgmlType {
    /// The type by its number in a file; the reason, where it is not read.
    pub(super) fn of(number: u32) -> Result<Self, String> {
        if let Some(row) = TYPES.iter().find(|row| row.0 == number) {
            return Ok(row.1);
        }
        let name = OTHERS.iter().find(|o| o.0 == number);
        let name = name.map_or_else(|| format!("number {number}"), |o| o.1.to_owned());
        let known = TYPES.map(|row| row.2).join(", ");
        Err(format!("has the type {name}, which is not supported; supported are {known}"))
    }

    fn row(self) -> &'static (u32, Self, &'static str, usize, usize) {
        // Every variant is in the table, which the tests check.
        TYPES.iter().find(|row| row.1 == self).unwrap_or(&TYPES[0])
    }

    /// As llama.cpp calls it.
    pub fn name(self) -> &'static str {
        self.row().2
    }

    /// Weights of a block.
    pub fn block_weights(self) -> usize {
        self.row().3
    }

    /// Bytes of a block.
    pub fn block_bytes(self) -> usize {
        self.row().4
    }

    /// Bits a weight, scales included.
    pub(in crate::store) fn bits(self) -> f64 {
        (8 * self.block_bytes()) as f64 / self.block_weights() as f64
    }

    /// Decodes whole blocks: `out.len() / block_weights` of them, from as many blocks' bytes.
    pub(super) fn decode(self, bytes: &[u8], out: &mut [f32]) {
        let blocks = out.chunks_exact_mut(self.block_weights()).zip(bytes.chunks_exact(self.block_bytes()));
        let decode: fn(&[u8], &mut [f32]) = match self {
            Self::F32 => |b, o| o[0] = f32::from_le_bytes([b[0], b[1], b[2], b[3]]),
            Self::F16 => |b, o| o[0] = half_at(b, 0),
            Self::BF16 => |b, o| o[0] = bf16::from_le_bytes([b[0], b[1]]).to_f32(),
            Self::Q4_0 => q4_0,
            Self::Q4_1 => q4_1,
            Self::Q5_0 => q5_0,
            Self::Q5_1 => q5_1,
            Self::Q8_0 => q8_0,
            Self::Q2_K => q2_k,
            Self::Q3_K => q3_k,
            Self::Q4_K => q4_k,
            Self::Q5_K => q5_k,
            Self::Q6_K => q6_k,
            Self::MXFP4 => mxfp4,
        };
        blocks.for_each(|(out, block)| decode(block, out));
    }
}

/// The f16 at byte `at`.
pub(super) fn half_at(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

/// `write(value of the low nibble)` to the first half of `out`, of the high one to the second.
fn halves(codes: &[u8], out: &mut [f32], value: impl Fn(usize, u8, bool) -> f32) {
    let (low, high) = out.split_at_mut(codes.len());
    for (j, ((low, high), code)) in low.iter_mut().zip(high).zip(codes).enumerate() {
        *low = value(j, code & 15, false);
        *high = value(j, code >> 4, true);
    }
}

fn q4_0(block: &[u8], out: &mut [f32]) {
    let d = half_at(block, 0);
    halves(&block[2..], out, |_, q, _| (f32::from(q) - 8.0) * d);
}

fn q4_1(block: &[u8], out: &mut [f32]) {
    let (d, m) = (half_at(block, 0), half_at(block, 2));
    halves(&block[4..], out, |_, q, _| f32::from(q) * d + m);
}

/// The fifth bit of each of 32 weights.
fn fifth(bits: &[u8]) -> impl Fn(usize, bool) -> u8 + use<> {
    let bits = u32::from_le_bytes([bits[0], bits[1], bits[2], bits[3]]);
    move |j, high| (bits >> (j + if high { 16 } else { 0 }) & 1) as u8 * 16
}

fn q5_0(block: &[u8], out: &mut [f32]) {
    let (d, fifth) = (half_at(block, 0), fifth(&block[2..]));
    halves(&block[6..], out, |j, q, high| (f32::from(q | fifth(j, high)) - 16.0) * d);
}

fn q5_1(block: &[u8], out: &mut [f32]) {
    let (d, m, fifth) = (half_at(block, 0), half_at(block, 2), fifth(&block[4..]));
    halves(&block[8..], out, |j, q, high| f32::from(q | fifth(j, high)) * d + m);
}

fn q8_0(block: &[u8], out: &mut [f32]) {
    let d = half_at(block, 0);
    out.iter_mut().zip(&block[2..]).for_each(|(out, q)| *out = f32::from(*q as i8) * d);
}

fn mxfp4(block: &[u8], out: &mut [f32]) {
    let scale = power_of_two(block[0]);
    halves(&block[1..], out, |_, code, _| VALUES[usize::from(code)] * scale);
}

fn q2_k(block: &[u8], out: &mut [f32]) {
    let (scales, codes) = (&block[..16], &block[16..80]);
    let (d, least) = (half_at(block, 80), half_at(block, 82));
    for (g, out) in out.chunks_mut(16).enumerate() {
        let (d, m) = (d * f32::from(scales[g] & 15), least * f32::from(scales[g] >> 4));
        // Groups 2s and 2s + 1 of each half are the bits 2s, 2s + 1 of 32 bytes.
        let (codes, shift) = (&codes[g / 8 * 32 + g % 2 * 16..], g % 8 / 2 * 2);
        out.iter_mut().zip(codes).for_each(|(out, q)| *out = d * f32::from(q >> shift & 3) - m);
    }
}

fn q3_k(block: &[u8], out: &mut [f32]) {
    let (high, codes, packed) = (&block[..32], &block[32..96], &block[96..108]);
    let d = half_at(block, 108);
    for (g, out) in out.chunks_mut(16).enumerate() {
        let low = packed[g % 8] >> (g / 8 * 4) & 15;
        let scale = low | (packed[8 + g % 4] >> (g / 4 * 2) & 3) << 4;
        let d = d * (f32::from(scale) - 32.0);
        let (codes, shift) = (&codes[g / 8 * 32 + g % 2 * 16..], g % 8 / 2 * 2);
        let (high, bit) = (&high[g % 2 * 16..], g / 2);
        for (out, (q, high)) in out.iter_mut().zip(codes.iter().zip(high)) {
            let third = if high >> bit & 1 == 1 { 0.0 } else { 4.0 };
            *out = d * (f32::from(q >> shift & 3) - third);
        }
    }
}

/// Scale and least value of group `g` of 8, six bits each in twelve bytes.
fn scale_and_least(packed: &[u8], g: usize) -> (f32, f32) {
    let (scale, least) = if g < 4 {
        (packed[g] & 63, packed[g + 4] & 63)
    } else {
        ((packed[g + 4] & 15) | (packed[g - 4] >> 6) << 4, (packed[g + 4] >> 4) | (packed[g] >> 6) << 4)
    };
    (scale.into(), least.into())
}

fn q4_k(block: &[u8], out: &mut [f32]) {
    let (d, least, packed) = (half_at(block, 0), half_at(block, 2), &block[4..16]);
    for (g, out) in out.chunks_mut(32).enumerate() {
        let (scale, m) = scale_and_least(packed, g);
        let (d, m) = (d * scale, least * m);
        let (codes, shift) = (&block[16 + g / 2 * 32..], g % 2 * 4);
        out.iter_mut().zip(codes).for_each(|(out, q)| *out = d * f32::from(q >> shift & 15) - m);
    }
}

fn q5_k(block: &[u8], out: &mut [f32]) {
    let (d, least, packed, high) = (half_at(block, 0), half_at(block, 2), &block[4..16], &block[16..48]);
    for (g, out) in out.chunks_mut(32).enumerate() {
        let (scale, m) = scale_and_least(packed, g);
        let (d, m) = (d * scale, least * m);
        let (codes, shift) = (&block[48 + g / 2 * 32..], g % 2 * 4);
        for (out, (q, high)) in out.iter_mut().zip(codes.iter().zip(high)) {
            *out = d * f32::from((q >> shift & 15) | (high >> g & 1) << 4) - m;
        }
    }
}

fn q6_k(block: &[u8], out: &mut [f32]) {
    let (low, high, scales) = (&block[..128], &block[128..192], &block[192..208]);
    let d = half_at(block, 208);
    for (g, out) in out.chunks_mut(16).enumerate() {
        let d = d * f32::from(scales[g] as i8);
        // Of each half, 32 weights a quarter: low bits of quarters 0, 1 and 2, 3 share bytes, high bits of all four do.
        let (half, quarter, odd) = (g / 8, g % 8 / 2, g % 2 * 16);
        let (low, low_shift) = (&low[64 * half + quarter % 2 * 32 + odd..], quarter / 2 * 4);
        let high = &high[32 * half + odd..];
        for (out, (low, high)) in out.iter_mut().zip(low.iter().zip(high)) {
            let q = (low >> low_shift & 15) | (high >> (2 * quarter) & 3) << 4;
            *out = d * (f32::from(q) - 32.0);
        }
    }
}
