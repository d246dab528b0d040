//! The feed-forward part with experts: the router is the model's, everything behind it the cache's.

use candle_core::Tensor;
use comoe_core::ExpertCache;

use super::ffn::DenseFfn;
use super::linear::Linear;
use super::norm::Norm;
use super::router::Router;
use super::stale_gate::StaleGate;
use super::step::Step;
use crate::error::Result;

/// A router before the experts of one layer, and what every token gets besides.
#[derive(Debug, Clone)]
pub struct Moe {
    router: Router,
    layer: usize,
    shared: Shared,
    /// The next layer's router; `None` in the last layer (boxed: most of the time nobody asks it).
    ahead: Option<Box<StaleGate>>,
}

/// What is added to the routed experts' sum.
#[derive(Debug, Clone)]
pub enum Shared {
    /// Nothing.
    None,
    /// An expert that every token uses.
    Mlp(DenseFfn),
    /// The same, times the sigmoid of a projection `[1, hidden]`.
    Gated(DenseFfn, Linear),
    /// A dense part on the same input under a norm of its own after it; the experts take the residual stream under
    /// one norm and give through another (boxed: it is four times as large as the others).
    Parallel(Box<Parallel>),
}

/// A dense part beside the experts (Gemma 4).
#[derive(Debug, Clone)]
pub struct Parallel {
    /// The dense part.
    pub ffn: DenseFfn,
    /// On what it gives.
    pub post: Norm,
    /// Before the experts.
    pub experts_pre: Norm,
    /// On what they give.
    pub experts_post: Norm,
}

impl Moe {
    /// The model's layer `layer`.
    pub fn new(router: Router, layer: usize, shared: Shared) -> Self {
        Self { router, layer, shared, ahead: None }
    }

    pub(super) fn router(&self) -> &Router {
        &self.router
    }

    pub(super) fn look_ahead(&mut self, next: StaleGate) {
        self.ahead = Some(Box::new(next));
    }

    /// `x [tokens, hidden]`, the normed `residual` stream, to the same shape.
    ///
    /// # Errors
    /// Those of the router and of the cache.
    pub fn forward(
        &self,
        x: &Tensor,
        residual: &Tensor,
        experts: &ExpertCache,
        step: Step<'_>,
    ) -> Result<Tensor> {
        let routed = |router_input: &Tensor, x: &Tensor| -> Result<Tensor> {
            let layer = experts.layer(self.layer);
            if let Step::Fused(fused) = step {
                // First, so that it runs beside this layer's own router.
                let guess = match &self.ahead {
                    Some(ahead)
                        if fused.asks() && layer.wants_device_guess(x.dim(0)?, self.router.top_k()) =>
                    {
                        Some(ahead.guess_beside(router_input, fused)?)
                    }
                    _ => None,
                };
                let (ids, weights) = self.router.forward(router_input, step)?;
                let layer = match &guess {
                    Some(ids) => layer.with_device_guess(fused.guess(ids)),
                    None => layer,
                };
                let y = layer.forward_to(x, &ids, &weights, &fused.room_like(x)?)?;
                fused.mark("experts", 0)?;
                return Ok(y);
            }
            let (ids, weights) = self.router.forward(router_input, step)?;
            let guess = match &self.ahead {
                Some(ahead) if layer.wants_guess(x.dim(0)?) => ahead.guess(router_input)?,
                _ => Vec::new(),
            };
            Ok(layer.with_guess(&guess).forward(x, &ids, &weights)?)
        };
        Ok(match &self.shared {
            Shared::None => routed(x, x)?,
            Shared::Mlp(ffn) => add(&routed(x, x)?, &ffn.forward(x, step)?, None, step)?,
            Shared::Gated(ffn, gate) => {
                add(&routed(x, x)?, &ffn.forward(x, step)?, Some(&gate.forward(x, step)?), step)?
            }
            Shared::Parallel(p) => {
                let dense = p.post.forward(&p.ffn.forward(x, step)?, step)?;
                let routed = routed(residual, &p.experts_pre.forward(residual, step)?)?;
                add(&dense, &p.experts_post.forward(&routed, step)?, None, step)?
            }
        })
    }
}

/// `x + y`, or `x + sigmoid(gate) y` with `gate [tokens, 1]`.
fn add(x: &Tensor, y: &Tensor, gate: Option<&Tensor>, step: Step<'_>) -> candle_core::Result<Tensor> {
    match (step, gate) {
        (Step::Fused(fused), gate) => fused.add(x, y, gate),
        (Step::At(_), None) => x + y,
        (Step::At(_), Some(gate)) => x + y.broadcast_mul(&candle_nn::ops::sigmoid(gate)?)?,
    }
}
