//! A branch beside the compute queue, on which a device-driven step brings what the caller guesses for the next layer;
//! kernels/ahead.cuh says how it and the steps keep apart. Captured, it is a branch of the graph, forked in every layer
//! and joined in the last. Where guesses come of what was learned, that is done on it, too (see `correlate`).

use std::sync::Arc;

use candle_core::Device;
use cudarc::driver::{CudaEvent, CudaStream, DeviceRepr, LaunchConfig, PushKernelArg};

use super::context::{Doing, Gpu};
use super::copies::Slots;
use super::correlate::{Learner, Observed};
use super::kernels::Kernels;
use super::resolve::NONE;
use super::slab::Slab;
use super::timeline::{OwnStream, Rank};
use super::upload::bytes_of;
use crate::backend::{AheadCounters, STAGED_AHEAD, SlotId};
use crate::error::{Error, Result};
use crate::predict::Learned;

/// As kernels/ahead.cuh has them.
const BLOCKS: usize = 4;
const THREADS: u32 = 256 + 32;
pub(super) const FETCH_SHARED_BYTES: u32 = 4 * 16 * 256 * 4;
/// Guesses of a layer that are brought.
const MOST_GUESSES: usize = STAGED_AHEAD / 2;
/// `sizeof(Ahead)`, where the address of what was chosen and its staging addresses begin in it, and `sizeof(Foresight)`.
const AHEAD_BYTES: usize = 80;
const CHOSEN_AT: usize = 40;
const STAGING_AT: usize = 48;
const FORESIGHT_BYTES: usize = 56;
/// From this share of right guesses on, in 2^-16, a layer's are brought where they are judged: where gains begin in
/// comoe-bench/RESULTS.md, "Prefetch on the device".
const WORTHWHILE: u32 = 18_000;
/// Guesses that are looked at.
const MOST_LOOKED_AT: usize = 32;
/// What a thread may lose here and there, where a test injects delays: some 20 us.
const DELAY_CYCLES: u32 = 40_000;

/// Arguments of the kernel, mirrored by `struct Fetch` in kernels/ahead.cu, where fields are explained.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Fetch {
    pub(super) guess: u64,
    pub(super) slot_of: u64,
    pub(super) address: u64,
    pub(super) foresight: u64,
    pub(super) ahead: u64,
    pub(super) guesses: u32,
    pub(super) experts: u32,
    pub(super) first_record: u32,
    pub(super) bytes: u32,
    pub(super) layer: u32,
    pub(super) least_worth: u32,
    pub(super) delay: u32,
    pub(super) unused: u32,
    pub(super) log: u64,
}

// SAFETY: plain integers without padding, mirrored field by field in kernels/ahead.cu.
unsafe impl DeviceRepr for Fetch {}

impl Kernels {
    /// Enqueues the bringing of what is guessed for the layer after `args.layer`; see kernels/ahead.cu.
    ///
    /// # Errors
    /// [`Error::Device`] when the launch fails.
    ///
    /// # Safety
    /// Every address must be valid on the stream's GPU, for the sizes that the kernel's source states, until it is done;
    /// the `resolve` of the same layer has run, and nobody else writes the staging slots.
    unsafe fn fetch(&self, stream: &Arc<CudaStream>, args: &Fetch) -> Result<()> {
        let config = LaunchConfig {
            grid_dim: (BLOCKS as u32, 1, 1),
            block_dim: (THREADS, 1, 1),
            shared_mem_bytes: FETCH_SHARED_BYTES,
        };
        let mut launch = stream.launch_builder(self.fetch_function());
        launch.arg(args);
        // SAFETY: the type is that of kernels/ahead.cu; the addresses are the caller's promise.
        unsafe { launch.launch(config) }.map(|_| ()).map_err(|error| self.launch_error("fetch", error))
    }
}

/// What a driver keeps to bring guessed records.
pub(super) struct Ahead {
    /// `struct Ahead`, then a `Foresight` for each layer.
    slab: Slab,
    layers: usize,
    judged: bool,
    delays: bool,
    stream: OwnStream,
    /// The guess is there; the step is so far that its successor's records may come; the last layer's branch is over.
    given: CudaEvent,
    due: CudaEvent,
    over: CudaEvent,
    /// The layer that something was enqueued on the branch for, if it was since that was last joined.
    forked: Option<usize>,
    learner: Option<Learner>,
}

