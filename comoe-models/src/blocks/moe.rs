//! The feed-forward part with experts: the router is the model's, everything behind it the cache's.

use candle_core::Tensor;
use comoe_core::ExpertCache;

use super::router::Router;
use crate::error::Result;

/// A router before the experts of one layer.
#[derive(Debug, Clone)]
pub struct Moe {
    router: Router,
    layer: usize,
}

impl Moe {
    /// The model's layer `layer`.
    pub fn new(router: Router, layer: usize) -> Self {
        Self { router, layer }
    }

    /// `x [tokens, hidden]` to the same shape.
    ///
    /// # Errors
    /// Those of the router and of the cache.
    pub fn forward(&self, x: &Tensor, experts: &ExpertCache) -> Result<Tensor> {
        let (ids, weights) = self.router.forward(x)?;
        Ok(experts.layer(self.layer).forward(x, &ids, &weights)?)
    }
}
