//! Which experts serve a token, chosen on the device.

use std::sync::Arc;

use candle_core::DType;
use comoe_core::Result;
use cudarc::driver::{CudaFunction, CudaModule, CudaStream, DriverError};

use super::{DecodeKernels, bad, dtype_code, grid, within};
use crate::arch::{GroupScore, Normalise, RouterPlan, RouterPrecision, Score};

/// The most experts of a layer: a lane has 32 of them in registers.
pub const MOST_EXPERTS: usize = 1024;

/// Arguments of [`DecodeKernels::route`]; addresses are device memory.
#[derive(Debug, Clone, Copy)]
pub struct RouteArgs {
    /// `[tokens, experts]`
    pub logits: u64,
    /// F32, BF16 or F16.
    pub logits_dtype: DType,
    /// The model's dtype, to which weights are rounded where the plan says so.
    pub model_dtype: DType,
    /// `[experts]` F32, added to the scores for the choice alone, or 0.
    pub choice_bias: u64,
    /// `[experts]` F32, factors on the weights, or 0.
    pub expert_scale: u64,
    /// Rows of the logits, any number.
    pub tokens: usize,
    /// Experts of the layer, at most [`MOST_EXPERTS`].
    pub experts: usize,
    /// How experts are chosen and weighted. Whether there are a bias and factors is told by their addresses.
    pub plan: RouterPlan,
    /// Result `[tokens, top_k]`, u32, best first; of equal scores the lowest id is better.
    pub ids: u64,
    /// Result `[tokens, top_k]`, F32.
    pub weights: u64,
    /// Experts that are taken in place of the choice, with the choice's weights.
    pub given: Option<GivenExperts>,
    /// One u32, set to 1 + a token whose logits have a NaN or +inf (or no score above zero), else left alone.
    pub error: u64,
}

/// Recorded experts, for measuring; addresses are device memory. A token at position `p` has row `(p - first) % rows`.
#[derive(Debug, Clone, Copy)]
pub struct GivenExperts {
    /// Rows of `top_k` u32.
    pub ids: u64,
    /// Elements from one row to the next.
    pub row_stride: usize,
    /// Rows.
    pub rows: usize,
    /// Position of the first row's token.
    pub first: usize,
    /// One u32: the first token's position.
    pub position: u64,
}

/// As kernels/route.cu has it.
#[repr(C)]
#[derive(Clone, Copy)]
struct Device {
    logits: u64,
    bias: u64,
    expert_scale: u64,
    ids: u64,
    weights: u64,
    error: u64,
    given: u64,
    position: u64,
    dtype: u32,
    experts: u32,
    k: u32,
    scoring: u32,
    tolerance: f32,
    groups: u32,
    keep: u32,
    by_best_two: u32,
    normalise: u32,
    eps: f32,
    scale: f32,
    weights_dtype: u32,
    rows: u32,
    row_stride: u32,
    first: u32,
    pad: u32,
}

/// By the most experts that they know.
pub(super) struct RouteKernels([(usize, CudaFunction); 4]);

impl RouteKernels {
    pub(super) fn load(module: &Arc<CudaModule>) -> std::result::Result<Self, DriverError> {
        let up_to = |experts: usize| Ok((experts, module.load_function(&format!("route_{experts}"))?));
        Ok(Self([up_to(128)?, up_to(256)?, up_to(512)?, up_to(MOST_EXPERTS)?]))
    }

    fn up_to(&self, experts: usize) -> &CudaFunction {
        let [.., (_, last)] = &self.0;
        self.0.iter().find(|(most, _)| experts <= *most).map_or(last, |(_, function)| function)
    }
}

impl DecodeKernels {
    /// Enqueues the choice of every token's experts, as [`crate::blocks::router`] makes it on the host.
    ///
    /// # Errors
    /// [`comoe_core::Error::BadArgument`] for sizes or a dtype that the kernel cannot do,
    /// [`comoe_core::Error::Device`] when the launch fails.
    ///
    /// # Safety
    /// Every address in `args` must be valid on the stream's GPU, for the sizes documented, until the kernel is done.
    pub unsafe fn route(&self, stream: &Arc<CudaStream>, args: &RouteArgs) -> Result<()> {
        let plan = &args.plan;
        let experts = within("experts of a layer", args.experts, 1, MOST_EXPERTS)?;
        let k = within("top_k of a layer's experts", plan.top_k, 1, args.experts)?;
        if args.tokens == 0 {
            return Ok(());
        }
        let (scoring, tolerance) = match plan.score {
            Score::Softmax => (0, 0.0),
            Score::Sigmoid => (1, 0.0),
            Score::SoftmaxOfChosen => (2, 0.0),
            Score::SparseMixer { tolerance } => (3, 2.0 * tolerance as f32),
        };
        let groups = plan.groups.map_or(0, |g| g.count);
        if let Some(g) = plan.groups {
            let kept = g.keep.min(g.count) * (args.experts / g.count.max(1));
            if g.count == 0 || !args.experts.is_multiple_of(g.count) || kept < plan.top_k {
                let reason = format!("{g:?} of {} experts leave fewer than {}", args.experts, plan.top_k);
                return bad("groups of experts", reason);
            }
        }
        let (normalise, eps) = match plan.normalise {
            Normalise::No => (0, 0.0),
            Normalise::Sum { eps } => (1, eps as f32),
            Normalise::AtLeast(least) => (2, least as f32),
        };
        let rounds = matches!(plan.precision, RouterPrecision::Model | RouterPrecision::F32Logits);
        let device = Device {
            logits: args.logits,
            bias: args.choice_bias,
            expert_scale: args.expert_scale,
            ids: args.ids,
            weights: args.weights,
            error: args.error,
            given: args.given.map_or(0, |g| g.ids),
            position: args.given.map_or(0, |g| g.position),
            rows: args.given.map_or(Ok(1), |g| within("rows of given experts", g.rows, 1, 1 << 24))?,
            row_stride: args
                .given
                .map_or(Ok(1), |g| within("stride of given experts", g.row_stride, 1, 1 << 24))?,
            first: args.given.map_or(Ok(0), |g| within("first position", g.first, 0, 1 << 30))?,
            pad: 0,
            dtype: dtype_code("router logits", args.logits_dtype)?,
            experts,
            k,
            scoring,
            tolerance,
            groups: groups as u32,
            keep: plan.groups.map_or(0, |g| g.keep as u32),
            by_best_two: plan.groups.is_some_and(|g| g.by == GroupScore::BestTwo).into(),
            normalise,
            eps,
            scale: plan.scale as f32,
            weights_dtype: if rounds { dtype_code("the model", args.model_dtype)? } else { 0 },
        };
        let tokens = within("rows of router logits", args.tokens, 1, 1 << 30)? as usize;
        let shared = 4 * (2 * args.experts + groups + 2 * plan.top_k);
        let function = self.route.up_to(args.experts);
        // SAFETY: `Device` is the kernel's struct; the addresses are the caller's promise.
        unsafe { self.launch("route", stream, function, grid(tokens, 1, 1, 32, shared), &device) }
    }
}

#[cfg(test)]
mod tests {
    super::super::mirrored!(super::Device, 128);

    #[test]
    fn the_most_experts_fit_every_gpu() {
        // As many groups, and as many choices.
        const { assert!(4 * 5 * super::MOST_EXPERTS <= 48 << 10) };
    }
}
