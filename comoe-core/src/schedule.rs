//! One layer's step, in order: union, split, fill, compute hits, compute misses.
//!
//! The rules kept here (design rules 1 and 2):
//! - the whole step set is pinned before any victim is chosen;
//! - a slot is read only after compute was made to wait for its fill;
//! - a slot is refilled only after its last reader, and after whatever filled it before;
//! - all that is missing is enqueued in one batch, before the hits run.
//!
//! A set that does not fit its slots is served in waves: a member may leave once its work is enqueued, so that every
//! record still moves at most once per step. With a ring (see `stream`) it passes through that instead.

mod device;
mod guesses;
mod locking;
mod pins;
mod prefetch;
mod resize;
mod ring;
mod stream;
#[cfg(test)]
mod stream_tests;
mod token;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use candle_core::Tensor;

pub(crate) use prefetch::PrefetchEngine;
pub use prefetch::PrefetchTrigger;
use prefetch::Seen;
pub(crate) use resize::Shortages;
pub use resize::SlotsInForce;
pub(crate) use stream::covers;

use crate::backend::{Backend, BackendMemory, Fill, Queue, SlotId, Ticket, Work, WorkItem};
use crate::error::{Error, Result};
use crate::pool::{Located, Pool, SlotState};
use crate::stats::{CacheStats, LayerStats};
use crate::store::{Directory, RecordIndex};

/// A record that a step needs, and the assignments it serves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Need {
    pub(crate) record: RecordIndex,
    pub(crate) assignments: Vec<u32>,
}

impl Need {
    fn at(self, slot: SlotId) -> WorkItem {
        WorkItem { record: self.record, slot, assignments: self.assignments }
    }
}

/// One layer's step.
pub(crate) struct Step<'a> {
    /// Layer ordinal.
    pub(crate) layer: usize,
    /// The step set, in order of first use.
    pub(crate) needs: Vec<Need>,
    /// `[tokens * top_k]` experts, row-major, for the predictor.
    pub(crate) choices: &'a [u32],
    pub(crate) top_k: usize,
    /// Experts that the caller guesses for the next layer, likeliest first; for the predictor.
    pub(crate) guess: &'a [u32],
    /// The set has nearly all of the layer's experts, on all devices together: see [`covers`].
    pub(crate) covers: bool,
    pub(crate) work: Work<'a>,
    pub(crate) finish: Finish<'a>,
}

/// How a step ends.
#[derive(Clone, Copy)]
pub(crate) enum Finish<'a> {
    /// With the work's result, once these were taken over from other devices.
    Result(&'a [Rows]),
    /// With the results of these assignments, which are all that the step serves, before weights and sum.
    Rows(&'a [u32]),
}

/// Results of assignments before weights and sum: `[assignments, hidden]`, F32.
pub(crate) struct Rows {
    pub(crate) assignments: Vec<u32>,
    pub(crate) rows: Tensor,
}

/// Rules that a test may drop to see that something catches it.
#[doc(hidden)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rules {
    pub wait_before_read: bool,
    pub wait_before_refill: bool,
    pub pin_before_victims: bool,
    pub fills_before_hits: bool,
}

impl Default for Rules {
    fn default() -> Self {
        Self {
            wait_before_read: true,
            wait_before_refill: true,
            pin_before_victims: true,
            fills_before_hits: true,
        }
    }
}

/// Tickets of the last write and the last read of a slot.
#[derive(Debug, Clone, Copy)]
struct SlotClock {
    filled: Ticket,
    read: Ticket,
}

/// How a prompt's records come to the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct StreamPlan {
    /// Ahead of their layer.
    pub(crate) ahead: bool,
    /// Slots that they pass through, behind those of the pool.
    pub(crate) ring_slots: usize,
}

pub(crate) struct Engine {
    backend: Box<dyn Backend>,
    directory: Arc<Directory>,
    pool: Pool,
    clocks: Vec<SlotClock>,
    /// Compute already waits for every ticket up to here, by queue.
    waited: [u64; 3],
    slot_bytes: usize,
    prefetch: Option<PrefetchEngine>,
    ring: ring::Ring,
    /// Whether a prompt's records are sent for ahead of their layer.
    streams: bool,
    /// Those that were sent straight to free slots and not asked for yet.
    early: Vec<RecordIndex>,
    stats: CacheStats,
    /// Accesses by record in steps that the host drove, since the cache was built.
    uses: Vec<u64>,
    rules: Rules,
    drive: device::Drive,
    locking: locking::Locking,
    elastic: resize::Elastic,
    /// Text of the first error: from then on nothing in the slots is trusted.
    failed: Option<String>,
    /// The slot that the next sampled check begins with.
    next_check: u32,
}

