//! The copy queues: one worker thread, and the waiting thread, which helps.
//!
//! Fills run record by record. Of each queue only the first batch is under way, so a queue is in order; within it
//! any thread takes the next fill. Demand goes first: a prefetch fill starts only while no demand fill could, so a
//! demand batch waits for no prefetch but the record under way, and then only if nobody helps.

use std::collections::VecDeque;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::backend::{Fill, Queue, SlotId, Ticket, TransferTime};
use crate::error::{Error, Result};
use crate::expert::ExpertId;
use crate::slab::Slab;
use crate::store::{RecordIndex, RecordSource};

/// How long a thread looks for work before it sleeps. A wake-up takes longer than copying a small record.
const SPIN: Duration = Duration::from_micros(30);

/// What a slot holds when no fill of it has completed since the last one was enqueued.
const NOTHING: u32 = u32::MAX;

/// The two copy queues of a slab.
pub(super) struct CopyQueues {
    shared: Arc<Shared>,
    worker: Option<JoinHandle<()>>,
}

struct Shared {
    source: Arc<dyn RecordSource>,
    slab: Slab,
    /// The record that each slot holds, or [`NOTHING`].
    holds: Box<[AtomicU32]>,
    state: Mutex<State>,
    /// Wakes the worker: there is work, or it is to end.
    work: Condvar,
    /// Wakes waiting threads: a batch is complete, or a fill failed.
    progress: Condvar,
    /// `seq` reached, of the demand and the prefetch queue.
    reached: [AtomicU64; 2],
    failed: AtomicBool,
    /// Counts changes of `state` that a thread may be looking for. Changed under the lock, so that a thread that holds
    /// the lock and finds nothing to do misses nothing by going to sleep; read without it to spin.
    changes: AtomicU64,
    spin: Duration,
}

#[derive(Default)]
struct State {
    /// Demand and prefetch.
    queues: [Line; 2],
    failure: Option<(ExpertId, String)>,
    ending: bool,
    worker_sleeps: bool,
    sleeping_waiters: usize,
    /// Emptied fill lists, kept for the next batch.
    spare: Vec<Vec<Fill>>,
}

#[derive(Default)]
struct Line {
    batches: VecDeque<Batch>,
    /// `seq` of the last batch enqueued.
    issued: u64,
    /// Fills under way.
    active: usize,
    busy_since: Option<Instant>,
    busy: Duration,
}

struct Batch {
    seq: u64,
    /// `seq` of the other queue that must be reached before this one starts.
    after: u64,
    fills: Vec<Fill>,
    /// The next fill to take.
    next: usize,
    /// Fills not complete.
    left: usize,
}

const DEMAND: usize = 0;
const PREFETCH: usize = 1;

fn index(queue: Queue) -> Option<usize> {
    match queue {
        Queue::Compute => None,
        Queue::Demand => Some(DEMAND),
        Queue::Prefetch => Some(PREFETCH),
    }
}

impl CopyQueues {
    /// Starts the worker.
    pub(super) fn new(source: Arc<dyn RecordSource>, slab: Slab) -> Result<Self> {
        let alone = std::thread::available_parallelism().is_ok_and(|n| n.get() == 1);
        let shared = Arc::new(Shared {
            source,
            holds: (0..slab.slots()).map(|_| AtomicU32::new(NOTHING)).collect(),
            slab,
            state: Mutex::default(),
            work: Condvar::new(),
            progress: Condvar::new(),
            reached: [AtomicU64::new(0), AtomicU64::new(0)],
            failed: AtomicBool::new(false),
            changes: AtomicU64::new(0),
            // On a single core spinning only keeps the other thread from working.
            spin: if alone { Duration::ZERO } else { SPIN },
        });
        let worker = std::thread::Builder::new()
            .name("comoe-copy".to_owned())
            .spawn({
                let shared = shared.clone();
                move || shared.work()
            })
            .map_err(|e| Error::Device {
                asked: "cpu".to_owned(),
                reason: format!("the copy thread could not be started: {e}"),
            })?;
        Ok(Self { shared, worker: Some(worker) })
    }

    pub(super) fn slab(&self) -> &Slab {
        &self.shared.slab
    }

    /// The record whose bytes `slot` holds, if its last fill is complete.
    pub(super) fn holds(&self, slot: SlotId) -> Option<RecordIndex> {
        let record = self.shared.holds.get(slot.0 as usize)?.load(Ordering::Acquire);
        (record != NOTHING).then_some(RecordIndex(record))
    }

