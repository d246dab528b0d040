//! A checkpoint as downloaded: safetensors shards, each mapped once, and an index of tensor names over them.
//!
//! Shared by the expert store and the loader of the dense part: both read the same mapping.

use std::collections::btree_map::{BTreeMap, Entry};
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::ops::Range;
use std::path::{Component, Path};

use safetensors::Dtype;
use serde::Deserialize;
use serde::de::{MapAccess, Visitor};

use super::gguf::{Ggml, Gguf};
use super::packed::{is_packed, is_reserved};
use super::shard::Shard;
use super::small::read_small;
use crate::error::{Error, Result};

/// Name of the index of a sharded checkpoint.
const INDEX_FILE: &str = "model.safetensors.index.json";
/// Name of a checkpoint in one file.
const SINGLE_FILE: &str = "model.safetensors";
/// Most bytes of an index: published ones end at 20 MB.
const MAX_INDEX_BYTES: u64 = 64 << 20;

/// How the elements of a tensor are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Encoding {
    /// One after the other.
    Plain(Dtype),
    /// As in a GGUF file: in blocks, or in another order of rows. [`QuantisedMatrix`](super::QuantisedMatrix) reads
    /// them.
    Ggml(Ggml),
}

impl fmt::Display for Encoding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Plain(dtype) => dtype.fmt(f),
            Self::Ggml(ggml) => f.write_str(ggml.kind().name()),
        }
    }
}

/// One tensor, read in place from its mapped shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorView<'a> {
    /// How the elements are stored.
    pub encoding: Encoding,
    /// Dimensions, row-major.
    pub shape: &'a [usize],
    /// The elements as stored, little endian. Not aligned beyond 8 bytes, and in files of other writers not even that.
    pub bytes: &'a [u8],
    /// The shard that holds it.
    pub file: &'a Path,
}

/// A stretch of a mapped shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Region {
    pub(super) shard: usize,
    pub(super) start: usize,
    pub(super) len: usize,
}

/// A tensor's place.
#[derive(Debug)]
pub(super) struct Located {
    pub(super) encoding: Encoding,
    pub(super) shape: Vec<usize>,
    pub(super) region: Region,
}

/// The tensors of one checkpoint, whose shards are memory-mapped for as long as this lives.
///
/// The files must not be changed or shortened meanwhile: the mapping shows changes, and a page that is gone stops the
/// process, by a signal or as [`exit_on_lost_pages`](super::exit_on_lost_pages) has it.
#[derive(Debug)]
pub struct Checkpoint {
    what: String,
    shards: Vec<Shard>,
    tensors: BTreeMap<String, Located>,
}

impl Checkpoint {
    /// Opens a folder (one that holds `model.safetensors.index.json`, `model.safetensors`, or any `.safetensors`
    /// files, or one `.gguf` file), an index file, a `.gguf` file (of a split one the first), or a list of `.safetensors`
    /// files. Headers are read and checked; data is not touched.
    ///
    /// # Errors
    /// [`Error::Io`] for a file that is not there, [`Error::MissingShard`] for a shard that only the index knows,
    /// [`Error::TruncatedFile`] and [`Error::BadFile`] for files that are not what their headers promise,
    /// [`Error::BadTensor`] for a tensor that the index promises and its shard lacks, or that two files hold.
    pub fn open<P: AsRef<Path>>(files: &[P]) -> Result<Self> {
        let files: Vec<&Path> = files.iter().map(AsRef::as_ref).collect();
        match files.as_slice() {
            [] => Err(Error::BadArgument {
                what: "files",
                reason: "none given; give a model folder or its .safetensors files".into(),
            }),
            [one] if one.is_dir() => Self::open_folder(one),
            [one] if is_gguf(one) => Gguf::open(one)?.into_checkpoint(),
            [one] if one.extension().is_some_and(|e| e == "json") => Self::open_index(one, one),
            many => {
                if let Some(folder) = many.iter().find(|p| p.is_dir()) {
                    return Err(Error::bad_file(
                        *folder,
                        "is a folder; give one folder, or a list of .safetensors files",
                    ));
                }
                let what = match many {
                    [one] => one.display().to_string(),
                    _ => format!("{} and {} more files", many[0].display(), many.len() - 1),
                };
                Self::open_list(what, many)
            }
        }
    }

