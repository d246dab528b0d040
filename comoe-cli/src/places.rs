//! Folders of the user. The only place that reads the environment.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use crate::hub;
use crate::sys;

/// Where converted experts and the chat history are kept.
#[derive(Debug)]
pub(crate) struct CacheFolder {
    /// `None`: nowhere.
    pub(crate) path: Option<PathBuf>,
    /// What to tell the user, when it is not where it should be.
    pub(crate) note: Option<String>,
}

impl CacheFolder {
    /// `$COMOE_CACHE`, else `$XDG_CACHE_HOME/comoe`, else `~/.cache/comoe`, made if needed. When it cannot be written,
    /// a folder among the temporary files that nobody else can write, and a note that says so.
    pub(crate) fn open() -> Self {
        Self::choose(|name| std::env::var_os(name), &std::env::temp_dir())
    }

    fn choose(variable: impl Fn(&str) -> Option<OsString>, temporary: &Path) -> Self {
        let get = |name| variable(name).filter(|v| !v.is_empty()).map(PathBuf::from);
        // The XDG base directory specification: a relative path is ignored.
        let xdg = get("XDG_CACHE_HOME").filter(|p| p.is_absolute());
        let wanted = get("COMOE_CACHE")
            .or_else(|| xdg.map(|p| p.join("comoe")))
            .or_else(|| get("HOME").map(|p| p.join(".cache").join("comoe")));
        let why = match wanted {
            None => "neither COMOE_CACHE nor XDG_CACHE_HOME nor HOME is set".to_owned(),
            Some(path) => match writable(&path) {
                Ok(()) => return Self { path: Some(path), note: None },
                Err(e) => format!("{} cannot be written ({e})", path.display()),
            },
        };
        let path = temporary.join(format!("comoe-{}", sys::user()));
        match sys::private_folder(&path).and_then(|()| writable(&path)) {
            Ok(()) => {
                let note = format!(
                    "{why}: converted experts go to {}, which may not last; set COMOE_CACHE to a folder of yours",
                    path.display()
                );
                Self { path: Some(path), note: Some(note) }
            }
            Err(e) => {
                let note = format!(
                    "{why}, nor can {} ({e}): converted experts stay in memory; set COMOE_CACHE to a folder of yours",
                    path.display()
                );
                Self { path: None, note: Some(note) }
            }
        }
    }
}

/// What is said about the hub: the variables of the Python tools, with their meaning.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HubPlaces {
    /// Folder of the models.
    pub(crate) cache: PathBuf,
    /// Another hub than the usual one.
    pub(crate) endpoint: Option<String>,
    pub(crate) token: Option<String>,
    /// Nothing is to be fetched.
    pub(crate) offline: bool,
}

impl HubPlaces {
    /// `HF_HOME` (else `$XDG_CACHE_HOME/huggingface`, else `~/.cache/huggingface`), `HF_HUB_CACHE`, `HF_ENDPOINT`,
    /// `HF_TOKEN` (else the file `HF_TOKEN_PATH`, else `token` in `HF_HOME`), `HF_HUB_OFFLINE`.
    ///
    /// # Errors
    /// When no folder is named.
    pub(crate) fn from_env() -> Result<Self, hub::Error> {
        Self::choose(|name| std::env::var_os(name))
    }

    fn choose(variable: impl Fn(&str) -> Option<OsString>) -> Result<Self, hub::Error> {
        let set = |name| variable(name).filter(|v| !v.is_empty());
        let folder = |name| set(name).map(PathBuf::from);
        let text = |name| set(name).and_then(|v| v.into_string().ok());
        let caches = || folder("XDG_CACHE_HOME").or_else(|| folder("HOME").map(|home| home.join(".cache")));
        let home = folder("HF_HOME").or_else(|| caches().map(|caches| caches.join("huggingface")));
        let own = folder("HF_HUB_CACHE").or_else(|| folder("HUGGINGFACE_HUB_CACHE"));
        let cache =
            own.or_else(|| home.as_ref().map(|home| home.join("hub"))).ok_or(hub::Error::NoCacheFolder)?;
        let token_file = folder("HF_TOKEN_PATH").or_else(|| home.map(|home| home.join("token")));
        let from_file = || std::fs::read_to_string(token_file?).ok();
        let token = text("HF_TOKEN").or_else(|| text("HUGGING_FACE_HUB_TOKEN")).or_else(from_file);
        let yes = |v: String| matches!(v.to_ascii_uppercase().as_str(), "1" | "ON" | "YES" | "TRUE");
        Ok(Self {
            cache,
            endpoint: text("HF_ENDPOINT"),
            token: token.map(|t| t.trim().to_owned()).filter(|t| !t.is_empty()),
            offline: text("HF_HUB_OFFLINE").or_else(|| text("TRANSFORMERS_OFFLINE")).is_some_and(yes),
        })
    }
}

