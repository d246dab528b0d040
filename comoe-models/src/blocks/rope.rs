//! Rotary position embedding (Su et al. 2021, arXiv 2104.09864): tables of angles.

use std::f64::consts::PI;
use std::sync::{Arc, PoisonError, RwLock};

use candle_core::{DType, Device, Result, Tensor};

use crate::arch::{Pairing, RopePlan, RopeScaling};

/// Cosines and sines for positions `0..context` and the `dim / 2` pairs of a head.
#[derive(Debug, Clone)]
pub struct RotaryTable {
    /// `[context, dim / 2]`, in the model's dtype, on its device.
    pub(super) cos: Tensor,
    pub(super) sin: Tensor,
    /// The same in F32 on the host, for the CPU path.
    host: Option<(Vec<f32>, Vec<f32>)>,
    pub(super) dim: usize,
    pub(super) pairing: Pairing,
}

impl RotaryTable {
    /// Angles `position * frequency` for `context` positions, computed in F32 as `transformers` does.
    ///
    /// # Errors
    /// Those of candle.
    pub fn new(plan: &RopePlan, context: usize, dtype: DType, device: &Device) -> Result<Self> {
        let (frequencies, magnitude) = frequencies(plan, context);
        let half = frequencies.len();
        let table = |f: fn(f32) -> f32| -> Vec<f32> {
            let row = |p: usize| frequencies.iter().map(move |inv| f(p as f32 * inv) * magnitude);
            (0..context).flat_map(row).collect()
        };
        let (cos, sin) = (table(f32::cos), table(f32::sin));
        let tensor = |v: &[f32]| Tensor::from_slice(v, (context, half), device)?.to_dtype(dtype);
        Ok(Self {
            cos: tensor(&cos)?,
            sin: tensor(&sin)?,
            host: (device.is_cpu() && dtype == DType::F32).then_some((cos, sin)),
            dim: plan.dim,
            pairing: plan.pairing,
        })
    }

    /// Positions that it has angles of.
    pub(crate) fn positions(&self) -> usize {
        self.cos.dims()[0]
    }

    /// The angles of positions `from..from + tokens` on the host.
    pub(super) fn host_rows(&self, from: usize, tokens: usize) -> Option<Angles<'_>> {
        let half = self.dim / 2;
        let range = from * half..(from + tokens) * half;
        let (cos, sin) = self.host.as_ref()?;
        Some(Angles { cos: cos.get(range.clone())?, sin: sin.get(range)?, half, pairing: self.pairing })
    }

    /// Rotates the first `dim` elements of the rows of `x [heads, tokens, width]`, which begin at `position`.
    ///
    /// # Errors
    /// Those of candle.
    pub(super) fn rotate(&self, x: &Tensor, position: usize) -> Result<Tensor> {
        let (_, tokens, width) = x.dims3()?;
        let (cos, sin) = (self.cos.narrow(0, position, tokens)?, self.sin.narrow(0, position, tokens)?);
        let turn = |x: &Tensor| -> Result<Tensor> {
            let x = x.contiguous()?.unsqueeze(0)?;
            let turned = match self.pairing {
                Pairing::Halves => candle_nn::rotary_emb::rope(&x, &cos, &sin)?,
                Pairing::Neighbours => candle_nn::rotary_emb::rope_i(&x, &cos, &sin)?,
            };
            turned.squeeze(0)
        };
        if self.dim == width {
            return turn(x);
        }
        let rest = x.narrow(2, self.dim, width - self.dim)?;
        Tensor::cat(&[turn(&x.narrow(2, 0, self.dim)?)?, rest.contiguous()?], 2)
    }
}

/// The tables of a model, which grow with its longest sequence.
#[derive(Debug)]
pub(crate) struct Ropes {
    plans: Vec<RopePlan>,
    tables: RwLock<RopeTables>,
}

/// As they were when they were asked for. Whoever keeps addresses of them keeps them.
pub(crate) type RopeTables = Arc<Vec<RotaryTable>>;

impl Ropes {
    pub(crate) fn new(plans: Vec<RopePlan>, positions: usize, dtype: DType, device: &Device) -> Result<Self> {
        let tables = plans.iter().map(|plan| RotaryTable::new(plan, positions, dtype, device));
        let tables = RwLock::new(Arc::new(tables.collect::<Result<_>>()?));
        Ok(Self { plans, tables })
    }

    pub(crate) fn tables(&self) -> RopeTables {
        // A panic elsewhere leaves one table or the other, both whole.
        self.tables.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// At least `positions` positions from now on; those that were there keep their angles.
    pub(crate) fn grow(&self, positions: usize, dtype: DType, device: &Device) -> Result<()> {
        if self.tables().iter().all(|t| t.positions() >= positions) {
            return Ok(());
        }
        let grown = Self::new(self.plans.clone(), positions, dtype, device)?.tables();
        *self.tables.write().unwrap_or_else(PoisonError::into_inner) = grown;
        Ok(())
    }

    /// Elements by which tables of so many positions are larger than those that are there.
    pub(crate) fn more_elements(&self, positions: usize) -> usize {
        let of = |t: &RotaryTable| positions.saturating_sub(t.positions()) * t.dim;
        self.tables().iter().map(of).sum()
    }
}

/// Cosines and sines `[tokens, half]` of a stretch of positions.
#[derive(Clone, Copy)]
pub(super) struct Angles<'a> {
    cos: &'a [f32],
    sin: &'a [f32],
    half: usize,
    pairing: Pairing,
}

