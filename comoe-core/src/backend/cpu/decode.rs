//! From a record's bytes to F32 lanes: rows of its matrices, sixteen weights at a time.

use crate::expert::{ExpertLayout, MatrixLayout};
use crate::format::mxfp4::power_of_two;
use crate::simd::{LANES, Simd};

#[inline(always)]
pub(super) fn decode_row<D: Decode, S: Simd>(
    simd: S,
    m: &Matrix<'_>,
    row: Row<'_>,
    out: &mut [[f32; LANES]],
) {
    let full = m.cols / LANES;
    let w = &D::blocks(row.weights)[..full];
    for (group, (out, w)) in out[..full].chunks_mut(m.group_blocks).zip(w.chunks(m.group_blocks)).enumerate()
    {
        let scale = D::scale(simd, row.scales, group);
        for (out, w) in out.iter_mut().zip(w) {
            simd.store(D::decode(simd, w, scale), out);
        }
    }
    if !m.cols.is_multiple_of(LANES) {
        simd.store(tail::<D, S>(simd, m, row), &mut out[full]);
    }
}

/// The last, partial block of a row. What it decodes to beyond `cols` meets zeros of the input.
#[inline(always)]
pub(super) fn tail<D: Decode, S: Simd>(simd: S, m: &Matrix<'_>, row: Row<'_>) -> S::V {
    let full = m.cols / LANES;
    D::decode(simd, &D::partial(row.weights, full), D::scale(simd, row.scales, full / m.group_blocks))
}

/// One matrix of one record.
pub(super) struct Matrix<'a> {
    record: &'a [u8],
    layout: &'a MatrixLayout,
    pub(super) cols: usize,
    /// Blocks of [`LANES`] columns that share a scale.
    pub(super) group_blocks: usize,
}

/// One row of a matrix.
#[derive(Clone, Copy)]
pub(super) struct Row<'a> {
    pub(super) weights: &'a [u8],
    pub(super) scales: &'a [u8],
}

impl<'a> Matrix<'a> {
    #[inline(always)]
    pub(super) fn new(l: &ExpertLayout, layout: &'a MatrixLayout, record: &'a [u8]) -> Self {
        let group_blocks = l.format.group().map_or(usize::MAX / 2, |g| g / LANES);
        Self { record, layout, cols: layout.cols, group_blocks }
    }

    #[inline(always)]
    pub(super) fn row(&self, r: usize) -> Row<'a> {
        let m = self.layout;
        Row {
            weights: &self.record[m.weights + r * m.row_bytes..][..m.row_bytes],
            scales: &self.record[m.scales + r * m.scale_row_bytes..][..m.scale_row_bytes],
        }
    }
}

/// How sixteen weights are decoded.
pub(super) trait Decode {
    /// Bytes of sixteen weights.
    type Block: Copy;
    fn blocks(row: &[u8]) -> &[Self::Block];
    /// Block `index`, of which the row has a part only; zeros beyond it.
    fn partial(row: &[u8], index: usize) -> Self::Block;
    /// What the scale of group `group` is for decoding.
    fn scale<S: Simd>(simd: S, scales: &[u8], group: usize) -> Scale<S>;
    fn decode<S: Simd>(simd: S, block: &Self::Block, scale: Scale<S>) -> S::V;
}

/// A scale in the form that a format needs; the other form is never read and costs nothing once inlined.
#[derive(Clone, Copy)]
pub(super) struct Scale<S: Simd> {
    value: S::V,
    nibbles: S::Nibbles,
}

impl<S: Simd> Scale<S> {
    #[inline(always)]
    fn new(simd: S, scale: f32) -> Self {
        Self { value: simd.splat(scale), nibbles: simd.nibbles(scale) }
    }
}

