//! A model's small files, wherever they are: in its folder, or in a packed file.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use comoe_core::store::PackedFile;

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
                let path = folder.join(name);
                match std::fs::read(&path) {
                    Ok(bytes) => Ok(Some(bytes)),
                    // A GGUF file has nothing beside it.
                    Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => Ok(None),
                    Err(e) => Err(Error::io(path, e)),
                }
            }
            Self::Packed(file) => Ok(file.file(name).map(<[u8]>::to_vec)),
        }
    }

    /// The text of the file `name`; `None` when there is no such file.
    ///
    /// # Errors
    /// As [`Self::read`]; [`Error::BadFile`] for what is no UTF-8.
    pub(crate) fn text(&self, name: &str) -> Result<Option<String>> {
        let Some(bytes) = self.read(name)? else { return Ok(None) };
        String::from_utf8(bytes)
            .map(Some)
            .map_err(|e| Error::bad_file(self.path(name), format!("not UTF-8: {}", e.utf8_error())))
    }
}
