//! The packed store, version 1: one aligned record per expert in a valid safetensors file.
//!
//! - Tensor `comoe.layers.L.experts.E`, U8 `[record bytes]`, holds the record of expert `E` of layer `L`. Tensors
//!   follow each other in ascending order of layer, then expert. The data section begins at a multiple of 4096 bytes
//!   (the header is padded with spaces) and record sizes are multiples of 512, so every record is aligned to 512 in
//!   the file.
//! - The header's `__metadata__` has `comoe.version` (`1`), `comoe.format` (as `int4-g64`), `comoe.source` (the key of
//!   what it was made from) and `comoe.layers`, a JSON list with what each layer's records compute.
//!
//! Tensors and metadata that are not known are ignored, so that later versions can add to a file; one that old
//! readers would misread gets another version, which they refuse.

use std::collections::BTreeMap;
use std::path::Path;

use serde::ser::SerializeMap;
use serde::{Deserialize, Serialize, Serializer};

use super::shard::Shard;
use super::survey::{MAX_DIM, MAX_EXPERTS};
use super::{Checkpoint, Directory, RecordIndex, RecordSource, check_record_len};
use crate::error::{Error, Result};
use crate::expert::{Activation, ExpertId, ExpertLayout, ExpertSpec, RECORD_ALIGN, WeightOn};
use crate::format::ExpertFormat;

/// The version that this build writes and reads.
pub(super) const VERSION: u32 = 1;
const VERSION_KEY: &str = "comoe.version";
const FORMAT_KEY: &str = "comoe.format";
const SOURCE_KEY: &str = "comoe.source";
const LAYERS_KEY: &str = "comoe.layers";
const RECORD_PREFIX: &str = "comoe.layers.";
/// Alignment of the data section.
const DATA_ALIGN: usize = 4096;

/// What a packed store says about its records.
#[derive(Debug, Clone, PartialEq)]
pub struct PackedInfo {
    /// How the records are encoded.
    pub format: ExpertFormat,
    /// The layers that have records, in ascending order of layer number.
    pub layers: Vec<PackedLayer>,
    /// The key of what the records were made from.
    pub source: String,
}

/// The records of one layer of a packed store.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PackedLayer {
    /// The model's layer number.
    pub layer: usize,
    /// Experts of the layer.
    pub experts: usize,
    /// What each of them computes.
    pub spec: ExpertSpec,
}

impl PackedInfo {
    /// The layouts of the layers' records.
    pub(super) fn layouts(&self) -> Vec<ExpertLayout> {
        self.layers.iter().map(|l| ExpertLayout::new(&l.spec, self.format)).collect()
    }

    /// The records that a file with this information holds.
    ///
    /// # Errors
    /// [`Error::BadArgument`] for layers out of order, without experts, or beyond any model's size.
    pub fn directory(&self) -> Result<Directory> {
        for PackedLayer { layer, experts, spec } in &self.layers {
            let dims = [spec.hidden, spec.intermediate];
            if *experts > MAX_EXPERTS || dims.iter().any(|d| !(1..=MAX_DIM).contains(d)) {
                let reason =
                    format!("layer {layer} has {experts} experts of sizes {dims:?}: beyond the limits");
                return Err(Error::BadArgument { what: "layers", reason });
            }
        }
        let layouts = self.layouts();
        let layers = self.layers.iter().zip(&layouts);
        Directory::new(layers.map(|(l, layout)| (l.layer, l.experts, layout.record_bytes)))
    }

    /// The file's bytes before the first record, padded so that the data section is aligned.
    pub(super) fn header(&self, directory: &Directory) -> Result<Vec<u8>> {
        let layers: Vec<LayerMeta> = self.layers.iter().map(LayerMeta::from).collect();
        let metadata = BTreeMap::from([
            (VERSION_KEY, VERSION.to_string()),
            (FORMAT_KEY, self.format.to_string()),
            (SOURCE_KEY, self.source.clone()),
            (LAYERS_KEY, to_json(&layers)?),
        ]);
        let json = to_json(&Header { metadata, directory })?;
        let length = (8 + json.len()).next_multiple_of(DATA_ALIGN) - 8;
        let mut header = (length as u64).to_le_bytes().to_vec();
        header.extend(json.as_bytes());
        header.resize(8 + length, b' ');
        Ok(header)
    }

