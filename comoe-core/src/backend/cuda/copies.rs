//! The two copy queues: fills that a step waits for, and fills made ahead of time.
//!
//! A demand batch whose records are all page-locked is enqueued by the caller at once. Everything else is a job of the
//! queue's worker thread: records that must first be read into a bounce buffer, and prefetches, which go out in
//! pieces, one at a time, and only while no demand is on its way. A ticket whose job has not been enqueued yet makes
//! whoever waits for it wait on the host until it is; for a prefetch that also ends its good manners.
//!
//! No two jobs can wait for each other: a job depends on tickets handed out before it, and queues are in order.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use cudarc::driver::{CudaEvent, CudaStream, result};

use super::arena::Arena;
use super::bounce::Bounce;
use super::context::{Doing, Gpu};
use super::kernels::Kernels;
use super::options::CudaOptions;
use super::sender::{Piece, Sender};
use super::spans::Spans;
use super::tier::LockedTier;
use super::timeline::{OwnStream, Rank, Timelines};
use crate::backend::{Fill, Queue, SlotId, Ticket};
use crate::error::{Error, Result};
use crate::expert::ExpertId;
use crate::store::{RecordIndex, RecordSource};

/// A prefetch holds the link for no longer than this many bytes take (about 20 us on PCIe 5 x16).
const PIECE: usize = 1 << 20;

/// The slots, as addresses.
#[derive(Debug, Clone, Copy)]
pub(super) struct Slots {
    pub(super) base: u64,
    pub(super) stride: usize,
    pub(super) count: usize,
}

impl Slots {
    /// # Errors
    /// [`Error::BadArgument`] for a slot that there is not, or bytes that do not fit it.
    pub(super) fn address(&self, slot: SlotId, bytes: usize) -> Result<u64> {
        if slot.0 as usize >= self.count || bytes > self.stride {
            let reason = format!(
                "{bytes} bytes in slot {}: there are {} slots of {} bytes",
                slot.0, self.count, self.stride
            );
            return Err(Error::BadArgument { what: "slot", reason });
        }
        Ok(self.base + slot.0 as u64 * self.stride as u64)
    }
}

struct Job {
    seq: u64,
    after: Vec<Ticket>,
    fills: Vec<Fill>,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    /// The worker has taken a job and not finished it.
    busy: bool,
    failure: Option<Failure>,
}

/// The first thing that went wrong on a queue; every later call reports it.
#[derive(Clone)]
struct Failure {
    id: Option<ExpertId>,
    text: String,
}

impl Failure {
    fn error(&self) -> Error {
        match self.id {
            Some(id) => Error::FillFailed { id, reason: self.text.clone() },
            None => Error::Cuda { what: "copying experts".to_owned(), reason: self.text.clone() },
        }
    }
}

/// What enqueueing needs; held by whoever enqueues on the lane.
struct Issuer {
    sender: Sender,
    bounce: Option<Bounce>,
    piece_done: CudaEvent,
}

