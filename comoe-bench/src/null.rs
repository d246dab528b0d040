//! A backend that does nothing, to see what the bookkeeping around it costs.

use candle_core::{DType, Device, Tensor};
use comoe_core::Result;
use comoe_core::backend::{Backend, BackendInfo, Fill, Queue, SlotId, Ticket, TransferTime, Work, WorkItem};

/// Every copy is done at once, every result is the same tensor.
pub struct NullBackend {
    seq: [u64; 2],
    result: Tensor,
}

impl NullBackend {
    /// Hands out one zero.
    ///
    /// # Errors
    /// Those of candle.
    pub fn new() -> candle_core::Result<Self> {
        Ok(Self { seq: [0; 2], result: Tensor::zeros(1, DType::F32, &Device::Cpu)? })
    }
}

impl Backend for NullBackend {
    fn info(&self) -> BackendInfo {
        BackendInfo { device: "none".to_owned(), page_locked: None, notes: Vec::new() }
    }

    fn allocate(&mut self, _: usize, _: usize) -> Result<()> {
        Ok(())
    }

    fn fill(&mut self, queue: Queue, _: &[Ticket], _: &[Fill]) -> Result<Ticket> {
        let seq = &mut self.seq[usize::from(queue == Queue::Prefetch)];
        *seq += 1;
        Ok(Ticket { queue, seq: *seq })
    }

    fn wait(&mut self, _: Ticket) -> Result<()> {
        Ok(())
    }

    fn mark(&mut self) -> Result<Ticket> {
        Ok(Ticket::DONE)
    }

    fn is_done(&mut self, _: Ticket) -> Result<bool> {
        Ok(true)
    }

    fn begin(&mut self, _: Work<'_>) -> Result<()> {
        Ok(())
    }

    fn run(&mut self, _: &[WorkItem]) -> Result<()> {
        Ok(())
    }

    fn copy(&mut self, _: &[(SlotId, SlotId)]) -> Result<()> {
        Ok(())
    }

    fn finish(&mut self) -> Result<Tensor> {
        Ok(self.result.clone())
    }

    fn synchronize(&mut self) -> Result<()> {
        Ok(())
    }

    fn read_slot(&mut self, _: SlotId, out: &mut [u8]) -> Result<()> {
        out.fill(0);
        Ok(())
    }

    fn write_slot(&mut self, _: SlotId, _: &[u8]) -> Result<()> {
        Ok(())
    }

    fn transfer_time(&self) -> TransferTime {
        TransferTime::default()
    }
}