impl Ahead {
    /// Into `staging`, which are among `slots`, for `layers` layers.
    pub(super) fn new(
        gpu: &Gpu,
        slots: Slots,
        staging: &[SlotId],
        layers: usize,
        judged: bool,
        delays: bool,
    ) -> Result<Self> {
        if staging.len() != STAGED_AHEAD {
            let reason = format!("{} staging slots, expected {STAGED_AHEAD}", staging.len());
            return Err(Error::BadArgument { what: "device driver", reason });
        }
        let addresses: Vec<u64> =
            staging.iter().map(|&s| slots.address(s, slots.stride)).collect::<Result<_>>()?;
        let slab = Slab::new(gpu, "what is brought ahead", AHEAD_BYTES + layers * FORESIGHT_BYTES)?;
        // Closed words; no guesses; every layer is thought worth it until it has been judged.
        let mut image = vec![0u32; (AHEAD_BYTES + layers * FORESIGHT_BYTES) / 4];
        image[..BLOCKS].fill(1 << 30);
        image[BLOCKS..BLOCKS + STAGED_AHEAD].fill(NONE);
        for (i, address) in addresses.into_iter().enumerate() {
            image[STAGING_AT / 4 + 2 * i] = address as u32;
            image[STAGING_AT / 4 + 2 * i + 1] = (address >> 32) as u32;
        }
        for layer in 0..layers {
            image[(AHEAD_BYTES + layer * FORESIGHT_BYTES + 48) / 4] = 0xffff;
        }
        slab.write(0, bytes_of(&image))?;
        let event = || gpu.ctx.new_event(None).doing("making an event");
        Ok(Self {
            slab,
            layers,
            judged,
            delays,
            // Last: kernels of a step are waited for, this one is not.
            stream: OwnStream::new(gpu, Rank::Last)?,
            given: event()?,
            due: event()?,
            over: event()?,
            forked: None,
            learner: None,
        })
    }

    pub(super) fn bytes(&self) -> usize {
        self.slab.bytes() + self.learner.as_ref().map_or(0, Learner::bytes)
    }

    /// Goes on from what was learned of layers with so many `experts`, once the GPU is idle.
    pub(super) fn learn(&mut self, gpu: &Gpu, experts: &[usize], learned: &Learned) -> Result<()> {
        if let Some(learner) = &mut self.learner {
            return learner.load(learned);
        }
        let mut learner = Learner::new(gpu, experts)?;
        learner.load(learned)?;
        self.slab.write(CHOSEN_AT, &learner.chosen_address().to_le_bytes())?;
        self.learner = Some(learner);
        Ok(())
    }

    pub(super) fn learner(&self) -> Option<&Learner> {
        self.learner.as_ref()
    }

    /// Where `step`'s guess for the next layer will be, if it gets one of what was learned.
    pub(super) fn guess_of(&self, step: Observed) -> Option<u64> {
        let learner = self.learner.as_ref().filter(|_| step.guesses && step.tokens == 1)?;
        (step.layer + 1 < self.layers).then(|| learner.guess_address(step.layer + 1))
    }

    /// Before a step of `layer` changes what a step before has left for the branch: in the order of a token's layers the branch
    /// has been joined.
    pub(super) fn enter(&mut self, compute: &CudaStream, layer: usize) -> Result<()> {
        match self.forked {
            Some(last) if layer <= last => self.join(compute),
            _ => Ok(()),
        }
    }

    /// Lets the branch learn from a step whose `resolve` is the last on `compute`.
    ///
    /// # Safety
    /// As [`Learner::observe`].
    pub(super) unsafe fn observe(
        &mut self,
        kernels: &Kernels,
        compute: &CudaStream,
        step: Observed,
    ) -> Result<()> {
        let Some(learner) = &self.learner else { return Ok(()) };
        let own = self.stream.get();
        self.due.record(compute).doing("recording an event")?;
        own.wait(&self.due).doing("waiting for an event")?;
        self.forked = Some(step.layer);
        // SAFETY: the caller's promise; the branch is one stream, which `enter` joins before a layer's turn comes again.
        unsafe { learner.observe(kernels, own, step) }
    }

