//! Which experts serve a token, and with which weights.

use candle_core::{DType, Device, Tensor};
use half::{bf16, f16};

use super::linear::Linear;
use crate::arch::RouterPlan;
use crate::error::{Error, Result};

/// A router: projection, softmax over all experts, top-k.
#[derive(Debug, Clone)]
pub struct Router {
    projection: Linear,
    plan: RouterPlan,
    layer: usize,
}

impl Router {
    /// A router of the model's layer `layer` (for messages) with projection `[experts, hidden]`.
    pub fn new(projection: Linear, plan: RouterPlan, layer: usize) -> Self {
        Self { projection, plan, layer }
    }

    /// Routes `x [tokens, hidden]`: expert ids `[tokens, top_k]` (U32) and weights `[tokens, top_k]` (F32), the most
    /// likely expert first.
    ///
    /// Both are host tensors whatever the model's device: the cache's schedule decides on the host.
    ///
    /// # Errors
    /// [`Error::BadRouter`] when an output is not a number.
    pub fn forward(&self, x: &Tensor) -> Result<(Tensor, Tensor)> {
        let logits = self.projection.forward(x)?;
        let rounding = logits.dtype();
        let (tokens, experts) = logits.dims2()?;
        let logits = logits.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
        let (ids, mut weights) = route(&logits, experts, self.plan)
            .map_err(|token| Error::BadRouter { layer: self.layer, token })?;
        // `transformers` casts the weights to the dtype of the logits.
        match rounding {
            DType::BF16 => weights.iter_mut().for_each(|w| *w = bf16::from_f32(*w).to_f32()),
            DType::F16 => weights.iter_mut().for_each(|w| *w = f16::from_f32(*w).to_f32()),
            _ => {}
        }
        let shape = (tokens, self.plan.top_k);
        Ok((Tensor::from_vec(ids, shape, &Device::Cpu)?, Tensor::from_vec(weights, shape, &Device::Cpu)?))
    }
}

/// Routes rows of `experts` logits. The error is the first row with an output that is no number.
fn route(
    logits: &[f32],
    experts: usize,
    plan: RouterPlan,
) -> std::result::Result<(Vec<u32>, Vec<f32>), usize> {
    let tokens = logits.len() / experts;
    let mut ids = Vec::with_capacity(tokens * plan.top_k);
    let mut weights = Vec::with_capacity(tokens * plan.top_k);
    let mut p = vec![0f32; experts];
    for (token, row) in logits.chunks_exact(experts).enumerate() {
        let top = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        if !top.is_finite() || row.iter().any(|l| l.is_nan()) {
            return Err(token);
        }
        let mut sum = 0.0;
        for (p, l) in p.iter_mut().zip(row) {
            *p = (l - top).exp();
            sum += *p;
        }
        p.iter_mut().for_each(|p| *p /= sum);

        let first = weights.len();
        for _ in 0..plan.top_k {
            // The first of the largest; a chosen one is set below every probability.
            let mut best = 0;
            for (e, value) in p.iter().enumerate() {
                if *value > p[best] {
                    best = e;
                }
            }
            ids.push(best as u32);
            weights.push(p[best]);
            p[best] = -1.0;
        }
        if plan.normalise {
            let sum: f32 = weights[first..].iter().sum();
            weights[first..].iter_mut().for_each(|w| *w /= sum);
        }
    }
    Ok((ids, weights))
}

#[cfg(test)]
mod tests {
    use candle_core::D;

    use super::*;
    use crate::testing::{close, random};

    #[test]
    fn agrees_with_candle_operations() {
        let (tokens, hidden, experts) = (9, 32, 16);
        let (x, w) = (random(&[tokens, hidden], 1), random(&[experts, hidden], 2));
        for normalise in [false, true] {
            let router = Router::new(Linear::new(&w, None).unwrap(), RouterPlan { top_k: 4, normalise }, 0);
            let (ids, weights) = router.forward(&x).unwrap();
            let p = candle_nn::ops::softmax(&x.matmul(&w.t().unwrap()).unwrap(), D::Minus1).unwrap();
            let want_ids = p.arg_sort_last_dim(false).unwrap().narrow(1, 0, 4).unwrap().contiguous().unwrap();
            let mut want = p.gather(&want_ids, 1).unwrap();
            if normalise {
                want = want.broadcast_div(&want.sum_keepdim(1).unwrap()).unwrap();
            }
            assert_eq!(ids.to_vec2::<u32>().unwrap(), want_ids.to_vec2::<u32>().unwrap());
            close(&weights, &want, 1e-6);
        }
    }

    #[test]
    fn ties_go_to_the_lowest_number_and_all_experts_can_be_chosen() {
        let plan = |top_k| RouterPlan { top_k, normalise: true };
        assert_eq!(route(&[1.0, 2.0, 2.0, 2.0], 4, plan(2)).unwrap().0, [1, 2]);
        let (ids, w) = route(&[0.0, -200.0, 5.0], 3, plan(3)).unwrap();
        assert_eq!(ids, [2, 0, 1]);
        assert!((w.iter().sum::<f32>() - 1.0).abs() < 1e-6);
    }

    #[test]
    fn what_is_not_a_number_is_reported_with_its_row() {
        let plan = RouterPlan { top_k: 1, normalise: false };
        for bad in [f32::NAN, f32::INFINITY] {
            assert_eq!(route(&[0.0, 1.0, 2.0, bad], 2, plan), Err(1));
        }
        assert_eq!(route(&[f32::NEG_INFINITY; 2], 2, plan), Err(0));
        let w = Tensor::zeros((4, 8), DType::F32, &Device::Cpu).unwrap();
        let router = Router::new(Linear::new(&w, None).unwrap(), plan, 3);
        let x = (random(&[2, 8], 1) * f64::NAN).unwrap();
        let e = router.forward(&x).unwrap_err().to_string();
        assert!(e.contains("layer 3") && e.contains("token 0"), "{e}");
    }
}
