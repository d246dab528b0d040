//! A projection `y = x Wᵀ + b`.

use candle_core::{Result, Tensor};

/// A projection with weight `[out, in]`.
#[derive(Debug, Clone)]
pub struct Linear {
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
        Ok(Self { transposed: weight.t()?, bias })
    }

    /// `x [tokens, in]` to `[tokens, out]`.
    ///
    /// # Errors
    /// Those of candle's `matmul`.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let y = x.matmul(&self.transposed)?;
        match &self.bias {
            Some(bias) => y.broadcast_add(bias),
            None => Ok(y),
        }
    }
}
