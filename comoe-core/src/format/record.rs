//! Whole experts: weights in, a record's bytes out, and back.

use half::{bf16, f16};
use rayon::prelude::*;

use super::loss::Loss;
use super::{BadValue, ExpertFormat};
use crate::error::{Error, Result};
use crate::expert::{ExpertLayout, MatrixLayout};

/// Weights of one matrix, row-major `[rows, cols]`, or of one bias.
///
/// The byte variants are little-endian and need no alignment: a tensor's bytes as they lie in a mapped file.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub enum Weights<'a> {
    /// F32 values.
    F32(&'a [f32]),
    /// BF16 values.
    Bf16(&'a [bf16]),
    /// F32 bytes.
    F32Bytes(&'a [u8]),
    /// F16 bytes.
    F16Bytes(&'a [u8]),
    /// BF16 bytes.
    Bf16Bytes(&'a [u8]),
}

impl Weights<'_> {
    /// Elements, or `None` when a byte variant ends inside an element.
    fn len(&self) -> Option<usize> {
        match self {
            Self::F32(v) => Some(v.len()),
            Self::Bf16(v) => Some(v.len()),
            Self::F32Bytes(b) => b.len().is_multiple_of(4).then_some(b.len() / 4),
            Self::F16Bytes(b) | Self::Bf16Bytes(b) => b.len().is_multiple_of(2).then_some(b.len() / 2),
        }
    }

    fn check(&self, what: &'static str, expected: usize, shape: [usize; 2]) -> Result<()> {
        if self.len() == Some(expected) {
            return Ok(());
        }
        let found = self.len().map_or_else(|| "a torn element".to_owned(), |n| format!("{n} elements"));
        let reason = format!("expected {shape:?}, {expected} elements, found {found}");
        Err(Error::BadArgument { what, reason })
    }

    /// Elements `from .. from + out.len()`; in place where they are F32 already.
    pub(crate) fn read<'s>(&'s self, from: usize, out: &'s mut [f32]) -> &'s [f32] {
        let n = out.len();
        match self {
            Self::F32(v) => return &v[from..from + n],
            Self::Bf16(v) => out.iter_mut().zip(&v[from..]).for_each(|(o, v)| *o = v.to_f32()),
            Self::F32Bytes(b) => out
                .iter_mut()
                .zip(&b.as_chunks::<4>().0[from..])
                .for_each(|(o, b)| *o = f32::from_le_bytes(*b)),
            Self::F16Bytes(b) => out
                .iter_mut()
                .zip(&b.as_chunks::<2>().0[from..])
                .for_each(|(o, b)| *o = f16::from_le_bytes(*b).to_f32()),
            Self::Bf16Bytes(b) => out
                .iter_mut()
                .zip(&b.as_chunks::<2>().0[from..])
                .for_each(|(o, b)| *o = bf16::from_le_bytes(*b).to_f32()),
        }
        out
    }
}

/// One expert's weights as a checkpoint has them.
#[derive(Debug, Clone, Copy)]
pub struct ExpertWeights<'a> {
    /// `[intermediate, hidden]`
    pub gate: Weights<'a>,
    /// `[intermediate, hidden]`
    pub up: Weights<'a>,
    /// `[hidden, intermediate]`
    pub down: Weights<'a>,
    /// Present exactly when the layout has biases.
    pub bias: Option<ExpertBiases<'a>>,
}

/// One expert's biases.
#[derive(Debug, Clone, Copy)]
pub struct ExpertBiases<'a> {
    /// `[intermediate]`
    pub gate: Weights<'a>,
    /// `[intermediate]`
    pub up: Weights<'a>,
    /// `[hidden]`
    pub down: Weights<'a>,
}

/// One expert's weights decoded to F32. What a record decodes to, for tests and reports of the error.
#[derive(Debug, Clone, PartialEq)]
pub struct DecodedExpert {
    /// `[intermediate, hidden]`
    pub gate: Vec<f32>,
    /// `[intermediate, hidden]`
    pub up: Vec<f32>,
    /// `[hidden, intermediate]`
    pub down: Vec<f32>,
    /// Gate, up and down biases.
    pub bias: Option<[Vec<f32>; 3]>,
}

/// Writes the record of an expert: every byte of `out`, which is [`ExpertLayout::record_bytes`] long.
///
/// The bytes depend on the weights alone. Large matrices are split over rayon's threads by rows.
///
/// # Errors
/// [`Error::BadWeight`] for a NaN, infinite or too large weight; [`Error::BadArgument`] for a part of the wrong size.
/// After an error `out` is no record.
pub fn pack_expert(layout: &ExpertLayout, weights: &ExpertWeights<'_>, out: &mut [u8]) -> Result<()> {
    check_record(layout, out.len())?;
    out.fill(0);
    pack_weights("gate", layout.format, &layout.gate, &weights.gate, out)?;
    pack_weights("up", layout.format, &layout.up, &weights.up, out)?;
    pack_weights("down", layout.format, &layout.down, &weights.down, out)?;
    pack_biases(layout, weights.bias.as_ref(), out)
}

/// Packs one matrix into the zeroed record `out`. Returns what that lost.
pub(crate) fn pack_weights(
    part: &'static str,
    format: ExpertFormat,
    matrix: &MatrixLayout,
    weights: &Weights<'_>,
    out: &mut [u8],
) -> Result<Loss> {
    weights.check(part, matrix.rows * matrix.cols, [matrix.rows, matrix.cols])?;
    let source = |row: usize, scratch: &mut [f32], pack: &mut PackRows<'_>| {
        pack(weights.read(row * matrix.cols, scratch))
    };
    pack_matrix(part, format, matrix, source, out)
}

