//! Synthetic experts: random records of a shape, made where they are wanted, at memory speed.
//!
//! Weights have mean zero and deviation `1 / sqrt(columns)`, so that activations keep their size from layer to layer.
//! They are written as encoded bytes: nothing is quantised.

use std::path::Path;
use std::sync::Arc;

use comoe_core::expert::MatrixLayout;
use comoe_core::store::{
    Directory, MemorySource, PackedInfo, PackedLayer, PackedWriter, RecordIndex, RecordSource,
};
use comoe_core::{ExpertFormat, ExpertLayout, ExpertSpec, ExpertStore};
use half::f16;
use rayon::prelude::*;

use crate::error::Result;
use crate::noise::Noise;
use crate::shape::Shape;

/// Random experts that are made each time they are read. Equal seeds give equal bytes.
#[derive(Debug)]
pub struct SynthSource {
    directory: Directory,
    layout: ExpertLayout,
    spec: ExpertSpec,
    seed: u64,
}

impl SynthSource {
    /// The experts of `shape` in `format`.
    ///
    /// # Errors
    /// When the shape makes no store.
    pub fn new(shape: &Shape, format: ExpertFormat, seed: u64) -> Result<Self> {
        let layout = ExpertLayout::new(&shape.spec, format);
        let layers = shape.moe_layers().map(|layer| (layer, shape.experts, layout.record_bytes));
        Ok(Self { directory: Directory::new(layers)?, layout, spec: shape.spec, seed })
    }

    /// The same records, made once and kept in memory: for backends that read a record each time it is missed.
    ///
    /// # Errors
    /// Those of [`MemorySource::new`].
    pub fn into_memory(self) -> Result<MemorySource> {
        let records = (0..self.directory.len() as u32)
            .into_par_iter()
            .map(|i| {
                let mut record = vec![0; self.layout.record_bytes].into_boxed_slice();
                self.read(RecordIndex(i), &mut record)?;
                Ok(record)
            })
            .collect::<comoe_core::Result<Vec<_>>>()?;
        Ok(MemorySource::new(self.directory, records)?)
    }
}

impl RecordSource for SynthSource {
    fn directory(&self) -> &Directory {
        &self.directory
    }

    fn read(&self, record: RecordIndex, out: &mut [u8]) -> comoe_core::Result<()> {
        let expected = self.layout.record_bytes;
        if record.0 as usize >= self.directory.len() || out.len() != expected {
            let (n, all, bytes) = (record.0, self.directory.len(), out.len());
            let reason =
                format!("number {n} of {all} records of {expected} bytes into a buffer of {bytes} bytes");
            return Err(comoe_core::Error::BadArgument { what: "record", reason });
        }
        fill_record(&self.layout, &self.spec, &mut Noise::of(self.seed, record.0.into()), out);
        Ok(())
    }
}

/// The store of a source that holds `shape`'s experts in `format`.
///
/// # Errors
/// When the records are not those of the shape.
pub fn store(shape: &Shape, format: ExpertFormat, source: Arc<dyn RecordSource>) -> Result<ExpertStore> {
    Ok(ExpertStore::from_source(source, vec![shape.spec; shape.layers], format)?)
}

/// Writes the experts of `shape` as a packed store, on every thread; returns its bytes. `progress` hears of records
/// written and in all, from several threads.
///
/// # Errors
/// Those of [`PackedWriter`].
pub fn write_store(
    path: &Path,
    shape: &Shape,
    format: ExpertFormat,
    seed: u64,
    progress: &(dyn Fn(usize, usize) + Sync),
) -> Result<u64> {
    let source = SynthSource::new(shape, format, seed)?;
    let layers = shape.moe_layers();
    let info = PackedInfo {
        format,
        layers: layers.map(|layer| PackedLayer { layer, experts: shape.experts, spec: shape.spec }).collect(),
        source: format!("synthetic {} seed {seed}", shape.name),
    };
    let writer = PackedWriter::create(path, &info)?;
    let all = source.directory.len();
    let done = std::sync::atomic::AtomicUsize::new(0);
    (0..all as u32).into_par_iter().map(RecordIndex).try_for_each_init(
        || vec![0; source.layout.record_bytes],
        |buffer, record| {
            source.read(record, buffer)?;
            writer.write(record, buffer)?;
            progress(done.fetch_add(1, std::sync::atomic::Ordering::Relaxed) + 1, all);
            Ok::<_, comoe_core::Error>(())
        },
    )?;
    writer.finish()?;
    Ok(source.directory.total_bytes())
}

