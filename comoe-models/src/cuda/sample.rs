//! The next token, chosen on the device.

use std::sync::Arc;

use candle_core::DType;
use comoe_core::Result;
use cudarc::driver::CudaStream;

use super::{DecodeKernels, bad, dtype_code, grid, within};
use crate::sampler::SamplerOptions;

const THREADS: usize = 512;
const BINS: usize = 2048;
/// Ids of a block, at least, where there are more blocks than that needs.
const LEAST_CHUNK: usize = 1024;
/// Shared memory of kernels/sample.cu beside what is asked for at the launch, and a little more.
pub(super) const STATIC_SHARED: usize = 2048;

/// How logits become a token.
#[derive(Debug, Clone)]
pub struct SampleSettings {
    /// As on the host; the seed is not used: random numbers come from [`SampleArgs::uniforms`].
    pub options: SamplerOptions,
    /// Factor on the logits.
    pub logit_scale: f32,
    /// Logits become `cap * tanh(logits / cap)`.
    pub logit_cap: Option<f32>,
}

/// Arguments of [`DecodeKernels::sample`]; addresses are device memory.
#[derive(Debug, Clone)]
pub struct SampleArgs {
    /// `[vocab]`
    pub logits: u64,
    /// F32, BF16 or F16.
    pub dtype: DType,
    /// Logits, up to 1,048,576.
    pub vocab: usize,
    /// How a token is chosen.
    pub settings: SampleSettings,
    /// The ids so far by position, u32; needed for a repetition penalty, else 0.
    pub history: u64,
    /// Ids that the history has room for. What lies behind is not looked at.
    pub history_len: usize,
    /// One u32: the position of the step's first token.
    pub position: u64,
    /// Tokens of the step: `position + ahead` ids are in the history.
    pub ahead: usize,
    /// `[uniforms_len]` F64 in 0..1 (0 included, 1 not); a step uses that at `step % uniforms_len`. Not read by a greedy
    /// choice.
    pub uniforms: u64,
    /// Random numbers there.
    pub uniforms_len: usize,
    /// One u32: steps so far.
    pub step: u64,
    /// Result: one u32.
    pub token: u64,
    /// [`SampleArgs::SCRATCH_BYTES`] of memory, a multiple of 8, zeroed once before the first launch; launches that
    /// follow each other on one stream may share it.
    pub scratch: u64,
    /// One u32, set to 1 + the first id whose logit is NaN or +inf, or to 1 when all are minus infinity (the token is 0
    /// then), else left alone.
    pub error: u64,
}

impl SampleArgs {
    /// Size of the scratch memory.
    pub const SCRATCH_BYTES: usize = 24 + 3 * 8 * BINS;
}

/// As kernels/sample.cu has it.
#[repr(C)]
#[derive(Clone, Copy)]
struct Device {
    logits: u64,
    history: u64,
    position: u64,
    uniforms: u64,
    step: u64,
    token: u64,
    error: u64,
    scratch: u64,
    inverse_temperature: f64,
    top_p: f64,
    min_p: f64,
    vocab: u32,
    dtype: u32,
    ahead: u32,
    window: u32,
    uniforms_len: u32,
    history_len: u32,
    top_k: u32,
    chunk: u32,
    stored: u32,
    greedy: u32,
    logit_scale: f32,
    logit_cap: f32,
    penalty: f32,
    pad: u32,
}

/// How the vocabulary is shared out over blocks; it changes no result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Cut {
    blocks: usize,
    chunk: usize,
    /// Whether weights fit into shared memory beside the logits.
    stored: bool,
    shared_bytes: usize,
}

impl Cut {
    /// For a GPU; `None` where its shared memory is too small.
    fn new(vocab: usize, multiprocessors: usize, shared_limit: usize) -> Option<Self> {
        let chunk = vocab.div_ceil(multiprocessors).max(LEAST_CHUNK.min(vocab));
        let bytes = |stored: bool| {
            let weights = if stored { 8 * chunk } else { 0 };
            12 * BINS + weights + 4 * chunk + 4 * chunk.div_ceil(32)
        };
        let stored = [true, false].into_iter().find(|s| bytes(*s) + STATIC_SHARED <= shared_limit)?;
        Some(Self { blocks: vocab.div_ceil(chunk), chunk, stored, shared_bytes: bytes(stored) })
    }
}

