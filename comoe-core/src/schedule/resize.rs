//! The number of slots changes between steps: what leaves, what comes back, and how much of it is lent.

use super::Engine;
use crate::backend::Chunks;
use crate::error::{Error, Result};
use crate::pool::SlotState;

/// Bytes by which more is given up than is missing.
const SPARE: u64 = 4 << 20;

/// What is in force of a pool whose slots come and go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlotsInForce {
    /// Slots, without staging.
    pub slots: usize,
    /// Slots that the cache was built with.
    pub most: usize,
    /// Bytes of device memory that they have, with staging and ring. Memory comes and goes in chunks, so this may be
    /// somewhat more than the slots need.
    pub bytes: u64,
    /// Bytes that slots gave up, by [`ExpertCache::lend`](crate::ExpertCache::lend) or for a step that found no memory;
    /// [`ExpertCache::take_back`](crate::ExpertCache::take_back) gives back any of them.
    pub lent: u64,
}

impl SlotsInForce {
    /// Of several devices together.
    pub(crate) fn of_all(all: impl IntoIterator<Item = Self>) -> Self {
        let none = Self { slots: 0, most: 0, bytes: 0, lent: 0 };
        all.into_iter().fold(none, |sum, one| Self {
            slots: sum.slots + one.slots,
            most: sum.most + one.most,
            bytes: sum.bytes + one.bytes,
            lent: sum.lent + one.lent,
        })
    }
}

/// How many slots there should be.
#[derive(Debug, Clone, Copy)]
pub(super) struct Elastic {
    /// So many, but for what is lent.
    wanted: usize,
    /// Never fewer: what one token needs.
    least: usize,
    lent: u64,
}

impl Elastic {
    pub(super) fn new(slots: usize) -> Self {
        Self { wanted: slots, least: slots, lent: 0 }
    }
}

/// What memory was short for in one step: one buffer after the other may find too little.
#[derive(Debug, Default)]
pub(crate) struct Shortages(Vec<(String, String, u64)>);

impl Shortages {
    /// Whether it is another one than all before. The same once more means that what slots gave up did not help.
    pub(crate) fn is_new(&mut self, error: &Error) -> bool {
        let Error::OutOfDeviceMemory { device, what, asked, .. } = error else { return false };
        let this = (device.clone(), what.clone(), *asked);
        let is_new = !self.0.contains(&this);
        self.0.push(this);
        is_new
    }
}

impl Engine {
    /// Lets slots leave, all but `least`.
    pub(crate) fn keep_at_least(&mut self, least: usize) {
        self.elastic.least = least.min(self.elastic.wanted);
    }

    pub(crate) fn slots_in_force(&self) -> SlotsInForce {
        let slots = self.pool.shape().slots();
        let all = self.clocks.len() as u64 * self.slot_bytes as u64;
        let bytes = self.backend.chunks().map_or(all, |chunks| self.bytes_of(chunks, slots));
        SlotsInForce { slots, most: self.pool.most().slots(), bytes, lent: self.elastic.lent }
    }

    /// Why the number of slots cannot change, if so.
    pub(crate) fn fixed(&self) -> Option<String> {
        self.backend.chunks().err()
    }

    /// Makes it `slots` slots, less what is lent; never fewer than one token needs, nor more than at first.
    ///
    /// # Errors
    /// [`Error::FixedSlots`], and when the backend fails.
    pub(crate) fn resize(&mut self, slots: usize) -> Result<SlotsInForce> {
        self.elastic.wanted = slots.clamp(self.elastic.least, self.pool.most().slots());
        self.apply()
    }

    /// Gives up as many slots as have `bytes` bytes of memory, on top of what was lent before.
    ///
    /// # Errors
    /// [`Error::NothingToLend`] when there are too few, and nothing has changed; as [`Self::resize`].
    pub(crate) fn lend(&mut self, bytes: u64) -> Result<SlotsInForce> {
        let chunks = self.backend.chunks().map_err(|reason| Error::FixedSlots { reason })?;
        let Elastic { wanted, least, lent } = self.elastic;
        let most = self.bytes_of(chunks, wanted).saturating_sub(self.bytes_of(chunks, least) + lent);
        if bytes > most {
            return Err(Error::NothingToLend { asked: bytes, most, least });
        }
        self.elastic.lent += bytes;
        let applied = self.apply();
        if applied.is_err() {
            self.elastic.lent = lent;
        }
        applied
    }

    /// Takes back what was lent; slots come back as far as there is memory for them.
    ///
    /// # Errors
    /// As [`Self::resize`].
    pub(crate) fn take_back(&mut self, bytes: u64) -> Result<SlotsInForce> {
        self.elastic.lent = self.elastic.lent.saturating_sub(bytes);
        self.apply()
    }

    /// Bytes of the slab with `slots` slots of the pool.
    fn bytes_of(&self, chunks: Chunks, slots: usize) -> u64 {
        chunks.bytes_without(&(slots as u32..self.pool.most().slots() as u32)) as u64
    }

