//! A decoder-only model built from a plan: tokens in, logits out.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use candle_core::{DType, Device, Tensor};
use comoe_core::backend::MOST_DEVICE_TOKENS;
use comoe_core::plan::{DevicePlan, MemoryPlan};
use comoe_core::{ExpertCache, TokenOutcome};

use crate::arch::{DecoderPlan, RopePlan};
use crate::blocks::attention::Attention;
use crate::blocks::conv::ShortConv;
use crate::blocks::ffn::DenseFfn;
use crate::blocks::fused::{Fused, GivenRouting};
use crate::blocks::kv_cache::{KvCache, LayerKv};
use crate::blocks::latent::LatentAttention;
use crate::blocks::linear::Linear;
use crate::blocks::moe::Moe;
use crate::blocks::norm::Norm;
use crate::blocks::prefill_attention::PrefillAttention;
use crate::blocks::rope::{RopeTables, Ropes, RotaryTable};
use crate::blocks::stale_gate;
use crate::blocks::step::Step;
use crate::chunk::chunk_tokens;
use crate::error::{Error, Result};
use crate::load::{Builder, DenseWeights, KvFormat};
use crate::memory::Memory;

/// For which tokens of a step logits are wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rows {
    /// The last one.
    Last,
    /// All of them.
    All,
}

/// The dense part of a model, and the cache that holds its experts.
pub struct Decoder {
    plan: DecoderPlan,
    /// `[vocab, hidden]`
    embedding: Tensor,
    embedding_scale: f64,
    layers: Vec<Layer>,
    norm: Norm,
    head: Linear,
    ropes: Ropes,
    /// On a GPU: kernels and buffers of steps of few tokens. One step at a time uses them.
    fused: Option<Mutex<Fused>>,
    experts: ExpertCache,
    context: usize,
    most_context: usize,
    budgeted: AtomicBool,
    /// Tokens of a prompt that go through the model at once. Chunks end at multiples of it, so how a sequence is cut
    /// depends on positions alone.
    chunk: usize,
    dtype: DType,
    kv_format: KvFormat,
    device: Device,
    notes: Vec<String>,
    pub(crate) memory: Memory,
}

struct Layer {
    pre: [Option<Norm>; 2],
    mixer: Mixer,
    /// Which of the decoder's tables.
    rope: Option<usize>,
    ffn: Ffn,
    post: [Option<Norm>; 2],
    residual_scale: f64,
    scalar: Option<f64>,
}

/// How tokens look at each other.
pub(crate) enum Mixer {
    Attention(Attention),
    Latent(LatentAttention),
    Conv(ShortConv),
}

/// What happens to each token.
pub(crate) enum Ffn {
    Dense(DenseFfn),
    Moe(Box<Moe>),
}

impl Ffn {
    fn moe(&mut self) -> Option<&mut Moe> {
        match self {
            Self::Moe(moe) => Some(moe),
            Self::Dense(_) => None,
        }
    }
}

