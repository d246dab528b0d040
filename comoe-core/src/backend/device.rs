//! The device-driven driver: residency tables, stamps and counters live on the device, so that a step of few tokens
//! needs no host round trip. Which slots records are in is known to one owner at a time, the host's
//! [`Pool`](crate::pool::Pool) or the device.

use candle_core::{DType, Tensor};

use super::{Fill, SlotId};
use crate::error::{Error, Result};
use crate::expert::{ExpertLayout, ExpertSpec};
use crate::pool::{PoolShape, Residency};
use crate::predict::Learned;
use crate::store::Directory;

/// Most tokens of a device-driven step.
pub const MOST_DEVICE_TOKENS: usize = 32;
/// Most assignments (tokens x top-k) of a device-driven step.
pub const MOST_DEVICE_ASSIGNMENTS: usize = 1024;
/// Most slots that may compete for one layer's experts in a device-driven step.
pub const MOST_DEVICE_SLOTS: usize = 1024;

/// From this size on a record arrives sooner by a copy than by a kernel that reads it, by more than the host's round trip
/// costs. Measured on an H200 (PCIe 5 x16), eager steps: both take as long at 23 MB, the device 4 % longer at 47 and 94 MB
/// (comoe-bench/RESULTS.md, "Who drives").
pub const COPIED_RECORD_BYTES: usize = 32 << 20;

/// Staging slots of a driver that brings guessed records: two for a layer's guesses, and as many while the layer before
/// still reads its own.
pub const STAGED_AHEAD: usize = 4;

/// Who decides where records go, and when they move.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum DriverKind {
    /// The device where it can and where that is the faster, for steps of up to [`MOST_DEVICE_TOKENS`] tokens; the host
    /// otherwise. The host is the faster with records of [`COPIED_RECORD_BYTES`] or more, unless each has a slot, and
    /// where some records are not page-locked.
    #[default]
    Auto,
    /// The host: a step's ids come to it, and it starts the transfers.
    Host,
    /// The device wherever it can; a cache that it cannot drive is refused. Where some records are not page-locked, it
    /// drives tokens ([`ExpertCache::begin_token`](crate::ExpertCache::begin_token)), and the host steps outside of them.
    Device,
}

impl DriverKind {
    /// Every choice.
    pub const ALL: [Self; 3] = [Self::Auto, Self::Host, Self::Device];

    /// The name, as it is given on a command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Host => "host",
            Self::Device => "device",
        }
    }
}

impl std::fmt::Display for DriverKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for DriverKind {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == s).ok_or_else(|| {
            let reason = format!("{s:?} is unknown: use auto, host or device");
            Error::BadArgument { what: "driver", reason }
        })
    }
}

/// Experts that a step's token may choose in the next layer with experts, as far as its model can tell
/// ([`CacheLayer::with_device_guess`](crate::CacheLayer::with_device_guess)).
#[derive(Clone, Copy)]
pub struct DeviceGuess<'a> {
    /// `[1, k]`, U32, contiguous, on the device, likeliest first. Numbers that the layer does not have are passed over, and
    /// no more than the first 32 are looked at.
    pub ids: &'a Tensor,
    /// The stream that writes them, where it is not the one on which the step is enqueued.
    #[cfg(feature = "cuda")]
    pub stream: Option<&'a std::sync::Arc<cudarc::driver::CudaStream>>,
}

impl DeviceGuess<'_> {
    /// Whether it has the type that it must have.
    ///
    /// # Errors
    /// [`Error::BadArgument`].
    pub(crate) fn check(&self) -> Result<()> {
        match self.ids.dtype() {
            DType::U32 => Ok(()),
            other => {
                Err(Error::BadArgument { what: "guess", reason: format!("expected U32, got {other:?}") })
            }
        }
    }
}

/// Whether a result for `x` can be written to `room`.
///
/// # Errors
/// [`Error::BadArgument`].
pub(crate) fn check_room(room: &Tensor, x: &Tensor) -> Result<()> {
    if room.dims() == x.dims() && room.dtype() == x.dtype() && room.device().same_device(x.device()) {
        return Ok(());
    }
    let told = |t: &Tensor| format!("{:?} {:?} on {:?}", t.dims(), t.dtype(), t.device());
    let reason = format!("expected {} like x, got {}", told(x), told(room));
    Err(Error::BadArgument { what: "room", reason })
}