    fn open_folder(folder: &Path) -> Result<Self> {
        let index = folder.join(INDEX_FILE);
        if index.exists() {
            return Self::open_index(folder, &index);
        }
        let what = folder.display().to_string();
        let single = folder.join(SINGLE_FILE);
        if single.exists() {
            return Self::open_list(what, &[single]);
        }
        let (mut found, mut ggufs) = (Vec::new(), Vec::new());
        for entry in std::fs::read_dir(folder).map_err(|e| Error::io(folder, e))? {
            let path = entry.map_err(|e| Error::io(folder, e))?.path();
            let hidden = path.file_name().is_some_and(|n| n.to_string_lossy().starts_with('.'));
            if !hidden && path.extension().is_some_and(|e| e == "safetensors") {
                found.push(path);
            } else if !hidden && is_gguf(&path) {
                ggufs.push(path);
            }
        }
        // Of a split file, the first stands for all.
        ggufs.sort();
        if ggufs.len() > 1 && ggufs[0].to_string_lossy().contains("-00001-of-") {
            ggufs.truncate(1);
        }
        if let ([], [gguf]) = (&found[..], &ggufs[..]) {
            return Gguf::open(gguf)?.into_checkpoint();
        }
        if found.is_empty() {
            return Err(Error::bad_file(
                folder,
                format!(
                    "holds no model: expected {INDEX_FILE}, {SINGLE_FILE} other .safetensors files or one \
                     .gguf file; give the folder that a model was downloaded to, or a .gguf file"
                ),
            ));
        }
        found.sort();
        Self::open_list(what, &found)
    }

    fn open_list<P: AsRef<Path>>(what: String, files: &[P]) -> Result<Self> {
        let shards = files.iter().map(|f| Shard::open(f.as_ref())).collect::<Result<Vec<_>>>()?;
        let mut tensors = BTreeMap::<String, Located>::new();
        for (number, shard) in shards.iter().enumerate() {
            // Of a packed model, the weights that are no expert's.
            let hidden = |name: &str| is_packed(shard) && is_reserved(name);
            for (name, info) in shard.tensors().iter().filter(|(name, _)| !hidden(name)) {
                let located = locate(number, info.dtype, &info.shape, info.range.clone());
                match tensors.entry(name.clone()) {
                    Entry::Vacant(free) => free.insert(located),
                    Entry::Occupied(taken) => {
                        let first = shards[taken.get().region.shard].path();
                        return Err(Error::bad_tensor(
                            name,
                            format!(
                                "is in both {} and {}; give the files of one checkpoint only",
                                first.display(),
                                shard.path().display()
                            ),
                        ));
                    }
                };
            }
        }
        Ok(Self { what, shards, tensors })
    }

    fn open_index(what: &Path, index: &Path) -> Result<Self> {
        let text = read_small(index, MAX_INDEX_BYTES)?;
        let Index { weight_map: UniqueMap(map) } = serde_json::from_slice(&text).map_err(|e| {
            Error::bad_file(index, format!("is no checkpoint index ({e}); download it again"))
        })?;
        if map.is_empty() {
            return Err(Error::bad_file(index, "names no tensors; download it again"));
        }
        let folder = index.parent().unwrap_or(Path::new("."));
        let mut numbers = HashMap::<&str, usize>::new();
        let mut shards = Vec::<Shard>::new();
        for (_, file) in &map {
            if numbers.contains_key(file.as_str()) {
                continue;
            }
            if !is_plain_file_name(file) {
                return Err(Error::bad_file(
                    index,
                    format!(
                        "names the shard {file:?}, which is no plain file name; refusing to leave the folder"
                    ),
                ));
            }
            let path = folder.join(file);
            if !path.exists() {
                return Err(Error::MissingShard { index: index.to_owned(), shard: path });
            }
            numbers.insert(file, shards.len());
            shards.push(Shard::open(&path)?);
        }
        let mut tensors = BTreeMap::new();
        for (name, file) in &map {
            let number = numbers[file.as_str()];
            let info = shards[number].tensor(name).ok_or_else(|| {
                Error::bad_tensor(
                    name,
                    format!(
                        "{} says it is in {file}, but that file lacks it; download both again",
                        index.display()
                    ),
                )
            })?;
            tensors.insert(name.clone(), locate(number, info.dtype, &info.shape, info.range.clone()));
        }
        Ok(Self { what: what.display().to_string(), shards, tensors })
    }