    /// Makes the number of slots what it should be, or as near to it as memory allows.
    fn apply(&mut self) -> Result<SlotsInForce> {
        let chunks = self.backend.chunks().map_err(|reason| Error::FixedSlots { reason })?;
        let Elastic { wanted, least, lent } = self.elastic;
        let most_bytes = self.bytes_of(chunks, wanted).saturating_sub(lent);
        // More slots never take fewer bytes.
        let (mut fits, mut too_many) = (least, wanted + 1);
        while too_many - fits > 1 {
            let middle = fits.midpoint(too_many);
            match self.bytes_of(chunks, middle) <= most_bytes {
                true => fits = middle,
                false => too_many = middle,
            }
        }
        let now = self.pool.shape().slots();
        if fits != now {
            self.host_owns()?;
            self.guarded(Self::come_to_rest)?;
            match fits < now {
                true => self.guarded(|this| this.shrink(fits))?,
                false => self.grow(fits)?,
            }
        }
        Ok(self.slots_in_force())
    }

    /// Waits until every fill has arrived and every reader is done.
    pub(super) fn come_to_rest(&mut self) -> Result<()> {
        self.backend.synchronize()?;
        let loading = |(slot, state)| matches!(state, SlotState::Loading(_)).then_some(slot);
        for slot in self.pool.states().filter_map(loading).collect::<Vec<_>>() {
            self.pool.arrived(slot);
        }
        Ok(())
    }

    fn shrink(&mut self, slots: usize) -> Result<()> {
        self.change(slots);
        let unused = slots as u32..self.pool.most().slots() as u32;
        self.backend.set_unused(unused).map(drop)
    }

    /// Grows to `slots` slots, or to fewer where memory is short: then what is free is left to others.
    fn grow(&mut self, slots: usize) -> Result<()> {
        let (now, most) = (self.pool.shape().slots(), self.pool.most().slots() as u32);
        let mut more = slots - now;
        while more > 0 {
            match self.backend.set_unused((now + more) as u32..most) {
                Ok(_) => {
                    self.change(now + more);
                    break;
                }
                // What was there before is there still.
                Err(Error::OutOfDeviceMemory { .. }) => more /= 2,
                Err(e) => return self.guarded(|_| Err(e)),
            }
        }
        Ok(())
    }

    /// Runs `f`, which may find that memory is short before it has changed anything that counts. Then slots give up what is
    /// missing, for good, and it runs once more, as long as it is something else that is missing. An error stops the cache,
    /// but for memory that is short all the same: the caller may find some and ask again.
    pub(super) fn with_memory<R>(&mut self, mut f: impl FnMut(&mut Self) -> Result<R>) -> Result<R> {
        if let Some(first) = &self.failed {
            return Err(Error::Stopped { first: first.clone() });
        }
        let mut shortages = Shortages::default();
        loop {
            match f(self) {
                // What is missing says more than why nothing could be done about it.
                Err(error @ Error::OutOfDeviceMemory { .. }) => {
                    if !shortages.is_new(&error) || !self.give_way(&error)? {
                        return Err(error);
                    }
                }
                // An allocation of candle's, ahead of all that a step enqueues.
                Err(error) if error.is_out_of_memory() => return Err(error),
                other => return self.guarded(|_| other),
            }
        }
    }

    /// Has slots give up the memory that was missing, for good, and says so; whether they could.
    ///
    /// # Errors
    /// As [`Self::lend`], but for slots that have too little.
    pub(crate) fn give_way(&mut self, error: &Error) -> Result<bool> {
        let Error::OutOfDeviceMemory { asked, free, .. } = error else { return Ok(false) };
        let missing = asked.saturating_sub(*free);
        // What is free may lie in pieces, and rounding takes some of it.
        let lent = match self.lend(missing + SPARE) {
            Err(Error::NothingToLend { most, .. }) if most >= missing.max(1) => self.lend(most),
            lent => lent,
        };
        match lent {
            Ok(force) => {
                tracing::warn!("{error}: the experts' slots made room, {} are left", force.slots);
                Ok(true)
            }
            Err(Error::NothingToLend { .. } | Error::FixedSlots { .. }) => Ok(false),
            Err(e) => Err(e),
        }
    }

    /// Changes the pool's size, and forgets what was known of records that lost their slots.
    fn change(&mut self, slots: usize) {
        let staged = self.pool.staged().to_vec();
        let left = self.pool.resize(slots);
        for record in &left {
            let was_early = self.early.iter().position(|r| r == record).map(|at| self.early.swap_remove(at));
            if was_early.is_some() || staged.contains(record) {
                self.stats.prefetch_wasted += 1;
                self.stats.layers[self.directory.ordinal_of(*record)].prefetch_wasted += 1;
                self.stats.prefetch_wasted_bytes += self.directory.record_bytes(*record) as u64;
            }
        }
        if let Some(prefetch) = &mut self.prefetch {
            prefetch.forget_pending();
        }
        let stats = &mut self.stats;
        stats.pinned_slots = self.pool.kept().len();
        stats.slots = slots;
        stats.resizes += 1;
        stats.least_slots = stats.least_slots.min(slots);
        stats.most_slots = stats.most_slots.max(slots);
    }
}
