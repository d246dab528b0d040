//! Every way this crate refuses or fails, with what was asked, what there is and what to do.

use std::path::PathBuf;

use crate::expert::ExpertId;
use crate::stats::human_bytes;

/// Shorthand for this crate's results.
pub type Result<T> = std::result::Result<T, Error>;

/// Every failure of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A format name that is not known.
    #[error(
        "unknown expert format {asked:?}: use bf16, mxfp4, int8 or int4, the last two with a group as in int4-g32 \
         (32, 64, 128)"
    )]
    UnknownFormat {
        /// The name as given.
        asked: String,
    },

    /// A file could not be opened, read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },

    /// A file is not what its name or header promises.
    #[error("{}: {reason}", path.display())]
    BadFile {
        /// The file.
        path: PathBuf,
        /// What is wrong and what to do, as one sentence.
        reason: String,
    },

    /// A file ends before what its header promises.
    #[error(
        "{} is truncated: its header promises {promised} bytes or more, it has {found}; download it again, or pack it \
         again if `comoe pack` wrote it",
        path.display()
    )]
    TruncatedFile {
        /// The file.
        path: PathBuf,
        /// Bytes that the header promises, as far as it can be read.
        promised: u64,
        /// Bytes that are there.
        found: u64,
    },

    /// A checkpoint's index names a shard that is not there.
    #[error("{}: not found, but {} lists it; download the missing file", shard.display(), index.display())]
    MissingShard {
        /// The index file.
        index: PathBuf,
        /// The shard that it names.
        shard: PathBuf,
    },

    /// A file that is no packed store.
    #[error("{}: is no packed store; give a .safetensors file that `comoe pack` wrote", path.display())]
    NotPacked {
        /// The file.
        path: PathBuf,
    },

    /// There is no room for a file that is being written. Nothing of it is left.
    #[error(
        "{}: the disk is full; the file takes {} in all: make room, or choose a folder on another disk",
        path.display(),
        crate::stats::human_bytes(*bytes)
    )]
    DiskFull {
        /// The file.
        path: PathBuf,
        /// Its length when it is whole.
        bytes: u64,
    },

    /// A packed store of a version that this build does not read.
    #[error(
        "{}: packed store of version {found}, this build reads {known}; update comoe, or delete the file and \
         convert the model again",
        path.display()
    )]
    PackedVersion {
        /// The file.
        path: PathBuf,
        /// Its version.
        found: String,
        /// The version that this build reads.
        known: u32,
    },

    /// A tensor that looks like part of an expert, but is none that the naming table knows.
    #[error("tensor {name:?} looks like part of an expert, but is not known; known are {known}")]
    UnknownExpertTensor {
        /// The tensor's name in the checkpoint.
        name: String,
        /// The names that are known.
        known: String,
    },

    /// A tensor is missing, or has the wrong shape or dtype.
    #[error("tensor {name:?}: {reason}")]
    BadTensor {
        /// The tensor's name in the checkpoint.
        name: String,
        /// What is wrong: what was expected and what was found.
        reason: String,
    },

    /// A checkpoint is quantised in a way that is not known.
    #[error(
        "the checkpoint's quantisation, {asked}, is not supported; supported are {}: use such a release of the model, or \
         one that is not quantised",
        crate::store::Quantisation::KNOWN
    )]
    UnsupportedQuantisation {
        /// The method as the configuration names it.
        asked: String,
    },

    /// The store has no experts.
    #[error("no expert tensors found in {what}: CoMoE runs Mixture-of-Experts models only")]
    NoExperts {
        /// The files that were searched.
        what: String,
    },

    /// An id that the store does not hold.
    #[error("there is no {id}: layer {} has {available} experts", id.layer)]
    UnknownExpert {
        /// The id asked for.
        id: ExpertId,
        /// Experts of that layer (0: the layer has none).
        available: usize,
    },

    /// Too few slots.
    #[error(
        "{asked} slots are too few: one layer's top-k needs {least}; give at least that many (--slots {least})"
    )]
    TooFewSlots {
        /// Slots asked for.
        asked: usize,
        /// The least that works.
        least: usize,
    },

    /// Slots that cannot be given up or come back while the cache lives.
    #[error("the slots are fixed: {reason}; start again with another number of slots")]
    FixedSlots {
        /// Why, as a clause.
        reason: String,
    },

    /// The slots have no memory left to give up.
    #[error(
        "{asked} bytes are more than the experts' slots can give up ({most}): {least} slots are needed for one token"
    )]
    NothingToLend {
        /// Bytes that were asked for.
        asked: u64,
        /// Bytes that could be had.
        most: u64,
        /// Slots that stay in any case.
        least: usize,
    },

    /// The pool's bytes hold fewer records than one layer's top-k.
    #[error(
        "a pool of {asked} bytes is too small: one layer's top-k needs {slots} experts of {record_bytes} bytes; give at \
         least {least} bytes"
    )]
    PoolTooSmall {
        /// Bytes asked for.
        asked: u64,
        /// Bytes of one record.
        record_bytes: usize,
        /// The least that works, in bytes.
        least: u64,
        /// The least that works, in slots.
        slots: usize,
    },

    /// An argument of a call does not fit the cache.
    #[error("{what}: {reason}")]
    BadArgument {
        /// The argument.
        what: &'static str,
        /// What was expected and what was given.
        reason: String,
    },

    /// A routing weight or router output is not a number.
    #[error("layer {layer}: the routing weight of token {token} is {value}; the router's output is broken")]
    BadRoutingWeight {
        /// The model's layer number.
        layer: usize,
        /// Row of the step's input.
        token: usize,
        /// The weight.
        value: f32,
    },

    /// A weight that the format cannot hold. The caller knows which expert it was packing and says so.
    #[error("{part} weight [{row}, {col}] is {value}: {reason}")]
    BadWeight {
        /// `gate`, `up` or `down`, or their biases.
        part: &'static str,
        /// Output feature.
        row: usize,
        /// Input feature.
        col: usize,
        /// The weight.
        value: f32,
        /// Why it cannot be held and what to do.
        reason: &'static str,
    },

    /// A record could not be brought into its slot.
    #[error("filling {id} failed: {reason}")]
    FillFailed {
        /// The expert.
        id: ExpertId,
        /// What went wrong.
        reason: String,
    },

    /// A slot does not hold what the store has.
    #[error("slot {slot}, which should hold {id}, differs from the store at byte {at}")]
    SlotDiffers {
        /// The expert.
        id: ExpertId,
        /// The slot's number.
        slot: u32,
        /// Offset of the first byte that differs.
        at: usize,
    },

    /// The table of slots does not find a record where the slot says it is.
    #[error("slot {slot} says that it holds {id}, which is looked for in {}", found.map_or("no slot".to_owned(), |s| format!("slot {s}")))]
    KeyDiffers {
        /// The expert.
        id: ExpertId,
        /// The slot's number.
        slot: u32,
        /// Where the expert is looked for.
        found: Option<u32>,
    },

    /// The simulated backend saw work in an order that a real device need not keep.
    #[error("ordering rule broken: {rule} ({id})")]
    RuleBroken {
        /// What was done too early.
        rule: &'static str,
        /// The expert concerned.
        id: ExpertId,
    },

    /// A routing trace that cannot be read.
    #[error("{}, {at}: {reason}", path.display())]
    BadTrace {
        /// The file.
        path: PathBuf,
        /// Where in it: a line of text, or an offset in bytes.
        at: TracePlace,
        /// What was expected, what was found, what to do.
        reason: String,
    },

    /// A routing trace of a version that this build does not read.
    #[error(
        "{}: routing trace of version {found}, this build reads {known}; update comoe, or record the trace again",
        path.display()
    )]
    TraceVersion {
        /// The file.
        path: PathBuf,
        /// Its version.
        found: String,
        /// The version that this build reads.
        known: u32,
    },

    /// A routing trace of another model.
    #[error(
        "the trace was recorded from {recorded:?}, which is not this model: {reason}; record one from this model"
    )]
    TraceOfAnotherModel {
        /// The model that the trace names.
        recorded: String,
        /// Where the two differ.
        reason: String,
    },

    /// More device memory was asked for than may be taken.
    #[error(
        "{device}: {} need {}, but of the {} that may be taken {} go to the rest of the model: {most} slots fit; allow \
         more, or give {}fewer slots, a smaller expert format (int8, int4), smaller dense weights (int8) or a shorter \
         context",
        slots_by_use(*slots, *staging, *ring), human_bytes(*asked), human_bytes(*budget), human_bytes(*reserve),
        less_beside(*staging, *ring)
    )]
    OverBudget {
        /// The device.
        device: String,
        /// Slots that were wanted, all uses together; the least that works where as many as fit were asked for.
        slots: usize,
        /// Of them, those for what is prefetched.
        staging: usize,
        /// Of them, those that a prompt's experts pass through.
        ring: usize,
        /// Their bytes.
        asked: u64,
        /// Bytes that may be taken in all.
        budget: u64,
        /// Bytes of them that are kept for other uses.
        reserve: u64,
        /// Slots that would fit.
        most: usize,
    },

    /// A predictor's table that cannot be read.
    #[error("{}: {reason}", path.display())]
    BadPredictorTable {
        /// The file.
        path: PathBuf,
        /// What was expected, what was found, what to do.
        reason: String,
    },

    /// A predictor's table that was learned from another model.
    #[error("{}: was learned from {model:?}, which is not this model: {reason}; give another file", path.display())]
    TableOfAnotherModel {
        /// The file.
        path: PathBuf,
        /// The model that the table names.
        model: String,
        /// Where the two differ.
        reason: String,
    },

    /// A device that this build or machine cannot use.
    #[error("device {asked}: {reason}")]
    Device {
        /// The device asked for.
        asked: String,
        /// Why it cannot be used and what to do.
        reason: String,
    },

    /// One of several devices did not finish its part of a step in time.
    #[error(
        "{device} has not finished its part of a step within {:.1} s: another program may hold it, or it stopped working \
         (see `nvidia-smi`); leave it out, or give a longer deadline",
        deadline.as_secs_f64()
    )]
    DeviceLate {
        /// The device that was waited for.
        device: String,
        /// How long it was waited for.
        deadline: std::time::Duration,
    },

    /// The slots do not fit beside what else must be in the device's memory.
    #[error(
        "{device}: {} need {}, but only {} of memory are free, and {} of it are kept for the rest of the model: {most} \
         slots fit; give {}fewer slots, a smaller expert format (int8, int4) or a shorter context, or free memory (see \
         `nvidia-smi`)",
        slots_by_use(*slots, *staging, *ring), human_bytes(*asked), human_bytes(*free), human_bytes(*reserve),
        less_beside(*staging, *ring)
    )]
    NoRoom {
        /// The device.
        device: String,
        /// Slots that were wanted, all uses together; the least that works where as many as fit were asked for.
        slots: usize,
        /// Of them, those for what is prefetched.
        staging: usize,
        /// Of them, those that a prompt's experts pass through.
        ring: usize,
        /// Their bytes.
        asked: u64,
        /// Bytes free on the device.
        free: u64,
        /// Bytes of them that are kept for other uses.
        reserve: u64,
        /// Slots that would fit.
        most: usize,
    },

    /// GPU memory ran out.
    #[error(
        "{device}: {what} need {asked} bytes of GPU memory, {free} of {total} are free (other processes may hold the \
         rest, see `nvidia-smi`): give the cache fewer slots, or free memory"
    )]
    OutOfDeviceMemory {
        /// The GPU.
        device: String,
        /// What was to be allocated.
        what: String,
        /// Bytes asked for.
        asked: u64,
        /// Bytes free on the GPU.
        free: u64,
        /// Bytes on the GPU in all.
        total: u64,
    },

    /// Host memory or another resource of the system could not be had.
    #[error("{what} failed: {reason}")]
    HostMemory {
        /// What was being done.
        what: String,
        /// What the system said.
        reason: String,
    },

    /// The CUDA driver reported an error.
    #[error("CUDA, {what}: {reason}")]
    Cuda {
        /// What was being done.
        what: String,
        /// What the driver said.
        reason: String,
    },

    /// An earlier call failed half-way; the cache's contents are no longer known.
    #[error("the cache stopped after an earlier error: {first}")]
    Stopped {
        /// The first error's text.
        first: String,
    },

    /// An error of candle.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

