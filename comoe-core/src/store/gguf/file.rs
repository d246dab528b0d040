//! A GGUF file's header (llama.cpp's `docs/gguf.md`, versions 2 and 3). Every number of it is checked against the file
//! before anything is allocated or read by it.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use super::GgmlType;
use crate::error::{Error, Result};
use crate::store::checkpoint::Region;
use crate::store::shard::Shard;
use crate::store::survey::MAX_DIM;

/// Above every published file by an order of magnitude.
const MAX_TENSORS: u64 = 1 << 18;
/// Metadata entries; published files have below a hundred.
const MAX_ENTRIES: u64 = 1 << 14;
/// Bytes of a key or of a tensor's name.
const MAX_NAME: usize = 1 << 10;
/// Bytes before the data: vocabularies make the most of it, 20 MB at most in published files. What is read of it takes up
/// to eight times as much memory.
const MAX_HEADER: usize = 128 << 20;
/// Files of one model.
const MAX_SPLITS: u64 = 1 << 10;

/// A value of a GGUF file's metadata.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum GgufValue {
    /// Any unsigned integer, or a signed one that is not negative.
    Unsigned(u64),
    /// A negative integer.
    Negative(i64),
    /// A float.
    Float(f64),
    /// A truth value.
    Bool(bool),
    /// A text.
    Text(String),
    /// A list of texts.
    Texts(Vec<String>),
    /// A list of integers.
    Integers(Vec<i64>),
    /// A list of floats.
    Floats(Vec<f32>),
    /// A list of truth values.
    Bools(Vec<bool>),
}

/// A tensor as its file describes it.
#[derive(Debug, Clone)]
pub(super) struct GgufTensor {
    pub(super) kind: GgmlType,
    /// Row-major: the file's dimensions in reverse.
    pub(super) shape: Vec<usize>,
    pub(super) region: Region,
}

/// An opened GGUF model: one file, or all files of a split one.
#[derive(Debug)]
pub struct Gguf {
    pub(super) path: PathBuf,
    pub(super) metadata: BTreeMap<String, GgufValue>,
    pub(super) tensors: HashMap<String, GgufTensor>,
    pub(super) shards: Vec<Shard>,
}

impl Gguf {
    /// Opens a file, and where it is one of several (`...-00001-of-00003.gguf`) all of them. Headers are read and checked;
    /// data is not touched.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::MissingShard`], [`Error::TruncatedFile`]; [`Error::BadFile`] and [`Error::BadTensor`] for a
    /// header that contradicts itself or goes beyond the limits of this reader.
    pub fn open(path: &Path) -> Result<Self> {
        let first = Header::read(path, 0)?;
        let parts = first.parts(path)?;
        if parts.is_empty() {
            let Header { shard, metadata, tensors } = first;
            return Ok(Self { path: path.to_owned(), metadata, tensors, shards: vec![shard] });
        }
        let mut this = Self {
            path: parts[0].clone(),
            metadata: BTreeMap::new(),
            tensors: HashMap::new(),
            shards: Vec::with_capacity(parts.len()),
        };
        for (number, part) in parts.iter().enumerate() {
            if !part.exists() {
                return Err(Error::MissingShard { index: path.to_owned(), shard: part.clone() });
            }
            let header = Header::read(part, number)?;
            let said = (header.number("split.no"), header.number("split.count"));
            if said != (Some(number as u64), Some(parts.len() as u64)) {
                let reason = format!(
                    "says that it is part {:?} of {:?}, but by its name it is {number} (from 0) of {}",
                    said.0,
                    said.1,
                    parts.len()
                );
                return Err(Error::bad_file(part, reason));
            }
            if number == 0 {
                this.metadata = header.metadata;
            }
            for (name, tensor) in header.tensors {
                if this.tensors.insert(name.clone(), tensor).is_some() {
                    return Err(Error::bad_tensor(name, "is in two of the model's files"));
                }
            }
            this.shards.push(header.shard);
        }
        Ok(this)
    }

    /// The file, of several the first.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A value of the metadata.
    pub fn get(&self, key: &str) -> Option<&GgufValue> {
        self.metadata.get(key)
    }

    /// A value of the metadata that is an integer, not negative.
    pub fn number(&self, key: &str) -> Option<u64> {
        match self.get(key) {
            Some(GgufValue::Unsigned(n)) => Some(*n),
            _ => None,
        }
    }

