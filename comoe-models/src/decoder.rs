//! A decoder-only model built from a plan: tokens in, logits out.

use candle_core::{DType, Device, Tensor};
use comoe_core::ExpertCache;

use crate::arch::{AttentionPlan, DecoderPlan, FfnPlan, LayerPlan, TensorNames};
use crate::blocks::attention::Attention;
use crate::blocks::ffn::DenseFfn;
use crate::blocks::kv_cache::KvCache;
use crate::blocks::linear::Linear;
use crate::blocks::moe::Moe;
use crate::blocks::norm::RmsNorm;
use crate::blocks::rope::RotaryTable;
use crate::blocks::router::Router;
use crate::error::{Error, Result};
use crate::load::{DenseWeights, DeviceMemory};

/// Tokens of a prompt that go through the model at once. Chunks end at multiples of it, so how a sequence is cut
/// depends on positions alone.
pub(crate) const CHUNK: usize = 512;

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
    layers: Vec<Layer>,
    norm: RmsNorm,
    head: Linear,
    ropes: Vec<RotaryTable>,
    experts: ExpertCache,
    context: usize,
    dtype: DType,
    device: Device,
    notes: Vec<String>,
    memory: Option<DeviceMemory>,
}

struct Layer {
    attention_norm: RmsNorm,
    attention: Attention,
    /// Which of the decoder's tables.
    rope: usize,
    ffn_norm: RmsNorm,
    ffn: Ffn,
}

enum Ffn {
    Dense(DenseFfn),
    Moe(Moe),
}

impl Decoder {
    /// Loads the dense weights of `plan`; experts are served by `experts`. `context` is the number of tokens that a
    /// sequence can have.
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
        let hidden = plan.hidden;
        let norm = |weights: &mut DenseWeights<'_>, name: &str| -> Result<RmsNorm> {
            Ok(RmsNorm::new(weights.tensor(name, &[hidden])?, plan.norm_eps))
        };
        let embedding = weights.tensor(plan.names.embedding, &[plan.vocab, hidden])?;
        let mut ropes = Vec::new();
        let mut table_of = Vec::<(f64, usize)>::new();
        let mut layers = Vec::with_capacity(plan.layers.len());
        for (l, layer) in plan.layers.iter().enumerate() {
            let a = &layer.attention;
            let key = (a.rope_theta, a.head_dim);
            let rope = match table_of.iter().position(|k| *k == key) {
                Some(rope) => rope,
                None => {
                    table_of.push(key);
                    ropes.push(RotaryTable::new(key.0, key.1, context, dtype, device)?);
                    ropes.len() - 1
                }
            };
            let prefix = format!("{}.{l}.", plan.names.layers);
            layers.push(Layer {
                attention_norm: norm(weights, &format!("{prefix}{}.weight", plan.names.attention_norm))?,
                attention: load_attention(weights, a, hidden, &plan.names, &prefix)?,
                rope,
                ffn_norm: norm(weights, &format!("{prefix}{}.weight", plan.names.ffn_norm))?,
                ffn: load_ffn(weights, layer, l, hidden, &plan.names, &prefix)?,
            });
        }
        let final_norm = norm(weights, plan.names.final_norm)?;
        let head = if plan.tied_head {
            Linear::new(&embedding, None)?
        } else {
            Linear::new(&weights.tensor(plan.names.head, &[plan.vocab, hidden])?, None)?
        };
        let device = device.clone();
        let notes = experts.notes().to_vec();
        let norm = final_norm;
        Ok(Self {
            plan,
            embedding,
            layers,
            norm,
            head,
            ropes,
            experts,
            context,
            dtype,
            device,
            notes,
            memory: None,
        })
    }

    pub(crate) fn with_notes(mut self, notes: Vec<String>) -> Self {
        self.notes = notes;
        self
    }

    pub(crate) fn with_memory(mut self, memory: Option<DeviceMemory>) -> Self {
        self.memory = memory;
        self
    }

    /// What was planned for the GPU's memory; `None` elsewhere.
    pub fn memory(&self) -> Option<&DeviceMemory> {
        self.memory.as_ref()
    }

    /// What the dense part computes in.
    pub fn dtype(&self) -> DType {
        self.dtype
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

    /// Tokens that a sequence can have.
    pub fn context(&self) -> usize {
        self.context
    }

    /// An empty KV cache for one sequence.
    ///
    /// # Errors
    /// When the device has no memory for it.
    pub fn new_kv(&self) -> Result<KvCache> {
        KvCache::new(&self.plan, self.context, self.dtype, &self.device)
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
                logits.push(self.step(chunk, kv, Some(rows))?.ok_or(Error::EmptyPrompt)?);
            } else {
                self.step(chunk, kv, None)?;
            }
            rest = after;
        }
        match logits.len() {
            0 => Err(Error::EmptyPrompt),
            1 => Ok(logits.remove(0)),
            _ => Ok(Tensor::cat(&logits, 0)?),
        }
    }

    /// Runs two steps of made-up tokens, so that a GPU's kernels are compiled and loaded before the first answer: once
    /// per driver that takes tens of seconds. The cache's counters start anew.
    ///
    /// # Errors
    /// As [`Self::forward`].
    pub fn warm_up(&self) -> Result<()> {
        let mut kv = self.new_kv()?;
        let prompt = [0; 2];
        let prompt = &prompt[..prompt.len().min(self.context)];
        self.forward(prompt, &mut kv, Rows::All)?.to_vec2::<f32>()?;
        if kv.len() < self.context {
            self.forward(&[0], &mut kv, Rows::Last)?.to_vec2::<f32>()?;
        }
        self.experts.reset_stats();
        Ok(())
    }

    /// How many of `left` tokens from `position` on go through the model at once.
    pub fn next_chunk(&self, position: usize, left: usize) -> usize {
        left.min(CHUNK - position % CHUNK)
    }

    fn step(&self, ids: &[u32], kv: &mut KvCache, rows: Option<Rows>) -> Result<Option<Tensor>> {
        if let Some(&id) = ids.iter().find(|id| **id as usize >= self.plan.vocab) {
            return Err(Error::UnknownToken { id, vocab: self.plan.vocab });
        }
        let position = kv.len();
        let ids = Tensor::new(ids, &self.device)?;
        let mut x = self.embedding.index_select(&ids, 0)?;
        let mut branch: Option<Tensor> = None;
        for (l, layer) in self.layers.iter().enumerate() {
            let normed;
            (x, normed) = add_norm(&layer.attention_norm, x, branch.as_ref())?;
            let a = layer.attention.forward(&normed, kv.layer(l), position, &self.ropes[layer.rope])?;
            let (sum, normed) = layer.ffn_norm.add_forward(&x, &a)?;
            x = sum;
            branch = Some(match &layer.ffn {
                Ffn::Dense(ffn) => ffn.forward(&normed)?,
                Ffn::Moe(moe) => moe.forward(&normed, &self.experts)?,
            });
        }
        kv.advance(ids.dims1()?);
        let Some(rows) = rows else { return Ok(None) };
        if rows == Rows::Last {
            let last = |t: Tensor| t.narrow(0, t.dim(0)? - 1, 1);
            x = last(x)?;
            branch = branch.map(last).transpose()?;
        }
        let (_, normed) = add_norm(&self.norm, x, branch.as_ref())?;
        Ok(Some(self.head.forward(&normed)?.to_dtype(DType::F32)?))
    }
}

