//! Decoding on a GPU without the host in a token's path: the sampler there, and the step as one CUDA graph.
//!
//! A step's end chooses the next token, writes it where the next step begins, and moves the position on; so one launch
//! is one token, and the host may enqueue the next before it has seen the last. It keeps two under way. A stop token
//! that it sees late costs one step that nobody asked for, and the KV cache is cut back.
//!
//! A graph is recorded from the very code that runs a step otherwise, after one step of its kind has run so: then every
//! buffer is there, and every kernel is loaded. It holds addresses (weights, this sequence's cache, buffers, residency
//! tables), sampler options and the reach of attention, nothing that depends on a token. What is broken in a step stops
//! the chain: the steps behind it change nothing, and the host reports what it was.

mod capture;
mod pinned;
mod profile;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use candle_core::{DType, Tensor};
use comoe_core::TokenOutcome;
use cudarc::driver::{CudaEvent, CudaStream};

use self::capture::{Captured, doing};
use self::pinned::PinnedWords;
use crate::blocks::fused::{Fused, address};
use crate::blocks::kv_cache::{KvCache, LayerKv};
use crate::blocks::rope::RopeTables;
use crate::blocks::step::Step;
use crate::cuda::{AdvanceArgs, SampleArgs, SampleSettings};
use crate::decoder::{Decoder, Rows, is_misled};
use crate::error::{Error, Result};
use crate::sampler::{SamplerOptions, SplitMix64};
use crate::trial::Trial;

/// Steps under way at most.
const AHEAD: usize = 2;
/// Entries (token, error, records missed so far) that the device writes in turn.
const RING: usize = 4;
const ENTRY: usize = 3;
/// Random numbers on the device; a power of two, so that the steps' numbers may wrap.
const UNIFORMS: usize = 1024;
/// Why there is no graph, when the experts' cache does not drive on the device.
const HOST_DRIVEN: &str = "the host serves the experts (see the notes on their cache)";
/// Graphs kept of one sequence: reaches, sampler options, with guesses and without.
const MOST_GRAPHS: usize = 6;
/// Recording that failed so often fails always.
const MOST_TRIES: usize = 3;

/// Decodes one sequence on a GPU.
pub struct DeviceSteps<'m> {
    decoder: &'m Decoder,
    stream: Arc<CudaStream>,
    /// What the next step takes in, `[1]`.
    input: Tensor,
    /// What was sampled, and the number of the step: `[2]`.
    words: Tensor,
    /// `[UNIFORMS]`, F64; step `s` uses that at `s % UNIFORMS`.
    uniforms: Tensor,
    scratch: Tensor,
    /// Ids by position, `[context + 1]`.
    history: Tensor,
    /// The entries.
    ring: PinnedWords,
    settings: SampleSettings,
    random: SplitMix64,
    /// Steps enqueued so far, and the number of the first whose random number is not there yet.
    enqueued: u32,
    drawn_to: u32,
    /// Their numbers and their logits.
    under_way: VecDeque<(u32, Tensor)>,
    done: [CudaEvent; AHEAD],
    graphs: VecDeque<Recorded>,
    tries: usize,
    /// Why the last try failed.
    failure: Option<String>,
    note: Option<String>,
    replayed: usize,
    launching: Duration,
    trial: Trial,
    /// Of the last step that was waited for, if all since have been: when it ended, and what had been missed by then.
    ended: Option<(Instant, u32)>,
}

/// A graph, and what it is good for.
struct Recorded {
    graph: Captured,
    reach: usize,
    options: SamplerOptions,
    place: Tensor,
    asks: bool,
    /// Keeps the cache that the graph writes, and the angles that it reads.
    _kv: (Vec<LayerKv>, RopeTables),
    logits: Tensor,
}

/// Options that make the same choice of the same numbers.
fn alike(a: &SamplerOptions, b: &SamplerOptions) -> bool {
    SamplerOptions { seed: 0, ..a.clone() } == SamplerOptions { seed: 0, ..b.clone() }
}

