//! A model's configuration and headers without its weights: what a plan is made of.
//!
//! They go to a folder of their own, in which every file with weights has its header, its length, and nothing between: a
//! hole takes no room on the disk. So a plan opens it as it opens any model.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::client::{Client, RemoteFile};
use super::error::{Error, Result};
use crate::sys;

/// Bytes asked for at first: most headers are shorter.
const FIRST: u64 = 256 << 10;
/// Longest header; the safetensors format's own limit.
const LONGEST: u64 = 100_000_000;
/// Width of the header's length in front of it.
const LENGTH: usize = 8;
/// Files asked for at once.
const PARALLEL: usize = 8;
/// Names tried for a folder.
const TRIES: u32 = 100;

/// A folder that goes when this is dropped.
#[derive(Debug)]
pub(crate) struct HeadersFolder {
    path: PathBuf,
    /// Bytes of headers that were fetched.
    pub(crate) fetched: u64,
}

impl HeadersFolder {
    /// Makes an empty one among the temporary files.
    fn new() -> Result<Self> {
        let (temporary, process) = (std::env::temp_dir(), std::process::id());
        for n in 0..TRIES {
            let path = temporary.join(format!("comoe-headers-{}-{process}-{n}", sys::user()));
            if fs::symlink_metadata(&path).is_ok() {
                continue;
            }
            sys::private_folder(&path).map_err(|e| Error::io(&path, e))?;
            return Ok(Self { path, fetched: 0 });
        }
        let taken = std::io::Error::from(std::io::ErrorKind::AlreadyExists);
        Err(Error::io(temporary.join(format!("comoe-headers-{}-{process}", sys::user())), taken))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Fills a folder with copies of `small` and the headers of `weights`.
    pub(super) fn fetch(
        client: &Client,
        commit: &str,
        small: &[PathBuf],
        weights: &[RemoteFile],
    ) -> Result<Self> {
        let mut this = Self::new()?;
        for file in small {
            let to = this.path.join(file.file_name().unwrap_or_default());
            fs::copy(file, &to).map_err(|e| Error::io(&to, e))?;
        }
        let (next, error, fetched) = (AtomicUsize::new(0), Mutex::new(None), AtomicUsize::new(0));
        let work = || {
            while error.lock().is_ok_and(|e| e.is_none())
                && let Some(file) = weights.get(next.fetch_add(1, Ordering::Relaxed))
            {
                let made = header(client, commit, file).and_then(|header| {
                    fetched.fetch_add(header.len(), Ordering::Relaxed);
                    with_hole(&this.path.join(&file.path), &header, file.size)
                });
                if let Err(e) = made {
                    error.lock().unwrap_or_else(|e| e.into_inner()).get_or_insert(e);
                }
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..PARALLEL.min(weights.len()) {
                scope.spawn(work);
            }
            work();
        });
        if let Some(e) = error.into_inner().unwrap_or_else(|e| e.into_inner()) {
            return Err(e);
        }
        this.fetched = fetched.into_inner() as u64;
        Ok(this)
    }
}

impl Drop for HeadersFolder {
    fn drop(&mut self) {
        // What is left among the temporary files is small.
        let _ = fs::remove_dir_all(&self.path);
    }
}

/// The first bytes of a safetensors file up to the end of its header, or all of a file that is shorter than that.
fn header(client: &Client, commit: &str, file: &RemoteFile) -> Result<Vec<u8>> {
    let mut bytes = client.part(file, commit, 0..FIRST.min(file.size))?;
    let Some(length) = bytes.first_chunk::<LENGTH>() else { return Ok(bytes) };
    let end = u64::from_le_bytes(*length).saturating_add(LENGTH as u64);
    if end > LONGEST {
        // No header: whoever opens the file says so.
        bytes.truncate(LENGTH);
        return Ok(bytes);
    }
    let (have, end) = (bytes.len() as u64, end.min(file.size));
    if end > have {
        bytes.extend(client.part(file, commit, have..end)?);
    }
    bytes.truncate(end as usize);
    Ok(bytes)
}

/// Writes a file that begins with `header` and is `size` bytes long.
fn with_hole(path: &Path, header: &[u8], size: u64) -> Result<()> {
    let write = || -> std::io::Result<()> {
        let mut file = File::create(path)?;
        file.write_all(header)?;
        file.set_len(size)
    };
    write().map_err(|e| Error::io(path, e))
}