    fn parse(shard: &Shard) -> Result<Self> {
        let path = shard.path();
        let entry = |key: &str| {
            shard
                .metadata()
                .get(key)
                .map(String::as_str)
                .ok_or_else(|| damaged(path, format!("it has no {key}")))
        };
        let version = entry(VERSION_KEY)?;
        if version != VERSION.to_string() {
            let found = version.chars().take(32).collect();
            return Err(Error::PackedVersion { path: path.to_owned(), found, known: VERSION });
        }
        let format = entry(FORMAT_KEY)?.parse().map_err(|e: Error| damaged(path, e.to_string()))?;
        let layers: Vec<LayerMeta> = serde_json::from_str(entry(LAYERS_KEY)?)
            .map_err(|e| damaged(path, format!("{LAYERS_KEY}: {e}")))?;
        let layers = layers.into_iter().map(LayerMeta::into_layer).collect();
        Ok(Self { format, layers, source: entry(SOURCE_KEY)?.to_owned() })
    }
}

fn damaged(path: &Path, what: impl std::fmt::Display) -> Error {
    Error::bad_file(
        path,
        format!("is a damaged packed store ({what}); delete it and convert the model again"),
    )
}

fn to_json<T: Serialize>(value: &T) -> Result<String> {
    serde_json::to_string(value)
        .map_err(|e| Error::BadArgument { what: "packed store", reason: format!("cannot be written: {e}") })
}

fn record_name(id: ExpertId) -> String {
    format!("{RECORD_PREFIX}{}.experts.{}", id.layer, id.expert)
}

struct Header<'a> {
    metadata: BTreeMap<&'static str, String>,
    directory: &'a Directory,
}

impl Serialize for Header<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(1 + self.directory.len()))?;
        map.serialize_entry("__metadata__", &self.metadata)?;
        let mut at = 0;
        for index in (0..self.directory.len() as u32).map(RecordIndex) {
            let bytes = self.directory.record_bytes(index);
            let info = RecordMeta { dtype: "U8", shape: [bytes], data_offsets: [at, at + bytes] };
            map.serialize_entry(&record_name(self.directory.id(index)), &info)?;
            at += bytes;
        }
        map.end()
    }
}

#[derive(Serialize)]
struct RecordMeta {
    dtype: &'static str,
    shape: [usize; 1],
    data_offsets: [usize; 2],
}

