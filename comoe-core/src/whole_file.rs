//! Files that have their name only once they are whole.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::error::{Error, Result};

/// Ending of files that are being written.
const TEMPORARY: &str = ".tmp";

/// A file that is being written beside its final name.
///
/// Until [`Self::replace`] or [`Self::place_new`] what was under that name stays as it was. A file that is dropped before
/// is removed, and one whose process was killed is removed by the next writer of the same name.
#[derive(Debug)]
pub struct WholeFile {
    /// As it was asked for, for messages.
    path: PathBuf,
    /// Where that leads.
    target: PathBuf,
    temporary: PathBuf,
    file: File,
    placed: bool,
}

impl WholeFile {
    /// Starts the file `path`, whose folder must be there; a link is followed.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::BadFile`] without the folder, and for what is no regular file, such as a device: its
    /// name would be given to the new file.
    pub fn create(path: impl Into<PathBuf>) -> Result<Self> {
        let path = path.into();
        if path.metadata().is_ok_and(|found| !found.is_file()) {
            return Err(Error::bad_file(path, "is no regular file; give the name of one"));
        }
        let target = path.canonicalize().unwrap_or_else(|_| path.clone());
        remove_abandoned(&target);
        match create_temporary(&target) {
            Ok((temporary, file)) => Ok(Self { path, target, temporary, file, placed: false }),
            Err(e) if e.kind() == ErrorKind::NotFound => {
                let folder = Self::folder_of(&target).display();
                let reason = format!("there is no folder {folder}; make it first, or give another name");
                Err(Error::bad_file(path, reason))
            }
            Err(e) => Err(Error::io(path, e)),
        }
    }

    /// Writes a small file of `bytes` at once: the old one, if there is one, stays until the new one is whole.
    ///
    /// # Errors
    /// As [`Self::create`] and [`Self::replace`].
    pub fn write(path: &Path, bytes: &[u8]) -> Result<()> {
        let whole = Self::create(path)?;
        (&whole.file).write_all(bytes).map_err(|e| Error::io(path, e))?;
        whole.replace()
    }

    /// The folder that a file of this name is in.
    pub fn folder_of(path: &Path) -> &Path {
        path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
    }

    /// The name that it will have.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Where to write.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Brings everything to the disk and gives the file its name; what had it before is gone.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn replace(self) -> Result<()> {
        self.place(|temporary, target| std::fs::rename(temporary, target))
    }

    /// The same, of a name that nothing must have.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::BadFile`] when something of that name came in the meantime, which stays.
    pub fn place_new(self) -> Result<()> {
        let path = self.path.clone();
        self.place(link_new).map_err(|e| match e {
            Error::Io { source, .. } if source.kind() == ErrorKind::AlreadyExists => {
                let reason = "came to be there while it was written; remove it, or give another name";
                Error::bad_file(path, reason)
            }
            e => e,
        })
    }

    fn place(mut self, give_name: impl FnOnce(&Path, &Path) -> std::io::Result<()>) -> Result<()> {
        let placed = self.file.sync_all().and_then(|()| give_name(&self.temporary, &self.target));
        placed.map_err(|e| Error::io(&self.path, e))?;
        self.placed = true;
        // The new name must survive a power cut as well; not every file system can be asked.
        let _ = File::open(Self::folder_of(&self.target)).and_then(|folder| folder.sync_all());
        Ok(())
    }
}

impl Drop for WholeFile {
    fn drop(&mut self) {
        if !self.placed {
            let _ = std::fs::remove_file(&self.temporary);
        }
    }
}

/// Renames a file unless the new name is taken. A link fails for a name that is taken, whoever took it and when; a rename
/// would replace.
fn link_new(from: &Path, to: &Path) -> std::io::Result<()> {
    match std::fs::hard_link(from, to) {
        Ok(()) => {
            let _ = std::fs::remove_file(from);
            Ok(())
        }
        // Not every file system has links.
        Err(e) if e.kind() != ErrorKind::AlreadyExists && to.symlink_metadata().is_err() => {
            std::fs::rename(from, to)
        }
        Err(_) => Err(ErrorKind::AlreadyExists.into()),
    }
}

