//! Rows of a KV cache in INT8 (`--kv-format int8`): `scale * q`, one f16 scale for each position and head.
//!
//! Attention works with the whole numbers q, which every dtype of a model holds exactly, and applies scales to scores and
//! probabilities in F32. So a prompt and a step of one token read the same numbers, on every device.

use candle_core::{CpuStorage, CustomOp1, DType, Device, Layout, Result, Shape, Tensor};
use half::f16;

use super::int8::quantise;

/// Rows `[heads, rows, width]`, or a view of such.
#[derive(Debug, Clone)]
pub struct Int8Rows {
    /// `[heads, rows, width]`, U8: the bytes of signed numbers.
    q: Tensor,
    /// `[heads, rows]`, F16.
    scales: Tensor,
    kernels: Kernels,
}

/// What reads and writes rows on a device: kernels on a GPU, nothing on the CPU.
#[derive(Debug, Clone)]
struct Kernels {
    #[cfg(feature = "cuda")]
    rows: Option<crate::cuda::RowKernels>,
}

impl Kernels {
    #[cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "the CPU needs nothing"))]
    fn load(device: &Device) -> crate::Result<Self> {
        Ok(Self {
            #[cfg(feature = "cuda")]
            rows: match device {
                Device::Cuda(gpu) => Some(crate::cuda::RowKernels::load(gpu.cuda_stream().context())?),
                _ => None,
            },
        })
    }
}

impl Int8Rows {
    /// Zeros.
    ///
    /// # Errors
    /// When the device has no memory for them, or this build no kernels for it.
    pub fn zeros(heads: usize, rows: usize, width: usize, device: &Device) -> crate::Result<Self> {
        Ok(Self {
            q: Tensor::zeros((heads, rows, width), DType::U8, device)?,
            scales: Tensor::zeros((heads, rows), DType::F16, device)?,
            kernels: Kernels::load(device)?,
        })
    }

    /// `[heads, rows, width]`, U8: the bytes of signed numbers.
    pub fn q(&self) -> &Tensor {
        &self.q
    }

    /// `[heads, rows]`, F16.
    pub fn scales(&self) -> &Tensor {
        &self.scales
    }

    /// Quantises `x [heads, tokens, width]` and writes it from row `position` on.
    ///
    /// # Errors
    /// Those of candle.
    pub fn write(&self, position: usize, x: &Tensor) -> Result<()> {
        #[cfg(feature = "cuda")]
        if let Some(kernels) = &self.kernels.rows {
            return kernels.keep(x, &self.q, &self.scales, position);
        }
        let (heads, tokens, width) = x.dims3()?;
        let values = x.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
        let mut q = vec![0u8; values.len()];
        let rows = values.chunks_exact(width).zip(q.chunks_exact_mut(width));
        let scales: Vec<f16> = rows.map(|(row, q)| quantise(row, q)).collect();
        self.q.slice_set(&Tensor::from_vec(q, (heads, tokens, width), x.device())?, 1, position)?;
        self.scales.slice_set(&Tensor::from_vec(scales, (heads, tokens), x.device())?, 1, position)
    }

    /// Heads `heads.0..heads.0 + heads.1`, and of them rows `rows.0..rows.0 + rows.1`; a view.
    ///
    /// # Errors
    /// When they are not there.
    pub fn part(&self, heads: (usize, usize), rows: (usize, usize)) -> Result<Self> {
        let part = |t: &Tensor| t.narrow(0, heads.0, heads.1)?.narrow(1, rows.0, rows.1);
        Ok(Self { q: part(&self.q)?, scales: part(&self.scales)?, kernels: self.kernels.clone() })
    }

    /// The first `len` rows of each head in memory of their own, with room for `rows`.
    pub(super) fn moved(&self, len: usize, rows: usize) -> Result<Self> {
        let moved = |t| super::kv_cache::moved(t, len, rows);
        Ok(Self { q: moved(&self.q)?, scales: moved(&self.scales)?, kernels: self.kernels.clone() })
    }

    /// The whole numbers, `[heads, rows, width]` in `dtype`, and what they are to be multiplied with, `[heads, 1, rows]`
    /// in F32.
    ///
    /// # Errors
    /// Those of candle.
    pub fn expand(&self, dtype: DType) -> Result<(Tensor, Tensor)> {
        let q = self.q.apply_op1_no_bwd(&Integers { dtype, kernels: &self.kernels })?;
        Ok((q, self.scales.to_dtype(DType::F32)?.unsqueeze(1)?))
    }
}

