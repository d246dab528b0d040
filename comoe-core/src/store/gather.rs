//! Gathers one expert's matrices from wherever a checkpoint keeps them into a record.

use std::sync::Arc;

use half::f16;
use safetensors::Dtype;

use super::checkpoint::{Checkpoint, Region};
use super::fingerprint::Fingerprint;
use super::mxfp4::Mxfp4;
use super::naming::Naming;
use super::survey::Survey;
use super::{Directory, RecordIndex, RecordSource, check_record_len};
use crate::error::{Error, Result};
use crate::expert::{ExpertId, ExpertLayout, ExpertSpec, MatrixLayout};
use crate::format::ExpertFormat;
use crate::format::record::{ExpertBiases, ExpertWeights, Weights, pack_expert};

/// Element types that experts are read from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FloatType {
    Bf16,
    F16,
    F32,
}

impl FloatType {
    pub(super) fn of(dtype: Dtype) -> Option<Self> {
        match dtype {
            Dtype::BF16 => Some(Self::Bf16),
            Dtype::F16 => Some(Self::F16),
            Dtype::F32 => Some(Self::F32),
            _ => None,
        }
    }

    pub(super) fn bytes(self) -> usize {
        match self {
            Self::Bf16 | Self::F16 => 2,
            Self::F32 => 4,
        }
    }
}

/// Side of the square tiles in which transposed matrices are read, so that both sides stay in cache.
const TILE: usize = 32;

/// A matrix inside a tensor: element `[r, c]` is at `start + (r * row_stride + c * col_stride) * element size`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Strided {
    pub(super) float: FloatType,
    pub(super) shard: usize,
    /// Byte offset in the shard's file.
    pub(super) start: usize,
    /// In elements.
    pub(super) row_stride: usize,
    /// In elements.
    pub(super) col_stride: usize,
}

impl Strided {
    /// The plain row-major matrix of `cols` columns that begins `skip` elements into `region`.
    pub(super) fn rows_of(float: FloatType, region: Region, skip: usize, cols: usize) -> Self {
        let start = region.start + skip * float.bytes();
        Self { float, shard: region.shard, start, row_stride: cols, col_stride: 1 }
    }

    /// The same matrix, so many elements on.
    pub(super) fn skip(self, elements: usize) -> Self {
        Self { start: self.start + elements * self.float.bytes(), ..self }
    }