    /// A value of the metadata that is a number.
    pub fn float(&self, key: &str) -> Option<f64> {
        match self.get(key) {
            Some(GgufValue::Float(v)) => Some(*v),
            Some(GgufValue::Unsigned(n)) => Some(*n as f64),
            Some(GgufValue::Negative(n)) => Some(*n as f64),
            _ => None,
        }
    }

    /// A value of the metadata that is a text.
    pub fn text(&self, key: &str) -> Option<&str> {
        match self.get(key) {
            Some(GgufValue::Text(text)) => Some(text),
            _ => None,
        }
    }

    /// `general.architecture`.
    ///
    /// # Errors
    /// [`Error::BadFile`] when there is none.
    pub fn architecture(&self) -> Result<&str> {
        self.text("general.architecture").ok_or_else(|| {
            Error::bad_file(
                &self.path,
                "has no general.architecture; download it again, or convert the model again",
            )
        })
    }

    /// Whether there is a tensor of this name, as the file has it.
    pub fn has_tensor(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// The shape of a tensor by its name in the file, row-major.
    pub fn tensor_shape(&self, name: &str) -> Option<&[usize]> {
        self.tensors.get(name).map(|t| t.shape.as_slice())
    }
}

struct Header {
    shard: Shard,
    metadata: BTreeMap<String, GgufValue>,
    tensors: HashMap<String, GgufTensor>,
}

impl Header {
    fn read(path: &Path, number: usize) -> Result<Self> {
        let mut shard = Shard::map(path)?;
        let whole = shard.bytes();
        let mut reader =
            Reader { path, bytes: &whole[..whole.len().min(MAX_HEADER)], at: 0, whole: whole.len() };
        let (tensor_count, entry_count) = reader.preamble()?;
        let mut metadata = BTreeMap::new();
        for _ in 0..entry_count {
            let key = reader.name("a key of the metadata")?;
            let value = reader.value(&key)?;
            if metadata.insert(key.clone(), value).is_some() {
                return Err(reader.bad(format!("has the key {key:?} twice")));
            }
        }
        let align = match metadata.get("general.alignment") {
            None => 32,
            Some(GgufValue::Unsigned(n)) if n.is_power_of_two() && (8..=1 << 20).contains(n) => *n as usize,
            Some(other) => {
                return Err(reader.bad(format!("has the alignment {other:?}, expected a power of two")));
            }
        };
        let mut infos = Vec::new();
        for _ in 0..tensor_count {
            infos.push(reader.tensor(align)?);
        }
        let data = reader.at.next_multiple_of(align);
        let found = shard.bytes().len();
        let mut tensors = HashMap::with_capacity(infos.len());
        let mut places = Vec::with_capacity(infos.len());
        for Info { name, kind, shape, offset, bytes } in infos {
            let end = data.checked_add(offset).and_then(|start| start.checked_add(bytes));
            let Some(end) = end.filter(|end| *end <= found) else {
                let promised = end.map_or(u64::MAX, |end| end as u64);
                return Err(Error::TruncatedFile { path: path.to_owned(), promised, found: found as u64 });
            };
            places.push((end - bytes, end));
            let region = Region { shard: number, start: end - bytes, len: bytes };
            if tensors.insert(name.clone(), GgufTensor { kind, shape, region }).is_some() {
                return Err(Error::bad_file(path, format!("has the tensor {name:?} twice")));
            }
        }
        places.sort_unstable();
        if places.windows(2).any(|w| w[1].0 < w[0].1) {
            return Err(Error::bad_file(path, "has tensors that overlap; download it again"));
        }
        shard.set_data_start(data.min(found));
        Ok(Self { shard, metadata, tensors })
    }

    fn number(&self, key: &str) -> Option<u64> {
        match self.metadata.get(key) {
            Some(GgufValue::Unsigned(n)) => Some(*n),
            _ => None,
        }
    }

