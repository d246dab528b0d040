//! Changing a store's format: every record once, in parallel, kept in a packed file that the next start finds.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use rayon::prelude::*;

use super::errors::WeightErrors;
use super::experts::{ExpertStore, Origin};
use super::memory::MemorySource;
use super::packed::{PackedFile, PackedInfo, PackedLayer, PackedTensor, sort_tensors};
use super::packed_writer::PackedWriter;
use super::{Directory, RecordIndex};
use crate::error::{Error, Result};
use crate::expert::ExpertLayout;
use crate::format::ExpertFormat;
use crate::format::loss::Loss;
use crate::format::record::convert_measured;

/// Raised when packing gives other bytes than before, so that files of older builds are not taken for its own.
const PACKING: u32 = 2;

/// How [`ExpertStore::into_format_with`] works.
#[derive(Clone, Default)]
pub struct ConvertOptions<'a> {
    /// Folder for converted stores, made when it is not there. `None`: converted records are kept in memory.
    pub cache_dir: Option<PathBuf>,
    /// Called with the records done and the records in all, from several threads, in any order. Not called when a
    /// converted store is found.
    pub progress: Option<&'a (dyn Fn(usize, usize) + Sync)>,
}

impl std::fmt::Debug for ConvertOptions<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ConvertOptions")
            .field("cache_dir", &self.cache_dir)
            .field("progress", &self.progress.is_some())
            .finish()
    }
}

impl ExpertStore {
    /// The same experts in `format`, with the converted records kept in memory.
    ///
    /// # Errors
    /// As [`Self::into_format_with`].
    pub fn into_format(self, format: ExpertFormat) -> Result<Self> {
        self.into_format_with(format, &ConvertOptions::default())
    }

    /// The same experts in `format`. Records that have that format already are left where they are.
    ///
    /// Experts of a checkpoint are packed from its own precision; records of another format are unpacked to F32 and
    /// packed again. With a cache folder, the result is a packed store there, under a name that has the format and a
    /// key of the source in it (names, lengths, times and headers of the shards, and samples of their data). A store
    /// found under that name is used if its header, key, layers and length are right, and written anew otherwise. A
    /// source of the caller's own has no key; its converted records are kept in memory. Memory in use while a file
    /// is written is a few records per thread.
    ///
    /// # Errors
    /// [`Error::Io`] when the cache folder cannot be written; [`Error::BadTensor`] for a weight that the format
    /// cannot hold (NaN, infinite), [`Error::FillFailed`] for the same in a record.
    pub fn into_format_with(self, format: ExpertFormat, options: &ConvertOptions<'_>) -> Result<Self> {
        if format == self.format {
            return Ok(self);
        }
        let recipe = format!("{PACKING} {format} {:?}", self.specs);
        let key = self.key().map(|key| key.with(recipe.as_bytes()));
        let info = self.packed_info(format, key.map_or_else(String::new, |key| key.to_string()));
        let layouts = info.layouts();
        let converter = Converter::new(&self, &layouts, info.directory()?, options.progress);
        let (origin, note) = match options.cache_dir.as_ref().filter(|_| key.is_some()) {
            None => {
                let source = Arc::new(converter.to_memory()?);
                let note = format!("{format} records are kept in memory and are made again at every start");
                (Origin::Records(source, key), note)
            }
            Some(folder) => {
                std::fs::create_dir_all(folder).map_err(|e| Error::io(folder, e))?;
                let path = folder.join(format!("experts-{format}-{}.safetensors", info.source));
                let (packed, how) = match find(&path, &info) {
                    Ok(packed) => (packed, "found in"),
                    Err(reason) => {
                        if let Some(reason) = reason {
                            tracing::warn!("converting again, since {reason}");
                        }
                        converter.to_file(&path, &info, &[])?.finish()?;
                        (PackedFile::open(&path)?, "written to")
                    }
                };
                let note = format!("{format} records were {how} {}", path.display());
                (Origin::Packed(Arc::new(packed)), note)
            }
        };
        let lost = converter.losses().into_iter().sum::<Loss>().relative();
        let requantised = format != ExpertFormat::Bf16 && self.is_quantised();
        let mut notes = self.notes;
        notes.push(note);
        if requantised && lost > 0.0 {
            notes.push(format!(
                "requantised to {format}: the weights' relative error is {lost:.1e} (root mean square)"
            ));
        }
        Ok(Self { origin, layouts, format, notes, ..self })
    }

