//! The expert store: every expert of a model, as records in one format.

use std::path::Path;
use std::sync::Arc;

use super::checkpoint::Checkpoint;
use super::fingerprint::Fingerprint;
use super::gather::{CheckpointSource, FloatType};
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
        match found.float {
            FloatType::Bf16 => {}
            FloatType::F16 => {
                notes.push("experts are F16 in the checkpoint; as BF16 records they are rounded".into())
            }
            FloatType::F32 => {
                notes.push("experts are F32 in the checkpoint; as BF16 records they are rounded".into())
            }
        }
        if found.mxfp4 {
            notes.push(
                "experts are MXFP4 in the checkpoint; BF16 records are exact, and 3.8 times as large".into(),
            );
        }
        let what = checkpoint.describe().to_owned();
        let source = CheckpointSource::new(checkpoint, found, naming)?;
        let specs = source.specs().to_vec();
        let layouts = specs.iter().map(|s| ExpertLayout::new(s, ExpertFormat::Bf16)).collect();
        Ok(Self {
            what,
            origin: Origin::Checkpoint(Arc::new(source)),
            specs,
            layouts,
            format: ExpertFormat::Bf16,
            source_format: ExpertFormat::Bf16,
            notes,
        })
    }

    /// A store of the records of a packed file.
    pub fn from_packed(packed: PackedFile) -> Self {
        let info = packed.info();
        Self {
            what: packed.path().display().to_string(),
            specs: info.layers.iter().map(|l| l.spec).collect(),
            layouts: info.layouts(),
            format: info.format,
            source_format: info.format,
            notes: Vec::new(),
            origin: Origin::Packed(Arc::new(packed)),
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

    /// The format in which the store was opened: BF16 for a checkpoint, a packed store's own.
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
