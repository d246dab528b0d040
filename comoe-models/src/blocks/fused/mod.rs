//! Steps of few tokens on a GPU: this crate's kernels between tensors.
//!
//! The same kernels run whether a step is enqueued one by one or replayed as a graph, and a token's results do not
//! depend on the others in the step, so both give the same bits. Nothing here waits, and nothing is read from the
//! device: what is broken (a router's output, a position past the end) sets an error word that is looked at when a
//! step is done.

mod mixers;

use std::cell::{OnceCell, RefCell};
use std::sync::Arc;

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::CudaStorageSlice;
use candle_core::{CudaStorage, DType, Device, Layout, Result, Shape, Storage, Tensor};
use comoe_core::Activation;
use comoe_core::backend::DeviceGuess;
use comoe_core::backend::cuda::{SideStream, Stamps};
use cudarc::driver::{CudaStream, DevicePtr};

pub(super) use self::mixers::Heads;
use super::arena::Arena;
use super::int8_matrix::Int8Matrix;
use super::router::OnDevice;
use super::step::LEAST_REACH;
use crate::arch::{DecoderPlan, MixerPlan, RouterPlan};
use crate::cuda::{
    AddGatedArgs, Centre, DecodeKernels, EmbedArgs, GateArgs, GemvArgs, GemvWeight, GivenExperts,
    MOST_EXPERTS, MOST_TOKENS, NormArgs, RouteArgs,
};
use crate::error::Error;

/// Error words besides the routers'.
const OTHER_ERRORS: usize = 2;

/// Kernels and buffers of a decoder's fused steps.
pub struct Fused {
    kernels: DecodeKernels,
    stream: Arc<CudaStream>,
    arena: Arena,
    /// What was broken: see [`Self::check`]. A word for each layer's router, one for positions, one for the sampler.
    errors: Tensor,
    /// Reaches at which a step of one token has run: all its buffers are there, and its kernels are loaded.
    ready: Vec<usize>,
    given: Option<GivenRouting>,
    /// Steps guess what the next layer will choose, where somebody wants that.
    asks: bool,
    /// While a step is recorded to be timed.
    marks: RefCell<Option<Marks>>,
    /// Made when it is first needed.
    aside: OnceCell<Aside>,
    device: Device,
}

/// For kernels that nobody on the step's own stream waits for. Those here come one after the other, and read what they
/// find: by the time they run, what they were to read may have been written over.
struct Aside {
    stream: SideStream,
    arena: Arena,
    /// Nothing that is broken here matters.
    error: Tensor,
}

/// A point in a step whose time is taken: the end of a part.
pub(crate) struct Mark {
    pub(crate) what: String,
    /// Weights and cache that the part reads.
    pub(crate) bytes: usize,
}

/// All of a step's, and their times in the same order. To be kept as long as a graph that was recorded with them.
pub(crate) struct Marks {
    pub(crate) list: Vec<Mark>,
    pub(crate) stamps: Stamps,
}

/// Routing that is replayed in place of the routers' choice, for measuring.
#[derive(Debug, Clone)]
pub struct GivenRouting {
    /// `[tokens, layers, top_k]`, U32: the experts of the model's layers.
    pub ids: Tensor,
    /// The same for what the layer before guesses of each, in place of the stale gate's guess.
    pub guesses: Option<Tensor>,
    /// Position of the first token. Behind the last one it begins anew.
    pub first: usize,
}

/// One fused step.
#[derive(Clone, Copy)]
pub struct Step<'a> {
    fused: &'a Fused,
    stream: &'a Arc<CudaStream>,
    arena: &'a Arena,
    /// Present beside the step's own stream.
    aside: Option<&'a Aside>,
    /// `[1]`, U32: position of the first token.
    place: &'a Tensor,
    tokens: usize,
    /// Positions that it may see.
    reach: usize,
}

impl Fused {
    /// Whether a step may have so many tokens.
    pub(crate) fn takes(tokens: usize) -> bool {
        tokens <= MOST_TOKENS
    }

