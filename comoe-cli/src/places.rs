//! Folders of the user. The only place that reads the environment.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

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
