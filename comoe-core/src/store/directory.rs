//! Which records a store holds: keys, sizes, and the dense numbering that pool, policy and predictor work on.

use std::collections::HashMap;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::expert::ExpertId;

/// A record's position in its [`Directory`]: dense, ascending by layer, then by expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RecordIndex(pub u32);

/// The records of one layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerEntry {
    /// The model's layer number.
    pub layer: usize,
    /// Experts of the layer, numbered from 0.
    pub experts: usize,
    /// Bytes of each of its records.
    pub record_bytes: usize,
    /// The layer's first record.
    pub first: u32,
}

/// The keys and sizes of a store's records.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Directory {
    layers: Vec<LayerEntry>,
    ordinals: HashMap<usize, usize>,
    records: u32,
    /// Of a part of another directory: what its records are called there.
    names: Option<Names>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Names {
    /// By record: the expert's number in its layer.
    experts: Arc<[u32]>,
    /// By layer ordinal: how many experts the layer has in all.
    of: Arc<[usize]>,
}

impl Directory {
    /// Lists layers as `(layer number, experts, record bytes)`, in ascending order of layer number.
    ///
    /// # Errors
    /// [`Error::BadArgument`] when layers are out of order, empty, or hold more than `u32::MAX` records or 2^63 bytes in
    /// all.
    pub fn new(layers: impl IntoIterator<Item = (usize, usize, usize)>) -> Result<Self> {
        let bad = |reason: String| Error::BadArgument { what: "directory", reason };
        let mut this = Self::default();
        let mut total = 0u64;
        for (layer, experts, record_bytes) in layers {
            if this.layers.last().is_some_and(|last| last.layer >= layer) {
                return Err(bad(format!("layer {layer} is out of order")));
            }
            if experts == 0 || record_bytes == 0 {
                return Err(bad(format!("layer {layer} has {experts} records of {record_bytes} bytes")));
            }
            total = (experts as u64)
                .checked_mul(record_bytes as u64)
                .and_then(|bytes| total.checked_add(bytes))
                .filter(|total| *total <= 1 << 63)
                .ok_or_else(|| bad(format!("layer {layer} passes the limit of 2^63 bytes")))?;
            let first = this.records;
            this.records = u32::try_from(experts)
                .ok()
                .and_then(|n| first.checked_add(n))
                .ok_or_else(|| bad(format!("layer {layer} passes the limit of {} records", u32::MAX)))?;
            this.ordinals.insert(layer, this.layers.len());
            this.layers.push(LayerEntry { layer, experts, record_bytes, first });
        }
        Ok(this)
    }

    /// The part of this directory whose records `takes` wants: the same layers, some perhaps without a record, and in
    /// each the experts numbered anew from 0, in order; [`Self::id`] still tells them by their old names. With it, which
    /// record of this directory each record of the part is.
    pub(crate) fn part(&self, takes: impl Fn(RecordIndex) -> bool) -> (Self, Vec<RecordIndex>) {
        let all = (0..self.records).map(RecordIndex);
        let taken: Vec<RecordIndex> = all.filter(|&r| takes(r)).collect();
        let mut first = 0;
        let layers = self.layers.iter().map(|entry| {
            let end = entry.first + entry.experts as u32;
            let experts = taken.partition_point(|r| r.0 < end) - first as usize;
            let part = LayerEntry { experts, first, ..entry.clone() };
            first += experts as u32;
            part
        });
        let part = Self {
            layers: layers.collect(),
            ordinals: self.ordinals.clone(),
            records: taken.len() as u32,
            names: Some(Names {
                experts: taken.iter().map(|&r| self.id(r).expert as u32).collect(),
                of: (0..self.layers.len()).map(|o| self.experts_of(o)).collect(),
            }),
        };
        (part, taken)
    }

    /// Experts of the `ordinal`-th layer, those of other parts included.
    pub(crate) fn experts_of(&self, ordinal: usize) -> usize {
        self.names.as_ref().map_or(self.layers[ordinal].experts, |n| n.of[ordinal])
    }

    /// The layers that have records, ascending.
    pub fn layers(&self) -> &[LayerEntry] {
        &self.layers
    }

    /// Records in all.
    pub fn len(&self) -> usize {
        self.records as usize
    }

    /// Whether there is no record.
    pub fn is_empty(&self) -> bool {
        self.records == 0
    }

    /// Position of the model's layer `layer` in [`Self::layers`].
    pub fn ordinal(&self, layer: usize) -> Option<usize> {
        self.ordinals.get(&layer).copied()
    }

