//! The measurements of how two GPUs reach each other.

use std::time::Instant;

use cudarc::driver::sys;

use super::context::{Doing, Gpu, cuda_device};
use super::measure::PeerLink;
use super::peers::{can_reach, reach};
use super::pinned::PinnedBuffer;
use super::slab::Slab;
use super::timeline::{OwnStream, Rank};
use crate::error::Result;
use crate::machine::gb_per_s;

/// Bytes of one copy.
const COPY: usize = 64 << 20;
/// Copies of a measurement.
const COPIES: usize = 8;

/// One GPU, with memory and a stream for copies.
struct End {
    gpu: Gpu,
    stream: OwnStream,
    memory: Slab,
    locked: PinnedBuffer,
}

impl End {
    fn open(ordinal: usize) -> Result<Self> {
        let gpu = Gpu::of(cuda_device(ordinal)?.as_cuda_device()?);
        let locked = PinnedBuffer::new(&gpu, COPY)
            .map_err(|e| gpu.explain_allocation("a page-locked buffer", COPY as u64, e))?;
        let memory = Slab::new(&gpu, "a buffer", COPY)?;
        Ok(Self { stream: OwnStream::new(&gpu, Rank::First)?, memory, locked, gpu })
    }

    fn wait(&self) -> Result<()> {
        self.stream.get().synchronize().doing("measuring a copy")
    }

    fn to_host(&self, to: &PinnedBuffer) -> Result<()> {
        self.gpu.bind()?;
        let stream = self.stream.get().cu_stream();
        // SAFETY: both have `COPY` bytes and live until the stream was waited for; nobody reads what arrives.
        unsafe {
            sys::cuMemcpyDtoHAsync_v2(to.address().cast_mut().cast(), self.memory.address(), COPY, stream)
        }
        .result()
        .doing("measuring a copy")
    }

    fn fill_from(&self, from: &PinnedBuffer) -> Result<()> {
        self.gpu.bind()?;
        let stream = self.stream.get().cu_stream();
        // SAFETY: as above.
        unsafe { sys::cuMemcpyHtoDAsync_v2(self.memory.address(), from.address().cast(), COPY, stream) }
            .result()
            .doing("measuring a copy")
    }

    /// From this GPU's memory to the other's.
    fn to_peer(&self, to: &Self) -> Result<()> {
        self.gpu.bind()?;
        let (source, target) = (self.gpu.ctx.cu_ctx(), to.gpu.ctx.cu_ctx());
        let stream = self.stream.get().cu_stream();
        // SAFETY: as above, with two contexts that are open.
        unsafe {
            sys::cuMemcpyPeerAsync(to.memory.address(), target, self.memory.address(), source, COPY, stream)
        }
        .result()
        .doing("measuring a copy")
    }
}

/// GB/s of `COPIES` rounds that each move `bytes`, behind one that is not measured.
fn rate(bytes: usize, mut round: impl FnMut() -> Result<()>, wait: impl Fn() -> Result<()>) -> Result<f64> {
    round()?;
    wait()?;
    let start = Instant::now();
    (0..COPIES).try_for_each(|_| round())?;
    wait()?;
    Ok(gb_per_s((COPIES * bytes) as u64, start.elapsed()))
}

/// Measures how two GPUs reach each other; takes about a tenth of a second and 64 MiB of each one's memory.
///
/// # Errors
/// Whatever [`cuda_device`] refuses, and errors of the driver.
pub fn peer_link(first: usize, second: usize) -> Result<PeerLink> {
    let (a, b) = (End::open(first)?, End::open(second)?);
    let peer_access = can_reach(&a.gpu, &b.gpu)? && can_reach(&b.gpu, &a.gpu)?;
    let peer = match peer_access {
        true => {
            reach(&a.gpu, &b.gpu)?;
            reach(&b.gpu, &a.gpu)?;
            Some(rate(COPY, || a.to_peer(&b), || a.wait())?)
        }
        false => None,
    };
    let through_host = || {
        a.to_host(&a.locked)?;
        a.wait()?;
        b.fill_from(&a.locked)?;
        b.wait()
    };
    let both_at_once = || a.fill_from(&a.locked).and_then(|()| b.fill_from(&b.locked));
    Ok(PeerLink {
        first,
        second,
        peer_access,
        peer,
        host: rate(COPY, through_host, || Ok(()))?,
        both_from_host: rate(2 * COPY, both_at_once, || a.wait().and_then(|()| b.wait()))?,
    })
}
