//! Matrices of GGUF files, with what llama.cpp's conversion did to the order of their rows undone.

use std::ops::Range;

use super::GgmlType;
use super::types::half_at;
use crate::error::{Error, Result};
use crate::expert::MatrixLayout;
use crate::format::ExpertFormat;
use crate::format::nibbles;
use crate::store::checkpoint::{Checkpoint, Region};
use crate::store::quant::check_exponents;

/// A matrix of a GGUF file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ggml {
    kind: GgmlType,
    region: Region,
    order: Order,
}

/// Which row of the file is which.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Order {
    /// As they are.
    Plain,
    /// Rows of heads of this width, in each of which the file has elements `i` and `i + width / 2` side by side (the
    /// `llama` architecture's q and k).
    Pairs(usize),
    /// Keys and values of latent attention, per head `nope` rows of keys and then `value` rows of values; the file has
    /// the values in a tensor of their own, and each head's keys transposed.
    Latent { nope: usize, value: usize, values: Region, values_kind: GgmlType },
}

impl Ggml {
    pub(super) fn new(kind: GgmlType, region: Region, order: Order) -> Self {
        Self { kind, region, order }
    }

    /// How its elements are stored.
    pub fn kind(&self) -> GgmlType {
        self.kind
    }

    pub(in crate::store) fn region(&self) -> Region {
        self.region
    }

    /// The format whose records hold the very numbers of the file.
    pub(in crate::store) fn kept_by(&self) -> Option<ExpertFormat> {
        match (self.kind, self.order) {
            (GgmlType::Q4_0, Order::Plain) => Some(ExpertFormat::Int4 { group: 32 }),
            (GgmlType::Q8_0, Order::Plain) => Some(ExpertFormat::Int8 { group: 32 }),
            (GgmlType::MXFP4, Order::Plain) => Some(ExpertFormat::Mxfp4),
            _ => None,
        }
    }

    fn row_bytes(kind: GgmlType, cols: usize) -> usize {
        cols / kind.block_weights() * kind.block_bytes()
    }

    /// The values of some rows.
    pub(in crate::store) fn block(
        &self,
        checkpoint: &Checkpoint,
        rows: Range<usize>,
        cols: usize,
        out: &mut [f32],
    ) {
        let bytes = checkpoint.bytes(self.region);
        let stride = Self::row_bytes(self.kind, cols);
        let plain = |row: usize, out: &mut [f32]| self.kind.decode(&bytes[row * stride..][..stride], out);
        match self.order {
            Order::Plain => rows.zip(out.chunks_mut(cols)).for_each(|(row, out)| plain(row, out)),
            Order::Pairs(width) => {
                for (row, out) in rows.zip(out.chunks_mut(cols)) {
                    let (head, at) = (row - row % width, row % width);
                    plain(head + 2 * (at % (width / 2)) + at / (width / 2), out);
                }
            }
            Order::Latent { nope, value, values, values_kind } => {
                let (values, value_stride) = (checkpoint.bytes(values), Self::row_bytes(values_kind, cols));
                let key_stride = Self::row_bytes(self.kind, nope);
                // One head's keys as the file has them: `[cols, nope]`.
                let (mut keys, mut present) = (vec![0.0; cols * nope], usize::MAX);
                for (row, out) in rows.zip(out.chunks_mut(cols)) {
                    let (head, at) = (row / (nope + value), row % (nope + value));
                    if at >= nope {
                        let from = (head * value + at - nope) * value_stride;
                        values_kind.decode(&values[from..][..value_stride], out);
                        continue;
                    }
                    if head != present {
                        present = head;
                        let head = &bytes[head * cols * key_stride..][..cols * key_stride];
                        for (keys, bytes) in keys.chunks_mut(nope).zip(head.chunks(key_stride)) {
                            self.kind.decode(bytes, keys);
                        }
                    }
                    out.iter_mut().zip(keys.chunks(nope)).for_each(|(out, key)| *out = key[at]);
                }
            }
        }
    }

    /// Copies the matrix into its place in a zeroed record of the format that [`Self::kept_by`] names. `false`: it holds
    /// a number that the format does not, and must be packed.
    pub(in crate::store) fn copy(
        &self,
        checkpoint: &Checkpoint,
        part: &'static str,
        m: &MatrixLayout,
        record: &mut [u8],
    ) -> Result<bool> {
        let stride = Self::row_bytes(self.kind, m.cols);
        let rows = checkpoint.bytes(self.region).chunks_exact(stride);
        // The format says -127..=127; ggml writes no -128, but a file can hold one.
        if self.kind == GgmlType::Q8_0
            && rows.clone().flat_map(|row| row.chunks_exact(34)).any(|block| block[2..].contains(&0x80))
        {
            return Ok(false);
        }
        for (row, bytes) in rows.enumerate() {
            let (weights, scales) = record.split_at_mut(m.scales);
            let weights = &mut weights[m.weights + row * m.row_bytes..][..m.row_bytes];
            let scales = &mut scales[row * m.scale_row_bytes..][..m.scale_row_bytes];
            if self.kind == GgmlType::MXFP4 {
                for (scale, block) in scales.iter_mut().zip(bytes.chunks_exact(17)) {
                    *scale = block[0];
                }
                check_exponents(part, row, &scales[..m.cols / 32])?;
                copy_nibbles(weights, bytes.chunks_exact(17).map(|block| &block[1..]));
                continue;
            }
            let blocks = bytes.chunks_exact(self.kind.block_bytes());
            for (g, (scale, block)) in
                scales.as_chunks_mut::<2>().0.iter_mut().zip(blocks.clone()).enumerate()
            {
                if !half_at(block, 0).is_finite() {
                    let reason = "is the scale of its block; the file is damaged; fetch it again";
                    let value = half_at(block, 0);
                    return Err(Error::BadWeight { part, row, col: 32 * g, value, reason });
                }
                scale.copy_from_slice(&block[..2]);
            }
            if self.kind == GgmlType::Q4_0 {
                copy_nibbles(weights, blocks.map(|block| &block[2..]));
            } else {
                weights.as_chunks_mut::<32>().0.iter_mut().zip(blocks).for_each(|(out, block)| {
                    out.copy_from_slice(&block[2..]);
                });
            }
        }
        Ok(true)
    }
}

/// Blocks of 16 bytes, whose low nibbles are columns 0 to 15 and whose high ones 16 to 31, to the words of a record.
fn copy_nibbles<'a>(weights: &mut [u8], blocks: impl Iterator<Item = &'a [u8]>) {
    for (out, block) in weights.as_chunks_mut::<16>().0.iter_mut().zip(blocks) {
        let halves = block.as_chunks::<8>().0;
        let [a, b] = [u64::from_le_bytes(halves[0]), u64::from_le_bytes(halves[1])];
        for (out, bytes) in out.as_chunks_mut::<4>().0.iter_mut().zip([a, b, a >> 4, b >> 4]) {
            *out = nibbles::from_bytes(bytes).to_le_bytes();
        }
    }
}
