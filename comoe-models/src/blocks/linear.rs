//! A projection `y = x Wᵀ + b`.

use candle_core::{Device, Result, Tensor};

use super::step::Step;

/// A projection with weight `[out, in]`.
#[derive(Debug, Clone)]
pub struct Linear {
    weight: Tensor,
    /// A view: `[in, out]`.
    transposed: Tensor,
    bias: Option<Tensor>,
}

impl Linear {
    /// Wraps a weight `[out, in]` and a bias `[out]`.
    ///
    /// # Errors
    /// When the weight is not a matrix.
    pub fn new(weight: &Tensor, bias: Option<Tensor>) -> Result<Self> {
        Ok(Self { weight: weight.clone(), transposed: weight.t()?, bias })
    }

    /// Where the weight is.
    pub fn device(&self) -> &Device {
        self.weight.device()
    }

    /// `x [tokens, in]` to `[tokens, out]`.
    ///
    /// # Errors
    /// Those of candle's `matmul`.
    pub fn forward(&self, x: &Tensor, step: Step<'_>) -> Result<Tensor> {
        if let Step::Fused(fused) = step {
            return fused.linear(x, &self.weight, self.bias.as_ref());
        }
        let y = x.matmul(&self.transposed)?;
        match &self.bias {
            Some(bias) => y.broadcast_add(bias),
            None => Ok(y),
        }
    }
}