/// `.NAME.`, how temporary files of `path` begin.
fn temporary_prefix(path: &Path) -> String {
    format!(".{}.", path.file_name().unwrap_or_default().to_string_lossy())
}

/// A new file, locked while its writer lives.
fn create_temporary(path: &Path) -> std::io::Result<(PathBuf, File)> {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    loop {
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("{}{}-{count}{TEMPORARY}", temporary_prefix(path), std::process::id());
        let temporary = WholeFile::folder_of(path).join(name);
        let file = match OpenOptions::new().write(true).create_new(true).open(&temporary) {
            Ok(file) => file,
            // Left behind by a process of the same number.
            Err(e) if e.kind() == ErrorKind::AlreadyExists => continue,
            Err(e) => return Err(e),
        };
        // Where files cannot be locked, abandoned ones are never removed (see below), and nothing else is lost.
        let _ = file.lock();
        // Between creating and locking, another process may have taken it for abandoned.
        if temporary.exists() {
            return Ok((temporary, file));
        }
    }
}

/// Removes temporary files of `path` whose writers are gone: a living writer holds its file's lock.
fn remove_abandoned(path: &Path) {
    let prefix = temporary_prefix(path);
    let Ok(entries) = std::fs::read_dir(WholeFile::folder_of(path)) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        let number = name.strip_prefix(&prefix).and_then(|rest| rest.strip_suffix(TEMPORARY));
        // As `create_temporary` names them, and nobody else.
        let ours = number.and_then(|n| n.split_once('-')).is_some_and(|(process, count)| {
            [process, count].iter().all(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))
        });
        if ours {
            let Ok(file) = OpenOptions::new().write(true).open(entry.path()) else { continue };
            if file.try_lock().is_ok() {
                let _ = std::fs::remove_file(entry.path());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(path: &Path, bytes: &[u8]) -> WholeFile {
        let whole = WholeFile::create(path).unwrap();
        whole.file().write_all(bytes).unwrap();
        whole
    }

    #[test]
    fn of_two_that_are_placed_as_new_the_first_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x");
        let (first, second) = (written(&path, b"first"), written(&path, b"second"));
        first.place_new().unwrap();
        let error = second.place_new().unwrap_err().to_string();
        assert!(error.contains("came to be there") && error.contains("/x: "), "{error}");
        assert_eq!(std::fs::read(&path).unwrap(), b"first");
        written(&path, b"third").replace().unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"third");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "no temporary file is left");
    }

    #[test]
    fn only_what_a_writer_of_ours_left_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        for name in [".x.backup.tmp", ".x.7-.tmp", ".x.-7.tmp", ".x.7-8.tmp", ".x.7-8-9.tmp"] {
            std::fs::write(at(name), b"").unwrap();
        }
        written(&at("x"), b"new").replace().unwrap();
        assert!(!at(".x.7-8.tmp").exists());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 5, "and x");
    }

    #[test]
    fn what_is_dropped_leaves_the_old_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x");
        std::fs::write(&path, b"old").unwrap();
        drop(written(&path, b"new"));
        assert_eq!(std::fs::read(&path).unwrap(), b"old");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn errors_name_what_was_asked_for() {
        let folder = tempfile::tempdir().unwrap();
        let error = WholeFile::create(folder.path().join("none/x")).unwrap_err().to_string();
        assert!(error.contains("none/x: there is no folder") && !error.contains(".x."), "{error}");
        let error = WholeFile::create(folder.path()).unwrap_err().to_string();
        assert!(error.contains("is no regular file"), "{error}");
    }

    #[cfg(unix)]
    #[test]
    fn a_link_is_followed() {
        let folder = tempfile::tempdir().unwrap();
        let (path, link) = (folder.path().join("x"), folder.path().join("link"));
        std::fs::write(&path, b"old").unwrap();
        std::os::unix::fs::symlink(&path, &link).unwrap();
        written(&link, b"new").replace().unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"new");
        assert!(link.symlink_metadata().unwrap().is_symlink());
    }
}
