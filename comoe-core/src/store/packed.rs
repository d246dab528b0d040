//! The packed store, version 1: one aligned record per expert in a valid safetensors file.
//!
//! - Tensor `comoe.layers.L.experts.E`, U8 `[record bytes]`, holds the record of expert `E` of layer `L`. Tensors
//!   follow each other in ascending order of layer, then expert. The data section begins at a multiple of 4096 bytes
//!   (the header is padded with spaces) and record sizes are multiples of 512, so every record is aligned to 512 in
//!   the file.
//! - The header's `__metadata__` has `comoe.version` (`1`), `comoe.format` (as `int4-g64`), `comoe.source` (the key of
//!   what it was made from) and `comoe.layers`, a JSON list with what each layer's records compute.
//!
//! A packed *model* holds, after the records, the tensors that are no expert's, under their own names, and the model's
//! other files (configuration, tokenizer, chat template) as U8 tensors `comoe.files.NAME`: byte for byte, and of any
//! size, which a header is not. `comoe.crc32` has a checksum for every tensor in the order of the data, eight hexadecimal
//! digits each, and `comoe.crc32.header` that of everything before the data, taken with its own digits as zeros.
//!
//! Tensors and metadata that are not known are ignored, so that later versions can add to a file; one that old
//! readers would misread gets another version, which they refuse.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use safetensors::Dtype;
use serde::ser::SerializeMap;
use serde::{Deserialize, Serialize, Serializer};

use super::packed_verify::PackedPart;
use super::shard::Shard;
use super::survey::{MAX_DIM, MAX_EXPERTS};
use super::{Checkpoint, Directory, Encoding, RecordIndex, RecordSource, TensorView, check_record_len};
use crate::error::{Error, Result};
use crate::expert::{Activation, ExpertId, ExpertLayout, ExpertSpec, RECORD_ALIGN, WeightOn};
use crate::format::ExpertFormat;

/// The version that this build writes and reads.
pub(super) const VERSION: u32 = 1;
const VERSION_KEY: &str = "comoe.version";
const FORMAT_KEY: &str = "comoe.format";
const SOURCE_KEY: &str = "comoe.source";
const LAYERS_KEY: &str = "comoe.layers";
const CHECKSUMS_KEY: &str = "comoe.crc32";
const HEADER_CHECKSUM_KEY: &str = "comoe.crc32.header";
const RECORD_PREFIX: &str = "comoe.layers.";
const FILE_PREFIX: &str = "comoe.files.";
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

    /// The file's bytes before the first record, padded so that the data section is aligned. `checksums` has one number
    /// for each record, then for each of `tensors`; its length does not depend on them.
    pub(super) fn header(
        &self,
        directory: &Directory,
        tensors: &[TensorMeta],
        checksums: &[u32],
    ) -> Result<Vec<u8>> {
        let layers: Vec<LayerMeta> = self.layers.iter().map(LayerMeta::from).collect();
        let metadata = BTreeMap::from([
            (VERSION_KEY, VERSION.to_string()),
            (FORMAT_KEY, self.format.to_string()),
            (SOURCE_KEY, self.source.clone()),
            (LAYERS_KEY, to_json(&layers)?),
            (CHECKSUMS_KEY, checksums.iter().map(|sum| format!("{sum:08x}")).collect()),
            (HEADER_CHECKSUM_KEY, NO_CHECKSUM.to_owned()),
        ]);
        let json = to_json(&Header { metadata, directory, tensors })?;
        let length = (8 + json.len()).next_multiple_of(DATA_ALIGN) - 8;
        let mut header = (length as u64).to_le_bytes().to_vec();
        header.extend(json.as_bytes());
        header.resize(8 + length, b' ');
        if let Some(digits) = header_checksum_at(&header) {
            let sum = format!("{:08x}", crc32fast::hash(&header));
            header[digits].copy_from_slice(sum.as_bytes());
        }
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

/// The name of the tensor that holds the file `name`.
fn file_name(name: &str) -> String {
    format!("{FILE_PREFIX}{name}")
}

/// Whether a tensor is one of the records or files of a packed store, and no weight under its own name.
pub(super) fn is_reserved(name: &str) -> bool {
    name.starts_with(RECORD_PREFIX) || name.starts_with(FILE_PREFIX)
}

/// The digits of a checksum that is not known yet.
const NO_CHECKSUM: &str = "00000000";

/// Where the header's own checksum has its digits in the file's first bytes.
fn header_checksum_at(header: &[u8]) -> Option<Range<usize>> {
    let before = format!("\"{HEADER_CHECKSUM_KEY}\":\"");
    let at = header.windows(before.len()).position(|w| w == before.as_bytes())? + before.len();
    (at + NO_CHECKSUM.len() <= header.len()).then(|| at..at + NO_CHECKSUM.len())
}

/// A tensor that a packed store holds beside its records.
#[derive(Debug, Clone, PartialEq)]
pub struct PackedTensor<'a> {
    /// Its name and type.
    pub(super) meta: TensorMeta,
    /// Its elements, little endian.
    pub(super) bytes: &'a [u8],
}