impl Decoder {
    /// Loads the dense weights of `plan`; experts are served by `experts`. `context` is the number of tokens that a
    /// sequence is planned for.
    ///
    /// # Errors
    /// [`Error::ContextTooLarge`]; [`Error::ExpertMismatch`] when the cache's experts are not those of the plan;
    /// [`Error::Core`] for weights that are missing or have another shape.
    pub fn load(
        plan: DecoderPlan,
        weights: &mut DenseWeights<'_>,
        experts: ExpertCache,
        context: usize,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        plan.check_context(context)?;
        for (layer, moe) in plan.moe_layers() {
            let directory = experts.directory();
            let found = directory.ordinal(layer).map_or(0, |o| directory.layers()[o].experts);
            if found != moe.experts {
                let (config, checkpoint) = (moe.describe(), format!("{found} experts"));
                return Err(Error::ExpertMismatch { layer, config, checkpoint });
            }
        }
        let (hidden, names) = (plan.hidden, &plan.names);
        let (root, head_root) = weights.roots(&plan);
        let prefill = PrefillAttention::load(device, dtype)?;
        let mut build = Builder { weights, plan: &plan, prefix: root.to_owned(), prefill };
        let embedding = build.tensor(&format!("{}.weight", names.embedding), &[plan.vocab, hidden])?;
        let mut table_of = Vec::<&RopePlan>::new();
        let mut layers = Vec::with_capacity(plan.layers.len());
        for (l, layer) in plan.layers.iter().enumerate() {
            let mut rope = None;
            if let Some(wanted) = layer.mixer.rope() {
                rope = table_of.iter().position(|known| *known == wanted);
                if rope.is_none() {
                    table_of.push(wanted);
                    rope = Some(table_of.len() - 1);
                }
            }
            build.prefix = format!("{root}layers.{l}.");
            let mut norms = |wanted: bool, names: [&str; 2]| -> Result<[Option<Norm>; 2]> {
                match wanted {
                    true => Ok([Some(build.norm(names[0])?), Some(build.norm(names[1])?)]),
                    false => Ok([None, None]),
                }
            };
            layers.push(Layer {
                pre: norms(layer.shape.has_pre(), [names.mixer_norm, names.ffn_norm])?,
                post: norms(layer.shape.has_post(), [names.mixer_post_norm, names.ffn_post_norm])?,
                mixer: build.mixer(&layer.mixer)?,
                rope,
                ffn: build.ffn(&layer.ffn, l)?,
                residual_scale: layer.residual_scale,
                scalar: if layer.scalar { Some(build.scalar()?) } else { None },
            });
        }
        let ropes = Ropes::new(table_of.into_iter().cloned().collect(), context, dtype, device)?;
        stale_gate::connect(layers.iter_mut().filter_map(|layer| layer.ffn.moe()), &plan);
        build.prefix = root.to_owned();
        let norm = build.norm(names.final_norm)?;
        build.prefix = head_root.to_owned();
        let head = if plan.tied_head {
            Linear::new(&embedding, None)?
        } else {
            build.linear("lm_head", [plan.vocab, hidden], plan.head_bias)?
        };
        // Rounded to the model's dtype, as `transformers` has it.
        let embedding_scale =
            Tensor::new(plan.embedding_scale as f32, &Device::Cpu)?.to_dtype(dtype)?.to_dtype(DType::F32)?;
        let embedding_scale = f64::from(embedding_scale.to_scalar::<f32>()?);
        let device = device.clone();
        let mut notes = experts.notes().to_vec();
        let fused = match Fused::for_plan(&plan, dtype, &device) {
            Ok(fused) => fused.map(Mutex::new),
            Err(reason) => {
                notes.push(format!("tokens are decoded without fused kernels: {reason}"));
                None
            }
        };
        Ok(Self {
            chunk: chunk_tokens(&plan, context, device.is_cuda()),
            most_context: plan.most_context(context),
            budgeted: AtomicBool::new(false),
            plan,
            embedding,
            embedding_scale,
            layers,
            norm,
            head,
            ropes,
            fused,
            experts,
            context,
            dtype,
            kv_format: KvFormat::Plain,
            device,
            notes,
            memory: Memory { dense: weights.held_bytes(), ..Memory::default() },
        })
    }

    /// With notes on how it was opened before its own.
    pub(crate) fn with_notes(mut self, mut notes: Vec<String>) -> Self {
        notes.append(&mut self.notes);
        self.notes = notes;
        self
    }

    /// With keys and values of new sequences in `format`, where layers have such; a note says where they have not.
    #[must_use]
    pub fn with_kv_format(mut self, format: KvFormat) -> Self {
        let layers = &self.plan.layers;
        let plain = layers.iter().filter(|l| l.mixer.kept_in(format) != format).count();
        if plain > 0 {
            self.notes.push(format!(
                "what {plain} of {} layers keep of a token is not in {}: latent attention and convolutions keep one row \
                 in the model's dtype",
                layers.len(),
                format.name()
            ));
        }
        self.kv_format = format;
        self
    }

    /// With what was planned for the memory of its devices, and what of a GPU's was free then.
    pub(crate) fn with_plans(mut self, plans: Vec<DevicePlan>, free: Option<u64>) -> Self {
        (self.memory.plans, self.memory.free) = (plans, free);
        self
    }

    /// What was planned for its memory before it was loaded, of several devices for the first's; `None` for one that was put
    /// together otherwise.
    pub fn memory_plan(&self) -> Option<&MemoryPlan> {
        self.memory.plans.first().map(|device| &device.memory)
    }

    /// The same of every device that holds experts.
    pub fn device_plans(&self) -> &[DevicePlan] {
        &self.memory.plans
    }

    /// What the dense part computes in.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// How keys and values of new sequences are held.
    pub fn kv_format(&self) -> KvFormat {
        self.kv_format
    }