    /// Kernels for a model; `None` on another device than a GPU. The error says why there are none for this one.
    pub(crate) fn for_plan(
        plan: &DecoderPlan,
        dtype: DType,
        device: &Device,
    ) -> std::result::Result<Option<Self>, String> {
        let Device::Cuda(gpu) = device else { return Ok(None) };
        if !matches!(dtype, DType::F32 | DType::BF16 | DType::F16) {
            return Err(format!("they have no {dtype:?}"));
        }
        covers(plan)?;
        let stream = gpu.cuda_stream();
        let kernels = DecodeKernels::load(stream.context()).map_err(|e| e.to_string())?;
        let words = plan.layers.len() + OTHER_ERRORS;
        let errors = Tensor::zeros(words, DType::U32, device).map_err(|e| e.to_string())?;
        Ok(Some(Self {
            kernels,
            stream,
            arena: Arena::new(device),
            errors,
            ready: Vec::new(),
            given: None,
            asks: true,
            marks: RefCell::default(),
            aside: OnceCell::new(),
            device: device.clone(),
        }))
    }

    /// How far a step sees whose last token is the `len`-th: rounded up, so that many steps see as far.
    pub(crate) fn reach(len: usize, capacity: usize) -> usize {
        len.next_power_of_two().clamp(LEAST_REACH, capacity.max(LEAST_REACH)).min(capacity)
    }

    /// Whether a step of one token with this reach would allocate nothing.
    pub(crate) fn is_ready(&self, reach: usize) -> bool {
        self.ready.contains(&reach)
    }

    /// Runs `f` for a step of `tokens` tokens that sees no position from `reach` on. `place` is `[1]`, U32.
    pub(crate) fn with_step<R>(
        &mut self,
        place: &Tensor,
        tokens: usize,
        reach: usize,
        f: impl FnOnce(&Step<'_>) -> R,
    ) -> R {
        self.arena.turn();
        let (stream, arena) = (&self.stream, &self.arena);
        f(&Step { fused: self, stream, arena, aside: None, place, tokens, reach })
    }

    /// Replays routing from here on. Graphs that were recorded before do not know.
    pub(crate) fn give_routing(&mut self, given: Option<GivenRouting>) {
        self.given = given;
    }

    /// Whether steps guess from here on.
    pub(crate) fn set_asks(&mut self, asks: bool) {
        self.asks = asks;
    }

    /// From here on parts are marked, until [`Self::take_marks`].
    pub(crate) fn begin_marks(&self, stamps: Stamps) {
        *self.marks.borrow_mut() = Some(Marks { list: Vec::new(), stamps });
    }

    pub(crate) fn take_marks(&self) -> Option<Marks> {
        self.marks.borrow_mut().take()
    }

    /// Ends a part, where parts are marked: a kernel that tells the time, in a graph each time it runs.
    pub(crate) fn mark(&self, what: &str, bytes: usize) -> Result<()> {
        if let Some(Marks { list, stamps }) = self.marks.borrow_mut().as_mut() {
            stamps.stamp(&self.stream, list.len()).map_err(failed)?;
            list.push(Mark { what: what.to_owned(), bytes });
        }
        Ok(())
    }

    /// A step of one token with this reach is done.
    pub(crate) fn made_ready(&mut self, reach: usize) {
        if !self.is_ready(reach) {
            self.ready.push(reach);
        }
    }

    /// Waits for the steps so far, and reports what was broken in them, once.
    ///
    /// # Errors
    /// [`Error::BadRouter`]; [`Error::BadLogits`] of the token whose logit a sampler could not take, with NaN for its
    /// value; [`Error::Candle`] for a position past the end of a cache or of a table.
    pub(crate) fn check(&mut self) -> crate::Result<()> {
        let words = self.errors.to_vec1::<u32>()?;
        let Some(first) = words.iter().position(|w| *w != 0) else { return Ok(()) };
        self.forget_errors()?;
        let at = words[first] as usize - 1;
        Err(match words.len() - first {
            1 => Error::BadLogits { id: at, value: f32::NAN },
            2 => candle_core::Error::msg(format!("token {at} of a step has no room in the KV cache")).into(),
            _ => Error::BadRouter { layer: first, token: at },
        })
    }

    /// Forgets what was broken: steps that do not count have run.
    pub(crate) fn forget_errors(&self) -> Result<()> {
        self.errors.slice_set(&self.errors.zeros_like()?, 0, 0)
    }

    /// Address and number of the words that [`Self::check`] looks at; the last one is the sampler's.
    pub(crate) fn errors(&self) -> Result<(u64, usize)> {
        Ok((address(&self.errors, &self.stream)?, self.errors.elem_count()))
    }

    /// Bytes of the buffers.
    pub(crate) fn held_bytes(&self) -> u64 {
        let aside = self.aside.get().map_or(0, |aside| aside.arena.bytes());
        self.arena.bytes() + aside + (4 * self.errors.elem_count()) as u64
    }

    pub(crate) fn kernels(&self) -> &DecodeKernels {
        &self.kernels
    }

    pub(crate) fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }
}