/// The f16 scale of a group. `format` stores finite ones only, which this turns into F32 exactly.
#[inline(always)]
pub(super) fn scale_at(scales: &[u8], group: usize) -> f32 {
    let bits = u32::from(u16::from_le_bytes(scales.as_chunks::<2>().0[group]));
    // Exponent and mantissa moved to their F32 places are the value times 2^-112, for subnormals too.
    let magnitude = f32::from_bits((bits & 0x7fff) << 13) * f32::from_bits((127 + 112) << 23);
    f32::from_bits(magnitude.to_bits() | (bits & 0x8000) << 16)
}

#[inline(always)]
fn partial_block<const N: usize>(row: &[u8], index: usize) -> [u8; N] {
    let rest = &row[index * N..];
    let n = rest.len().min(N);
    let mut block = [0; N];
    block[..n].copy_from_slice(&rest[..n]);
    block
}

pub(super) struct Bf16;
pub(super) struct Int8;
pub(super) struct Int4;
pub(super) struct Mxfp4;

impl Decode for Bf16 {
    type Block = [u8; 32];
    #[inline(always)]
    fn blocks(row: &[u8]) -> &[Self::Block] {
        row.as_chunks().0
    }
    #[inline(always)]
    fn partial(row: &[u8], index: usize) -> Self::Block {
        partial_block(row, index)
    }
    #[inline(always)]
    fn scale<S: Simd>(simd: S, _scales: &[u8], _group: usize) -> Scale<S> {
        Scale::new(simd, 1.0)
    }
    #[inline(always)]
    fn decode<S: Simd>(simd: S, block: &Self::Block, _scale: Scale<S>) -> S::V {
        simd.bf16(block)
    }
}

impl Decode for Int8 {
    type Block = [u8; 16];
    #[inline(always)]
    fn blocks(row: &[u8]) -> &[Self::Block] {
        row.as_chunks().0
    }
    #[inline(always)]
    fn partial(row: &[u8], index: usize) -> Self::Block {
        partial_block(row, index)
    }
    #[inline(always)]
    fn scale<S: Simd>(simd: S, scales: &[u8], group: usize) -> Scale<S> {
        Scale::new(simd, scale_at(scales, group))
    }
    #[inline(always)]
    fn decode<S: Simd>(simd: S, block: &Self::Block, scale: Scale<S>) -> S::V {
        simd.mul(simd.int8(block), scale.value)
    }
}

impl Decode for Int4 {
    type Block = [u8; 8];
    #[inline(always)]
    fn blocks(row: &[u8]) -> &[Self::Block] {
        row.as_chunks().0
    }
    #[inline(always)]
    fn partial(row: &[u8], index: usize) -> Self::Block {
        partial_block(row, index)
    }
    #[inline(always)]
    fn scale<S: Simd>(simd: S, scales: &[u8], group: usize) -> Scale<S> {
        Scale::new(simd, scale_at(scales, group))
    }
    #[inline(always)]
    fn decode<S: Simd>(simd: S, block: &Self::Block, scale: Scale<S>) -> S::V {
        simd.int4(block, scale.nibbles)
    }
}

impl Decode for Mxfp4 {
    type Block = [u8; 8];
    #[inline(always)]
    fn blocks(row: &[u8]) -> &[Self::Block] {
        row.as_chunks().0
    }
    #[inline(always)]
    fn partial(row: &[u8], index: usize) -> Self::Block {
        partial_block(row, index)
    }
    #[inline(always)]
    fn scale<S: Simd>(simd: S, scales: &[u8], group: usize) -> Scale<S> {
        let scale = power_of_two(scales[group]);
        Scale { value: simd.splat(scale), nibbles: simd.codes(scale) }
    }
    #[inline(always)]
    fn decode<S: Simd>(simd: S, block: &Self::Block, scale: Scale<S>) -> S::V {
        simd.mxfp4(block, scale.nibbles)
    }
}

#[derive(Clone, Copy)]
pub(super) struct Bias<'a>(&'a [[u8; 4]]);

impl<'a> Bias<'a> {
    pub(super) fn new(record: &'a [u8], at: usize) -> Self {
        Self(record[at..].as_chunks().0)
    }

    pub(super) fn at(self, i: usize) -> f32 {
        f32::from_le_bytes(self.0[i])
    }
}