    /// Where it computes.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Where what is in force differs from what was asked, and why: of the experts' store and of their cache.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// What the model is made of.
    pub fn plan(&self) -> &DecoderPlan {
        &self.plan
    }

    /// The cache that serves the experts.
    pub fn experts(&self) -> &ExpertCache {
        &self.experts
    }

    /// Tokens that a sequence is planned for. How prompts are cut into chunks follows from it, also when one grows longer.
    pub fn context(&self) -> usize {
        self.context
    }

    /// Tokens that a sequence can have when it grows ([`Self::make_room`]): the model's limit, unless another was set.
    pub fn most_context(&self) -> usize {
        self.most_context
    }

    /// Memory has a limit of its own, so it is short however much is free: sequences that grow take it from the slots.
    pub(crate) fn with_budget(self, budgeted: bool) -> Self {
        self.be_budgeted(budgeted);
        self
    }

    pub(crate) fn be_budgeted(&self, budgeted: bool) {
        self.budgeted.store(budgeted, Ordering::Relaxed);
    }

    pub(crate) fn is_budgeted(&self) -> bool {
        self.budgeted.load(Ordering::Relaxed)
    }

    /// Sets another limit, which is kept between the planned context and the model's.
    pub(crate) fn with_most_context(mut self, most: usize) -> Self {
        self.most_context = most.clamp(self.context, self.most_context);
        self
    }

    /// Rotary tables for the positions of the longest sequence so far.
    pub(crate) fn ropes(&self) -> RopeTables {
        self.ropes.tables()
    }

    pub(crate) fn grow_ropes(&self, positions: usize) -> Result<()> {
        Ok(self.ropes.grow(positions, self.dtype, &self.device)?)
    }

    /// Bytes by which tables for so many positions are larger than those that are there.
    pub(crate) fn more_rope_bytes(&self, positions: usize) -> usize {
        self.ropes.more_elements(positions) * self.dtype.size_in_bytes()
    }

    /// An empty KV cache for one sequence.
    ///
    /// # Errors
    /// When the device has no memory for it.
    pub fn new_kv(&self) -> Result<KvCache> {
        let kv = KvCache::new(&self.plan, self.context, self.dtype, self.kv_format, &self.device)?;
        let bytes = kv.bytes();
        Ok(kv.counted(self.memory.kv.hold(bytes)))
    }

    /// Runs `ids`, which follow the tokens in `kv`, and appends them to it. Logits in F32, `[1, vocab]` or
    /// `[ids, vocab]`.
    ///
    /// When it fails, `kv` still counts only the chunks that went through.
    ///
    /// # Errors
    /// [`Error::EmptyPrompt`] without ids, [`Error::UnknownToken`], [`Error::ContextExceeded`], and what routers and
    /// the expert cache report.
    pub fn forward(&self, ids: &[u32], kv: &mut KvCache, rows: Rows) -> Result<Tensor> {
        kv.reserve(ids.len())?;
        let mut rest = ids;
        let mut logits = Vec::new();
        while !rest.is_empty() {
            let (chunk, after) = rest.split_at(self.next_chunk(kv.len(), rest.len()));
            if rows == Rows::All || after.is_empty() {
                logits.push(self.step_with_memory(chunk, kv, Some(rows))?.ok_or(Error::EmptyPrompt)?);
            } else {
                self.step_with_memory(chunk, kv, None)?;
            }
            rest = after;
        }
        match logits.len() {
            0 => Err(Error::EmptyPrompt),
            1 => Ok(logits.remove(0)),
            _ => Ok(Tensor::cat(&logits, 0)?),
        }
    }

    /// Runs a prompt and a step of made-up tokens, so that a GPU's kernels are compiled and loaded before the first answer: once
    /// per driver that takes tens of seconds. The cache's counters start anew.
    ///
    /// # Errors
    /// As [`Self::forward`].
    pub fn warm_up(&self) -> Result<()> {
        let mut kv = self.new_kv()?;
        // More than a fused step takes.
        let prompt = [0; 2 * MOST_DEVICE_TOKENS];
        let prompt = &prompt[..prompt.len().min(self.context)];
        self.forward(prompt, &mut kv, Rows::Last)?.to_vec2::<f32>()?;
        if kv.len() < self.context {
            self.forward(&[0], &mut kv, Rows::Last)?.to_vec2::<f32>()?;
        }
        self.experts.reset_stats();
        Ok(())
    }