struct Lane {
    queue: Queue,
    stream: OwnStream,
    state: Mutex<State>,
    changed: Condvar,
    issuer: Mutex<Issuer>,
    /// The last ticket handed out.
    promised: AtomicU64,
    /// Someone waits on the host for this ticket.
    urgent: AtomicU64,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Shared {
    gpu: Gpu,
    timelines: Arc<Timelines>,
    source: Arc<dyn RecordSource>,
    arena: Arc<Arena>,
    slots: Slots,
    options: CudaOptions,
    closing: AtomicBool,
    demand: Lane,
    prefetch: Lane,
}

/// Both queues and their workers.
pub(super) struct Copies {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

impl Copies {
    pub(super) fn new(
        gpu: &Gpu,
        timelines: &Arc<Timelines>,
        source: &Arc<dyn RecordSource>,
        (arena, tier): (&Arc<Arena>, Option<&Arc<LockedTier>>),
        slots: Slots,
        (kernels, spans): (&Arc<Kernels>, &Arc<Spans>),
        options: CudaOptions,
    ) -> Result<Self> {
        let lane = |queue, rank| -> Result<Lane> {
            let bounce = match (arena.is_whole(), tier) {
                (true, _) => None,
                (false, Some(tier)) => Some(Bounce::over(gpu, tier)?),
                (false, None) => Some(Bounce::new(gpu, source.directory().largest_record())?),
            };
            Ok(Lane {
                queue,
                stream: OwnStream::new(gpu, rank)?,
                state: Mutex::default(),
                changed: Condvar::new(),
                issuer: Mutex::new(Issuer {
                    sender: Sender::new(gpu, kernels, &options, spans, queue)?,
                    bounce,
                    piece_done: gpu.ctx.new_event(None).doing("making an event")?,
                }),
                promised: AtomicU64::new(0),
                urgent: AtomicU64::new(0),
            })
        };
        let (demand, prefetch) = (lane(Queue::Demand, Rank::First)?, lane(Queue::Prefetch, Rank::Last)?);
        let shared = Arc::new(Shared {
            gpu: gpu.clone(),
            timelines: timelines.clone(),
            source: source.clone(),
            arena: arena.clone(),
            slots,
            options,
            closing: AtomicBool::new(false),
            demand,
            prefetch,
        });
        let mut this = Self { shared, workers: Vec::new() };
        for (queue, name) in [(Queue::Demand, "comoe-demand"), (Queue::Prefetch, "comoe-prefetch")] {
            let shared = this.shared.clone();
            let worker = std::thread::Builder::new().name(name.to_owned()).spawn(move || shared.work(queue));
            this.workers.push(worker.map_err(|e| Error::HostMemory {
                what: format!("starting the thread {name}"),
                reason: e.to_string(),
            })?);
        }
        Ok(this)
    }

    pub(super) fn slots(&self) -> Slots {
        self.shared.slots
    }

    /// Enqueues a batch, or hands it to the queue's worker.
    pub(super) fn fill(&self, queue: Queue, after: &[Ticket], fills: &[Fill]) -> Result<Ticket> {
        self.shared.fill(queue, after, fills)
    }

    /// Makes `stream` wait for `ticket`; waits on the host only until the ticket's copies have been enqueued.
    pub(super) fn hold(&self, stream: &CudaStream, ticket: Ticket) -> Result<()> {
        self.shared.hold(stream, ticket)
    }

    /// Whether `ticket` has been reached.
    pub(super) fn is_done(&self, ticket: Ticket) -> Result<bool> {
        self.check()?;
        let timeline = self.shared.timelines.of(ticket.queue);
        Ok(timeline.recorded() >= ticket.seq && timeline.is_done(ticket.seq)?)
    }

    /// # Errors
    /// The first failure of a copy, by the expert's name.
    pub(super) fn check(&self) -> Result<()> {
        for lane in [&self.shared.demand, &self.shared.prefetch] {
            if let Some(failure) = &lock(&lane.state).failure {
                return Err(failure.error());
            }
        }
        Ok(())
    }

    /// Waits until both queues are empty.
    pub(super) fn synchronize(&self) -> Result<()> {
        for lane in [&self.shared.demand, &self.shared.prefetch] {
            self.shared.ensure_issued(lane, lane.promised.load(Ordering::Acquire))?;
            lane.stream.get().synchronize().doing("waiting for copies")?;
        }
        self.check()
    }

    /// Every record is page-locked from here on: the buffers that others passed through go.
    pub(super) fn need_no_bounce(&self) {
        for lane in [&self.shared.demand, &self.shared.prefetch] {
            // Behind the job that the worker has begun; whatever comes later finds every record in its place.
            lock(&lane.issuer).bounce = None;
        }
    }