    /// The paths of all files of a split model; none for a single file.
    fn parts(&self, path: &Path) -> Result<Vec<PathBuf>> {
        let count = match self.number("split.count") {
            None | Some(0 | 1) => return Ok(Vec::new()),
            Some(count) if count <= MAX_SPLITS => count,
            Some(count) => {
                return Err(Error::bad_file(path, format!("says that it is one of {count} files")));
            }
        };
        let name = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        let ending = format!("-of-{count:05}.gguf");
        let stem = name.strip_suffix(&ending).and_then(|rest| {
            let (stem, number) = rest.rsplit_once('-')?;
            (number.len() == 5 && number.bytes().all(|b| b.is_ascii_digit())).then_some(stem)
        });
        let Some(stem) = stem else {
            let reason = format!(
                "is one of {count} files, but is not named NAME-00001{ending}: give the files the names that they were \
                 published under"
            );
            return Err(Error::bad_file(path, reason));
        };
        Ok((1..=count).map(|n| path.with_file_name(format!("{stem}-{n:05}{ending}"))).collect())
    }
}

struct Info {
    name: String,
    kind: GgmlType,
    shape: Vec<usize>,
    offset: usize,
    bytes: usize,
}

struct Reader<'a> {
    path: &'a Path,
    /// As much of the file as may be its header.
    bytes: &'a [u8],
    at: usize,
    /// Bytes of the file.
    whole: usize,
}

impl<'a> Reader<'a> {
    fn bad(&self, reason: impl Into<String>) -> Error {
        Error::bad_file(self.path, reason)
    }

    /// That the file, or what a header may be, ends before so many more bytes.
    fn ends_before(&self, more: u64) -> Error {
        let promised = (self.at as u64).saturating_add(more);
        if promised <= self.whole as u64 {
            return self.bad(format!(
                "has a header of more than {MAX_HEADER} bytes, which is more than any model's"
            ));
        }
        Error::TruncatedFile { path: self.path.to_owned(), promised, found: self.whole as u64 }
    }

