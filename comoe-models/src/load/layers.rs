//! From a plan and a checkpoint to blocks.

use candle_core::{DType, Device, Tensor};
use comoe_core::Activation;

use super::DenseWeights;
use super::dense::LATENT_EXPAND;
use crate::arch::{
    AttentionPlan, ConvPlan, DecoderPlan, FfnPlan, LatentPlan, MixerPlan, MoePlan, NormKind, QkNormKind,
    RouterPrecision, SharedPlan, TensorNames,
};
use crate::blocks::attention::{Attention, AttentionWeights};
use crate::blocks::conv::ShortConv;
use crate::blocks::ffn::DenseFfn;
use crate::blocks::latent::{LatentAttention, LatentWeights, Query};
use crate::blocks::linear::Linear;
use crate::blocks::moe::{Moe, Parallel, Shared};
use crate::blocks::norm::{Norm, RmsNorm};
use crate::blocks::prefill_attention::PrefillAttention;
use crate::blocks::router::{Router, RouterExtras};
use crate::decoder::{Ffn, Mixer};
use crate::error::Result;

/// Builds blocks from the weights under one prefix.
pub(crate) struct Builder<'a, 'w> {
    pub(crate) weights: &'a mut DenseWeights<'w>,
    pub(crate) plan: &'a DecoderPlan,
    /// Ends in a dot.
    pub(crate) prefix: String,
    /// For the attention of prompts, where the device has a kernel for it.
    pub(crate) prefill: Option<PrefillAttention>,
}

impl Builder<'_, '_> {
    /// A tensor below the prefix, by its whole name.
    pub(crate) fn tensor(&mut self, name: &str, shape: &[usize]) -> Result<Tensor> {
        self.weights.tensor(&format!("{}{name}", self.prefix), shape)
    }

    /// A vector in F32 on the host; it may be stored as a matrix of one row.
    fn numbers(&mut self, name: &str, count: usize) -> Result<Vec<f32>> {
        let name = format!("{}{name}", self.prefix);
        let shape: &[usize] = if self.weights.has_shape(&name, &[1, count]) { &[1, count] } else { &[count] };
        let tensor = self.weights.tensor_as(&name, shape, DType::F32)?;
        let numbers = tensor.to_device(&Device::Cpu)?.flatten_all()?.to_vec1::<f32>()?;
        match numbers.iter().find(|n| !n.is_finite()) {
            Some(bad) => {
                let reason = format!("holds {bad}: the checkpoint is damaged; fetch it again");
                Err(comoe_core::Error::bad_tensor(name, reason).into())
            }
            None => Ok(numbers),
        }
    }

    /// `name.weight [out, in]` and, with a bias, `name.bias [out]`.
    pub(crate) fn linear(&mut self, name: &str, shape: [usize; 2], bias: bool) -> Result<Linear> {
        let bias = if bias { Some(self.tensor(&format!("{name}.bias"), &shape[..1])?) } else { None };
        let weight = (format!("{}{name}.weight", self.prefix), shape[0]);
        self.weights.linear(&[weight], shape[1], bias)
    }

    /// A norm over the residual stream.
    pub(crate) fn norm(&mut self, name: &str) -> Result<Norm> {
        let (hidden, plan) = (self.plan.hidden, self.plan.norm);
        let weight = self.tensor(&format!("{name}.weight"), &[hidden])?;
        Ok(match plan.kind {
            NormKind::Rms => Norm::Rms(RmsNorm::new(weight, plan.eps)),
            NormKind::Layer => {
                let bias = self.tensor(&format!("{name}.bias"), &[hidden])?;
                Norm::Layer { weight, bias, eps: plan.eps as f32 }
            }
        })
    }

    pub(crate) fn mixer(&mut self, plan: &MixerPlan) -> Result<Mixer> {
        Ok(match plan {
            MixerPlan::Attention(plan) => Mixer::Attention(self.attention(plan)?),
            MixerPlan::Latent(plan) => Mixer::Latent(self.latent(plan)?),
            MixerPlan::Conv(plan) => Mixer::Conv(self.conv(plan)?),
        })
    }

    fn attention(&mut self, plan: &AttentionPlan) -> Result<Attention> {
        let (hidden, names) = (self.plan.hidden, self.plan.names.clone());
        let widths = [plan.heads, plan.kv_heads, plan.kv_heads].map(|h| h * plan.head_dim);
        let mut projections = names.qkv;
        if plan.values_are_keys {
            projections[2] = projections[1];
        }
        let parts = |kind: &str| -> Vec<(String, usize)> {
            let part = |(name, rows)| (format!("{}{name}.{kind}", self.prefix), rows);
            projections.iter().zip(widths).map(part).collect()
        };
        let (weights, biases) = (parts("weight"), parts("bias"));
        let bias = if plan.qkv_bias { Some(self.weights.stacked(&biases, &[])?) } else { None };
        let qkv = self.weights.linear(&weights, hidden, bias)?;
        let out = self.linear(names.attention_out, [hidden, widths[0]], plan.out_bias)?;
        let qk_norm = match plan.qk_norm.map(|n| n.kind) {
            None | Some(QkNormKind::PlainAfterRope) => None,
            Some(kind) => {
                let full = kind == QkNormKind::Full;
                let mut weight = |which: usize| {
                    let width = if full { widths[which] } else { plan.head_dim };
                    self.tensor(&format!("{}.weight", names.qk_norm[which]), &[width])
                };
                Some([weight(0)?, weight(1)?])
            }
        };
        let sinks = if plan.sinks { Some(self.tensor("self_attn.sinks", &[plan.heads])?) } else { None };
        let weights = AttentionWeights { qkv, out, qk_norm, sinks };
        let attention = Attention::new(plan, weights, self.weights.dtype())?;
        Ok(attention.with_prefill(self.prefill.clone()))
    }