impl Engine {
    pub(crate) fn new(
        mut backend: Box<dyn Backend>,
        directory: Arc<Directory>,
        pool: Pool,
        prefetch: Option<PrefetchEngine>,
        slot_bytes: usize,
        stream: StreamPlan,
        rules: Rules,
    ) -> Result<Self> {
        let in_force = pool.shape().slots();
        let in_pool = pool.shape().slots() + pool.shape().staging;
        let slots = in_pool + stream.ring_slots;
        backend.allocate(slots, slot_bytes)?;
        let clocks = vec![SlotClock { filled: Ticket::DONE, read: Ticket::DONE }; slots];
        let uses = vec![0; directory.len()];
        let goes_on = backend.page_locking().is_some_and(|locking| locking.took.is_none());
        let mut this = Self {
            backend,
            directory,
            pool,
            clocks,
            waited: [0; 3],
            slot_bytes,
            prefetch,
            ring: ring::Ring::new(in_pool, stream.ring_slots),
            streams: stream.ahead,
            early: Vec::new(),
            stats: CacheStats::default(),
            uses,
            rules,
            drive: device::Drive::default(),
            locking: locking::Locking { goes_on, offer: None },
            elastic: resize::Elastic::new(in_force),
            failed: None,
            next_check: 0,
        };
        this.reset_stats();
        Ok(this)
    }

    pub(crate) fn with_backend<R>(&mut self, f: impl FnOnce(&mut dyn Backend, &Pool) -> R) -> R {
        if let Err(e) = self.host_owns() {
            // Not for the caller, and not lost.
            self.failed.get_or_insert(e.to_string());
        }
        f(&mut *self.backend, &self.pool)
    }

    pub(crate) fn device_memory(&self) -> BackendMemory {
        self.backend.memory()
    }

    pub(crate) fn stats(&mut self) -> CacheStats {
        let mut stats = self.stats.clone();
        if let Some(gate) = self.prefetch.as_ref().and_then(|p| p.gate.as_ref()) {
            for (ordinal, layer) in stats.layers.iter_mut().enumerate() {
                layer.prefetch_width = gate.width(ordinal);
                layer.prefetch_switches = gate.switches(ordinal);
            }
            stats.prefetch_judged = true;
        }
        self.add_device_counts(&mut stats);
        let (now, then) = (self.backend.transfer_time(), stats.time);
        stats.time.demand = now.demand.saturating_sub(then.demand);
        stats.time.prefetch = now.prefetch.saturating_sub(then.prefetch);
        stats.time.stalled = now.stalled.saturating_sub(then.stalled);
        stats
    }

    /// Whether the prefetch in force would use guesses of the caller for the next layer.
    pub(crate) fn takes_hints(&self) -> bool {
        self.prefetch.as_ref().is_some_and(|p| p.predictor.takes_hints())
    }

    pub(crate) fn reset_stats(&mut self) {
        self.reset_device_counts();
        let slots = self.pool.shape().slots();
        let layers =
            self.directory.layers().iter().map(|e| LayerStats { layer: e.layer, ..Default::default() });
        self.stats = CacheStats {
            slots,
            least_slots: slots,
            most_slots: slots,
            staging_slots: self.pool.shape().staging,
            ring_slots: self.ring.slots(),
            pinned_slots: self.pool.kept().len(),
            slot_bytes: self.slot_bytes,
            records: self.directory.len(),
            layers: layers.collect(),
            // Times count from here; see `stats`.
            time: self.backend.transfer_time(),
            ..Default::default()
        };
    }

    /// Runs one layer's step and returns what it ends with; `None` for no assignment.
    pub(crate) fn step(&mut self, step: Step<'_>) -> Result<Option<Tensor>> {
        self.reserve(&step.work)?;
        self.step_reserved(step)
    }

    /// The same, once [`Self::reserve`] has been called for its work.
    pub(crate) fn step_reserved(&mut self, step: Step<'_>) -> Result<Option<Tensor>> {
        self.guarded(|this| this.try_step(step))
    }

