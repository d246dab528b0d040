//! A model's small files, wherever they are: in its folder, or in a packed file.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use comoe_core::store::PackedFile;

/// Most bytes of a tokenizer; published ones end at 35 MB.
pub(crate) const TOKENIZER_BYTES: u64 = 256 << 20;
/// Most bytes of any other small file: configurations, templates.
const SMALL_BYTES: u64 = 32 << 20;

use crate::error::{Error, Result};

/// Where the files beside the weights are.
#[derive(Debug, Clone, Copy)]
pub(crate) enum SideFiles<'a> {
    /// Each under its own name.
    Folder(&'a Path),
    /// All in one.
    Packed(&'a PackedFile),
}

impl SideFiles<'_> {
    /// Where `name` is, for messages.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        match self {
            Self::Folder(folder) => folder.join(name),
            Self::Packed(file) => file.path().join(name),
        }
    }

    /// The bytes of the file `name`; `None` when there is no such file.
    ///
    /// # Errors
    /// [`Error::Io`] for a file that cannot be read.
    pub(crate) fn read(&self, name: &str) -> Result<Option<Vec<u8>>> {
        match self {
            Self::Folder(folder) => {
                match read_small(&folder.join(name), SMALL_BYTES) {
                    Ok(bytes) => Ok(Some(bytes)),
                    // A GGUF file has nothing beside it.
                    Err(Error::Io { source, .. })
                        if matches!(source.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) =>
                    {
                        Ok(None)
                    }
                    Err(e) => Err(e),
                }
            }
            Self::Packed(file) => match file.file(name) {
                Some(bytes) if bytes.len() as u64 > SMALL_BYTES => {
                    let reason = format!("has {} bytes; {SMALL_BYTES} are the limit", bytes.len());
                    Err(Error::bad_file(self.path(name), reason))
                }
                found => Ok(found.map(<[u8]>::to_vec)),
            },
        }
    }

    /// The text of the file `name`; `None` when there is no such file.
    ///
    /// # Errors
    /// As [`Self::read`]; [`Error::BadFile`] for what is no UTF-8.
    pub(crate) fn text(&self, name: &str) -> Result<Option<String>> {
        self.read(name)?.map(|bytes| utf8(&self.path(name), bytes)).transpose()
    }
}

/// The bytes of a file that should be small: a regular one of at most `most` bytes.
///
/// # Errors
/// [`Error::Io`]; [`Error::Core`] for anything else.
pub(crate) fn read_small(path: &Path, most: u64) -> Result<Vec<u8>> {
    comoe_core::store::read_small(path, most).map_err(|e| match e {
        comoe_core::Error::Io { path, source } => Error::io(path, source),
        other => other.into(),
    })
}

/// The text of a small file.
///
/// # Errors
/// As [`read_small`]; [`Error::BadFile`] for what is no UTF-8.
pub(crate) fn read_text(path: &Path) -> Result<String> {
    utf8(path, read_small(path, SMALL_BYTES)?)
}

fn utf8(path: &Path, bytes: Vec<u8>) -> Result<String> {
    String::from_utf8(bytes).map_err(|e| Error::bad_file(path, format!("not UTF-8: {}", e.utf8_error())))
}
