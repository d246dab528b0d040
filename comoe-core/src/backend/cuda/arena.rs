//! The arena: a copy of every record in page-locked memory, as far as memory and the driver allow.
//!
//! Records that find no place, or have none yet, stay with the source and pass through a bounce buffer when they are needed.
//! So there is never a pageable second copy of a record.

mod load;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use self::load::Loader;
use super::CudaOptions;
use super::context::Gpu;
use super::pinned::LockedMap;
use super::sender::Piece;
use crate::backend::PageLocking;
use crate::error::{Error, Result};
use crate::store::{RecordIndex, RecordSource};

/// Where a record lies in page-locked memory.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    /// On the host; valid as long as the arena.
    pub(super) host: usize,
    /// The same bytes as kernels see them.
    pub(super) device: u64,
}

impl Place {
    /// The first `bytes` of `record`, which lies here, on their way to `to`.
    pub(super) fn piece(self, record: RecordIndex, to: u64, bytes: usize) -> Piece {
        let device_offset = self.device.wrapping_sub(self.host as u64);
        Piece { record, to, from: self.host as u64, device_offset, bytes }
    }
}

/// Page-locked records. What has a place keeps it.
pub(super) struct Arena {
    shared: Arc<Shared>,
    /// Where loading goes on beside the steps.
    loader: Option<JoinHandle<()>>,
}

/// What the loader fills.
struct Shared {
    places: Vec<OnceLock<Place>>,
    /// Keep what `places` points to.
    chunks: Mutex<Vec<LockedMap>>,
    locked: AtomicU64,
    total: u64,
    ended: OnceLock<Ended>,
    failure: Mutex<Option<Error>>,
    /// Nobody wants the rest any more.
    closing: AtomicBool,
}

/// How loading ended.
struct Ended {
    whole: bool,
    why_partial: Option<String>,
    took: Duration,
}

impl Ended {
    fn why(&self) -> String {
        self.why_partial.clone().unwrap_or_else(|| "memory ran out".to_owned())
    }
}

impl Arena {
    /// Reads the records of `source` into page-locked memory, or begins to, where that is to go on beside the steps.
    ///
    /// # Errors
    /// What the source says when a record cannot be read. Memory that cannot be had or locked is no error: the arena
    /// is then partial.
    pub(super) fn load(gpu: &Gpu, source: &Arc<dyn RecordSource>, options: &CudaOptions) -> Result<Self> {
        let directory = source.directory();
        let shared = Arc::new(Shared {
            places: (0..directory.len()).map(|_| OnceLock::new()).collect(),
            chunks: Mutex::default(),
            locked: AtomicU64::new(0),
            total: directory.total_bytes(),
            ended: OnceLock::new(),
            failure: Mutex::default(),
            closing: AtomicBool::new(false),
        });
        let loader = Loader::new(gpu, source, options, &shared);
        if !options.page_lock_later || !loader.has_room() {
            loader.run()?;
            return Ok(Self { shared, loader: None });
        }
        let run = move || {
            let shared = loader.shared.clone();
            let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| loader.run()));
            let failure = match done {
                Ok(Ok(())) => return,
                Ok(Err(error)) => error,
                Err(_) => Error::HostMemory {
                    what: "page-locking experts".to_owned(),
                    reason: "the store panicked".to_owned(),
                },
            };
            *shared.failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(failure);
        };
        let thread = std::thread::Builder::new().name("comoe-arena".to_owned()).spawn(run);
        let thread = thread.map_err(|e| Error::HostMemory {
            what: "starting the thread that page-locks experts".to_owned(),
            reason: e.to_string(),
        })?;
        Ok(Self { shared, loader: Some(thread) })
    }

    pub(super) fn place(&self, record: RecordIndex) -> Option<Place> {
        self.shared.places[record.0 as usize].get().copied()
    }

    /// Bytes of records in page-locked memory.
    pub(super) fn locked(&self) -> u64 {
        self.shared.locked.load(Ordering::Acquire)
    }

    /// Whether every record has a place.
    pub(super) fn is_whole(&self) -> bool {
        self.shared.ended.get().is_some_and(|ended| ended.whole)
    }

    /// Whether more records may get a place.
    pub(super) fn goes_on(&self) -> bool {
        self.shared.ended.get().is_none()
    }

    /// What kept the loader from going on, once.
    pub(super) fn take_failure(&self) -> Option<Error> {
        self.shared.failure.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    pub(super) fn locking(&self) -> PageLocking {
        let ended = self.shared.ended.get();
        let why_partial = ended.filter(|ended| !ended.whole).map(Ended::why);
        PageLocking {
            locked: self.locked(),
            total: self.shared.total,
            took: ended.map(|ended| ended.took),
            why_partial,
        }
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::Release);
        if let Some(loader) = self.loader.take() {
            // A loader that panicked has said so.
            let _ = loader.join();
        }
    }
}