/// Packs the biases into the zeroed record `out`; they are there exactly when the layout has such.
pub(crate) fn pack_biases(
    layout: &ExpertLayout,
    bias: Option<&ExpertBiases<'_>>,
    out: &mut [u8],
) -> Result<()> {
    match (&layout.bias, bias) {
        (None, None) => Ok(()),
        (Some(at), Some(bias)) => {
            let (wide, narrow) = (layout.down.rows, layout.gate.rows);
            pack_bias("gate bias", at.gate, narrow, &bias.gate, out)?;
            pack_bias("up bias", at.up, narrow, &bias.up, out)?;
            pack_bias("down bias", at.down, wide, &bias.down, out)
        }
        (at, _) => {
            let reason = match at {
                Some(_) => "the experts of this layer have biases, none were given",
                None => "the experts of this layer have no biases, some were given",
            };
            Err(Error::BadArgument { what: "expert biases", reason: reason.to_owned() })
        }
    }
}

/// Decodes a record.
///
/// # Errors
/// [`Error::BadArgument`] when `record` is not [`ExpertLayout::record_bytes`] long.
pub fn unpack_expert(layout: &ExpertLayout, record: &[u8]) -> Result<DecodedExpert> {
    check_record(layout, record.len())?;
    let matrix = |m: &MatrixLayout| {
        let mut out = vec![0.0; m.rows * m.cols];
        for (row, out) in out.chunks_mut(m.cols.max(1)).enumerate() {
            unpack_row(layout.format, m, record, row, out);
        }
        out
    };
    let bias = |at: usize, n: usize| {
        record[at..at + 4 * n].as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
    };
    let (wide, narrow) = (layout.down.rows, layout.gate.rows);
    Ok(DecodedExpert {
        gate: matrix(&layout.gate),
        up: matrix(&layout.up),
        down: matrix(&layout.down),
        bias: layout.bias.map(|b| [bias(b.gate, narrow), bias(b.up, narrow), bias(b.down, wide)]),
    })
}

/// Writes to `out` the record of the same expert in another format (or group size).
///
/// # Errors
/// As [`pack_expert`]; [`Error::BadArgument`] when the two layouts are not of the same shape.
pub fn convert_record(from: &ExpertLayout, record: &[u8], to: &ExpertLayout, out: &mut [u8]) -> Result<()> {
    convert_measured(from, record, to, out).map(drop)
}

/// As [`convert_record`]. Returns what was lost.
pub(crate) fn convert_measured(
    from: &ExpertLayout,
    record: &[u8],
    to: &ExpertLayout,
    out: &mut [u8],
) -> Result<Loss> {
    check_record(from, record.len())?;
    check_record(to, out.len())?;
    let shape = |l: &ExpertLayout| [l.gate, l.up, l.down].map(|m| (m.rows, m.cols));
    if shape(from) != shape(to) || from.bias.is_some() != to.bias.is_some() {
        let reason = format!(
            "cannot turn an expert of hidden {} and intermediate {} into one of hidden {} and intermediate {}",
            from.down.rows, from.gate.rows, to.down.rows, to.gate.rows
        );
        return Err(Error::BadArgument { what: "expert layout", reason });
    }
    if from == to {
        out.copy_from_slice(record);
        return Ok(Loss::default());
    }
    out.fill(0);
    let mut loss = Loss::default();
    for (part, a, b) in
        [("gate", &from.gate, &to.gate), ("up", &from.up, &to.up), ("down", &from.down, &to.down)]
    {
        let source = |row: usize, scratch: &mut [f32], pack: &mut PackRows<'_>| {
            for (at, out) in scratch.chunks_mut(a.cols).enumerate() {
                unpack_row(from.format, a, record, row + at, out);
            }
            pack(scratch)
        };
        loss += pack_matrix(part, to.format, b, source, out)?;
    }
    if let (Some(a), Some(b)) = (from.bias, to.bias) {
        for (a, b, n) in
            [(a.gate, b.gate, to.gate.rows), (a.up, b.up, to.up.rows), (a.down, b.down, to.down.rows)]
        {
            out[b..b + 4 * n].copy_from_slice(&record[a..a + 4 * n]);
        }
    }
    Ok(loss)
}

