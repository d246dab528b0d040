//! AWQ in 4 bits, as its GEMM kernels want it: `qweight` I32 `[K, N / 8]`, `qzeros` I32 `[G, N / 8]`, `scales` `[G, N]`.
//! Of eight neighbouring outputs, the `c`-th is in nibble `[0, 4, 1, 5, 2, 6, 3, 7][c]`. `w[n, k] = scale * (q - zero)`.

use std::ops::Range;

use safetensors::Dtype;

use super::{BLOCK_ROWS, Coded, Floats, Parts, group_size, nibble, words};
use crate::error::{Error, Result};
use crate::store::checkpoint::{Checkpoint, Region};

/// The nibble of each of eight outputs.
const ORDER: [usize; 8] = [0, 4, 1, 5, 2, 6, 3, 7];
/// Inputs that are gathered before they are written: a cache line of each output.
const TILE: usize = 16;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::store) struct Awq {
    pub(super) weights: Region,
    zeros: Region,
    scales: Floats,
    group: usize,
    outputs: usize,
}

impl Awq {
    /// Whether `qweight` is AWQ's and not GPTQ's: it has an eighth of the columns of `scales`.
    pub(super) fn is_this(parts: &Parts<'_>) -> Result<bool> {
        let [_, columns] = parts.dims::<2>("qweight", Dtype::I32)?;
        let name = parts.name("scales");
        let scales = parts.checkpoint.tensor(&name)?.shape;
        match *scales {
            [_, outputs] if outputs == columns => Ok(false),
            [_, outputs] if outputs == 8 * columns => Ok(true),
            _ => {
                let reason = format!(
                    "expected [groups, {columns}] (GPTQ) or [groups, {}] (AWQ) beside qweight, found {scales:?}",
                    8 * columns
                );
                Err(Error::bad_tensor(name, reason))
            }
        }
    }

    pub(super) fn open(parts: &Parts<'_>) -> Result<([usize; 2], Coded)> {
        let [inputs, eighths] = parts.dims("qweight", Dtype::I32)?;
        let outputs = 8 * eighths;
        let [groups, _] = parts.dims("qzeros", Dtype::I32)?;
        let this = Self {
            weights: parts.region("qweight", Dtype::I32, &[inputs, eighths])?,
            zeros: parts.region("qzeros", Dtype::I32, &[groups, eighths])?,
            scales: parts.floats("scales", &[groups, outputs])?,
            group: group_size(parts.name("qzeros"), inputs, groups)?,
            outputs,
        };
        Ok(([outputs, inputs], Coded::Awq(this)))
    }

    pub(super) fn group(&self) -> usize {
        self.group
    }

    /// `rows` begins and ends at multiples of 8.
    pub(super) fn block(&self, checkpoint: &Checkpoint, rows: Range<usize>, cols: usize, out: &mut [f32]) {
        let (weights, zeros) = (words(checkpoint, self.weights), words(checkpoint, self.zeros));
        let (scales, eighths) = (self.scales.read(checkpoint), self.outputs / 8);
        let mut tile = [[0.0; TILE]; BLOCK_ROWS];
        let mut of_group = [(0.0, 0); BLOCK_ROWS];
        let mut present = usize::MAX;
        for k0 in (0..cols).step_by(TILE) {
            let width = TILE.min(cols - k0);
            for k in k0..k0 + width {
                let g = k / self.group;
                if g != present {
                    present = g;
                    for (r, n) in rows.clone().enumerate() {
                        let zero = nibble(zeros[g * eighths + n / 8], ORDER[n % 8]);
                        of_group[r] = (scales.at(g * self.outputs + n), zero as i32);
                    }
                }
                for (r, n) in rows.clone().enumerate() {
                    let (scale, zero) = of_group[r];
                    let q = nibble(weights[k * eighths + n / 8], ORDER[n % 8]) as i32;
                    tile[r][k - k0] = (q - zero) as f32 * scale;
                }
            }
            for (out, tile) in out.chunks_mut(cols).zip(&tile) {
                out[k0..k0 + width].copy_from_slice(&tile[..width]);
            }
        }
    }
}