    /// Nobody uses the slots `unused` from now on; see [`Slab::set_unused`].
    pub(super) fn set_unused(&self, unused: Range<u32>) -> Option<std::io::Result<u64>> {
        let answer = self.slab().set_unused(unused.clone());
        if answer.is_some() {
            let forget = |slot: u32| self.shared.holds[slot as usize].store(NOTHING, Ordering::Release);
            unused.for_each(forget);
        }
        answer
    }

    /// Copies one slot to another, at once. `false` when one of them does not exist or is in use.
    pub(super) fn copy_slot(&self, from: SlotId, to: SlotId) -> bool {
        let (Some(source), Some(mut target)) = (self.slab().read(from), self.slab().write(to)) else {
            return false;
        };
        target.copy_from_slice(&source);
        let record = self.shared.holds[from.0 as usize].load(Ordering::Acquire);
        self.shared.holds[to.0 as usize].store(record, Ordering::Release);
        true
    }

    /// Enqueues a batch behind `after` and everything earlier on `queue`. Never blocks for a copy. Reports a fill that
    /// has failed meanwhile.
    pub(super) fn fill(&self, queue: Queue, after: &[Ticket], fills: &[Fill]) -> Result<Ticket> {
        let refused = |reason: String| Error::BadArgument { what: "fill", reason };
        let q = index(queue).ok_or_else(|| refused("the compute queue takes no fills".to_owned()))?;
        let directory = self.shared.source.directory();
        for (i, fill) in fills.iter().enumerate() {
            let (slot, record) = (fill.slot, fill.record);
            if slot.0 as usize >= self.slab().slots() || record.0 as usize >= directory.len() {
                let (slots, records) = (self.slab().slots(), directory.len());
                return Err(refused(format!("{fill:?} of {slots} slots and {records} records")));
            }
            if directory.record_bytes(record) > self.slab().slot_bytes() {
                let (need, have) = (directory.record_bytes(record), self.slab().slot_bytes());
                return Err(refused(format!("{} has {need} bytes, a slot {have}", directory.id(record))));
            }
            if fills[..i].iter().any(|earlier| earlier.slot == slot) {
                return Err(refused(format!("slot {} twice in one batch", slot.0)));
            }
        }
        self.shared.source.announce(&mut fills.iter().map(|f| f.record), queue == Queue::Prefetch);
        let mut state = self.shared.lock();
        state.check()?;
        let mut other = 0;
        for ticket in after {
            state.check_issued(*ticket)?;
            // Compute is done when its call returns, and a queue is in order.
            if index(ticket.queue).is_some_and(|t| t != q) {
                other = other.max(ticket.seq);
            }
        }
        let mut list = state.spare.pop().unwrap_or_default();
        list.extend_from_slice(fills);
        let line = &mut state.queues[q];
        line.issued += 1;
        let seq = line.issued;
        for fill in fills {
            self.shared.holds[fill.slot.0 as usize].store(NOTHING, Ordering::Relaxed);
        }
        line.batches.push_back(Batch { seq, after: other, left: list.len(), fills: list, next: 0 });
        state.retire(&self.shared);
        // The notifier clears the flag, so that one nap is not ended by a system call for every record.
        let wake = std::mem::take(&mut state.worker_sleeps);
        self.shared.changes.fetch_add(1, Ordering::Relaxed);
        drop(state);
        if wake {
            self.shared.work.notify_one();
        }
        Ok(Ticket { queue, seq })
    }

    /// Whether `ticket` of a copy queue has been reached.
    pub(super) fn is_done(&self, ticket: Ticket) -> Result<bool> {
        let Some(q) = index(ticket.queue) else { return Ok(true) };
        if self.shared.failed.load(Ordering::Acquire) {
            self.shared.lock().check()?;
        }
        if self.shared.reached[q].load(Ordering::Acquire) >= ticket.seq {
            return Ok(true);
        }
        self.shared.lock().check_issued(ticket)?;
        Ok(false)
    }

