//! Steps of few tokens on a GPU: this crate's kernels between tensors.
//!
//! The same kernels run whether a step is enqueued one by one or replayed as a graph, and a token's results do not
//! depend on the others in the step, so both give the same bits. Nothing here waits, and nothing is read from the
//! device: what is broken (a router's output, a position past the end) sets an error word that is looked at when a
//! step is done.

use std::cell::RefCell;
use std::sync::Arc;

use candle_core::cuda_backend::CudaStorageSlice;
use candle_core::{DType, Device, Result, Shape, Storage, Tensor};
use comoe_core::Activation;
use cudarc::driver::{CudaEvent, CudaStream, DevicePtr, sys};

use super::arena::Arena;
use super::attend::Attend;
use super::heads::{HeadNorm, HeadSplit};
use super::kv_cache::LayerKv;
use super::norm::RmsNorm;
use super::rope::RotaryTable;
use super::router::OnDevice;
use crate::arch::{DecoderPlan, MixerPlan, RouterPlan, TemperaturePlan};
use crate::cuda::{
    AddGatedArgs, AttendArgs, Centre, ConvArgs, DecodeKernels, EmbedArgs, GateArgs, GemvArgs, GemvWeight,
    GivenExperts,
    HeadNormArgs, HeadsArgs, KvFormat, KvRows, LatentArgs, LatentValuesArgs, MOST_EXPERTS, MOST_TOKENS,
    NormArgs, RopeArgs, RouteArgs,
};
use crate::error::Error;

/// Error words besides the routers'.
const OTHER_ERRORS: usize = 2;
/// Shorter sequences have the reach of this one.
const LEAST_REACH: usize = 512;

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
    /// While a step is recorded to be timed.
    marks: RefCell<Option<Vec<Mark>>>,
}

/// A point in a step whose time is taken: the end of a part.
pub(crate) struct Mark {
    pub(crate) what: String,
    /// Weights and cache that the part reads.
    pub(crate) bytes: usize,
    pub(crate) event: CudaEvent,
}

/// Routing that is replayed in place of the routers' choice, for measuring.
#[derive(Debug, Clone)]
pub struct GivenRouting {
    /// `[tokens, layers, top_k]`, U32: the experts of the model's layers.
    pub ids: Tensor,
    /// Position of the first token. Behind the last one it begins anew.
    pub first: usize,
}

/// One fused step.
#[derive(Clone, Copy)]
pub struct Step<'a> {
    fused: &'a Fused,
    /// `[1]`, U32: position of the first token.
    place: &'a Tensor,
    tokens: usize,
    /// Positions that it may see.
    reach: usize,
}

