//! Records between the disk and the slots: RAM that holds fewer of them than there are.
//!
//! The places in RAM are slots of a [`Pool`] with a policy of its own: the mechanism between host and device, one level
//! down. A record that is asked for is *warm* when it has a place, and *cold* when it comes from the source. Only this
//! module's threads read the source, several records at once; who asks waits, and what was announced is read ahead.
//!
//! Whoever uses a place holds its record: held records are never victims. A thread that waits holds its record before it
//! arrives, so it cannot leave again unseen; and who waits for a place holds none, or leaves enough of them
//! ([`TierOptions::places`]), so that nobody waits for ever.

mod queue;
#[cfg(test)]
mod tests;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use self::queue::{Reads, State};
use super::{Directory, RecordIndex, RecordSource, check_record_len};
use crate::backend::SlotId;
use crate::error::{Error, Result};
use crate::expert::RECORD_ALIGN;
use crate::policy::PolicyKind;
use crate::pool::{Pool, PoolShape};
use crate::slab::Slab;

/// Records that are read at once. A disk is fast when it is asked for much at a time: comoe-bench/RESULTS-memory.md has the figures.
const READERS: usize = 8;

/// How a [`TieredSource`] is run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TierOptions {
    /// Records that RAM holds, at least one. Who keeps hold of several at a time (a GPU's copies) needs more.
    pub places: usize,
    /// Which of them leaves.
    pub policy: PolicyKind,
    /// Experts that a token uses in a layer, where that is known, else 0: for policies that count in tokens.
    pub top_k: usize,
}

/// What a [`TieredSource`] did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TierStats {
    /// Records that RAM holds.
    pub places: usize,
    /// Bytes of a place.
    pub place_bytes: usize,
    /// Records asked for that were in RAM.
    pub warm: u64,
    /// Records asked for that came from the source.
    pub cold: u64,
    /// Of them, those that had been read when they were asked for, since they were announced.
    pub early: u64,
    /// Records read from the source, used or not.
    pub reads: u64,
    /// Their bytes.
    pub read_bytes: u64,
    /// Records read that left RAM again before anybody asked for them.
    pub unused: u64,
    /// Time with at least one read under way.
    pub reading: Duration,
    /// Time that those who asked waited, added up.
    pub waited: Duration,
}

/// A source that keeps some of another's records in RAM.
pub struct TieredSource {
    shared: Arc<Shared>,
    readers: Vec<JoinHandle<()>>,
}

struct Shared {
    source: Arc<dyn RecordSource>,
    memory: Slab,
    state: Mutex<State>,
    /// Wakes readers: there is a record to read, or it is over.
    work: Condvar,
    /// Wakes those who wait for a record, or for a place.
    changed: Condvar,
}

impl TieredSource {
    /// RAM in front of `source`. Takes memory as records come.
    ///
    /// # Errors
    /// [`Error::BadArgument`] without a place, or for more memory than there can be; [`Error::HostMemory`] when the
    /// threads that read cannot be started.
    pub fn new(source: Arc<dyn RecordSource>, options: TierOptions) -> Result<Self> {
        let directory = source.directory();
        let TierOptions { places, policy, top_k } = options;
        let (records, layers) = (directory.len(), directory.layers().len());
        let memory = Slab::new(places, directory.largest_record().next_multiple_of(RECORD_ALIGN))?;
        let shape = PoolShape::global(places, layers, 0);
        let per_token = top_k.max(1) * layers;
        let policy = policy.in_force(places >= records, false);
        let pool = Pool::new(shape, records, |slots| policy.build(slots, records, per_token));
        let shared = Arc::new(Shared {
            state: Mutex::new(State::new(pool, records)),
            source,
            memory,
            work: Condvar::new(),
            changed: Condvar::new(),
        });
        let mut this = Self { shared, readers: Vec::new() };
        for _ in 0..READERS.min(places) {
            let shared = this.shared.clone();
            let reader =
                std::thread::Builder::new().name("comoe-disk".to_owned()).spawn(move || shared.work());
            this.readers.push(reader.map_err(|e| Error::HostMemory {
                what: "starting a thread that reads experts".to_owned(),
                reason: e.to_string(),
            })?);
        }
        Ok(this)
    }

    /// What it did since it was made, or since the counters were reset.
    pub fn stats(&self) -> TierStats {
        let memory = &self.shared.memory;
        let counted = self.shared.lock().stats();
        TierStats { places: memory.slots(), place_bytes: memory.slot_bytes(), ..counted }
    }

    /// Waits until `record` is in RAM, where it stays as long as what is handed out lives.
    #[cfg(feature = "cuda")]
    pub(crate) fn hold(&self, record: RecordIndex) -> Result<Held> {
        self.shared.hold(record)
    }

