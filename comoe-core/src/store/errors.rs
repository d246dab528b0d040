//! How far records are from the weights that they were made of.

use std::sync::atomic::{AtomicUsize, Ordering};

use rayon::prelude::*;

use super::experts::{ExpertStore, Origin};
use super::{Directory, RecordIndex};
use crate::error::{Error, Result};
use crate::expert::{ExpertLayout, MatrixLayout};
use crate::format::ExpertFormat;
use crate::format::loss::Loss;
use crate::format::record::unpack_row;

/// How far packed weights are from those that they were packed from: root mean square of the differences, relative to that
/// of the weights. 0 where every weight was kept.
#[derive(Debug, Clone, PartialEq)]
pub struct WeightErrors {
    /// Of all experts.
    pub all: f64,
    /// Of each layer with experts, ascending.
    pub layers: Vec<LayerError>,
}

/// The weights of one layer's experts.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerError {
    /// The model's layer number.
    pub layer: usize,
    /// What its records are encoded in.
    pub format: ExpertFormat,
    /// Bytes of its records.
    pub bytes: u64,
    /// Error of its experts, as that of all.
    pub error: f64,
    /// That of the expert that lost most, and its number.
    pub worst: (f64, usize),
}

impl WeightErrors {
    /// Sums up what each record lost.
    pub(super) fn of(directory: &Directory, layouts: &[ExpertLayout], losses: &[Loss]) -> Self {
        let layer = |(entry, layout): (&super::LayerEntry, &ExpertLayout)| {
            let losses = &losses[entry.first as usize..][..entry.experts];
            let all = losses.iter().map(Loss::relative).enumerate().map(|(expert, lost)| (lost, expert));
            LayerError {
                layer: entry.layer,
                format: layout.format,
                bytes: (entry.experts * entry.record_bytes) as u64,
                error: losses.iter().copied().sum::<Loss>().relative(),
                worst: all.reduce(|a, b| if b.0 > a.0 { b } else { a }).unwrap_or_default(),
            }
        };
        Self {
            all: losses.iter().copied().sum::<Loss>().relative(),
            layers: directory.layers().iter().zip(layouts).map(layer).collect(),
        }
    }
}

impl ExpertStore {
    /// Reads every record and every weight of `source`, and compares them, on all threads. `progress` hears of the experts
    /// compared and the experts in all, from several threads, in any order.
    ///
    /// # Errors
    /// [`Error::BadArgument`] when the two do not hold experts of the same layers, numbers and sizes; what reading reports.
    pub fn errors_against(
        &self,
        source: &Self,
        progress: Option<&(dyn Fn(usize, usize) + Sync)>,
    ) -> Result<WeightErrors> {
        let (directory, other) = (self.directory(), source.directory());
        let shape = |store: &Self| {
            let layers = store.directory().layers().iter().zip(store.specs());
            layers.map(|(l, spec)| (l.layer, l.experts, spec.hidden, spec.intermediate)).collect::<Vec<_>>()
        };
        if let Some((a, b)) = shape(self).iter().zip(&shape(source)).find(|(a, b)| a != b) {
            let text = |(layer, experts, hidden, intermediate): &(usize, usize, usize, usize)| {
                format!("{experts} experts of {hidden} x {intermediate} in layer {layer}")
            };
            let reason = format!("{} in one, {} in the other: not the same model", text(a), text(b));
            return Err(Error::BadArgument { what: "experts to compare", reason });
        }
        if directory.len() != other.len() {
            let reason =
                format!("{} in one, {} in the other: not the same model", directory.len(), other.len());
            return Err(Error::BadArgument { what: "experts to compare", reason });
        }
        let done = AtomicUsize::new(0);
        let losses =
            (0..directory.len() as u32).into_par_iter().map_init(Scratch::default, |scratch, index| {
                let lost = self.loss_of(RecordIndex(index), source, scratch)?;
                let done = done.fetch_add(1, Ordering::Relaxed) + 1;
                if let Some(progress) = progress {
                    progress(done, directory.len());
                }
                Ok(lost)
            });
        let losses = losses.collect::<Result<Vec<_>>>()?;
        Ok(WeightErrors::of(directory, &self.layouts, &losses))
    }

