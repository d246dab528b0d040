//! What is learned of routing in GPU memory, and the guesses that come of it: kernels/correlate.cu, launched on the branch on
//! which guessed records are brought, behind each layer's `resolve`. Nothing but that branch waits for it.

use std::mem::size_of;
use std::sync::Arc;

use cudarc::driver::{CudaStream, DeviceRepr, LaunchConfig, PushKernelArg};

use super::context::Gpu;
use super::kernels::Kernels;
use super::resolve::NONE;
use super::slab::Slab;
use super::upload::bytes_of;
use super::workspace::{MOST_RANKED, learned_bytes};
use crate::backend::MOST_DEVICE_ASSIGNMENTS;
use crate::error::{Error, Result};
use crate::predict::{Correlation, LastStep, Learned};

/// As kernels/correlate.cu has them.
const THREADS: u32 = 256;
/// Scores of a layer's experts are kept in shared memory.
pub(super) const MOST_EXPERTS: usize = 4096;
/// `sizeof(Learner)` and `sizeof(Chosen)` but their ids, in words.
const LEARNER: usize = 6;
const CHOSEN: usize = 4;

/// Arguments of the kernel, mirrored by `struct Correlate` in kernels/correlate.cu, where fields are explained.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct Correlate {
    chosen: u64,
    learner: u64,
    weight: u64,
    totals: u64,
    counts: u64,
    next_totals: u64,
    next_counts: u64,
    ranked: u64,
    layer: u32,
    layers: u32,
    rows: u32,
    top_k: u32,
    before: u32,
    experts: u32,
    next_experts: u32,
    guesses: u32,
    decay: f32,
    unused: u32,
}

// SAFETY: plain numbers without padding, mirrored field by field in kernels/correlate.cu.
unsafe impl DeviceRepr for Correlate {}

/// A layer step to learn from.
#[derive(Clone, Copy)]
pub(super) struct Observed {
    pub(super) layer: usize,
    pub(super) tokens: usize,
    pub(super) top_k: usize,
    /// It comes without a guess for the next layer.
    pub(super) guesses: bool,
}

/// The tables, and what goes with them, in words from the beginning: the learner, weights by layer, guesses by layer,
/// what each layer chose, and the counts as [`Learned`] has them.
pub(super) struct Learner {
    slab: Slab,
    /// Of each layer.
    experts: Vec<usize>,
    /// Where a layer's counts begin.
    counts: Vec<usize>,
    /// What the host knew of the last step, all of its tokens.
    last: Option<LastStep>,
}

/// Behind the learner and its ids.
const WEIGHTS: usize = LEARNER + MOST_DEVICE_ASSIGNMENTS;

impl Learner {
    pub(super) fn new(gpu: &Gpu, experts: &[usize]) -> Result<Self> {
        let layers = experts.len();
        let mut at = WEIGHTS + layers * (1 + MOST_RANKED + CHOSEN + MOST_DEVICE_ASSIGNMENTS);
        let mut counts = Vec::with_capacity(layers + 1);
        for (layer, &own) in experts.iter().enumerate() {
            counts.push(at);
            at += (1 + own) * experts[(layer + layers - 1) % layers];
        }
        counts.push(at);
        debug_assert_eq!(4 * at as u64, learned_bytes(experts), "what is planned is what there is");
        let slab = Slab::new(gpu, "what is learned of routing", 4 * at)?;
        Ok(Self { slab, experts: experts.to_vec(), counts, last: None })
    }

    pub(super) fn bytes(&self) -> usize {
        self.slab.bytes()
    }

    fn ranked(&self) -> usize {
        WEIGHTS + self.experts.len()
    }

    fn chosen(&self) -> usize {
        WEIGHTS + self.experts.len() * (1 + MOST_RANKED)
    }

    fn address(&self, word: usize) -> u64 {
        self.slab.address() + 4 * word as u64
    }

    /// Where `resolve` leaves what each layer chose.
    pub(super) fn chosen_address(&self) -> u64 {
        self.address(self.chosen())
    }

    /// Where the guesses for a layer are.
    pub(super) fn guess_address(&self, layer: usize) -> u64 {
        self.address(self.ranked() + layer * MOST_RANKED)
    }

