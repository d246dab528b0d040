//! What prefetching learned of a model, kept from one run to the next without anybody asking.

use std::path::{Path, PathBuf};

use comoe_core::ExpertCache;

use crate::error::{Error, Result};
use crate::output::say;
use crate::places::CacheFolder;

/// Where the table of the model at hand is kept.
#[derive(Debug)]
pub(crate) struct PredictorTable {
    path: PathBuf,
    model: String,
    /// The file was asked for.
    asked: bool,
    quiet: bool,
    /// Tokens that earlier runs learned from.
    found: u64,
}

impl PredictorTable {
    /// Takes over what earlier runs learned, from the file that was `asked` for, or else from the model's own in the cache
    /// folder. Notes are said unless `quiet`. `None` where the prefetch in force learns no table, or there is no folder.
    ///
    /// # Errors
    /// When the file asked for is there and cannot be used. One of our own is then learned anew.
    pub(crate) fn open(
        asked: Option<&Path>,
        folder: &Path,
        model: String,
        experts: &ExpertCache,
        quiet: bool,
    ) -> Result<Option<Self>> {
        if experts.predictor_table().is_none() {
            match experts.placement() {
                _ if asked.is_none() || quiet => {}
                None => say!("note: --predictor-table changes nothing: what is prefetched is not learned"),
                Some(_) => say!(
                    "note: --predictor-table changes nothing: each of several devices learns a table of its own, and none is kept"
                ),
            }
            return Ok(None);
        }
        let own = || {
            CacheFolder::open().path.map(|cache| cache.join(file_name("predictor", "table", &model, folder)))
        };
        let Some(path) = asked.map(Path::to_owned).or_else(own) else { return Ok(None) };
        if path.exists() {
            match experts.load_predictor_table(&path, &model) {
                Ok(()) => {}
                Err(e) if asked.is_some() => return Err(Error::core(e)),
                Err(_) if quiet => {}
                Err(e) => say!("note: prefetching learns anew, since {e}"),
            }
        }
        let found = experts.predictor_table().unwrap_or(0);
        Ok(Some(Self { path, model, asked: asked.is_some(), quiet, found }))
    }

    /// Keeps what is known now, unless the model turned out to guess by itself. A failure is no reason to fail the run.
    pub(crate) fn save(&self, experts: &ExpertCache) {
        if experts.predictor_table().is_none() {
            if self.asked && !self.quiet {
                say!("note: no predictor table is kept: the model guesses by itself");
            }
            return;
        }
        if let Err(e) = experts.save_predictor_table(&self.path, &self.model) {
            say!("warning: what prefetching learned is not kept: {e}");
        }
    }

    /// A line for `--stats`.
    pub(crate) fn line(&self, experts: &ExpertCache) -> Option<String> {
        let (all, found) = (experts.predictor_table()?, self.found);
        Some(format!(
            "learned  from {all} tokens, {found} of them in earlier runs; kept in {}",
            self.path.display()
        ))
    }
}

/// The file of a kind that is kept of a model: of its folder's name, and a hash of where the folder is, so that models of
/// one name are told apart.
pub(crate) fn file_name(kind: &str, ending: &str, model: &str, folder: &Path) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '_' };
    let name: String = model.chars().map(plain).take(64).collect();
    let full = folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
    // FNV-1a of 64 bits, the same in every release.
    let hash = full
        .as_os_str()
        .as_encoded_bytes()
        .iter()
        .fold(0xcbf2_9ce4_8422_2325u64, |h, b| (h ^ u64::from(*b)).wrapping_mul(0x100_0000_01b3));
    format!("{kind}-{name}-{hash:016x}.{ending}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_plain_and_tell_folders_apart() {
        let name = |folder: &str| file_name("predictor", "table", "a b/ü", Path::new(folder));
        let (a, b) = (name("/x/m"), name("/y/m"));
        assert!(a.starts_with("predictor-a_b__-") && a.ends_with(".table"), "{a}");
        assert_ne!(a, b);
        assert!(file_name("predictor", "table", &"x".repeat(999), Path::new("/")).len() < 120);
    }
}
