//! How fast records come from disk and from the page cache: one by one in random order, as misses do, and all of them in
//! order into memory that nobody has touched yet, as an arena is filled at start; beside that what plain reads of the file
//! reach, into the same kind of memory and into memory in use. On a GPU, an arena itself.

use std::fs::File;
use std::path::Path;
use std::time::{Duration, Instant};

use comoe_core::machine::gb_per_s;
use comoe_core::store::{PackedFile, RecordIndex, RecordSource};
use memmap2::{MmapMut, MmapOptions};
use rayon::prelude::*;

use crate::error::{Error, Result};
use crate::noise::Noise;

/// A way of reading, measured.
#[derive(Debug, Clone, Copy)]
pub struct Row {
    /// In words.
    pub how: &'static str,
    /// Threads that read.
    pub threads: usize,
    /// What the page cache had been told to forget before.
    pub cold: Rate,
    /// What was read just before, in the same way.
    pub cached: Rate,
}

/// How fast.
#[derive(Debug, Clone, Copy)]
pub struct Rate {
    /// GB/s of all threads together.
    pub gb_per_s: f64,
    /// From asking to having a record, ms.
    pub ms_per_record: f64,
}

/// Bytes of a huge page.
const HUGE_PAGE: usize = 2 << 20;
/// Bytes that a thread reads at once where no records are asked for.
const PIECE: usize = 4 * HUGE_PAGE;

/// A way of reading.
#[derive(Clone, Copy, PartialEq)]
enum Way {
    Random,
    Mapped,
    /// Into new memory, neighbours by the same thread.
    InOrder,
    /// As [`Self::InOrder`], each record by whoever is free.
    OneByOne,
    Plain,
    PlainIntoUsed,
}

const WAYS: [(&str, Way); 6] = [
    ("random, by reads", Way::Random),
    ("random, through the mapping", Way::Mapped),
    ("in order, by reads, into new memory", Way::InOrder),
    ("the same, each record by whoever is free", Way::OneByOne),
    ("plain reads of 8 MiB, into new memory", Way::Plain),
    ("plain reads of 8 MiB, into memory in use", Way::PlainIntoUsed),
];

/// Measures each way of reading with so many threads, over at most `most` bytes of records.
///
/// # Errors
/// For a file that is no packed store or cannot be read; [`Error::BadOption`] for no threads at all.
pub fn measure(path: &Path, threads: &[usize], most: u64) -> Result<Vec<Row>> {
    if let Some(0) = threads.iter().find(|&&n| n == 0) {
        let expected = "at least one thread".to_owned();
        return Err(Error::BadOption { option: "--threads", value: "0".to_owned(), expected });
    }
    let store = PackedFile::open(path)?;
    let file = File::open(path).map_err(|e| Error::io(path, e))?;
    let record = store.directory().largest_record();
    let all = store.directory().len();
    let some = (most / record as u64).clamp(1, all as u64) as usize;
    let random: Vec<RecordIndex> = Noise::of(1, 1).distinct(all, some).into_iter().map(RecordIndex).collect();
    let in_order: Vec<RecordIndex> = (0..some as u32).map(RecordIndex).collect();
    let mut rows = Vec::new();
    for &n in threads {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(n).build().map_err(|_| Error::BadOption {
            option: "--threads",
            value: n.to_string(),
            expected: "so many threads cannot be started".to_owned(),
        })?;
        for (how, way) in WAYS {
            let run = || -> Result<Rate> {
                // Records are as large as the largest, or their buffers would not be.
                let bytes = some * record;
                let took = match way {
                    Way::Random | Way::Mapped => one_by_one(&pool, &store, &random, way == Way::Mapped)?,
                    Way::InOrder => {
                        into_memory(&pool, &store, &in_order, (RUN_PAGES * HUGE_PAGE).div_ceil(record))?
                    }
                    Way::OneByOne => into_memory(&pool, &store, &in_order, 1)?,
                    Way::Plain => plain(&pool, (&file, path), bytes, false)?,
                    Way::PlainIntoUsed => plain(&pool, (&file, path), bytes, true)?,
                };
                let ms_per_record = took.as_secs_f64() * 1e3 * n as f64 / some as f64;
                Ok(Rate { gb_per_s: gb_per_s(bytes as u64, took), ms_per_record })
            };
            store.release();
            let cold = run()?;
            // The best of three: other programs are on the machine, too.
            let mut cached = run()?;
            for _ in 0..2 {
                let again = run()?;
                cached = if again.gb_per_s > cached.gb_per_s { again } else { cached };
            }
            rows.push(Row { how, threads: n, cold, cached });
        }
    }
    Ok(rows)
}