    /// Goes on from what was learned, once the GPU is idle.
    pub(super) fn load(&mut self, learned: &Learned) -> Result<()> {
        let (layers, first) = (self.experts.len(), self.counts[0]);
        let wanted = self.counts[layers] - first;
        if learned.weights.len() != layers || learned.counts.len() != wanted {
            let (have, of) = (learned.counts.len(), learned.weights.len());
            let reason = format!("{have} counts of {of} layers, expected {wanted} of {layers}");
            return Err(Error::BadArgument { what: "learned", reason });
        }
        learned.check_last(&self.experts)?;
        let mut image = vec![0u32; first];
        [image[0], image[1]] = [learned.tokens as u32, (learned.tokens >> 32) as u32];
        image[2] = NONE;
        if let Some(LastStep { layer, choices, top_k }) = &learned.last {
            // No step that follows here has more tokens.
            let rows = (choices.len() / top_k).min(MOST_DEVICE_ASSIGNMENTS / top_k);
            image[2..5].copy_from_slice(&[*layer as u32, rows as u32, *top_k as u32]);
            let ids = &choices[choices.len() - rows * top_k..];
            image[LEARNER..][..ids.len()].copy_from_slice(ids);
        }
        let weights = learned.weights.iter().map(|w| w.to_bits());
        image[WEIGHTS..].iter_mut().zip(weights).for_each(|(to, w)| *to = w);
        let ranked = self.ranked();
        image[ranked..][..layers * MOST_RANKED].fill(NONE);
        self.slab.write(0, bytes_of(&image))?;
        self.slab.write(4 * first, bytes_of(&learned.counts))?;
        self.last.clone_from(&learned.last);
        Ok(())
    }

    /// What is known by now, once the GPU is idle.
    pub(super) fn learned(&self) -> Result<Learned> {
        let layers = self.experts.len();
        let words = self.words(0, self.counts[layers])?;
        let floats = |words: &[u32]| words.iter().map(|w| f32::from_bits(*w)).collect();
        let (rows, top_k) = (words[3] as usize, words[4] as usize);
        let last = match words[5] {
            0 => self.last.clone(),
            _ => Some(LastStep {
                layer: words[2] as usize,
                choices: words[LEARNER..][..rows * top_k].to_vec(),
                top_k,
            }),
        };
        Ok(Learned {
            weights: floats(&words[WEIGHTS..][..layers]),
            counts: floats(&words[self.counts[0]..]),
            tokens: u64::from(words[0]) | u64::from(words[1]) << 32,
            last,
        })
    }

    /// What was guessed last for each layer, once the GPU is idle.
    pub(super) fn guesses(&self) -> Result<Vec<Vec<u32>>> {
        let words = self.words(self.ranked(), self.experts.len() * MOST_RANKED)?;
        let of = |ids: &[u32]| ids.iter().copied().take_while(|&id| id != NONE).collect();
        Ok(words.chunks_exact(MOST_RANKED).map(of).collect())
    }

    fn words(&self, at: usize, len: usize) -> Result<Vec<u32>> {
        let mut bytes = vec![0; 4 * len];
        self.slab.read(4 * at, &mut bytes)?;
        Ok(bytes.as_chunks().0.iter().map(|&b| u32::from_le_bytes(b)).collect())
    }

    /// Enqueues the learning from a step, and the guess for the next layer where one is wanted.
    ///
    /// # Errors
    /// [`Error::Device`] when the launch fails.
    ///
    /// # Safety
    /// `stream` comes behind the step's `resolve`, which leaves what was chosen at [`Self::chosen_address`] and has no
    /// more than [`MOST_DEVICE_ASSIGNMENTS`] assignments; steps are enqueued on one stream in their order, and the layer's
    /// next `resolve` comes behind it.
    pub(super) unsafe fn observe(
        &self,
        kernels: &Kernels,
        stream: &Arc<CudaStream>,
        step: Observed,
    ) -> Result<()> {
        let Observed { layer, tokens, top_k, guesses } = step;
        let layers = self.experts.len();
        let before = self.experts[(layer + layers - 1) % layers];
        let next = self.experts.get(layer + 1).copied().filter(|_| guesses && tokens == 1);
        let counts = self.counts[layer];
        let args = Correlate {
            chosen: self.address(self.chosen() + layer * (CHOSEN + MOST_DEVICE_ASSIGNMENTS)),
            learner: self.address(0),
            weight: self.address(WEIGHTS + layer),
            totals: self.address(counts),
            counts: self.address(counts + before),
            next_totals: next.map_or(0, |_| self.address(self.counts[layer + 1])),
            next_counts: next.map_or(0, |_| self.address(self.counts[layer + 1] + self.experts[layer])),
            ranked: next.map_or(0, |_| self.guess_address(layer + 1)),
            layer: layer as u32,
            layers: layers as u32,
            rows: tokens as u32,
            top_k: top_k as u32,
            before: before as u32,
            experts: self.experts[layer] as u32,
            next_experts: next.unwrap_or(0) as u32,
            guesses: next.map_or(0, |_| top_k.min(MOST_RANKED) as u32),
            decay: Correlation::DECAY,
            unused: 0,
        };
        let config = LaunchConfig {
            grid_dim: (1, 1, 1),
            block_dim: (THREADS, 1, 1),
            shared_mem_bytes: (size_of::<f32>() * next.unwrap_or(0)) as u32,
        };
        let mut launch = stream.launch_builder(kernels.correlate_function());
        launch.arg(&args);
        // SAFETY: the type is that of kernels/correlate.cu; addresses lie in this struct's slab, as the kernel's source
        // states; the order is the caller's promise.
        unsafe { launch.launch(config) }.map(|_| ()).map_err(|e| kernels.launch_error("correlate", e))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_as_long_as_on_the_device() {
        assert_eq!(size_of::<Correlate>(), 104);
    }
}
