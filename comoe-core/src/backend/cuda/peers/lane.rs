//! Tensors from one GPU to another, in the order of both streams.

use std::sync::Arc;

use candle_core::{Device, Tensor};
use cudarc::driver::CudaEvent;

use super::{Path, Space};
use crate::backend::cuda::compute::address_of;
use crate::backend::cuda::context::{Doing, Gpu};
use crate::backend::cuda::kernels::Kernels;
use crate::error::Result;

/// One end.
#[derive(Clone)]
pub(super) struct Side {
    pub(super) gpu: Gpu,
    pub(super) kernels: Arc<Kernels>,
}

/// A way from one GPU to another, through memory that both see.
pub(super) struct Lane {
    from: Side,
    to: Side,
    path: Path,
    /// As large as the largest tensor so far.
    space: Option<Space>,
    /// What was sent last has left, and has arrived.
    sent: CudaEvent,
    taken: CudaEvent,
}

impl Lane {
    pub(super) fn new(from: Side, to: Side, path: Path) -> Result<Self> {
        let event = |side: &Side| side.gpu.ctx.new_event(None).doing("making an event");
        Ok(Self { sent: event(&from)?, taken: event(&to)?, from, to, path, space: None })
    }

    /// Whether what was sent last has left.
    pub(super) fn is_sent(&self) -> Result<bool> {
        self.from.gpu.bind()?;
        self.sent.try_is_complete().doing("asking for an event")
    }

    /// `tensor` on the other GPU.
    pub(super) fn carry(&mut self, tensor: &Tensor) -> Result<Tensor> {
        let (source, target) = (self.from.gpu.candle_stream(), self.to.gpu.candle_stream());
        let device = Device::Cuda(self.to.gpu.device.clone());
        if tensor.device().same_device(&device) {
            self.sent.record(&source).doing("recording an event")?;
            return Ok(tensor.clone());
        }
        let mut tensor = tensor.contiguous()?;
        if !address_of(&tensor, &source)?.is_multiple_of(16) {
            tensor = tensor.force_contiguous()?;
        }
        let bytes = tensor.elem_count() * tensor.dtype().size_in_bytes();
        let address = match self.space.as_ref().filter(|s| s.bytes() >= bytes) {
            Some(space) => space.address()?,
            None => {
                // Both ends are done with the old one when it is dropped.
                self.space = None;
                let space = Space::new(self.path, &self.to.gpu, bytes)?;
                let address = space.address()?;
                self.space = Some(space);
                address
            }
        };
        self.from.gpu.bind()?;
        source.wait(&self.taken).doing("waiting for an event")?;
        let from = address_of(&tensor, &source)?;
        // SAFETY: candle's allocations are multiples of 16 bytes (256 in fact), and the space is as long; it was read to
        // its end (`taken`) before it is written again.
        unsafe { self.from.kernels.pull(&source, from, address, bytes) }?;
        self.sent.record(&source).doing("recording an event")?;

        self.to.gpu.bind()?;
        // SAFETY: every element is written before anyone reads one.
        let arrived = unsafe { Tensor::empty(tensor.shape(), tensor.dtype(), &device) }?;
        target.wait(&self.sent).doing("waiting for an event")?;
        let to = address_of(&arrived, &target)?;
        // SAFETY: as above; it was written before (`sent`).
        unsafe { self.to.kernels.pull(&target, address, to, bytes) }?;
        self.taken.record(&target).doing("recording an event")?;
        Ok(arrived)
    }
}
