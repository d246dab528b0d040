//! What a device did when, by its own clock: for pictures and for questions of speed. A run that nobody asks about has
//! nothing of it in its way.

use std::time::Instant;

use super::Queue;

/// The moment from which times count, by two clocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SpanZero {
    /// By the host's.
    pub host: Instant,
    /// By the device's own, ns.
    pub device_ns: u64,
}

/// Something that took time on a device.
#[derive(Debug, Clone, PartialEq)]
pub struct DeviceSpan {
    /// Where it was enqueued. Where the device drives, its kernels read what is missing themselves: that belongs to
    /// [`Queue::Demand`], and to [`Queue::Prefetch`] what is brought ahead.
    pub queue: Queue,
    /// What it was. A record goes by the name of its expert.
    pub what: String,
    /// When it began, us since the [`SpanZero`] of [`Backend::begin_spans`](super::Backend::begin_spans).
    pub begin: f64,
    /// When it was over, us since the same.
    pub end: f64,
    /// Bytes that came from the host, where it was bringing any.
    pub bytes: u64,
}

/// What was taken down.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct DeviceSpans {
    /// In the order of their begin.
    pub list: Vec<DeviceSpan>,
    /// How many more there would have been, had there been room.
    pub left_out: u64,
    /// Of what queues do events tell the time, of what kernels read and bring their own clock: how far the two may be apart, us.
    pub clock_error: f64,
}
