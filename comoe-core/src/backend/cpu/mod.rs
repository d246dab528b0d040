//! The CPU backend: slots hold copies that a worker thread fills; compute runs in the calling thread (and rayon's).

mod activation;
mod copy;
mod decode;
mod kernels;
mod step;

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use candle_core::Tensor;

use self::copy::CopyQueues;
pub(super) use self::step::Step;
use super::{
    Backend, BackendInfo, BackendMemory, Chunks, Fill, Queue, SlotId, Ticket, TransferTime, Work, WorkItem,
};
use crate::error::{Error, Result};
use crate::expert::RECORD_ALIGN;
use crate::slab::{Slab, SlotRead};
use crate::store::{Directory, RecordSource};

/// Slots in main memory, filled from a [`RecordSource`] by a thread that is the CPU's copy stream.
///
/// Calls of [`Backend::run`] compute before they return, so a compute ticket is reached when it is handed out.
/// [`Backend::wait`] does not only wait: it copies what the worker has not started.
pub struct CpuBackend {
    source: Arc<dyn RecordSource>,
    queues: Option<CopyQueues>,
    step: Step,
    /// Runs so far: the compute queue's position.
    computed: u64,
    stalled: Duration,
}

impl CpuBackend {
    /// A backend that fills its slots from `source`.
    pub fn new(source: Arc<dyn RecordSource>) -> Self {
        Self { source, queues: None, step: Step::default(), computed: 0, stalled: Duration::ZERO }
    }

    fn queues(&self) -> Result<&CopyQueues> {
        self.queues.as_ref().ok_or_else(|| Error::BadArgument {
            what: "backend",
            reason: "no slots were allocated before its first use".to_owned(),
        })
    }

    fn check_computed(&self, ticket: Ticket) -> Result<()> {
        if ticket.queue != Queue::Compute || ticket.seq <= self.computed {
            return Ok(());
        }
        let reason = format!("{ticket:?} was never handed out, the last is {}", self.computed);
        Err(Error::BadArgument { what: "ticket", reason })
    }
}

impl Backend for CpuBackend {
    fn info(&self) -> BackendInfo {
        BackendInfo {
            device: "cpu".to_owned(),
            notes: vec![format!("{} compute threads, {}", rayon::current_num_threads(), crate::simd::name())],
            page_locked: None,
        }
    }

    fn allocate(&mut self, slots: usize, slot_bytes: usize) -> Result<()> {
        let refused = |reason| Err(Error::BadArgument { what: "pool", reason });
        if self.queues.is_some() {
            return refused("the slots are allocated already".to_owned());
        }
        if !slot_bytes.is_multiple_of(RECORD_ALIGN) {
            return refused(format!("slots of {slot_bytes} bytes are no multiple of {RECORD_ALIGN}"));
        }
        let slab = Slab::new(slots, slot_bytes)?;
        self.queues = Some(CopyQueues::new(self.source.clone(), slab)?);
        Ok(())
    }

    fn chunks(&self) -> std::result::Result<Chunks, String> {
        match &self.queues {
            _ if !cfg!(unix) => Err("this system takes no memory back in pieces".to_owned()),
            Some(queues) => Ok(queues.slab().chunks()),
            None => Err("slots are not allocated yet".to_owned()),
        }
    }

    fn set_unused(&mut self, unused: Range<u32>) -> Result<u64> {
        let queues = self.queues()?;
        let answer = queues.set_unused(unused.clone()).ok_or_else(|| {
            let reason =
                format!("slots {unused:?} of {} are in use, or are not there", queues.slab().slots());
            Error::BadArgument { what: "slots", reason }
        })?;
        answer.map_err(|e| Error::HostMemory { what: "giving slots back".to_owned(), reason: e.to_string() })
    }

    fn fill(&mut self, queue: Queue, after: &[Ticket], fills: &[Fill]) -> Result<Ticket> {
        after.iter().try_for_each(|&t| self.check_computed(t))?;
        self.queues()?.fill(queue, after, fills)
    }

    fn wait(&mut self, ticket: Ticket) -> Result<()> {
        self.check_computed(ticket)?;
        let stalled = self.queues()?.wait(ticket)?;
        self.stalled += stalled;
        Ok(())
    }

    fn mark(&mut self) -> Result<Ticket> {
        Ok(Ticket { queue: Queue::Compute, seq: self.computed })
    }