/// Huge pages that a thread fills in a row, as an arena is filled: a page on the border of two threads' is zeroed by both.
const RUN_PAGES: usize = 8;

fn one_by_one(
    pool: &rayon::ThreadPool,
    store: &PackedFile,
    records: &[RecordIndex],
    mapped: bool,
) -> Result<Duration> {
    let buffer = || vec![0u8; store.directory().largest_record()];
    let start = Instant::now();
    pool.install(|| {
        records.par_iter().with_max_len(1).try_for_each_init(buffer, |out, &r| {
            let out = &mut out[..store.directory().record_bytes(r)];
            if mapped { store.read(r, out) } else { store.fetch(r, out) }
        })
    })?;
    Ok(start.elapsed())
}

/// Reads records into memory of their own, `in_a_row` of them by the same thread.
fn into_memory(
    pool: &rayon::ThreadPool,
    store: &PackedFile,
    records: &[RecordIndex],
    in_a_row: usize,
) -> Result<Duration> {
    let record = store.directory().largest_record();
    let mut memory = new_memory(records.len() * record)?;
    let start = Instant::now();
    pool.install(|| {
        let runs = memory.bytes_mut().par_chunks_mut(in_a_row * record).zip(records.par_chunks(in_a_row));
        runs.with_max_len(1).try_for_each(|(out, records)| {
            let mut each = out.chunks_mut(record).zip(records);
            each.try_for_each(|(out, &r)| store.fetch(r, &mut out[..store.directory().record_bytes(r)]))
        })
    })?;
    Ok(start.elapsed())
}

/// Reads the file's first `bytes` bytes piece by piece, whatever they are.
fn plain(
    pool: &rayon::ThreadPool,
    (file, path): (&File, &Path),
    bytes: usize,
    used: bool,
) -> Result<Duration> {
    let mut memory = new_memory(bytes)?;
    if used {
        memory.bytes_mut().fill(1);
    }
    let start = Instant::now();
    pool.install(|| {
        let pieces = memory.bytes_mut().par_chunks_mut(PIECE).enumerate();
        pieces.with_max_len(1).try_for_each(|(i, out)| read_at(file, out, (i * PIECE) as u64))
    })
    .map_err(|e| Error::io(path, e))?;
    Ok(start.elapsed())
}

#[cfg(unix)]
fn read_at(file: &File, out: &mut [u8], at: u64) -> std::io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, out, at)
}

#[cfg(not(unix))]
fn read_at(_: &File, _: &mut [u8], _: u64) -> std::io::Result<()> {
    Err(std::io::ErrorKind::Unsupported.into())
}

/// Memory in huge pages, where the system has them.
struct Memory {
    map: MmapMut,
    start: usize,
    bytes: usize,
}

impl Memory {
    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.map[self.start..][..self.bytes]
    }
}

/// Memory that nobody has touched, as an arena takes it from the system.
fn new_memory(bytes: usize) -> Result<Memory> {
    let no_memory = |e| Error::io("memory", e);
    let map = MmapOptions::new().len(bytes + HUGE_PAGE).map_anon().map_err(no_memory)?;
    #[cfg(target_os = "linux")]
    map.advise(memmap2::Advice::HugePage).map_err(no_memory)?;
    let at = map.as_ptr().addr();
    Ok(Memory { start: at.next_multiple_of(HUGE_PAGE) - at, map, bytes })
}