impl<'m> DeviceSteps<'m> {
    /// For a sequence of `decoder`; `None` where it has no fused steps.
    ///
    /// # Errors
    /// When the device has no memory for it.
    pub fn of(decoder: &'m Decoder) -> Result<Option<Self>> {
        let Some(fused) = decoder.fused() else { return Ok(None) };
        let stream = fused.stream().clone();
        let ctx = stream.context().clone();
        let device = decoder.device();
        let words = |n: usize| Tensor::zeros(n, DType::U32, device);
        let event = || ctx.new_event(None).map_err(doing("making an event"));
        Ok(Some(Self {
            decoder,
            input: words(1)?,
            words: words(2)?,
            uniforms: Tensor::zeros(UNIFORMS, DType::F64, device)?,
            scratch: words(SampleArgs::SCRATCH_BYTES.div_ceil(4))?,
            history: words(decoder.context() + 1)?,
            ring: PinnedWords::new(&ctx, ENTRY * RING)?,
            settings: SampleSettings {
                options: SamplerOptions::default(),
                logit_scale: 1.0,
                logit_cap: None,
            },
            random: SplitMix64::new(0),
            enqueued: 0,
            drawn_to: 0,
            under_way: VecDeque::new(),
            done: [event()?, event()?],
            graphs: VecDeque::new(),
            tries: 0,
            failure: None,
            note: None,
            replayed: 0,
            launching: Duration::ZERO,
            trial: Trial::new(),
            ended: None,
            stream,
        }))
    }

    /// Why the last step was not replayed, if that is so.
    pub fn note(&self) -> Option<&str> {
        self.note.as_deref()
    }

    /// Steps replayed since [`Self::begin`].
    pub fn replayed(&self) -> usize {
        self.replayed
    }

    /// Logits `[1, vocab]` of the step that was replayed last, in the model's dtype still, while no other is under way. For
    /// tests.
    #[doc(hidden)]
    pub fn logits(&self) -> Option<&Tensor> {
        self.graphs.back().map(|g| &g.logits)
    }

    /// Whether steps guess ahead, as the clock decided last; `None` before that, and where it has no say.
    pub fn asks(&self) -> Option<bool> {
        self.trial.asks().filter(|_| self.decoder.experts().judges_device_guesses())
    }

    /// How long the host took to enqueue the steps replayed since [`Self::begin`].
    pub fn launching(&self) -> Duration {
        self.launching
    }

    /// Enqueues `n` steps by replaying a graph, without looking at a token, and waits for the last: what a token takes
    /// without the host. `false`, and not all are done, where that cannot be.
    ///
    /// # Errors
    /// As [`Self::next`], and [`Error::ContextExceeded`] for more than the cache has room for.
    #[doc(hidden)]
    pub fn run_blind(&mut self, kv: &mut KvCache, n: usize) -> Result<bool> {
        self.settle();
        kv.reserve(n)?;
        for _ in 0..n {
            if !self.launch(kv)? {
                return Ok(false);
            }
            // Only the last is waited for.
            self.under_way.drain(..self.under_way.len() - 1);
        }
        // A broken step is told by all behind it.
        match self.drain() {
            false => Ok(true),
            true => Err(self.broken(kv, None).unwrap_or_else(no_reason)),
        }
    }

    /// Nodes of the graph that was replayed last.
    pub fn nodes(&self) -> Option<usize> {
        self.graphs.back().map(|g| g.graph.nodes)
    }

    /// Begins an answer to `prompt`, which is in the cache, or will be, when the first token is chosen.
    ///
    /// # Errors
    /// [`Error::BadOption`], and when the device fails.
    pub fn begin(&mut self, options: &SamplerOptions, prompt: &[u32]) -> Result<()> {
        options.check()?;
        self.settle();
        self.settings.options = options.clone();
        self.random = SplitMix64::new(options.seed);
        (self.drawn_to, self.replayed, self.note) = (self.enqueued, 0, None);
        self.launching = Duration::ZERO;
        if options.repetition_penalty != 1.0 && !prompt.is_empty() {
            self.history.slice_set(&Tensor::new(prompt, self.decoder.device())?, 0, 0)?;
        }
        Ok(())
    }

    /// Chooses the token behind those in `kv` from logits `[1, vocab]`.
    ///
    /// # Errors
    /// [`Error::BadLogits`], and when the device fails.
    pub fn choose(&mut self, logits: &Tensor, kv: &mut KvCache) -> Result<u32> {
        self.settle();
        let place = kv.place(kv.len().saturating_sub(1))?;
        self.draw()?;
        {
            let fused = self.decoder.fused().ok_or_else(no_kernels)?;
            self.enqueue_end(&fused, logits, &place)?;
        }
        kv.place_moved();
        self.count(logits.clone())?;
        Ok(self.wait(kv)?.0)
    }

