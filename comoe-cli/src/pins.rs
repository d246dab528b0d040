//! Experts that stay in the pool: those of a trace, or those that earlier runs used most.

use std::path::{Path, PathBuf};

use comoe_core::trace::{ExpertUses, Trace};
use comoe_core::{ExpertCache, ExpertId};

use crate::error::{Error, Result};
use crate::load::name_of_model;
use crate::output::say;
use crate::places::CacheFolder;
use crate::predictor::file_name;
use crate::trace::experts_in;

/// What learns from run to run.
pub(crate) const AUTO: &str = "auto";

/// Where the experts to pin come from.
#[derive(Debug)]
pub(crate) struct Pins {
    /// What is known; `None` before the first run that learns.
    uses: Option<ExpertUses>,
    /// Where this run's uses are added; `None` of a trace, and where there is no folder.
    kept: Option<PathBuf>,
}

impl Pins {
    /// The experts of what was `asked` for, for the model at `folder`. Notes are said unless `quiet`.
    ///
    /// # Errors
    /// When a trace cannot be read or is another model's. What was learned and cannot be read is learned anew.
    pub(crate) fn find(asked: Option<&Path>, folder: &Path, quiet: bool) -> Result<Option<Self>> {
        let Some(asked) = asked else { return Ok(None) };
        let directory = experts_in(folder)?;
        if asked != Path::new(AUTO) {
            let trace = Trace::open(asked).map_err(Error::core)?;
            trace.info().check_model(&directory).map_err(Error::core)?;
            return Ok(Some(Self { uses: Some(ExpertUses::of_trace(&trace)), kept: None }));
        }
        let note = |text: &str| {
            if !quiet {
                say!("note: nothing is pinned{text}");
            }
        };
        let name = file_name("uses", "json", &name_of_model(folder), folder);
        let Some(path) = CacheFolder::open().path.map(|cache| cache.join(name)) else {
            note(": there is no folder to learn in (set COMOE_CACHE)");
            return Ok(Some(Self { uses: None, kept: None }));
        };
        let uses = match path.exists().then(|| ExpertUses::load(&path, &directory)) {
            Some(Ok(uses)) => Some(uses),
            Some(Err(e)) => {
                note(&format!(", and learned anew, since {e}"));
                None
            }
            None => {
                note(": no run has been learned from yet; this one is, and the next will pin");
                None
            }
        };
        Ok(Some(Self { uses, kept: Some(path) }))
    }

    /// Sees that [`Self::find`] would find what was asked for; what is learned from run to run is never wrong.
    ///
    /// # Errors
    /// As [`Self::find`].
    pub(crate) fn check(asked: Option<&Path>, folder: &Path) -> Result<()> {
        Self::find(asked.filter(|asked| *asked != Path::new(AUTO)), folder, true).map(drop)
    }

    /// The hottest first.
    pub(crate) fn experts(&self) -> Vec<ExpertId> {
        self.uses.as_ref().map_or_else(Vec::new, ExpertUses::hottest)
    }

    /// Adds this run's uses to what is known. A failure is no reason to fail the run.
    pub(crate) fn save(&self, model: &str, experts: &ExpertCache) {
        let Some(path) = &self.kept else { return };
        let mut uses = ExpertUses::new(model, experts.directory(), &experts.uses());
        if let Some(before) = &self.uses {
            uses.add(before);
        }
        if uses.total() > 0
            && let Err(e) = uses.save(path)
        {
            say!("warning: which experts were used is not kept: {e}");
        }
    }
}