    fn loss_of(&self, record: RecordIndex, source: &Self, scratch: &mut Scratch) -> Result<Loss> {
        let Scratch { ours, theirs, values, row } = scratch;
        let ordinal = self.directory().ordinal_of(record);
        let layout = self.layout(ordinal);
        ours.resize(layout.record_bytes, 0);
        self.source_ref().read(record, ours)?;
        let mut loss = Loss::default();
        if let Origin::Checkpoint(checkpoint) = &source.origin {
            checkpoint.values(record, values, |at, values| {
                let m = matrices(layout)[at];
                for (at, values) in values.chunks(m.cols).enumerate() {
                    row.resize(m.cols, 0.0);
                    unpack_row(layout.format, m, ours, at, row);
                    loss += difference(values, row);
                }
            })?;
            return Ok(loss);
        }
        let from = source.layout(ordinal);
        theirs.resize(from.record_bytes, 0);
        source.source_ref().read(record, theirs)?;
        for (m, from_m) in matrices(layout).into_iter().zip(matrices(from)) {
            row.resize(m.cols, 0.0);
            values.resize(m.cols, 0.0);
            for at in 0..m.rows {
                unpack_row(layout.format, m, ours, at, row);
                unpack_row(from.format, from_m, theirs, at, values);
                loss += difference(values, row);
            }
        }
        Ok(loss)
    }
}

/// What a thread keeps from record to record.
#[derive(Default)]
struct Scratch {
    ours: Vec<u8>,
    theirs: Vec<u8>,
    values: Vec<f32>,
    row: Vec<f32>,
}

fn matrices(layout: &ExpertLayout) -> [&MatrixLayout; 3] {
    [&layout.gate, &layout.up, &layout.down]
}

/// Of one row, in F64: differences may be all but nothing beside the weights.
fn difference(values: &[f32], decoded: &[f32]) -> Loss {
    let each = |(v, d): (&f32, &f32)| Loss {
        error: (f64::from(*v) - f64::from(*d)).powi(2),
        norm: f64::from(*v).powi(2),
    };
    values.iter().zip(decoded).map(each).sum()
}

#[cfg(test)]
mod tests {
    use safetensors::Dtype;

    use super::super::naming::Naming;
    use super::super::packed::PackedFile;
    use super::super::testing::{Style, TinyMoe};
    use super::*;

    fn open(model: &TinyMoe) -> (tempfile::TempDir, ExpertStore) {
        let made = model.shards().write_indexed();
        let store = ExpertStore::open(&[made.path()], &Naming::auto()).unwrap();
        (made, store)
    }

    #[test]
    fn what_packing_reports_is_what_a_comparison_finds() {
        for dtype in [Dtype::BF16, Dtype::F32] {
            let model = TinyMoe { hidden: 40, intermediate: 33, dtype, ..TinyMoe::new(Style::Qwen) };
            let (made, store) = open(&model);
            for format in ExpertFormat::all_for_tests() {
                let path = made.path().join(format!("packed-{format}.safetensors"));
                let said = store.pack(&path, format, Vec::new(), None).unwrap().errors;
                let packed = ExpertStore::from_packed(PackedFile::open(&path).unwrap());
                let found = packed.errors_against(&store, None).unwrap();
                assert_eq!(said.layers.len(), 2);
                let pairs = said.layers.iter().zip(&found.layers);
                for (a, b) in pairs.map(|(a, b)| (a.error, b.error)).chain([(said.all, found.all)]) {
                    assert!((a - b).abs() <= 1e-4 * b + 1e-9, "{format} of {dtype:?}: {a} {b}");
                }
                // These weights are BF16 numbers in F32, too.
                assert_eq!(found.all == 0.0, format == ExpertFormat::Bf16, "{format} of {dtype:?}");
                for (layer, entry) in found.layers.iter().zip(packed.directory().layers()) {
                    assert_eq!((layer.layer, layer.format), (entry.layer, format));
                    assert_eq!(layer.bytes, (entry.experts * entry.record_bytes) as u64);
                    assert!(layer.worst.0 >= layer.error && layer.worst.1 < entry.experts, "{layer:?}");
                }
                // Of a packed file, too, and nothing is lost where nothing is changed.
                let again = made.path().join(format!("again-{format}.safetensors"));
                assert_eq!(packed.pack(&again, format, Vec::new(), None).unwrap().errors.all, 0.0);
                assert_eq!(packed.errors_against(&packed, None).unwrap().all, 0.0);
            }
        }
    }

    #[test]
    fn other_models_are_not_compared() {
        let (_a, store) = open(&TinyMoe::new(Style::Qwen));
        let (_b, wider) = open(&TinyMoe { hidden: 40, ..TinyMoe::new(Style::Qwen) });
        let error = store.errors_against(&wider, None).unwrap_err().to_string();
        assert!(error.contains("40") && error.contains("not the same model"), "{error}");
    }
}
