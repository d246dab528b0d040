//! MXFP4 as checkpoints store it (OCP Microscaling Formats 1.0, section 5.3.3): blocks of 32 E2M1 numbers along the
//! input dimension that share an E8M0 exponent. Every value is a BF16 number, so nothing is lost in BF16 records.

use super::checkpoint::{Checkpoint, Region};

/// Numbers that share an exponent.
pub(super) const BLOCK: usize = 32;
/// Bytes of a block: two numbers each, the low nibble first.
pub(super) const BLOCK_BYTES: usize = BLOCK / 2;

/// E2M1 by its code; the highest bit is the sign.
const VALUES: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// A matrix whose rows are every `row_step`-th of `blocks [.., cols / 32, 16]` and `scales [.., cols / 32]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Mxfp4 {
    pub(super) blocks: Region,
    pub(super) scales: Region,
    pub(super) first_row: usize,
    pub(super) row_step: usize,
}

impl Mxfp4 {
    /// The values of `[rows, cols]`; `cols` is a multiple of 32.
    pub(super) fn values(&self, checkpoint: &Checkpoint, [rows, cols]: [usize; 2], out: &mut Vec<f32>) {
        let groups = cols / BLOCK;
        let (blocks, _) = checkpoint.bytes(self.blocks).as_chunks::<BLOCK_BYTES>();
        let scales = checkpoint.bytes(self.scales);
        out.clear();
        out.reserve(rows * cols);
        for row in 0..rows {
            let at = (self.first_row + row * self.row_step) * groups;
            for (block, scale) in blocks[at..at + groups].iter().zip(&scales[at..at + groups]) {
                let scale = power_of_two(*scale);
                let pair = |byte: &u8| [VALUES[usize::from(byte & 15)], VALUES[usize::from(byte >> 4)]];
                out.extend(block.iter().flat_map(pair).map(|value| value * scale));
            }
        }
    }
}

/// E8M0: `2^(code - 127)`. Its NaN (255) comes out as infinity, which no record takes.
fn power_of_two(code: u8) -> f32 {
    f32::from_bits(if code == 0 { 1 << 22 } else { u32::from(code) << 23 })
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
}
