//! What a device did when, by its own clock: for pictures and for questions of speed. A run that nobody asks about has
//! nothing of it in its way.

use super::Queue;

/// Something that took time on a device.
#[derive(Debug, Clone, PartialEq)]
pub struct DeviceSpan {
    /// Where it was enqueued. Where the device drives, its kernels read what is missing themselves: that belongs to
    /// [`Queue::Demand`], and to [`Queue::Prefetch`] what is brought ahead.
    pub queue: Queue,
    /// What it was. A record goes by the name of its expert.
    pub what: String,
    /// When it began, us since the moment that [`Backend::begin_spans`](super::Backend::begin_spans) handed out.
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
    /// Queues and kernels take their times in different ways: how far these may be apart, us.
    pub clock_error: f64,
}
