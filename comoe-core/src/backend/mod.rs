//! Who moves and multiplies? One trait, one file per device kind.
//!
//! A backend has three in-order queues: compute, demand copies and prefetch copies. Queues run beside each other;
//! order between them exists only where a [`Ticket`] is waited for. The schedule keeps the rules (a slot is read
//! after its fill, refilled after its last reader); a backend just obeys.

pub(crate) mod bond;
mod chunks;
pub mod cpu;
pub mod cuda;
mod device;
pub mod sim;
mod spans;

use std::any::Any;
use std::borrow::Cow;
use std::fmt;
use std::ops::Range;
use std::time::Duration;

use candle_core::{DType, Tensor};

pub use bond::PeerAccess;
pub use chunks::Chunks;
pub(crate) use device::check_room;
pub use device::{
    AheadCounters, COPIED_RECORD_BYTES, DeviceCounters, DeviceDriver, DeviceGuess, DeviceLimits, DeviceStep,
    DriverKind, MOST_DEVICE_ASSIGNMENTS, MOST_DEVICE_SLOTS, MOST_DEVICE_TOKENS, RoutingFault, STAGED_AHEAD,
    StepFault,
};
pub use spans::{DeviceSpan, DeviceSpans, SpanZero};

use crate::error::{Error, Result};
use crate::expert::{ExpertLayout, ExpertSpec};
use crate::stats::human_bytes;
use crate::store::RecordIndex;

/// An in-order queue of a backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Queue {
    /// Kernels that read slots.
    Compute,
    /// Fills that the current step waits for.
    Demand,
    /// Fills of staging slots; a backend lets demand go first.
    Prefetch,
}

impl Queue {
    /// Every queue.
    pub const ALL: [Self; 3] = [Self::Compute, Self::Demand, Self::Prefetch];

    /// Its place in [`Self::ALL`].
    pub fn index(self) -> usize {
        self as usize
    }
}

/// A point on a queue's timeline, reached when everything enqueued before it is done. Tickets of one queue are
/// ordered: reaching `seq` implies every smaller one. `seq` 0 is reached from the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Ticket {
    /// The queue.
    pub queue: Queue,
    /// Position on it.
    pub seq: u64,
}

impl Ticket {
    /// Reached from the start.
    pub const DONE: Self = Self { queue: Queue::Compute, seq: 0 };
}

/// A slot's number in the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SlotId(pub u32);

/// One copy of a batch: `record` into `slot`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fill {
    /// What to bring.
    pub record: RecordIndex,
    /// Where to.
    pub slot: SlotId,
}

/// What a layer step computes from records. `[n]` are the step's tokens, `k` its experts per token; assignment
/// `t * k + j` is token `t`'s `j`-th choice.
#[derive(Clone, Copy)]
pub enum Work<'a> {
    /// `y[t] = sum over j, in order, of weights[t, j] * ffn(record of (t, j))(x[t])`.
    Ffn {
        /// What a record computes.
        spec: &'a ExpertSpec,
        /// Where its parts lie.
        layout: &'a ExpertLayout,
        /// `[n, hidden]`, F32, F16 or BF16, on the backend's device.
        x: &'a Tensor,
        /// `[n * k]`, row-major.
        weights: &'a [f32],
        /// Experts per token.
        top_k: usize,
    },
    /// `out[a] = the record of assignment a`, as `[assignments, ..shape]` of `dtype`.
    Gather {
        /// Assignments in all.
        assignments: usize,
        /// Element type of the result.
        dtype: DType,
        /// Shape of one record's part of the result; it may be shorter than the record (padding is dropped).
        shape: &'a [usize],
    },
}

/// One record of a step, in its slot, and the assignments that it serves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkItem {
    /// The record (for checks and messages).
    pub record: RecordIndex,
    /// Where it is.
    pub slot: SlotId,
    /// Ascending assignments `t * k + j`.
    pub assignments: Vec<u32>,
}

/// What a backend is and what is in force, for people to read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BackendInfo {
    /// For example `cpu` or `cuda:0 (NVIDIA GeForce RTX 4090)`.
    pub device: String,
    /// Details in force, for example how much host memory is page-locked.
    pub notes: Vec<String>,
    /// Bytes of records in page-locked memory, where that matters to the device.
    pub page_locked: Option<u64>,
}

/// How far records are page-locked.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PageLocking {
    /// Bytes of records in page-locked memory.
    pub locked: u64,
    /// Bytes of all records.
    pub total: u64,
    /// How long it took; `None` while it goes on beside the steps.
    pub took: Option<Duration>,
    /// Why the others are not, where it ended before.
    pub why_partial: Option<String>,
}

