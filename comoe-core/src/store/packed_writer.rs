//! Writes a packed store beside its final name and renames it when it is whole.

use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use super::packed::{PackedInfo, PackedTensor, TensorMeta};
use super::{Directory, RecordIndex, check_record_len};
use crate::error::{Error, Result};
use crate::sys::write_all_at;

/// Bytes written at once.
const PIECE: usize = 1 << 20;

/// Ending of files that are being written.
const TEMPORARY: &str = ".tmp";

/// A packed store that is being written. Threads may write different records at the same time.
///
/// Until [`Self::finish`] nothing is seen under the final name; a writer that is dropped removes what it wrote, and
/// one that was killed leaves a temporary file, which the next writer of the same name removes. Two processes that
/// write the same name at once both succeed: the last to finish stays.
#[derive(Debug)]
pub struct PackedWriter {
    path: PathBuf,
    temporary: PathBuf,
    file: File,
    info: PackedInfo,
    directory: Directory,
    /// What follows the records.
    tensors: Vec<TensorMeta>,
    /// Where each record, then each tensor, begins in the file.
    starts: Vec<u64>,
    /// How often each was written, and its checksum.
    written: Vec<AtomicU32>,
    checksums: Vec<AtomicU32>,
    finished: bool,
}

impl PackedWriter {
    /// Starts the file `path`, whose folder must be there.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::BadArgument`] for layers that make no store.
    pub fn create(path: impl Into<PathBuf>, info: &PackedInfo) -> Result<Self> {
        Self::create_with(path, info, &[])
    }