    /// Runs the token that was chosen last, and chooses the one behind it, by replaying a graph; `None`, and nothing is
    /// done, where that cannot be, see [`Self::note`]. Up to `left` steps may be enqueued.
    ///
    /// # Errors
    /// As [`Decoder::forward`] and [`Self::choose`].
    pub fn next(&mut self, kv: &mut KvCache, left: usize) -> Result<Option<u32>> {
        while self.under_way.len() < AHEAD.min(left) && kv.len() < kv.capacity() {
            match self.launch(kv) {
                Ok(true) => {}
                Ok(false) => break,
                // Often what is wrong with a step under way.
                Err(e) => {
                    return Err(match self.broken(kv, None) {
                        // That is what came of it.
                        None | Some(Error::Core(comoe_core::Error::Stopped { .. })) => e,
                        Some(cause) => cause,
                    });
                }
            }
        }
        if self.under_way.is_empty() {
            return Ok(None);
        }
        let (token, missed) = self.wait(kv)?;
        let now = Instant::now();
        let before = self.ended.replace((now, missed));
        self.trial.end(before.and_then(|(then, of_then)| Some((now - then, missed.checked_sub(of_then)?))));
        self.replayed += 1;
        Ok(Some(token))
    }

    /// Lets go of all graphs, which hold addresses of the sequence's KV cache, so that that can move.
    pub fn let_go(&mut self) {
        self.settle();
        self.graphs.clear();
    }

    /// The sequence may have `tokens` tokens from now on. Where that needs more room, all graphs are let go.
    ///
    /// # Errors
    /// When the device has no memory for it.
    pub fn reach_to(&mut self, tokens: usize) -> Result<()> {
        if tokens + 1 > self.history.elem_count() {
            self.let_go();
            let longer = Tensor::zeros(tokens + 1, DType::U32, self.decoder.device())?;
            longer.slice_set(&self.history, 0, 0)?;
            self.history = longer;
        }
        Ok(())
    }

    /// Waits for what is under way; its tokens are dropped, and what was broken in it is nobody's concern.
    pub fn settle(&mut self) {
        if self.drain() {
            self.ask_all();
        }
    }

    /// What was broken in the steps so far, as this crate's kernels tell it and as the experts' do. All are asked, so that
    /// none tells a later caller.
    fn ask_all(&mut self) -> (Result<()>, comoe_core::Result<()>) {
        // A broken step does not count on the device.
        self.tell_step();
        let own = self.decoder.fused().map_or(Ok(()), |mut fused| fused.check());
        (own, self.decoder.experts().flush())
    }

    /// Waits for what is under way; whether any of it was broken.
    fn drain(&mut self) -> bool {
        let mut broken = false;
        while let Some((step, _)) = self.under_way.pop_front() {
            // A device that fails says so to whoever uses it next.
            let done = self.done[step as usize % AHEAD].synchronize();
            broken |= done.is_ok() && self.ring.get(ENTRY * (step as usize % RING) + 1) != 0;
        }
        self.trial.forget_begun();
        self.ended = None;
        broken
    }

    /// Whether the next replayed step guesses ahead, where somebody wants that.
    fn next_asks(&self) -> bool {
        !self.decoder.experts().judges_device_guesses() || self.trial.next_asks()
    }

    /// Enqueues one step more, if there is a graph for it.
    fn launch(&mut self, kv: &mut KvCache) -> Result<bool> {
        let started = Instant::now();
        let Some(top_k) = self.decoder.top_k() else { return Ok(false) };
        let reach = Fused::reach(kv.len() + 1, kv.capacity());
        let place = kv.place(kv.len())?;
        let asks = self.next_asks();
        if !self.has_graph(reach, &place, asks) && !self.record(kv, reach, &place, (top_k, asks))? {
            return Ok(false);
        }
        self.draw()?;
        let Some(recorded) = self.graphs.back_mut() else { return Ok(false) };
        let logits = recorded.logits.clone();
        // Nobody else enqueues a fused step in between: its buffers are this one's, too.
        let fused = self.decoder.fused().ok_or_else(no_kernels)?;
        let mut token = self.decoder.experts().begin_token(1, top_k)?;
        if !token.is_on_device() {
            self.note = Some(HOST_DRIVEN.to_owned());
            return Ok(false);
        }
        loop {
            recorded.graph.launch().map_err(doing("replaying a step"))?;
            match token.end()? {
                TokenOutcome::Done => break,
                // An expert was missing that is there now. What the run said about its NaNs is to be forgotten.
                TokenOutcome::Replay => fused.forget_errors()?,
            }
        }
        drop(token);
        drop(fused);
        kv.advance(1);
        kv.place_moved();
        self.count(logits)?;
        self.trial.begin();
        self.launching += started.elapsed();
        Ok(true)
    }