/// A tensor of the header: all but where it is.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct TensorMeta {
    pub(super) name: String,
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<usize>,
    pub(super) bytes: usize,
}

impl<'a> PackedTensor<'a> {
    /// A weight under its own name.
    ///
    /// # Errors
    /// [`Error::BadTensor`] for one whose elements are coded as only a GGUF file can have them.
    pub fn weight(name: &str, view: &TensorView<'a>) -> Result<Self> {
        let Encoding::Plain(dtype) = view.encoding else {
            let reason = format!(
                "is {} in {}, which a packed file cannot hold; a .gguf file is one file already: give it as it is",
                view.encoding,
                view.file.display()
            );
            return Err(Error::bad_tensor(name, reason));
        };
        let meta =
            TensorMeta { name: name.to_owned(), dtype, shape: view.shape.to_vec(), bytes: view.bytes.len() };
        Ok(Self { meta, bytes: view.bytes })
    }

    /// Its elements, little endian.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// One of the model's other files.
    pub fn file(name: &str, bytes: &'a [u8]) -> Self {
        let meta = TensorMeta {
            name: file_name(name),
            dtype: Dtype::U8,
            shape: vec![bytes.len()],
            bytes: bytes.len(),
        };
        Self { meta, bytes }
    }
}

/// Orders `tensors` as they are written: wide elements first, so that each is aligned to its own size behind the
/// records, then by name.
pub(super) fn sort_tensors(tensors: &mut [PackedTensor<'_>]) {
    tensors.sort_by(|a, b| {
        let key = |t: &TensorMeta| (std::cmp::Reverse(t.dtype.bitsize()), is_reserved(&t.name));
        key(&a.meta).cmp(&key(&b.meta)).then_with(|| a.meta.name.cmp(&b.meta.name))
    });
}

struct Header<'a> {
    metadata: BTreeMap<&'static str, String>,
    directory: &'a Directory,
    tensors: &'a [TensorMeta],
}

impl Serialize for Header<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(1 + self.directory.len() + self.tensors.len()))?;
        map.serialize_entry("__metadata__", &self.metadata)?;
        let mut at = 0;
        for index in (0..self.directory.len() as u32).map(RecordIndex) {
            let bytes = self.directory.record_bytes(index);
            let info = Place { dtype: Dtype::U8, shape: &[bytes], data_offsets: [at, at + bytes] };
            map.serialize_entry(&record_name(self.directory.id(index)), &info)?;
            at += bytes;
        }
        for tensor in self.tensors {
            let data_offsets = [at, at + tensor.bytes];
            let info = Place { dtype: tensor.dtype, shape: &tensor.shape, data_offsets };
            map.serialize_entry(&tensor.name, &info)?;
            at += tensor.bytes;
        }
        map.end()
    }
}

