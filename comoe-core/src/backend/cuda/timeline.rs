//! Streams, and the tickets on them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use cudarc::driver::{CudaEvent, CudaStream, result, sys};

use super::context::{Doing, Gpu};
use crate::backend::{Queue, Ticket};
use crate::error::Result;

/// Events of one queue. A ticket older than the ring is answered by the oldest event in it: of an in-order queue that
/// is later, never earlier.
const RING: u64 = 256;

/// How a stream ranks beside others. Ranks order kernels, not copies.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Rank {
    First,
    Last,
}

/// A stream of this crate's own, which does not synchronise with the null stream.
pub(super) struct OwnStream {
    gpu: Gpu,
    stream: Arc<CudaStream>,
}

impl OwnStream {
    pub(super) fn new(gpu: &Gpu, rank: Rank) -> Result<Self> {
        gpu.bind()?;
        let (least, greatest) = result::stream::get_priority_range().doing("asking for stream priorities")?;
        let priority = if rank == Rank::First { greatest } else { least };
        let raw = result::stream::create_with_priority(result::stream::StreamKind::NonBlocking, priority)
            .doing("making a stream")?;
        // Wrapped and not made by cudarc, which would start tracking events of every tensor once it owns a stream.
        // SAFETY: `raw` was just made in this context, and `Drop` destroys it after waiting for it.
        let stream = unsafe { gpu.ctx.wrap_borrowed_stream(raw) };
        Ok(Self { gpu: gpu.clone(), stream })
    }

    pub(super) fn get(&self) -> &Arc<CudaStream> {
        &self.stream
    }
}

impl Drop for OwnStream {
    fn drop(&mut self) {
        self.gpu.ctx.record_err(self.stream.synchronize());
        // SAFETY: made in `new`, destroyed only here; clones of the wrapper do not outlive the backend's parts, which
        // are dropped before their streams.
        self.gpu.ctx.record_err(unsafe { result::stream::destroy(self.stream.cu_stream()) });
    }
}

/// Tickets of one queue, as events.
pub(super) struct Timeline {
    queue: Queue,
    events: Vec<CudaEvent>,
    recorded: AtomicU64,
}

impl Timeline {
    pub(super) fn new(gpu: &Gpu, queue: Queue) -> Result<Self> {
        let events =
            (0..RING).map(|_| gpu.ctx.new_event(None).doing("making an event")).collect::<Result<_>>()?;
        Ok(Self { queue, events, recorded: AtomicU64::new(0) })
    }

    /// Makes a ticket for everything on `stream` so far. Only whoever enqueues on the queue calls this.
    pub(super) fn record(&self, stream: &CudaStream) -> Result<Ticket> {
        let seq = self.recorded() + 1;
        self.events[(seq % RING) as usize].record(stream).doing("recording an event")?;
        self.recorded.store(seq, Ordering::Release);
        Ok(Ticket { queue: self.queue, seq })
    }

    /// The last ticket that was recorded.
    pub(super) fn recorded(&self) -> u64 {
        self.recorded.load(Ordering::Acquire)
    }

    /// An event that is reached no earlier than `seq`, which must have been recorded.
    fn event(&self, seq: u64) -> &CudaEvent {
        let oldest = (self.recorded() + 1).saturating_sub(RING);
        &self.events[(seq.max(oldest) % RING) as usize]
    }

    /// Makes `stream` wait for `seq`, which must have been recorded.
    pub(super) fn hold(&self, stream: &CudaStream, seq: u64) -> Result<()> {
        match seq {
            0 => Ok(()),
            _ => stream.wait(self.event(seq)).doing("waiting for an event"),
        }
    }

    /// Whether `seq`, which must have been recorded, has been reached.
    pub(super) fn is_done(&self, seq: u64) -> Result<bool> {
        match seq {
            0 => Ok(true),
            _ => self.event(seq).try_is_complete().doing("asking for an event"),
        }
    }

    /// Whether everything recorded so far has been reached.
    pub(super) fn is_idle(&self) -> Result<bool> {
        self.is_done(self.recorded())
    }
}

/// The timelines of the three queues.
pub(super) struct Timelines {
    pub(super) compute: Timeline,
    pub(super) demand: Timeline,
    pub(super) prefetch: Timeline,
}

impl Timelines {
    pub(super) fn new(gpu: &Gpu) -> Result<Self> {
        Ok(Self {
            compute: Timeline::new(gpu, Queue::Compute)?,
            demand: Timeline::new(gpu, Queue::Demand)?,
            prefetch: Timeline::new(gpu, Queue::Prefetch)?,
        })
    }

    pub(super) fn of(&self, queue: Queue) -> &Timeline {
        match queue {
            Queue::Compute => &self.compute,
            Queue::Demand => &self.demand,
            Queue::Prefetch => &self.prefetch,
        }
    }
}

/// Estimates how long a kind of work keeps a stream busy: every [`EVERY`]th piece of it is timed with two events, and
/// the sum is scaled by weight (bytes of a copy, 1 of a wait). Timing all of it would cost two driver calls a piece.
pub(super) struct Sampler {
    start: CudaEvent,
    end: CudaEvent,
    /// Weight of the piece that is being timed, while it is.
    pending: Option<u64>,
    /// Between [`Sampler::begin`] and [`Sampler::end`] of a piece that is timed.
    open: bool,
    pieces: u64,
    weight: u64,
    timed_weight: u64,
    timed: Duration,
}

const EVERY: u64 = 4;

impl Sampler {
    pub(super) fn new(gpu: &Gpu) -> Result<Self> {
        let event = || gpu.ctx.new_event(Some(sys::CUevent_flags::CU_EVENT_DEFAULT)).doing("making an event");
        Ok(Self {
            start: event()?,
            end: event()?,
            pending: None,
            open: false,
            pieces: 0,
            weight: 0,
            timed_weight: 0,
            timed: Duration::ZERO,
        })
    }

    /// Before a piece of work is enqueued on `stream`.
    pub(super) fn begin(&mut self, stream: &CudaStream) -> Result<()> {
        self.harvest()?;
        self.open = self.pending.is_none() && self.pieces.is_multiple_of(EVERY);
        self.pieces += 1;
        if self.open {
            self.start.record(stream).doing("recording an event")?;
        }
        Ok(())
    }

    /// Behind it; `weight` is its part in the whole.
    pub(super) fn end(&mut self, stream: &CudaStream, weight: u64) -> Result<()> {
        self.weight += weight;
        if std::mem::take(&mut self.open) {
            self.end.record(stream).doing("recording an event")?;
            self.pending = Some(weight);
        }
        Ok(())
    }

    fn harvest(&mut self) -> Result<()> {
        if let Some(weight) = self.pending
            && self.end.try_is_complete().doing("asking for an event")?
        {
            let ms = self.start.elapsed_ms(&self.end).doing("timing")?;
            self.timed += Duration::from_secs_f32(ms.max(0.0) / 1e3);
            self.timed_weight += weight;
            self.pending = None;
        }
        Ok(())
    }

    /// The estimate for everything so far.
    pub(super) fn total(&self) -> Duration {
        match self.timed_weight {
            0 => Duration::ZERO,
            timed => self.timed.mul_f64(self.weight as f64 / timed as f64),
        }
    }
}