/// Bytes as signed numbers of a dtype.
#[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "kernels are read on a GPU"))]
struct Integers<'a> {
    dtype: DType,
    kernels: &'a Kernels,
}

impl CustomOp1 for Integers<'_> {
    fn name(&self) -> &'static str {
        "int8-integers"
    }

    fn cpu_fwd(&self, q: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        if self.dtype != DType::F32 {
            candle_core::bail!("an INT8 KV cache on the CPU is expanded to F32, not to {:?}", self.dtype);
        }
        let (heads, rows, width) = layout.shape().dims3()?;
        let &[head_stride, row_stride, 1] = layout.stride() else {
            candle_core::bail!("rows of an INT8 KV cache in {layout:?}");
        };
        let q = &q.as_slice::<u8>()?[layout.start_offset()..];
        let mut out = Vec::with_capacity(heads * rows * width);
        for head in 0..heads {
            for row in 0..rows {
                let row = &q[head * head_stride + row * row_stride..][..width];
                out.extend(row.iter().map(|q| f32::from(q.cast_signed())));
            }
        }
        Ok((CpuStorage::F32(out), (heads, rows, width).into()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        q: &candle_core::CudaStorage,
        layout: &Layout,
    ) -> Result<(candle_core::CudaStorage, Shape)> {
        let Some(kernels) = &self.kernels.rows else {
            candle_core::bail!("rows of an INT8 KV cache in {layout:?} without their kernel");
        };
        Ok((kernels.integers(q, layout, self.dtype)?, layout.shape().clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::random;

    fn flat(t: &Tensor) -> Vec<f32> {
        t.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
    }

    #[test]
    fn what_is_written_is_read_within_half_a_scale() {
        let (heads, width) = (3, 20);
        let rows = Int8Rows::zeros(heads, 9, width, &Device::Cpu).unwrap();
        let first = random(&[heads, 4, width], 1);
        rows.write(0, &first).unwrap();
        // A view with gaps, where the first rows end, and once more over rows that are there already.
        let wide = (random(&[heads + 2, 3, width], 2) * 100.0).unwrap();
        let second = wide.narrow(0, 1, heads).unwrap();
        rows.write(4, &second).unwrap();
        rows.write(4, &second).unwrap();
        for (from, x) in [(0, &first), (4, &second)] {
            let part = rows.part((1, 2), (from, x.dim(1).unwrap())).unwrap();
            let (q, scales) = part.expand(DType::F32).unwrap();
            let (q, scales) = (flat(&q), flat(&scales));
            let want = flat(&x.narrow(0, 1, 2).unwrap().contiguous().unwrap());
            for ((q, want), scale) in q.chunks(width).zip(want.chunks(width)).zip(scales) {
                let largest = want.iter().fold(0f32, |m, v| m.max(v.abs()));
                assert!(scale >= largest / 127.0 && scale <= largest / 126.0, "{scale} of {largest}");
                assert!(q.iter().zip(want).all(|(q, v)| (q * scale - v).abs() <= 0.5001 * scale));
                assert_eq!(q.iter().fold(0f32, |m, q| m.max(q.abs())), 127.0);
            }
        }
        assert!(flat(&rows.part((0, heads), (7, 2)).unwrap().q).iter().all(|q| *q == 0.0));
        assert!(rows.write(8, &second).is_err() && rows.part((2, 2), (0, 1)).is_err());
    }

    #[test]
    fn a_row_that_cannot_be_held_is_nan_and_its_neighbours_are_not() {
        let rows = Int8Rows::zeros(1, 4, 3, &Device::Cpu).unwrap();
        let values = [[1.0, f32::NAN, 2.0], [f32::INFINITY, 0.0, 0.0], [9e6, 1.0, 1.0], [0.0, 0.0, 0.0]];
        rows.write(0, &Tensor::new(&[values], &Device::Cpu).unwrap()).unwrap();
        let (q, scales) = rows.expand(DType::F32).unwrap();
        let scales = flat(&scales);
        assert!(scales[..3].iter().all(|s| s.is_nan()) && scales[3] == 0.0, "{scales:?}");
        assert!(flat(&q).iter().all(|q| *q == 0.0));
    }
}
