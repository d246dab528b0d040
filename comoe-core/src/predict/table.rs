//! A [`Correlation`] table kept from one run to the next.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::Correlation;
use crate::error::{Error, Result};
use crate::framed::{Cursor, compress, decompress, fnv};
use crate::store::Directory;
use crate::whole_file::WholeFile;

/// First bytes of a table's file.
pub const TABLE_MAGIC: [u8; 8] = *b"comoe-pt";
/// Version of its format.
pub const TABLE_VERSION: u32 = 1;

/// Largest header that is read, in bytes.
const MOST_HEADER: usize = 1 << 20;
/// Bytes around header and content.
const FRAME: usize = 8 + 4 + 4 + 4 + 4 + 8;

/// The file's header, as JSON.
#[derive(Debug, Serialize, Deserialize)]
struct Header {
    model: String,
    depth: usize,
    /// `[layer, experts]`
    layers: Vec<(usize, usize)>,
    /// Tokens that it was learned from.
    tokens: u64,
}

fn shape(directory: &Directory) -> Vec<(usize, usize)> {
    directory.layers().iter().map(|l| (l.layer, l.experts)).collect()
}

impl Correlation {
    /// Tokens that the table was learned from, those of the runs before included.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Writes the table to `path`, whole or not at all. `model` is a name for people, `directory` says what the layers
    /// are.
    ///
    /// # The format, version 1
    /// All numbers are little-endian: `comoe-pt`; version (4); length of the header (4); the header, JSON: `model`,
    /// `depth`, `layers` (`[layer, experts]` each), `tokens`; length of the content as stored (4) and uncompressed (4);
    /// the FNV-1a-64 hash of the uncompressed content (8); the content, one Zstandard frame (RFC 8878). Uncompressed it
    /// is, for each layer, how often each expert of the layer `depth` before it was chosen (of the last layers for the
    /// first ones), `[from]`, and how often each of its own experts with that, `[from, experts]`, as F32 in units of the
    /// next observation.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::BadArgument`] when `directory` is not what the table was made for, or it is too big.
    pub fn save(&self, path: &Path, model: &str, directory: &Directory) -> Result<()> {
        let bad = |reason: &str| Error::BadArgument { what: "predictor table", reason: reason.to_owned() };
        let mine = self.tables.iter().map(|t| t.to);
        if !mine.eq(directory.layers().iter().map(|l| l.experts)) {
            return Err(bad("it was made for other layers than it is saved for"));
        }
        let mut content = Vec::with_capacity(self.floats() * 4);
        for table in &self.tables {
            let values = table.totals.iter().chain(&table.counts);
            content.extend(values.flat_map(|v| (v / table.weight).to_le_bytes()));
        }
        let header = Header {
            model: model.to_owned(),
            depth: self.depth,
            layers: shape(directory),
            tokens: self.tokens,
        };
        // Strings and numbers only: nothing in it can fail to be written.
        let header = serde_json::to_vec(&header).unwrap_or_default();
        let stored = compress(&content);
        let length = |n: usize| u32::try_from(n).map_err(|_| bad("it has 4 GiB or more"));
        let mut bytes = Vec::with_capacity(FRAME + header.len() + stored.len());
        bytes.extend(TABLE_MAGIC);
        bytes.extend(TABLE_VERSION.to_le_bytes());
        bytes.extend(length(header.len())?.to_le_bytes());
        bytes.extend(&header);
        bytes.extend(length(stored.len())?.to_le_bytes());
        bytes.extend(length(content.len())?.to_le_bytes());
        bytes.extend(fnv(&content).to_le_bytes());
        bytes.extend(stored);
        WholeFile::write(path, &bytes)
    }