    /// Names of all tensors, sorted.
    pub fn names(&self) -> impl ExactSizeIterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Whether there is a tensor `name`.
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// The tensor `name`, in place.
    ///
    /// # Errors
    /// [`Error::BadTensor`] when there is none.
    pub fn tensor(&self, name: &str) -> Result<TensorView<'_>> {
        let located = self.located(name)?;
        Ok(TensorView {
            encoding: located.encoding,
            shape: &located.shape,
            bytes: self.bytes(located.region),
            file: self.shards[located.region.shard].path(),
        })
    }

    /// How the tensor `name` is stored, if there is one.
    pub fn encoding(&self, name: &str) -> Option<Encoding> {
        self.tensors.get(name).map(|t| t.encoding)
    }

    /// A checkpoint of tensors that were found otherwise.
    pub(super) fn of(what: String, shards: Vec<Shard>, tensors: BTreeMap<String, Located>) -> Self {
        Self { what, shards, tensors }
    }

    /// The shards, in order.
    pub fn files(&self) -> impl ExactSizeIterator<Item = &Path> {
        self.shards.iter().map(Shard::path)
    }

    /// What was opened, for messages.
    pub fn describe(&self) -> &str {
        &self.what
    }

    pub(super) fn shards(&self) -> &[Shard] {
        &self.shards
    }

    pub(super) fn into_shards(self) -> Vec<Shard> {
        self.shards
    }

    pub(super) fn bytes(&self, region: Region) -> &[u8] {
        &self.shards[region.shard].bytes()[region.start..region.start + region.len]
    }

    pub(super) fn region(&self, name: &str) -> Result<Region> {
        Ok(self.located(name)?.region)
    }

    /// The tensor that holds byte `offset` of a shard, for messages.
    pub(super) fn name_at(&self, shard: usize, offset: usize) -> Option<&str> {
        self.tensors.iter().find_map(|(name, t)| {
            let r = t.region;
            (r.shard == shard && (r.start..r.start + r.len).contains(&offset)).then_some(name.as_str())
        })
    }

    fn located(&self, name: &str) -> Result<&Located> {
        self.tensors
            .get(name)
            .ok_or_else(|| Error::bad_tensor(name, format!("{} has no such tensor", self.what)))
    }
}

fn locate(shard: usize, dtype: Dtype, shape: &[usize], range: Range<usize>) -> Located {
    let region = Region { shard, start: range.start, len: range.len() };
    Located { encoding: Encoding::Plain(dtype), shape: shape.to_vec(), region }
}

/// Whether a path is called a GGUF file.
fn is_gguf(path: &Path) -> bool {
    path.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf"))
}

fn is_plain_file_name(name: &str) -> bool {
    let mut components = Path::new(name).components();
    matches!((components.next(), components.next()), (Some(Component::Normal(_)), None))
        && !name.contains(['/', '\\', '\0', ':'])
}

#[derive(Deserialize)]
struct Index {
    weight_map: UniqueMap,
}

/// Tensor name to file name; a name given twice is refused, where a plain map would keep the last.
struct UniqueMap(Vec<(String, String)>);