    /// Writes the experts in `format`, and `tensors` behind them, to the packed file `path`: on all threads, with a few
    /// records per thread in memory, and under that name only once it is whole; nothing must have it. The same experts and
    /// tensors give the same bytes. `progress` hears of the experts written and the experts in all, from several threads, in any order.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::DiskFull`]; [`Error::BadFile`] when something has that name, also at the end;
    /// [`Error::BadTensor`] and [`Error::FillFailed`] as [`Self::into_format_with`] has them.
    pub fn pack(
        &self,
        path: &Path,
        format: ExpertFormat,
        mut tensors: Vec<PackedTensor<'_>>,
        progress: Option<&(dyn Fn(usize, usize) + Sync)>,
    ) -> Result<PackReport> {
        if path.symlink_metadata().is_ok() {
            return Err(Error::bad_file(path, "is there already; remove it, or give another name"));
        }
        // Times of files are part of a key, and would be of the bytes.
        let info = self.packed_info(format, String::new());
        let (layouts, directory) = (info.layouts(), info.directory()?);
        let converter = Converter::new(self, &layouts, directory, progress);
        sort_tensors(&mut tensors);
        converter.to_file(path, &info, &tensors)?.finish_new()?;
        let losses = converter.losses();
        Ok(PackReport {
            experts: converter.directory.len(),
            expert_bytes: converter.directory.total_bytes(),
            other_bytes: tensors.iter().map(|t| t.bytes.len() as u64).sum(),
            errors: WeightErrors::of(&converter.directory, converter.layouts, &losses),
        })
    }

    /// Bytes of all records, were they in `format`.
    ///
    /// # Errors
    /// As [`PackedInfo::directory`].
    pub fn bytes_in(&self, format: ExpertFormat) -> Result<u64> {
        Ok(self.packed_info(format, String::new()).directory()?.total_bytes())
    }

    fn packed_info(&self, format: ExpertFormat, source: String) -> PackedInfo {
        let layers = self.directory().layers().iter().zip(self.specs());
        let layers = layers
            .map(|(entry, spec)| PackedLayer { layer: entry.layer, experts: entry.experts, spec: *spec })
            .collect();
        PackedInfo { format, layers, source }
    }
}

/// What [`ExpertStore::pack`] wrote.
#[derive(Debug, Clone, PartialEq)]
pub struct PackReport {
    /// Experts in all layers.
    pub experts: usize,
    /// Bytes of their records.
    pub expert_bytes: u64,
    /// Bytes of the tensors behind them.
    pub other_bytes: u64,
    /// What the weights lost.
    pub errors: WeightErrors,
}

/// The store at `path` if it is what `info` says, or why it is not (`None`: it is not there).
fn find(path: &Path, info: &PackedInfo) -> std::result::Result<PackedFile, Option<String>> {
    if !path.exists() {
        return Err(None);
    }
    match PackedFile::open(path) {
        Ok(packed) if packed.info() == info => Ok(packed),
        Ok(_) => Err(Some(format!("{} was made from something else", path.display()))),
        Err(error) => Err(Some(error.to_string())),
    }
}

struct Converter<'a> {
    store: &'a ExpertStore,
    layouts: &'a [ExpertLayout],
    /// The records to make.
    directory: Directory,
    progress: Option<&'a (dyn Fn(usize, usize) + Sync)>,
    /// What each record lost.
    losses: Mutex<Vec<Loss>>,
}

/// What a thread keeps from record to record.
#[derive(Default)]
struct Scratch {
    /// A record in its source's format.
    record: Vec<u8>,
    /// A matrix in F32.
    values: Vec<f32>,
}

impl<'a> Converter<'a> {
    fn new(
        store: &'a ExpertStore,
        layouts: &'a [ExpertLayout],
        directory: Directory,
        progress: Option<&'a (dyn Fn(usize, usize) + Sync)>,
    ) -> Self {
        let losses = Mutex::new(vec![Loss::default(); directory.len()]);
        Self { store, layouts, directory, progress, losses }
    }

