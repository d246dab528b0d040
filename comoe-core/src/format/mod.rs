//! What do a record's bytes mean? One file per format: pack, unpack and the error bound; [`record`] puts whole
//! experts together.
//!
//! Quantised weights are symmetric, `w = scale * q`, in groups along the input dimension with f16 scales;
//! `ceil(cols / group)` groups a row, so a ragged tail is allowed. `scale * q` is exact in F32 (at most 18
//! significant bits), so dequantising adds no rounding of its own. MXFP4's scales are powers of two, and as exact. An
//! f16 scale may be negative (GGUF's Q4_0 has such),
//! is never infinite or NaN, and is 0 for a group that is all zero.

mod bf16;
mod int4;
mod int8;
pub(crate) mod loss;
pub(crate) mod mxfp4;
pub(crate) mod nibbles;
pub mod record;
mod scale;

use std::fmt;
use std::str::FromStr;

use self::int4::Int4;
use self::int8::Int8;
use self::loss::Loss;
use self::scale::{Packed, unpack_row};
use crate::error::{Error, Result};

const ROW_ALIGN: usize = 16;

/// How the weights of a record are encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ExpertFormat {
    /// BF16, two bytes a weight.
    Bf16,
    /// `q` in -127..=127, one byte a weight, an f16 scale per group.
    Int8 {
        /// Weights per scale: 32, 64 or 128.
        group: usize,
    },
    /// Nibble `n` in 0..=15 with `q = n - 8`, half a byte a weight, an f16 scale per group.
    Int4 {
        /// Weights per scale: 32, 64 or 128.
        group: usize,
    },
    /// E2M1 numbers, half a byte a weight, a power of two per 32 (gpt-oss).
    Mxfp4,
}

impl ExpertFormat {
    /// INT8 at the default group size.
    pub const INT8: Self = Self::Int8 { group: 64 };
    /// INT4 at the default group size.
    pub const INT4: Self = Self::Int4 { group: 64 };

    /// Bytes from one row of `cols` weights to the next, a multiple of 16.
    pub fn row_bytes(self, cols: usize) -> usize {
        match self {
            Self::Bf16 => 2 * cols,
            Self::Int8 { .. } => cols,
            Self::Int4 { .. } | Self::Mxfp4 => cols.div_ceil(2),
        }
        .next_multiple_of(ROW_ALIGN)
    }

    /// Bytes from one row's scales to the next, a multiple of 16; 0 for formats without scales.
    pub fn scale_row_bytes(self, cols: usize) -> usize {
        match self {
            Self::Bf16 => 0,
            Self::Int8 { group } | Self::Int4 { group } => 2 * cols.div_ceil(group),
            Self::Mxfp4 => cols.div_ceil(mxfp4::BLOCK),
        }
        .next_multiple_of(ROW_ALIGN)
    }

    /// Weights per scale, for formats that have scales.
    pub fn group(self) -> Option<usize> {
        match self {
            Self::Bf16 => None,
            Self::Int8 { group } | Self::Int4 { group } => Some(group),
            Self::Mxfp4 => Some(mxfp4::BLOCK),
        }
    }

    /// How many rows [`Self::pack_rows`] takes best at once.
    pub(crate) fn rows_at_once(self, cols: usize) -> usize {
        match self {
            Self::Bf16 | Self::Mxfp4 => 1,
            Self::Int8 { group } | Self::Int4 { group } => scale::rows_at_once(cols, group),
        }
    }