    /// How long the queue's copies have kept the link busy, estimated.
    pub(super) fn time(&self, queue: Queue) -> Duration {
        lock(&self.shared.lane(queue).issuer).sender.time()
    }
}

impl Drop for Copies {
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::Release);
        for lane in [&self.shared.demand, &self.shared.prefetch] {
            // Taken so that no worker is between its look at `closing` and its sleep.
            let state = lock(&lane.state);
            lane.changed.notify_all();
            drop(state);
        }
        for worker in self.workers.drain(..) {
            // A worker that panicked has nothing left to stop.
            let _ = worker.join();
        }
    }
}

impl Shared {
    fn lane(&self, queue: Queue) -> &Lane {
        match queue {
            Queue::Prefetch => &self.prefetch,
            Queue::Demand | Queue::Compute => &self.demand,
        }
    }

    fn fill(&self, queue: Queue, after: &[Ticket], fills: &[Fill]) -> Result<Ticket> {
        let directory = self.source.directory();
        for fill in fills {
            self.slots.address(fill.slot, directory.record_bytes(fill.record))?;
        }
        self.source.announce(&mut fills.iter().map(|f| f.record), queue == Queue::Prefetch);
        let lane = self.lane(queue);
        let mut state = lock(&lane.state);
        if let Some(failure) = &state.failure {
            return Err(failure.error());
        }
        let seq = lane.promised.load(Ordering::Acquire) + 1;
        lane.promised.store(seq, Ordering::Release);
        let at_once = queue == Queue::Demand
            && !state.busy
            && state.jobs.is_empty()
            && fills.iter().all(|f| self.arena.place(f.record).is_some())
            && after.iter().all(|t| self.timelines.of(t.queue).recorded() >= t.seq);
        if at_once {
            if let Err(failure) = self.issue(lane, seq, after, fills) {
                let error = failure.error();
                state.failure = Some(failure);
                return Err(error);
            }
        } else {
            state.jobs.push_back(Job { seq, after: after.to_vec(), fills: fills.to_vec() });
            lane.changed.notify_all();
        }
        Ok(Ticket { queue, seq })
    }

    fn hold(&self, stream: &CudaStream, ticket: Ticket) -> Result<()> {
        if ticket.queue != Queue::Compute {
            self.ensure_issued(self.lane(ticket.queue), ticket.seq)?;
        }
        self.timelines.of(ticket.queue).hold(stream, ticket.seq)
    }

