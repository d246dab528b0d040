//! Norms over the residual stream, alone and fused with the residual addition before them: RMS norm (Zhang, Sennrich
//! 2019, arXiv 1910.07467) and layer norm (Ba et al. 2016, arXiv 1607.06450).

use candle_core::{CpuStorage, CustomOp2, CustomOp3, Layout, Result, Shape, Tensor};

use super::cpu;
use super::step::Step;

/// A norm over the last dimension.
#[derive(Debug, Clone)]
pub enum Norm {
    /// RMS norm.
    Rms(RmsNorm),
    /// Layer norm with weight and bias, `[width]` each.
    Layer {
        /// Factor.
        weight: Tensor,
        /// Summand.
        bias: Tensor,
        /// Added to the variance.
        eps: f32,
    },
}

impl Norm {
    /// `x [tokens, width]` to the same shape.
    ///
    /// # Errors
    /// Those of candle.
    pub fn forward(&self, x: &Tensor, step: Step<'_>) -> Result<Tensor> {
        match self {
            Self::Rms(norm) => norm.forward(x, step),
            Self::Layer { weight, bias, eps } => {
                if let Step::Fused(fused) = step {
                    return fused.layer_norm(x, weight, bias, *eps);
                }
                candle_nn::ops::layer_norm(&x.contiguous()?, weight, bias, *eps)
            }
        }
    }

    /// Adds a block's output to the residual stream and norms the sum: `(x + delta, norm(x + delta))`, each
    /// `[tokens, width]`.
    ///
    /// # Errors
    /// Those of candle.
    pub fn add_forward(&self, x: &Tensor, delta: &Tensor, step: Step<'_>) -> Result<(Tensor, Tensor)> {
        if let Self::Rms(norm) = self {
            return norm.add_forward(x, delta, step);
        }
        let sum = (x + delta)?;
        let normed = self.forward(&sum, step)?;
        Ok((sum, normed))
    }
}

/// `weight * x / sqrt(mean(x²) + eps)` over the last dimension.
#[derive(Debug, Clone)]
pub struct RmsNorm {
    pub(super) weight: Tensor,
    pub(super) eps: f32,
}

impl RmsNorm {
    /// A norm with weight `[width]`.
    pub fn new(weight: Tensor, eps: f64) -> Self {
        Self { weight, eps: eps as f32 }
    }

    /// Width of what it norms.
    ///
    /// # Errors
    /// When the weight is no vector.
    pub fn width(&self) -> Result<usize> {
        self.weight.dims1()
    }

    /// `x [tokens, width]` to the same shape.
    ///
    /// # Errors
    /// Those of candle.
    pub fn forward(&self, x: &Tensor, step: Step<'_>) -> Result<Tensor> {
        if let Step::Fused(fused) = step {
            return fused.rms_norm(x, &self.weight, self.eps);
        }
        if cpu::applies(x) {
            return x.apply_op2_no_bwd(&self.weight, &NormOp { eps: self.eps });
        }
        candle_nn::ops::rms_norm(&x.contiguous()?, &self.weight, self.eps)
    }

    /// Adds a block's output to the residual stream and norms the sum: `(x + delta, norm(x + delta))`, each
    /// `[tokens, width]`.
    ///
    /// # Errors
    /// Those of candle.
    pub fn add_forward(&self, x: &Tensor, delta: &Tensor, step: Step<'_>) -> Result<(Tensor, Tensor)> {
        if let Step::Fused(fused) = step {
            return fused.add_rms_norm(x, delta, &self.weight, self.eps);
        }
        if cpu::applies(x) {
            let both = x.apply_op3_no_bwd(delta, &self.weight, &AddNormOp { eps: self.eps })?;
            return Ok((both.get(0)?, both.get(1)?));
        }
        let sum = (x + delta)?;
        let normed = candle_nn::ops::rms_norm(&sum, &self.weight, self.eps)?;
        Ok((sum, normed))
    }
}