    /// Whether there is a graph for the step; it is the last then.
    fn has_graph(&mut self, reach: usize, place: &Tensor, asks: bool) -> bool {
        let fits = |g: &Recorded| {
            (g.reach, g.asks, g.place.id()) == (reach, asks, place.id())
                && alike(&g.options, &self.settings.options)
        };
        let Some(at) = self.graphs.iter().position(fits) else { return false };
        if let Some(graph) = self.graphs.remove(at) {
            self.graphs.push_back(graph);
        }
        true
    }

    /// Records a graph, if a step of its kind has run: of a step in which a token chooses `top_k` experts, and that
    /// guesses ahead or not.
    fn record(
        &mut self,
        kv: &KvCache,
        reach: usize,
        place: &Tensor,
        (top_k, asks): (usize, bool),
    ) -> Result<bool> {
        if self.tries == MOST_TRIES {
            self.note.clone_from(&self.failure);
            return Ok(false);
        }
        let Some(mut fused) = self.decoder.fused() else { return Ok(false) };
        if !fused.is_ready(reach) {
            let by_host = !self.decoder.experts().drives_tokens(1, top_k);
            self.note = by_host.then(|| HOST_DRIVEN.to_owned());
            return Ok(false);
        }
        let token = self.decoder.experts().begin_token(1, top_k)?;
        if !token.is_on_device() {
            self.note = Some(HOST_DRIVEN.to_owned());
            return Ok(false);
        }
        let ropes = self.decoder.ropes();
        let mut logits = None;
        fused.set_asks(asks);
        let recorded = Captured::of(&self.stream, || {
            fused.mark("begin", 0)?;
            let found = fused.with_step(place, 1, reach, |step| {
                self.decoder.run(&self.input, kv.layers(), Step::Fused(step), Some(Rows::Last))
            })?;
            let found = found.ok_or(Error::EmptyPrompt)?;
            logits = Some(found.clone());
            self.enqueue_end(&fused, &found, place)?;
            fused.mark("sampling", 0)?;
            Ok(())
        });
        fused.set_asks(true);
        drop(token);
        drop(fused);
        match (recorded, logits) {
            (Ok(graph), Some(logits)) => {
                if self.graphs.len() == MOST_GRAPHS {
                    self.graphs.pop_front();
                }
                let options = self.settings.options.clone();
                let (place, kv) = (place.clone(), (kv.layers().to_vec(), ropes));
                self.graphs.push_back(Recorded { graph, reach, options, place, asks, _kv: kv, logits });
                (self.tries, self.note) = (0, None);
                Ok(true)
            }
            (Err(e), _) => {
                self.tries += 1;
                self.note = Some(format!("the step cannot be recorded: {e}"));
                self.failure.clone_from(&self.note);
                Ok(false)
            }
            (Ok(_), None) => Ok(false),
        }
    }

    /// Enqueues the end of a step of one token: sampling, the hand-over to the next, and the message to the host.
    fn enqueue_end(&self, fused: &Fused, logits: &Tensor, place: &Tensor) -> Result<()> {
        let at = |t: &Tensor| address(t, &self.stream);
        let (token, step) = (at(&self.words)?, at(&self.words)? + 4);
        let (errors, errors_len) = fused.errors()?;
        let (history, position) = (at(&self.history)?, at(place)?);
        let sample = SampleArgs {
            logits: at(&logits.contiguous()?)?,
            dtype: logits.dtype(),
            vocab: logits.elem_count(),
            settings: self.settings.clone(),
            history,
            history_len: self.history.elem_count(),
            position,
            ahead: 1,
            uniforms: at(&self.uniforms)?,
            uniforms_len: UNIFORMS,
            step,
            token,
            scratch: at(&self.scratch)?,
            error: errors + 4 * (errors_len as u64 - 1),
        };
        let ring = self.ring.device_address()?;
        let advance = AdvanceArgs {
            token,
            errors,
            errors_len,
            input: at(&self.input)?,
            position,
            step,
            history,
            history_len: self.history.elem_count(),
            missed: self.decoder.experts().missed_address().unwrap_or(0),
            ring,
            ring_len: RING,
        };
        // SAFETY: buffers of the sizes documented, which live as long as `self` and are written only by what is enqueued
        // on this stream; the logits are a tensor on it; the history holds the ids of all positions where a penalty
        // wants them.
        unsafe {
            fused.kernels().sample(&self.stream, &sample)?;
            fused.kernels().advance(&self.stream, &advance)?;
        }
        Ok(())
    }

