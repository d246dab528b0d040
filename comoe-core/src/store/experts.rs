//! The expert store: every expert of a model, as records in one format.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use super::checkpoint::Checkpoint;
use super::fingerprint::Fingerprint;
use super::gather::{CheckpointSource, FloatType, Part};
use super::naming::Naming;
use super::packed::PackedFile;
use super::survey::survey;
use super::{Directory, RecordSource};
use crate::error::Result;
use crate::expert::{Activation, ExpertLayout, ExpertSpec, WeightOn};
use crate::format::ExpertFormat;

/// Every expert of a model, on the host, as records in one format.
///
/// Opening reads headers only. Records of a checkpoint are gathered from its mapped shards when they are read;
/// [`Self::into_format`] makes a store of another format, once.
#[derive(Clone)]
pub struct ExpertStore {
    pub(super) what: String,
    pub(super) origin: Origin,
    pub(super) specs: Vec<ExpertSpec>,
    pub(super) layouts: Vec<ExpertLayout>,
    pub(super) format: ExpertFormat,
    pub(super) source_format: ExpertFormat,
    pub(super) notes: Vec<String>,
}

/// Where the records come from.
#[derive(Clone)]
pub(super) enum Origin {
    /// Gathered from a checkpoint; can be packed in any format from its own precision.
    Checkpoint(Arc<CheckpointSource>),
    /// Records of a packed file.
    Packed(Arc<PackedFile>),
    /// Records of another source, and the key of what they were made from, where it is known.
    Records(Arc<dyn RecordSource>, Option<Fingerprint>),
}

impl ExpertStore {
    /// Opens a checkpoint (as [`Checkpoint::open`] does) or a packed store; a packed store is told by its header,
    /// and needs no naming.
    ///
    /// # Errors
    /// As [`Checkpoint::open`], [`Self::from_checkpoint`] and [`PackedFile::open`].
    pub fn open<P: AsRef<Path>>(files: &[P], naming: &Naming) -> Result<Self> {
        match PackedFile::from_checkpoint(Checkpoint::open(files)?)? {
            Ok(packed) => Ok(Self::from_packed(packed)),
            Err(checkpoint) => Self::from_checkpoint(Arc::new(checkpoint), naming),
        }
    }

    /// Finds the experts of an opened checkpoint. Sizes come from the tensors' shapes; experts are taken as SwiGLU
    /// with the routing weight on the output until [`Self::with_activation`] or [`Self::with_weight_on`] says
    /// otherwise.
    ///
    /// # Errors
    /// [`Error::NoExperts`](crate::Error::NoExperts); [`Error::UnknownExpertTensor`](crate::Error::UnknownExpertTensor);
    /// [`Error::BadTensor`](crate::Error::BadTensor) for an expert that is incomplete or differs from the others in shape or
    /// type.
    pub fn from_checkpoint(checkpoint: Arc<Checkpoint>, naming: &Naming) -> Result<Self> {
        let found = survey(&checkpoint, naming)?;
        let mut notes = Vec::new();
        if let Some(float @ (FloatType::F16 | FloatType::F32)) = found.float {
            notes.push(format!("experts are {float} in the checkpoint; as BF16 records they are rounded"));
        }
        let what = checkpoint.describe().to_owned();
        let source = CheckpointSource::new(checkpoint, found, naming)?;
        let (format, specs) = (source.format(), source.specs().to_vec());
        let (source_format, encodings) = source_format(&source);
        if !encodings.is_empty() {
            notes.push(match format == source_format && format != ExpertFormat::Bf16 {
                true => format!("experts are {encodings} in the checkpoint, and are kept as they are"),
                false => format!("experts are {encodings} in the checkpoint"),
            });
        }
        let layouts = specs.iter().map(|s| ExpertLayout::new(s, format)).collect();
        Ok(Self {
            what,
            origin: Origin::Checkpoint(Arc::new(source)),
            specs,
            layouts,
            format,
            source_format,
            notes,
        })
    }

    /// A store of the records of a packed file.
    pub fn from_packed(packed: impl Into<Arc<PackedFile>>) -> Self {
        let packed = packed.into();
        let info = packed.info();
        Self {
            what: packed.path().display().to_string(),
            specs: info.layers.iter().map(|l| l.spec).collect(),
            layouts: info.layouts(),
            format: info.format,
            source_format: info.format,
            notes: Vec::new(),
            origin: Origin::Packed(packed),
        }
    }

    /// A store of records that the caller makes or keeps: `source`'s records are experts in `format`, those of its
    /// `i`-th layer laid out for `specs[i]` as [`ExpertLayout::new`] does.
    ///
    /// # Errors
    /// [`Error::BadArgument`](crate::Error::BadArgument) when there is not one spec per layer, or when a layer's
    /// records have another size than its spec's.
    pub fn from_source(
        source: Arc<dyn RecordSource>,
        specs: Vec<ExpertSpec>,
        format: ExpertFormat,
    ) -> Result<Self> {
        let bad = |reason| Err(crate::Error::BadArgument { what: "specs", reason });
        let entries = source.directory().layers();
        if specs.len() != entries.len() {
            return bad(format!("{} specs for {} layers", specs.len(), entries.len()));
        }
        let layouts: Vec<_> = specs.iter().map(|s| ExpertLayout::new(s, format)).collect();
        for (entry, layout) in entries.iter().zip(&layouts) {
            if entry.record_bytes != layout.record_bytes {
                let (has, needs) = (entry.record_bytes, layout.record_bytes);
                return bad(format!(
                    "records of layer {} have {has} bytes, {format} needs {needs}",
                    entry.layer
                ));
            }
        }
        let what = "records of the caller".to_owned();
        let origin = Origin::Records(source, None);
        Ok(Self { what, origin, specs, layouts, format, source_format: format, notes: Vec::new() })
    }