impl DecodeKernels {
    /// Enqueues the choice of a token. Given the numbers that the host's [`crate::Sampler`] would draw, it is the same
    /// token, but for a draw or a boundary of top-p that is within about 1e-12 of another one.
    ///
    /// # Errors
    /// [`comoe_core::Error::BadArgument`] for sizes, a dtype or options that the kernel cannot do,
    /// [`comoe_core::Error::Device`] when the launch fails.
    ///
    /// # Safety
    /// Every address in `args` must be valid on the stream's GPU, for the sizes documented, until the kernel is done.
    pub unsafe fn sample(&self, stream: &Arc<CudaStream>, args: &SampleArgs) -> Result<()> {
        let SampleSettings { options, logit_scale, logit_cap } = &args.settings;
        if let Err(error) = options.check() {
            return bad("sampler options", error.to_string());
        }
        let penalised = options.repetition_penalty != 1.0;
        if penalised && args.history == 0 {
            return bad("sampler", "a repetition penalty needs the history of tokens, found none".to_owned());
        }
        let greedy = options.temperature == 0.0;
        let vocab = within("logits", args.vocab, 1, 1 << 20)?;
        let Some(cut) = Cut::new(args.vocab, self.multiprocessors, self.shared_limit) else {
            let (n, m) = (self.multiprocessors, self.shared_limit);
            let reason =
                format!("{vocab} do not fit into the shared memory of {n} multiprocessors, {m} bytes each");
            return bad("logits", format!("{reason}; sample on the host"));
        };
        let least_random = if greedy { 0 } else { 1 };
        let device = Device {
            logits: args.logits,
            history: args.history,
            position: args.position,
            uniforms: args.uniforms,
            step: args.step,
            token: args.token,
            error: args.error,
            scratch: args.scratch,
            inverse_temperature: if greedy { 0.0 } else { 1.0 / options.temperature },
            top_p: options.top_p,
            min_p: options.min_p,
            vocab,
            dtype: dtype_code("logits", args.dtype)?,
            ahead: within("tokens of a step", args.ahead, 1, 1 << 30)?,
            window: options.repetition_window.map_or(u32::MAX, |w| w.min(u32::MAX as usize) as u32),
            uniforms_len: within("random numbers", args.uniforms_len, least_random, 1 << 30)?,
            history_len: within("room in a history", args.history_len, 0, 1 << 30)?,
            top_k: options.top_k.map_or(0, |k| k.min(args.vocab) as u32),
            chunk: cut.chunk as u32,
            stored: cut.stored.into(),
            greedy: greedy.into(),
            logit_scale: *logit_scale,
            logit_cap: logit_cap.unwrap_or(0.0),
            penalty: options.repetition_penalty as f32,
            pad: 0,
        };
        let config = grid(cut.blocks, 1, 1, THREADS, cut.shared_bytes);
        // SAFETY: `Device` is the kernel's struct; the addresses are the caller's promise.
        unsafe { self.launch_together("sample", stream, &self.sample, config, &device) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    super::super::mirrored!(Device, 144);

    #[test]
    fn vocabularies_fit_gpus() {
        let big = Cut::new(151_936, 132, 227 << 10).unwrap();
        assert_eq!((big.blocks, big.chunk, big.stored), (132, 1152, true));
        for (vocab, multiprocessors) in [(151_936, 20), (262_144, 20), (262_144, 28), (1, 132), (1025, 132)] {
            let cut = Cut::new(vocab, multiprocessors, 99 << 10).unwrap();
            assert!(cut.blocks * cut.chunk >= vocab && cut.blocks <= multiprocessors, "{cut:?}");
            assert!(cut.shared_bytes + STATIC_SHARED <= 99 << 10);
        }
        assert_eq!(Cut::new(1 << 20, 20, 99 << 10), None);
    }
}