    /// In steps of few tokens on a GPU, takes recorded experts in place of the routers' choice (weights stay the
    /// routers'), so that decoding can be measured with real routing on a synthetic model. `false` where there are no
    /// such steps.
    pub fn give_routing(&self, given: Option<GivenRouting>) -> bool {
        self.fused().map(|mut fused| fused.give_routing(given)).is_some()
    }

    /// How many of `left` tokens from `position` on go through the model at once.
    pub fn next_chunk(&self, position: usize, left: usize) -> usize {
        left.min(self.chunk - position % self.chunk)
    }

    /// Most experts that a token uses in a layer.
    pub(crate) fn top_k(&self) -> Option<usize> {
        self.plan.moe_layers().map(|(_, moe)| moe.router.top_k).max()
    }

    /// Kernels and buffers of fused steps, where there are such. Whoever holds them enqueues a whole step.
    pub(crate) fn fused(&self) -> Option<MutexGuard<'_, Fused>> {
        // A panic in another thread leaves nothing half done that the next step does not write anew.
        self.fused.as_ref().map(|f| f.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// As [`Self::step`]; where a GPU's memory runs out under it, the experts' slots make room, and it is made once more. A step
    /// that ended half-way has changed nothing that counts: positions are counted behind it.
    fn step_with_memory(&self, ids: &[u32], kv: &mut KvCache, rows: Option<Rows>) -> Result<Option<Tensor>> {
        match self.step(ids, kv, rows) {
            Err(e) if e.is_out_of_memory() && self.make_way(&e)? => self.step(ids, kv, rows),
            done => done,
        }
    }

    fn step(&self, ids: &[u32], kv: &mut KvCache, rows: Option<Rows>) -> Result<Option<Tensor>> {
        if let Some(&id) = ids.iter().find(|id| **id as usize >= self.plan.vocab) {
            return Err(Error::UnknownToken { id, vocab: self.plan.vocab });
        }
        let tokens = ids.len();
        let fused = if Fused::takes(tokens) { self.fused() } else { None };
        let ids = Tensor::new(ids, &self.device)?;
        let logits = match fused {
            None => self.run(&ids, kv.layers(), Step::At(kv.len()), rows)?,
            Some(mut fused) => {
                let reach = Fused::reach(kv.len() + tokens, kv.capacity());
                let place = kv.place(kv.len())?;
                let mut token = self.experts.begin_token(tokens, self.top_k().unwrap_or(1))?;
                let (logits, served) = loop {
                    let logits = fused.with_step(&place, tokens, reach, |step| {
                        self.run(&ids, kv.layers(), Step::Fused(step), rows)
                    });
                    match token.end() {
                        // An expert was missing that is there now.
                        Ok(TokenOutcome::Replay) => fused.forget_errors()?,
                        Ok(TokenOutcome::Done) => break (logits, self.experts.flush()),
                        Err(e) => break (logits, Err(e)),
                    }
                };
                let by_device = token.is_on_device();
                drop(token);
                let served = match served {
                    Err(e) if !is_misled(&e) => {
                        // The rest of the step ran on nothing.
                        fused.forget_errors()?;
                        return Err(e.into());
                    }
                    served => served,
                };
                // A router comes before the experts that it misleads.
                fused.check()?;
                let logits = logits?;
                served?;
                // The buffer is used again by the next step.
                let logits =
                    logits.map(|l| if l.dtype() == DType::F32 { l.copy() } else { l.to_dtype(DType::F32) });
                let logits = logits.transpose()?;
                // A graph is of the device's own steps, which have buffers of their own.
                if tokens == 1 && rows == Some(Rows::Last) && by_device {
                    fused.made_ready(reach);
                }
                logits
            }
        };
        kv.advance(tokens);
        Ok(logits)
    }

    /// Runs `ids [tokens]` (U32, on the device) over `kv`, and gives logits in F32. A fused step only enqueues, and its
    /// logits are in a buffer that the next one uses again; they may be in the model's dtype still.
    pub(crate) fn run(
        &self,
        ids: &Tensor,
        kv: &[LayerKv],
        step: Step<'_>,
        rows: Option<Rows>,
    ) -> Result<Option<Tensor>> {
        let mut x = match step {
            Step::Fused(fused) => fused.embed(&self.embedding, ids, self.embedding_scale)?,
            Step::At(_) => self.embed(ids)?,
        };
        let mut branch: Option<Tensor> = None;
        let ropes = self.ropes();
        for (l, layer) in self.layers.iter().enumerate() {
            if let Step::Fused(fused) = step {
                fused.next_layer();
            }
            let input;
            (x, input) = add_norm(layer.pre[0].as_ref(), x, branch.as_ref(), step)?;
            let rope = layer.rope.map(|r| &ropes[r]);
            let mixed = layer.leave(0, layer.mixer.forward(&input, &kv[l], step, rope)?, step)?;
            let input;
            (x, input) = add_norm(layer.pre[1].as_ref(), x, Some(&mixed), step)?;
            let given = match &layer.ffn {
                Ffn::Dense(ffn) => ffn.forward(&input, step)?,
                Ffn::Moe(moe) => moe.forward(&input, &x, &self.experts, step)?,
            };
            let given = layer.leave(1, given, step)?;
            branch = match layer.scalar {
                None => Some(given),
                Some(scalar) => {
                    x = ((x + given)? * scalar)?;
                    None
                }
            };
        }
        let Some(rows) = rows else { return Ok(None) };
        if let Step::Fused(fused) = step {
            fused.next_layer();
        }
        if rows == Rows::Last {
            let last = |t: Tensor| t.narrow(0, t.dim(0)? - 1, 1);
            x = last(x)?;
            branch = branch.map(last).transpose()?;
        }
        let (_, normed) = add_norm(Some(&self.norm), x, branch.as_ref(), step)?;
        let logits = self.head.forward(&normed, step)?;
        if matches!(step, Step::Fused(_)) && self.plan.logit_scale == 1.0 && self.plan.logit_cap.is_none() {
            return Ok(Some(logits));
        }
        let mut logits = logits.to_dtype(DType::F32)?;
        if self.plan.logit_scale != 1.0 {
            logits = (logits * self.plan.logit_scale)?;
        }
        if let Some(cap) = self.plan.logit_cap {
            logits = ((logits / cap)?.tanh()? * cap)?;
        }
        Ok(Some(logits))
    }

    fn embed(&self, ids: &Tensor) -> Result<Tensor> {
        let x = self.embedding.index_select(ids, 0)?;
        Ok(if self.embedding_scale == 1.0 { x } else { (x * self.embedding_scale)? })
    }
}

impl AsRef<Self> for Decoder {
    fn as_ref(&self) -> &Self {
        self
    }
}

impl Layer {
    /// What a branch adds to the residual stream: the mixer's (0) or the feed-forward part's (1) result under the norm
    /// and the factor behind it.
    fn leave(&self, which: usize, mut given: Tensor, step: Step<'_>) -> Result<Tensor> {
        if let Some(norm) = &self.post[which] {
            given = norm.forward(&given, step)?;
        }
        if self.residual_scale != 1.0 {
            given = (given * self.residual_scale)?;
        }
        Ok(given)
    }
}

impl Mixer {
    fn forward(
        &self,
        x: &Tensor,
        kv: &LayerKv,
        step: Step<'_>,
        rope: Option<&RotaryTable>,
    ) -> Result<Tensor> {
        Ok(match (self, rope) {
            (Self::Attention(attention), rope) => attention.forward(x, kv, step, rope)?,
            (Self::Latent(attention), Some(rope)) => attention.forward(x, kv, step, rope)?,
            (Self::Latent(_), None) => {
                let reason = "latent attention without a rotary embedding";
                return Err(candle_core::Error::msg(reason).into());
            }
            (Self::Conv(conv), _) => conv.forward(x, kv, step)?,
        })
    }
}

/// Whether the experts' cache failed for what a router told it.
pub(crate) fn is_misled(error: &comoe_core::Error) -> bool {
    use comoe_core::Error as E;
    matches!(error, E::BadRoutingWeight { .. } | E::UnknownExpert { .. })
}

/// Adds the last block's output to the residual stream, and norms the sum for the next block.
fn add_norm(
    norm: Option<&Norm>,
    x: Tensor,
    branch: Option<&Tensor>,
    step: Step<'_>,
) -> Result<(Tensor, Tensor)> {
    Ok(match (norm, branch) {
        (Some(norm), Some(branch)) => norm.add_forward(&x, branch, step)?,
        (Some(norm), None) => {
            let normed = norm.forward(&x, step)?;
            (x, normed)
        }
        (None, Some(branch)) => {
            let sum = (x + branch)?;
            (sum.clone(), sum)
        }
        (None, None) => (x.clone(), x),
    })
}
