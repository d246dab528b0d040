//! How often each expert was used: what is worth keeping at hand, summed up over runs.

use std::io::Read;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::Trace;
use crate::error::{Error, Result};
use crate::expert::ExpertId;
use crate::store::Directory;
use crate::whole_file::WholeFile;

/// Longest file that is read, in bytes: a hundred digits for each of a quarter of a million experts.
const MOST_BYTES: u64 = 32 << 20;

/// Uses of every expert of a model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExpertUses {
    /// The model's name, for people.
    model: String,
    layers: Vec<LayerUses>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct LayerUses {
    /// The model's layer number.
    layer: usize,
    /// By expert.
    uses: Vec<u64>,
}

impl ExpertUses {
    /// Of `model`, whose experts are those of `directory`: `uses` by record number.
    pub fn new(model: &str, directory: &Directory, uses: &[u64]) -> Self {
        let of = |record: usize| uses.get(record).copied().unwrap_or(0);
        let layers = directory.layers().iter().map(|entry| LayerUses {
            layer: entry.layer,
            uses: (entry.first as usize..entry.first as usize + entry.experts).map(of).collect(),
        });
        Self { model: model.to_owned(), layers: layers.collect() }
    }

    /// Those of a recorded run.
    pub fn of_trace(trace: &Trace) -> Self {
        let counts: Vec<u64> = trace.summary().layers.into_iter().flat_map(|l| l.counts).collect();
        Self::new(&trace.info().model, &trace.info().directory, &counts)
    }

    /// Adds those of another run of the same model.
    pub fn add(&mut self, other: &Self) {
        let all = self.layers.iter_mut().zip(&other.layers);
        for (own, other) in all.flat_map(|(own, other)| own.uses.iter_mut().zip(&other.uses)) {
            *own = own.saturating_add(*other);
        }
    }

    /// Uses of all experts.
    pub fn total(&self) -> u64 {
        self.layers.iter().flat_map(|l| &l.uses).fold(0, |sum, n| sum.saturating_add(*n))
    }

    /// Experts that were used, those used most first; of equals the first.
    pub fn hottest(&self) -> Vec<ExpertId> {
        let all = self.layers.iter().flat_map(|l| {
            l.uses.iter().enumerate().map(|(expert, &n)| (n, ExpertId { layer: l.layer, expert }))
        });
        let mut used: Vec<_> = all.filter(|(n, _)| *n > 0).collect();
        used.sort_by_key(|&(n, _)| std::cmp::Reverse(n));
        used.into_iter().map(|(_, id)| id).collect()
    }

    /// Writes them to `path` as JSON, `{"model", "layers": [{"layer", "uses": [by expert]}]}`, whole or not at all.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn save(&self, path: &Path) -> Result<()> {
        // Strings and numbers only: nothing in it can fail to be written.
        WholeFile::write(path, &serde_json::to_vec(self).unwrap_or_default())
    }

    /// Reads what [`Self::save`] wrote for a model with the experts of `directory`.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::BadFile`] for a file that is damaged or of other experts.
    pub fn load(path: &Path, directory: &Directory) -> Result<Self> {
        let mut bytes = Vec::new();
        let read = std::fs::File::open(path).and_then(|f| f.take(MOST_BYTES + 1).read_to_end(&mut bytes));
        read.map_err(|e| Error::io(path, e))?;
        let bad =
            |what: String| Error::bad_file(path, format!("{what}; delete it, and the next run learns anew"));
        if bytes.len() as u64 > MOST_BYTES {
            return Err(bad(format!("has more than {MOST_BYTES} bytes, and holds no uses of experts")));
        }
        let uses: Self = serde_json::from_slice(&bytes)
            .map_err(|e| bad(format!("holds no uses of experts, or is damaged ({e})")))?;
        let shape = |l: &LayerUses| (l.layer, l.uses.len());
        if !uses.layers.iter().map(shape).eq(directory.layers().iter().map(|e| (e.layer, e.experts))) {
            return Err(bad(format!(
                "was learned from {:?}, which has other experts than this model",
                uses.model
            )));
        }
        Ok(uses)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn directory() -> Directory {
        Directory::new([(1, 3, 512), (4, 2, 512)]).unwrap()
    }

    fn id(layer: usize, expert: usize) -> ExpertId {
        ExpertId { layer, expert }
    }

    #[test]
    fn the_hottest_come_first_and_what_was_not_used_does_not_come() {
        let mut uses = ExpertUses::new("m", &directory(), &[5, 0, 7, 7, 1]);
        assert_eq!(uses.hottest(), [id(1, 2), id(4, 0), id(1, 0), id(4, 1)]);
        uses.add(&ExpertUses::new("m", &directory(), &[9, 1, 0, 0, u64::MAX]));
        assert_eq!(uses.hottest(), [id(4, 1), id(1, 0), id(1, 2), id(4, 0), id(1, 1)]);
        assert_eq!(uses.total(), u64::MAX);
    }

    #[test]
    fn a_traces_uses_are_its_choices() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../assets/fixtures/comoe_tiny.trace");
        let trace = Trace::open(&path).unwrap();
        let uses = ExpertUses::of_trace(&trace);
        let all: usize = (0..trace.tokens().len())
            .map(|t| (0..trace.layers()).map(|l| trace.chosen(t, l).len()).sum::<usize>())
            .sum();
        assert_eq!(uses.total(), all as u64);
        let first = uses.hottest()[0];
        let layer = trace.info().directory.ordinal(first.layer).unwrap();
        let count = |e: usize| {
            (0..trace.tokens().len()).filter(|&t| trace.chosen(t, layer).contains(&(e as u32))).count()
        };
        assert!((0..16).all(|e| count(e) <= count(first.expert)));
    }

    #[test]
    fn files_come_back_and_others_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.uses");
        let uses = ExpertUses::new("m", &directory(), &[5, 0, 7, 7, 1]);
        uses.save(&path).unwrap();
        assert_eq!(ExpertUses::load(&path, &directory()).unwrap(), uses);
        let other = Directory::new([(1, 3, 512), (5, 2, 512)]).unwrap();
        let e = ExpertUses::load(&path, &other).unwrap_err().to_string();
        assert!(e.contains("a.uses") && e.contains("other experts"), "{e}");
        let bytes = std::fs::read(&path).unwrap();
        for cut in 0..bytes.len() {
            std::fs::write(&path, &bytes[..cut]).unwrap();
            let e = ExpertUses::load(&path, &directory()).unwrap_err().to_string();
            assert!(e.contains("damaged") && e.contains("delete it"), "{e}");
        }
    }
}
