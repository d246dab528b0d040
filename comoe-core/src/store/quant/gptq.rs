//! GPTQ in 4 bits: `qweight` I32 `[K / 8, N]` (the lowest nibble is the lowest `k`), `qzeros` I32 `[G, N / 8]`, `scales`
//! `[G, N]`, and `g_idx` I32 `[K]`, the group of each `k` (without it `k / (K / G)`).
//! `w[n, k] = scale * (q - zero)`, where checkpoints of the first format store `zero - 1`.

use std::ops::Range;

use safetensors::Dtype;

use super::{BLOCK_ROWS, Coded, Floats, Parts, Quantisation, group_size, nibble, words};
use crate::error::{Error, Result};
use crate::store::checkpoint::{Checkpoint, Region};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::store) struct Gptq {
    pub(super) weights: Region,
    zeros: Region,
    scales: Floats,
    group_of: Option<Region>,
    groups: usize,
    group: usize,
    outputs: usize,
    /// What is added to stored zero points.
    zero_offset: u32,
}

impl Gptq {
    pub(super) fn open(parts: &Parts<'_>, how: &Quantisation) -> Result<([usize; 2], Coded)> {
        let [eighths, outputs] = parts.dims("qweight", Dtype::I32)?;
        let inputs = 8 * eighths;
        if outputs % 8 != 0 {
            let reason = format!("has {outputs} outputs, expected a multiple of 8");
            return Err(Error::bad_tensor(parts.name("qweight"), reason));
        }
        let [groups, _] = parts.dims("qzeros", Dtype::I32)?;
        let group = group_size(parts.name("qzeros"), inputs, groups)?;
        let this = Self {
            weights: parts.region("qweight", Dtype::I32, &[eighths, outputs])?,
            zeros: parts.region("qzeros", Dtype::I32, &[groups, outputs / 8])?,
            scales: parts.floats("scales", &[groups, outputs])?,
            group_of: match parts.encoding("g_idx") {
                Some(_) => Some(parts.region("g_idx", Dtype::I32, &[inputs])?),
                None => None,
            },
            groups,
            group,
            outputs,
            zero_offset: how.gptq_zero_offset,
        };
        Ok(([outputs, inputs], Coded::Gptq(this)))
    }

    pub(super) fn group(&self) -> usize {
        self.group
    }

    /// `rows` begins at a multiple of 8.
    pub(super) fn block(
        &self,
        checkpoint: &Checkpoint,
        rows: Range<usize>,
        cols: usize,
        out: &mut [f32],
    ) -> Result<()> {
        let (scales, zeros) = (self.scales.read(checkpoint), words(checkpoint, self.zeros));
        let weights = words(checkpoint, self.weights);
        let group_of = self.group_of.map(|region| words(checkpoint, region));
        // Scale and zero point of each group and row.
        let count = rows.len();
        let mut table = Vec::with_capacity(self.groups * count);
        for g in 0..self.groups {
            table.extend(rows.clone().map(|n| {
                let zero = nibble(zeros[g * (self.outputs / 8) + n / 8], n % 8) + self.zero_offset;
                (scales.at(g * self.outputs + n), zero as i32)
            }));
        }
        let mut groups = [0; 8];
        debug_assert!(count <= BLOCK_ROWS);
        for (eighth, words) in weights.chunks(self.outputs).enumerate() {
            for (j, g) in groups.iter_mut().enumerate() {
                let k = 8 * eighth + j;
                *g = match group_of {
                    None => k / self.group,
                    Some(of) => match usize::try_from(i32::from_le_bytes(of[k])) {
                        Ok(g) if g < self.groups => g,
                        _ => return Err(self.bad_group(checkpoint, i32::from_le_bytes(of[k]))),
                    },
                };
            }
            for (r, word) in words[rows.clone()].iter().enumerate() {
                let out = &mut out[r * cols + 8 * eighth..][..8];
                for (j, out) in out.iter_mut().enumerate() {
                    let (scale, zero) = table[groups[j] * count + r];
                    *out = (nibble(*word, j) as i32 - zero) as f32 * scale;
                }
            }
        }
        Ok(())
    }

    fn bad_group(&self, checkpoint: &Checkpoint, found: i32) -> Error {
        let region = self.group_of.unwrap_or(self.weights);
        let name = checkpoint.name_at(region.shard, region.start).unwrap_or("g_idx");
        let reason = format!("has the group {found}, but there are {}; download it again", self.groups);
        Error::bad_tensor(name, reason)
    }
}