    /// The bytes from the first element to the last of `[rows, cols]`, both at least 1.
    fn span<'a>(&self, checkpoint: &'a Checkpoint, rows: usize, cols: usize) -> &'a [u8] {
        let last = (rows - 1) * self.row_stride + (cols - 1) * self.col_stride;
        let len = (last + 1) * self.float.bytes();
        checkpoint.bytes(Region { shard: self.shard, start: self.start, len })
    }

    /// Calls `write(row, col, element bytes)` for every element, in tiles.
    fn for_each<const BYTES: usize>(
        &self,
        checkpoint: &Checkpoint,
        [rows, cols]: [usize; 2],
        mut write: impl FnMut(usize, usize, [u8; BYTES]),
    ) {
        let (elements, _) = self.span(checkpoint, rows, cols).as_chunks::<BYTES>();
        for r0 in (0..rows).step_by(TILE) {
            for c0 in (0..cols).step_by(TILE) {
                for r in r0..rows.min(r0 + TILE) {
                    for c in c0..cols.min(c0 + TILE) {
                        write(r, c, elements[r * self.row_stride + c * self.col_stride]);
                    }
                }
            }
        }
    }

    /// The matrix for packing: its bytes in place when it is contiguous, else gathered into `scratch`.
    fn weights<'a>(
        &self,
        checkpoint: &'a Checkpoint,
        [rows, cols]: [usize; 2],
        scratch: &'a mut Vec<f32>,
    ) -> Weights<'a> {
        if self.col_stride == 1 && (self.row_stride == cols || rows == 1) {
            let bytes = self.span(checkpoint, rows, cols);
            return match self.float {
                FloatType::Bf16 => Weights::Bf16Bytes(bytes),
                FloatType::F16 => Weights::F16Bytes(bytes),
                FloatType::F32 => Weights::F32Bytes(bytes),
            };
        }
        scratch.resize(rows * cols, 0.0);
        match self.float {
            FloatType::Bf16 => self.for_each::<2>(checkpoint, [rows, cols], |r, c, v| {
                scratch[r * cols + c] = half::bf16::from_le_bytes(v).to_f32();
            }),
            FloatType::F16 => self.for_each::<2>(checkpoint, [rows, cols], |r, c, v| {
                scratch[r * cols + c] = f16::from_le_bytes(v).to_f32();
            }),
            FloatType::F32 => self.for_each::<4>(checkpoint, [rows, cols], |r, c, v| {
                scratch[r * cols + c] = f32::from_le_bytes(v);
            }),
        }
        Weights::F32(scratch)
    }

    /// Copies a BF16 matrix into its place in a BF16 record, padding included.
    fn copy_bf16(&self, checkpoint: &Checkpoint, m: &MatrixLayout, out: &mut [u8]) {
        let (row_len, pitch) = (2 * m.cols, m.row_bytes);
        let out = &mut out[m.weights..m.weights + m.rows * pitch];
        if self.col_stride == 1 {
            let from = self.span(checkpoint, m.rows, m.cols);
            if pitch == row_len && self.row_stride == m.cols {
                return out.copy_from_slice(from);
            }
            for (out, from) in out.chunks_exact_mut(pitch).zip(from.chunks(2 * self.row_stride)) {
                out[..row_len].copy_from_slice(&from[..row_len]);
                out[row_len..].fill(0);
            }
            return;
        }
        for out in out.chunks_exact_mut(pitch) {
            out[row_len..].fill(0);
        }
        self.for_each::<2>(checkpoint, [m.rows, m.cols], |r, c, v| {
            out[r * pitch + 2 * c..][..2].copy_from_slice(&v);
        });
    }
}

/// Where a matrix is, and how it is encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    Plain(Strided),
    Mxfp4(Mxfp4),
}

impl Part {
    fn weights<'a>(
        &self,
        checkpoint: &'a Checkpoint,
        shape: [usize; 2],
        scratch: &'a mut Vec<f32>,
    ) -> Weights<'a> {
        match self {
            Self::Plain(matrix) => matrix.weights(checkpoint, shape, scratch),
            Self::Mxfp4(matrix) => {
                matrix.values(checkpoint, shape, scratch);
                Weights::F32(scratch)
            }
        }
    }

    /// Shard and offset of its first byte.
    fn start(&self) -> (usize, usize) {
        match self {
            Self::Plain(matrix) => (matrix.shard, matrix.start),
            Self::Mxfp4(matrix) => (matrix.blocks.shard, matrix.blocks.start),
        }
    }
}

/// Where the parts of one expert are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ExpertParts {
    pub(super) gate: Part,
    pub(super) up: Part,
    pub(super) down: Part,
    /// Gate, up and down biases, as one-row matrices.
    pub(super) bias: Option<[Strided; 3]>,
}

/// BF16 records gathered from a checkpoint's mapped shards at every read: no second copy of the model is kept.
///
/// BF16 checkpoints are copied bit for bit, MXFP4 is expanded exactly; F16 and F32 are rounded to BF16, nearest even.
pub(super) struct CheckpointSource {
    checkpoint: Arc<Checkpoint>,
    directory: Directory,
    specs: Vec<ExpertSpec>,
    layouts: Vec<ExpertLayout>,
    experts: Vec<ExpertParts>,
    /// What of the naming decides the records: the layout of stacked tensors, and which layers count.
    recipe: String,
}