    /// Starts a file that holds `tensors`, too, behind the records, in this order. Their bytes are written by
    /// [`Self::write_tensor`].
    ///
    /// # Errors
    /// As [`Self::create`].
    pub fn create_with(
        path: impl Into<PathBuf>,
        info: &PackedInfo,
        tensors: &[PackedTensor<'_>],
    ) -> Result<Self> {
        let path = path.into();
        let directory = info.directory()?;
        let tensors: Vec<TensorMeta> = tensors.iter().map(|t| t.meta.clone()).collect();
        let parts = directory.len() + tensors.len();
        // As long as the one that is written at the end.
        let header = info.header(&directory, &tensors, &vec![0; parts])?.len();
        remove_abandoned(&path);
        let (temporary, file) = create_temporary(&path)?;
        let records = (0..directory.len() as u32).map(|index| directory.record_bytes(RecordIndex(index)));
        let mut at = header as u64;
        let starts = records
            .chain(tensors.iter().map(|t| t.bytes))
            .map(|bytes| {
                let start = at;
                at += bytes as u64;
                start
            })
            .collect();
        let zeros = || (0..parts).map(|_| AtomicU32::new(0)).collect();
        let (written, checksums, info) = (zeros(), zeros(), info.clone());
        let finished = false;
        let this =
            Self { path, temporary, file, info, directory, tensors, starts, written, checksums, finished };
        this.file.set_len(at).map_err(|e| this.failed(e))?;
        Ok(this)
    }

    /// The records to write.
    pub fn directory(&self) -> &Directory {
        &self.directory
    }

    /// Writes one record.
    ///
    /// # Errors
    /// [`Error::Io`], for example when the disk is full; [`Error::BadArgument`] for a record of the wrong size.
    pub fn write(&self, record: RecordIndex, bytes: &[u8]) -> Result<()> {
        check_record_len(&self.directory, record, bytes)?;
        self.put(record.0 as usize, bytes)
    }

    /// Writes the `index`-th of the other tensors.
    ///
    /// # Errors
    /// As [`Self::write`].
    pub fn write_tensor(&self, index: usize, bytes: &[u8]) -> Result<()> {
        match self.tensors.get(index) {
            Some(tensor) if tensor.bytes == bytes.len() => self.put(self.directory.len() + index, bytes),
            found => {
                let expected =
                    found.map_or_else(|| "none of that number".to_owned(), |t| t.bytes.to_string());
                let reason = format!("number {index}, {} bytes: expected {expected}", bytes.len());
                Err(Error::BadArgument { what: "tensor", reason })
            }
        }
    }

    fn put(&self, part: usize, bytes: &[u8]) -> Result<()> {
        let (mut checksum, mut at) = (crc32fast::Hasher::new(), self.starts[part]);
        // In pieces that are still in the processor's cache when they are written.
        for piece in bytes.chunks(PIECE) {
            checksum.update(piece);
            write_all_at(&self.file, piece, at).map_err(|e| self.failed(e))?;
            at += piece.len() as u64;
        }
        self.checksums[part].store(checksum.finalize(), Ordering::Relaxed);
        self.written[part].fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Brings everything to the disk and gives the file its name.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::BadArgument`] when a record was not written, or twice.
    pub fn finish(mut self) -> Result<()> {
        let wrong = self.written.iter_mut().position(|n| *n.get_mut() != 1);
        if let Some(at) = wrong {
            let times = *self.written[at].get_mut();
            let what = match at.checked_sub(self.directory.len()) {
                Some(tensor) => self.tensors[tensor].name.clone(),
                None => self.directory.id(RecordIndex(at as u32)).to_string(),
            };
            let reason = format!("{what} was written {times} times, expected once");
            return Err(Error::BadArgument { what: "packed store", reason });
        }
        let checksums: Vec<u32> = self.checksums.iter_mut().map(|sum| *sum.get_mut()).collect();
        let header = self.info.header(&self.directory, &self.tensors, &checksums)?;
        write_all_at(&self.file, &header, 0).map_err(|e| self.failed(e))?;
        self.file.sync_all().map_err(|e| self.failed(e))?;
        std::fs::rename(&self.temporary, &self.path).map_err(|e| Error::io(&self.path, e))?;
        self.finished = true;
        // The new name must survive a power cut as well; not every file system can be asked.
        let _ = File::open(folder_of(&self.path)).and_then(|folder| folder.sync_all());
        Ok(())
    }

    fn failed(&self, error: std::io::Error) -> Error {
        match error.kind() {
            std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded => {
                let bytes = self.file.metadata().map_or(0, |m| m.len());
                Error::DiskFull { path: self.path.clone(), bytes }
            }
            _ => Error::io(&self.temporary, error),
        }
    }
}

impl Drop for PackedWriter {
    fn drop(&mut self) {
        if !self.finished {
            let _ = std::fs::remove_file(&self.temporary);
        }
    }
}

/// Writes a small file of `bytes` at once: the old one, if there is one, stays until the new one is whole.
pub(crate) fn write_whole(path: &Path, bytes: &[u8]) -> Result<()> {
    if path.metadata().is_ok_and(|found| !found.is_file()) {
        // Its name would be given to the new file: a device would be gone.
        return Err(Error::bad_file(path, "is no regular file; give the name of one"));
    }
    remove_abandoned(path);
    let (temporary, file) = create_temporary(path)?;
    let written = write_all_at(&file, bytes, 0).and_then(|()| file.sync_all());
    written.and_then(|()| std::fs::rename(&temporary, path)).map_err(|e| {
        let _ = std::fs::remove_file(&temporary);
        Error::io(path, e)
    })
}

fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// `.NAME.`, how temporary files of `path` begin.
fn temporary_prefix(path: &Path) -> String {
    format!(".{}.", path.file_name().unwrap_or_default().to_string_lossy())
}

/// A new file, locked while its writer lives.
fn create_temporary(path: &Path) -> Result<(PathBuf, File)> {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    loop {
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("{}{}-{count}{TEMPORARY}", temporary_prefix(path), std::process::id());
        let temporary = folder_of(path).join(name);
        let file = match OpenOptions::new().write(true).create_new(true).open(&temporary) {
            Ok(file) => file,
            // Left behind by a process of the same number.
            Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => continue,
            Err(e) => return Err(Error::io(temporary, e)),
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
    let Ok(entries) = std::fs::read_dir(folder_of(path)) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if name.starts_with(&prefix) && name.ends_with(TEMPORARY) {
            let Ok(file) = OpenOptions::new().write(true).open(entry.path()) else { continue };
            if file.try_lock().is_ok() {
                let _ = std::fs::remove_file(entry.path());
            }
        }
    }
}
