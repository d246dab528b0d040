//! Files that commands write: looked at before the work begins, and never in place of something else.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use comoe_core::WholeFile;
use comoe_core::trace::MAGIC;

use crate::error::{Error, Result};

/// An option, and the file that it names.
pub(crate) type Named<'a> = (&'static str, &'a Path);

/// What a command writes. An older file of the same kind is replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Trace,
    Picture,
    Logits,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Trace => "trace of comoe",
            Self::Picture => "SVG picture",
            Self::Logits => "file of logits",
        }
    }

    /// Whether a file that begins with `head` is one.
    fn is(self, head: &[u8]) -> bool {
        match self {
            Self::Trace => head.starts_with(&MAGIC),
            Self::Picture => head.starts_with(b"<svg"),
            // Behind the length of the header.
            Self::Logits => head.get(8..).is_some_and(|h| h.starts_with(br#"{"logits":"#)),
        }
    }
}

/// Sees that a `kind` of file can be written to `output`: into a folder that is there, over nothing but an older one of its
/// kind, and over none of the `others` that the command reads or writes.
///
/// # Errors
/// [`Error::OutputFile`], and those of [`WholeFile::create`].
pub(crate) fn check(kind: Kind, (option, output): Named<'_>, others: &[Named<'_>]) -> Result<()> {
    let refused = |reason: String| {
        Err(Error::OutputFile { path: output.to_owned(), reason, option: option.to_owned() })
    };
    if let Some((other, _)) = others.iter().find(|(_, path)| resolved(path) == resolved(output)) {
        return refused(format!("is the file of {other} too"));
    }
    if let Ok(found) = output.metadata()
        && found.is_file()
    {
        let mut head = Vec::new();
        let read = File::open(output).and_then(|file| file.take(64).read_to_end(&mut head));
        read.map_err(|e| Error::core(comoe_core::Error::io(output, e)))?;
        if !head.is_empty() && !kind.is(&head) {
            return refused(format!("is there already and is no {}", kind.name()));
        }
        if found.permissions().readonly() {
            return refused("is there already and must not be written".to_owned());
        }
    }
    WholeFile::create(output).map(drop).map_err(Error::core)
}

/// The same for all names of a file, also of one that is not there yet.
fn resolved(path: &Path) -> PathBuf {
    let in_folder = || {
        let folder = WholeFile::folder_of(path);
        Some(folder.canonicalize().ok()?.join(path.file_name()?))
    };
    path.canonicalize().ok().or_else(in_folder).unwrap_or_else(|| path.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_file_of_the_same_kind_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x");
        let contents: [(&[u8], &[Kind]); 6] = [
            (b"", &[Kind::Trace, Kind::Picture, Kind::Logits]),
            (b"comoe-rt\x01", &[Kind::Trace]),
            (b"<svg width=\"9\">", &[Kind::Picture]),
            (b"\x50\0\0\0\0\0\0\0{\"logits\":{}}", &[Kind::Logits]),
            (b"\x50\0\0\0\0\0\0\0{\"model.norm.weight\":{}}", &[]),
            (b"my notes\n", &[]),
        ];
        for (bytes, kinds) in contents {
            std::fs::write(&path, bytes).unwrap();
            for kind in [Kind::Trace, Kind::Picture, Kind::Logits] {
                let checked = check(kind, ("--output", &path), &[]);
                assert_eq!(checked.is_ok(), kinds.contains(&kind), "{kind:?}: {checked:?}");
            }
            assert_eq!(std::fs::read(&path).unwrap(), bytes);
        }
    }

    #[test]
    fn one_file_has_many_names() {
        let folder = tempfile::tempdir().unwrap();
        let (path, other) = (folder.path().join("x"), folder.path().join("./x"));
        for there in [false, true] {
            if there {
                std::fs::write(&path, "").unwrap();
            }
            let error = check(Kind::Trace, ("--trace", &path), &[("--pin", &other)]).unwrap_err();
            assert!(error.to_string().contains("is the file of --pin too; give --trace another"), "{error}");
            check(Kind::Trace, ("--trace", &path), &[("--pin", &folder.path().join("y"))]).unwrap();
        }
    }
}