    /// Memory for a step that the host drives, from the slots where there is no other. Nothing that counts has changed
    /// where there is too little.
    pub(crate) fn reserve(&mut self, work: &Work<'_>) -> Result<()> {
        self.refuse_within_token()?;
        self.follow_page_locking()?;
        self.host_owns()?;
        self.with_memory(|this| this.backend.reserve(work))
    }

    fn try_step(&mut self, step: Step<'_>) -> Result<Option<Tensor>> {
        let Step { layer, needs, choices, top_k, guess, covers, work, finish } = step;
        let seen = Seen { layer, choices, top_k, guess };
        let set: Vec<RecordIndex> = needs.iter().map(|n| n.record).collect();
        if self.rules.pin_before_victims {
            self.pool.pin(set.iter().copied());
        }
        self.teach(seen);
        self.drop_stale(layer);
        let keep = self.most_recent(layer, &needs);
        let mut split = self.split(layer, needs)?;
        if let Some(prefetch) = self.prefetch.as_mut() {
            prefetch.judge(layer, &split);
        }
        let ring = self.passes_the_ring(&split);
        if ring {
            self.send_to_ring(layer, &mut split)?;
        } else if self.rules.fills_before_hits {
            self.send_wave(layer, &mut split)?;
        }
        self.prefetch_at(PrefetchTrigger::AfterRouting, seen)?;

        match finish {
            Finish::Result(_) => self.backend.begin(work)?,
            Finish::Rows([]) => {}
            Finish::Rows(_) => self.backend.begin_rows(work)?,
        }
        let waves = ring || !split.missing.is_empty();
        let mut done = Vec::new();
        if ring {
            self.run_ring(layer, &keep, &mut split, &mut done)?;
        }
        self.run(std::mem::take(&mut split.hits), waves, &mut done)?;
        self.prefetch_at(PrefetchTrigger::MidLayer, seen)?;
        if !split.late.is_empty() && split.in_flight.is_empty() {
            self.run(std::mem::take(&mut split.late), waves, &mut done)?;
        }
        loop {
            self.send_wave(layer, &mut split)?;
            let Some((ticket, mut items)) = split.in_flight.pop_front() else { break };
            self.compute_waits(ticket)?;
            // Records on their way run with the first misses: one launch, and the link had time to bring both.
            items.append(&mut split.late);
            self.run(items, waves, &mut done)?;
        }
        self.prefetch_at(PrefetchTrigger::EndOfLayer, seen)?;
        self.stream_ahead(layer, covers)?;
        let result = match finish {
            Finish::Result(others) => {
                others.iter().try_for_each(|o| self.backend.accept(&o.assignments, &o.rows))?;
                Some(self.backend.finish()?)
            }
            Finish::Rows([]) => None,
            Finish::Rows(assignments) => Some(self.backend.finish_rows(assignments)?),
        };

        if !waves {
            self.mark_read(&done)?;
        }
        self.pool.unpin(set);
        let entry = &self.directory.layers()[layer];
        let range = entry.first..entry.first + entry.experts as u32;
        let record_bytes = entry.record_bytes as u64;
        self.count_unasked(layer, range.clone());
        for dropped in self.pool.unstage(range) {
            // What was served from its staging slot, because no cached record could leave, was not wasted.
            if done.iter().any(|(record, _)| *record == dropped) {
                continue;
            }
            self.stats.prefetch_wasted += 1;
            self.stats.layers[layer].prefetch_wasted += 1;
            self.stats.prefetch_wasted_bytes += record_bytes;
        }
        Ok(result)
    }

    /// Slots that the layer competes for.
    fn slots_of(&self, layer: usize) -> usize {
        self.pool.shape().partitions[self.pool.shape().partition_of[layer]]
    }

