//! Matrices in encodings of their own: what checkpoints hold beside plain floats. One file per encoding; each says
//! how its tensors are laid out and decodes blocks of rows to F32.

mod awq;
mod config;
mod fp8;
mod gptq;
mod mxfp4;
mod packed;

pub use config::Quantisation;
pub(super) use mxfp4::{BLOCK_BYTES, Mxfp4, check_exponents};

use std::ops::Range;

use half::{bf16, f16};
use rayon::prelude::*;
use safetensors::Dtype;

use self::awq::Awq;
use self::fp8::Fp8;
use self::gptq::Gptq;
use self::packed::Packed;
use super::checkpoint::{Checkpoint, Encoding, Region};
use super::gather::FloatType;
use super::gguf::Ggml;
use super::survey::MAX_DIM;
use crate::error::{Error, Result};

/// Rows that are decoded together: column-major encodings read whole cache lines so.
const BLOCK_ROWS: usize = 64;

/// Where a matrix is, and how it is encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Coded {
    Mxfp4(Mxfp4),
    Fp8(Fp8),
    Packed(Packed),
    Gptq(Gptq),
    Awq(Awq),
    Ggml(Ggml),
}

/// A matrix `[rows, cols]` of a checkpoint, in any encoding but plain floats.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QuantisedMatrix {
    pub(super) shape: [usize; 2],
    pub(super) coded: Coded,
}

impl QuantisedMatrix {
    /// The matrix `{stem}.weight`, from whatever tensors hold it; `None` when it is plain, or not there.
    ///
    /// # Errors
    /// [`Error::BadTensor`] for a part that is missing or has another type or shape than its encoding asks for.
    pub fn find(checkpoint: &Checkpoint, stem: &str, how: &Quantisation) -> Result<Option<Self>> {
        let parts = Parts { checkpoint, stem };
        let found = if let Some(encoding) = parts.encoding("weight") {
            match encoding {
                Encoding::Ggml(ggml) => Some(parts.ggml(ggml)?),
                Encoding::Plain(Dtype::F8_E4M3) => Some(Fp8::open(&parts, how)?),
                Encoding::Plain(dtype) if FloatType::of(dtype).is_some() => None,
                Encoding::Plain(dtype) => {
                    let reason = format!(
                        "has dtype {dtype}; weights are read from BF16, F16, F32 or F8_E4M3, or as {}",
                        Quantisation::KNOWN
                    );
                    return Err(Error::bad_tensor(parts.name("weight"), reason));
                }
            }
        } else if parts.encoding("qweight").is_some() {
            Some(if Awq::is_this(&parts)? { Awq::open(&parts)? } else { Gptq::open(&parts, how)? })
        } else if parts.encoding("weight_packed").is_some() {
            Some(Packed::open(&parts)?)
        } else {
            None
        };
        Ok(found.map(|(shape, coded)| Self { shape, coded }))
    }

    /// `[rows, cols]`: output and input features.
    pub fn shape(&self) -> [usize; 2] {
        self.shape
    }

    /// Decodes the matrix to `out`, row-major, on all threads. Nothing is lost, except that a scale times a value is
    /// rounded to F32 where it has more than 24 bits.
    ///
    /// # Errors
    /// [`Error::BadTensor`] for a group index that is out of range.
    pub fn values(&self, checkpoint: &Checkpoint, out: &mut Vec<f32>) -> Result<()> {
        self.coded.values(checkpoint, self.shape, out)
    }
}

impl Coded {
    /// Decodes `[rows, cols]` to `out`.
    pub(super) fn values(
        &self,
        checkpoint: &Checkpoint,
        [rows, cols]: [usize; 2],
        out: &mut Vec<f32>,
    ) -> Result<()> {
        out.resize(rows * cols, 0.0);
        if cols == 0 {
            return Ok(());
        }
        out.par_chunks_mut(BLOCK_ROWS * cols).enumerate().try_for_each(|(block, out)| {
            let first = block * BLOCK_ROWS;
            self.block(checkpoint, first..first + out.len() / cols, cols, out)
        })
    }

    fn block(&self, checkpoint: &Checkpoint, rows: Range<usize>, cols: usize, out: &mut [f32]) -> Result<()> {
        match self {
            Self::Gptq(matrix) => return matrix.block(checkpoint, rows, cols, out),
            Self::Packed(matrix) => return matrix.block(checkpoint, rows, cols, out),
            Self::Awq(matrix) => matrix.block(checkpoint, rows, cols, out),
            Self::Mxfp4(matrix) => matrix.block(checkpoint, rows, cols, out),
            Self::Fp8(matrix) => matrix.block(checkpoint, rows, cols, out),
            Self::Ggml(matrix) => matrix.block(checkpoint, rows, cols, out),
        }
        Ok(())
    }

