//! Which records a store holds: keys, sizes, and the dense numbering that pool, policy and predictor work on.

use std::collections::HashMap;

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
        let entry = self.ordinal(id.layer).map(|o| &self.layers[o]);
        match entry {
            Some(entry) if id.expert < entry.experts => Ok(RecordIndex(entry.first + id.expert as u32)),
            _ => Err(Error::UnknownExpert { id, available: entry.map_or(0, |e| e.experts) }),
        }
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
        ExpertId { layer: entry.layer, expert: (record.0 - entry.first) as usize }
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
}