    /// Has all of the places' memory backed now, by all threads, where one would do it while it is page-locked.
    #[cfg(feature = "cuda")]
    pub(crate) fn populate(&self) {
        self.shared.memory.populate();
    }

    /// The places' memory: where it begins, and the bytes of each place.
    #[cfg(feature = "cuda")]
    pub(crate) fn memory(&self) -> (*mut u8, usize) {
        (self.shared.memory.base(), self.shared.memory.slot_bytes())
    }

    /// Starts the counters anew. What is in RAM stays.
    pub fn reset_stats(&self) {
        self.shared.lock().reset_stats();
    }
}

impl Drop for TieredSource {
    /// Waits for the reads under way.
    fn drop(&mut self) {
        self.shared.lock().ending = true;
        self.shared.work.notify_all();
        for reader in self.readers.drain(..) {
            // It catches panics of the source; should it die all the same, there is nothing left to do.
            let _ = reader.join();
        }
    }
}

impl RecordSource for TieredSource {
    fn directory(&self) -> &Directory {
        self.shared.source.directory()
    }

    fn read(&self, record: RecordIndex, out: &mut [u8]) -> Result<()> {
        check_record_len(self.directory(), record, out)?;
        let held = self.shared.hold(record)?;
        let bytes = self.shared.memory.read(held.place).ok_or_else(|| in_use(held.place))?;
        out.copy_from_slice(&bytes[..out.len()]);
        Ok(())
    }

    fn announce(&self, records: &mut dyn Iterator<Item = RecordIndex>, ahead: bool) {
        let mut state = self.shared.lock();
        match state.announce(self.directory(), records, ahead) {
            0 => {}
            1 => self.shared.work.notify_one(),
            _ => self.shared.work.notify_all(),
        }
    }
}

fn in_use(place: SlotId) -> Error {
    let reason = format!("place {} is written while it is read; this is a bug", place.0);
    Error::BadArgument { what: "RAM tier", reason }
}

/// A record in its place, which it keeps as long as this lives.
pub(crate) struct Held {
    shared: Arc<Shared>,
    record: RecordIndex,
    place: SlotId,
}

#[cfg(feature = "cuda")]
impl Held {
    /// Where the record begins.
    pub(crate) fn address(&self) -> u64 {
        let memory = &self.shared.memory;
        memory.base() as u64 + u64::from(self.place.0) * memory.slot_bytes() as u64
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if self.shared.lock().let_go(self.record) {
            self.shared.changed.notify_all();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Changed in steps that do not panic, so it is whole even after a poisoning panic elsewhere.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `record` is in RAM and holds it there.
    ///
    /// # Errors
    /// [`Error::FillFailed`] when it cannot be read.
    fn hold(self: &Arc<Self>, record: RecordIndex) -> Result<Held> {
        let directory = self.source.directory();
        let mut state = self.lock();
        let mut since = None;
        // Whether a read of the record is waited for, and the record held since.
        let mut holds = false;
        loop {
            match state.pool.locate(record) {
                Some(at) if !at.loading => {
                    if !holds {
                        state.hold(record);
                    }
                    state.claim(directory.ordinal_of(record), record, since.map(|s: Instant| s.elapsed()));
                    return Ok(Held { shared: self.clone(), record, place: at.slot });
                }
                Some(_) if !holds => {
                    state.hold(record);
                    state.hasten(record);
                    holds = true;
                }
                Some(_) => {}
                None if holds => {
                    let reason = state.failure(record);
                    if state.let_go(record) {
                        self.changed.notify_all();
                    }
                    return Err(Error::FillFailed { id: directory.id(record), reason });
                }
                None if state.begin(directory, record, false) => {
                    state.hold(record);
                    holds = true;
                    self.work.notify_one();
                }
                // Every place is held; one becomes free.
                None => {}
            }
            since.get_or_insert_with(Instant::now);
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// A reader's life.
    fn work(&self) {
        let mut state = self.lock();
        while !state.ending {
            let Some(Reads { record, place }) = state.take() else {
                state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            drop(state);
            let outcome = self.fetch(record, place);
            state = self.lock();
            state.complete(record, place, outcome);
            self.changed.notify_all();
        }
    }

    /// Reads a record into its place; what went wrong as text.
    fn fetch(&self, record: RecordIndex, place: SlotId) -> std::result::Result<usize, String> {
        let bytes = self.source.directory().record_bytes(record);
        let mut to = self.memory.write(place).ok_or_else(|| in_use(place).to_string())?;
        match catch_unwind(AssertUnwindSafe(|| self.source.fetch(record, &mut to[..bytes]))) {
            Ok(Ok(())) => Ok(bytes),
            Ok(Err(Error::FillFailed { reason, .. })) => Err(reason),
            Ok(Err(e)) => Err(e.to_string()),
            Err(_) => Err("the store panicked while it was read".to_owned()),
        }
    }
}