impl<'de> Deserialize<'de> for UniqueMap {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Pairs;
        impl<'de> Visitor<'de> for Pairs {
            type Value = UniqueMap;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map from tensor names to file names")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<UniqueMap, A::Error> {
                let (mut pairs, mut seen) = (Vec::new(), HashSet::new());
                while let Some((name, file)) = map.next_entry::<String, String>()? {
                    if !seen.insert(name.clone()) {
                        return Err(serde::de::Error::custom(format!("tensor {name:?} is listed twice")));
                    }
                    pairs.push((name, file));
                }
                Ok(UniqueMap(pairs))
            }
        }
        deserializer.deserialize_map(Pairs)
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Shards, bf16};
    use super::*;

    fn two_shards() -> Shards {
        Shards::new()
            .with("a.safetensors", "x", Dtype::BF16, &[2, 3], &bf16(&[1.0; 6]))
            .with("a.safetensors", "y", Dtype::F32, &[1], &1f32.to_le_bytes())
            .with("b.safetensors", "z", Dtype::U8, &[5], b"hello")
    }

    #[test]
    fn folder_index_single_file_and_list_give_the_same_tensors() {
        let made = two_shards().write_indexed();
        let (a, b) = (made.path().join("a.safetensors"), made.path().join("b.safetensors"));
        let list = Checkpoint::open(&[&a, &b]).unwrap();
        let folder = Checkpoint::open(&[made.path()]).unwrap();
        let index = Checkpoint::open(&[made.path().join(INDEX_FILE)]).unwrap();
        for c in [&list, &folder, &index] {
            assert_eq!(c.names().collect::<Vec<_>>(), ["x", "y", "z"]);
            let z = c.tensor("z").unwrap();
            assert_eq!(
                (z.encoding, z.shape, z.bytes, z.file),
                (Encoding::Plain(Dtype::U8), &[5][..], &b"hello"[..], b.as_path())
            );
            assert_eq!(c.tensor("x").unwrap().bytes, bf16(&[1.0; 6]));
        }
        std::fs::remove_file(made.path().join(INDEX_FILE)).unwrap();
        assert_eq!(Checkpoint::open(&[made.path()]).unwrap().names().len(), 3);
        std::fs::rename(&a, made.path().join(SINGLE_FILE)).unwrap();
        assert_eq!(Checkpoint::open(&[made.path()]).unwrap().names().collect::<Vec<_>>(), ["x", "y"]);
        let missing = folder.tensor("w").unwrap_err().to_string();
        assert!(missing.contains("\"w\"") && missing.contains("no such tensor"), "{missing}");
    }

    #[test]
    fn what_is_not_there_is_named() {
        let made = two_shards().write_indexed();
        std::fs::remove_file(made.path().join("b.safetensors")).unwrap();
        match Checkpoint::open(&[made.path()]).unwrap_err() {
            Error::MissingShard { index, shard } => {
                assert_eq!(index, made.path().join(INDEX_FILE));
                assert_eq!(shard, made.path().join("b.safetensors"));
            }
            other => panic!("{other}"),
        }
        let nothing = Checkpoint::open(&[made.path().join("no.safetensors")]).unwrap_err();
        assert!(matches!(&nothing, Error::Io { path, .. } if path.ends_with("no.safetensors")), "{nothing}");
        let empty = tempfile::tempdir().unwrap();
        let error = Checkpoint::open(&[empty.path()]).unwrap_err().to_string();
        assert!(error.contains("holds no model") && error.contains(SINGLE_FILE), "{error}");
        assert!(Checkpoint::open::<&Path>(&[]).is_err());
        let mixed = Checkpoint::open(&[empty.path(), made.path()]).unwrap_err().to_string();
        assert!(mixed.contains("is a folder"), "{mixed}");
    }

    #[test]
    fn an_index_that_disagrees_with_its_shards_is_refused() {
        let made = two_shards().write_indexed();
        let index = made.path().join(INDEX_FILE);
        for (text, expected) in [
            (r#"{"weight_map": {"x": "a.safetensors", "q": "b.safetensors"}}"#, "that file lacks it"),
            (r#"{"weight_map": {"x": "../a.safetensors"}}"#, "no plain file name"),
            (r#"{"weight_map": {"x": "/etc/passwd"}}"#, "no plain file name"),
            (r#"{"weight_map": {"x": ".."}}"#, "no plain file name"),
            (r#"{"weight_map": {"x": ""}}"#, "no plain file name"),
            (r#"{"weight_map": {"x": "a.safetensors", "x": "b.safetensors"}}"#, "listed twice"),
            (r#"{"weight_map": {}}"#, "names no tensors"),
            (r#"{"weight_map": 3}"#, "no checkpoint index"),
            (r#"{"weight"#, "no checkpoint index"),
        ] {
            std::fs::write(&index, text).unwrap();
            let error = Checkpoint::open(&[made.path()]).unwrap_err().to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }

    #[test]
    fn a_tensor_in_two_files_is_refused_without_an_index_to_decide() {
        let made = two_shards().with("c.safetensors", "z", Dtype::U8, &[1], b"!").write();
        let error = Checkpoint::open(&[made.path()]).unwrap_err().to_string();
        assert!(error.contains("\"z\"") && error.contains("b.safetensors"), "{error}");
        assert!(error.contains("c.safetensors"), "{error}");
    }
}
