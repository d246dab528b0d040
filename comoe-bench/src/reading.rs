//! How fast records come from disk and from the page cache: one by one in random order, as misses do, and all of them in
//! order into memory that nobody has touched yet, as an arena is filled at start.

use std::path::Path;
use std::time::Instant;

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

/// How a thread gets a record.
type Get = fn(&PackedFile, RecordIndex, &mut [u8]) -> comoe_core::Result<()>;

/// Measures each way of reading with so many threads, over at most `most` bytes of records.
///
/// # Errors
/// For a file that is no packed store or cannot be read; [`Error::BadOption`] for no threads at all.
pub fn measure(path: &Path, threads: &[usize], most: u64) -> Result<Vec<Row>> {
    let store = PackedFile::open(path)?;
    let record = store.directory().largest_record();
    let all = store.directory().len();
    let some = (most / record as u64).clamp(1, all as u64) as usize;
    let random: Vec<RecordIndex> = Noise::of(1, 1).distinct(all, some).into_iter().map(RecordIndex).collect();
    let in_order: Vec<RecordIndex> = (0..some as u32).map(RecordIndex).collect();
    let ways: [(&'static str, Get, &[RecordIndex]); 3] = [
        ("random, by reads", |s, r, out| s.fetch(r, out), &random),
        ("random, through the mapping", |s, r, out| s.read(r, out), &random),
        ("in order, by reads, into new memory", |s, r, out| s.fetch(r, out), &in_order),
    ];
    let mut rows = Vec::new();
    for &n in threads {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(n).build().map_err(|_| Error::BadOption {
            option: "--threads",
            value: n.to_string(),
            expected: "so many threads cannot be started".to_owned(),
        })?;
        for (way, (how, get, records)) in ways.into_iter().enumerate() {
            // Records are as large as the largest, or their buffers would not be.
            let run = || -> Result<Rate> {
                let mut memory = new_memory(if way == 2 { records.len() * record } else { 1 })?;
                let start = Instant::now();
                pool.install(|| match way {
                    2 => memory.par_chunks_mut(record).zip(records).try_for_each(|(out, &r)| {
                        get(&store, r, &mut out[..store.directory().record_bytes(r)])
                    }),
                    _ => records.par_iter().with_max_len(1).try_for_each_init(
                        || vec![0u8; record],
                        |out, &r| get(&store, r, &mut out[..store.directory().record_bytes(r)]),
                    ),
                })?;
                let took = start.elapsed();
                let bytes: usize = records.iter().map(|&r| store.directory().record_bytes(r)).sum();
                let ms_per_record = took.as_secs_f64() * 1e3 * n as f64 / records.len() as f64;
                Ok(Rate { gb_per_s: gb_per_s(bytes as u64, took), ms_per_record })
            };
            store.release();
            let (cold, cached) = (run()?, run()?);
            rows.push(Row { how, threads: n, cold, cached });
        }
    }
    Ok(rows)
}

/// Memory that nobody has touched, as an arena takes it from the system.
fn new_memory(bytes: usize) -> Result<MmapMut> {
    let no_memory = |e| Error::io("memory", e);
    let memory = MmapOptions::new().len(bytes).map_anon().map_err(no_memory)?;
    #[cfg(target_os = "linux")]
    memory.advise(memmap2::Advice::HugePage).map_err(no_memory)?;
    Ok(memory)
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
        assert_eq!(rows.len(), 6);
        for rate in rows.iter().flat_map(|r| [r.cold, r.cached]) {
            assert!(rate.gb_per_s > 0.0 && rate.ms_per_record > 0.0, "{rate:?}");
        }
        assert!(measure(&folder.path().join("none"), &[1], 1).is_err());
    }
}
