//! Rotary position embedding (Su et al. 2021, arXiv 2104.09864): tables of angles.

use candle_core::{DType, Device, Result, Tensor};

/// Cosines and sines for positions `0..context` and the `dim / 2` pairs of a head.
#[derive(Debug, Clone)]
pub struct RotaryTable {
    /// `[context, dim / 2]`, in the model's dtype, on its device.
    cos: Tensor,
    sin: Tensor,
    /// The same in F32 on the host, for the CPU path.
    host: Option<(Vec<f32>, Vec<f32>)>,
    half: usize,
}

impl RotaryTable {
    /// Angles `position / theta^(2i / dim)`, computed in F32 as `transformers` does.
    ///
    /// # Errors
    /// Those of candle.
    pub fn new(theta: f64, dim: usize, context: usize, dtype: DType, device: &Device) -> Result<Self> {
        let half = dim / 2;
        let inverse: Vec<f32> =
            (0..half).map(|i| 1.0 / theta.powf(f64::from((2 * i) as f32 / dim as f32)) as f32).collect();
        let angle = |f: fn(f32) -> f32| -> Vec<f32> {
            (0..context).flat_map(|p| inverse.iter().map(move |inv| f(p as f32 * inv))).collect()
        };
        let (cos, sin) = (angle(f32::cos), angle(f32::sin));
        let tensor = |v: &[f32]| Tensor::from_slice(v, (context, half), device)?.to_dtype(dtype);
        Ok(Self {
            cos: tensor(&cos)?,
            sin: tensor(&sin)?,
            host: (device.is_cpu() && dtype == DType::F32).then_some((cos, sin)),
            half,
        })
    }

    /// Cosines and sines of positions `from..from + tokens` on the host, `[tokens, dim / 2]` each.
    pub(super) fn host_rows(&self, from: usize, tokens: usize) -> Option<(&[f32], &[f32])> {
        let range = from * self.half..(from + tokens) * self.half;
        self.host.as_ref().and_then(|(cos, sin)| Some((cos.get(range.clone())?, sin.get(range)?)))
    }

    /// Cosines and sines of positions `from..from + tokens`, `[tokens, dim / 2]` each.
    pub(super) fn rows(&self, from: usize, tokens: usize) -> Result<(Tensor, Tensor)> {
        Ok((self.cos.narrow(0, from, tokens)?, self.sin.narrow(0, from, tokens)?))
    }
}