    /// For people to read.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Mxfp4(_) => "MXFP4",
            Self::Fp8(_) => "FP8",
            Self::Packed(_) => "compressed-tensors int4",
            Self::Gptq(_) => "GPTQ int4",
            Self::Awq(_) => "AWQ int4",
            Self::Ggml(matrix) => matrix.kind().name(),
        }
    }

    /// Bits a weight, scales included.
    pub(super) fn bits(&self) -> f64 {
        match self {
            Self::Fp8(_) => 8.0,
            Self::Ggml(matrix) => matrix.kind().bits(),
            Self::Mxfp4(_) | Self::Packed(_) | Self::Gptq(_) | Self::Awq(_) => 4.25,
        }
    }

    /// Weights that share a scale, where the encoding is four bits with such.
    pub(super) fn int4_group(&self) -> Option<usize> {
        match self {
            Self::Packed(matrix) => Some(matrix.group()),
            Self::Gptq(matrix) => Some(matrix.group()),
            Self::Awq(matrix) => Some(matrix.group()),
            Self::Mxfp4(_) | Self::Fp8(_) | Self::Ggml(_) => None,
        }
    }

    /// Shard and offset of its first byte.
    pub(super) fn start(&self) -> (usize, usize) {
        let region = match self {
            Self::Mxfp4(matrix) => matrix.blocks,
            Self::Fp8(matrix) => matrix.weights,
            Self::Packed(matrix) => matrix.weights,
            Self::Gptq(matrix) => matrix.weights,
            Self::Awq(matrix) => matrix.weights,
            Self::Ggml(matrix) => matrix.region(),
        };
        (region.shard, region.start)
    }
}

/// The tensors of one matrix: `{stem}.weight` and the like.
struct Parts<'a> {
    checkpoint: &'a Checkpoint,
    stem: &'a str,
}

impl Parts<'_> {
    fn name(&self, part: &str) -> String {
        format!("{}.{part}", self.stem)
    }

    fn encoding(&self, part: &str) -> Option<Encoding> {
        self.checkpoint.encoding(&self.name(part))
    }

    /// A part of this type and rank, every dimension from 1 to [`MAX_DIM`].
    fn dims<const N: usize>(&self, part: &str, dtype: Dtype) -> Result<[usize; N]> {
        let name = self.name(part);
        let view = self.checkpoint.tensor(&name)?;
        if view.encoding != Encoding::Plain(dtype) {
            return Err(Error::bad_tensor(name, format!("expected dtype {dtype}, found {}", view.encoding)));
        }
        match <[usize; N]>::try_from(view.shape) {
            Ok(dims) if dims.iter().all(|d| (1..=MAX_DIM).contains(d)) => Ok(dims),
            _ => Err(Error::bad_tensor(
                name,
                format!("expected {N} dimensions from 1 to {MAX_DIM}, found shape {:?}", view.shape),
            )),
        }
    }

    /// A part of this type and shape.
    fn region(&self, part: &str, dtype: Dtype, shape: &[usize]) -> Result<Region> {
        let name = self.name(part);
        let view = self.checkpoint.tensor(&name)?;
        if (view.encoding, view.shape) == (Encoding::Plain(dtype), shape) {
            return self.checkpoint.region(&name);
        }
        let reason = format!("expected {dtype} {shape:?}, found {} {:?}", view.encoding, view.shape);
        Err(Error::bad_tensor(name, reason))
    }

    /// A part of floats, in this shape.
    fn floats(&self, part: &str, shape: &[usize]) -> Result<Floats> {
        let name = self.name(part);
        let view = self.checkpoint.tensor(&name)?;
        match FloatType::of_encoding(view.encoding) {
            Some(float) if view.shape == shape => {
                Ok(Floats { region: self.checkpoint.region(&name)?, float })
            }
            _ => {
                let reason =
                    format!("expected BF16, F16 or F32 {shape:?}, found {} {:?}", view.encoding, view.shape);
                Err(Error::bad_tensor(name, reason))
            }
        }
    }

    fn ggml(&self, ggml: Ggml) -> Result<([usize; 2], Coded)> {
        let name = self.name("weight");
        let shape = self.checkpoint.tensor(&name)?.shape;
        match *shape {
            [rows, cols] => Ok(([rows, cols], Coded::Ggml(ggml))),
            _ => Err(Error::bad_tensor(name, format!("expected 2 dimensions, found shape {shape:?}"))),
        }
    }
}

/// A tensor of scales.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Floats {
    region: Region,
    float: FloatType,
}

impl Floats {
    fn read<'a>(&self, checkpoint: &'a Checkpoint) -> FloatValues<'a> {
        FloatValues { bytes: checkpoint.bytes(self.region), float: self.float }
    }
}

/// Floats in place.
#[derive(Clone, Copy)]
struct FloatValues<'a> {
    bytes: &'a [u8],
    float: FloatType,
}

impl FloatValues<'_> {
    fn at(&self, i: usize) -> f32 {
        match self.float {
            FloatType::Bf16 => bf16::from_le_bytes(self.bytes.as_chunks::<2>().0[i]).to_f32(),
            FloatType::F16 => f16::from_le_bytes(self.bytes.as_chunks::<2>().0[i]).to_f32(),
            FloatType::F32 => f32::from_le_bytes(self.bytes.as_chunks::<4>().0[i]),
        }
    }
}

/// The little-endian words of an I32 tensor.
fn words(checkpoint: &Checkpoint, region: Region) -> &[[u8; 4]] {
    checkpoint.bytes(region).as_chunks::<4>().0
}

/// Nibble `n` of a word, as a number from 0 to 15.
fn nibble(word: [u8; 4], n: usize) -> u32 {
    u32::from_le_bytes(word) >> (4 * n) & 15
}

/// The size of `groups` groups over `cols` columns, of which the last may be shorter.
fn group_size(name: String, cols: usize, groups: usize) -> Result<usize> {
    let size = cols.div_ceil(groups);
    match cols.div_ceil(size) == groups {
        true => Ok(size),
        false => {
            Err(Error::bad_tensor(name, format!("has {groups} groups, into which {cols} inputs do not fall")))
        }
    }
}