    fn take(&mut self, len: usize) -> Result<&'a [u8]> {
        let end = self.at.checked_add(len).filter(|end| *end <= self.bytes.len());
        let Some(end) = end else { return Err(self.ends_before(len as u64)) };
        let taken = &self.bytes[self.at..end];
        self.at = end;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N)?);
        Ok(out)
    }

    fn u32(&mut self) -> Result<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64> {
        self.array().map(u64::from_le_bytes)
    }

    /// Counts of tensors and of metadata entries.
    fn preamble(&mut self) -> Result<(u64, u64)> {
        let magic: [u8; 4] = self.array()?;
        if &magic != b"GGUF" {
            let reason = match self.bytes.starts_with(b"version https://git-lfs") {
                true => "is a Git LFS pointer, not the file itself; run `git lfs pull`",
                false => "is no GGUF file",
            };
            return Err(self.bad(reason));
        }
        let version = self.u32()?;
        match version {
            2 | 3 => {}
            1 => {
                return Err(self
                    .bad("has GGUF version 1 of 2023; versions 2 and 3 are read: convert the model again"));
            }
            _ if matches!(version.swap_bytes(), 1..=3) => {
                return Err(self.bad("is big-endian; only little-endian GGUF files are read"));
            }
            _ => return Err(self.bad(format!("has GGUF version {version}; versions 2 and 3 are read"))),
        }
        let (tensors, entries) = (self.u64()?, self.u64()?);
        for (what, n, most) in [("tensors", tensors, MAX_TENSORS), ("metadata entries", entries, MAX_ENTRIES)]
        {
            if n > most {
                return Err(self.bad(format!("claims {n} {what}; the limit is {most}")));
            }
        }
        Ok((tensors, entries))
    }

    fn length(&mut self) -> Result<usize> {
        let length = self.u64()?;
        // What does not fit the address space does not fit the file either.
        Ok(usize::try_from(length).unwrap_or(usize::MAX))
    }

    fn text(&mut self) -> Result<String> {
        let length = self.length()?;
        Ok(String::from_utf8_lossy(self.take(length)?).into_owned())
    }

    fn name(&mut self, what: &str) -> Result<String> {
        let length = self.length()?;
        if length > MAX_NAME {
            return Err(self.bad(format!("has {what} of {length} bytes; the limit is {MAX_NAME}")));
        }
        let bytes = self.take(length)?.to_vec();
        String::from_utf8(bytes).map_err(|_| self.bad(format!("has {what} that is no UTF-8")))
    }

    fn value(&mut self, key: &str) -> Result<GgufValue> {
        let kind = self.u32()?;
        if kind == 9 {
            return self.list(key);
        }
        let signed = |n: i64| match u64::try_from(n) {
            Ok(n) => GgufValue::Unsigned(n),
            Err(_) => GgufValue::Negative(n),
        };
        Ok(match kind {
            0 => GgufValue::Unsigned(self.array::<1>()?[0].into()),
            1 => signed(i8::from_le_bytes(self.array()?).into()),
            2 => GgufValue::Unsigned(u16::from_le_bytes(self.array()?).into()),
            3 => signed(i16::from_le_bytes(self.array()?).into()),
            4 => GgufValue::Unsigned(self.u32()?.into()),
            5 => signed(i32::from_le_bytes(self.array()?).into()),
            6 => GgufValue::Float(f32::from_le_bytes(self.array()?).into()),
            7 => GgufValue::Bool(self.array::<1>()?[0] != 0),
            8 => GgufValue::Text(self.text()?),
            10 => GgufValue::Unsigned(self.u64()?),
            11 => signed(i64::from_le_bytes(self.array()?)),
            12 => GgufValue::Float(f64::from_le_bytes(self.array()?)),
            other => return Err(self.bad(format!("has the unknown type {other} at {key:?}"))),
        })
    }

    fn list(&mut self, key: &str) -> Result<GgufValue> {
        let (kind, length) = (self.u32()?, self.length()?);
        let least = match kind {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            8 | 10..=12 => 8,
            9 => return Err(self.bad(format!("has a list of lists at {key:?}, which is not supported"))),
            other => return Err(self.bad(format!("has the unknown type {other} at {key:?}"))),
        };
        // Allocated below: no more elements than the rest of the file can hold.
        let rest = self.bytes.len() - self.at;
        if length > rest / least {
            return Err(self.ends_before((length as u64).saturating_mul(least as u64)));
        }
        Ok(match kind {
            8 => GgufValue::Texts((0..length).map(|_| self.text()).collect::<Result<_>>()?),
            7 => GgufValue::Bools(self.take(length)?.iter().map(|b| *b != 0).collect()),
            6 => GgufValue::Floats(
                (0..length).map(|_| self.array().map(f32::from_le_bytes)).collect::<Result<_>>()?,
            ),
            12 => GgufValue::Floats(
                (0..length)
                    .map(|_| self.array().map(|b| f64::from_le_bytes(b) as f32))
                    .collect::<Result<_>>()?,
            ),
            _ => {
                let mut integers = Vec::with_capacity(length);
                for _ in 0..length {
                    integers.push(match kind {
                        0 => self.array::<1>()?[0].into(),
                        1 => i8::from_le_bytes(self.array()?).into(),
                        2 => u16::from_le_bytes(self.array()?).into(),
                        3 => i16::from_le_bytes(self.array()?).into(),
                        4 => self.u32()?.into(),
                        5 => i32::from_le_bytes(self.array()?).into(),
                        // Nothing that is read is beyond i64.
                        _ => i64::from_le_bytes(self.array()?),
                    });
                }
                GgufValue::Integers(integers)
            }
        })
    }

    fn tensor(&mut self, align: usize) -> Result<Info> {
        let name = self.name("a tensor's name")?;
        let rank = self.u32()? as usize;
        if !(1..=4).contains(&rank) {
            return Err(Error::bad_tensor(name, format!("has {rank} dimensions, expected 1 to 4")));
        }
        let mut shape = Vec::with_capacity(rank);
        for _ in 0..rank {
            let dim = self.length()?;
            if !(1..=MAX_DIM).contains(&dim) {
                return Err(Error::bad_tensor(
                    name,
                    format!("has a dimension of {dim}, expected 1 to {MAX_DIM}"),
                ));
            }
            shape.push(dim);
        }
        let kind = GgmlType::of(self.u32()?).map_err(|reason| Error::bad_tensor(&name, reason))?;
        let offset = self.length()?;
        if offset % align != 0 {
            return Err(Error::bad_tensor(
                name,
                format!("begins at {offset}, which is no multiple of {align}"),
            ));
        }
        let cols = shape[0];
        if cols % kind.block_weights() != 0 {
            let reason =
                format!("has rows of {cols}, {} takes multiples of {}", kind.name(), kind.block_weights());
            return Err(Error::bad_tensor(name, reason));
        }
        let blocks = shape[1..].iter().try_fold(cols / kind.block_weights(), |n, dim| n.checked_mul(*dim));
        let Some(bytes) = blocks.and_then(|n| n.checked_mul(kind.block_bytes())) else {
            return Err(Error::bad_tensor(name, format!("has the impossible shape {shape:?}")));
        };
        shape.reverse();
        Ok(Info { name, kind, shape, offset, bytes })
    }
}