/// Whether there are kernels for every block of a model, or what there is none for.
fn covers(plan: &DecoderPlan) -> std::result::Result<(), String> {
    let no = |what: &str, most: usize, found: usize| match found > most {
        true => Err(format!("they go up to {what} of {most}, this model has {found}")),
        false => Ok(()),
    };
    for layer in &plan.layers {
        match &layer.mixer {
            MixerPlan::Attention(a) => no("heads", 768, a.head_dim)?,
            MixerPlan::Latent(l) => {
                no("latent keys", 768, l.latent + l.rope_dim)?;
                no("queries", 1024, l.nope_dim.max(l.rope_dim))?;
            }
            MixerPlan::Conv(_) => {}
        }
    }
    for (_, moe) in plan.moe_layers() {
        no("layers", MOST_EXPERTS, moe.experts)?;
    }
    no("rows", 16_384, plan.hidden)
}

/// Address of a tensor's first element, whose strides are the caller's business.
pub(crate) fn address(t: &Tensor, stream: &CudaStream) -> Result<u64> {
    let (storage, layout) = t.storage_and_layout();
    let Storage::Cuda(storage) = &*storage else {
        candle_core::bail!("a tensor for this crate's kernels is on {:?}", t.device().location());
    };
    address_in(storage, layout, stream)
}

/// The same of a layout in a storage.
pub(crate) fn address_in(storage: &CudaStorage, layout: &Layout, stream: &CudaStream) -> Result<u64> {
    use CudaStorageSlice as S;
    let base = match &storage.slice {
        S::U8(s) => s.device_ptr(stream).0,
        S::U32(s) => s.device_ptr(stream).0,
        S::BF16(s) => s.device_ptr(stream).0,
        S::F16(s) => s.device_ptr(stream).0,
        S::F32(s) => s.device_ptr(stream).0,
        S::F64(s) => s.device_ptr(stream).0,
        _ => candle_core::bail!("this crate has no kernels for {:?}", storage.dtype()),
    };
    Ok(base + (layout.start_offset() * storage.dtype().size_in_bytes()) as u64)
}

fn failed(error: comoe_core::Error) -> candle_core::Error {
    candle_core::Error::wrap(error)
}

