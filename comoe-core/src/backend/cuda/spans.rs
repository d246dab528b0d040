//! Takes down when what is enqueued runs, while somebody wants to know: a pair of events around each piece of work of the
//! three queues; and what the kernels of device-driven steps read, which no event is beside, they take down themselves
//! (kernels/spans.cuh), by the clock that all of the GPU's multiprocessors share.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use cudarc::driver::{CudaEvent, CudaStream, sys};

use super::context::{Doing, Gpu};
use super::kernels::Kernels;
use super::pinned::PinnedBuffer;
use super::slab::Slab;
use super::span_log::{Logged, SPAN_BYTES, whole};
use super::upload::bytes_of;
use crate::backend::{DeviceSpan, DeviceSpans, Queue, SpanZero};
use crate::error::Result;
use crate::store::Directory;

/// Most spans of each of the two kinds.
const MOST_SPANS: usize = 100_000;
/// `sizeof(SpanLog)`, in front of the kernels' own.
const HEAD_BYTES: usize = 32;
/// Events that are there when it begins, so that nothing has to wait for their making; as many are kept.
const PREPARED: usize = 1 << 13;
/// How often the clocks are compared.
const COMPARISONS: usize = 16;

/// A backend's.
pub(super) struct Spans {
    gpu: Gpu,
    on: AtomicBool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    clock: Option<Clock>,
    timed: Vec<Timed>,
    spare: Vec<CudaEvent>,
    left_out: u64,
    /// What kernels take down. It stays, since graphs that were recorded meanwhile have its address.
    log: Option<Slab>,
}

/// A piece of work between two events.
struct Timed {
    queue: Queue,
    what: String,
    bytes: u64,
    begin: CudaEvent,
    end: CudaEvent,
}

fn event(gpu: &Gpu) -> Result<CudaEvent> {
    gpu.ctx.new_event(Some(sys::CUevent_flags::CU_EVENT_DEFAULT)).doing("making an event")
}

impl State {
    fn event(&mut self, gpu: &Gpu) -> Result<CudaEvent> {
        self.spare.pop().map_or_else(|| event(gpu), Ok)
    }
}

impl Spans {
    pub(super) fn new(gpu: &Gpu) -> Arc<Self> {
        Arc::new(Self { gpu: gpu.clone(), on: AtomicBool::new(false), state: Mutex::default() })
    }

    /// Nobody panics half-way through a change of the state.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn is_on(&self) -> bool {
        self.on.load(Ordering::Relaxed)
    }

    /// Address for kernels to take down what they read; 0 while nobody wants to know.
    pub(super) fn log(&self) -> u64 {
        match self.is_on() {
            true => self.state().log.as_ref().map_or(0, Slab::address),
            false => 0,
        }
    }

    /// Bytes on the GPU.
    pub(super) fn bytes(&self) -> usize {
        self.state().log.as_ref().map_or(0, Slab::bytes)
    }

    /// Before a piece of work is enqueued on `stream`. `None` while nobody wants to know, and while a graph is recorded, in
    /// which such an event would be none.
    pub(super) fn begin(&self, stream: &CudaStream) -> Result<Option<CudaEvent>> {
        if !self.is_on() {
            return Ok(None);
        }
        let status = stream.capture_status().doing("asking for a stream's state")?;
        if status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE {
            return Ok(None);
        }
        let begin = self.state().event(&self.gpu)?;
        begin.record(stream).doing("recording an event")?;
        Ok(Some(begin))
    }

    /// Behind it.
    pub(super) fn end(
        &self,
        stream: &CudaStream,
        begin: Option<CudaEvent>,
        queue: Queue,
        bytes: u64,
        what: impl FnOnce() -> String,
    ) -> Result<()> {
        let Some(begin) = begin else { return Ok(()) };
        let mut state = self.state();
        if state.timed.len() == MOST_SPANS {
            state.left_out += 1;
            return Ok(());
        }
        let end = state.event(&self.gpu)?;
        end.record(stream).doing("recording an event")?;
        state.timed.push(Timed { queue, what: what(), bytes, begin, end });
        Ok(())
    }

    /// Begins anew, while every queue is empty; hands out the moment from which times count.
    pub(super) fn start(&self, kernels: &Kernels, stream: &Arc<CudaStream>) -> Result<SpanZero> {
        let mut state = self.state();
        while state.spare.len() < PREPARED {
            state.spare.push(event(&self.gpu)?);
        }
        if state.log.is_none() {
            let bytes = HEAD_BYTES + MOST_SPANS * SPAN_BYTES;
            state.log = Some(Slab::new(&self.gpu, "times of what kernels read", bytes)?);
        }
        if let Some(log) = &state.log {
            log.write(0, bytes_of(&[0, MOST_SPANS as u32]))?;
        }
        let clock = Clock::new(&self.gpu, kernels, stream)?;
        let zero = SpanZero { host: clock.zero, device_ns: clock.origin_ns };
        (state.timed, state.left_out, state.clock) = (Vec::new(), 0, Some(clock));
        self.on.store(true, Ordering::Relaxed);
        Ok(zero)
    }

    /// Ends it, once every queue is empty.
    pub(super) fn take(&self, directory: &Directory) -> Result<DeviceSpans> {
        self.on.store(false, Ordering::Relaxed);
        let mut state = self.state();
        let (Some(clock), Some(log)) = (state.clock.take(), &state.log) else {
            return Ok(DeviceSpans::default());
        };
        let mut head = [0; 4];
        log.read(0, &mut head)?;
        // Graphs that were recorded meanwhile find no room from here on.
        log.write(0, bytes_of(&[0u32; 2]))?;
        let taken = u32::from_le_bytes(head) as usize;
        let mut bytes = vec![0; taken.min(MOST_SPANS) * SPAN_BYTES];
        log.read(HEAD_BYTES, &mut bytes)?;
        let left_out = std::mem::take(&mut state.left_out) + taken.saturating_sub(MOST_SPANS) as u64;
        let logged = whole(bytes.as_chunks().0.iter().map(Logged::read));
        let mut list: Vec<DeviceSpan> =
            logged.iter().map(|span| span.told(directory, clock.origin_ns)).collect();
        for Timed { queue, what, bytes, begin: first, end: last } in std::mem::take(&mut state.timed) {
            let (begin, end) = (clock.us_at(&first)?, clock.us_at(&last)?);
            list.push(DeviceSpan { queue, what, begin, end, bytes });
            state.spare.extend([first, last]);
        }
        state.spare.truncate(PREPARED);
        list.sort_by(|a, b| a.begin.total_cmp(&b.begin));
        Ok(DeviceSpans { list, left_out, clock_error: clock.error_us })
    }
}

