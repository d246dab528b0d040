//! What ran when: as a Chrome trace, for chrome://tracing or ui.perfetto.dev.
//!
//! On the CPU host clocks are true times: a fill is the source's read, in the thread that copies, and work is the call
//! that computes. So both are taken from around the backend, and a run without a timeline has nothing of it in its way.
//! On a GPU a call says only when work was enqueued; there the cache says itself what ran when
//! ([`ExpertCache::begin_spans`]), and a replayed step where its parts began ([`Profile`]).

use std::borrow::Cow;
use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use candle_core::Tensor;
use comoe_core::ExpertCache;
use comoe_core::Result as CoreResult;
use comoe_core::backend::{
    Backend, BackendInfo, BackendMemory, Chunks, DeviceDriver, DeviceSpans, Fill, Queue, SlotId, SpanZero,
    Ticket, TransferTime, Work, WorkItem,
};
use comoe_core::store::{Directory, RecordIndex, RecordSource};
use comoe_models::Profile;
use serde_json::{Value, json};

use crate::error::{Error, Result};

/// A row of the picture.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Row {
    /// Tokens or prompts, whole.
    Forward,
    /// The experts' work, and waiting for records; of a step that a GPU replays, all parts.
    Compute,
    /// Records that a step waits for: filled, or read through by the kernels that multiply.
    Demand,
    /// Records ahead of time.
    Prefetch,
}

impl Row {
    /// All, from top to bottom.
    pub const ALL: [Self; 4] = [Self::Forward, Self::Compute, Self::Demand, Self::Prefetch];

    fn name(self) -> &'static str {
        match self {
            Self::Forward => "whole",
            Self::Compute => "compute",
            Self::Demand => "demand",
            Self::Prefetch => "prefetch",
        }
    }
}

/// Something that took time.
#[derive(Debug, Clone, PartialEq)]
pub struct Span {
    /// Where it is drawn.
    pub row: Row,
    /// What it was.
    pub what: String,
    /// When it began, us.
    pub begin: f64,
    /// How long it took, us.
    pub us: f64,
    /// Bytes that it moved or read, where they are known. What a kernel takes from staging has not moved for it.
    pub bytes: u64,
}

/// Takes down what runs, while it is told to.
#[derive(Debug)]
pub struct Timeline {
    zero: Instant,
    on: AtomicBool,
    notes: Mutex<Notes>,
}

#[derive(Debug, Default)]
struct Notes {
    spans: Vec<Span>,
    /// Fills that were asked for and have not begun, on demand and ahead. Of one record demand goes first, as in the CPU's
    /// copy queues.
    due: HashMap<RecordIndex, [u32; 2]>,
    /// When the device's times begin, while it takes any down.
    device_zero: Option<SpanZero>,
    left_out: u64,
    clock_error: f64,
}

impl Default for Timeline {
    fn default() -> Self {
        Self { zero: Instant::now(), on: AtomicBool::new(false), notes: Mutex::default() }
    }
}

