//! One mapped file; of a safetensors file, its header checked against its length before anything is believed.

use std::collections::HashMap;
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use memmap2::Mmap;
use safetensors::Dtype;
use safetensors::tensor::Metadata;

use super::lost_pages::{self, Watched};
use crate::error::{Error, Result};
use crate::expert::ExpertId;
use crate::sys;

/// The safetensors format's own limit.
const MAX_HEADER_BYTES: u64 = 100_000_000;
/// Width of the header length at the start of the file.
const LENGTH_BYTES: usize = 8;

/// A tensor of a shard.
#[derive(Debug)]
pub(super) struct ShardTensor {
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<usize>,
    /// Where its bytes are in the file.
    pub(super) range: Range<usize>,
}

/// A mapped file, and its tensors if it is a safetensors file.
#[derive(Debug)]
pub(super) struct Shard {
    path: PathBuf,
    file: File,
    /// Dropped before the mapping that it knows.
    _watched: Watched,
    map: Mmap,
    data_start: usize,
    modified: Option<SystemTime>,
    metadata: HashMap<String, String>,
    tensors: HashMap<String, ShardTensor>,
}

impl Shard {
    /// Maps `path` and checks its header.
    pub(super) fn open(path: &Path) -> Result<Self> {
        let mut this = Self::map(path)?;
        let (data_start, header) = read_header(path, &this.map)?;
        this.data_start = data_start;
        this.tensors = header
            .tensors()
            .into_iter()
            .map(|(name, info)| {
                let (start, end) = info.data_offsets;
                let range = data_start + start..data_start + end;
                (name, ShardTensor { dtype: info.dtype, shape: info.shape.clone(), range })
            })
            .collect();
        this.metadata = header.metadata().clone().unwrap_or_default();
        Ok(this)
    }

    /// Maps `path`, a file of any kind.
    pub(super) fn map(path: &Path) -> Result<Self> {
        let io = |e| Error::io(path, e);
        // Asked before opening: opening a pipe would wait for its writer.
        if !std::fs::metadata(path).map_err(io)?.is_file() {
            return Err(Error::bad_file(path, "is no regular file; give a .safetensors file"));
        }
        let file = File::open(path).map_err(io)?;
        let modified = file.metadata().ok().and_then(|m| m.modified().ok());
        // SAFETY: the mapping is read-only and private to this struct. Whoever opens a checkpoint keeps its files
        // unchanged while it is open (documented at `Checkpoint`); CoMoE itself never writes to a file in place,
        // it renames finished files over old ones.
        let map = unsafe { Mmap::map(&file) }.map_err(io)?;
        Ok(Self {
            path: path.to_owned(),
            file,
            _watched: lost_pages::watch(path, &map),
            map,
            data_start: 0,
            modified,
            metadata: HashMap::new(),
            tensors: HashMap::new(),
        })
    }

    /// Says where the header ends, of a file whose header was read by another.
    pub(super) fn set_data_start(&mut self, at: usize) {
        self.data_start = at;
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The whole file.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.map
    }

    /// Fills `out` from byte `start` on by reads, not from the mapping: on a disk that is several times as fast, and what it
    /// cannot give is an error here instead of a signal.
    pub(super) fn fetch(&self, start: usize, out: &mut [u8]) -> std::io::Result<()> {
        sys::will_need(&self.file, start as u64, out.len() as u64);
        sys::read_exact_at(&self.file, out, start as u64).map_err(|e| match e.kind() {
            std::io::ErrorKind::UnexpectedEof => {
                let end = start + out.len();
                std::io::Error::new(
                    e.kind(),
                    format!("it ends before byte {end}: it was shortened while it was open"),
                )
            }
            _ => e,
        })
    }

    /// The failure of a read of `id` from this file.
    pub(super) fn unreadable(&self, id: ExpertId, error: &std::io::Error) -> Error {
        Error::FillFailed { id, reason: format!("{}: {error}", self.path.display()) }
    }

    /// Has the system begin to read `range`.
    pub(super) fn will_need(&self, range: Range<usize>) {
        sys::will_need(&self.file, range.start as u64, range.len() as u64);
    }

    /// Lets the system's pages of `range` go, as far as no other process has them mapped.
    pub(super) fn drop_cache(&self, range: Range<usize>) {
        sys::unmap_pages(&self.map, range.clone());
        sys::drop_cache(&self.file, range.start as u64, range.len() as u64);
    }

    /// Where the header ends and the data begins.
    pub(super) fn data_start(&self) -> usize {
        self.data_start
    }

    pub(super) fn modified(&self) -> Option<SystemTime> {
        self.modified
    }