    /// Looks every member up, in order, and sorts them by what they still need. In a set that fits, the missing get their
    /// slots here, so that the policy sees the accesses in the order of first use, as a replay and a device do.
    fn split(&mut self, layer: usize, needs: Vec<Need>) -> Result<Split> {
        let mut split = Split { in_waves: needs.len() > self.slots_of(layer), ..Split::default() };
        // What goes in waves or through the ring is placed as it passes.
        let places = !split.in_waves && needs.iter().all(|n| self.ring.find(n.record).is_none());
        for staged in self.pool.staged().to_vec() {
            if let Some(Located { slot, loading: true, .. }) = self.pool.locate(staged)
                && self.backend.is_done(self.clocks[slot.0 as usize].filled)?
            {
                self.pool.arrived(slot);
            }
        }
        let accesses = needs.len() as u64;
        let (mut hits, mut late, mut pinned) = (0, 0, 0);
        let mut arrived = HashMap::new();
        for need in needs {
            self.uses[need.record.0 as usize] += 1;
            match self.pool.locate(need.record) {
                None => match self.in_ring(need.record, &mut arrived)? {
                    None => {
                        let slot = if places { self.pool.place(layer, need.record) } else { None };
                        split.missing.push_back(Missing { need, slot });
                    }
                    Some(arrived) => {
                        *(if arrived { &mut hits } else { &mut late }) += 1;
                        self.stats.prefetch_used += 1;
                        self.stats.layers[layer].prefetch_used += 1;
                        split.streamed.insert(need.record, need);
                    }
                },
                Some(located) => {
                    if located.staged {
                        self.stats.prefetch_used += 1;
                        self.stats.layers[layer].prefetch_used += 1;
                        self.pool.promote(layer, need.record);
                    } else {
                        self.count_early(layer, need.record);
                        self.pool.hit(layer, need.record);
                    }
                    if located.loading {
                        late += 1;
                        split.late.push(need.at(located.slot));
                    } else {
                        hits += 1;
                        pinned += u64::from(self.pool.is_kept(need.record));
                        split.hits.push(need.at(located.slot));
                    }
                }
            }
        }
        let counts = &mut self.stats.layers[layer];
        counts.accesses += accesses;
        counts.hits += hits;
        counts.misses += accesses - hits;
        counts.late += late;
        counts.pinned_hits += pinned;
        self.stats.steps += 1;
        self.stats.steps_with_transfer += u64::from(!split.missing.is_empty());
        Ok(split)
    }

    /// Enqueues fills for as many of the missing as may be placed now, as one batch.
    fn send_wave(&mut self, layer: usize, split: &mut Split) -> Result<()> {
        if split.missing.is_empty() {
            return Ok(());
        }
        let slots = self.slots_of(layer);
        // Half of the slots at a time when all do not fit, so that one wave arrives while another computes.
        let most = if split.in_waves { slots.div_ceil(2) } else { usize::MAX };

        let (mut items, mut fills) = (Vec::new(), Vec::new());
        while fills.len() < most
            && let Some(Missing { need, slot }) = split.missing.pop_front()
        {
            let Some(slot) = slot.or_else(|| self.pool.place(layer, need.record)) else {
                split.missing.push_front(Missing { need, slot });
                break;
            };
            fills.push(Fill { record: need.record, slot });
            items.push(need.at(slot));
        }
        if fills.is_empty() {
            return match split.in_flight.is_empty() && split.hits.is_empty() && split.late.is_empty() {
                true => Err(Error::TooFewSlots { asked: slots, least: 1 }),
                false => Ok(()),
            };
        }
        let ticket = self.fill(Queue::Demand, &fills)?;
        self.stats.transfers += 1;
        self.stats.records_moved += fills.len() as u64;
        self.stats.bytes_moved += self.bytes(&fills);
        split.in_flight.push_back((ticket, items));
        Ok(())
    }

    fn bytes(&self, fills: &[Fill]) -> u64 {
        fills.iter().map(|f| self.directory.record_bytes(f.record) as u64).sum()
    }

    /// Enqueues a batch behind the last reader and the last writer of every slot in it.
    fn fill(&mut self, queue: Queue, fills: &[Fill]) -> Result<Ticket> {
        let mut latest = [0; 3];
        if self.rules.wait_before_refill {
            for clock in fills.iter().map(|f| self.clocks[f.slot.0 as usize]) {
                for ticket in [clock.filled, clock.read] {
                    let seq = &mut latest[ticket.queue.index()];
                    *seq = ticket.seq.max(*seq);
                }
            }
        }
        let after: Vec<Ticket> = Queue::ALL
            .into_iter()
            .filter(|&q| q != queue && latest[q.index()] > 0)
            .map(|q| Ticket { queue: q, seq: latest[q.index()] })
            .collect();
        let ticket = self.backend.fill(queue, &after, fills)?;
        fills.iter().for_each(|f| self.clocks[f.slot.0 as usize].filled = ticket);
        Ok(ticket)
    }

    fn compute_waits(&mut self, ticket: Ticket) -> Result<()> {
        let waited = &mut self.waited[ticket.queue.index()];
        if self.rules.wait_before_read && ticket.seq > *waited {
            *waited = ticket.seq;
            self.backend.wait(ticket)?;
        }
        Ok(())
    }

