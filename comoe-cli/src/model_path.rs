//! Where a model is found.

use std::path::{Path, PathBuf};

use comoe_core::store::PackedFile;

use crate::error::{Error, Result};
use crate::hub::{self, HeadersFolder, RepoName};

/// The model that comes with CoMoE.
pub(crate) const BUNDLED: &str = "comoe-tiny";
/// The file that makes a folder a model.
const CONFIG: &str = "config.json";

/// The folder (or packed or GGUF file) of the model asked for, or of comoe-tiny when none is. A model of the hub is fetched if need be.
pub(crate) fn find(asked: Option<&Path>, quiet: bool) -> Result<PathBuf> {
    match asked {
        // A folder that is there goes before a name on the hub, as in transformers.
        Some(path) => match named(path) {
            Some(name) => hub::find(&name, quiet),
            None => given(path),
        },
        None => bundled(&candidates(
            std::env::current_exe().ok().as_deref(),
            std::env::current_dir().ok().as_deref(),
            Path::new(env!("CARGO_MANIFEST_DIR")),
        )),
    }
}

/// A model to plan for: of one on the hub that is not here, headers alone.
pub(crate) enum Planned {
    /// All of it.
    Here(PathBuf),
    /// A folder for as long as this lives, and the name.
    Headers(HeadersFolder, String),
}

impl Planned {
    /// The model asked for, or comoe-tiny when none is.
    pub(crate) fn find(asked: Option<&Path>, quiet: bool) -> Result<Self> {
        let Some(name) = asked.and_then(named) else { return find(asked, quiet).map(Self::Here) };
        Ok(match hub::headers(&name, quiet)? {
            Ok(folder) => Self::Here(folder),
            Err(headers) => Self::Headers(headers, name.to_string()),
        })
    }

    pub(crate) fn path(&self) -> &Path {
        match self {
            Self::Here(path) => path,
            Self::Headers(folder, _) => folder.path(),
        }
    }
}

/// The name that `path` is on the hub; `None` for what is here, and for what cannot be one.
fn named(path: &Path) -> Option<RepoName> {
    let not_here = std::fs::symlink_metadata(path).is_err_and(|e| e.kind() == std::io::ErrorKind::NotFound);
    if not_here { path.to_str()?.parse().ok() } else { None }
}

fn given(path: &Path) -> Result<PathBuf> {
    match std::fs::metadata(path) {
        Err(source) => Err(Error::NoModelFolder { path: path.to_owned(), source }),
        Ok(meta) if !meta.is_dir() && !is_gguf(path) => packed(path),
        Ok(meta) if meta.is_dir() && !is_model_folder(path) => {
            let hides = path.to_str().is_some_and(|name| name.parse::<RepoName>().is_ok());
            Err(Error::NoConfig { path: path.to_owned(), hides })
        }
        Ok(_) => Ok(path.to_owned()),
    }
}

/// Whether a folder has a configuration, or a GGUF file, which does without.
fn is_model_folder(folder: &Path) -> bool {
    let has_gguf = || {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        entries.into_iter().any(|entry| is_gguf(&entry.path()))
    };
    folder.join(CONFIG).exists() || has_gguf()
}

/// A packed file that is whole, as far as its header tells.
fn packed(path: &Path) -> Result<PathBuf> {
    let named = path.extension().is_some_and(|e| e == "safetensors");
    // Opening a pipe would wait for its writer.
    if !named && !path.is_file() {
        return Err(Error::ModelIsAFile { path: path.to_owned() });
    }
    match PackedFile::open(path) {
        Ok(_) if !named => Err(Error::PackName { path: path.to_owned() }),
        Err(_) if !named => Err(Error::ModelIsAFile { path: path.to_owned() }),
        Ok(_) => Ok(path.to_owned()),
        Err(comoe_core::Error::NotPacked { .. }) => Err(Error::ModelIsAFile { path: path.to_owned() }),
        Err(e) => Err(e.into()),
    }
}

/// Whether a path is called a GGUF file, which is a model by itself.
fn is_gguf(path: &Path) -> bool {
    path.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf"))
}