impl Timeline {
    /// From here on everything is taken down.
    ///
    /// # Errors
    /// As [`ExpertCache::begin_spans`].
    pub fn begin(&self, cache: &ExpertCache) -> Result<()> {
        let zero = cache.begin_spans()?;
        self.notes().device_zero = zero;
        self.on.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Nothing any more.
    ///
    /// # Errors
    /// As [`ExpertCache::take_spans`].
    pub fn end(&self, cache: &ExpertCache) -> Result<()> {
        self.on.store(false, Ordering::Relaxed);
        let spans = cache.take_spans()?;
        self.add_spans(spans);
        Ok(())
    }

    /// Of a moment, which may be before this was made.
    fn us_of(&self, at: Instant) -> f64 {
        let us = |d: std::time::Duration| d.as_secs_f64() * 1e6;
        us(at.saturating_duration_since(self.zero)) - us(self.zero.saturating_duration_since(at))
    }

    fn add_spans(&self, spans: DeviceSpans) {
        let mut notes = self.notes();
        let Some(zero) = notes.device_zero.take() else { return };
        let zero = self.us_of(zero.host);
        notes.left_out += spans.left_out;
        notes.clock_error = notes.clock_error.max(spans.clock_error);
        notes.spans.extend(spans.list.into_iter().map(|span| Span {
            row: match span.queue {
                Queue::Compute => Row::Compute,
                Queue::Demand => Row::Demand,
                Queue::Prefetch => Row::Prefetch,
            },
            what: span.what,
            begin: zero + span.begin,
            us: span.end - span.begin,
            bytes: span.bytes,
        }));
    }

    /// Steps that were replayed since [`Self::begin`], part by part.
    pub fn add_steps(&self, profile: &Profile) {
        let mut notes = self.notes();
        let Some(zero) = notes.device_zero else { return };
        let us = |ns: Option<&u64>| {
            ns.map_or(0.0, |ns| ns.wrapping_sub(zero.device_ns) as i64 as f64 / 1e3) + self.us_of(zero.host)
        };
        let span = |row, what: &str, times: &[u64], bytes| {
            let (begin, end) = (us(times.first()), us(times.last()));
            Span { row, what: what.to_owned(), begin, us: end - begin, bytes }
        };
        for (n, times) in profile.steps.iter().enumerate() {
            notes.spans.push(span(Row::Forward, &format!("token {n}"), times, 0));
            let parts = times.windows(2).zip(&profile.parts);
            notes.spans.extend(parts.map(|(times, part)| span(Row::Compute, &part.what, times, part.bytes)));
        }
    }

    /// What must be known of the device's times, if there are any.
    pub fn note(&self) -> Option<String> {
        let notes = self.notes();
        let mut note = (notes.clock_error > 0.0)
            .then(|| format!("events and what kernels time themselves within {:.1} us", notes.clock_error));
        if notes.left_out > 0 {
            let left_out = format!("{} spans left out for want of room", notes.left_out);
            note = Some(note.map_or(left_out.clone(), |note| format!("{note}; {left_out}")));
        }
        note
    }

    /// Something that began at `start` and ends now.
    pub fn add(&self, row: Row, what: impl FnOnce() -> String, start: Instant) {
        self.add_bytes(row, what, start, 0);
    }

    fn add_bytes(&self, row: Row, what: impl FnOnce() -> String, start: Instant, bytes: u64) {
        if self.on.load(Ordering::Relaxed) {
            let us = start.elapsed().as_secs_f64() * 1e6;
            let begin = self.us_of(start);
            self.notes().spans.push(Span { row, what: what(), begin, us, bytes });
        }
    }

    /// What was taken down, in the order of its begin.
    pub fn spans(&self) -> Vec<Span> {
        let mut spans = self.notes().spans.clone();
        spans.sort_by(|a, b| a.begin.total_cmp(&b.begin));
        spans
    }

    /// Nobody panics half-way through a change of the notes.
    fn notes(&self) -> MutexGuard<'_, Notes> {
        self.notes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A source whose reads are taken down as the fills that [`Self::backend`] was asked for.
    pub fn source(self: &Arc<Self>, inner: Arc<dyn RecordSource>) -> Arc<dyn RecordSource> {
        Arc::new(TimedSource { inner, timeline: self.clone() })
    }

    /// A backend whose work is taken down. It must be the CPU's, and read from [`Self::source`].
    pub fn backend(self: &Arc<Self>, inner: Box<dyn Backend>) -> Box<dyn Backend> {
        Box::new(TimedBackend { inner, timeline: self.clone() })
    }

    fn due(&self, queue: Queue, fills: &[Fill]) {
        let mut notes = self.notes();
        for fill in fills {
            notes.due.entry(fill.record).or_default()[usize::from(queue == Queue::Prefetch)] += 1;
        }
    }

    /// The queue of a fill that begins.
    fn begun(&self, record: RecordIndex) -> Option<Row> {
        let mut notes = self.notes();
        let due = notes.due.get_mut(&record)?;
        let at = due.iter().position(|n| *n > 0)?;
        due[at] -= 1;
        Some([Row::Demand, Row::Prefetch][at])
    }
}

struct TimedSource {
    inner: Arc<dyn RecordSource>,
    timeline: Arc<Timeline>,
}

impl RecordSource for TimedSource {
    fn directory(&self) -> &Directory {
        self.inner.directory()
    }