/// Norms `row` into `out`.
#[inline(always)]
pub(super) fn norm_row(row: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let mean = cpu::dot(row, row) / row.len() as f32;
    let scale = 1.0 / (mean + eps).sqrt();
    for ((o, x), w) in out.iter_mut().zip(row).zip(weight) {
        *o = w * (x * scale);
    }
}

struct NormOp {
    eps: f32,
}

impl CustomOp2 for NormOp {
    fn name(&self) -> &'static str {
        "rms-norm"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        weight: &CpuStorage,
        weight_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (x, weight) = (cpu::slice(x, x_layout)?, cpu::slice(weight, weight_layout)?);
        let width = weight.len();
        let mut out = vec![0f32; x.len()];
        cpu::for_chunks(&mut out, width, x.len(), |row, out| {
            norm_row(&x[row * width..][..width], weight, self.eps, out);
        });
        Ok((CpuStorage::F32(out), x_layout.shape().clone()))
    }
}

struct AddNormOp {
    eps: f32,
}

impl CustomOp3 for AddNormOp {
    fn name(&self) -> &'static str {
        "add-rms-norm"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        delta: &CpuStorage,
        delta_layout: &Layout,
        weight: &CpuStorage,
        weight_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (x, delta) = (cpu::slice(x, x_layout)?, cpu::slice(delta, delta_layout)?);
        let weight = cpu::slice(weight, weight_layout)?;
        let width = weight.len();
        if x.len() != delta.len() {
            candle_core::bail!("add-rms-norm: {:?} and {:?} differ", x_layout.shape(), delta_layout.shape());
        }
        let mut out = vec![0f32; 2 * x.len()];
        let (sums, normed) = out.split_at_mut(x.len());
        for ((s, x), d) in sums.iter_mut().zip(x).zip(delta) {
            *s = x + d;
        }
        let sums = &*sums;
        cpu::for_chunks(normed, width, x.len(), |row, out| {
            norm_row(&sums[row * width..][..width], weight, self.eps, out);
        });
        let mut dims = vec![2];
        dims.extend_from_slice(x_layout.dims());
        Ok((CpuStorage::F32(out), dims.into()))
    }
}

#[cfg(test)]
mod tests {
    use candle_core::DType;

    use super::*;
    use crate::testing::{close, random};

    #[test]
    fn both_paths_agree_with_candle() {
        for (tokens, width) in [(1, 256), (3, 20), (700, 128)] {
            let (x, d) = (random(&[tokens, width], 1), random(&[tokens, width], 2));
            let norm = RmsNorm::new(random(&[width], 3), 1e-6);
            let want = candle_nn::ops::rms_norm_slow(&x, &norm.weight, norm.eps).unwrap();
            close(&norm.forward(&x, Step::At(0)).unwrap(), &want, 1e-5);
            let sum = (&x + &d).unwrap();
            let (got_sum, got) = norm.add_forward(&x, &d, Step::At(0)).unwrap();
            close(&got_sum, &sum, 0.0);
            close(&got, &candle_nn::ops::rms_norm_slow(&sum, &norm.weight, norm.eps).unwrap(), 1e-5);
        }
    }

    #[test]
    fn bf16_takes_the_candle_path_and_agrees() {
        let (x, w) = (random(&[3, 32], 1), random(&[32], 2));
        let narrow = |t: &Tensor| t.to_dtype(DType::BF16).unwrap();
        let wide = |t: &Tensor| t.to_dtype(DType::F32).unwrap();
        let norm = RmsNorm::new(narrow(&w), 1e-6);
        let (sum, got) = norm.add_forward(&narrow(&x), &narrow(&x), Step::At(0)).unwrap();
        let want = RmsNorm::new(wide(&narrow(&w)), 1e-6).forward(&wide(&sum), Step::At(0)).unwrap();
        close(&wide(&got), &want, 0.02);
    }
}