fn fill_record(layout: &ExpertLayout, spec: &ExpertSpec, noise: &mut Noise, out: &mut [u8]) {
    out.fill(0);
    for matrix in [&layout.gate, &layout.up, &layout.down] {
        fill_weights(layout.format, matrix, noise, out);
        if let Some(group) = layout.format.group() {
            fill_scales(layout.format, group, matrix, noise, out);
        }
    }
    if let Some(bias) = layout.bias {
        for (at, n) in
            [(bias.gate, spec.intermediate), (bias.up, spec.intermediate), (bias.down, spec.hidden)]
        {
            for value in out[at..at + 4 * n].as_chunks_mut::<4>().0 {
                *value = (0.1 * noise.float()).to_le_bytes();
            }
        }
    }
}

/// Deviation of a matrix's weights.
fn deviation(matrix: &MatrixLayout) -> f64 {
    1.0 / (matrix.cols as f64).sqrt()
}

fn fill_weights(format: ExpertFormat, matrix: &MatrixLayout, noise: &mut Noise, out: &mut [u8]) {
    let rows = &mut out[matrix.weights..][..matrix.rows * matrix.row_bytes];
    // Columns are multiples of 16 in every shape, so that a row is whole words.
    let bytes = match format {
        ExpertFormat::Int8 { .. } => matrix.cols,
        ExpertFormat::Int4 { .. } | ExpertFormat::Mxfp4 => matrix.cols / 2,
        _ => 2 * matrix.cols,
    };
    let exponent = bf16_exponent(deviation(matrix));
    for row in rows.chunks_exact_mut(matrix.row_bytes) {
        let row = &mut row[..bytes];
        match format {
            ExpertFormat::Int8 { .. } => noise.fill(row, int8_word),
            ExpertFormat::Int4 { .. } => noise.fill(row, int4_word),
            // Every code is a number, and half of them are negative.
            ExpertFormat::Mxfp4 => noise.fill(row, |w| w),
            _ => noise.fill(row, |w| bf16_word(w, exponent)),
        }
    }
}

fn fill_scales(format: ExpertFormat, group: usize, matrix: &MatrixLayout, noise: &mut Noise, out: &mut [u8]) {
    if format == ExpertFormat::Mxfp4 {
        let exponent = (deviation(matrix) / E2M1_DEVIATION).log2().round() as i32 + 127;
        let rows = &mut out[matrix.scales..][..matrix.rows * matrix.scale_row_bytes];
        for row in rows.chunks_exact_mut(matrix.scale_row_bytes) {
            row[..matrix.cols.div_ceil(group)].fill(exponent as u8);
        }
        return;
    }
    // What the integers' own deviation leaves to do; scales differ by a quarter either way.
    let integers = if matches!(format, ExpertFormat::Int8 { .. }) { INT8_DEVIATION } else { INT4_DEVIATION };
    let scale = deviation(matrix) / integers;
    let scales: [[u8; 2]; 256] =
        std::array::from_fn(|i| f16::from_f64(scale * (0.75 + i as f64 / 510.0)).to_le_bytes());
    let rows = &mut out[matrix.scales..][..matrix.rows * matrix.scale_row_bytes];
    for row in rows.chunks_exact_mut(matrix.scale_row_bytes) {
        let row = &mut row[..2 * matrix.cols.div_ceil(group)];
        let mut word = 0;
        for (i, out) in row.as_chunks_mut::<2>().0.iter_mut().enumerate() {
            if i % 8 == 0 {
                word = noise.word();
            }
            *out = scales[(word >> (8 * (i % 8)) & 255) as usize];
        }
    }
}

/// Of -7..=7 where 0 is twice as likely: `sqrt(2 (1 + 4 + .. + 49) / 16)`.
const INT4_DEVIATION: f64 = 4.183_300;
/// Of -127..=127 where 0 is twice as likely.
const INT8_DEVIATION: f64 = 73.467_5;
/// Of E2M1's sixteen codes: `sqrt(68.5 / 8)`.
const E2M1_DEVIATION: f64 = 2.926_175;
/// Of magnitudes uniform in 1..2: `sqrt(7 / 3)`.
const BF16_DEVIATION: f64 = 1.527_5;

/// Random bits as sixteen nibbles 1..=15: 0, which would be -8 and has no positive mate, becomes 8, which is 0.
#[inline(always)]
fn int4_word(w: u64) -> u64 {
    let any = w | (w >> 1) | (w >> 2) | (w >> 3);
    w | ((!any & 0x1111_1111_1111_1111) << 3)
}

/// Random bits as eight bytes -127..=127: -128 becomes 0.
#[inline(always)]
fn int8_word(w: u64) -> u64 {
    const LOW: u64 = 0x7f7f_7f7f_7f7f_7f7f;
    w & (((w & LOW) + LOW) | LOW)
}