    fn read(&self, record: RecordIndex, out: &mut [u8]) -> CoreResult<()> {
        let row = self.timeline.begun(record);
        let start = Instant::now();
        self.inner.read(record, out)?;
        if let Some(row) = row {
            let what = || self.directory().id(record).to_string();
            self.timeline.add_bytes(row, what, start, out.len() as u64);
        }
        Ok(())
    }

    fn announce(&self, records: &mut dyn Iterator<Item = RecordIndex>, ahead: bool) {
        self.inner.announce(records, ahead);
    }
}

struct TimedBackend {
    inner: Box<dyn Backend>,
    timeline: Arc<Timeline>,
}

impl Backend for TimedBackend {
    fn info(&self) -> BackendInfo {
        self.inner.info()
    }

    fn allocate(&mut self, slots: usize, slot_bytes: usize) -> CoreResult<()> {
        self.inner.allocate(slots, slot_bytes)
    }

    fn chunks(&self) -> std::result::Result<Chunks, String> {
        self.inner.chunks()
    }

    fn set_unused(&mut self, unused: Range<u32>) -> CoreResult<u64> {
        self.inner.set_unused(unused)
    }

    fn reserve(&mut self, work: &Work<'_>) -> CoreResult<()> {
        self.inner.reserve(work)
    }

    fn fill(&mut self, queue: Queue, after: &[Ticket], fills: &[Fill]) -> CoreResult<Ticket> {
        self.timeline.due(queue, fills);
        self.inner.fill(queue, after, fills)
    }

    fn wait(&mut self, ticket: Ticket) -> CoreResult<()> {
        if self.inner.is_done(ticket)? {
            return self.inner.wait(ticket);
        }
        let start = Instant::now();
        self.inner.wait(ticket)?;
        self.timeline.add(Row::Compute, || "wait for records".to_owned(), start);
        Ok(())
    }

    fn memory(&self) -> BackendMemory {
        self.inner.memory()
    }

    fn mark(&mut self) -> CoreResult<Ticket> {
        self.inner.mark()
    }

    fn is_done(&mut self, ticket: Ticket) -> CoreResult<bool> {
        self.inner.is_done(ticket)
    }

    fn begin(&mut self, work: Work<'_>) -> CoreResult<()> {
        self.inner.begin(work)
    }

    fn run(&mut self, items: &[WorkItem]) -> CoreResult<()> {
        let start = Instant::now();
        self.inner.run(items)?;
        let what = || {
            let rows: usize = items.iter().map(|i| i.assignments.len()).sum();
            format!("{} experts, {rows} rows", items.len())
        };
        self.timeline.add(Row::Compute, what, start);
        Ok(())
    }

    fn copy(&mut self, slots: &[(SlotId, SlotId)]) -> CoreResult<()> {
        let start = Instant::now();
        self.inner.copy(slots)?;
        self.timeline.add(Row::Compute, || format!("{} slots copied", slots.len()), start);
        Ok(())
    }

    fn finish(&mut self) -> CoreResult<Tensor> {
        let start = Instant::now();
        let y = self.inner.finish()?;
        self.timeline.add(Row::Compute, || "sum".to_owned(), start);
        Ok(y)
    }

    fn synchronize(&mut self) -> CoreResult<()> {
        self.inner.synchronize()
    }

    fn read_slot(&mut self, slot: SlotId, out: &mut [u8]) -> CoreResult<()> {
        self.inner.read_slot(slot, out)
    }

    fn write_slot(&mut self, slot: SlotId, bytes: &[u8]) -> CoreResult<()> {
        self.inner.write_slot(slot, bytes)
    }

    fn slot_image<'a>(&self, record: RecordIndex, stored: &'a [u8]) -> CoreResult<Cow<'a, [u8]>> {
        self.inner.slot_image(record, stored)
    }

    fn transfer_time(&self) -> TransferTime {
        self.inner.transfer_time()
    }

    fn device_driver(&mut self) -> std::result::Result<&mut dyn DeviceDriver, String> {
        self.inner.device_driver()
    }
}

/// Lines of a row on which nothing overlaps: two threads may copy at once. By span, its line.
fn lines(spans: &[&Span]) -> Vec<usize> {
    let mut free_from: Vec<f64> = Vec::new();
    let line = |span: &&Span| {
        let line = free_from.iter().position(|t| *t <= span.begin).unwrap_or(free_from.len());
        if line == free_from.len() {
            free_from.push(0.0);
        }
        free_from[line] = span.begin + span.us;
        line
    };
    spans.iter().map(line).collect()
}