    /// Waits until `ticket` is reached and copies meanwhile what it needs. Returns the time that took.
    pub(super) fn wait(&self, ticket: Ticket) -> Result<Duration> {
        if self.is_done(ticket)? {
            return Ok(Duration::ZERO);
        }
        let Some(q) = index(ticket.queue) else { return Ok(Duration::ZERO) };
        let start = Instant::now();
        let shared = &*self.shared;
        let mut idle = Idle::default();
        let mut state = shared.lock();
        loop {
            state.check()?;
            if shared.reached[q].load(Ordering::Acquire) >= ticket.seq {
                return Ok(start.elapsed());
            }
            if let Some(taken) = state.take(shared, q == PREFETCH) {
                drop(state);
                shared.copy(taken);
                idle = Idle::default();
                state = shared.lock();
            } else if idle.may_spin(shared.spin) {
                // Everything needed is under way on the other thread.
                state = shared.spin(state, &idle);
            } else {
                state.sleeping_waiters += 1;
                state = shared.progress.wait(state).unwrap_or_else(PoisonError::into_inner);
                state.sleeping_waiters -= 1;
            }
        }
    }

    /// Waits for everything enqueued so far.
    pub(super) fn synchronize(&self) -> Result<Duration> {
        let state = self.shared.lock();
        state.check()?;
        let last = [Queue::Demand, Queue::Prefetch]
            .map(|queue| Ticket { queue, seq: index(queue).map_or(0, |q| state.queues[q].issued) });
        drop(state);
        Ok(self.wait(last[DEMAND])? + self.wait(last[PREFETCH])?)
    }

    /// Busy time of the two queues so far.
    pub(super) fn time(&self) -> TransferTime {
        let state = self.shared.lock();
        let busy = |q: usize| {
            let line = &state.queues[q];
            line.busy + line.busy_since.map_or(Duration::ZERO, |since| since.elapsed())
        };
        TransferTime { demand: busy(DEMAND), prefetch: busy(PREFETCH), stalled: Duration::ZERO }
    }
}

impl Drop for CopyQueues {
    /// Drops what is queued and waits for the record under way.
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.ending = true;
        state.queues.iter_mut().for_each(|line| line.batches.clear());
        self.shared.changes.fetch_add(1, Ordering::Relaxed);
        drop(state);
        self.shared.work.notify_one();
        if let Some(worker) = self.worker.take() {
            // The worker catches panics of the source; should it die all the same, there is nothing left to do.
            let _ = worker.join();
        }
    }
}

/// Since when a thread has found nothing to do.
#[derive(Default)]
struct Idle(Option<Instant>);

impl Idle {
    fn may_spin(&mut self, limit: Duration) -> bool {
        !limit.is_zero() && self.0.get_or_insert_with(Instant::now).elapsed() < limit
    }

    fn elapsed(&self) -> Duration {
        self.0.map_or(Duration::ZERO, |since| since.elapsed())
    }
}

/// A fill that a thread has taken on.
struct Taken {
    queue: usize,
    seq: u64,
    fill: Fill,
}

impl State {
    fn check(&self) -> Result<()> {
        match &self.failure {
            Some((id, reason)) => Err(Error::FillFailed { id: *id, reason: reason.clone() }),
            None => Ok(()),
        }
    }

    /// Refuses tickets that were never handed out: waiting for one would never end.
    fn check_issued(&self, ticket: Ticket) -> Result<()> {
        match index(ticket.queue).map(|q| self.queues[q].issued) {
            Some(issued) if ticket.seq > issued => Err(Error::BadArgument {
                what: "ticket",
                reason: format!("{ticket:?} was never handed out, the last is {issued}"),
            }),
            _ => Ok(()),
        }
    }

    /// Takes the next fill that may start. Prefetch fills only when no demand fill is left to take, and when
    /// `prefetch` allows it or demand waits for them.
    fn take(&mut self, shared: &Shared, prefetch: bool) -> Option<Taken> {
        if self.failure.is_some() {
            return None;
        }
        let reached = |q: usize| shared.reached[q].load(Ordering::Relaxed);
        let untaken = |b: &Batch| b.next < b.fills.len();
        let demand = &self.queues[DEMAND].batches;
        let blocked = demand.front().is_some_and(|b| b.after > reached(PREFETCH));
        let queue = match (blocked, demand.iter().any(untaken)) {
            (false, true) => DEMAND,
            (true, _) => PREFETCH,
            (false, false) if prefetch => PREFETCH,
            (false, false) => return None,
        };
        let line = &mut self.queues[queue];
        let batch = line.batches.front_mut()?;
        if batch.after > reached(1 - queue) || !untaken(batch) {
            return None;
        }
        let fill = batch.fills[batch.next];
        batch.next += 1;
        let seq = batch.seq;
        line.active += 1;
        line.busy_since.get_or_insert_with(Instant::now);
        Some(Taken { queue, seq, fill })
    }