    /// The record of `id`.
    ///
    /// # Errors
    /// [`Error::UnknownExpert`], saying how many experts the layer has.
    pub fn record(&self, id: ExpertId) -> Result<RecordIndex> {
        let ordinal = self.ordinal(id.layer);
        let found = ordinal.and_then(|o| {
            let LayerEntry { first, experts, .. } = self.layers[o];
            let place = match &self.names {
                None => Some(id.expert).filter(|&e| e < experts),
                Some(names) => {
                    let here = &names.experts[first as usize..][..experts];
                    here.iter().position(|&e| e as usize == id.expert)
                }
            };
            place.map(|p| RecordIndex(first + p as u32))
        });
        found.ok_or(Error::UnknownExpert { id, available: ordinal.map_or(0, |o| self.experts_of(o)) })
    }

    /// The layer entry that holds `record`.
    ///
    /// # Panics
    /// When `record` is not of this directory.
    pub fn entry(&self, record: RecordIndex) -> &LayerEntry {
        &self.layers[self.ordinal_of(record)]
    }

    /// Position in [`Self::layers`] of the entry that holds `record`.
    ///
    /// # Panics
    /// When `record` is not of this directory.
    pub fn ordinal_of(&self, record: RecordIndex) -> usize {
        assert!(record.0 < self.records, "{record:?} of {} records", self.records);
        self.layers.partition_point(|e| e.first <= record.0) - 1
    }

    /// The key of `record`.
    pub fn id(&self, record: RecordIndex) -> ExpertId {
        let entry = self.entry(record);
        let expert = match &self.names {
            None => record.0 - entry.first,
            Some(names) => names.experts[record.0 as usize],
        };
        ExpertId { layer: entry.layer, expert: expert as usize }
    }

    /// Bytes of `record`.
    pub fn record_bytes(&self, record: RecordIndex) -> usize {
        self.entry(record).record_bytes
    }

    /// Bytes of the largest record: the size of a slot.
    pub fn largest_record(&self) -> usize {
        self.layers.iter().map(|e| e.record_bytes).max().unwrap_or(0)
    }

    /// Bytes of all records.
    pub fn total_bytes(&self) -> u64 {
        self.layers.iter().map(|e| e.experts as u64 * e.record_bytes as u64).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_and_records_round_trip_with_gaps_between_layers() {
        let d = Directory::new([(1, 4, 512), (2, 2, 1024), (7, 3, 512)]).unwrap();
        assert_eq!((d.len(), d.largest_record(), d.total_bytes()), (9, 1024, 4 * 512 + 2 * 1024 + 3 * 512));
        for r in 0..9 {
            assert_eq!(d.record(d.id(RecordIndex(r))).unwrap(), RecordIndex(r));
        }
        assert_eq!(d.id(RecordIndex(6)), ExpertId { layer: 7, expert: 0 });
        let missing = d.record(ExpertId { layer: 2, expert: 2 }).unwrap_err().to_string();
        assert!(missing.contains("layer 2 expert 2") && missing.contains("has 2 experts"), "{missing}");
        assert!(d.record(ExpertId { layer: 0, expert: 0 }).is_err());
        assert!(Directory::new([(2, 1, 1), (2, 1, 1)]).is_err());
        assert!(Directory::new([(2, u32::MAX as usize, 1), (3, 1, 1)]).is_err());
        assert!(Directory::new([(2, 1, usize::MAX)]).is_err());
        assert!(Directory::new([(2, 2, 1 << 61), (3, 3, 1 << 61)]).is_err());
    }

    #[test]
    fn a_part_keeps_layers_and_names() {
        let d = Directory::new([(1, 4, 512), (2, 2, 1024), (7, 3, 512)]).unwrap();
        let (part, records) = d.part(|r| [1, 3, 7].contains(&r.0));
        assert_eq!(records, [1, 3, 7].map(RecordIndex));
        let counts: Vec<_> = part.layers().iter().map(|l| (l.layer, l.experts, l.first)).collect();
        assert_eq!(counts, [(1, 2, 0), (2, 0, 2), (7, 1, 2)]);
        assert_eq!((part.len(), part.total_bytes()), (3, 3 * 512));
        for (i, &record) in records.iter().enumerate() {
            let here = RecordIndex(i as u32);
            assert_eq!((part.id(here), part.record(d.id(record)).unwrap()), (d.id(record), here));
            assert_eq!(part.record_bytes(here), d.record_bytes(record));
        }
        let elsewhere = part.record(ExpertId { layer: 1, expert: 0 }).unwrap_err().to_string();
        assert!(elsewhere.contains("has 4 experts"), "{elsewhere}");
        let (rest, _) = part.part(|r| r.0 > 0);
        assert_eq!(rest.id(RecordIndex(1)), ExpertId { layer: 7, expert: 1 });
    }
}
