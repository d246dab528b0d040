//! The compute queue: on candle's own stream where every thread shares it, else on a stream of this crate's.
//!
//! A device made with `Device::new_cuda` has a stream per host thread, so two threads' work is unordered. Kernels of a
//! step then run on one stream of our own, which waits for the caller's stream when the step begins; when it ends, the
//! caller's stream waits for ours. So the cache is right on any device and from any thread.

use std::sync::Arc;
use std::time::Duration;

use candle_core::cuda_backend::CudaStorageSlice;
use candle_core::{Storage, Tensor};
use cudarc::driver::{CudaEvent, CudaStream, DevicePtr};

use super::context::{Doing, Gpu};
use super::timeline::{OwnStream, Rank, Sampler};
use crate::error::{Error, Result};

/// `CU_STREAM_PER_THREAD`: means another stream on every host thread.
const PER_THREAD: usize = 2;

pub(super) struct Compute {
    /// Where kernels go.
    stream: Arc<CudaStream>,
    own: Option<OwnStream>,
    entered: CudaEvent,
    left: CudaEvent,
    waits: Sampler,
}

impl Compute {
    pub(super) fn new(gpu: &Gpu) -> Result<Self> {
        let candle = gpu.candle_stream();
        let own = match candle.cu_stream() as usize {
            PER_THREAD => Some(OwnStream::new(gpu, Rank::First)?),
            _ => None,
        };
        let event = || gpu.ctx.new_event(None).doing("making an event");
        Ok(Self {
            stream: own.as_ref().map_or(candle, |own| own.get().clone()),
            own,
            entered: event()?,
            left: event()?,
            waits: Sampler::new(gpu)?,
        })
    }

    pub(super) fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// Whether the device gives every host thread a stream of its own.
    pub(super) fn is_apart(&self) -> bool {
        self.own.is_some()
    }

    /// What follows on this queue comes after everything on the caller's stream.
    pub(super) fn enter(&self, caller: &CudaStream) -> Result<()> {
        if self.is_apart() {
            self.entered.record(caller).doing("recording an event")?;
            self.stream.wait(&self.entered).doing("waiting for an event")?;
        }
        Ok(())
    }

    /// What follows on the caller's stream comes after everything on this queue.
    pub(super) fn leave(&self, caller: &CudaStream) -> Result<()> {
        if self.is_apart() {
            self.left.record(&self.stream).doing("recording an event")?;
            caller.wait(&self.left).doing("waiting for an event")?;
        }
        Ok(())
    }

    /// Enqueues a wait that `hold` makes, and times it now and then.
    pub(super) fn wait(&mut self, hold: impl FnOnce(&CudaStream) -> Result<()>) -> Result<()> {
        self.waits.begin(&self.stream)?;
        hold(&self.stream)?;
        self.waits.end(&self.stream, 1)
    }

    /// How long the queue has waited, estimated.
    pub(super) fn waited(&self) -> Duration {
        self.waits.total()
    }
}

/// Address of a contiguous tensor's first element; `stream` waits for its last tracked writer, and counts as a reader.
pub(super) fn address_of(tensor: &Tensor, stream: &CudaStream) -> Result<u64> {
    let (storage, layout) = tensor.storage_and_layout();
    let refuse = |reason: String| Err(Error::BadArgument { what: "tensor", reason });
    let Storage::Cuda(storage) = &*storage else {
        return refuse(format!("is on {:?}, not on the GPU", tensor.device().location()));
    };
    if !layout.is_contiguous() {
        return refuse("is not contiguous".to_owned());
    }
    use CudaStorageSlice as S;
    // The guard that comes with the address records an event where the device tracks them.
    let base = match &storage.slice {
        S::U8(s) => s.device_ptr(stream).0,
        S::U32(s) => s.device_ptr(stream).0,
        S::I16(s) => s.device_ptr(stream).0,
        S::I32(s) => s.device_ptr(stream).0,
        S::I64(s) => s.device_ptr(stream).0,
        S::BF16(s) => s.device_ptr(stream).0,
        S::F16(s) => s.device_ptr(stream).0,
        S::F32(s) => s.device_ptr(stream).0,
        S::F64(s) => s.device_ptr(stream).0,
        S::F8E4M3(s) => s.device_ptr(stream).0,
        _ => return refuse(format!("has the element type {:?}, which has no kernels", tensor.dtype())),
    };
    Ok(base + (layout.start_offset() * tensor.dtype().size_in_bytes()) as u64)
}