/// A file whose pages stay in the page cache when a copy of all of it has been made.
#[cfg(feature = "cuda")]
struct Kept(PackedFile);

#[cfg(feature = "cuda")]
impl RecordSource for Kept {
    fn directory(&self) -> &comoe_core::store::Directory {
        self.0.directory()
    }

    fn read(&self, record: RecordIndex, out: &mut [u8]) -> comoe_core::Result<()> {
        self.0.read(record, out)
    }

    fn fetch(&self, record: RecordIndex, out: &mut [u8]) -> comoe_core::Result<()> {
        self.0.fetch(record, out)
    }
}

/// An arena as the CUDA backend fills it, from the page cache.
#[derive(Debug, Clone, Copy)]
pub struct Arena {
    /// It was filled beside the steps, by three threads of four.
    pub later: bool,
    /// GB/s of records read and page-locked, from asking for a backend to the last.
    pub gb_per_s: f64,
    /// How much this process's memory grew, over the bytes of the records; `None` where the system does not say.
    pub memory_per_record: Option<f64>,
}

/// Fills arenas with the records of `path`, `rounds` times each way: before a backend is there, and beside its steps.
///
/// # Errors
/// For a file that is no packed store, and for a GPU that cannot be used.
#[cfg(feature = "cuda")]
pub fn measure_arena(path: &Path, device: &candle_core::Device, rounds: usize) -> Result<Vec<Arena>> {
    use std::sync::Arc;

    use comoe_core::CudaOptions;
    use comoe_core::backend::Backend;
    use comoe_core::backend::cuda::CudaBackend;

    let store = Arc::new(Kept(PackedFile::open(path)?));
    let records: Vec<RecordIndex> = (0..store.directory().len() as u32).map(RecordIndex).collect();
    let buffer = || vec![0; store.directory().largest_record()];
    records.par_iter().try_for_each_init(buffer, |buffer, &r| {
        store.fetch(r, &mut buffer[..store.directory().record_bytes(r)])
    })?;
    let mut all = Vec::new();
    for later in (0..rounds).flat_map(|_| [false, true]) {
        let mut options = CudaOptions::default();
        options.page_lock_later = later;
        let (before, start) = (own_memory(), Instant::now());
        let backend = CudaBackend::new(device.as_cuda_device()?, store.clone(), options)?;
        let locking = loop {
            match backend.page_locking() {
                Some(locking) if locking.took.is_some() => break locking,
                _ => std::thread::sleep(Duration::from_micros(200)),
            }
        };
        let took = start.elapsed();
        let grown = own_memory().zip(before).map(|(now, before)| now.saturating_sub(before));
        all.push(Arena {
            later,
            gb_per_s: gb_per_s(locking.locked, took),
            memory_per_record: grown.map(|grown| grown as f64 / locking.locked.max(1) as f64),
        });
    }
    Ok(all)
}

/// Bytes of memory that are this process's own.
#[cfg(feature = "cuda")]
fn own_memory() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix("RssAnon:"))?;
    line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok().map(|kib| kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shape::Shape;
    use crate::synth;

    #[test]
    fn every_way_reads_and_a_file_that_is_none_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("small.comoe");
        synth::write_store(&path, &Shape::small(), comoe_core::ExpertFormat::INT4, 1, &|_, _| {}).unwrap();
        let rows = measure(&path, &[1, 3], 1 << 30).unwrap();
        assert_eq!(rows.len(), 2 * WAYS.len());
        for rate in rows.iter().flat_map(|r| [r.cold, r.cached]) {
            assert!(rate.gb_per_s > 0.0 && rate.ms_per_record > 0.0, "{rate:?}");
        }
        assert!(measure(&folder.path().join("none"), &[1], 1).is_err());
    }
}
