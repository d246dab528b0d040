//! A simulated device, for tests: queues that run in any legal order, and a check of that order.
//!
//! Two independent nets. At enqueue, a vector clock per queue tells which work is ordered before which; reading a slot
//! without having waited for its fill, or refilling it without having waited for its readers, is reported at once and
//! in every run. And what is enqueued executes only when it must, in an order drawn from a seed, on real bytes, so
//! that a missing wait also changes the output for some seed when the check is switched off.

mod device;

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use candle_core::Tensor;

use super::cpu::Step;
use super::{
    Backend, BackendInfo, BackendMemory, Chunks, DeviceDriver, Fill, PageLocking, Queue, SlotId, Ticket,
    TransferTime, Work, WorkItem,
};
use crate::error::{Error, Result};
use crate::store::{RecordIndex, RecordSource};

/// Memory comes and goes in such pieces.
const CHUNK: usize = 1200;

/// Sequence numbers of each queue that are known to be reached.
type Clock = [u64; 3];

/// An entry of the operation log: what was enqueued, in program order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SimEvent {
    /// A batch of fills.
    Fill {
        /// Its queue.
        queue: Queue,
        /// Its records.
        records: Vec<RecordIndex>,
    },
    /// The compute queue waits.
    Wait(Ticket),
    /// Work on these records.
    Run(Vec<RecordIndex>),
}

/// Handle to the log of a [`SimBackend`] that a cache owns.
#[derive(Debug, Clone, Default)]
pub struct SimLog(Arc<Mutex<Vec<SimEvent>>>);

impl SimLog {
    /// Takes what was logged so far.
    pub fn take(&self) -> Vec<SimEvent> {
        std::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn push(&self, event: SimEvent) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(event);
    }
}

enum Op {
    Wait(Ticket),
    Fill(Fill),
    Run(Vec<WorkItem>),
    Copy(SlotId, SlotId),
    Mark,
}

#[derive(Clone, Copy)]
struct SlotAccess {
    filled: Ticket,
    read: u64,
    /// What it holds once everything enqueued so far is done.
    holds: Option<RecordIndex>,
}

/// Page-locking beside the steps, as they come to know of it.
#[derive(Clone, Copy)]
struct Locking {
    /// Records from here on are not locked yet.
    locked: u32,
    /// Records more at each look.
    step: u32,
    /// No record from here on is ever locked.
    most: u32,
    /// What kept it from going on, at that record.
    fails_at: Option<RecordIndex>,
    goes_on: bool,
}

/// The simulated device.
pub struct SimBackend {
    source: Arc<dyn RecordSource>,
    /// State of SplitMix64, which draws the next queue to run.
    seed: u64,
    check: bool,
    fail_fill: Option<RecordIndex>,
    /// Bytes of the device, where they are counted.
    memory: Option<u64>,
    /// Bytes beside the slots, by buffer.
    workspace: [u64; 2],
    /// Of so many records the device itself can bring all but one.
    host_only: Option<u32>,
    locking: Option<Locking>,
    log: SimLog,
    slab: Vec<u8>,
    slot_bytes: usize,
    queues: [VecDeque<Op>; 3],
    enqueued: Clock,
    reached: Clock,
    clocks: [Clock; 3],
    ticket_clocks: HashMap<(usize, u64), Clock>,
    slots: Vec<SlotAccess>,
    /// Slots without memory.
    unused: Range<u32>,
    step: Step,
    tables: device::Tables,
    failure: Option<Error>,
}

impl SimBackend {
    /// Runs in the order that `seed` draws.
    pub fn new(source: Arc<dyn RecordSource>, seed: u64) -> Self {
        Self {
            source,
            seed,
            check: true,
            fail_fill: None,
            memory: None,
            workspace: [0; 2],
            host_only: None,
            locking: None,
            log: SimLog::default(),
            slab: Vec::new(),
            slot_bytes: 0,
            queues: Default::default(),
            enqueued: [0; 3],
            reached: [0; 3],
            clocks: [[0; 3]; 3],
            ticket_clocks: HashMap::new(),
            slots: Vec::new(),
            unused: 0..0,
            step: Step::default(),
            tables: device::Tables::default(),
            failure: None,
        }
    }

    /// Switches the vector-clock check off, so that only the random order shows a missing wait.
    #[must_use]
    pub fn unchecked(mut self) -> Self {
        self.check = false;
        self
    }

    /// Makes the fill of `record` fail.
    #[must_use]
    pub fn failing_at(mut self, record: RecordIndex) -> Self {
        self.fail_fill = Some(record);
        self
    }

    /// Has so many bytes for slots and results in all: a step of `n` assignments needs a row of its input's size for each.
    #[must_use]
    pub fn with_memory(mut self, bytes: u64) -> Self {
        self.memory = Some(bytes);
        self
    }