    /// What each record lost; none where nothing was converted.
    fn losses(&self) -> Vec<Loss> {
        self.losses.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn to_memory(&self) -> Result<MemorySource> {
        let done = AtomicUsize::new(0);
        let records: Vec<Box<[u8]>> = self
            .indices()
            .map_init(Scratch::default, |scratch, record| {
                let mut out = vec![0; self.directory.record_bytes(record)].into_boxed_slice();
                self.convert(record, scratch, &mut out)?;
                self.tell(&done);
                Ok(out)
            })
            .collect::<Result<_>>()?;
        MemorySource::new(self.directory.clone(), records)
    }

    /// All that is to be written, under no name yet.
    fn to_file(&self, path: &Path, info: &PackedInfo, tensors: &[PackedTensor<'_>]) -> Result<PackedWriter> {
        let writer = PackedWriter::create_with(path, info, tensors)?;
        tensors.par_iter().enumerate().try_for_each(|(at, t)| writer.write_tensor(at, t.bytes))?;
        let done = AtomicUsize::new(0);
        self.indices().try_for_each_init(
            || (Scratch::default(), Vec::new()),
            |(scratch, out), record| {
                out.resize(self.directory.record_bytes(record), 0);
                self.convert(record, scratch, out)?;
                writer.write(record, out)?;
                self.tell(&done);
                Ok::<(), Error>(())
            },
        )?;
        Ok(writer)
    }

    fn indices(&self) -> impl IndexedParallelIterator<Item = RecordIndex> {
        (0..self.directory.len() as u32).into_par_iter().map(RecordIndex)
    }

    fn convert(&self, record: RecordIndex, scratch: &mut Scratch, out: &mut [u8]) -> Result<()> {
        let ordinal = self.directory.ordinal_of(record);
        let layout = &self.layouts[ordinal];
        let lost = match &self.store.origin {
            Origin::Checkpoint(source) => source.pack(record, layout, &mut scratch.values, out)?,
            Origin::Packed(_) | Origin::Records(..) if layout.format == self.store.format => {
                return self.store.source_ref().read(record, out);
            }
            Origin::Packed(_) | Origin::Records(..) => {
                let from = self.store.layout(ordinal);
                scratch.record.resize(from.record_bytes, 0);
                self.store.source_ref().read(record, &mut scratch.record)?;
                convert_measured(from, &scratch.record, layout, out).map_err(|error| Error::FillFailed {
                    id: self.directory.id(record),
                    reason: error.to_string(),
                })?
            }
        };
        self.losses.lock().unwrap_or_else(PoisonError::into_inner)[record.0 as usize] = lost;
        Ok(())
    }

    fn tell(&self, done: &AtomicUsize) {
        let done = done.fetch_add(1, Ordering::Relaxed) + 1;
        if let Some(progress) = self.progress {
            progress(done, self.directory.len());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::sync::atomic::AtomicUsize;

    use safetensors::Dtype;
    use tempfile::TempDir;

    use super::super::naming::{Naming, StackedLayout};
    use super::super::testing::{Style, TinyMoe, all_records};
    use super::*;
    use crate::expert::ExpertId;
    use crate::format::record::{ExpertWeights, Weights, convert_record, pack_expert, unpack_expert};

    const INT4: ExpertFormat = ExpertFormat::Int4 { group: 32 };
    const INT8: ExpertFormat = ExpertFormat::Int8 { group: 32 };

    fn open(made: &TempDir) -> ExpertStore {
        ExpertStore::open(&[made.path()], &Naming::auto()).unwrap()
    }

    /// Converts with `cache` as the cache folder and counts the records that were converted.
    fn convert(store: ExpertStore, format: ExpertFormat, cache: &Path) -> (ExpertStore, usize) {
        let count = AtomicUsize::new(0);
        let progress = |done: usize, total: usize| {
            assert!((1..=total).contains(&done));
            count.fetch_add(1, Ordering::Relaxed);
        };
        let options = ConvertOptions { cache_dir: Some(cache.to_owned()), progress: Some(&progress) };
        let store = store.into_format_with(format, &options).unwrap();
        (store, count.into_inner())
    }

    fn only_file(folder: &Path) -> PathBuf {
        let mut entries = std::fs::read_dir(folder).unwrap();
        let path = entries.next().unwrap().unwrap().path();
        assert!(entries.next().is_none());
        path
    }

    #[test]
    fn records_hold_the_weights_whatever_the_source() {
        let model = TinyMoe { hidden: 40, intermediate: 33, bias: true, ..TinyMoe::new(Style::Qwen) };
        let made = model.shards().write_indexed();
        let store = open(&made).into_format(INT8).unwrap();
        assert!(store.notes()[0].contains("in memory"), "{:?}", store.notes());
        assert_eq!((store.format(), store.source_format()), (INT8, ExpertFormat::Bf16));
        let records = all_records(&*store.source());
        for (index, record) in (0..).map(RecordIndex).zip(&records) {
            let ExpertId { layer, expert } = store.directory().id(index);
            let found = unpack_expert(store.layout(0), record).unwrap();
            for (matrix, (values, cols)) in
                [(found.gate, 40), (found.up, 40), (found.down, 33)].into_iter().enumerate()
            {
                for (at, value) in values.iter().enumerate() {
                    let expected = model.weight(layer, expert, matrix, at / cols, at % cols);
                    // Weights are within 2, so a step is at most 2/127.
                    assert!((value - expected).abs() <= 1.0 / 127.0 + 1e-3, "{value} {expected}");
                }
            }
            assert_eq!(found.bias.unwrap()[2][7], model.bias_of(layer, expert, 2, 7));
        }
        let layout = StackedLayout::Interleaved;
        let stacked = TinyMoe { style: Style::Stacked(layout), ..model }.shards().write_indexed();
        let naming = Naming::auto().with_stacked_layout(layout);
        let stacked = ExpertStore::open(&[stacked.path()], &naming).unwrap().into_format(INT8).unwrap();
        assert_eq!(all_records(&*stacked.source()), records);
    }

    #[test]
    fn f32_weights_are_packed_from_f32() {
        let model = TinyMoe { dtype: Dtype::F32, ..TinyMoe::new(Style::Qwen) };
        // 1/3 is no BF16 value, and as the largest of its group it decides the scale.
        let values = [1.0 / 3.0; 15];
        let bytes: Vec<u8> = values.iter().flat_map(|v: &f32| v.to_le_bytes()).collect();
        let name = "model.layers.1.mlp.experts.0.gate_proj.weight";
        let made = model.shards().with("a.safetensors", name, Dtype::F32, &[3, 5], &bytes).write_indexed();
        let store = open(&made).into_format(INT8).unwrap();
        let matrix = |matrix, rows: usize, cols: usize| -> Vec<f32> {
            (0..rows * cols).map(|at| model.weight(1, 0, matrix, at / cols, at % cols)).collect()
        };
        let (up, down) = (matrix(1, 3, 5), matrix(2, 5, 3));
        let weights = ExpertWeights {
            gate: Weights::F32(&values),
            up: Weights::F32(&up),
            down: Weights::F32(&down),
            bias: None,
        };
        let mut expected = vec![0; store.layout(0).record_bytes];
        pack_expert(store.layout(0), &weights, &mut expected).unwrap();
        assert_eq!(all_records(&*store.source())[0], expected);
    }

    #[test]
    fn a_converted_store_is_found_at_the_next_start() {
        let made = TinyMoe::new(Style::Qwen).shards().write_indexed();
        let cache = tempfile::tempdir().unwrap();
        let folder = cache.path().join("made/when/needed");
        let (first, converted) = convert(open(&made), INT4, &folder);
        assert_eq!(converted, 8);
        assert!(first.notes()[0].contains("written to"), "{:?}", first.notes());
        let (second, converted) = convert(open(&made), INT4, &folder);
        assert_eq!(converted, 0);
        assert!(second.notes()[0].contains("found in"), "{:?}", second.notes());
        let in_memory = open(&made).into_format(INT4).unwrap();
        for store in [&first, &second] {
            assert_eq!(all_records(&*store.source()), all_records(&*in_memory.source()));
        }
        // Found by itself, too.
        let alone = ExpertStore::open(&[only_file(&folder)], &Naming::auto()).unwrap();
        assert_eq!(alone.format(), INT4);
        assert_eq!(all_records(&*alone.source()), all_records(&*in_memory.source()));
        // The format that is there already costs nothing.
        let (same, converted) = convert(alone, INT4, &folder);
        assert_eq!((converted, same.notes().len()), (0, 0));
        // Another format, and other experts, are other files.
        assert_eq!(convert(open(&made), INT8, &folder).1, 8);
        let gelu = open(&made).with_activation(crate::Activation::GeluTanh);
        assert_eq!(convert(gelu, INT4, &folder).1, 8);
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 3);
    }

    #[test]
    fn a_stale_or_damaged_file_is_written_anew() {
        let made = TinyMoe::new(Style::Qwen).shards().write_indexed();
        let cache = tempfile::tempdir().unwrap();
        let (good, _) = convert(open(&made), INT4, cache.path());
        let (good, path) = (all_records(&*good.source()), only_file(cache.path()));
        let whole = std::fs::read(&path).unwrap();
        let changed = |from: &str, to: &str| {
            let text = String::from_utf8_lossy(&whole[..2048]);
            let at = text.find(from).unwrap();
            let mut bytes = whole.clone();
            bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
            bytes
        };
        let key = path.to_str().unwrap().rsplit_once('-').unwrap().1[..32].to_owned();
        for bad in [
            whole[..whole.len() - 1].to_vec(),
            whole[..9].to_vec(),
            Vec::new(),
            b"something else altogether".to_vec(),
            changed(&key, "0123"),
            changed("comoe.version\":\"1", "comoe.version\":\"9"),
            changed("int4-g32", "int4-g64"),
            changed("silu", "selu"),
        ] {
            std::fs::remove_file(&path).unwrap();
            std::fs::write(&path, bad).unwrap();
            let (again, converted) = convert(open(&made), INT4, cache.path());
            assert_eq!(converted, 8);
            assert_eq!(all_records(&*again.source()), good);
            assert_eq!(convert(open(&made), INT4, cache.path()).1, 0);
        }
        // A source that changed.
        let shard = File::options().write(true).open(made.path().join("a.safetensors")).unwrap();
        shard.set_modified(std::time::UNIX_EPOCH).unwrap();
        assert_eq!(convert(open(&made), INT4, cache.path()).1, 8);
    }

    #[test]
    fn requantising_goes_through_the_records() {
        let made = TinyMoe::new(Style::Qwen).shards().write_indexed();
        let cache = tempfile::tempdir().unwrap();
        let direct = convert(open(&made), INT4, cache.path()).0;
        let (eight, _) = convert(open(&made), INT8, cache.path());
        let (twice, converted) = convert(eight.clone(), INT4, cache.path());
        assert_eq!(converted, 8, "INT4 made of INT8 is not taken for INT4 made of the checkpoint");
        let records = |s: &ExpertStore| all_records(&*s.source());
        for (index, (from, to)) in records(&eight).iter().zip(records(&twice)).enumerate() {
            let mut expected = vec![0; to.len()];
            convert_record(eight.layout(index / 4), from, twice.layout(index / 4), &mut expected).unwrap();
            assert_eq!(to, expected);
        }
        assert_eq!(records(&direct).len(), records(&twice).len());
    }

    #[test]
    fn records_of_any_source_are_converted_in_memory() {
        let model = TinyMoe { hidden: 40, ..TinyMoe::new(Style::Qwen) };
        let made = model.shards().write_indexed();
        let store = open(&made);
        let records = || all_records(&*store.source()).into_iter().map(Vec::into_boxed_slice).collect();
        let source = || Arc::new(MemorySource::new(store.directory().clone(), records()).unwrap());
        let specs = || store.specs().to_vec();
        let cache = tempfile::tempdir().unwrap();
        let again = ExpertStore::from_source(source(), specs(), store.format()).unwrap();
        let (again, converted) = convert(again, INT8, cache.path());
        assert_eq!(converted, 8);
        let expected = all_records(&*open(&made).into_format(INT8).unwrap().source());
        assert_eq!(all_records(&*again.source()), expected);
        // Without a key nothing can be found again, so nothing is written, and that is said.
        assert_eq!(std::fs::read_dir(cache.path()).unwrap().count(), 0);
        assert!(again.notes()[0].contains("in memory"), "{:?}", again.notes());
        let few = ExpertStore::from_source(source(), specs()[..1].to_vec(), store.format());
        assert!(few.unwrap_err().to_string().contains("1 specs for 2 layers"));
        let other = ExpertStore::from_source(source(), specs(), INT4).unwrap_err().to_string();
        assert!(other.contains("layer 1 have 1536 bytes, int4-g32 needs"), "{other}");
    }

    #[test]
    fn converting_twice_at_once_is_fine() {
        let made = TinyMoe::new(Style::Qwen).shards().write_indexed();
        let cache = tempfile::tempdir().unwrap();
        let stores: Vec<ExpertStore> = std::thread::scope(|scope| {
            let workers: Vec<_> =
                (0..4).map(|_| scope.spawn(|| convert(open(&made), INT4, cache.path()).0)).collect();
            workers.into_iter().map(|w| w.join().unwrap()).collect()
        });
        only_file(cache.path());
        for store in &stores {
            assert_eq!(all_records(&*store.source()), all_records(&*stores[0].source()));
        }
    }

    #[test]
    fn a_cache_folder_that_cannot_be_is_an_error() {
        let made = TinyMoe::new(Style::Qwen).shards().write_indexed();
        let options = ConvertOptions { cache_dir: Some(made.path().join("a.safetensors/x")), progress: None };
        let error = open(&made).into_format_with(INT4, &options).unwrap_err();
        assert!(matches!(error, Error::Io { .. }), "{error}");
    }
}
