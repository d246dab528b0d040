//! Gathers one expert's matrices from wherever a checkpoint keeps them into a record.

use std::ops::Range;
use std::sync::Arc;

use half::f16;
use safetensors::Dtype;

use super::checkpoint::{Checkpoint, Encoding, Region};
use super::fingerprint::Fingerprint;
use super::naming::Naming;
use super::quant::Coded;
use super::survey::Survey;
use super::{Directory, RecordIndex, RecordSource, check_record_len};
use crate::error::{Error, Result};
use crate::expert::{ExpertId, ExpertLayout, ExpertSpec, MatrixLayout};
use crate::format::ExpertFormat;
use crate::format::loss::Loss;
use crate::format::record::{ExpertBiases, Weights, check_record, pack_biases, pack_weights};

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

    pub(super) fn of_encoding(encoding: Encoding) -> Option<Self> {
        match encoding {
            Encoding::Plain(dtype) => Self::of(dtype),
            Encoding::Ggml(_) => None,
        }
    }

    pub(super) fn bytes(self) -> usize {
        match self {
            Self::Bf16 | Self::F16 => 2,
            Self::F32 => 4,
        }
    }
}

impl std::fmt::Display for FloatType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Bf16 => "BF16",
            Self::F16 => "F16",
            Self::F32 => "F32",
        })
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
        let Range { start, end } = self.range(rows, cols);
        checkpoint.bytes(Region { shard: self.shard, start, len: end - start })
    }

    /// Where [`Self::span`] is in its shard's file.
    fn range(&self, rows: usize, cols: usize) -> Range<usize> {
        let last = (rows - 1) * self.row_stride + (cols - 1) * self.col_stride;
        self.start..self.start + (last + 1) * self.float.bytes()
    }

    /// Whether the matrix lies in its shard as a BF16 record has it.
    fn is_as_stored(&self, m: &MatrixLayout) -> bool {
        self.float == FloatType::Bf16
            && (self.col_stride, self.row_stride) == (1, m.cols)
            && m.row_bytes == 2 * m.cols
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
    Coded(Coded),
}