    /// Addresses of what is common to all layers, and of what is layer `layer`'s own.
    pub(super) fn addresses(&self, layer: usize) -> (u64, u64) {
        let ahead = self.slab.address();
        (ahead, ahead + (AHEAD_BYTES + layer * FORESIGHT_BYTES) as u64)
    }

    /// Lets the branch bring what `stream`, or else `compute`, has guessed, once `compute` is where it is now.
    ///
    /// # Safety
    /// As [`Kernels::fetch`], for the addresses in `args`.
    pub(super) unsafe fn fork(
        &mut self,
        kernels: &Kernels,
        compute: &CudaStream,
        stream: Option<&Arc<CudaStream>>,
        args: Fetch,
    ) -> Result<()> {
        let (ahead, foresight) = self.addresses(args.layer as usize + 1);
        let args = Fetch {
            ahead,
            foresight,
            guesses: args.guesses.min(MOST_LOOKED_AT as u32),
            least_worth: if self.judged { WORTHWHILE } else { 0 },
            delay: if self.delays { DELAY_CYCLES } else { 0 },
            ..args
        };
        let own = self.stream.get();
        if let Some(stream) = stream {
            self.given.record(stream).doing("recording an event")?;
            own.wait(&self.given).doing("waiting for an event")?;
        }
        self.due.record(compute).doing("recording an event")?;
        own.wait(&self.due).doing("waiting for an event")?;
        self.forked = Some(args.layer as usize);
        // SAFETY: the caller's promise; the addresses that are set here are this struct's own.
        unsafe { kernels.fetch(own, &args) }
    }

    /// What follows on `compute` comes after the branch, whose last request the last layer has closed.
    pub(super) fn join(&mut self, compute: &CudaStream) -> Result<()> {
        if self.forked.take().is_none() {
            return Ok(());
        }
        self.over.record(self.stream.get()).doing("recording an event")?;
        compute.wait(&self.over).doing("waiting for an event")
    }

    /// What became of guesses, by layer, once the GPU is idle.
    pub(super) fn counters(&self) -> Result<Vec<AheadCounters>> {
        let mut bytes = vec![0; self.layers * FORESIGHT_BYTES];
        self.slab.read(AHEAD_BYTES, &mut bytes)?;
        let of = |words: &[u64]| {
            let worth = words[6] as u32;
            AheadCounters {
                guessed: words[0],
                right: words[1],
                brought: words[2],
                used: words[3],
                saved_bytes: words[4],
                bytes: words[5],
                width: if self.judged && worth < WORTHWHILE { 0 } else { MOST_GUESSES },
            }
        };
        let words: Vec<u64> = bytes.as_chunks().0.iter().map(|b| u64::from_le_bytes(*b)).collect();
        Ok(words.chunks_exact(FORESIGHT_BYTES / 8).map(of).collect())
    }
}

/// A stream beside a device's own, for what nobody on that one waits for: the guess of a step that the device drives
/// ([`DeviceGuess::stream`](crate::backend::DeviceGuess)).
pub struct SideStream {
    own: OwnStream,
    forked: CudaEvent,
}

impl SideStream {
    /// On a CUDA device.
    ///
    /// # Errors
    /// [`Error::Cuda`] when the driver refuses, [`Error::Candle`] for another kind of device.
    pub fn new(device: &Device) -> Result<Self> {
        let gpu = Gpu::of(device.as_cuda_device()?);
        let forked = gpu.ctx.new_event(None).doing("making an event")?;
        Ok(Self { own: OwnStream::new(&gpu, Rank::First)?, forked })
    }

    /// The stream.
    pub fn get(&self) -> &Arc<CudaStream> {
        self.own.get()
    }

    /// The stream, where what is enqueued next comes after everything on `from` so far.
    ///
    /// # Errors
    /// [`Error::Cuda`] when the driver refuses.
    pub fn behind(&self, from: &CudaStream) -> Result<&Arc<CudaStream>> {
        self.forked.record(from).doing("recording an event")?;
        self.own.get().wait(&self.forked).doing("waiting for an event")?;
        Ok(self.own.get())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_as_long_as_on_the_device() {
        assert_eq!(size_of::<Fetch>(), 80);
    }
}