    /// Replaces the table by the one at `path`, which [`Self::save`] wrote for the same `model` and `directory`.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::BadPredictorTable`], [`Error::TableOfAnotherModel`]. The table is then as before.
    pub fn load(&mut self, path: &Path, model: &str, directory: &Directory) -> Result<()> {
        let bad = |reason: &str| {
            let reason = format!("{reason}; delete it, and the next run learns a new one");
            Error::BadPredictorTable { path: path.to_owned(), reason }
        };
        // As much as a table of this model can have, whatever the file claims: incompressible content grows by a little.
        let raw = self.floats() * 4;
        let most = (FRAME + MOST_HEADER + raw + raw / 128 + 4096) as u64;
        let mut bytes = Vec::new();
        let read = File::open(path).and_then(|f| f.take(most + 1).read_to_end(&mut bytes));
        read.map_err(|e| Error::io(path, e))?;
        if bytes.len() as u64 > most {
            return Err(bad(&format!("has more than {most} bytes, too many for a table of this model")));
        }
        let mut file = Cursor { bytes: &bytes, at: 0 };
        let cut = || bad("ends too early: it is truncated");
        if file.take(TABLE_MAGIC.len()).ok_or_else(cut)? != TABLE_MAGIC {
            return Err(bad("is no predictor table of comoe"));
        }
        let version = file.u32().ok_or_else(cut)?;
        if version != TABLE_VERSION {
            let reason =
                format!("is a predictor table of version {version}, this build reads {TABLE_VERSION}");
            return Err(bad(&reason));
        }
        let header = file.u32().and_then(|n| file.take(n as usize)).ok_or_else(cut)?;
        let header: Header =
            serde_json::from_slice(header).map_err(|e| bad(&format!("its header is damaged ({e})")))?;
        self.check(&header, path, model, directory)?;
        let (Some(stored), Some(length), Some(hash)) = (file.u32(), file.u32(), file.u64()) else {
            return Err(cut());
        };
        let stored = file.take(stored as usize).ok_or_else(cut)?;
        if length as usize != raw {
            return Err(bad(&format!("has {length} bytes of counts where its layers need {raw}")));
        }
        let content = decompress(stored, raw, raw).filter(|c| fnv(c) == hash);
        let content = content.ok_or_else(|| bad("is damaged (its checksum differs)"))?;
        let values: Vec<f32> = content.as_chunks().0.iter().map(|&b| f32::from_le_bytes(b)).collect();
        if values.iter().any(|v| !v.is_finite() || *v < 0.0) {
            return Err(bad("has counts that are no counts"));
        }
        let mut rest = values.as_slice();
        for table in &mut self.tables {
            for part in [&mut table.totals, &mut table.counts] {
                let (mine, after) = rest.split_at(part.len());
                part.copy_from_slice(mine);
                rest = after;
            }
            table.weight = 1.0;
        }
        self.tokens = header.tokens;
        Ok(())
    }

    /// Numbers in the tables.
    pub(super) fn floats(&self) -> usize {
        self.tables.iter().map(|t| t.totals.len() + t.counts.len()).sum()
    }