    /// Makes sure that the next step's random number is there. In stream order, so steps under way keep theirs.
    fn draw(&mut self) -> Result<()> {
        if self.settings.options.temperature == 0.0 || self.drawn_to != self.enqueued {
            return Ok(());
        }
        let mut numbers = vec![0.0; UNIFORMS];
        for i in 0..UNIFORMS {
            numbers[(self.enqueued as usize + i) % UNIFORMS] = self.random.unit();
        }
        self.uniforms.slice_set(&Tensor::new(numbers.as_slice(), self.decoder.device())?, 0, 0)?;
        self.drawn_to = self.enqueued.wrapping_add(UNIFORMS as u32);
        Ok(())
    }

    /// Makes the device's count of steps the host's.
    fn tell_step(&self) {
        let device = self.words.device();
        // A device that fails says so to whoever uses it next.
        let _ = Tensor::new(&[self.enqueued], device).and_then(|step| self.words.slice_set(&step, 0, 1));
    }

    /// Counts a step with these logits, whose end was enqueued.
    fn count(&mut self, logits: Tensor) -> Result<()> {
        let step = self.enqueued;
        self.done[step as usize % AHEAD].record(&self.stream).map_err(doing("recording an event"))?;
        self.under_way.push_back((step, logits));
        self.enqueued = step.wrapping_add(1);
        Ok(())
    }

    /// Waits for the oldest step under way, and hands out its token, and the records missed so far.
    fn wait(&mut self, kv: &mut KvCache) -> Result<(u32, u32)> {
        let (step, logits) = self.under_way.pop_front().ok_or_else(no_kernels)?;
        let (done, experts) = (&self.done[step as usize % AHEAD], self.decoder.experts());
        match experts.placement() {
            None => done.synchronize().map_err(doing("waiting for a step"))?,
            Some(_) => experts.wait_until(|| done.try_is_complete().map_err(asking))?,
        }
        let entry = ENTRY * (step as usize % RING);
        let [token, error, missed] = [0, 1, 2].map(|word| self.ring.get(entry + word));
        if error == 0 {
            return Ok((token, missed));
        }
        Err(self.broken(kv, Some(&logits)).unwrap_or_else(no_reason))
    }

    /// What was broken in the steps so far, by routers, experts and the sampler, the first cause first. The steps behind
    /// it have done nothing.
    fn broken(&mut self, kv: &mut KvCache, logits: Option<&Tensor>) -> Option<Error> {
        self.drain();
        kv.forget_place();
        match self.ask_all() {
            // The rest of the step ran on nothing.
            (_, Err(e)) if !is_misled(&e) => Some(e.into()),
            (Err(Error::BadLogits { id, .. }), Ok(())) => {
                let value = |logits: &Tensor| {
                    logits.flatten_all()?.narrow(0, id, 1)?.to_dtype(DType::F32)?.to_vec1::<f32>()
                };
                let value = logits.and_then(|l| value(l).ok()).map_or(f32::NAN, |v| v[0]);
                Some(Error::BadLogits { id, value })
            }
            (Err(Error::BadLogits { .. }) | Ok(()), Err(e)) => Some(e.into()),
            (Err(e), _) => Some(e),
            (Ok(()), Ok(())) => None,
        }
    }
}

impl Drop for DeviceSteps<'_> {
    fn drop(&mut self) {
        self.settle();
    }
}

fn asking(error: cudarc::driver::DriverError) -> comoe_core::Error {
    comoe_core::Error::Cuda { what: "asking for a step".to_owned(), reason: error.to_string() }
}

fn no_reason() -> Error {
    candle_core::Error::msg("a step was broken and does not say how").into()
}

fn no_kernels() -> Error {
    candle_core::Error::msg("a decoder without fused kernels has no steps on the device").into()
}