/// The trace of named runs, one "process" each, whose spans are in the order of their begin. Each has its four rows, empty
/// or not, and more lines of a row where two threads were at it at once.
pub fn chrome_trace(runs: &[(String, Vec<Span>)]) -> Value {
    let meta = |what: &str, pid: usize, tid: usize, args: Value| json!({"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args});
    let mut events = Vec::new();
    for (pid, (name, spans)) in runs.iter().enumerate() {
        events.push(meta("process_name", pid, 0, json!({"name": name})));
        let mut tid = 0;
        for row in Row::ALL {
            let spans: Vec<&Span> = spans.iter().filter(|s| s.row == row).collect();
            let lines = lines(&spans);
            for line in 0..=lines.iter().copied().max().unwrap_or(0) {
                let name = match line {
                    0 => row.name().to_owned(),
                    n => format!("{}, at the same time ({})", row.name(), n + 1),
                };
                events.push(meta("thread_name", pid, tid + line, json!({"name": name})));
                events.push(meta("thread_sort_index", pid, tid + line, json!({"sort_index": tid + line})));
            }
            for (span, line) in spans.iter().zip(&lines) {
                let mut event = json!({
                    "ph": "X", "name": span.what, "cat": row.name(), "pid": pid, "tid": tid + line,
                    "ts": span.begin, "dur": span.us,
                });
                if span.bytes > 0 {
                    event["args"] =
                        json!({"bytes": span.bytes, "GB/s": span.bytes as f64 / span.us.max(1e-3) / 1e3});
                }
                events.push(event);
            }
            tid += lines.iter().max().map_or(1, |most| most + 1);
        }
    }
    json!({"displayTimeUnit": "ms", "traceEvents": events})
}

/// Writes [`chrome_trace`] to a file.
///
/// # Errors
/// [`Error::Io`].
pub fn write(path: &Path, runs: &[(String, Vec<Span>)]) -> Result<()> {
    std::fs::write(path, chrome_trace(runs).to_string()).map_err(|e| Error::io(path, e))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use candle_core::Device;
    use comoe_core::backend::DeviceSpan;
    use comoe_models::PartTime;

    use super::*;
    use crate::decode::Decode;
    use crate::shape::Shape;

    /// Moves what the cache counted, within what the tokens took, in the rows where it belongs.
    #[test]
    fn what_a_cpu_did_is_in_its_row() {
        for prefetch in [comoe_core::Prefetch::Off, comoe_core::Prefetch::Correlation] {
            let timeline = Arc::new(Timeline::default());
            let run = Decode {
                warm_up: [32, 2],
                steps: 12,
                slots_per_layer: Some(3),
                prefetch,
                timeline: Some(timeline.clone()),
                ..Decode::new(Shape::small())
            };
            let measured = run.run(&Device::Cpu, &|_| {}).unwrap();
            let spans = timeline.spans();
            let of = |row| spans.iter().filter(move |s| s.row == row);
            assert_eq!(of(Row::Forward).count(), 12);
            let moved: u64 = of(Row::Demand).map(|s| s.bytes).sum();
            assert_eq!(moved, (measured.bytes_per_token * 12.0).round() as u64);
            assert!(moved > 0, "nothing was missed");
            // How many of them run in time is chance.
            assert_eq!(of(Row::Prefetch).any(|s| s.bytes > 0), prefetch != comoe_core::Prefetch::Off);
            let layers = run.shape.layers;
            assert_eq!(of(Row::Compute).filter(|s| s.what == "sum").count(), 12 * layers);
            let first = of(Row::Forward).next().unwrap().begin;
            let last = of(Row::Forward).next_back().map(|s| s.begin + s.us).unwrap();
            for span in spans.iter().filter(|s| matches!(s.row, Row::Compute | Row::Demand)) {
                assert!(span.begin >= first && span.begin + span.us <= last + 1.0, "{span:?}");
            }
        }
    }

    #[test]
    fn spans_of_a_line_never_overlap() {
        let span = |row, begin, us| Span { row, what: format!("{begin}"), begin, us, bytes: 8 };
        let spans = vec![
            span(Row::Demand, 0.0, 10.0),
            span(Row::Demand, 5.0, 10.0),
            span(Row::Demand, 10.0, 2.0),
            span(Row::Prefetch, 11.0, 1.0),
        ];
        let trace = chrome_trace(&[("64 of 128 slots".to_owned(), spans)]);
        let events = trace["traceEvents"].as_array().unwrap();
        let named: Vec<_> =
            events.iter().filter(|e| e["name"] == "thread_name").map(|e| e["args"]["name"].clone()).collect();
        assert_eq!(named, ["whole", "compute", "demand", "demand, at the same time (2)", "prefetch"]);
        let placed: Vec<_> =
            events.iter().filter(|e| e["ph"] == "X").map(|e| (e["tid"].as_u64(), e["ts"].as_f64())).collect();
        assert_eq!(placed, [(2, 0.0), (3, 5.0), (2, 10.0), (4, 11.0)].map(|(tid, ts)| (Some(tid), Some(ts))));
    }

    #[test]
    fn what_a_device_says_is_placed_by_its_zero_and_its_queues() {
        let timeline = Timeline::default();
        let span = |queue, begin: f64, us, bytes| DeviceSpan {
            queue,
            what: format!("{begin}"),
            begin,
            end: begin + us,
            bytes,
        };
        let list = vec![
            span(Queue::Demand, -3.0, 4.0, 640),
            span(Queue::Compute, 2.0, 5.0, 0),
            span(Queue::Prefetch, 2.5, 1.0, 64),
        ];
        let spans = DeviceSpans { list, left_out: 2, clock_error: 1.25 };
        timeline.add_spans(spans.clone());
        assert!(timeline.spans().is_empty() && timeline.note().is_none(), "nobody began");

        let part = |what: &str, bytes| PartTime { what: what.to_owned(), times: 1, us: 0.0, bytes };
        let ns = |us: f64| (7 << 58) + (us * 1e3) as u64;
        let steps = [[0.0, 1.5, 9.0], [20.0, 21.0, 30.0]].map(|step| step.map(ns).to_vec()).to_vec();
        let host = timeline.zero + Duration::from_millis(1);
        timeline.notes().device_zero = Some(SpanZero { host, device_ns: 7 << 58 });
        timeline.add_steps(&Profile { parts: vec![part("norm", 0), part("experts", 7)], steps });
        timeline.add_spans(spans);
        let placed: Vec<_> =
            timeline.spans().iter().map(|s| (s.row, s.what.clone(), s.begin, s.us, s.bytes)).collect();
        let want = [
            (Row::Demand, "-3", 997.0, 4.0, 640),
            (Row::Forward, "token 0", 1000.0, 9.0, 0),
            (Row::Compute, "norm", 1000.0, 1.5, 0),
            (Row::Compute, "experts", 1001.5, 7.5, 7),
            (Row::Compute, "2", 1002.0, 5.0, 0),
            (Row::Prefetch, "2.5", 1002.5, 1.0, 64),
            (Row::Forward, "token 1", 1020.0, 10.0, 0),
            (Row::Compute, "norm", 1020.0, 1.0, 0),
            (Row::Compute, "experts", 1021.0, 9.0, 7),
        ];
        assert_eq!(
            placed,
            want.map(|(row, what, begin, us, bytes)| (row, what.to_owned(), begin, us, bytes))
        );
        let note = timeline.note().unwrap();
        assert!(note.contains("1.2 us") && note.contains("2 spans left out"), "{note}");
    }

    #[test]
    fn nothing_is_taken_down_unless_told_to() {
        let timeline = Timeline::default();
        let start = Instant::now();
        timeline.add(Row::Compute, || "before".to_owned(), start);
        timeline.on.store(true, Ordering::Relaxed);
        std::thread::sleep(Duration::from_millis(2));
        timeline.add(Row::Compute, || "while".to_owned(), start);
        timeline.on.store(false, Ordering::Relaxed);
        timeline.add(Row::Compute, || "after".to_owned(), start);
        let spans = timeline.spans();
        assert!(spans.len() == 1 && spans[0].what == "while" && spans[0].us >= 2000.0, "{spans:?}");
    }
}
