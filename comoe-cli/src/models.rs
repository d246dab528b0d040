//! `comoe models`: the families that work, and what is on this machine.

use std::path::{Path, PathBuf};

use comoe_core::stats::human_bytes;
use comoe_core::store::PackedFile;
use comoe_models::arch;
use comoe_models::load::ConfigFile;
use serde::Serialize;

use crate::args::ModelsArgs;
use crate::error::{Error, Result};
use crate::hub;
use crate::output::Answers;
use crate::places::{CacheFolder, HubPlaces};

/// The object that `--json` prints. Fields may be added, never renamed.
#[derive(Debug, Serialize)]
struct Inventory {
    /// Values of `model_type` in `config.json`.
    families: Vec<&'static str>,
    /// Folder of the hub's models; absent when none is named.
    hub_folder: Option<PathBuf>,
    hub: Vec<HubModel>,
    /// Folder of converted experts; absent where there is none.
    converted_folder: Option<PathBuf>,
    converted: Vec<Converted>,
}

/// A revision of a model in the hub's folder.
#[derive(Debug, Serialize)]
struct HubModel {
    /// As it is given to other commands.
    name: String,
    folder: Option<PathBuf>,
    /// Of all revisions of the model together.
    bytes: u64,
    /// `model_type`, where it is one that works.
    family: Option<String>,
    /// Why it cannot run as it is here.
    problem: Option<String>,
}

#[derive(Debug, Serialize)]
struct Converted {
    file: PathBuf,
    bytes: u64,
    format: String,
    layers: usize,
    experts: usize,
}

/// Prints the list.
///
/// # Errors
/// When a folder cannot be read, or standard output cannot be written.
pub(crate) fn run(args: &ModelsArgs) -> Result<()> {
    let inventory = Inventory::take()?;
    let mut out = Answers::new();
    out.piece(&match args.json {
        // Strings, numbers and lists only: nothing in it can fail to be written.
        true => serde_json::to_string(&inventory).unwrap_or_default(),
        false => inventory.text(),
    });
    out.end()
}

impl Inventory {
    fn take() -> Result<Self> {
        let families = arch::FAMILIES.iter().flat_map(|f| f.model_types).copied().collect();
        let hub_folder = HubPlaces::from_env().ok().map(|places| places.cache);
        let mut hub = Vec::new();
        for model in hub_folder.as_deref().map(hub::cached).transpose()?.unwrap_or_default() {
            hub.extend(HubModel::of(&model));
        }
        let converted_folder = CacheFolder::open().path;
        let converted = converted_folder.as_deref().map(stores).transpose()?.unwrap_or_default();
        Ok(Self { families, hub_folder, hub, converted_folder, converted })
    }

    fn text(&self) -> String {
        let mut lines = vec![format!("families   {}", self.families.join(", ")), String::new()];
        let title = |what: &str, folder: &Option<PathBuf>| match folder {
            Some(folder) => format!("{what} {}", folder.display()),
            None => format!("{what} nowhere"),
        };
        let wide = self.hub.iter().map(|m| m.name.len()).max().unwrap_or(0);
        lines.push(title("models of the hub in", &self.hub_folder));
        lines.extend(self.hub.iter().map(|m| {
            let what = match (&m.family, &m.problem) {
                (_, Some(problem)) => format!("cannot run: {problem}"),
                (family, None) => family.clone().unwrap_or_default(),
            };
            format!("  {:wide$}  {:>10}  {what}", m.name, human_bytes(m.bytes))
        }));
        if self.hub.is_empty() {
            lines.push("  none; comoe pull ORG/NAME fetches one".to_owned());
        }
        lines.push(String::new());
        lines.push(title("converted experts in", &self.converted_folder));
        lines.extend(self.converted.iter().map(|c| {
            let file = c.file.file_name().unwrap_or_default().to_string_lossy();
            let size = human_bytes(c.bytes);
            format!("  {file}  {size:>10}  {}, {} experts in {} layers", c.format, c.experts, c.layers)
        }));
        if self.converted.is_empty() {
            lines.push("  none; --format int4 makes such files".to_owned());
        }
        lines.join("\n")
    }
}

impl HubModel {
    /// The revisions of a model; one entry without a folder when there is none yet.
    fn of(model: &hub::Cached) -> Vec<Self> {
        let of = |name: String, folder: Option<&PathBuf>| {
            let (family, problem) = match folder {
                None => (None, Some("no revision of it is whole".to_owned())),
                Some(folder) => match (hub::missing(folder), family(folder)) {
                    (Some(missing), _) => {
                        (None, Some(format!("{missing} is not here yet; comoe pull {name}")))
                    }
                    (None, Ok(family)) => (Some(family), None),
                    (None, Err(e)) => (None, Some(e.line())),
                },
            };
            let partial = Some(model.partial).filter(|p| *p > 0 && problem.is_some());
            let problem = problem.map(|p| match partial {
                Some(bytes) => format!("{p} ({} of files that are not whole)", human_bytes(bytes)),
                None => p,
            });
            Self { name, folder: folder.cloned(), bytes: model.bytes, family, problem }
        };
        let mut found: Vec<Self> = model
            .snapshots
            .iter()
            .map(|(revision, folder)| match revision.as_str() {
                "main" => of(model.name.clone(), Some(folder)),
                other => of(format!("{}@{other}", model.name), Some(folder)),
            })
            .collect();
        if found.is_empty() {
            found.push(of(model.name.clone(), None));
        }
        found
    }
}

/// The family of the model in `folder`, if it is one that works.
fn family(folder: &Path) -> Result<String> {
    let config = ConfigFile::of_model(folder)?;
    arch::plan(&config)?;
    Ok(config.language_model().require("model_type")?)
}

/// The stores of converted experts in `folder`.
fn stores(folder: &Path) -> Result<Vec<Converted>> {
    let failed = |e| Error::core(comoe_core::Error::io(folder, e));
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        if path.extension().is_none_or(|e| e != "safetensors") {
            continue;
        }
        // Anything else in the folder is not ours to complain about.
        let Ok(packed) = PackedFile::open(&path) else { continue };
        let info = packed.info();
        found.push(Converted {
            bytes: std::fs::metadata(&path).map_or(0, |m| m.len()),
            format: info.format.to_string(),
            layers: info.layers.len(),
            experts: info.layers.iter().map(|l| l.experts).sum(),
            file: path,
        });
    }
    found.sort_by(|a, b| a.file.cmp(&b.file));
    Ok(found)
}