    fn check(&self, header: &Header, path: &Path, model: &str, directory: &Directory) -> Result<()> {
        let differs = |reason: String| {
            let (path, model) = (path.to_owned(), header.model.clone());
            Err(Error::TableOfAnotherModel { path, model, reason })
        };
        if header.model != model {
            return differs(format!("this is {model:?}"));
        }
        let mine = shape(directory);
        if header.layers.len() != mine.len() {
            let (have, want) = (header.layers.len(), mine.len());
            return differs(format!("it has {have} layers with experts, this one has {want}"));
        }
        if let Some((theirs, mine)) = header.layers.iter().zip(&mine).find(|(a, b)| a != b) {
            let ((a, n), (b, m)) = (theirs, mine);
            return differs(format!("it has {n} experts in layer {a}, this one {m} in layer {b}"));
        }
        if header.depth != self.depth {
            return differs(format!("it looks {} layers ahead, not {}", header.depth, self.depth));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Predictor, Scored};
    use super::*;

    fn directory(experts: &[usize]) -> Directory {
        Directory::new(experts.iter().enumerate().map(|(l, &n)| (2 * l + 1, n, 512))).unwrap()
    }

    fn learned() -> Correlation {
        let mut table = Correlation::new(&[4, 6, 4], 1);
        for t in 0..400u32 {
            for (layer, experts) in [4, 6, 4].into_iter().enumerate() {
                table.observe(layer, &[(t + layer as u32) % experts, (t / 3 + 1) % experts], 2);
            }
        }
        table
    }

    fn guesses(table: &mut Correlation) -> Vec<Vec<Scored>> {
        let mut all = Vec::new();
        for layer in 0..3 {
            table.observe(layer, &[1, 2], 2);
            let mut out = Vec::new();
            table.predict((layer + 1) % 3, &mut out);
            all.push(out);
        }
        all
    }

    #[test]
    fn what_is_saved_guesses_alike_when_loaded_and_learns_on() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.table");
        let (mut kept, directory) = (learned(), directory(&[4, 6, 4]));
        kept.save(&path, "m", &directory).unwrap();
        kept.save(&path, "m", &directory).unwrap();
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "nothing temporary is left");
        let mut loaded = Correlation::new(&[4, 6, 4], 1);
        loaded.load(&path, "m", &directory).unwrap();
        assert_eq!((loaded.tokens(), kept.tokens()), (400, 400));
        // The first guess for layer 0 needs the token before, which is not kept.
        for (a, b) in guesses(&mut kept).iter().zip(&guesses(&mut loaded)).take(2) {
            assert_eq!(a.len(), b.len());
            for (a, b) in a.iter().zip(b) {
                assert!(a.expert == b.expert && (a.score - b.score).abs() < 1e-5, "{a:?} {b:?}");
            }
        }
        assert_eq!(loaded.tokens(), 401);
    }

    #[test]
    fn another_models_table_is_refused_with_its_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.table");
        learned().save(&path, "mine", &directory(&[4, 6, 4])).unwrap();
        let refused = |experts: &[usize], model: &str, depth| {
            let mut table = Correlation::new(experts, depth);
            table.load(&path, model, &directory(experts)).unwrap_err().to_string()
        };
        let said = refused(&[4, 6, 4], "other", 1);
        assert!(said.contains("\"mine\"") && said.contains("\"other\""), "{said}");
        let said = refused(&[4, 6], "mine", 1);
        assert!(said.contains("3 layers") && said.contains("has 2"), "{said}");
        let said = refused(&[4, 8, 4], "mine", 1);
        assert!(said.contains("6 experts in layer 3, this one 8"), "{said}");
        assert!(refused(&[4, 6, 4], "mine", 2).contains("1 layers ahead, not 2"));
        let wrong = learned().save(&path, "mine", &directory(&[4, 6])).unwrap_err();
        assert!(matches!(wrong, Error::BadArgument { .. }), "{wrong}");
    }

    #[test]
    fn damaged_and_hostile_files_are_refused_and_change_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.table");
        let directory = directory(&[4, 6, 4]);
        learned().save(&path, "m", &directory).unwrap();
        let good = std::fs::read(&path).unwrap();
        let header = u32::from_le_bytes(good[12..16].try_into().unwrap()) as usize;
        let mut table = learned();
        let before = guesses(&mut table);
        let mut refused = |bytes: &[u8]| {
            std::fs::write(&path, bytes).unwrap();
            let e = table.load(&path, "m", &directory).unwrap_err();
            assert!(matches!(e, Error::BadPredictorTable { .. } | Error::TableOfAnotherModel { .. }), "{e}");
            e.to_string()
        };
        for cut in [0, 7, 11, 15, 20, 16 + header + 9, good.len() - 1] {
            assert!(refused(&good[..cut]).contains("truncated"), "cut at {cut}");
        }
        let mut changed = |at: usize, bytes: &[u8]| {
            let mut file = good.clone();
            file[at..at + bytes.len()].copy_from_slice(bytes);
            refused(&file)
        };
        assert!(changed(0, b"safetens").contains("no predictor table"));
        assert!(changed(8, &9u32.to_le_bytes()).contains("version 9, this build reads 1"));
        assert!(changed(12, &u32::MAX.to_le_bytes()).contains("truncated"));
        assert!(changed(16, b"?").contains("header is damaged"));
        let content = 16 + header;
        assert!(changed(content, &u32::MAX.to_le_bytes()).contains("truncated"));
        assert!(changed(content + 4, &u32::MAX.to_le_bytes()).contains("where its layers need"));
        assert!(changed(content + 8, &[0; 8]).contains("checksum"));
        let huge = vec![0; 4 << 20];
        assert!(refused(&huge).contains("too many for a table of this model"));
        // Well formed, and no counts.
        let mut odd = learned();
        odd.tables[1].counts[3] = f32::NAN;
        odd.save(&path, "m", &directory).unwrap();
        let said = table.load(&path, "m", &directory).unwrap_err().to_string();
        assert!(said.contains("no counts"), "{said}");
        let after = guesses(&mut table);
        assert_eq!(before.len(), after.len());
        assert_eq!(table.tokens(), 402, "as if nothing had been loaded");
    }
}
