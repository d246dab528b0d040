//! Filling slots through the backend's real path, beside plain copies from page-locked memory.

use std::sync::Arc;
use std::time::Instant;

use candle_core::Device;
use comoe_core::backend::cuda::measure::{GpuReport, gpu_report};
use comoe_core::backend::{Backend, Fill, Queue, SlotId};
use comoe_core::machine::gb_per_s;
use comoe_core::store::{Directory, RecordIndex, RecordSource};
use comoe_core::{CudaOptions, ExpertFormat, ExpertLayout, cuda_device};
use serde::Serialize;

use crate::decode::backend;
use crate::error::Result;
use crate::noise::Noise;
use crate::shape::Shape;

/// Bytes of each measurement, about: at 50 GB/s some 20 ms.
const MOVED: usize = 1 << 30;
/// Sizes of single pieces, MiB.
const SINGLE: [usize; 6] = [1, 4, 16, 64, 128, 340];

/// One row: batches of equal records.
#[derive(Debug, Clone, Serialize)]
pub struct Row {
    /// What the batch stands for.
    pub what: String,
    /// Records of a batch.
    pub records: usize,
    /// Bytes of a record.
    pub record_bytes: usize,
    /// GB/s, batch after batch, best of three.
    pub gb_per_s: f64,
    /// Of the best plain copy from page-locked memory.
    pub of_best: f64,
}

/// Rows, and what they stand beside.
#[derive(Debug, Clone, Serialize)]
pub struct Transfers {
    /// The shape whose records were moved.
    pub shape: String,
    /// Their format.
    pub format: String,
    /// What the backend says is in force.
    pub notes: Vec<String>,
    /// Plain copies, as `comoe doctor` measures them.
    pub report: GpuReport,
    /// Measured.
    pub rows: Vec<Row>,
}

/// Measures the link of GPU `ordinal` with records of `shape` in `format`.
///
/// # Errors
/// Those of the backend, when the GPU cannot be used or has too little memory.
pub fn transfers(ordinal: usize, shape: &Shape, format: ExpertFormat) -> Result<Transfers> {
    let report = gpu_report(ordinal)?;
    let device = cuda_device(ordinal)?;
    let layout = ExpertLayout::new(&shape.spec, format);
    let gate = layout.gate.rows * (layout.gate.row_bytes + layout.gate.scale_row_bytes);
    let matrix = gate.next_multiple_of(comoe_core::expert::RECORD_ALIGN);
    let (record, experts, top_k) = (layout.record_bytes, shape.experts, shape.top_k);

    let mut rows = Vec::new();
    let mut rig = Rig::new(&device, &[(experts, matrix), (experts, record)])?;
    let notes = rig.backend.info().notes;
    rows.push(rig.row("one matrix", 0, 1)?);
    rows.push(rig.row("one record", 1, 1)?);
    let mut batch = 2;
    while batch < experts {
        let what = if batch == top_k { "layer batch (top-k)" } else { "records" };
        rows.push(rig.row(what, 1, batch)?);
        batch *= 2;
    }
    if !top_k.is_power_of_two() {
        rows.push(rig.row("layer batch (top-k)", 1, top_k)?);
    }
    rows.push(rig.row("whole layer", 1, experts)?);
    drop(rig);
    let singles: Vec<_> = SINGLE.iter().map(|mib| (2, mib << 20)).collect();
    let mut rig = Rig::new(&device, &singles)?;
    for layer in 0..singles.len() {
        rows.push(rig.row("one piece", layer, 1)?);
    }
    let best = report.best_locked();
    rows.iter_mut().for_each(|r| r.of_best = r.gb_per_s / best);
    Ok(Transfers { shape: shape.name.to_owned(), format: format.to_string(), notes, report, rows })
}

struct Rig {
    backend: Box<dyn Backend>,
    source: Arc<Random>,
}

impl Rig {
    /// Records of several sizes: `(count, bytes)` each, and a slot for each of the most.
    fn new(device: &Device, sizes: &[(usize, usize)]) -> Result<Self> {
        let layers = sizes.iter().enumerate().map(|(layer, &(count, bytes))| (layer, count, bytes));
        let source = Arc::new(Random(Directory::new(layers)?));
        let mut backend = backend(device, source.clone(), CudaOptions::default())?;
        let slots = sizes.iter().map(|s| s.0).max().unwrap_or(1);
        backend.allocate(slots, source.0.largest_record())?;
        Ok(Self { backend, source })
    }

    fn row(&mut self, what: &str, layer: usize, records: usize) -> Result<Row> {
        let entry = self.source.0.layers()[layer].clone();
        let rounds = (MOVED / (records * entry.record_bytes)).clamp(4, 512);
        let mut best = f64::INFINITY;
        for _ in 0..3 {
            self.backend.synchronize()?;
            let start = Instant::now();
            for round in 0..rounds {
                let fills: Vec<_> = (0..records)
                    .map(|i| ((round * records + i) % entry.experts) as u32)
                    .map(|n| Fill { record: RecordIndex(entry.first + n), slot: SlotId(n) })
                    .collect();
                self.backend.fill(Queue::Demand, &[], &fills)?;
            }
            self.backend.synchronize()?;
            best = best.min(start.elapsed().as_secs_f64());
        }
        let moved = (rounds * records * entry.record_bytes) as u64;
        Ok(Row {
            what: what.to_owned(),
            records,
            record_bytes: entry.record_bytes,
            gb_per_s: gb_per_s(moved, std::time::Duration::from_secs_f64(best)),
            of_best: 0.0,
        })
    }
}

/// Random bytes under any directory.
struct Random(Directory);

impl RecordSource for Random {
    fn directory(&self) -> &Directory {
        &self.0
    }

    fn read(&self, record: RecordIndex, out: &mut [u8]) -> comoe_core::Result<()> {
        Noise::of(7, record.0.into()).fill(out, |w| w);
        Ok(())
    }
}