/// Places for comoe-tiny, best first: beside the executable, upward from the working directory, in the checkout that
/// the executable was built from.
fn candidates(executable: Option<&Path>, working: Option<&Path>, crate_folder: &Path) -> Vec<PathBuf> {
    let beside = executable.and_then(Path::parent).into_iter();
    let upward = working.into_iter().flat_map(Path::ancestors);
    let checkout = crate_folder.parent().into_iter();
    let mut places: Vec<PathBuf> = beside
        .flat_map(|d| [d.join(BUNDLED), d.join("assets").join(BUNDLED)])
        .chain(upward.map(|d| d.join("assets").join(BUNDLED)))
        .chain(checkout.map(|d| d.join("assets").join(BUNDLED)))
        .collect();
    let mut seen = std::collections::HashSet::new();
    places.retain(|p| seen.insert(p.clone()));
    places
}

fn bundled(places: &[PathBuf]) -> Result<PathBuf> {
    let found = places.iter().find(|p| p.join(CONFIG).is_file());
    found.cloned().ok_or_else(|| Error::NoBundledModel { places: places.to_vec() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put_model(folder: &Path) {
        std::fs::create_dir_all(folder).unwrap();
        std::fs::write(folder.join(CONFIG), "{}").unwrap();
    }

    #[test]
    fn the_bundled_model_is_looked_for_in_order() {
        let root = tempfile::tempdir().unwrap();
        let bin = root.path().join("bin");
        let deep = root.path().join("work/a/b");
        let checkout = root.path().join("checkout");
        std::fs::create_dir_all(&deep).unwrap();
        let search =
            || bundled(&candidates(Some(&bin.join("comoe")), Some(&deep), &checkout.join("comoe-cli")));

        let e = search().unwrap_err().to_string();
        assert!(e.contains(&bin.join(BUNDLED).display().to_string()) && e.contains("give the folder"), "{e}");
        // From the last place to the first: each found takes over.
        for place in [
            checkout.join("assets/comoe-tiny"),
            root.path().join("work/assets/comoe-tiny"),
            deep.join("assets/comoe-tiny"),
            bin.join("assets/comoe-tiny"),
            bin.join("comoe-tiny"),
        ] {
            // A folder of that name without a model does not count.
            std::fs::create_dir_all(&place).unwrap();
            assert!(search().map_or(true, |found| found != place));
            put_model(&place);
            assert_eq!(search().unwrap(), place);
        }
    }

    #[test]
    fn a_name_of_the_hub_is_one_unless_something_is_there() {
        let name = |text: &str| named(Path::new(text)).map(|n| n.to_string());
        assert_eq!(name("org/model@v1").as_deref(), Some("org/model@v1"));
        // The crate's own folder is the working directory of its tests.
        assert_eq!(name("src/hub"), None);
        for path in ["/no/such/folder", "./org/model", "../model", "model", "org/model/", "org/model/file"] {
            assert_eq!(name(path), None, "{path}");
        }
    }

    #[test]
    fn a_folder_given_must_be_one_and_a_file_one_that_is_a_model() {
        let root = tempfile::tempdir().unwrap();
        let e = given(root.path()).unwrap_err().to_string();
        assert!(e.contains("without config.json; give the folder") && !e.contains("hub"), "{e}");
        // Of the crate's own folders, one that looks like a name on the hub.
        let e = given(Path::new("src/hub")).unwrap_err().to_string();
        assert!(
            e.contains("src/hub is a folder without config.json") && e.contains("the hub's model"),
            "{e}"
        );
        put_model(&root.path().join("m"));
        assert_eq!(given(&root.path().join("m")).unwrap(), root.path().join("m"));
        let shard = b"\x02\0\0\0\0\0\0\0{}";
        for (name, bytes) in [("model.safetensors", &shard[..]), ("model.bin", b"")] {
            let file = root.path().join(name);
            assert!(matches!(given(&file), Err(Error::NoModelFolder { .. })));
            std::fs::write(&file, bytes).unwrap();
            let e = given(&file).unwrap_err().to_string();
            assert!(e.contains(name) && e.contains("folder") && e.contains(".gguf"), "{e}");
        }
        // A packed file that is not all there says so.
        let file = root.path().join("model.safetensors");
        std::fs::write(&file, &shard[..9]).unwrap();
        let e = given(&file).unwrap_err().to_string();
        assert!(e.contains("truncated"), "{e}");
        let gguf = root.path().join("model.GGUF");
        assert!(given(&gguf).is_err());
        std::fs::write(&gguf, "").unwrap();
        assert_eq!(given(&gguf).unwrap(), gguf);
    }
}
