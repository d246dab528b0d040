//! Files that are read whole: none is read that is longer than such a file can be.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use crate::error::{Error, Result};

/// The bytes of a file that should be small: a regular one of at most `most` bytes. Links are followed.
///
/// # Errors
/// [`Error::Io`]; [`Error::BadFile`] for a longer file, and for a pipe or a device, which has no end.
pub fn read_small(path: &Path, most: u64) -> Result<Vec<u8>> {
    let io = |e| Error::io(path, e);
    // Asked before opening: opening a pipe would wait for its writer.
    let found = std::fs::metadata(path).map_err(io)?;
    if found.is_dir() {
        return Err(io(std::io::ErrorKind::IsADirectory.into()));
    }
    if !found.is_file() {
        return Err(Error::bad_file(path, "is no regular file"));
    }
    let too_long = |bytes| Error::bad_file(path, format!("has {bytes} bytes; {most} are the limit"));
    if found.len() > most {
        return Err(too_long(found.len()));
    }
    let mut bytes = Vec::new();
    // One more than the limit, for a file that grows meanwhile.
    File::open(path).and_then(|file| file.take(most + 1).read_to_end(&mut bytes)).map_err(io)?;
    if bytes.len() as u64 > most {
        return Err(too_long(bytes.len() as u64));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_files_and_files_without_an_end_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("f");
        std::fs::write(&path, b"12345").unwrap();
        assert_eq!(read_small(&path, 5).unwrap(), b"12345");
        let e = read_small(&path, 4).unwrap_err().to_string();
        assert!(e.contains("has 5 bytes") && e.contains("4 are the limit"), "{e}");
        // Sparse: nothing of it may be read, or this takes a while.
        File::options().write(true).open(&path).unwrap().set_len(1 << 40).unwrap();
        assert!(read_small(&path, 1 << 20).unwrap_err().to_string().contains("1099511627776 bytes"));
        assert!(matches!(read_small(folder.path(), 1), Err(Error::Io { .. })));
        #[cfg(unix)]
        assert!(
            read_small(Path::new("/dev/zero"), 1 << 20).unwrap_err().to_string().contains("regular file")
        );
    }
}
