//! MXFP4 as checkpoints store it (OCP Microscaling Formats 1.0, section 5.3.3): blocks of 32 E2M1 numbers along the
//! input dimension that share an E8M0 exponent. Every value is a BF16 number; records of the same format keep the bits.

use std::ops::Range;

use crate::error::{Error, Result};
use crate::expert::MatrixLayout;
use crate::format::mxfp4::{BLOCK, MAX_EXPONENT, VALUES, power_of_two};
use crate::format::nibbles;
use crate::store::checkpoint::{Checkpoint, Region};

/// Bytes of a block: two numbers each, the low nibble first.
pub(in crate::store) const BLOCK_BYTES: usize = BLOCK / 2;

/// A matrix whose rows are every `row_step`-th of `blocks [.., cols / 32, 16]` and `scales [.., cols / 32]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::store) struct Mxfp4 {
    pub(in crate::store) blocks: Region,
    pub(in crate::store) scales: Region,
    pub(in crate::store) first_row: usize,
    pub(in crate::store) row_step: usize,
}

impl Mxfp4 {
    /// Blocks and exponents of a row of `groups` groups.
    fn row<'a>(
        &self,
        checkpoint: &'a Checkpoint,
        row: usize,
        groups: usize,
    ) -> (&'a [[u8; BLOCK_BYTES]], &'a [u8]) {
        let at = (self.first_row + row * self.row_step) * groups;
        let blocks = checkpoint.bytes(self.blocks).as_chunks().0;
        (&blocks[at..at + groups], &checkpoint.bytes(self.scales)[at..at + groups])
    }

    /// The values of some rows; `cols` is a multiple of 32.
    pub(super) fn block(&self, checkpoint: &Checkpoint, rows: Range<usize>, cols: usize, out: &mut [f32]) {
        for (row, out) in rows.zip(out.chunks_mut(cols)) {
            let (blocks, scales) = self.row(checkpoint, row, cols / BLOCK);
            for ((block, scale), out) in blocks.iter().zip(scales).zip(out.as_chunks_mut::<BLOCK>().0) {
                let scale = power_of_two(*scale);
                for (byte, out) in block.iter().zip(out.as_chunks_mut::<2>().0) {
                    *out = [byte & 15, byte >> 4].map(|code| VALUES[usize::from(code)] * scale);
                }
            }
        }
    }

    /// Copies the matrix into its place in a zeroed MXFP4 record: the same codes and exponents.
    pub(in crate::store) fn copy(
        &self,
        checkpoint: &Checkpoint,
        part: &'static str,
        m: &MatrixLayout,
        record: &mut [u8],
    ) -> Result<()> {
        let groups = m.cols / BLOCK;
        for row in 0..m.rows {
            let (blocks, scales) = self.row(checkpoint, row, groups);
            check_exponents(part, row, scales)?;
            let weights = &mut record[m.weights + row * m.row_bytes..][..m.row_bytes];
            for (out, block) in weights.as_chunks_mut::<BLOCK_BYTES>().0.iter_mut().zip(blocks) {
                for (out, word) in out.as_chunks_mut::<4>().0.iter_mut().zip(block.as_chunks::<4>().0) {
                    *out = nibbles::from_nibbles(u32::from_le_bytes(*word)).to_le_bytes();
                }
            }
            record[m.scales + row * m.scale_row_bytes..][..groups].copy_from_slice(scales);
        }
        Ok(())
    }
}

/// Refuses exponents whose numbers are not all finite.
pub(in crate::store) fn check_exponents(part: &'static str, row: usize, exponents: &[u8]) -> Result<()> {
    let Some(group) = exponents.iter().position(|e| *e > MAX_EXPONENT) else { return Ok(()) };
    Err(Error::BadWeight {
        part,
        row,
        col: group * BLOCK,
        value: power_of_two(exponents[group]),
        reason: "is the scale of its block, and too large; the checkpoint is damaged; fetch it again",
    })
}