/// Random bits as four BF16 values `±2^e..2^(e+1)`.
#[inline(always)]
fn bf16_word(w: u64, exponent: u64) -> u64 {
    (w & 0x807f_807f_807f_807f) | ((exponent << 7) * 0x0001_0001_0001_0001)
}

/// The biased exponent whose magnitudes come closest to a deviation.
fn bf16_exponent(deviation: f64) -> u64 {
    ((deviation / BF16_DEVIATION).log2().round() + 127.0) as u64
}

#[cfg(test)]
mod tests {
    use comoe_core::format::record::unpack_expert;
    use comoe_core::store::{Naming, PackedFile};

    use super::*;

    #[test]
    fn weights_have_mean_zero_and_the_deviation_that_keeps_activations() {
        for format in [ExpertFormat::Bf16, ExpertFormat::INT8, ExpertFormat::INT4, ExpertFormat::Mxfp4] {
            let shape =
                Shape { spec: ExpertSpec { bias: true, ..ExpertSpec::swiglu(512, 256) }, ..Shape::small() };
            let source = SynthSource::new(&shape, format, 3).unwrap();
            let mut record = vec![1; source.layout.record_bytes];
            source.read(RecordIndex(5), &mut record).unwrap();
            let expert = unpack_expert(&source.layout, &record).unwrap();
            for (what, values, cols) in
                [("gate", &expert.gate, 512.0), ("up", &expert.up, 512.0), ("down", &expert.down, 256f64)]
            {
                let n = values.len() as f64;
                let mean = values.iter().map(|&v| f64::from(v)).sum::<f64>() / n;
                let deviation = (values.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / n).sqrt();
                let aim = 1.0 / cols.sqrt();
                // Five standard errors.
                assert!(mean.abs() < 5.0 * deviation / n.sqrt(), "{format} {what}: mean {mean}");
                let off = deviation / aim;
                // BF16 and MXFP4 have powers of two only; scales of the others differ, which adds a little.
                let powers = matches!(format, ExpertFormat::Bf16 | ExpertFormat::Mxfp4);
                let within = if powers { 0.7..1.42 } else { 0.97..1.05 };
                assert!(within.contains(&off), "{format} {what}: {off} of the deviation");
            }
            let again = source.directory.len() as u32 - 1;
            let mut other = vec![0; record.len()];
            source.read(RecordIndex(again), &mut other).unwrap();
            assert_ne!(record, other);
            source.read(RecordIndex(5), &mut other).unwrap();
            assert_eq!(record, other, "every byte is written");
            assert!(source.read(RecordIndex(again + 1), &mut other).is_err());
        }
    }

    #[test]
    fn integers_stay_in_their_range() {
        for w in [0, u64::MAX, 0x8080_8080_8080_8080, 0x0102_0f00_80ff_7f01] {
            let nibbles = int4_word(w);
            for i in 0..16 {
                let (was, is) = (w >> (4 * i) & 15, nibbles >> (4 * i) & 15);
                assert_eq!(is, if was == 0 { 8 } else { was });
            }
            for (was, is) in w.to_le_bytes().into_iter().zip(int8_word(w).to_le_bytes()) {
                assert_eq!(is, if was == 0x80 { 0 } else { was });
            }
        }
    }

    #[test]
    fn a_written_store_is_a_packed_store_with_the_sources_records() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("small.comoe");
        let shape = Shape::small();
        let bytes = write_store(&path, &shape, ExpertFormat::INT4, 7, &|_, _| {}).unwrap();
        let packed = PackedFile::open(&path).unwrap();
        assert_eq!(bytes, packed.directory().total_bytes());
        let source = SynthSource::new(&shape, ExpertFormat::INT4, 7).unwrap();
        let memory = SynthSource::new(&shape, ExpertFormat::INT4, 7).unwrap().into_memory().unwrap();
        let n = source.layout.record_bytes;
        for i in (0..16).map(RecordIndex) {
            let mut records = [vec![0; n], vec![0; n], vec![0; n]];
            let sources: [&dyn RecordSource; 3] = [&packed, &source, &memory];
            for (source, out) in sources.into_iter().zip(&mut records) {
                source.read(i, out).unwrap();
            }
            assert!(records[0] == records[1] && records[1] == records[2]);
        }
        let opened = ExpertStore::open(&[&path], &Naming::auto()).unwrap();
        assert_eq!((opened.format(), opened.specs()), (ExpertFormat::INT4, &[shape.spec; 2][..]));
    }
}