impl fmt::Display for PageLocking {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all = human_bytes(self.total);
        match (self.took, &self.why_partial) {
            (None, _) => write!(f, "experts ({all}) are read and page-locked while it answers"),
            (Some(_), None) => write!(f, "all experts ({all}) are in page-locked memory"),
            (Some(_), Some(why)) => write!(
                f,
                "{} of {all} of the experts are in page-locked memory: {why}; the others pass through a page-locked \
                 buffer, which is slower",
                human_bytes(self.locked)
            ),
        }
    }
}

/// Device memory that a backend holds, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BackendMemory {
    /// Slots, those of staging and ring among them.
    pub slots: u64,
    /// Activations of steps; grows to the largest so far.
    pub workspace: u64,
    /// Tables, and what steps of few tokens use again and again.
    pub buffers: u64,
}

/// Time that a backend has spent on transfers since it was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TransferTime {
    /// Copy queues busy with demand fills.
    pub demand: Duration,
    /// Copy queues busy with prefetch fills.
    pub prefetch: Duration,
    /// Compute waiting for fills.
    pub stalled: Duration,
}

/// A device: a slab of slots, copies into them, and the kernels that read them.
///
/// The caller (the schedule) guarantees: `allocate` comes first and once; between `begin` and `finish` of one work
/// every assignment is served by exactly one [`WorkItem`]; a slot is passed to `run` only after the compute queue
/// was made to wait for its fill, and to `fill` only with its last reader's ticket among `after`; `copy` reads like
/// `run` and writes slots whose last fill the compute queue was made to wait for.
///
/// After an error nothing that is in slots may be trusted; the caller stops using the backend.
pub trait Backend: Send {
    /// What it is, what is in force.
    fn info(&self) -> BackendInfo;

    /// Makes the slab: `slots` times `slot_bytes` (a multiple of [`RECORD_ALIGN`](crate::expert::RECORD_ALIGN)),
    /// in one piece.
    fn allocate(&mut self, slots: usize, slot_bytes: usize) -> Result<()>;

    /// How the slab's memory comes and goes, once it is allocated; or why it stays as it is, as a clause that starts with
    /// a small letter.
    fn chunks(&self) -> std::result::Result<Chunks, String> {
        Err(format!("{} keeps all slots that it has", self.info().device))
    }

    /// From now on nobody uses the slots `unused`, until another call names others: chunks of memory that only those have
    /// a part in go back to where memory comes from, and those that are needed again come from there, with whatever is in
    /// them. Returns the bytes of the slab that are backed now. Every queue is empty.
    ///
    /// # Errors
    /// [`Error::OutOfDeviceMemory`] where there is not enough; then nothing has changed.
    /// [`Error::FixedSlots`] where [`Self::chunks`] says why.
    fn set_unused(&mut self, _unused: Range<u32>) -> Result<u64> {
        let reason = self.chunks().err().unwrap_or_default();
        Err(crate::Error::FixedSlots { reason })
    }

    /// Enqueues one batch of fills on `queue` ([`Queue::Demand`] or [`Queue::Prefetch`]) behind `after`. Does not
    /// wait for anything.
    fn fill(&mut self, queue: Queue, after: &[Ticket], fills: &[Fill]) -> Result<Ticket>;

    /// Makes what is enqueued on the compute queue from now on wait for `ticket`.
    ///
    /// # Errors
    /// May report the failure of any earlier fill, by the expert's name.
    fn wait(&mut self, ticket: Ticket) -> Result<()>;

    /// A ticket for everything enqueued on the compute queue so far.
    fn mark(&mut self) -> Result<Ticket>;

    /// Whether `ticket` has been reached.
    fn is_done(&mut self, ticket: Ticket) -> Result<bool>;

    /// Takes the device memory that `work` needs beside the slots, if there is not enough of it yet. Comes before any fill of
    /// the step.
    ///
    /// # Errors
    /// [`Error::OutOfDeviceMemory`], and then nothing has changed: slots may be given up, and the
    /// call made again.
    fn reserve(&mut self, _work: &Work<'_>) -> Result<()> {
        Ok(())
    }