    /// Enqueues the work of `items`. In waves their slots may be refilled from here on.
    fn run(
        &mut self,
        items: Vec<WorkItem>,
        waves: bool,
        done: &mut Vec<(RecordIndex, SlotId)>,
    ) -> Result<()> {
        if items.is_empty() {
            return Ok(());
        }
        self.wait_and_run(&items)?;
        let served: Vec<_> = items.iter().map(|item| (item.record, item.slot)).collect();
        if waves {
            self.mark_read(&served)?;
            self.pool.unpin(served.iter().map(|s| s.0));
        }
        done.extend(served);
        Ok(())
    }

    fn wait_and_run(&mut self, items: &[WorkItem]) -> Result<()> {
        for item in items {
            self.compute_waits(self.clocks[item.slot.0 as usize].filled)?;
            if !self.ring.owns(item.slot) {
                self.pool.arrived(item.slot);
            }
        }
        self.backend.run(items)
    }

    fn mark_read(&mut self, served: &[(RecordIndex, SlotId)]) -> Result<()> {
        let ticket = self.backend.mark()?;
        served.iter().for_each(|(_, slot)| self.clocks[slot.0 as usize].read = ticket);
        Ok(())
    }

    /// Compares every resident slot with the store.
    ///
    /// # Errors
    /// [`Error::SlotDiffers`] for the first that differs.
    pub(crate) fn check_slots(&mut self, read: &Read<'_>) -> Result<usize> {
        self.host_owns()?;
        let all = self.resident();
        self.compare(&all, read)
    }

    /// Compares the next `most` resident slots with the store, going round. A difference stops the engine.
    ///
    /// # Errors
    /// [`Error::SlotDiffers`] or [`Error::KeyDiffers`] for the first that differs.
    pub(crate) fn check_sample(&mut self, most: usize, read: &Read<'_>) -> Result<usize> {
        if let Some(first) = &self.failed {
            return Err(Error::Stopped { first: first.clone() });
        }
        self.host_owns()?;
        let resident = self.resident();
        let from = resident.partition_point(|(slot, _)| slot.0 < self.next_check);
        let sample: Vec<_> = resident[from..].iter().chain(&resident[..from]).take(most).copied().collect();
        self.next_check = sample.last().map_or(0, |(slot, _)| slot.0 + 1);
        let compared = self.compare(&sample, read);
        if let Err(e) = &compared {
            self.failed = Some(e.to_string());
        }
        compared
    }

    /// Slots whose record has arrived, in order.
    fn resident(&self) -> Vec<(SlotId, RecordIndex)> {
        let states = self.pool.states().filter_map(|(slot, state)| match state {
            SlotState::Resident(record) => Some((slot, record)),
            _ => None,
        });
        states.collect()
    }

    fn compare(&mut self, slots: &[(SlotId, RecordIndex)], read: &Read<'_>) -> Result<usize> {
        self.backend.synchronize()?;
        let (mut have, mut want) = (Vec::new(), Vec::new());
        for &(slot, record) in slots {
            let id = self.directory.id(record);
            let found = self.pool.locate(record).map(|l| l.slot);
            if found != Some(slot) {
                return Err(Error::KeyDiffers { id, slot: slot.0, found: found.map(|s| s.0) });
            }
            want.resize(self.directory.record_bytes(record), 0);
            read(record, &mut want)?;
            let want = self.backend.slot_image(record, &want)?;
            have.resize(want.len(), 0);
            self.backend.read_slot(slot, &mut have)?;
            if let Some(at) = have.iter().zip(want.iter()).position(|(a, b)| a != b) {
                return Err(Error::SlotDiffers { id, slot: slot.0, at });
            }
        }
        Ok(slots.len())
    }
}

/// Reads a record from the store.
type Read<'a> = dyn Fn(RecordIndex, &mut [u8]) -> Result<()> + 'a;

/// The members of a step, by what they wait for.
#[derive(Default)]
struct Split {
    hits: Vec<WorkItem>,
    late: Vec<WorkItem>,
    missing: VecDeque<Missing>,
    in_flight: VecDeque<(Ticket, Vec<WorkItem>)>,
    /// The set is larger than the slots that its layer competes for.
    in_waves: bool,
    /// Those that come through the ring.
    streamed: HashMap<RecordIndex, Need>,
}

/// A member that is nowhere.
struct Missing {
    need: Need,
    /// Where it will be, as soon as that is decided.
    slot: Option<SlotId>,
}