    /// Encodes rows of `cols` `values` into their weights and their scales, of [`Self::row_bytes`] and
    /// [`Self::scale_row_bytes`] each, which are zero on entry.
    pub(crate) fn pack_rows(
        self,
        values: &[f32],
        cols: usize,
        weights: &mut [u8],
        scales: &mut [u8],
    ) -> std::result::Result<Loss, BadValue> {
        let (row_bytes, scale_row_bytes) = (self.row_bytes(cols), self.scale_row_bytes(cols));
        let mut out = Packed { weights, row_bytes, scales, scale_row_bytes };
        type PackRow = fn(&[f32], &mut [u8], &mut [u8]) -> std::result::Result<Loss, BadValue>;
        let pack_row: PackRow = match self {
            Self::Int8 { group } => return scale::pack_rows::<Int8>(values, cols, group, &mut out),
            Self::Int4 { group } => return scale::pack_rows::<Int4>(values, cols, group, &mut out),
            Self::Bf16 => |values, weights, _| bf16::pack_row(values, weights),
            Self::Mxfp4 => mxfp4::pack_row,
        };
        let mut scales = out.scales.chunks_mut(scale_row_bytes.max(1));
        let rows = values.chunks(cols).zip(out.weights.chunks_mut(row_bytes)).enumerate();
        rows.map(|(row, (values, weights))| {
            pack_row(values, weights, scales.next().unwrap_or_default())
                .map_err(|e| BadValue { at: row * cols + e.at, ..e })
        })
        .sum()
    }

    /// Decodes one row, the inverse of [`Self::pack_rows`]; `out` is as long as the row has columns.
    pub(crate) fn unpack_row(self, weights: &[u8], scales: &[u8], out: &mut [f32]) {
        match self {
            Self::Bf16 => bf16::unpack_row(weights, out),
            Self::Int8 { group } => unpack_row::<Int8>(weights, scales, group, out),
            Self::Int4 { group } => unpack_row::<Int4>(weights, scales, group, out),
            Self::Mxfp4 => mxfp4::unpack_row(weights, scales, out),
        }
    }

    #[cfg(test)]
    pub(crate) fn all_for_tests() -> impl Iterator<Item = Self> {
        [Self::Bf16, Self::Mxfp4]
            .into_iter()
            .chain([32, 64, 128].into_iter().flat_map(|group| [Self::Int8 { group }, Self::Int4 { group }]))
    }
}

/// A value that a format cannot hold.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct BadValue {
    /// Where it is among the values that were to be packed.
    pub(crate) at: usize,
    pub(crate) value: f32,
    pub(crate) reason: &'static str,
}

impl BadValue {
    const NOT_FINITE: &'static str = "the checkpoint is damaged; fetch it again";
    const TOO_LARGE: &'static str = "too large for this format; use --format bf16";

    /// The first value of `values` that is NaN or infinite.
    fn first_not_finite(values: &[f32]) -> Option<Self> {
        // Summing exponents-all-ones flags without a branch vectorises; the search runs only when there is one.
        let bad = |v: f32| v.to_bits() & 0x7f80_0000 == 0x7f80_0000;
        if !values.iter().fold(false, |any, &v| any | bad(v)) {
            return None;
        }
        let at = values.iter().position(|&v| bad(v))?;
        Some(Self { at, value: values[at], reason: Self::NOT_FINITE })
    }
}

impl fmt::Display for ExpertFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bf16 => f.write_str("bf16"),
            Self::Int8 { group } => write!(f, "int8-g{group}"),
            Self::Int4 { group } => write!(f, "int4-g{group}"),
            Self::Mxfp4 => f.write_str("mxfp4"),
        }
    }
}

/// Reads `bf16`, `mxfp4`, `int8`, `int4` (group 64) and `int8-g32`, `int4-g128` and the like.
impl FromStr for ExpertFormat {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self> {
        let bad = || Error::UnknownFormat { asked: s.to_owned() };
        let (name, group) = match s.split_once("-g") {
            Some((name, group)) => (name, group.parse().map_err(|_| bad())?),
            None => (s, 64),
        };
        match (name, group) {
            ("bf16", _) if !s.contains("-g") => Ok(Self::Bf16),
            ("mxfp4", _) if !s.contains("-g") => Ok(Self::Mxfp4),
            ("int8", 32 | 64 | 128) => Ok(Self::Int8 { group }),
            ("int4", 32 | 64 | 128) => Ok(Self::Int4 { group }),
            _ => Err(bad()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for format in ExpertFormat::all_for_tests() {
            assert_eq!(format.to_string().parse::<ExpertFormat>().unwrap(), format);
        }
        for bad in ["", "int4-g48", "bf16-g64", "mxfp4-g32", "fp4", "int8-g", "int8-gx"] {
            assert!(bad.parse::<ExpertFormat>().is_err(), "{bad}");
        }
    }
}