    /// Starts a step's work.
    fn begin(&mut self, work: Work<'_>) -> Result<()>;

    /// Enqueues the work of `items`, which are in their slots.
    fn run(&mut self, items: &[WorkItem]) -> Result<()>;

    /// Enqueues copies of whole slots, from and to, on the compute queue.
    fn copy(&mut self, slots: &[(SlotId, SlotId)]) -> Result<()>;

    /// Ends the work that was begun and hands out its result (for [`Work::Ffn`] `[n, hidden]`, dtype as `x`).
    /// Results are combined in assignment order, so they do not depend on the order in which items were run.
    fn finish(&mut self) -> Result<Tensor>;

    /// Starts work of which this device serves only some assignments: [`Self::finish_rows`] ends it.
    ///
    /// # Errors
    /// [`Error::BadArgument`] where the backend shares no work with others.
    fn begin_rows(&mut self, _work: Work<'_>) -> Result<()> {
        Err(self.works_alone())
    }

    /// Ends the work that [`Self::begin_rows`] began, in which `assignments` were served, and hands out their results
    /// before weights and sum, as `[assignments, hidden]` in F32.
    ///
    /// # Errors
    /// As [`Self::begin_rows`].
    fn finish_rows(&mut self, _assignments: &[u32]) -> Result<Tensor> {
        Err(self.works_alone())
    }

    /// In work that [`Self::begin`] began: takes the results of `assignments`, which another device served and handed out
    /// by [`Self::finish_rows`], brought to this one. They count as served.
    ///
    /// # Errors
    /// As [`Self::begin_rows`].
    fn accept(&mut self, _assignments: &[u32], _rows: &Tensor) -> Result<()> {
        Err(self.works_alone())
    }

    #[doc(hidden)]
    fn works_alone(&self) -> Error {
        let reason =
            format!("{} shares no work with other devices: give the cache one device", self.info().device);
        Error::BadArgument { what: "devices", reason }
    }

    /// The backend itself, for those that know its kind: devices that share steps of their own hand things to each other
    /// past the host. Who wraps a backend hands out the inner one's.
    fn as_any(&mut self) -> Option<&mut dyn Any> {
        None
    }

    /// Waits until every queue is empty.
    fn synchronize(&mut self) -> Result<()>;

    /// Copies a slot's bytes back, after `synchronize`. For checks and tests.
    fn read_slot(&mut self, slot: SlotId, out: &mut [u8]) -> Result<()>;

    /// Overwrites a slot's bytes, after `synchronize`. For tests that damage a slot on purpose.
    fn write_slot(&mut self, slot: SlotId, bytes: &[u8]) -> Result<()>;

    /// What a slot holds once `record`, whose stored bytes are `stored`, has been filled into it: the same bytes,
    /// unless the backend expands records on load.
    ///
    /// # Errors
    /// When `stored` is no such record.
    fn slot_image<'a>(&self, _record: RecordIndex, stored: &'a [u8]) -> Result<Cow<'a, [u8]>> {
        Ok(Cow::Borrowed(stored))
    }

    /// Device memory that it holds now; zeros where it does not say.
    fn memory(&self) -> BackendMemory {
        BackendMemory::default()
    }

    /// How far records are page-locked; `None` where that does not matter to the device.
    fn page_locking(&self) -> Option<PageLocking> {
        None
    }

    /// Where page-locking goes on beside the steps: has those from here on use what was locked meanwhile, and says whether
    /// more is to come. No step of the device's own is under way; fills may be.
    ///
    /// # Errors
    /// What kept a record from being read.
    fn use_page_locked(&mut self) -> Result<bool> {
        Ok(false)
    }

    /// Time spent so far.
    fn transfer_time(&self) -> TransferTime;

    /// From now on takes down when what is enqueued runs, in place of what it took down before; hands out the moment from
    /// which times count. `None` where it does not. Waits until every queue is empty.
    ///
    /// # Errors
    /// [`Error::OutOfDeviceMemory`], and then nothing is taken down.
    fn begin_spans(&mut self) -> Result<Option<SpanZero>> {
        Ok(None)
    }

    /// Waits until every queue is empty, takes nothing down any more, and hands out what it has.
    ///
    /// # Errors
    /// As [`Self::synchronize`].
    fn take_spans(&mut self) -> Result<DeviceSpans> {
        Ok(DeviceSpans::default())
    }

    /// The driver of steps whose schedule runs on the device itself, once slots are allocated; or why there is none,
    /// as a clause that starts with a small letter.
    fn device_driver(&mut self) -> std::result::Result<&mut dyn DeviceDriver, String> {
        Err(no_driver(&self.info().device))
    }
}

/// Why a device without a driver has none.
pub(crate) fn no_driver(device: &str) -> String {
    format!("{device} has no driver of its own")
}