    /// Removes complete batches from the front and publishes how far their queue has come.
    fn retire(&mut self, shared: &Shared) {
        let Self { queues, spare, .. } = self;
        // An empty batch may wait for the other queue, so one queue's progress can complete the other's batches.
        let mut moved = true;
        while std::mem::take(&mut moved) {
            for (q, line) in queues.iter_mut().enumerate() {
                let other = shared.reached[1 - q].load(Ordering::Relaxed);
                while let Some(batch) = line.batches.pop_front_if(|b| b.left == 0 && b.after <= other) {
                    shared.reached[q].store(batch.seq, Ordering::Release);
                    let mut fills = batch.fills;
                    fills.clear();
                    spare.push(fills);
                    moved = true;
                }
            }
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // The state is changed in steps that do not panic, so it is whole even after a poisoning panic elsewhere.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The worker's life.
    fn work(&self) {
        let mut idle = Idle::default();
        let mut state = self.lock();
        while !state.ending {
            if let Some(taken) = state.take(self, true) {
                drop(state);
                self.copy(taken);
                idle = Idle::default();
                state = self.lock();
            } else if idle.may_spin(self.spin) {
                state = self.spin(state, &idle);
            } else {
                state.worker_sleeps = true;
                state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
                state.worker_sleeps = false;
                idle = Idle::default();
            }
        }
    }

    /// Lets go of the lock until the state has changed or the spinning time is over.
    fn spin<'a>(&'a self, state: MutexGuard<'a, State>, idle: &Idle) -> MutexGuard<'a, State> {
        let seen = self.changes.load(Ordering::Relaxed);
        drop(state);
        while self.changes.load(Ordering::Relaxed) == seen && idle.elapsed() < self.spin {
            std::hint::spin_loop();
        }
        self.lock()
    }

    /// Performs a fill and accounts for it.
    fn copy(&self, taken: Taken) {
        let Taken { queue, seq, fill } = taken;
        let outcome = self.read(fill);
        let mut state = self.lock();
        let line = &mut state.queues[queue];
        line.active -= 1;
        if line.active == 0 {
            line.busy += line.busy_since.take().map_or(Duration::ZERO, |since| since.elapsed());
        }
        match outcome {
            Ok(()) => {
                self.holds[fill.slot.0 as usize].store(fill.record.0, Ordering::Release);
                // The queues are empty when the backend is being dropped.
                if let Some(batch) = line.batches.front_mut().filter(|b| b.seq == seq) {
                    batch.left -= 1;
                }
                state.retire(self);
            }
            Err(reason) => {
                let id = self.source.directory().id(fill.record);
                state.failure.get_or_insert((id, reason));
                self.failed.store(true, Ordering::Release);
            }
        }
        // A batch of the other queue may have become free to start; the worker's next turn sees it, if it is awake.
        let wake_worker = state.queues.iter().any(|line| !line.batches.is_empty())
            && std::mem::take(&mut state.worker_sleeps);
        let wake_waiters = state.sleeping_waiters > 0;
        self.changes.fetch_add(1, Ordering::Relaxed);
        drop(state);
        if wake_worker {
            self.work.notify_one();
        }
        if wake_waiters {
            self.progress.notify_all();
        }
    }

    fn read(&self, fill: Fill) -> std::result::Result<(), String> {
        let bytes = self.source.directory().record_bytes(fill.record);
        let mut slot = self
            .slab
            .write(fill.slot)
            .ok_or_else(|| format!("slot {} was refilled while in use; this is a bug", fill.slot.0))?;
        let read = || self.source.read(fill.record, &mut slot[..bytes]);
        match catch_unwind(AssertUnwindSafe(read)) {
            Ok(Ok(())) => Ok(()),
            Ok(Err(Error::FillFailed { reason, .. })) => Err(reason),
            Ok(Err(e)) => Err(e.to_string()),
            Err(panic) => {
                let text = panic.downcast_ref::<&str>().map(|s| (*s).to_owned());
                let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
                Err(format!("the store panicked: {}", text.unwrap_or_else(|| "no message".to_owned())))
            }
        }
    }
}

#[cfg(test)]
#[path = "copy_tests.rs"]
mod tests;
