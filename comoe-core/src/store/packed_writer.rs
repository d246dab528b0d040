//! Writes a packed store beside its final name and renames it when it is whole.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

use super::packed::{PackedInfo, PackedTensor, TensorMeta};
use super::{Directory, RecordIndex, check_record_len};
use crate::error::{Error, Result};
use crate::sys::write_all_at;
use crate::whole_file::WholeFile;

/// Bytes written at once.
const PIECE: usize = 1 << 20;

/// A packed store that is being written. Threads may write different records at the same time.
///
/// Until [`Self::finish`] nothing is seen under the final name, as [`WholeFile`] has it. Two processes that write the same
/// name at once both succeed with [`Self::finish`], and the last to finish stays; with [`Self::finish_new`] the first does.
#[derive(Debug)]
pub struct PackedWriter {
    whole: WholeFile,
    info: PackedInfo,
    directory: Directory,
    /// What follows the records.
    tensors: Vec<TensorMeta>,
    /// Where each record, then each tensor, begins in the file.
    starts: Vec<u64>,
    /// How often each was written, and its checksum.
    written: Vec<AtomicU32>,
    checksums: Vec<AtomicU32>,
}

impl PackedWriter {
    /// Starts the file `path`, whose folder must be there.
    ///
    /// # Errors
    /// As [`WholeFile::create`]; [`Error::BadArgument`] for layers that make no store.
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
        let directory = info.directory()?;
        let tensors: Vec<TensorMeta> = tensors.iter().map(|t| t.meta.clone()).collect();
        let parts = directory.len() + tensors.len();
        // As long as the one that is written at the end.
        let header = info.header(&directory, &tensors, &vec![0; parts])?.len();
        let whole = WholeFile::create(path)?;
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
        let this = Self { whole, info, directory, tensors, starts, written, checksums };
        this.whole.file().set_len(at).map_err(|e| this.failed(e))?;
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
            write_all_at(self.whole.file(), piece, at).map_err(|e| self.failed(e))?;
            at += piece.len() as u64;
        }
        self.checksums[part].store(checksum.finalize(), Ordering::Relaxed);
        self.written[part].fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Brings everything to the disk and gives the file its name; an older file of that name is replaced.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::BadArgument`] when a record was not written, or twice.
    pub fn finish(self) -> Result<()> {
        self.completed()?.replace()
    }

    /// The same, of a name that nothing must have.
    ///
    /// # Errors
    /// As [`Self::finish`]; [`Error::BadFile`] when something of that name came in the meantime, which stays.
    pub fn finish_new(self) -> Result<()> {
        self.completed()?.place_new()
    }

    fn completed(mut self) -> Result<WholeFile> {
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
        write_all_at(self.whole.file(), &header, 0).map_err(|e| self.failed(e))?;
        self.whole.file().sync_all().map_err(|e| self.failed(e))?;
        Ok(self.whole)
    }

    fn failed(&self, error: std::io::Error) -> Error {
        match error.kind() {
            std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded => {
                let bytes = self.whole.file().metadata().map_or(0, |m| m.len());
                Error::DiskFull { path: self.whole.path().to_owned(), bytes }
            }
            _ => Error::io(self.whole.path(), error),
        }
    }
}