impl Step<'_> {
    /// What came before the last layer will not be looked at any more.
    pub(crate) fn next_layer(&self) {
        self.arena.turn();
    }

    /// Whether it guesses, where somebody wants that.
    pub(super) fn asks(&self) -> bool {
        self.fused.asks
    }

    /// Ends a part: see [`Fused::mark`]. Beside the step there are none.
    pub(crate) fn mark(&self, what: &str, bytes: usize) -> Result<()> {
        match self.aside {
            None => self.fused.mark(what, bytes),
            Some(_) => Ok(()),
        }
    }

    /// Runs `f` for the same step on a stream that branches off here, and that this one does not wait for.
    pub(super) fn beside<R>(&self, f: impl FnOnce(&Step<'_>) -> crate::Result<R>) -> crate::Result<R> {
        let fused = self.fused;
        let aside = match fused.aside.get() {
            Some(aside) => aside,
            None => {
                let error = Tensor::zeros(1, DType::U32, &fused.device)?;
                let stream = SideStream::new(&fused.device)?;
                fused.aside.get_or_init(|| Aside { stream, arena: Arena::new(&fused.device), error })
            }
        };
        aside.arena.turn();
        let stream = aside.stream.behind(self.stream)?;
        f(&Step { stream, arena: &aside.arena, aside: Some(aside), ..*self })
    }

    /// A guess for the next layer that was made [`Self::beside`] this step.
    pub(super) fn guess<'g>(&'g self, ids: &'g Tensor) -> DeviceGuess<'g> {
        DeviceGuess { ids, stream: self.fused.aside.get().map(|aside| aside.stream.get()) }
    }

    /// Room for a result with a row for each token.
    fn rows(&self, shape: impl Into<Shape>, dtype: DType) -> Result<Tensor> {
        let shape = shape.into();
        let most = shape.elem_count().div_ceil(self.tokens) * MOST_TOKENS;
        self.arena.take(shape, most, dtype)
    }

    /// Room for a result like x.
    pub(super) fn room_like(&self, x: &Tensor) -> Result<Tensor> {
        self.rows(x.dims(), x.dtype())
    }

    /// Address of a contiguous tensor.
    fn at(&self, t: &Tensor) -> Result<u64> {
        if !t.is_contiguous() {
            candle_core::bail!("a fused step takes contiguous tensors, not {:?}", t.layout());
        }
        address(t, &self.stream)
    }

    fn at_or_0(&self, t: Option<&Tensor>) -> Result<u64> {
        t.map_or(Ok(0), |t| self.at(t))
    }

    fn place(&self) -> Result<u64> {
        self.at(self.place)
    }

    fn error_word(&self, layer: Option<usize>) -> Result<u64> {
        if let Some(aside) = self.aside {
            return self.at(&aside.error);
        }
        let words = &self.fused.errors;
        Ok(self.at(words)? + 4 * layer.unwrap_or(words.elem_count() - OTHER_ERRORS) as u64)
    }

    fn given(&self, layer: usize, top_k: usize) -> Result<Option<GivenExperts>> {
        let Some(given) = &self.fused.given else { return Ok(None) };
        let ids = match self.aside {
            None => &given.ids,
            Some(_) => match &given.guesses {
                Some(guesses) => guesses,
                None => return Ok(None),
            },
        };
        let (rows, layers, k) = ids.dims3()?;
        if layer >= layers || k != top_k {
            candle_core::bail!("routing {:?} for top-{top_k} of layer {layer}", ids.dims());
        }
        Ok(Some(GivenExperts {
            ids: self.at(ids)? + 4 * (layer * k) as u64,
            row_stride: layers * k,
            rows,
            first: given.first,
            position: self.place()?,
        }))
    }

    /// Rows `ids [tokens]` of `table`, times `scale`.
    pub(crate) fn embed(&self, table: &Tensor, ids: &Tensor, scale: f64) -> Result<Tensor> {
        let ((vocab, width), tokens) = (table.dims2()?, ids.dims1()?);
        let out = self.rows((tokens, width), table.dtype())?;
        let args = EmbedArgs {
            ids: self.at(ids)?,
            table: self.at(table)?,
            scale: scale as f32,
            out: self.at(&out)?,
            tokens,
            vocab,
            width,
            dtype: table.dtype(),
            error: self.error_word(None)?,
        };
        // SAFETY: tensors of the shapes documented, on the stream's GPU; the kernel checks ids against the table.
        unsafe { self.fused.kernels.embed(&self.stream, &args) }.map_err(failed)?;
        self.mark("embedding", 0)?;
        Ok(out)
    }

    /// `act(x[.., ..width]) * x[.., width..]`: `[tokens, 2 width]` to `[tokens, width]`.
    pub(super) fn gated(&self, x: &Tensor, activation: Activation) -> Result<Tensor> {
        let (tokens, both) = x.dims2()?;
        let y = self.rows((tokens, both / 2), x.dtype())?;
        let (from, to) = (self.at(x)?, self.at(&y)?);
        let args = GateArgs { x: from, y: to, activation, tokens, width: both / 2, dtype: x.dtype() };
        // SAFETY: tensors of the shapes documented, on the stream's GPU.
        unsafe { self.fused.kernels.gate(&self.stream, &args) }.map_err(failed)?;
        self.mark("gate", 0)?;
        Ok(y)
    }

    /// `x + y`, or `x + sigmoid(gate) y` with `gate [tokens, 1]`.
    pub(super) fn add(&self, x: &Tensor, y: &Tensor, gate: Option<&Tensor>) -> Result<Tensor> {
        let (tokens, width) = x.dims2()?;
        if y.dims() != x.dims() || gate.is_some_and(|g| g.elem_count() != tokens) {
            candle_core::bail!("rows {:?} and {:?} under {:?}", x.dims(), y.dims(), gate.map(Tensor::dims));
        }
        let out = self.rows((tokens, width), x.dtype())?;
        let args = AddGatedArgs {
            x: self.at(x)?,
            y: self.at(y)?,
            gate: self.at_or_0(gate)?,
            out: self.at(&out)?,
            tokens,
            width,
            dtype: x.dtype(),
        };
        // SAFETY: tensors of the shapes that were checked, on the stream's GPU.
        unsafe { self.fused.kernels.add_gated(&self.stream, &args) }.map_err(failed)?;
        self.mark("sum", 0)?;
        Ok(out)
    }

    /// `x Wᵀ + b` for `W [out, in]`; the result has the weight's dtype.
    pub(super) fn linear(&self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let dtype = weight.dtype();
        let bytes = weight.elem_count() * dtype.size_in_bytes();
        let at = GemvWeight::Dense { data: self.at(weight)?, dtype };
        self.product(x, at, weight.dims2()?, bias, dtype, bytes)
    }

    /// The same for a matrix in INT8; the result has its products' dtype.
    pub(super) fn linear_int8(
        &self,
        x: &Tensor,
        weight: &Int8Matrix,
        bias: Option<&Tensor>,
    ) -> Result<Tensor> {
        let layout = weight.layout();
        let weights = self.at(weight.packed())?;
        let at = GemvWeight::Int8 { weights, scales: weights + layout.scales as u64 };
        self.product(x, at, (layout.outputs, layout.inputs), bias, weight.dtype(), layout.bytes)
    }

    /// `bytes` are the matrix's.
    fn product(
        &self,
        x: &Tensor,
        weight: GemvWeight,
        (outputs, wide): (usize, usize),
        bias: Option<&Tensor>,
        dtype: DType,
        bytes: usize,
    ) -> Result<Tensor> {
        let (tokens, inputs) = x.dims2()?;
        if wide != inputs {
            candle_core::bail!("{inputs} columns times a matrix of {wide}");
        }
        let y = self.rows((tokens, outputs), dtype)?;
        let args = GemvArgs {
            x: self.at(x)?,
            x_dtype: x.dtype(),
            weight,
            bias: self.at_or_0(bias)?,
            y: self.at(&y)?,
            y_dtype: dtype,
            tokens,
            inputs,
            outputs,
        };
        // SAFETY: x, W, b and y are tensors of these shapes on the stream's GPU; weights are never written.
        unsafe { self.fused.kernels.gemv(&self.stream, &args) }.map_err(failed)?;
        if self.fused.marks.borrow().is_some() {
            self.mark(&format!("matrix {outputs} x {inputs}"), bytes)?;
        }
        Ok(y)
    }

    /// RMS norm of the rows.
    pub(super) fn rms_norm(&self, x: &Tensor, weight: &Tensor, eps: f32) -> Result<Tensor> {
        let (tokens, width) = x.dims2()?;
        self.norm(x, None, weight, None, NormArgs::rms(tokens, width, x.dtype(), eps)).map(|(_, n)| n)
    }

    /// `x + delta`, and its RMS norm.
    pub(super) fn add_rms_norm(
        &self,
        x: &Tensor,
        delta: &Tensor,
        weight: &Tensor,
        eps: f32,
    ) -> Result<(Tensor, Tensor)> {
        let (tokens, width) = x.dims2()?;
        self.norm(x, Some(delta), weight, None, NormArgs::rms(tokens, width, x.dtype(), eps))
    }

    /// Layer norm of the rows.
    pub(super) fn layer_norm(&self, x: &Tensor, weight: &Tensor, bias: &Tensor, eps: f32) -> Result<Tensor> {
        let (tokens, width) = x.dims2()?;
        let args = NormArgs { centre: Centre::Yes, ..NormArgs::rms(tokens, width, x.dtype(), eps) };
        self.norm(x, None, weight, Some(bias), args).map(|(_, normed)| normed)
    }

    /// The sum (x itself where nothing is added) and its norm.
    fn norm(
        &self,
        x: &Tensor,
        delta: Option<&Tensor>,
        weight: &Tensor,
        bias: Option<&Tensor>,
        args: NormArgs,
    ) -> Result<(Tensor, Tensor)> {
        if delta.is_some_and(|d| d.dims() != x.dims()) {
            candle_core::bail!("rows {:?} and {:?} differ", x.dims(), delta.map(Tensor::dims));
        }
        if weight.dims() != [args.width] || bias.is_some_and(|b| b.dims() != [args.width]) {
            candle_core::bail!("a norm of {:?} over rows of {}", weight.dims(), args.width);
        }
        let normed = self.rows(x.dims(), x.dtype())?;
        let sum = if delta.is_some() { Some(self.rows(x.dims(), x.dtype())?) } else { None };
        let args = NormArgs {
            x: self.at(x)?,
            delta: self.at_or_0(delta)?,
            sum: self.at_or_0(sum.as_ref())?,
            weight: self.at(weight)?,
            bias: self.at_or_0(bias)?,
            normed: self.at(&normed)?,
            ..args
        };
        // SAFETY: tensors of the shapes that were checked, on the stream's GPU; weights are never written.
        unsafe { self.fused.kernels.add_norm(&self.stream, &args) }.map_err(failed)?;
        self.mark("norm", 0)?;
        Ok((sum.unwrap_or_else(|| x.clone()), normed))
    }

    /// Experts `[tokens, top_k]` (U32) and their weights (F32) by `logits [tokens, experts]`, on the device.
    pub(super) fn route(
        &self,
        logits: &Tensor,
        model_dtype: DType,
        plan: &RouterPlan,
        extras: &OnDevice,
        layer: usize,
    ) -> Result<(Tensor, Tensor)> {
        let (tokens, experts) = logits.dims2()?;
        let ids = self.rows((tokens, plan.top_k), DType::U32)?;
        let weights = self.rows((tokens, plan.top_k), DType::F32)?;
        let args = RouteArgs {
            logits: self.at(logits)?,
            logits_dtype: logits.dtype(),
            model_dtype,
            choice_bias: self.at_or_0(extras.choice_bias.as_ref())?,
            expert_scale: self.at_or_0(extras.expert_scale.as_ref())?,
            tokens,
            experts,
            plan: *plan,
            ids: self.at(&ids)?,
            weights: self.at(&weights)?,
            given: self.given(layer, plan.top_k)?,
            error: self.error_word(Some(layer))?,
        };
        // SAFETY: tensors of the shapes documented, on the stream's GPU; bias and factors are `[experts]`, as loaded.
        unsafe { self.fused.kernels.route(&self.stream, &args) }.map_err(failed)?;
        self.mark("routing", 0)?;
        Ok((ids, weights))
    }
}