    /// Declares the gate's non-linearity, of every layer.
    #[must_use]
    pub fn with_activation(mut self, activation: Activation) -> Self {
        self.specs.iter_mut().for_each(|s| s.activation = activation);
        self
    }

    /// Declares where the routing weight is multiplied in, in every layer.
    #[must_use]
    pub fn with_weight_on(mut self, weight_on: WeightOn) -> Self {
        self.specs.iter_mut().for_each(|s| s.weight_on = weight_on);
        self
    }

    /// Which records there are.
    pub fn directory(&self) -> &Directory {
        self.source_ref().directory()
    }

    /// What a record of the `ordinal`-th layer with experts computes.
    ///
    /// # Panics
    /// When there are not so many layers, as [`Directory::layers`] counts them.
    pub fn spec(&self, ordinal: usize) -> &ExpertSpec {
        &self.specs[ordinal]
    }

    /// What the records of each layer with experts compute.
    pub fn specs(&self) -> &[ExpertSpec] {
        &self.specs
    }

    /// Where the parts of a record of the `ordinal`-th layer with experts lie.
    ///
    /// # Panics
    /// When there are not so many layers, as [`Directory::layers`] counts them.
    pub fn layout(&self, ordinal: usize) -> &ExpertLayout {
        &self.layouts[ordinal]
    }

    /// The records' format.
    pub fn format(&self) -> ExpertFormat {
        self.format
    }

    /// The format that fits best what was opened: a packed store's own; for a checkpoint BF16, or, where its experts
    /// are quantised, the least that holds them well. [`Self::format`] differs from it where getting there is more than
    /// copying: convert once, with [`Self::into_format_with`].
    pub fn source_format(&self) -> ExpertFormat {
        self.source_format
    }

    /// Hands out the records.
    pub fn source(&self) -> Arc<dyn RecordSource> {
        match &self.origin {
            Origin::Checkpoint(source) => source.clone(),
            Origin::Packed(source) => source.clone(),
            Origin::Records(source, _) => source.clone(),
        }
    }

    /// Whether the records are made from quantised weights.
    pub(super) fn is_quantised(&self) -> bool {
        match &self.origin {
            Origin::Checkpoint(source) => source.matrices().any(|part| matches!(part, Part::Coded(_))),
            Origin::Packed(_) | Origin::Records(..) => false,
        }
    }

    /// Whether the records are read from files when they are needed.
    pub(crate) fn is_in_files(&self) -> bool {
        matches!(self.origin, Origin::Checkpoint(_) | Origin::Packed(_))
    }

    pub(super) fn source_ref(&self) -> &dyn RecordSource {
        match &self.origin {
            Origin::Checkpoint(source) => &**source,
            Origin::Packed(source) => &**source,
            Origin::Records(source, _) => &**source,
        }
    }

    /// Identifies what the records are made from, and how. Touches the data of every shard.
    pub(super) fn key(&self) -> Option<Fingerprint> {
        match &self.origin {
            Origin::Checkpoint(source) => Some(source.key()),
            Origin::Packed(file) => Some(Fingerprint::of(std::slice::from_ref(file.shard()))),
            Origin::Records(_, key) => *key,
        }
    }

    /// What is in force beyond what was asked: roundings, where converted records are kept.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// One line: what was opened, how many experts, in which format, how many bytes.
    pub fn describe(&self) -> String {
        let directory = self.directory();
        format!(
            "{}: {} experts in {} layers, {}, {:.1} MiB",
            self.what,
            directory.len(),
            directory.layers().len(),
            self.format,
            directory.total_bytes() as f64 / (1 << 20) as f64
        )
    }
}

impl std::fmt::Debug for ExpertStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.describe())
    }
}

/// The format that fits the experts of a checkpoint best, and the names of their encodings (none when they are plain).
///
/// What a format holds without loss has that format. Four bits with scales (GPTQ, AWQ, compressed-tensors) become INT4
/// with a group that falls into theirs: without loss where they have no zero points and their scales are f16 numbers. FP8
/// becomes BF16, since eight bits of another kind would lose some. GGUF's other types become INT4 up to five bits a
/// weight on average, else INT8.
fn source_format(source: &CheckpointSource) -> (ExpertFormat, String) {
    let mut names = BTreeSet::new();
    let (mut group, mut only_int4, mut matrices, mut bits) = (0, true, 0u64, 0.0);
    for part in source.matrices() {
        let Part::Coded(coded) = part else {
            only_int4 = false;
            (matrices, bits) = (matrices + 1, bits + 16.0);
            continue;
        };
        names.insert(coded.name());
        match coded.int4_group() {
            Some(of) => group = gcd(group, of),
            None => only_int4 = false,
        }
        (matrices, bits) = (matrices + 1, bits + coded.bits());
    }
    let encodings = names.into_iter().collect::<Vec<_>>().join(", ");
    let bits = bits / matrices.max(1) as f64;
    let format = match source.format() {
        ExpertFormat::Bf16 if only_int4 && matrices > 0 => {
            let group = [128, 64].into_iter().find(|g| group.is_multiple_of(*g)).unwrap_or(32);
            ExpertFormat::Int4 { group }
        }
        ExpertFormat::Bf16 if bits <= 5.0 => ExpertFormat::Int4 { group: 32 },
        ExpertFormat::Bf16 if bits < 9.0 && !encodings.contains("FP8") => ExpertFormat::Int8 { group: 32 },
        kept => kept,
    };
    (format, encodings)
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}
