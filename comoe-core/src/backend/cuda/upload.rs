//! Small things that a step sends to the GPU (weights, work items): through a page-locked ring with an image of it on
//! the GPU, so that nothing is allocated and nobody waits. A kernel fetches them: a copy engine takes copies in the order
//! in which they became ready, and would fetch them behind a whole layer of a prompt's records.

use std::sync::Arc;

use cudarc::driver::{CudaEvent, CudaStream};

use super::context::{Doing, Gpu};
use super::kernels::Kernels;
use super::pinned::PinnedBuffer;
use super::slab::Slab;
use crate::error::Result;

const SEGMENTS: usize = 4;
const FIRST_BYTES: usize = 256 << 10;
const ALIGN: usize = 256;

/// A ring in segments. A segment is written again only when what was fetched out of it is there; all of them are behind
/// the event that was recorded when it was left.
pub(super) struct UploadRing {
    gpu: Gpu,
    kernels: Arc<Kernels>,
    host: PinnedBuffer,
    /// The same memory, as kernels see it.
    host_address: u64,
    device: Slab,
    segment_bytes: usize,
    segment: usize,
    used: usize,
    left: [CudaEvent; SEGMENTS],
}

impl UploadRing {
    pub(super) fn new(gpu: &Gpu, kernels: &Arc<Kernels>) -> Result<Self> {
        Self::with_segments(gpu, kernels, FIRST_BYTES)
    }

    fn with_segments(gpu: &Gpu, kernels: &Arc<Kernels>, segment_bytes: usize) -> Result<Self> {
        let bytes = SEGMENTS * segment_bytes;
        let event = || gpu.ctx.new_event(None).doing("making an event");
        let host = PinnedBuffer::new(gpu, bytes)
            .map_err(|e| gpu.explain_allocation("a page-locked buffer", bytes as u64, e))?;
        Ok(Self {
            gpu: gpu.clone(),
            kernels: kernels.clone(),
            host_address: host.device_address()?,
            host,
            device: Slab::new(gpu, "work items", bytes)?,
            segment_bytes,
            segment: 0,
            used: 0,
            left: [event()?, event()?, event()?, event()?],
        })
    }

    /// Bytes on the GPU.
    pub(super) fn bytes(&self) -> usize {
        self.device.bytes()
    }

    /// Makes room for uploads of `bytes` bytes, once per size: the old ring is dropped only when the GPU is done with it.
    pub(super) fn reserve(&mut self, bytes: usize) -> Result<()> {
        if bytes > self.segment_bytes {
            *self = Self::with_segments(&self.gpu, &self.kernels, bytes.next_power_of_two())?;
        }
        Ok(())
    }

    /// Enqueues the fetching of `bytes` bytes, which `write` puts in place, on `stream` (always the same one) and returns
    /// their address on the GPU, a multiple of 256. It holds for whatever is
    /// enqueued on `stream` before the next upload.
    pub(super) fn upload(
        &mut self,
        stream: &Arc<CudaStream>,
        bytes: usize,
        write: impl FnOnce(&mut [u8]),
    ) -> Result<u64> {
        self.reserve(bytes)?;
        if self.used + bytes > self.segment_bytes {
            self.left[self.segment].record(stream).doing("recording an event")?;
            self.segment = (self.segment + 1) % SEGMENTS;
            self.used = 0;
            self.left[self.segment].synchronize().doing("waiting for uploads")?;
        }
        let at = self.segment * self.segment_bytes + self.used;
        self.used += bytes.next_multiple_of(ALIGN);
        write(self.host.slice_mut(at, bytes));
        let address = self.device.address() + at as u64;
        // SAFETY: both lie inside the ring, whose pieces are multiples of 256 bytes; the host's is not written again
        // before the kernel is done (see `left`), and both outlive it because their drops wait for the GPU.
        unsafe { self.kernels.pull(stream, self.host_address + at as u64, address, bytes) }?;
        Ok(address)
    }
}

/// A slice of plain numbers as bytes.
pub(super) trait Plain: Copy {}
impl Plain for f32 {}
impl Plain for u32 {}
impl Plain for u64 {}
impl Plain for super::kernels::DeviceItem {}
impl Plain for super::kernels::GemmTile {}

pub(super) fn bytes_of<T: Plain>(slice: &[T]) -> &[u8] {
    // SAFETY: `Plain` types are numbers, or structs of them, without padding.
    unsafe { std::slice::from_raw_parts(slice.as_ptr().cast(), size_of_val(slice)) }
}