    fn is_done(&mut self, ticket: Ticket) -> Result<bool> {
        self.check_computed(ticket)?;
        self.queues()?.is_done(ticket)
    }

    fn begin(&mut self, work: Work<'_>) -> Result<()> {
        self.step.begin(work)
    }

    fn run(&mut self, items: &[WorkItem]) -> Result<()> {
        let Self { queues, step, computed, .. } = self;
        let queues = queues.as_ref().ok_or_else(|| Error::BadArgument {
            what: "backend",
            reason: "no slots were allocated before its first use".to_owned(),
        })?;
        let directory = self.source.directory();
        step.run(directory, items, |item| open(queues, directory, item))?;
        *computed += 1;
        Ok(())
    }

    fn copy(&mut self, slots: &[(SlotId, SlotId)]) -> Result<()> {
        let queues = self.queues()?;
        for &(from, to) in slots {
            if !queues.copy_slot(from, to) {
                return Err(unreadable(queues.slab(), from, queues.slab().slot_bytes()));
            }
        }
        self.computed += 1;
        Ok(())
    }

    fn finish(&mut self) -> Result<Tensor> {
        self.step.finish()
    }

    fn begin_rows(&mut self, work: Work<'_>) -> Result<()> {
        self.begin(work)
    }

    fn finish_rows(&mut self, assignments: &[u32]) -> Result<Tensor> {
        self.step.finish_rows(assignments)
    }

    fn accept(&mut self, assignments: &[u32], rows: &Tensor) -> Result<()> {
        self.step.accept(assignments, rows)
    }

    fn synchronize(&mut self) -> Result<()> {
        let stalled = self.queues()?.synchronize()?;
        self.stalled += stalled;
        Ok(())
    }

    fn read_slot(&mut self, slot: SlotId, out: &mut [u8]) -> Result<()> {
        let slab = self.queues()?.slab();
        let bytes = slab.read(slot).filter(|bytes| out.len() <= bytes.len());
        let bytes = bytes.ok_or_else(|| unreadable(slab, slot, out.len()))?;
        out.copy_from_slice(&bytes[..out.len()]);
        Ok(())
    }

    fn write_slot(&mut self, slot: SlotId, bytes: &[u8]) -> Result<()> {
        let slab = self.queues()?.slab();
        let out = slab.write(slot).filter(|out| bytes.len() <= out.len());
        let mut out = out.ok_or_else(|| unreadable(slab, slot, bytes.len()))?;
        out[..bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    fn memory(&self) -> BackendMemory {
        let slots = self.queues.as_ref().map_or(0, |q| q.slab().slots() * q.slab().slot_bytes());
        BackendMemory { slots: slots as u64, ..BackendMemory::default() }
    }

    fn transfer_time(&self) -> TransferTime {
        let copied = self.queues.as_ref().map_or_else(TransferTime::default, CopyQueues::time);
        TransferTime { stalled: self.stalled, ..copied }
    }
}

/// Borrows the slot of an item, which must hold the item's record.
fn open<'a>(queues: &'a CopyQueues, directory: &Directory, item: &WorkItem) -> Result<SlotRead<'a>> {
    let slot = queues.slab().read(item.slot);
    match slot.filter(|_| queues.holds(item.slot) == Some(item.record)) {
        Some(slot) => Ok(slot),
        None if item.record.0 as usize >= directory.len() => {
            Err(bad_run(format!("{:?} of {} records", item.record, directory.len())))
        }
        None => {
            let reason = match queues.holds(item.slot) {
                Some(other) => format!("slot {} holds {}", item.slot.0, directory.id(other)),
                None => format!("slot {} has not been filled", item.slot.0),
            };
            Err(bad_run(format!("{} was asked for, but {reason}", directory.id(item.record))))
        }
    }
}

fn bad_run(reason: String) -> Error {
    Error::BadArgument { what: "run", reason }
}

fn unreadable(slab: &Slab, slot: SlotId, bytes: usize) -> Error {
    let reason = format!(
        "{bytes} bytes of slot {} cannot be had: there are {} slots of {} bytes, and none may be in use",
        slot.0,
        slab.slots(),
        slab.slot_bytes()
    );
    Error::BadArgument { what: "slot", reason }
}

#[cfg(test)]
mod tests;