/// Adds the last block's output to the residual stream, and norms the sum.
fn add_norm(norm: &RmsNorm, x: Tensor, branch: Option<&Tensor>) -> Result<(Tensor, Tensor)> {
    Ok(match branch {
        Some(branch) => norm.add_forward(&x, branch)?,
        None => {
            let normed = norm.forward(&x)?;
            (x, normed)
        }
    })
}

fn load_attention(
    weights: &mut DenseWeights<'_>,
    plan: &AttentionPlan,
    hidden: usize,
    names: &TensorNames,
    prefix: &str,
) -> Result<Attention> {
    let widths = [plan.heads, plan.kv_heads, plan.kv_heads].map(|h| h * plan.head_dim);
    let parts = |kind: &str| -> Vec<(String, usize)> {
        names.qkv.iter().zip(widths).map(|(name, rows)| (format!("{prefix}{name}.{kind}"), rows)).collect()
    };
    let bias = if plan.qkv_bias { Some(weights.stacked(&parts("bias"), &[])?) } else { None };
    let qkv = Linear::new(&weights.stacked(&parts("weight"), &[hidden])?, bias)?;
    let out = format!("{prefix}{}", names.attention_out);
    let bias = if plan.out_bias { Some(weights.tensor(&format!("{out}.bias"), &[hidden])?) } else { None };
    let out = Linear::new(&weights.tensor(&format!("{out}.weight"), &[hidden, widths[0]])?, bias)?;
    let qk_norm = match plan.qk_norm {
        Some(_) => {
            let mut weight = |name: &str| weights.tensor(&format!("{prefix}{name}.weight"), &[plan.head_dim]);
            Some([weight(names.qk_norm[0])?, weight(names.qk_norm[1])?])
        }
        None => None,
    };
    Ok(Attention::new(plan, qkv, out, qk_norm)?)
}

fn load_ffn(
    weights: &mut DenseWeights<'_>,
    plan: &LayerPlan,
    layer: usize,
    hidden: usize,
    names: &TensorNames,
    prefix: &str,
) -> Result<Ffn> {
    Ok(match &plan.ffn {
        FfnPlan::Dense { intermediate } => {
            let [gate, up, down] = names.dense.map(|name| format!("{prefix}{name}.weight"));
            let gate_up = weights.stacked(&[(gate, *intermediate), (up, *intermediate)], &[hidden])?;
            let down = weights.tensor(&down, &[hidden, *intermediate])?;
            Ffn::Dense(DenseFfn::new(Linear::new(&gate_up, None)?, Linear::new(&down, None)?))
        }
        FfnPlan::Moe(moe) => {
            let weight =
                weights.tensor(&format!("{prefix}{}.weight", names.router), &[moe.experts, hidden])?;
            Ffn::Moe(Moe::new(Router::new(Linear::new(&weight, None)?, moe.router, layer), layer))
        }
    })
}
