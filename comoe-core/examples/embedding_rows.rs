//! Caches something that is no expert: rows of an embedding table that is too big for the device.
//!
//! Store, pool, policy and scheduler see opaque keyed bytes, so a table of a few GB needs only the rows in use on the
//! device. Here: 200,000 rows of 256 F32, of which 2,000 fit; words follow a Zipf distribution, as in text.
//!
//! `cargo run --release -p comoe-core --example embedding_rows`, and on a GPU
//! `cargo run --release -p comoe-core --example embedding_rows --features cuda -- cuda`

use std::sync::Arc;

use candle_core::{DType, Device};
use comoe_core::store::{Directory, RecordIndex, RecordSource};
use comoe_core::{Capacity, RecordCache, Result};

const ROWS: usize = 200_000;
const DIM: usize = 256;

/// The table. A real one would be a mapped file; this one computes its rows, so that the example needs no download.
struct Table(Directory);

impl RecordSource for Table {
    fn directory(&self) -> &Directory {
        &self.0
    }

    fn read(&self, record: RecordIndex, out: &mut [u8]) -> Result<()> {
        for (d, bytes) in out.chunks_exact_mut(4).enumerate() {
            bytes.copy_from_slice(&value(record.0, d).to_le_bytes());
        }
        Ok(())
    }
}

fn value(row: u32, d: usize) -> f32 {
    (row as f32 * 0.37 + d as f32 * 0.11).sin()
}

fn main() -> Result<()> {
    // Any device will do, also one that knows nothing of this crate: this one has a stream per thread, which the cache
    // waits for and is waited for by.
    let device = match std::env::args().nth(1).as_deref() {
        Some("cuda") => Device::new_cuda(0)?,
        _ => Device::Cpu,
    };
    let table = Table(Directory::new([(0, ROWS, DIM * 4)])?);
    let cache = RecordCache::builder(Arc::new(table), &device).capacity(Capacity::Slots(2_000)).build()?;

    let mut state = 1u64;
    for _ in 0..200 {
        // A batch of 512 words: rank r with a probability of about 1 / r.
        let words: Vec<u32> = (0..512)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let u = (state >> 11) as f64 / (1u64 << 53) as f64;
                (ROWS as f64).powf(u) as u32 - 1
            })
            .collect();
        let rows = cache.gather(0, &words, DType::F32, &[DIM])?; // [512, 256]
        for (row, word) in rows.to_vec2::<f32>()?.iter().zip(&words) {
            assert!(row.iter().enumerate().all(|(d, v)| *v == value(*word, d)), "word {word}");
        }
    }
    println!("on {}, every row as in the table", cache.backend_info().device);
    println!("{}", cache.stats());
    Ok(())
}