    fn ensure_issued(&self, lane: &Lane, seq: u64) -> Result<()> {
        let timeline = self.timelines.of(lane.queue);
        if timeline.recorded() >= seq {
            return Ok(());
        }
        lane.urgent.fetch_max(seq, Ordering::AcqRel);
        let mut state = lock(&lane.state);
        while timeline.recorded() < seq {
            if let Some(failure) = &state.failure {
                return Err(failure.error());
            }
            if self.closing.load(Ordering::Acquire) {
                let failure = Failure { id: None, text: "the cache is being dropped".to_owned() };
                return Err(failure.error());
            }
            state = lane.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        Ok(())
    }

    fn work(&self, queue: Queue) {
        let lane = self.lane(queue);
        loop {
            let mut state = lock(&lane.state);
            let job = loop {
                if self.closing.load(Ordering::Acquire) {
                    return;
                }
                if let Some(job) = state.jobs.pop_front() {
                    break job;
                }
                state = lane.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            };
            state.busy = true;
            drop(state);
            let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                self.issue(lane, job.seq, &job.after, &job.fills)
            }));
            let mut state = lock(&lane.state);
            state.busy = false;
            let failure = match done {
                Ok(Ok(())) => None,
                Ok(Err(failure)) => Some(failure),
                // A source that panics must not leave the model's thread waiting for ever.
                Err(_) => Some(Failure { id: None, text: "the store panicked while it was read".to_owned() }),
            };
            if let Some(failure) = failure {
                state.failure.get_or_insert(failure);
                state.jobs.clear();
            }
            lane.changed.notify_all();
        }
    }

    /// Enqueues a job's copies and its ticket.
    fn issue(
        &self,
        lane: &Lane,
        seq: u64,
        after: &[Ticket],
        fills: &[Fill],
    ) -> std::result::Result<(), Failure> {
        let first = fills.first().map(|f| self.source.directory().id(f.record));
        let failed = |error: Error| match error {
            Error::FillFailed { id, reason } => Failure { id: Some(id), text: reason },
            other => Failure { id: first, text: other.to_string() },
        };
        self.try_issue(lane, seq, after, fills).map_err(failed)
    }

    fn try_issue(&self, lane: &Lane, seq: u64, after: &[Ticket], fills: &[Fill]) -> Result<()> {
        self.gpu.bind()?;
        let stream = lane.stream.get();
        for &ticket in after {
            self.hold(stream, ticket)?;
        }
        self.options.faults.delay(stream, seq)?;
        if self.options.faults.poison {
            for fill in fills {
                let bytes = self.slots.stride;
                let slot = self.slots.address(fill.slot, bytes)?;
                // SAFETY: inside the slab, and ordered behind the slot's last reader like the fill itself.
                unsafe { result::memset_d8_async(slot, 0xff, bytes, stream.cu_stream()) }
                    .doing("poisoning a slot")?;
            }
        }
        let mut issuer = lock(&lane.issuer);
        match lane.queue {
            Queue::Prefetch => self.send_politely(lane, &mut issuer, seq, fills)?,
            Queue::Demand | Queue::Compute => self.send(&mut issuer, stream, fills)?,
        }
        self.timelines.of(lane.queue).record(stream)?;
        Ok(())
    }

    /// All at once: what is page-locked in one batch, the rest behind it through the bounce buffer.
    fn send(&self, issuer: &mut Issuer, stream: &Arc<CudaStream>, fills: &[Fill]) -> Result<()> {
        let directory = self.source.directory();
        let mut unlocked = Vec::new();
        for &fill in fills {
            self.may_break(issuer, stream, fill)?;
            let bytes = directory.record_bytes(fill.record);
            let to = self.slots.address(fill.slot, bytes)?;
            let Some(place) = self.arena.place(fill.record) else {
                unlocked.push((fill.record, to, bytes));
                continue;
            };
            // SAFETY: the arena outlives the queues, and the schedule keeps the slot for this fill until the batch's
            // ticket is reached.
            unsafe { issuer.sender.push(stream, directory, place.piece(fill.record, to, bytes)) }?;
        }
        issuer.sender.flush(stream, false)?;
        self.send_unlocked(issuer, stream, &unlocked)
    }

    fn send_unlocked(
        &self,
        issuer: &mut Issuer,
        stream: &Arc<CudaStream>,
        fills: &[(RecordIndex, u64, usize)],
    ) -> Result<()> {
        if fills.is_empty() {
            return Ok(());
        }
        let Issuer { sender, bounce, .. } = issuer;
        let bounce = bounce.as_mut().ok_or_else(no_bounce)?;
        let device_offset = if sender.expands() { bounce.device_offset()? } else { 0 };
        for group in fills.chunks(bounce.group()) {
            let sources = bounce.read(&*self.source, group.iter().map(|f| (f.0, f.2)))?;
            for (&(record, to, bytes), &from) in group.iter().zip(sources) {
                let piece = Piece { record, to, from, device_offset, bytes };
                // SAFETY: the bounce buffer is not touched before `hold_until` says that these copies are done; for
                // the slot see `send`.
                unsafe { sender.push(stream, self.source.directory(), piece) }?;
            }
            sender.flush(stream, !bounce.is_locked())?;
            bounce.hold_until(stream)?;
        }
        Ok(())
    }

    /// Piece by piece, each behind the one before, none while demand is on its way; all at once as soon as someone
    /// waits for it.
    fn send_politely(&self, lane: &Lane, issuer: &mut Issuer, seq: u64, fills: &[Fill]) -> Result<()> {
        let stream = lane.stream.get();
        for &fill in fills {
            self.may_break(issuer, stream, fill)?;
            let bytes = self.source.directory().record_bytes(fill.record);
            let to = self.slots.address(fill.slot, bytes)?;
            let place = self.arena.place(fill.record);
            let Issuer { sender, bounce, piece_done } = &mut *issuer;
            let whole = match (place, &mut *bounce) {
                (Some(place), _) => place.piece(fill.record, to, bytes),
                (None, Some(bounce)) => {
                    let device_offset = if sender.expands() { bounce.device_offset()? } else { 0 };
                    let from = bounce.read(&*self.source, [(fill.record, bytes)])?[0];
                    Piece { record: fill.record, to, from, device_offset, bytes }
                }
                (None, None) => return Err(no_bounce()),
            };
            let mut at = 0;
            while at < bytes {
                let polite = self.wait_for_turn(lane, seq)?;
                let most = if polite && !sender.expands() { PIECE } else { bytes };
                let len = most.min(bytes - at);
                let piece = Piece { to: to + at as u64, from: whole.from + at as u64, bytes: len, ..whole };
                // SAFETY: as in `send` and `send_unlocked`.
                unsafe { sender.push(stream, self.source.directory(), piece) }?;
                sender.flush(stream, place.is_none() && bounce.as_ref().is_some_and(|b| !b.is_locked()))?;
                at += len;
                if polite {
                    piece_done.record(stream).doing("recording an event")?;
                    self.pause_while(lane, seq, || {
                        piece_done.try_is_complete().map(|done| !done).doing("copying ahead of time")
                    })?;
                }
            }
            if place.is_none()
                && let Some(bounce) = bounce
            {
                bounce.hold_until(stream)?;
            }
        }
        Ok(())
    }

    /// Waits until no demand is on its way. `false` when there is no time for that any more, or the one that is on its way has
    /// failed and will not arrive.
    fn wait_for_turn(&self, lane: &Lane, seq: u64) -> Result<bool> {
        let demand = &self.timelines.demand;
        let has_failed = || lock(&self.demand.state).failure.is_some();
        self.pause_while(lane, seq, || {
            let promised = self.demand.promised.load(Ordering::Acquire) > demand.recorded();
            Ok((promised && !has_failed()) || !demand.is_idle()?)
        })
    }

    /// `false` when ended because someone waits for `seq`, or the cache is dropped.
    fn pause_while(&self, lane: &Lane, seq: u64, mut busy: impl FnMut() -> Result<bool>) -> Result<bool> {
        let mut spins = 0;
        loop {
            if lane.urgent.load(Ordering::Acquire) >= seq || self.closing.load(Ordering::Acquire) {
                return Ok(false);
            }
            if !busy()? {
                return Ok(true);
            }
            // A piece takes 20 us, less than a sleep; what takes longer is worth one.
            spins += 1;
            match spins {
                0..200 => std::thread::yield_now(),
                _ => std::thread::sleep(Duration::from_micros(50)),
            }
        }
    }

    /// The injected failure: half of the record arrives, then the link breaks.
    fn may_break(&self, issuer: &mut Issuer, stream: &Arc<CudaStream>, fill: Fill) -> Result<()> {
        if self.options.faults.fail_half_way != Some(fill.record) {
            return Ok(());
        }
        let half = self.source.directory().record_bytes(fill.record) / 2;
        let to = self.slots.address(fill.slot, half)?;
        if let Some(place) = self.arena.place(fill.record)
            && !issuer.sender.expands()
        {
            // SAFETY: as in `send`.
            unsafe {
                issuer.sender.push(stream, self.source.directory(), place.piece(fill.record, to, half))
            }?;
        }
        issuer.sender.flush(stream, false)?;
        let id = self.source.directory().id(fill.record);
        Err(Error::FillFailed { id, reason: format!("the transfer stopped after {half} bytes (injected)") })
    }
}

fn no_bounce() -> Error {
    Error::BadArgument {
        what: "arena",
        reason: "a record has neither a place nor a bounce buffer".to_owned(),
    }
}