/// One layer's step, whose routing only the device has seen.
#[derive(Clone, Copy)]
pub struct DeviceStep<'a> {
    /// Layer ordinal.
    pub layer: usize,
    /// What a record computes.
    pub spec: &'a ExpertSpec,
    /// Where its parts lie.
    pub layout: &'a ExpertLayout,
    /// `[n, hidden]`, F32, F16 or BF16, on the device.
    pub x: &'a Tensor,
    /// `[n, k]` experts, U32, contiguous, on the device.
    pub ids: &'a Tensor,
    /// `[n, k]`, F32, contiguous, on the device.
    pub weights: &'a Tensor,
    /// How many steps of the same token came before it. A token that is run again after [`StepFault::Missing`] makes
    /// the same steps from 0 on, and those that were done change nothing. 0 for a step of its own.
    pub ordinal: u32,
    /// Where the result goes: `[n, hidden]`, dtype as x, contiguous, on the device. `None`: to a new tensor.
    pub room: Option<&'a Tensor>,
    /// What may be brought for the next layer meanwhile, where the driver does that ([`DeviceDriver::fetch_ahead`]). It
    /// changes no result and no slot.
    pub guess: Option<DeviceGuess<'a>>,
}

/// What device-driven steps of one layer have counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DeviceCounters {
    /// Layer steps.
    pub steps: u64,
    /// Layer steps with at least one miss.
    pub steps_with_miss: u64,
    /// Members of step sets.
    pub accesses: u64,
    /// Accesses whose record was in a slot.
    pub hits: u64,
    /// What became of what was guessed for this layer.
    pub ahead: AheadCounters,
}

/// What became of a layer's guesses, where a driver brings guessed records.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct AheadCounters {
    /// Records that were guessed: the likeliest of those in no slot.
    pub guessed: u64,
    /// Of them, those that the layer missed.
    pub right: u64,
    /// Records of which anything was brought.
    pub brought: u64,
    /// Of them, those that the layer missed and took from there.
    pub used: u64,
    /// Bytes that were brought.
    pub bytes: u64,
    /// Of them, those that the layer took.
    pub saved_bytes: u64,
    /// Most records that may be brought for it now; 0: its guesses are not worth it.
    pub width: usize,
}

impl std::ops::Sub for AheadCounters {
    type Output = Self;

    /// What was counted since; the width is this one's.
    fn sub(self, then: Self) -> Self {
        Self {
            guessed: self.guessed - then.guessed,
            right: self.right - then.right,
            brought: self.brought - then.brought,
            used: self.used - then.used,
            bytes: self.bytes - then.bytes,
            saved_bytes: self.saved_bytes - then.saved_bytes,
            width: self.width,
        }
    }
}

/// Routing that could not be followed. The step it came with, and every later one until it was reported, changed
/// nothing and gave NaN.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RoutingFault {
    /// A weight that is no number.
    BadWeight {
        /// Layer ordinal.
        layer: usize,
        /// Row of the step.
        token: usize,
        /// The weight.
        value: f32,
    },
    /// An id that the layer does not have.
    UnknownExpert {
        /// Layer ordinal.
        layer: usize,
        /// The id.
        expert: usize,
    },
}

/// Why the device stopped.
#[derive(Debug, Clone, PartialEq)]
pub enum StepFault {
    /// The routing cannot be followed.
    Routing(RoutingFault),
    /// A step misses a record that only the host can bring. The tables, stamps and counters are as after the step, but
    /// nothing was computed: whoever asked makes these fills, all of the step's misses, and runs the token again.
    Missing(Vec<Fill>),
}

/// What a device cannot do on its own.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DeviceLimits {
    /// Why some records only the host can bring, if so: steps may end with [`StepFault::Missing`].
    pub partial: Option<String>,
    /// Every miss needs a slot: a set larger than its partition is not for the device.
    pub only_into_slots: bool,
    /// It can bring guessed records ahead of their layer: see [`DeviceDriver::fetch_ahead`].
    pub ahead: bool,
    /// It can make the guesses itself: see [`DeviceDriver::learn`].
    pub learns: bool,
}

impl RoutingFault {
    pub(crate) fn error(self, directory: &Directory) -> Error {
        match self {
            Self::BadWeight { layer, token, value } => {
                Error::BadRoutingWeight { layer: directory.layers()[layer].layer, token, value }
            }
            Self::UnknownExpert { layer, expert } => {
                let id = crate::ExpertId { layer: directory.layers()[layer].layer, expert };
                Error::UnknownExpert { id, available: directory.experts_of(layer) }
            }
        }
    }
}

/// Steps whose schedule runs on the device: least recently used, or [`Lfru`](crate::policy::Lfru) where the residency
/// that it took over has counts, within the partitions of a [`PoolShape`]. The set is accessed in order
/// of first use; no member gives up its slot for another, nor does a record that the residency says is kept; a member that
/// finds no slot is read without being stored.
///
/// The caller guarantees: `take_over` comes before any `step`, with every queue of the backend empty; between that and
/// the last `step` nobody else fills slots.
pub trait DeviceDriver {
    /// What it cannot do, until [`Backend::use_page_locked`](super::Backend::use_page_locked) is called again.
    fn limits(&self) -> DeviceLimits;