impl Part {
    /// Packs the matrix into its place in a zeroed record. Returns what that lost: nothing, not even weights, where the
    /// source's own numbers were copied.
    fn pack(
        &self,
        checkpoint: &Checkpoint,
        (name, format, m): (&'static str, ExpertFormat, &MatrixLayout),
        scratch: &mut Vec<f32>,
        record: &mut [u8],
    ) -> Result<Loss> {
        let shape = [m.rows, m.cols];
        let coded = match self {
            Self::Plain(matrix) => {
                let weights = matrix.weights(checkpoint, shape, scratch);
                return pack_weights(name, format, m, &weights, record);
            }
            Self::Coded(coded) => coded,
        };
        if self.kept_by() == Some(format) {
            let copied = match coded {
                Coded::Mxfp4(matrix) => matrix.copy(checkpoint, name, m, record).map(|()| true)?,
                Coded::Ggml(matrix) => matrix.copy(checkpoint, name, m, record)?,
                _ => false,
            };
            if copied {
                return Ok(Loss::default());
            }
        }
        coded.values(checkpoint, shape, scratch)?;
        pack_weights(name, format, m, &Weights::F32(scratch), record)
    }

    /// The format whose records hold the very numbers of the source, to be copied.
    pub(super) fn kept_by(&self) -> Option<ExpertFormat> {
        match self {
            Self::Plain(_) => None,
            Self::Coded(Coded::Mxfp4(_)) => Some(ExpertFormat::Mxfp4),
            Self::Coded(Coded::Ggml(matrix)) => matrix.kept_by(),
            Self::Coded(_) => None,
        }
    }

    /// Shard and offset of its first byte.
    fn start(&self) -> (usize, usize) {
        match self {
            Self::Plain(matrix) => (matrix.shard, matrix.start),
            Self::Coded(matrix) => matrix.start(),
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

impl ExpertParts {
    pub(super) fn matrices(&self) -> [&Part; 3] {
        [&self.gate, &self.up, &self.down]
    }
}

/// Records gathered from a checkpoint's mapped shards at every read: no second copy of the model is kept.
///
/// They are BF16, or, where every expert is in an encoding that a format keeps as it is, of that format. BF16
/// checkpoints are copied bit for bit; F16, F32 and quantised weights are rounded to BF16, nearest even.
pub(super) struct CheckpointSource {
    checkpoint: Arc<Checkpoint>,
    directory: Directory,
    specs: Vec<ExpertSpec>,
    format: ExpertFormat,
    layouts: Vec<ExpertLayout>,
    experts: Vec<ExpertParts>,
    /// What of the naming decides the records: the layout of stacked tensors, and which layers count.
    recipe: String,
}

impl CheckpointSource {
    pub(super) fn new(checkpoint: Arc<Checkpoint>, survey: Survey, naming: &Naming) -> Result<Self> {
        let layers: Vec<usize> = survey.layers.iter().map(|l| l.layer).collect();
        let recipe = format!("{:?} {:?} {layers:?}", naming.stacked_layout(), naming.quantisation());
        let specs: Vec<ExpertSpec> = survey.layers.iter().map(|l| l.spec).collect();
        let format = survey.kept_by().unwrap_or(ExpertFormat::Bf16);
        let layouts: Vec<ExpertLayout> = specs.iter().map(|s| ExpertLayout::new(s, format)).collect();
        let directory = Directory::new(
            survey
                .layers
                .iter()
                .zip(&layouts)
                .map(|(l, layout)| (l.layer, l.experts.len(), layout.record_bytes)),
        )?;
        let experts = survey.layers.into_iter().flat_map(|l| l.experts).collect();
        Ok(Self { checkpoint, directory, specs, format, layouts, experts, recipe })
    }

    pub(super) fn specs(&self) -> &[ExpertSpec] {
        &self.specs
    }

    /// The format of the records that are read.
    pub(super) fn format(&self) -> ExpertFormat {
        self.format
    }

    /// Every matrix of every expert.
    pub(super) fn matrices(&self) -> impl Iterator<Item = &Part> {
        self.experts.iter().flat_map(ExpertParts::matrices)
    }

    /// Identifies the records' content.
    pub(super) fn key(&self) -> Fingerprint {
        Fingerprint::of(self.checkpoint.shards()).with(self.recipe.as_bytes())
    }

    /// Packs a record in any format straight from the checkpoint's own precision. Returns what that lost.
    pub(super) fn pack(
        &self,
        record: RecordIndex,
        layout: &ExpertLayout,
        scratch: &mut Vec<f32>,
        out: &mut [u8],
    ) -> Result<Loss> {
        check_record(layout, out.len())?;
        let parts = &self.experts[record.0 as usize];
        if layout.format == ExpertFormat::Bf16 && self.copy_bf16(parts, layout, out) {
            return Ok(Loss::default());
        }
        let packed = self.pack_parts(parts, layout, scratch, out);
        packed.map_err(|e| self.name_part(self.directory.id(record), parts, e))
    }

    /// Copies an expert that is BF16 in the checkpoint to a BF16 record; `false`: it is not, and nothing was done.
    fn copy_bf16(&self, parts: &ExpertParts, layout: &ExpertLayout, out: &mut [u8]) -> bool {
        let (Part::Plain(gate), Part::Plain(up), Part::Plain(down), None) =
            (parts.gate, parts.up, parts.down, parts.bias)
        else {
            return false;
        };
        if [gate, up, down].iter().any(|p| p.float != FloatType::Bf16) {
            return false;
        }
        gate.copy_bf16(&self.checkpoint, &layout.gate, out);
        up.copy_bf16(&self.checkpoint, &layout.up, out);
        down.copy_bf16(&self.checkpoint, &layout.down, out);
        // BF16 records have no scales, so the three matrices follow each other without gaps.
        let end = layout.down.weights + layout.down.rows * layout.down.row_bytes;
        out[end..].fill(0);
        true
    }

    /// Calls `with` with the matrices of a record as the checkpoint has them, in F32: gate, up and down.
    pub(super) fn values(
        &self,
        record: RecordIndex,
        scratch: &mut Vec<f32>,
        mut with: impl FnMut(usize, &[f32]),
    ) -> Result<()> {
        let layout = &self.layouts[self.directory.ordinal_of(record)];
        let matrices = [&layout.gate, &layout.up, &layout.down];
        let parts = &self.experts[record.0 as usize];
        for (at, (part, m)) in parts.matrices().into_iter().zip(matrices).enumerate() {
            match part {
                Part::Coded(coded) => {
                    coded.values(&self.checkpoint, [m.rows, m.cols], scratch)?;
                    with(at, scratch);
                }
                Part::Plain(matrix) => {
                    let weights = matrix.weights(&self.checkpoint, [m.rows, m.cols], scratch);
                    let mut values = vec![0.0; m.rows * m.cols];
                    with(at, weights.read(0, &mut values));
                }
            }
        }
        Ok(())
    }

    fn pack_parts(
        &self,
        parts: &ExpertParts,
        layout: &ExpertLayout,
        scratch: &mut Vec<f32>,
        out: &mut [u8],
    ) -> Result<Loss> {
        out.fill(0);
        let checkpoint = &*self.checkpoint;
        let mut loss = Loss::default();
        let matrices = [("gate", &layout.gate), ("up", &layout.up), ("down", &layout.down)];
        for (part, (name, m)) in parts.matrices().into_iter().zip(matrices) {
            loss += part.pack(checkpoint, (name, layout.format, m), scratch, out)?;
        }
        let [mut a, mut b, mut c] = [const { Vec::new() }; 3];
        let (wide, narrow) = (layout.down.rows, layout.gate.rows);
        let bias = parts.bias.as_ref().map(|[gate, up, down]| ExpertBiases {
            gate: gate.weights(checkpoint, [1, narrow], &mut a),
            up: up.weights(checkpoint, [1, narrow], &mut b),
            down: down.weights(checkpoint, [1, wide], &mut c),
        });
        pack_biases(layout, bias.as_ref(), out)?;
        Ok(loss)
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
        let layout = &self.layouts[self.directory.ordinal_of(record)];
        self.pack(record, layout, &mut Vec::new(), out).map(drop)
    }

    /// What lies in the files as the record has it is read; the system is told of the rest and it is gathered.
    fn fetch(&self, record: RecordIndex, out: &mut [u8]) -> Result<()> {
        check_record_len(&self.directory, record, out)?;
        let parts = &self.experts[record.0 as usize];
        let layout = &self.layouts[self.directory.ordinal_of(record)];
        let matrices = [&layout.gate, &layout.up, &layout.down];
        let as_stored = parts.matrices().map(|part| match part {
            Part::Plain(matrix) => Some(matrix),
            Part::Coded(_) => None,
        });
        let shards = self.checkpoint.shards();
        if let ([Some(gate), Some(up), Some(down)], None) = (as_stored, parts.bias)
            && [gate, up, down].iter().zip(matrices).all(|(from, m)| from.is_as_stored(m))
        {
            let mut end = 0;
            for (from, m) in [gate, up, down].into_iter().zip(matrices) {
                end = m.weights + m.rows * m.row_bytes;
                let fetched = shards[from.shard].fetch(from.start, &mut out[m.weights..end]);
                fetched.map_err(|e| shards[from.shard].unreadable(self.directory.id(record), &e))?;
            }
            out[end..].fill(0);
            return Ok(());
        }
        for (from, m) in as_stored.into_iter().zip(matrices).filter_map(|(from, m)| Some((from?, m))) {
            shards[from.shard].will_need(from.range(m.rows, m.cols));
        }
        self.read(record, out)
    }

    fn release(&self) {
        for (parts, record) in self.experts.iter().zip((0..).map(RecordIndex)) {
            let layout = &self.layouts[self.directory.ordinal_of(record)];
            for (part, m) in parts.matrices().into_iter().zip([&layout.gate, &layout.up, &layout.down]) {
                if let Part::Plain(from) = part {
                    self.checkpoint.shards()[from.shard].drop_cache(from.range(m.rows, m.cols));
                }
            }
        }
    }
}
