//! A projection `y = x Wᵀ + b`.

use candle_core::{Device, Result, Tensor};

use super::int8_matrix::Int8Matrix;
use super::step::Step;

/// A projection with weight `[out, in]`.
#[derive(Debug, Clone)]
pub struct Linear {
    weight: Weight,
    bias: Option<Tensor>,
}

#[derive(Debug, Clone)]
enum Weight {
    Plain {
        weight: Tensor,
        /// A view: `[in, out]`.
        transposed: Tensor,
    },
    Int8(Int8Matrix),
}

impl Linear {
    /// Wraps a weight `[out, in]` and a bias `[out]`.
    ///
    /// # Errors
    /// When the weight is not a matrix.
    pub fn new(weight: &Tensor, bias: Option<Tensor>) -> Result<Self> {
        Ok(Self { weight: Weight::Plain { weight: weight.clone(), transposed: weight.t()? }, bias })
    }

    /// Wraps a weight in INT8 and a bias `[out]`.
    pub fn int8(weight: Int8Matrix, bias: Option<Tensor>) -> Self {
        Self { weight: Weight::Int8(weight), bias }
    }

    /// Where the weight is.
    pub fn device(&self) -> &Device {
        match &self.weight {
            Weight::Plain { weight, .. } => weight.device(),
            Weight::Int8(weight) => weight.device(),
        }
    }

    /// `x [tokens, in]` to `[tokens, out]`.
    ///
    /// # Errors
    /// Those of candle's `matmul`.
    pub fn forward(&self, x: &Tensor, step: Step<'_>) -> Result<Tensor> {
        let bias = self.bias.as_ref();
        let y = match (&self.weight, step) {
            (Weight::Plain { weight, .. }, Step::Fused(fused)) => return fused.linear(x, weight, bias),
            (Weight::Int8(weight), Step::Fused(fused)) => return fused.linear_int8(x, weight, bias),
            (Weight::Plain { transposed, .. }, Step::At(_)) => x.matmul(transposed)?,
            (Weight::Int8(weight), Step::At(_)) => weight.forward(x)?,
        };
        match bias {
            Some(bias) => y.broadcast_add(bias),
            None => Ok(y),
        }
    }
}