/// Whether a file can be made there, found out by making one.
fn writable(folder: &Path) -> std::io::Result<()> {
    std::fs::create_dir_all(folder)?;
    let probe = folder.join(format!(".probe-{}", std::process::id()));
    std::fs::File::create(&probe)?;
    std::fs::remove_file(&probe)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choose(variables: &[(&str, &Path)], temporary: &Path) -> CacheFolder {
        let find = |name: &str| variables.iter().find(|v| v.0 == name).map(|v| v.1.as_os_str().to_owned());
        CacheFolder::choose(find, temporary)
    }

    #[test]
    fn the_first_variable_that_is_set_decides() {
        let root = tempfile::tempdir().unwrap();
        let (own, xdg, home) = (root.path().join("own"), root.path().join("xdg"), root.path().join("home"));
        let all = [("COMOE_CACHE", &*own), ("XDG_CACHE_HOME", &*xdg), ("HOME", &*home)];
        for (from, expected) in [(0, own.clone()), (1, xdg.join("comoe")), (2, home.join(".cache/comoe"))] {
            let chosen = choose(&all[from..], root.path());
            assert_eq!((chosen.path.as_deref(), chosen.note.as_deref()), (Some(&*expected), None));
            assert!(expected.is_dir());
            assert_eq!(std::fs::read_dir(expected).unwrap().count(), 0, "the probe is gone");
        }
        let relative = [("XDG_CACHE_HOME", Path::new("relative")), ("HOME", &*home)];
        assert_eq!(choose(&relative, root.path()).path, Some(home.join(".cache/comoe")));
    }

    #[test]
    fn the_hub_is_described_by_the_python_tools_variables() {
        let root = tempfile::tempdir().unwrap();
        let home = root.path().display().to_string();
        let choose = |variables: &[(&str, &str)]| {
            let find = |name: &str| variables.iter().find(|v| v.0 == name).map(|v| OsString::from(v.1));
            HubPlaces::choose(find)
        };
        let cache = |variables: &[(&str, &str)]| choose(variables).unwrap().cache;
        assert_eq!(cache(&[("HOME", "/h")]), Path::new("/h/.cache/huggingface/hub"));
        assert_eq!(cache(&[("HOME", "/h"), ("XDG_CACHE_HOME", "/x")]), Path::new("/x/huggingface/hub"));
        assert_eq!(cache(&[("HOME", "/h"), ("HF_HOME", "/f")]), Path::new("/f/hub"));
        assert_eq!(cache(&[("HF_HOME", "/f"), ("HF_HUB_CACHE", "/c")]), Path::new("/c"));
        assert!(matches!(choose(&[("HF_HOME", "")]), Err(hub::Error::NoCacheFolder)));

        assert_eq!(choose(&[("HF_HOME", &home)]).unwrap().token, None);
        std::fs::write(root.path().join("token"), "from_file\n").unwrap();
        assert_eq!(choose(&[("HF_HOME", &home)]).unwrap().token.as_deref(), Some("from_file"));
        let both = choose(&[("HF_HOME", &home), ("HF_TOKEN", "given")]).unwrap();
        assert_eq!((both.token.as_deref(), both.endpoint, both.offline), (Some("given"), None, false));
        for (value, offline) in [("1", true), ("true", true), ("0", false), ("", false), ("no", false)] {
            let chosen =
                choose(&[("HOME", "/h"), ("HF_HUB_OFFLINE", value), ("HF_ENDPOINT", "http://e")]).unwrap();
            assert_eq!((chosen.offline, chosen.endpoint.as_deref()), (offline, Some("http://e")), "{value}");
        }
    }

    #[test]
    fn a_folder_that_cannot_be_written_is_said_aloud() {
        let root = tempfile::tempdir().unwrap();
        let file = root.path().join("file");
        std::fs::write(&file, "").unwrap();
        let broken = [("COMOE_CACHE", &*file.join("below"))];
        let chosen = choose(&broken, root.path());
        let temporary = chosen.path.unwrap();
        assert!(temporary.starts_with(root.path()) && temporary.is_dir(), "{}", temporary.display());
        let note = chosen.note.unwrap();
        assert!(note.contains("file/below") && note.contains("COMOE_CACHE"), "{note}");
        // Found again, unless somebody else may have put things into it.
        assert_eq!(choose(&[], root.path()).path.as_ref(), Some(&temporary));
        assert!(choose(&[], root.path()).note.unwrap().contains("HOME"));
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            std::fs::set_permissions(&temporary, std::fs::Permissions::from_mode(0o777)).unwrap();
            let chosen = choose(&broken, root.path());
            assert!(chosen.path.is_none() && chosen.note.unwrap().contains("in memory"));
        }
    }
}