    /// The header's free string to string entries.
    pub(super) fn metadata(&self) -> &HashMap<String, String> {
        &self.metadata
    }

    pub(super) fn tensors(&self) -> &HashMap<String, ShardTensor> {
        &self.tensors
    }

    pub(super) fn tensor(&self, name: &str) -> Option<&ShardTensor> {
        self.tensors.get(name)
    }
}

/// Parses the header; on success every tensor's range lies within `map`.
fn read_header(path: &Path, map: &[u8]) -> Result<(usize, Metadata)> {
    let found = map.len() as u64;
    let truncated = |promised| Error::TruncatedFile { path: path.to_owned(), promised, found };
    let Some(length) = map.first_chunk::<LENGTH_BYTES>() else {
        return Err(truncated(LENGTH_BYTES as u64));
    };
    if map.starts_with(b"version https://git-lfs") {
        return Err(Error::bad_file(path, "is a Git LFS pointer, not the file itself; run `git lfs pull`"));
    }
    let length = u64::from_le_bytes(*length);
    if length > MAX_HEADER_BYTES {
        return Err(Error::bad_file(
            path,
            format!(
                "its header claims {length} bytes, and the limit is {MAX_HEADER_BYTES}; this is no safetensors file"
            ),
        ));
    }
    // Below 100 MB, so neither the cast nor the sum can overflow.
    let data_start = LENGTH_BYTES + length as usize;
    let header = map.get(LENGTH_BYTES..data_start).ok_or_else(|| truncated(data_start as u64))?;
    let header: Metadata = serde_json::from_slice(header).map_err(|e| {
        Error::bad_file(
            path,
            format!("its header is damaged or no safetensors header ({e}); download it again"),
        )
    })?;
    // Offsets are contiguous from 0 and fit shape and dtype (checked by the parser), so the end bounds them all.
    let promised = (data_start as u64).saturating_add(header.data_len() as u64);
    if promised > found {
        return Err(truncated(promised));
    }
    if promised < found {
        return Err(Error::bad_file(
            path,
            format!("has {found} bytes, but its header describes {promised}; download it again"),
        ));
    }
    Ok((data_start, header))
}

#[cfg(test)]
mod tests {
    use super::super::testing::Shards;
    use super::*;

    fn file() -> (tempfile::TempDir, PathBuf) {
        let made = Shards::new()
            .with("m.safetensors", "x", Dtype::U8, &[7], b"weights")
            .with("m.safetensors", "y", Dtype::I64, &[1], &[1; 8])
            .write();
        let path = made.path().join("m.safetensors");
        (made, path)
    }

    #[test]
    fn truncation_at_every_length_is_an_error() {
        let (_made, path) = file();
        let whole = std::fs::read(&path).unwrap();
        for len in 0..whole.len() {
            std::fs::write(&path, &whole[..len]).unwrap();
            match Shard::open(&path).unwrap_err() {
                Error::TruncatedFile { promised, found, .. } => {
                    assert!(promised > found && found == len as u64, "{len}");
                }
                other => panic!("{len}: {other}"),
            }
        }
        std::fs::write(&path, [&whole[..], b"more"].concat()).unwrap();
        assert!(Shard::open(&path).unwrap_err().to_string().contains("describes"));
    }

    #[test]
    fn absurd_headers_are_refused() {
        let (_made, path) = file();
        let with_header = |text: &str| {
            let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
            bytes.extend(text.as_bytes());
            bytes
        };
        let huge = "{\"a\":{\"dtype\":\"U8\",\"shape\":[18446744073709551615],\"data_offsets\":[0,18446744073709551615]}}";
        let overlap = "{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},\
                       \"b\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}";
        for (bytes, expected) in [
            (u64::MAX.to_le_bytes().to_vec(), "no safetensors file"),
            (MAX_HEADER_BYTES.to_le_bytes().to_vec(), "promises"),
            (b"version https://git-lfs.github.com/spec/v1\n".to_vec(), "git lfs pull"),
            (with_header("{]"), "no safetensors header"),
            (with_header("[1,2]"), "no safetensors header"),
            (with_header(&"[".repeat(100_000)), "no safetensors header"),
            (with_header(huge), "no safetensors header"),
            (with_header(overlap), "no safetensors header"),
        ] {
            std::fs::write(&path, &bytes).unwrap();
            let error = Shard::open(&path).unwrap_err().to_string();
            assert!(error.contains(expected) && error.contains("m.safetensors"), "{expected}: {error}");
        }
        assert!(Shard::open(path.parent().unwrap()).unwrap_err().to_string().contains("regular file"));
    }
}