/// What stands between an attention layer's projections and its attention.
pub(super) struct Heads<'a> {
    pub(super) split: &'a HeadSplit,
    pub(super) clip: Option<f64>,
    pub(super) rope: Option<&'a RotaryTable>,
    pub(super) temperature: Option<TemperaturePlan>,
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
        Ok(Some(Self { kernels, stream, arena: Arena::new(device), errors, ready: Vec::new(), given: None, marks: RefCell::default() }))
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
        f(&Step { fused: self, place, tokens, reach })
    }

    /// Replays routing from here on. Graphs that were recorded before do not know.
    pub(crate) fn give_routing(&mut self, given: Option<GivenRouting>) {
        self.given = given;
    }

    /// From here on parts are marked, until [`Self::take_marks`].
    pub(crate) fn begin_marks(&self) {
        *self.marks.borrow_mut() = Some(Vec::new());
    }

    pub(crate) fn take_marks(&self) -> Vec<Mark> {
        self.marks.borrow_mut().take().unwrap_or_default()
    }

    /// Ends a part, where parts are marked: an event that a graph records each time it runs.
    pub(crate) fn mark(&self, what: &str, bytes: usize) -> Result<()> {
        if let Some(marks) = self.marks.borrow_mut().as_mut() {
            let timed = Some(sys::CUevent_flags::CU_EVENT_DEFAULT);
            let event = self.stream.context().new_event(timed).map_err(candle_core::Error::wrap)?;
            // SAFETY: both live, and the event outlives the graph: whoever took the marks has both.
            unsafe {
                let flags = sys::CUevent_record_flags_enum::CU_EVENT_RECORD_EXTERNAL as u32;
                sys::cuEventRecordWithFlags(event.cu_event(), self.stream.cu_stream(), flags)
            }
            .result()
            .map_err(candle_core::Error::wrap)?;
            marks.push(Mark { what: what.to_owned(), bytes, event });
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
    use CudaStorageSlice as S;
    let (storage, layout) = t.storage_and_layout();
    let Storage::Cuda(storage) = &*storage else {
        candle_core::bail!("a tensor of a fused step is on {:?}", t.device().location());
    };
    let base = match &storage.slice {
        S::U32(s) => s.device_ptr(stream).0,
        S::BF16(s) => s.device_ptr(stream).0,
        S::F16(s) => s.device_ptr(stream).0,
        S::F32(s) => s.device_ptr(stream).0,
        S::F64(s) => s.device_ptr(stream).0,
        _ => candle_core::bail!("fused steps have no kernels for {:?}", t.dtype()),
    };
    Ok(base + (layout.start_offset() * t.dtype().size_in_bytes()) as u64)
}

fn failed(error: comoe_core::Error) -> candle_core::Error {
    candle_core::Error::wrap(error)
}

impl Step<'_> {
    /// What came before the last layer will not be looked at any more.
    pub(crate) fn next_layer(&self) {
        self.fused.arena.turn();
    }

    /// Ends a part: see [`Fused::mark`].
    pub(crate) fn mark(&self, what: &str, bytes: usize) -> Result<()> {
        self.fused.mark(what, bytes)
    }

    /// Room for a result with a row for each token.
    fn rows(&self, shape: impl Into<Shape>, dtype: DType) -> Result<Tensor> {
        let shape = shape.into();
        let most = shape.elem_count().div_ceil(self.tokens) * MOST_TOKENS;
        self.fused.arena.take(shape, most, dtype)
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
        address(t, &self.fused.stream)
    }

    fn at_or_0(&self, t: Option<&Tensor>) -> Result<u64> {
        t.map_or(Ok(0), |t| self.at(t))
    }

    fn place(&self) -> Result<u64> {
        self.at(self.place)
    }

    fn error_word(&self, layer: Option<usize>) -> Result<u64> {
        let words = &self.fused.errors;
        Ok(self.at(words)? + 4 * layer.unwrap_or(words.elem_count() - OTHER_ERRORS) as u64)
    }

    /// All heads' rows of a cache `[heads, capacity, width]`, which may be a part of wider rows.
    fn cached(&self, t: &Tensor) -> Result<KvRows> {
        let &[head_stride, row_stride, 1] = t.stride() else {
            candle_core::bail!("a KV cache of layout {:?}", t.layout());
        };
        Ok(KvRows { data: address(t, &self.fused.stream)?, head_stride, row_stride, scales: 0 })
    }

    fn rope(&self, table: &RotaryTable) -> Result<RopeArgs> {
        Ok(RopeArgs {
            cos: self.at(&table.cos)?,
            sin: self.at(&table.sin)?,
            rows: table.cos.dim(0)?,
            dim: table.dim,
            pairing: table.pairing,
        })
    }

    fn given(&self, layer: usize, top_k: usize) -> Result<Option<GivenExperts>> {
        let Some(given) = &self.fused.given else { return Ok(None) };
        let (rows, layers, k) = given.ids.dims3()?;
        if layer >= layers || k != top_k {
            candle_core::bail!("routing {:?} for top-{top_k} of layer {layer}", given.ids.dims());
        }
        Ok(Some(GivenExperts {
            ids: self.at(&given.ids)? + 4 * (layer * k) as u64,
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
        unsafe { self.fused.kernels.embed(&self.fused.stream, &args) }.map_err(failed)?;
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
        unsafe { self.fused.kernels.gate(&self.fused.stream, &args) }.map_err(failed)?;
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
        unsafe { self.fused.kernels.add_gated(&self.fused.stream, &args) }.map_err(failed)?;
        self.mark("sum", 0)?;
        Ok(out)
    }

    /// `x Wᵀ + b` for `W [out, in]`; the result has the weight's dtype.
    pub(super) fn linear(&self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let ((tokens, inputs), (outputs, wide)) = (x.dims2()?, weight.dims2()?);
        if wide != inputs {
            candle_core::bail!("{inputs} columns times a matrix of {wide}");
        }
        let y = self.rows((tokens, outputs), weight.dtype())?;
        let args = GemvArgs {
            x: self.at(x)?,
            x_dtype: x.dtype(),
            weight: GemvWeight::Dense { data: self.at(weight)?, dtype: weight.dtype() },
            bias: self.at_or_0(bias)?,
            y: self.at(&y)?,
            y_dtype: y.dtype(),
            tokens,
            inputs,
            outputs,
        };
        // SAFETY: x, W, b and y are tensors of these shapes on the stream's GPU; weights are never written.
        unsafe { self.fused.kernels.gemv(&self.fused.stream, &args) }.map_err(failed)?;
        if self.fused.marks.borrow().is_some() {
            let bytes = weight.elem_count() * weight.dtype().size_in_bytes();
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
        unsafe { self.fused.kernels.add_norm(&self.fused.stream, &args) }.map_err(failed)?;
        self.mark("norm", 0)?;
        Ok((sum.unwrap_or_else(|| x.clone()), normed))
    }

    /// From `qkv [tokens, (heads + 2 kv_heads) head_dim]` to queries `[heads, tokens, head_dim]`; keys and values are
    /// appended to `kv`.
    pub(super) fn split_append(&self, qkv: &Tensor, op: &Heads<'_>, kv: &LayerKv) -> Result<Tensor> {
        let &HeadSplit { heads, kv_heads, head_dim, ref norms, norm_after_rope } = op.split;
        let (tokens, width) = qkv.dims2()?;
        let (k, v) = kv.whole()?;
        if width != (heads + 2 * kv_heads) * head_dim || k.dim(2)? != head_dim || v.dim(2)? != head_dim {
            candle_core::bail!("{width} columns are not {heads} and twice {kv_heads} heads of {head_dim}");
        }
        let q = self.rows((heads, tokens, head_dim), qkv.dtype())?;
        let norm = |q: &HeadNorm, k: &HeadNorm| {
            Ok::<_, candle_core::Error>(HeadNormArgs {
                q_weight: self.at(&q.weight)?,
                k_weight: self.at(&k.weight)?,
                eps: q.eps,
                after_rope: norm_after_rope,
            })
        };
        let norm = match norms {
            [Some(q), Some(k), _] => Some(norm(q, k)?),
            _ => None,
        };
        let args = HeadsArgs {
            qkv: self.at(qkv)?,
            dtype: qkv.dtype(),
            tokens,
            heads,
            kv_heads,
            head_dim,
            norm,
            v_norm: norms[2].as_ref().map(|n| n.eps),
            clip: op.clip.map(|bound| bound as f32),
            rope: op.rope.map(|table| self.rope(table)).transpose()?,
            temperature: op.temperature,
            // The key projection's rows are there twice.
            values_are_keys: false,
            q: self.at(&q)?,
            k: self.cached(k)?,
            v: self.cached(v)?,
            cache: KvFormat::Plain(k.dtype()),
            capacity: k.dim(1)?,
            position: self.place()?,
            error: self.error_word(None)?,
        };
        // SAFETY: tensors of the shapes that were checked, on the stream's GPU; the kernel checks the position against
        // the capacity and the table's rows.
        unsafe { self.fused.kernels.split_norm_rope_append(&self.fused.stream, &args) }.map_err(failed)?;
        self.mark("split, norm, rotate, append", 0)?;
        Ok(q)
    }

    /// Attention of `q [heads, tokens, key width]` over a cache `k [kv_heads, capacity, key width]` and
    /// `v [kv_heads, capacity, value width]` to `[tokens, heads * value width]`.
    pub(super) fn attend(&self, q: &Tensor, how: &Attend, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        let ((heads, tokens, key_width), (kv_heads, capacity, value_width)) = (q.dims3()?, v.dims3()?);
        if k.dims3()? != (kv_heads, capacity, key_width) || how.sinks.as_ref().is_some_and(|s| s.elem_count() != heads)
        {
            candle_core::bail!("queries {:?} over keys {:?} and values {:?}", q.dims(), k.dims(), v.dims());
        }
        let out = self.rows((tokens, heads * value_width), q.dtype())?;
        let mut args = AttendArgs {
            q: self.at(q)?,
            dtype: q.dtype(),
            k: self.cached(k)?,
            v: self.cached(v)?,
            cache: KvFormat::Plain(k.dtype()),
            capacity,
            reach: self.reach.min(capacity),
            tokens,
            heads,
            kv_heads,
            key_width,
            value_width,
            mask: how.mask,
            sinks: self.at_or_0(how.sinks.as_ref())?,
            scale: how.scale,
            position: self.place()?,
            out: self.at(&out)?,
            workspace: 0,
            error: self.error_word(None)?,
        };
        let words = args.workspace_bytes().div_ceil(4);
        let workspace = match tokens {
            1 => self.fused.arena.take(words, words, DType::F32)?,
            // Of many tokens it is large, and no graph holds it.
            // SAFETY: the kernels write what they read of it.
            _ => unsafe { Tensor::empty(words, DType::F32, q.device()) }?,
        };
        args.workspace = self.at(&workspace)?;
        // SAFETY: tensors of the shapes that were checked, on the stream's GPU; the cache holds every row up to the
        // last token's position, which the kernel checks against `reach`.
        unsafe { self.fused.kernels.attend(&self.fused.stream, &args) }.map_err(failed)?;
        self.mark("attention", 0)?;
        Ok(out)
    }

    /// Latent attention's queries `[heads, tokens, latent + rope]` from `q [tokens, heads (nope + rope)]`; the latents
    /// and rotated keys of `compressed [tokens, latent + rope]` are appended to `kv`.
    pub(super) fn latent(
        &self,
        q: &Tensor,
        compressed: &Tensor,
        norm: &RmsNorm,
        to_keys: &Tensor,
        rope: &RotaryTable,
        kv: &LayerKv,
    ) -> Result<Tensor> {
        let ((heads, nope, latent), (tokens, width)) = (to_keys.dims3()?, compressed.dims2()?);
        let cache = kv.keys();
        if width != latent + rope.dim
            || q.dims() != [tokens, heads * (nope + rope.dim)]
            || cache.dim(2)? != width
            || norm.weight.dims() != [latent]
        {
            candle_core::bail!("latents {:?} and queries {:?} for {:?}", compressed.dims(), q.dims(), to_keys.dims());
        }
        let out = self.rows((heads, tokens, width), q.dtype())?;
        let args = LatentArgs {
            compressed: self.at(compressed)?,
            norm: self.at(&norm.weight)?,
            eps: norm.eps,
            queries: self.at(q)?,
            to_keys: self.at(to_keys)?,
            rope: self.rope(rope)?,
            cache: self.at(cache)?,
            capacity: cache.dim(1)?,
            q: self.at(&out)?,
            position: self.place()?,
            error: self.error_word(None)?,
            tokens,
            heads,
            latent,
            nope,
            dtype: q.dtype(),
        };
        // SAFETY: tensors of the shapes that were checked, on the stream's GPU; the kernels check the position against
        // the capacity and the table's rows.
        unsafe {
            self.fused.kernels.latent_append(&self.fused.stream, &args).map_err(failed)?;
            self.fused.kernels.latent_queries(&self.fused.stream, &args).map_err(failed)?;
        }
        self.mark("latents and queries", 0)?;
        Ok(out)
    }

    /// Values of all heads, `[tokens, heads * values]`, from what they saw, `[tokens, heads * latent]`, through
    /// `to_values [heads, values, latent]`.
    pub(super) fn latent_values(&self, seen: &Tensor, to_values: &Tensor) -> Result<Tensor> {
        let ((tokens, width), (heads, values, latent)) = (seen.dims2()?, to_values.dims3()?);
        if width != heads * latent {
            candle_core::bail!("{width} columns are not {heads} latents of {latent}");
        }
        let out = self.rows((tokens, heads * values), seen.dtype())?;
        let args = LatentValuesArgs {
            seen: self.at(seen)?,
            to_values: self.at(to_values)?,
            out: self.at(&out)?,
            tokens,
            heads,
            latent,
            values,
            dtype: seen.dtype(),
        };
        // SAFETY: tensors of the shapes that were checked, on the stream's GPU.
        unsafe { self.fused.kernels.latent_values(&self.fused.stream, &args) }.map_err(failed)?;
        self.mark("latent values", 0)?;
        Ok(out)
    }

    /// LFM2's convolution of `parts [tokens, 3 width]` with `taps [width, n]`; gated inputs are appended to `kv`.
    pub(super) fn short_conv(
        &self,
        parts: &Tensor,
        taps: &Tensor,
        bias: Option<&Tensor>,
        kv: &LayerKv,
    ) -> Result<Tensor> {
        let ((tokens, columns), (width, n)) = (parts.dims2()?, taps.dims2()?);
        let cache = kv.keys();
        if columns != 3 * width || cache.dim(2)? != width {
            candle_core::bail!("{columns} columns for {width} channels");
        }
        let out = self.rows((tokens, width), parts.dtype())?;
        let args = ConvArgs {
            parts: self.at(parts)?,
            taps: self.at(taps)?,
            bias: self.at_or_0(bias)?,
            cache: self.at(cache)?,
            capacity: cache.dim(1)?,
            out: self.at(&out)?,
            position: self.place()?,
            error: self.error_word(None)?,
            tokens,
            width,
            n,
            dtype: parts.dtype(),
        };
        // SAFETY: tensors of the shapes that were checked, on the stream's GPU; the kernel checks the position against
        // the capacity.
        unsafe { self.fused.kernels.short_conv(&self.fused.stream, &args) }.map_err(failed)?;
        self.mark("convolution", 0)?;
        Ok(out)
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
        unsafe { self.fused.kernels.route(&self.fused.stream, &args) }.map_err(failed)?;
        self.mark("routing", 0)?;
        Ok((ids, weights))
    }
}
