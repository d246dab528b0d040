//! FP8: `weight` F8_E4M3 `[N, K]`, and one scale for all of it, for each row, or for each block (128 x 128 in
//! published checkpoints; the last block of a row or column may be shorter). `w = f8 * scale`.
//!
//! The scale is called `weight_scale_inv` (DeepSeek, Qwen; by it, too, one multiplies) or `weight_scale`
//! (compressed-tensors).

use std::ops::Range;

use safetensors::Dtype;

use super::{Coded, Floats, Parts, Quantisation};
use crate::error::{Error, Result};
use crate::store::checkpoint::{Checkpoint, Region};

/// E4M3 (arXiv 2209.05433, table 1) by its code: no infinities, and NaN where all seven bits are set.
const VALUES: [f32; 256] = {
    let mut values = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        let (exponent, mantissa) = (code >> 3 & 15, (code & 7) as f32);
        let magnitude = if code & 0x7f == 0x7f {
            f32::NAN
        } else if exponent == 0 {
            mantissa / 512.0
        } else {
            (1.0 + mantissa / 8.0) * f32::from_bits((exponent as u32 + 120) << 23)
        };
        values[code] = if code < 128 { magnitude } else { -magnitude };
        code += 1;
    }
    values
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::store) struct Fp8 {
    pub(super) weights: Region,
    scales: Floats,
    /// Rows and columns that share a scale.
    block: [usize; 2],
    /// Scales of one row of blocks.
    scale_cols: usize,
}

impl Fp8 {
    pub(super) fn open(parts: &Parts<'_>, how: &Quantisation) -> Result<([usize; 2], Coded)> {
        let [rows, cols] = parts.dims("weight", Dtype::F8_E4M3)?;
        let Some(name) =
            ["weight_scale_inv", "weight_scale"].into_iter().find(|n| parts.encoding(n).is_some())
        else {
            let reason =
                "is FP8 and has neither weight_scale_inv nor weight_scale; download the checkpoint again";
            return Err(Error::bad_tensor(parts.name("weight"), reason));
        };
        let shape = parts.checkpoint.tensor(&parts.name(name))?.shape;
        let [down, across] = how.fp8_block;
        let grid = [rows.div_ceil(down), cols.div_ceil(across)];
        let (block, scale_cols) = match *shape {
            [] | [1] | [1, 1] => ([rows, cols], 1),
            [n] | [n, 1] if n == rows => ([1, cols], 1),
            [a, b] if [a, b] == grid => (how.fp8_block, b),
            _ => {
                let reason = format!(
                    "expected one scale, one for each of {rows} rows, or {grid:?} for blocks of {:?}, found shape \
                     {shape:?}",
                    how.fp8_block
                );
                return Err(Error::bad_tensor(parts.name(name), reason));
            }
        };
        let scales = parts.floats(name, shape)?;
        let weights = parts.region("weight", Dtype::F8_E4M3, &[rows, cols])?;
        Ok(([rows, cols], Coded::Fp8(Self { weights, scales, block, scale_cols })))
    }

    pub(super) fn block(&self, checkpoint: &Checkpoint, rows: Range<usize>, cols: usize, out: &mut [f32]) {
        let scales = self.scales.read(checkpoint);
        let codes = &checkpoint.bytes(self.weights)[rows.start * cols..rows.end * cols];
        for ((row, out), codes) in rows.zip(out.chunks_mut(cols)).zip(codes.chunks(cols)) {
            let first = row / self.block[0] * self.scale_cols;
            for (b, (out, codes)) in
                out.chunks_mut(self.block[1]).zip(codes.chunks(self.block[1])).enumerate()
            {
                let scale = scales.at(first + b);
                out.iter_mut().zip(codes).for_each(|(out, code)| *out = VALUES[usize::from(*code)] * scale);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::VALUES;

    #[test]
    fn landmarks_of_e4m3() {
        // The paper's table: greatest, least normal, least subnormal, one; and their negatives.
        for (code, value) in [(0x7e, 448.0), (0x08, 0.015625), (0x01, 0.001953125), (0x38, 1.0), (0x00, 0.0)]
        {
            assert_eq!((VALUES[code], VALUES[code + 128]), (value, -value));
        }
        assert!(VALUES[0x7f].is_nan() && VALUES[0xff].is_nan());
        assert!(VALUES[..127].is_sorted());
    }
}