    /// Leaves every record whose number is a multiple of `n` to the host: the driver on the device cannot read it.
    #[must_use]
    pub fn leaving_to_the_host(mut self, n: u32) -> Self {
        self.host_only = Some(n.max(1));
        self
    }

    /// Page-locks `step` records more each time that steps ask for news, and none from record `most` on.
    #[must_use]
    pub fn locking_later(mut self, step: u32, most: u32) -> Self {
        self.locking = Some(Locking { locked: 0, step, most, fails_at: None, goes_on: true });
        self
    }

    /// With [`Self::locking_later`]: cannot read `record` when its turn comes.
    #[must_use]
    pub fn locking_fails_at(mut self, record: RecordIndex) -> Self {
        if let Some(locking) = &mut self.locking {
            locking.fails_at = Some(record);
        }
        self
    }

    /// The operation log.
    pub fn log(&self) -> SimLog {
        self.log.clone()
    }

    /// SplitMix64 (Steele et al. 2014, OOPSLA).
    fn draw(&mut self) -> u64 {
        self.seed = self.seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.seed ^ (self.seed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn enqueue(&mut self, queue: Queue, op: Op) -> Ticket {
        let q = queue.index();
        self.enqueued[q] += 1;
        self.clocks[q][q] = self.enqueued[q];
        self.ticket_clocks.insert((q, self.enqueued[q]), self.clocks[q]);
        self.queues[q].push_back(op);
        Ticket { queue, seq: self.enqueued[q] }
    }

    fn enqueue_wait(&mut self, queue: Queue, ticket: Ticket) {
        if let Some(known) = self.ticket_clocks.get(&(ticket.queue.index(), ticket.seq)).copied() {
            let clock = &mut self.clocks[queue.index()];
            clock.iter_mut().zip(known).for_each(|(c, k)| *c = k.max(*c));
        }
        self.enqueue(queue, Op::Wait(ticket));
    }

    fn broken(&self, rule: &'static str, record: RecordIndex) -> Result<()> {
        match self.check {
            true => Err(Error::RuleBroken { rule, id: self.source.directory().id(record) }),
            false => Ok(()),
        }
    }

    /// The slab in chunks that are no multiple of a slot, so that the two straddle each other.
    fn cut(&self) -> Chunks {
        Chunks::new(self.slots.len(), self.slot_bytes, CHUNK, 1)
    }

    /// Bytes of the device's memory that are in use beside the slots.
    fn beside_slots(&self) -> u64 {
        self.workspace.iter().sum::<u64>() + self.tables.bytes
    }

    /// Bytes of the device's memory that are in use.
    fn taken(&self) -> u64 {
        self.cut().bytes_without(&self.unused) as u64 + self.beside_slots()
    }

    /// `record` is about to be written to `slot`, or read there.
    fn check_memory(&self, slot: SlotId, record: RecordIndex) -> Result<()> {
        match self.unused.contains(&slot.0) {
            true => self.broken("a slot was used whose memory was given up", record),
            false => Ok(()),
        }
    }

    /// Whether `ticket` is ordered before whatever is enqueued next on `queue`.
    fn ordered(&self, queue: Queue, ticket: Ticket) -> bool {
        self.clocks[queue.index()][ticket.queue.index()] >= ticket.seq
    }

    /// Runs the head of a randomly drawn queue. `false` when none can run.
    fn tick(&mut self) -> bool {
        let first = self.draw() as usize;
        for q in (0..Queue::ALL.len()).map(|i| (first + i) % Queue::ALL.len()) {
            if let Some(Op::Wait(ticket)) = self.queues[q].front()
                && self.reached[ticket.queue.index()] < ticket.seq
            {
                continue;
            }
            let Some(op) = self.queues[q].pop_front() else { continue };
            if let Err(e) = self.execute(op) {
                self.failure.get_or_insert(e);
            }
            self.reached[q] += 1;
            return true;
        }
        false
    }

    fn execute(&mut self, op: Op) -> Result<()> {
        match op {
            Op::Wait(_) | Op::Mark => Ok(()),
            Op::Fill(Fill { record, slot }) => {
                if self.fail_fill == Some(record) {
                    let id = self.source.directory().id(record);
                    return Err(Error::FillFailed { id, reason: "the simulated link broke".to_owned() });
                }
                let bytes = self.source.directory().record_bytes(record);
                self.source.read(record, &mut self.slab[slot.0 as usize * self.slot_bytes..][..bytes])
            }
            Op::Copy(from, to) => {
                let at = from.0 as usize * self.slot_bytes;
                self.slab.copy_within(at..at + self.slot_bytes, to.0 as usize * self.slot_bytes);
                Ok(())
            }
            Op::Run(items) => {
                let (slab, slot_bytes) = (&self.slab, self.slot_bytes);
                let open = |item: &WorkItem| Ok(&slab[item.slot.0 as usize * slot_bytes..][..slot_bytes]);
                self.step.run(self.source.directory(), &items, open)
            }
        }
    }

    fn run_until(&mut self, ticket: Ticket) -> Result<()> {
        while self.reached[ticket.queue.index()] < ticket.seq {
            if !self.tick() {
                let reason = "the queues wait for each other".to_owned();
                return Err(Error::BadArgument { what: "order of waits", reason });
            }
        }
        self.failure.take().map_or(Ok(()), Err)
    }
}

impl Backend for SimBackend {
    fn info(&self) -> BackendInfo {
        BackendInfo { device: "simulated".to_owned(), notes: Vec::new(), page_locked: None }
    }

    fn allocate(&mut self, slots: usize, slot_bytes: usize) -> Result<()> {
        // NaN in every format that has one: a slot that is read before its fill shows in the output.
        self.slab = vec![0xff; slots * slot_bytes];
        self.slot_bytes = slot_bytes;
        self.slots = vec![SlotAccess { filled: Ticket::DONE, read: 0, holds: None }; slots];
        Ok(())
    }

    fn chunks(&self) -> std::result::Result<Chunks, String> {
        Ok(self.cut())
    }

    fn set_unused(&mut self, unused: Range<u32>) -> Result<u64> {
        if let Some(record) = self.slots.iter().find_map(|s| s.holds)
            && Queue::ALL.iter().any(|q| self.reached[q.index()] < self.enqueued[q.index()])
        {
            self.broken("slots were given up before every queue was empty", record)?;
        }
        let chunks = self.cut();
        let (backed, memory) = (chunks.bytes_without(&unused) as u64, self.memory.unwrap_or(u64::MAX));
        if backed + self.beside_slots() > memory && backed > chunks.bytes_without(&self.unused) as u64 {
            let (device, what) = (self.info().device, "slots that come back".to_owned());
            let free = memory.saturating_sub(self.taken());
            let asked = backed - chunks.bytes_without(&self.unused) as u64;
            return Err(Error::OutOfDeviceMemory { device, what, asked, free, total: memory });
        }
        let gone = chunks.bytes(&chunks.within(&unused));
        self.slab[gone].fill(0xff);
        for slot in self.unused.clone().chain(unused.clone()) {
            self.slots[slot as usize].holds = None;
        }
        self.unused = unused.clone();
        Ok(chunks.bytes_without(&unused) as u64)
    }

    fn fill(&mut self, queue: Queue, after: &[Ticket], fills: &[Fill]) -> Result<Ticket> {
        self.log.push(SimEvent::Fill { queue, records: fills.iter().map(|f| f.record).collect() });
        for &ticket in after {
            self.enqueue_wait(queue, ticket);
        }
        for &fill in fills {
            self.check_memory(fill.slot, fill.record)?;
            let SlotAccess { filled, read, .. } = self.slots[fill.slot.0 as usize];
            if !self.ordered(queue, Ticket { queue: Queue::Compute, seq: read }) {
                self.broken("a slot was refilled before its last reader was done", fill.record)?;
            }
            if !self.ordered(queue, filled) {
                self.broken("a slot was refilled before its last fill was done", fill.record)?;
            }
            let filled = self.enqueue(queue, Op::Fill(fill));
            self.slots[fill.slot.0 as usize] = SlotAccess { filled, read: 0, holds: Some(fill.record) };
        }
        Ok(self.enqueue(queue, Op::Mark))
    }

    fn wait(&mut self, ticket: Ticket) -> Result<()> {
        self.log.push(SimEvent::Wait(ticket));
        self.enqueue_wait(Queue::Compute, ticket);
        Ok(())
    }

    fn mark(&mut self) -> Result<Ticket> {
        Ok(self.enqueue(Queue::Compute, Op::Mark))
    }

    fn is_done(&mut self, ticket: Ticket) -> Result<bool> {
        for _ in 0..self.draw() % 4 {
            self.tick();
        }
        Ok(self.reached[ticket.queue.index()] >= ticket.seq)
    }

    fn page_locking(&self) -> Option<PageLocking> {
        let locking = self.locking?;
        let directory = self.source.directory();
        let bytes = |records: u32| (0..records).map(|r| directory.record_bytes(RecordIndex(r)) as u64).sum();
        let (locked, total) = (bytes(locking.locked), bytes(directory.len() as u32));
        let took = (!locking.goes_on).then_some(Duration::ZERO);
        let why_partial = took.filter(|_| locked < total).map(|_| "the simulation ends it".to_owned());
        Some(PageLocking { locked, total, took, why_partial })
    }

    fn use_page_locked(&mut self) -> Result<bool> {
        let most = self.source.directory().len() as u32;
        let Some(locking) = &mut self.locking else { return Ok(false) };
        locking.locked = (locking.locked + locking.step).min(most).min(locking.most);
        if let Some(id) = locking.fails_at.filter(|r| r.0 < locking.locked) {
            let id = self.source.directory().id(id);
            return Err(Error::FillFailed { id, reason: "the simulated disk broke".to_owned() });
        }
        locking.goes_on = locking.locked < most.min(locking.most);
        Ok(locking.goes_on)
    }

    fn reserve(&mut self, work: &Work<'_>) -> Result<()> {
        let (Some(memory), Work::Ffn { x, weights, .. }) = (self.memory, work) else { return Ok(()) };
        // Two buffers of the same size, one after the other, as a GPU has more than one.
        let asked = 4 * (x.dim(1)? * weights.len()) as u64;
        for (i, what) in ["a step's hidden activations", "a step's results"].into_iter().enumerate() {
            let free = memory.saturating_sub(self.taken() - self.workspace[i]);
            if asked > free.max(self.workspace[i]) {
                let (device, what) = (self.info().device, what.to_owned());
                return Err(Error::OutOfDeviceMemory { device, what, asked, free, total: memory });
            }
            self.workspace[i] = self.workspace[i].max(asked);
        }
        Ok(())
    }

    fn begin(&mut self, work: Work<'_>) -> Result<()> {
        self.step.begin(work)
    }

    fn run(&mut self, items: &[WorkItem]) -> Result<()> {
        self.log.push(SimEvent::Run(items.iter().map(|i| i.record).collect()));
        for item in items {
            self.check_memory(item.slot, item.record)?;
            let SlotAccess { filled, holds, .. } = self.slots[item.slot.0 as usize];
            if holds != Some(item.record) {
                self.broken("work found another record in the slot of its own", item.record)?;
            }
            if !self.ordered(Queue::Compute, filled) {
                self.broken("a slot was read before its fill was done", item.record)?;
            }
        }
        let ticket = self.enqueue(Queue::Compute, Op::Run(items.to_vec()));
        items.iter().for_each(|item| self.slots[item.slot.0 as usize].read = ticket.seq);
        Ok(())
    }

    fn copy(&mut self, slots: &[(SlotId, SlotId)]) -> Result<()> {
        for &(from, to) in slots {
            let (source, target) = (self.slots[from.0 as usize], self.slots[to.0 as usize]);
            let Some(record) = source.holds else {
                return self.broken("an empty slot was copied", RecordIndex(0));
            };
            self.check_memory(to, record)?;
            if !self.ordered(Queue::Compute, source.filled) {
                self.broken("a slot was copied before its fill was done", record)?;
            }
            if !self.ordered(Queue::Compute, target.filled) {
                self.broken("a slot was overwritten before its last fill was done", record)?;
            }
            let ticket = self.enqueue(Queue::Compute, Op::Copy(from, to));
            self.slots[from.0 as usize].read = ticket.seq;
            self.slots[to.0 as usize] = SlotAccess { filled: ticket, read: 0, holds: Some(record) };
        }
        Ok(())
    }

    fn finish(&mut self) -> Result<Tensor> {
        let all = Ticket { queue: Queue::Compute, seq: self.enqueued[0] };
        self.run_until(all)?;
        self.step.finish()
    }

    fn begin_rows(&mut self, work: Work<'_>) -> Result<()> {
        self.begin(work)
    }

    fn finish_rows(&mut self, assignments: &[u32]) -> Result<Tensor> {
        let all = Ticket { queue: Queue::Compute, seq: self.enqueued[0] };
        self.run_until(all)?;
        self.step.finish_rows(assignments)
    }

    fn accept(&mut self, assignments: &[u32], rows: &Tensor) -> Result<()> {
        self.step.accept(assignments, rows)
    }

    fn synchronize(&mut self) -> Result<()> {
        for queue in Queue::ALL {
            self.run_until(Ticket { queue, seq: self.enqueued[queue.index()] })?;
        }
        Ok(())
    }

    fn read_slot(&mut self, slot: SlotId, out: &mut [u8]) -> Result<()> {
        out.copy_from_slice(&self.slab[slot.0 as usize * self.slot_bytes..][..out.len()]);
        Ok(())
    }

    fn write_slot(&mut self, slot: SlotId, bytes: &[u8]) -> Result<()> {
        self.slab[slot.0 as usize * self.slot_bytes..][..bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    fn memory(&self) -> BackendMemory {
        BackendMemory { slots: self.slab.len() as u64, ..BackendMemory::default() }
    }

    fn transfer_time(&self) -> TransferTime {
        TransferTime::default()
    }

    fn device_driver(&mut self) -> std::result::Result<&mut dyn DeviceDriver, String> {
        Ok(self)
    }
}