/// Decodes row `row` of a matrix of `record` to `out`, `[cols]`.
pub(crate) fn unpack_row(format: ExpertFormat, m: &MatrixLayout, record: &[u8], row: usize, out: &mut [f32]) {
    let weights = &record[m.weights + row * m.row_bytes..][..m.row_bytes];
    let scales = &record[m.scales + row * m.scale_row_bytes..][..m.scale_row_bytes];
    format.unpack_row(weights, scales, out);
}

type PackRows<'a> = dyn FnMut(&[f32]) -> std::result::Result<Loss, BadValue> + 'a;

/// Weights below which splitting a matrix over threads costs more than it gains.
const PARALLEL_WEIGHTS: usize = 1 << 18;

/// Packs the rows of one matrix into the zeroed record `out`. `source(row, scratch, pack)` hands the values of some rows,
/// from `row` on, to `pack`, as many as `scratch` has room for.
fn pack_matrix(
    part: &'static str,
    format: ExpertFormat,
    m: &MatrixLayout,
    source: impl Fn(usize, &mut [f32], &mut PackRows<'_>) -> std::result::Result<Loss, BadValue> + Sync,
    out: &mut [u8],
) -> Result<Loss> {
    if m.rows == 0 || m.cols == 0 {
        return Ok(Loss::default());
    }
    let at_once = format.rows_at_once(m.cols);
    // Scales follow the weights of their matrix in every layout.
    let (weights, scales) = out[m.weights..].split_at_mut(if m.scale_row_bytes == 0 {
        m.rows * m.row_bytes
    } else {
        m.scales - m.weights
    });
    let weights = &mut weights[..m.rows * m.row_bytes];
    let scales = &mut scales[..m.rows * m.scale_row_bytes];
    let pack = |scratch: &mut Vec<f32>, first: usize, weights: &mut [u8], scales: &mut [u8]| {
        scratch.resize(weights.len() / m.row_bytes * m.cols, 0.0);
        source(first, scratch, &mut |values| format.pack_rows(values, m.cols, weights, scales)).map_err(|e| {
            let (row, col) = (first + e.at / m.cols, e.at % m.cols);
            Error::BadWeight { part, row, col, value: e.value, reason: e.reason }
        })
    };
    if m.rows * m.cols < PARALLEL_WEIGHTS {
        let mut scratch = Vec::new();
        let mut scales = scales.chunks_mut((at_once * m.scale_row_bytes).max(1));
        let weights = weights.chunks_mut(at_once * m.row_bytes).enumerate();
        return weights
            .map(|(i, w)| pack(&mut scratch, i * at_once, w, scales.next().unwrap_or_default()))
            .sum();
    }
    let weights = weights.par_chunks_mut(at_once * m.row_bytes).enumerate();
    let add = |a, b| Ok(a + b);
    if m.scale_row_bytes == 0 {
        weights
            .map_init(Vec::new, |scratch, (i, w)| pack(scratch, i * at_once, w, &mut []))
            .try_reduce(Loss::default, add)
    } else {
        weights
            .zip(scales.par_chunks_mut(at_once * m.scale_row_bytes))
            .map_init(Vec::new, |scratch, ((i, w), s)| pack(scratch, i * at_once, w, s))
            .try_reduce(Loss::default, add)
    }
}

fn pack_bias(part: &'static str, at: usize, n: usize, bias: &Weights<'_>, out: &mut [u8]) -> Result<()> {
    bias.check(part, n, [1, n])?;
    let mut scratch = vec![0.0; n];
    let values = bias.read(0, &mut scratch);
    if let Some(e) = BadValue::first_not_finite(values) {
        return Err(Error::BadWeight { part, row: 0, col: e.at, value: e.value, reason: e.reason });
    }
    for (v, out) in values.iter().zip(out[at..at + 4 * n].as_chunks_mut::<4>().0) {
        *out = v.to_le_bytes();
    }
    Ok(())
}

pub(crate) fn check_record(layout: &ExpertLayout, len: usize) -> Result<()> {
    if len == layout.record_bytes {
        return Ok(());
    }
    let reason = format!("{len} bytes where a {} record has {}", layout.format, layout.record_bytes);
    Err(Error::BadArgument { what: "record", reason })
}

#[cfg(test)]
#[path = "record_tests.rs"]
mod tests;