#[derive(Serialize, Deserialize)]
struct LayerMeta {
    layer: usize,
    experts: usize,
    hidden: usize,
    intermediate: usize,
    activation: ActivationMeta,
    bias: bool,
    weight_on: WeightOnMeta,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum ActivationMeta {
    Silu,
    GeluTanh,
    SwigluClamped { limit: f32, alpha: f32 },
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum WeightOnMeta {
    Output,
    Input,
}

impl From<&PackedLayer> for LayerMeta {
    fn from(PackedLayer { layer, experts, spec }: &PackedLayer) -> Self {
        let activation = match spec.activation {
            Activation::Silu => ActivationMeta::Silu,
            Activation::GeluTanh => ActivationMeta::GeluTanh,
            Activation::SwigluClamped { limit, alpha } => ActivationMeta::SwigluClamped { limit, alpha },
        };
        let weight_on = match spec.weight_on {
            WeightOn::Output => WeightOnMeta::Output,
            WeightOn::Input => WeightOnMeta::Input,
        };
        let ExpertSpec { hidden, intermediate, bias, .. } = *spec;
        Self { layer: *layer, experts: *experts, hidden, intermediate, activation, bias, weight_on }
    }
}

impl LayerMeta {
    fn into_layer(self) -> PackedLayer {
        let activation = match self.activation {
            ActivationMeta::Silu => Activation::Silu,
            ActivationMeta::GeluTanh => Activation::GeluTanh,
            ActivationMeta::SwigluClamped { limit, alpha } => Activation::SwigluClamped { limit, alpha },
        };
        let weight_on = match self.weight_on {
            WeightOnMeta::Output => WeightOn::Output,
            WeightOnMeta::Input => WeightOn::Input,
        };
        let Self { hidden, intermediate, bias, .. } = self;
        let spec = ExpertSpec { hidden, intermediate, activation, bias, weight_on };
        PackedLayer { layer: self.layer, experts: self.experts, spec }
    }
}

/// A mapped packed store. Reading a record is one copy.
#[derive(Debug)]
pub struct PackedFile {
    shard: Shard,
    info: PackedInfo,
    directory: Directory,
    /// Where each record begins in the file.
    starts: Vec<usize>,
}

impl PackedFile {
    /// Opens and checks a packed store. The records' bytes are not read.
    ///
    /// # Errors
    /// [`Error::PackedVersion`] for another version; [`Error::TruncatedFile`], [`Error::BadFile`] or [`Error::Io`] for
    /// a file that is no packed store, is not all there, or contradicts itself.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let shard = Shard::open(path.as_ref())?;
        if !is_packed(&shard) {
            return Err(Error::bad_file(path.as_ref(), "is no packed store"));
        }
        Self::from_shard(shard)
    }

    /// The packed store among an opened checkpoint's files, or the checkpoint back.
    pub(super) fn from_checkpoint(checkpoint: Checkpoint) -> Result<std::result::Result<Self, Checkpoint>> {
        let Some(packed) = checkpoint.shards().iter().find(|s| is_packed(s)) else {
            return Ok(Err(checkpoint));
        };
        if checkpoint.shards().len() > 1 {
            return Err(Error::bad_file(
                packed.path(),
                "is a packed store, which is opened alone; give this file or the checkpoint's files",
            ));
        }
        match checkpoint.into_shards().pop() {
            Some(shard) => Self::from_shard(shard).map(Ok),
            None => Err(Error::BadArgument { what: "files", reason: "none given".into() }),
        }
    }

    fn from_shard(shard: Shard) -> Result<Self> {
        let info = PackedInfo::parse(&shard)?;
        let path = shard.path();
        let records = shard.tensors().keys().filter(|name| name.starts_with(RECORD_PREFIX)).count();
        let listed = info.layers.iter().try_fold(0usize, |sum, l| sum.checked_add(l.experts));
        if listed != Some(records) {
            return Err(damaged(
                path,
                match listed {
                    Some(listed) => format!("it holds {records} records and lists {listed}"),
                    None => format!("it holds {records} records and lists more than can be counted"),
                },
            ));
        }
        let directory = info.directory().map_err(|e| damaged(path, e))?;
        let mut starts = Vec::with_capacity(records);
        for index in (0..directory.len() as u32).map(RecordIndex) {
            let (name, bytes) = (record_name(directory.id(index)), directory.record_bytes(index));
            let tensor = shard.tensor(&name).ok_or_else(|| damaged(path, format!("{name} is missing")))?;
            if tensor.range.len() != bytes {
                return Err(damaged(path, format!("{name} has {} bytes, not {bytes}", tensor.range.len())));
            }
            if !tensor.range.start.is_multiple_of(RECORD_ALIGN) {
                return Err(damaged(path, format!("{name} is not aligned to {RECORD_ALIGN} bytes")));
            }
            starts.push(tensor.range.start);
        }
        Ok(Self { shard, info, directory, starts })
    }

    /// What the file says about its records.
    pub fn info(&self) -> &PackedInfo {
        &self.info
    }

    /// The file.
    pub fn path(&self) -> &Path {
        self.shard.path()
    }

    pub(super) fn shard(&self) -> &Shard {
        &self.shard
    }
}

fn is_packed(shard: &Shard) -> bool {
    shard.metadata().contains_key(VERSION_KEY)
}

impl RecordSource for PackedFile {
    fn directory(&self) -> &Directory {
        &self.directory
    }

    fn read(&self, record: RecordIndex, out: &mut [u8]) -> Result<()> {
        check_record_len(&self.directory, record, out)?;
        let start = self.starts[record.0 as usize];
        out.copy_from_slice(&self.shard.bytes()[start..start + out.len()]);
        Ok(())
    }
}