#[derive(Serialize)]
struct Place<'a> {
    dtype: Dtype,
    shape: &'a [usize],
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
    /// [`Error::NotPacked`], [`Error::PackedVersion`] for another version; [`Error::TruncatedFile`], [`Error::BadFile`] or [`Error::Io`] for
    /// a file that is not all there, or contradicts itself.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let shard = Shard::open(path.as_ref())?;
        if !is_packed(&shard) {
            return Err(Error::NotPacked { path: path.as_ref().to_owned() });
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

    /// The bytes of one of the model's other files, such as `config.json`, where there is one of that name.
    pub fn file(&self, name: &str) -> Option<&[u8]> {
        Some(&self.shard.bytes()[self.shard.tensor(&file_name(name))?.range.clone()])
    }

    /// Whether the file is a model by itself: its configuration is in it.
    pub fn is_model(&self) -> bool {
        self.file("config.json").is_some()
    }

    pub(super) fn shard(&self) -> &Shard {
        &self.shard
    }

    /// What each stretch of the file is, in its order, and the checksum that was kept of it.
    ///
    /// # Errors
    /// [`Error::BadFile`] for a file without checksums, or with others than its parts.
    pub(super) fn checksums(&self) -> Result<Vec<(PackedPart, Range<usize>, u32)>> {
        let path = self.path();
        let Some(digits) = self.shard.metadata().get(CHECKSUMS_KEY) else {
            return Err(Error::bad_file(path, "has no checksums: an older comoe wrote it; make it again"));
        };
        let bad = || damaged(path, "its checksums do not fit its parts");
        let mut parts: Vec<(&String, Range<usize>)> =
            self.shard.tensors().iter().map(|(name, t)| (name, t.range.clone())).collect();
        parts.sort_by_key(|(_, range)| (range.start, range.end));
        if !digits.is_ascii() || digits.len() != 8 * parts.len() {
            return Err(bad());
        }
        let ids: BTreeMap<usize, ExpertId> = (0..self.directory.len() as u32)
            .map(|index| (self.starts[index as usize], self.directory.id(RecordIndex(index))))
            .collect();
        let mut found = Vec::with_capacity(1 + parts.len());
        let header = &self.shard.bytes()[..self.shard.data_start()];
        let sum = header_checksum_at(header).and_then(|at| std::str::from_utf8(&header[at]).ok());
        let sum = sum.and_then(|sum| u32::from_str_radix(sum, 16).ok()).ok_or_else(bad)?;
        found.push((PackedPart::Header, 0..header.len(), sum));
        for (at, (name, range)) in parts.into_iter().enumerate() {
            let sum = u32::from_str_radix(&digits[8 * at..8 * at + 8], 16).map_err(|_| bad())?;
            let part = match name.strip_prefix(FILE_PREFIX) {
                Some(file) => PackedPart::File(file.to_owned()),
                None if name.starts_with(RECORD_PREFIX) => {
                    PackedPart::Expert(*ids.get(&range.start).ok_or_else(bad)?)
                }
                None => PackedPart::Tensor(name.clone()),
            };
            found.push((part, range, sum));
        }
        Ok(found)
    }

    /// The checksum of one of those stretches as it is now.
    pub(super) fn checksum_of(&self, part: &PackedPart, range: Range<usize>) -> u32 {
        let bytes = &self.shard.bytes()[range];
        if *part != PackedPart::Header {
            return crc32fast::hash(bytes);
        }
        let mut header = bytes.to_vec();
        if let Some(digits) = header_checksum_at(bytes) {
            header[digits].copy_from_slice(NO_CHECKSUM.as_bytes());
        }
        crc32fast::hash(&header)
    }
}

pub(super) fn is_packed(shard: &Shard) -> bool {
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

    fn fetch(&self, record: RecordIndex, out: &mut [u8]) -> Result<()> {
        check_record_len(&self.directory, record, out)?;
        let fetched = self.shard.fetch(self.starts[record.0 as usize], out);
        fetched.map_err(|e| self.shard.unreadable(self.directory.id(record), &e))
    }

    fn release(&self) {
        // Records follow each other.
        let first = self.starts.first().copied().unwrap_or_default();
        self.shard.drop_cache(first..first + self.directory.total_bytes() as usize);
    }
}
