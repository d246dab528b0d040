//! compressed-tensors, `pack-quantized` in 4 bits: `weight_packed` I32 `[N, ceil(K / 8)]`, the lowest nibble first,
//! `weight_scale` `[N, G]`, `weight_shape` I64 `[2]`; where it is not symmetric, `weight_zero_point` I32
//! `[ceil(N / 8), G]`, eight outputs a word; where groups do not follow each other, `weight_g_idx` I32 `[K]`.
//! Numbers and zero points are stored plus 8: `w = scale * (q - 8 - (zero - 8))`.

use std::ops::Range;

use safetensors::Dtype;

use super::{Coded, Floats, Parts, group_size, nibble, words};
use crate::error::{Error, Result};
use crate::store::checkpoint::{Checkpoint, Region};
use crate::store::survey::MAX_DIM;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::store) struct Packed {
    pub(super) weights: Region,
    scales: Floats,
    zeros: Option<Region>,
    group_of: Option<Region>,
    groups: usize,
    group: usize,
}

impl Packed {
    pub(super) fn open(parts: &Parts<'_>) -> Result<([usize; 2], Coded)> {
        let [rows, words_a_row] = parts.dims("weight_packed", Dtype::I32)?;
        let cols = Self::columns(parts, rows)?;
        if words_a_row != cols.div_ceil(8) {
            let reason = format!(
                "has {words_a_row} words a row, 4 bits of {cols} columns take {}: other widths are not supported",
                cols.div_ceil(8)
            );
            return Err(Error::bad_tensor(parts.name("weight_packed"), reason));
        }
        let scales = parts.checkpoint.tensor(&parts.name("weight_scale"))?.shape;
        let groups = match *scales {
            [n, groups] if n == rows && (1..=cols).contains(&groups) => groups,
            _ => {
                let reason = format!("expected [{rows}, groups], found shape {scales:?}");
                return Err(Error::bad_tensor(parts.name("weight_scale"), reason));
            }
        };
        let optional = |part: &str, shape: &[usize]| match parts.encoding(part) {
            Some(_) => parts.region(part, Dtype::I32, shape).map(Some),
            None => Ok(None),
        };
        let this = Self {
            weights: parts.region("weight_packed", Dtype::I32, &[rows, words_a_row])?,
            scales: parts.floats("weight_scale", scales)?,
            zeros: optional("weight_zero_point", &[rows.div_ceil(8), groups])?,
            group_of: optional("weight_g_idx", &[cols])?,
            groups,
            group: group_size(parts.name("weight_scale"), cols, groups)?,
        };
        Ok(([rows, cols], Coded::Packed(this)))
    }

    /// The columns that `weight_shape` gives.
    fn columns(parts: &Parts<'_>, rows: usize) -> Result<usize> {
        let name = parts.name("weight_shape");
        let view = parts.checkpoint.tensor(&name)?;
        parts.region("weight_shape", Dtype::I64, &[2])?;
        let dims: Vec<i64> = view.bytes.as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b)).collect();
        match *dims {
            [n, k] if n == rows as i64 && (1..=MAX_DIM as i64).contains(&k) => Ok(k as usize),
            _ => Err(Error::bad_tensor(name, format!("expected [{rows}, columns], found {dims:?}"))),
        }
    }

    pub(super) fn group(&self) -> usize {
        self.group
    }

    pub(super) fn block(
        &self,
        checkpoint: &Checkpoint,
        rows: Range<usize>,
        cols: usize,
        out: &mut [f32],
    ) -> Result<()> {
        let (weights, scales) = (words(checkpoint, self.weights), self.scales.read(checkpoint));
        let zeros = self.zeros.map(|region| words(checkpoint, region));
        let group_of = self.group_of.map(|region| words(checkpoint, region));
        let mut of_group = vec![(0.0, 8); self.groups];
        for (n, out) in rows.zip(out.chunks_mut(cols)) {
            for (g, of) in of_group.iter_mut().enumerate() {
                let zero = zeros.map_or(8, |z| nibble(z[n / 8 * self.groups + g], n % 8));
                *of = (scales.at(n * self.groups + g), zero as i32);
            }
            let words = &weights[n * cols.div_ceil(8)..][..cols.div_ceil(8)];
            for (k, out) in out.iter_mut().enumerate() {
                let g = match group_of {
                    None => k / self.group,
                    Some(of) => i32::from_le_bytes(of[k]) as usize,
                };
                let Some((scale, zero)) = of_group.get(g) else {
                    let reason = format!("input {k} is of group {g}, but there are {}", self.groups);
                    let name = checkpoint.name_at(self.weights.shard, self.weights.start);
                    return Err(Error::bad_tensor(name.unwrap_or("weight_packed"), reason));
                };
                *out = (nibble(words[k / 8], k % 8) as i32 - zero) as f32 * scale;
            }
        }
        Ok(())
    }
}