impl Angles<'_> {
    /// Rotates the first `2 half` elements of a row in place, which is the `token`-th of the stretch.
    #[inline(always)]
    pub(super) fn rotate(&self, token: usize, row: &mut [f32]) {
        let angles = self.cos[token * self.half..][..self.half].iter().zip(&self.sin[token * self.half..]);
        let turn = |a: &mut f32, b: &mut f32, cos: &f32, sin: &f32| {
            (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
        };
        match self.pairing {
            Pairing::Halves => {
                let (low, high) = row[..2 * self.half].split_at_mut(self.half);
                low.iter_mut().zip(high).zip(angles).for_each(|((a, b), (cos, sin))| turn(a, b, cos, sin));
            }
            Pairing::Neighbours => {
                let pairs = row[..2 * self.half].as_chunks_mut::<2>().0;
                pairs.iter_mut().zip(angles).for_each(|([a, b], (cos, sin))| turn(a, b, cos, sin));
            }
        }
    }
}

/// The pairs' frequencies, in radians per token, and the factor on cosines and sines.
fn frequencies(plan: &RopePlan, context: usize) -> (Vec<f32>, f32) {
    let half = plan.dim / 2;
    let plain = |i: usize| 1.0 / plan.theta.powf(f64::from((2 * i) as f32 / plan.dim as f32));
    let mut magnitude = plan.magnitude;
    let frequency: Vec<f64> = match &plan.scaling {
        RopeScaling::None => (0..half).map(plain).collect(),
        RopeScaling::Linear(factor) => (0..half).map(|i| plain(i) / factor).collect(),
        &RopeScaling::Yarn { factor, original, fast, slow, truncate } => {
            // The pair that turns so many times over the original context; between the two bounds, a ramp.
            let pair =
                |turns: f64| plan.dim as f64 * (original / (turns * 2.0 * PI)).ln() / (2.0 * plan.theta.ln());
            let (low, high) = (pair(fast), pair(slow));
            let (low, high) = if truncate { (low.floor(), high.ceil()) } else { (low, high) };
            let (low, mut high) = (low.max(0.0), high.min(plan.dim as f64 - 1.0));
            if low == high {
                high += 0.001;
            }
            let stretched = |i: usize| {
                let ramp = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
                plain(i) / factor * ramp + plain(i) * (1.0 - ramp)
            };
            (0..half).map(stretched).collect()
        }
        &RopeScaling::Llama3 { factor, low, high, original } => {
            let stretched = |i: usize| {
                let f = plain(i);
                let wavelength = 2.0 * PI / f;
                if wavelength < original / high {
                    f
                } else if wavelength > original / low {
                    f / factor
                } else {
                    let smooth = (original / wavelength - low) / (high - low);
                    (1.0 - smooth) * f / factor + smooth * f
                }
            };
            (0..half).map(stretched).collect()
        }
        RopeScaling::Long { short, long, long_magnitude, original } => {
            let factors = if context > *original {
                magnitude = *long_magnitude;
                long
            } else {
                short
            };
            factors.iter().enumerate().map(|(i, factor)| plain(i) / factor).collect()
        }
        &RopeScaling::Proportional { pairs, factor } => {
            (0..half).map(|i| if i < pairs { plain(i) / factor } else { 0.0 }).collect()
        }
    };
    (frequency.into_iter().map(|f| f as f32).collect(), magnitude as f32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{close, random, rope};

    #[test]
    fn a_part_of_a_head_rotates_alike_on_both_paths() {
        let x = random(&[3, 5, 12], 1);
        for (dim, pairing) in [(12, Pairing::Halves), (8, Pairing::Halves), (8, Pairing::Neighbours)] {
            let table = RotaryTable::new(&RopePlan { pairing, ..rope(dim) }, 20, DType::F32, &Device::Cpu);
            let table = table.unwrap();
            let want = table.rotate(&x, 9).unwrap();
            let angles = table.host_rows(9, 5).unwrap();
            let mut rows = x.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            rows.chunks_exact_mut(12).enumerate().for_each(|(i, row)| angles.rotate(i % 5, row));
            close(&Tensor::from_vec(rows, (3, 5, 12), &Device::Cpu).unwrap(), &want, 1e-6);
        }
    }

    #[test]
    fn long_contexts_take_the_long_factors() {
        let scaling = RopeScaling::Long {
            short: vec![1.0, 2.0],
            long: vec![4.0, 8.0],
            long_magnitude: 1.5,
            original: 32,
        };
        let plan = RopePlan { scaling, magnitude: 1.25, ..rope(4) };
        let (short, long) = (frequencies(&plan, 32), frequencies(&plan, 33));
        assert_eq!((short.1, long.1), (1.25, 1.5));
        assert_eq!((short.0[0] / long.0[0], short.0[1] / long.0[1]), (4.0, 4.0));
    }

    #[test]
    fn linear_scaling_divides_positions() {
        let linear = RopePlan { scaling: RopeScaling::Linear(4.0), ..rope(8) };
        let (plain, scaled) = (frequencies(&rope(8), 9).0, frequencies(&linear, 9).0);
        assert!(plain.iter().zip(scaled).all(|(p, s)| (p / 4.0 - s).abs() < 1e-9));
    }
}