/// So many slots, by what they are for.
pub(crate) fn slots_by_use(slots: usize, staging: usize, ring: usize) -> String {
    if staging + ring == 0 {
        return format!("{slots} slots for experts");
    }
    let mut uses = vec![format!("{} for experts", slots.saturating_sub(staging + ring))];
    if staging > 0 {
        uses.push(format!("{staging} for what is prefetched"));
    }
    if ring > 0 {
        uses.push(format!("{ring} of the ring for prompts"));
    }
    format!("{slots} slots ({})", uses.join(", "))
}

/// What could be done without beside slots for experts, as the start of a list.
fn less_beside(staging: usize, ring: usize) -> &'static str {
    match (staging > 0, ring > 0) {
        (false, false) => "",
        (true, false) => "no prefetching (--prefetch off), ",
        (false, true) => "a smaller ring (--ring), ",
        (true, true) => "no prefetching (--prefetch off), a smaller ring (--ring), ",
    }
}

/// A place in a routing trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TracePlace {
    /// A line of a text file, from 1.
    Line(u64),
    /// An offset in a binary file, in bytes.
    Byte(u64),
}

impl std::fmt::Display for TracePlace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Line(line) => write!(f, "line {line}"),
            Self::Byte(byte) => write!(f, "byte {byte}"),
        }
    }
}

/// Whether an error of candle's is that memory of a GPU ran out.
#[cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "there is no GPU"))]
pub fn is_out_of_memory(error: &candle_core::Error) -> bool {
    #[cfg(feature = "cuda")]
    return crate::backend::cuda::candle_is_out_of_memory(error);
    #[cfg(not(feature = "cuda"))]
    false
}

impl Error {
    /// Whether memory of a GPU ran out, in an allocation of this crate's or of candle's.
    pub fn is_out_of_memory(&self) -> bool {
        match self {
            Self::OutOfDeviceMemory { .. } => true,
            Self::Candle(error) => is_out_of_memory(error),
            _ => false,
        }
    }

    /// Wraps an I/O error with the file it concerns.
    pub fn io(path: impl Into<PathBuf>, source: std::io::Error) -> Self {
        Self::Io { path: path.into(), source }
    }

    /// A file that is not what it should be.
    pub fn bad_file(path: impl Into<PathBuf>, reason: impl Into<String>) -> Self {
        Self::BadFile { path: path.into(), reason: reason.into() }
    }

    /// A tensor that is not what it should be.
    pub fn bad_tensor(name: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::BadTensor { name: name.into(), reason: reason.into() }
    }
}