/// One moment, by events, by the clock of the kernels and by the host's.
struct Clock {
    origin: CudaEvent,
    origin_ns: u64,
    zero: Instant,
    /// How far `origin` and `origin_ns` may be apart.
    error_us: f64,
}

impl Clock {
    /// A kernel says what time it is, between two events and while the host waits for it; often, since each of the three
    /// says in which time another one's moment was, and the shortest of all such times are the best.
    fn new(gpu: &Gpu, kernels: &Kernels, stream: &Arc<CudaStream>) -> Result<Self> {
        let word =
            PinnedBuffer::new(gpu, 8).map_err(|e| gpu.explain_allocation("a page-locked word", 8, e))?;
        let (origin, before, after) = (event(gpu)?, event(gpu)?, event(gpu)?);
        origin.record(stream).doing("recording an event")?;
        let (mut least, mut most) = (u64::MIN, u64::MAX);
        let mut closest: Option<(Duration, Instant, u64)> = None;
        for _ in 0..COMPARISONS {
            let start = Instant::now();
            before.record(stream).doing("recording an event")?;
            // SAFETY: 8 bytes of page-locked memory, aligned by the page, that live until the kernel is done.
            unsafe { kernels.tell_time(stream, word.device_address()?) }?;
            after.record(stream).doing("recording an event")?;
            after.synchronize().doing("waiting for the GPU's clock")?;
            let took = start.elapsed();
            // SAFETY: the kernel that writes it is done.
            let now = unsafe { word.address().cast::<u64>().read_volatile() };
            let since = |event| {
                let ms = origin.elapsed_ms(event).doing("timing")?;
                Ok::<_, crate::Error>((f64::from(ms) * 1e6) as u64)
            };
            least = least.max(now.saturating_sub(since(&after)?));
            most = most.min(now.saturating_sub(since(&before)?));
            if closest.is_none_or(|(shortest, ..)| took < shortest) {
                closest = Some((took, start + took / 2, now));
            }
        }
        // Ticks may make the one a little greater than the other.
        let origin_ns = least.min(most) + least.abs_diff(most) / 2;
        let zero = closest.map_or_else(Instant::now, |(_, at, now)| {
            at.checked_sub(Duration::from_nanos(now.saturating_sub(origin_ns))).unwrap_or(at)
        });
        Ok(Self { origin, origin_ns, zero, error_us: least.abs_diff(most) as f64 / 2e3 })
    }

    fn us_at(&self, event: &CudaEvent) -> Result<f64> {
        Ok(1e3 * f64::from(self.origin.elapsed_ms(event).doing("timing")?))
    }
}