impl CheckpointSource {
    pub(super) fn new(checkpoint: Arc<Checkpoint>, survey: Survey, naming: &Naming) -> Result<Self> {
        let layers: Vec<usize> = survey.layers.iter().map(|l| l.layer).collect();
        let recipe = format!("{:?} {layers:?}", naming.stacked_layout());
        let specs: Vec<ExpertSpec> = survey.layers.iter().map(|l| l.spec).collect();
        let layouts: Vec<ExpertLayout> =
            specs.iter().map(|s| ExpertLayout::new(s, ExpertFormat::Bf16)).collect();
        let directory = Directory::new(
            survey
                .layers
                .iter()
                .zip(&layouts)
                .map(|(l, layout)| (l.layer, l.experts.len(), layout.record_bytes)),
        )?;
        let experts = survey.layers.into_iter().flat_map(|l| l.experts).collect();
        Ok(Self { checkpoint, directory, specs, layouts, experts, recipe })
    }

    pub(super) fn specs(&self) -> &[ExpertSpec] {
        &self.specs
    }

    /// Identifies the records' content.
    pub(super) fn key(&self) -> Fingerprint {
        Fingerprint::of(self.checkpoint.shards()).with(self.recipe.as_bytes())
    }

    /// Packs a record in any format straight from the checkpoint's own precision.
    pub(super) fn pack(&self, record: RecordIndex, layout: &ExpertLayout, out: &mut [u8]) -> Result<()> {
        let (parts, checkpoint) = (&self.experts[record.0 as usize], &*self.checkpoint);
        let [mut a, mut b, mut c, mut d, mut e, mut f] = [const { Vec::new() }; 6];
        let (wide, narrow) = (layout.down.rows, layout.gate.rows);
        let weights = ExpertWeights {
            gate: parts.gate.weights(checkpoint, [narrow, wide], &mut a),
            up: parts.up.weights(checkpoint, [narrow, wide], &mut b),
            down: parts.down.weights(checkpoint, [wide, narrow], &mut c),
            bias: parts.bias.as_ref().map(|[gate, up, down]| ExpertBiases {
                gate: gate.weights(checkpoint, [1, narrow], &mut d),
                up: up.weights(checkpoint, [1, narrow], &mut e),
                down: down.weights(checkpoint, [1, wide], &mut f),
            }),
        };
        pack_expert(layout, &weights, out).map_err(|e| self.name_part(self.directory.id(record), parts, e))
    }

    /// Names the tensor that a packing error is about.
    fn name_part(&self, id: ExpertId, parts: &ExpertParts, error: Error) -> Error {
        let Error::BadWeight { part, .. } = error else { return error };
        let (shard, start) = match (part, parts.bias) {
            ("gate", _) => parts.gate.start(),
            ("up", _) => parts.up.start(),
            ("down", _) => parts.down.start(),
            ("gate bias", Some([gate, _, _])) => (gate.shard, gate.start),
            ("up bias", Some([_, up, _])) => (up.shard, up.start),
            (_, Some([_, _, down])) => (down.shard, down.start),
            _ => return error,
        };
        match self.checkpoint.name_at(shard, start) {
            Some(name) => Error::bad_tensor(name, format!("{id}: {error}")),
            None => error,
        }
    }
}

impl RecordSource for CheckpointSource {
    fn directory(&self) -> &Directory {
        &self.directory
    }

    fn read(&self, record: RecordIndex, out: &mut [u8]) -> Result<()> {
        check_record_len(&self.directory, record, out)?;
        let parts = &self.experts[record.0 as usize];
        let ordinal = self.directory.ordinal_of(record);
        let layout = &self.layouts[ordinal];
        let (Part::Plain(gate), Part::Plain(up), Part::Plain(down), None) =
            (parts.gate, parts.up, parts.down, parts.bias)
        else {
            return self.pack(record, layout, out);
        };
        if [gate, up, down].iter().any(|p| p.float != FloatType::Bf16) {
            return self.pack(record, layout, out);
        }
        gate.copy_bf16(&self.checkpoint, &layout.gate, out);
        up.copy_bf16(&self.checkpoint, &layout.up, out);
        down.copy_bf16(&self.checkpoint, &layout.down, out);
        // BF16 records have no scales, so the three matrices follow each other without gaps.
        let end = layout.down.weights + layout.down.rows * layout.down.row_bytes;
        out[end..].fill(0);
        Ok(())
    }
}