    fn latent(&mut self, plan: &LatentPlan) -> Result<LatentAttention> {
        let (hidden, bias) = (self.plan.hidden, plan.bias);
        let rows = plan.heads * (plan.nope_dim + plan.rope_dim);
        let query = match plan.query_rank {
            None => Query::Plain(self.linear("self_attn.q_proj", [rows, hidden], false)?),
            Some(rank) => Query::Compressed {
                compress: self.linear("self_attn.q_a_proj", [rank, hidden], bias)?,
                norm: RmsNorm::new(self.tensor("self_attn.q_a_layernorm.weight", &[rank])?, plan.norm_eps),
                expand: self.linear("self_attn.q_b_proj", [rows, rank], false)?,
            },
        };
        let width = plan.latent + plan.rope_dim;
        let compress = self.linear("self_attn.kv_a_proj_with_mqa", [width, hidden], bias)?;
        let latent_norm = self.tensor("self_attn.kv_a_layernorm.weight", &[plan.latent])?;
        let rows = plan.heads * (plan.nope_dim + plan.value_dim);
        let expand = self.tensor(&format!("{LATENT_EXPAND}.weight"), &[rows, plan.latent])?;
        let out = self.linear("self_attn.o_proj", [hidden, plan.heads * plan.value_dim], bias)?;
        Ok(LatentAttention::new(plan, LatentWeights { query, compress, latent_norm, expand, out })?)
    }

    fn conv(&mut self, plan: &ConvPlan) -> Result<ShortConv> {
        let &ConvPlan { width, taps, bias } = plan;
        let input = self.linear("conv.in_proj", [3 * width, width], bias)?;
        let kernel = self.tensor("conv.conv.weight", &[width, 1, taps])?;
        let kernel_bias = if bias { Some(self.tensor("conv.conv.bias", &[width])?) } else { None };
        let out = self.linear("conv.out_proj", [width, width], bias)?;
        Ok(ShortConv::new(input, &kernel, kernel_bias, out)?)
    }

    pub(crate) fn ffn(&mut self, plan: &FfnPlan, layer: usize) -> Result<Ffn> {
        Ok(match plan {
            FfnPlan::Dense { intermediate, activation } => {
                Ffn::Dense(self.dense(self.plan.names.dense, *intermediate, *activation)?)
            }
            FfnPlan::Moe(moe) => Ffn::Moe(Box::new(self.moe(moe, layer)?)),
        })
    }

    fn dense(&mut self, names: [&str; 3], width: usize, activation: Activation) -> Result<DenseFfn> {
        let hidden = self.plan.hidden;
        let [gate, up, _] = names.map(|name| format!("{}{name}.weight", self.prefix));
        let gate_up = self.weights.linear(&[(gate, width), (up, width)], hidden, None)?;
        let down = self.linear(names[2], [hidden, width], false)?;
        Ok(DenseFfn::new(gate_up, down, activation))
    }

    fn moe(&mut self, plan: &MoePlan, layer: usize) -> Result<Moe> {
        let TensorNames { dense, shared, .. } = self.plan.names;
        let activation = plan.expert.activation;
        let router = self.router(plan, layer)?;
        let shared = match plan.shared {
            SharedPlan::None => Shared::None,
            SharedPlan::Mlp(width) => Shared::Mlp(self.dense(shared, width, activation)?),
            SharedPlan::Gated(width) => {
                let ffn = self.dense(shared, width, activation)?;
                Shared::Gated(ffn, self.linear("mlp.shared_expert_gate", [1, self.plan.hidden], false)?)
            }
            SharedPlan::Parallel(width) => Shared::Parallel(Box::new(Parallel {
                ffn: self.dense(dense, width, activation)?,
                post: self.norm("post_feedforward_layernorm_1")?,
                experts_pre: self.norm("pre_feedforward_layernorm_2")?,
                experts_post: self.norm("post_feedforward_layernorm_2")?,
            })),
        };
        Ok(Moe::new(router, layer, shared))
    }

    fn router(&mut self, plan: &MoePlan, layer: usize) -> Result<Router> {
        let TensorNames { router: name, choice_bias, .. } = self.plan.names;
        let (hidden, experts, router) = (self.plan.hidden, plan.experts, plan.router);
        let dtype = match router.precision {
            RouterPrecision::F32 | RouterPrecision::F32Logits => DType::F32,
            RouterPrecision::Model | RouterPrecision::ModelLogits => self.weights.dtype(),
        };
        let mut load = |kind: &str, shape: &[usize]| {
            self.weights.tensor_as(&format!("{}{name}.{kind}", self.prefix), shape, dtype)
        };
        let weight = load("weight", &[experts, hidden])?;
        let bias = if router.logit_bias { Some(load("bias", &[experts])?) } else { None };
        let mut extras = RouterExtras::default();
        if router.choice_bias {
            extras.choice_bias = Some(self.numbers(choice_bias, experts)?);
        }
        if router.expert_scale {
            extras.expert_scale = Some(self.numbers("router.per_expert_scale", experts)?);
        }
        if router.own_input {
            // The factor after the norm is part of its weight.
            let scale = (self.tensor("router.scale", &[hidden])? * (hidden as f64).powf(-0.5))?;
            extras.norm = Some(RmsNorm::new(scale, self.plan.norm.eps));
        }
        Router::new(Linear::new(&weight, bias)?, extras, router, layer)
    }

    /// The number on the whole layer.
    pub(crate) fn scalar(&mut self) -> Result<f64> {
        Ok(self.numbers("layer_scalar", 1)?.iter().map(|n| f64::from(*n)).product())
    }
}