    /// From now on brings records that steps guess ([`DeviceStep::guess`]) into `staging`, [`STAGED_AHEAD`] slots beside
    /// those of the partitions, which nobody else uses. Where guesses are `judged`, only in layers in which they have been
    /// right lately. What the layer then misses, it takes from there.
    ///
    /// # Errors
    /// [`Error::BadArgument`] where the limits say that it does not do this, and for another number of slots.
    fn fetch_ahead(&mut self, staging: &[SlotId], judged: bool) -> Result<()> {
        let reason =
            format!("{} staging slots (judged: {judged}): this driver brings nothing", staging.len());
        Err(Error::BadArgument { what: "device driver", reason })
    }

    /// From now on goes on learning from `learned` with every step, as a [`Correlation`](crate::predict::Correlation) would
    /// observe it (a step that is run again, once), and brings what that guesses for the next layer where a step of one
    /// token comes without a guess: the likeliest, as many as the token chose experts, up to 32. After
    /// [`Self::fetch_ahead`].
    ///
    /// # Errors
    /// [`Error::BadArgument`] where the limits say that it does not do this, and for what was learned of other layers.
    fn learn(&mut self, learned: &Learned) -> Result<()> {
        let reason = format!("{} layers to learn of: this driver learns nothing", learned.weights.len());
        Err(Error::BadArgument { what: "device driver", reason })
    }

    /// Waits for the steps so far and says what is known by now, all in all; steps may go on.
    ///
    /// # Errors
    /// What went wrong in any of them; [`Error::BadArgument`] where it does not learn.
    fn learned(&mut self) -> Result<Learned> {
        let reason = "this driver learns nothing".to_owned();
        Err(Error::BadArgument { what: "device driver", reason })
    }

    /// What it has guessed last for each layer by what it learned, likeliest first; nothing, perhaps, for layers that were run
    /// again. For tests.
    #[doc(hidden)]
    fn guesses(&mut self) -> Result<Vec<Vec<u32>>> {
        Ok(Vec::new())
    }

    /// Where steps count the records that they miss: a u32 in the device's memory, for kernels behind them. It begins anew when
    /// tables are handed over. `None` where there is none, or none yet.
    fn missed_address(&self) -> Option<u64> {
        None
    }

    /// Starts from what is in the slots: everything that has a slot is there.
    ///
    /// # Errors
    /// [`Error::BadArgument`] for a shape of more than [`MOST_DEVICE_SLOTS`] slots a partition.
    fn take_over(&mut self, shape: &PoolShape, residency: &Residency) -> Result<()>;

    /// Waits for the steps so far and says what is in the slots now.
    ///
    /// # Errors
    /// What went wrong in any of them.
    fn residency(&mut self) -> Result<Residency>;

    /// A token begins, whose steps may be captured: what steps before it left to do beside the caller's queue is behind it.
    ///
    /// # Errors
    /// When the device stopped working.
    fn begin_token(&mut self) -> Result<()> {
        Ok(())
    }

    /// Enqueues one layer's step and hands out `[n, hidden]`, dtype as x. Waits for nothing, and allocates nothing but
    /// the result once a step of the same top-k and shape has been run.
    ///
    /// # Errors
    /// [`Error::BadArgument`] for more than [`MOST_DEVICE_TOKENS`] tokens or [`MOST_DEVICE_ASSIGNMENTS`] assignments.
    /// What is wrong with the routing is no error here: see [`Self::fault`].
    fn step(&mut self, step: DeviceStep<'_>) -> Result<Tensor>;

    /// The first fault since it was last asked for, if the device has come to it; then steps run again. With `wait`,
    /// waits for the steps so far first.
    ///
    /// # Errors
    /// When the device stopped working.
    fn fault(&mut self, wait: bool) -> Result<Option<StepFault>>;

    /// Waits for the steps so far, and returns their counters since the driver was made, by layer ordinal.
    ///
    /// # Errors
    /// What went wrong in any of them.
    fn counters(&mut self) -> Result<Vec<DeviceCounters>>;

    /// Waits for the steps so far, and returns how often they have used each record since the driver was made.
    ///
    /// # Errors
    /// What went wrong in any of them.
    fn uses(&mut self) -> Result<Vec<u64>>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drivers_are_known_by_name() {
        for kind in [DriverKind::Auto, DriverKind::Host, DriverKind::Device] {
            assert_eq!(kind.to_string().parse::<DriverKind>().unwrap(), kind);
        }
        let error = "gpu".parse::<DriverKind>().unwrap_err().to_string();
        assert!(error.contains("auto, host or device"), "{error}");
    }

    #[test]
    fn faults_name_the_models_layer_and_what_it_has() {
        let directory = Directory::new([(3, 8, 64), (5, 4, 64)]).unwrap();
        let say = |fault: RoutingFault| fault.error(&directory).to_string();
        let text = say(RoutingFault::UnknownExpert { layer: 1, expert: 9 });
        assert!(text.contains("layer 5 expert 9") && text.contains("has 4 experts"), "{text}");
        let text = say(RoutingFault::BadWeight { layer: 0, token: 2, value: f32::NAN });
        assert!(text.contains("layer 3") && text.contains("token 2 is NaN"), "{text}");
    }
}
