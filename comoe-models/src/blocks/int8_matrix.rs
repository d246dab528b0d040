//! A dense matrix that stays in INT8 on its device (`--dense-format int8`).
//!
//! Few tokens are multiplied with the packed rows. For many, one matrix at a time is expanded to the model's dtype, in
//! parts of bounded size whose memory is free again behind the product. Which of both depends on the number of tokens
//! alone, and the parts on the matrix alone.

use candle_core::{CpuStorage, CustomOp1, CustomOp2, DType, Device, Layout, Result, Shape, Tensor};

use super::cpu;
use super::int8::{Int8Layout, multiply, pack_int8, unpack_rows};

/// Most elements that are expanded at once.
pub(crate) const EXPANDED_AT_ONCE: usize = 32 << 20;

/// A matrix `[outputs, inputs]` as [`pack_int8`] makes it.
#[derive(Debug, Clone)]
pub struct Int8Matrix {
    /// `[layout.bytes]`, U8.
    packed: Tensor,
    layout: Int8Layout,
    /// Of products.
    dtype: DType,
    expand: Expand,
}

impl Int8Matrix {
    /// Packs `values`, row-major `[outputs, inputs]`, for products in `dtype` with the kernel of `device`.
    ///
    /// # Errors
    /// As [`pack_int8`], and when the device has no memory for it.
    pub fn new(
        values: &[f32],
        outputs: usize,
        inputs: usize,
        dtype: DType,
        device: &Device,
        expand: &Expand,
    ) -> crate::Result<Self> {
        let packed = pack_int8(values, outputs, inputs)?;
        let packed = Tensor::from_raw_buffer(&packed, DType::U8, &[packed.len()], device)?;
        Ok(Self { packed, layout: Int8Layout::new(outputs, inputs), dtype, expand: expand.clone() })
    }

    /// Where it is.
    pub fn device(&self) -> &Device {
        self.packed.device()
    }

    /// What products are in.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Where its rows and scales are in [`Self::packed`].
    pub fn layout(&self) -> &Int8Layout {
        &self.layout
    }

    /// The bytes, `[bytes]` in U8.
    pub fn packed(&self) -> &Tensor {
        &self.packed
    }

    /// `x [tokens, inputs]` to `[tokens, outputs]`.
    ///
    /// # Errors
    /// Those of candle.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let ((tokens, inputs), outputs) = (x.dims2()?, self.layout.outputs);
        if inputs != self.layout.inputs {
            candle_core::bail!("{inputs} columns times an INT8 matrix of {}", self.layout.inputs);
        }
        if tokens == 1 && cpu::applies(x) {
            return x.contiguous()?.apply_op2_no_bwd(&self.packed, &Product(self.layout));
        }
        let at_once = (EXPANDED_AT_ONCE / inputs).max(1);
        if outputs <= at_once {
            return x.matmul(&self.rows(0, outputs)?.t()?);
        }
        let y = Tensor::zeros((tokens, outputs), self.dtype, x.device())?;
        for first in (0..outputs).step_by(at_once) {
            let rows = self.rows(first, at_once.min(outputs - first))?;
            y.slice_set(&x.matmul(&rows.t()?)?, 1, first)?;
        }
        Ok(y)
    }

    /// Rows `first..first + rows` in the model's dtype.
    fn rows(&self, first: usize, rows: usize) -> Result<Tensor> {
        let part = Part { layout: self.layout, first, rows, dtype: self.dtype, expand: &self.expand };
        self.packed.apply_op1_no_bwd(&part)
    }
}

/// What expands matrices on a device: a kernel on a GPU, nothing on the CPU.
#[derive(Debug, Clone)]
pub struct Expand {
    #[cfg(feature = "cuda")]
    kernel: Option<crate::cuda::ExpandKernel>,
}

impl Expand {
    /// For matrices on `device`.
    ///
    /// # Errors
    /// [`Error::Core`](crate::Error::Core) when this build has no kernel for the GPU.
    #[cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "the CPU needs nothing"))]
    pub fn load(device: &Device) -> crate::Result<Self> {
        Ok(Self {
            #[cfg(feature = "cuda")]
            kernel: match device {
                Device::Cuda(gpu) => Some(crate::cuda::ExpandKernel::load(gpu.cuda_stream().context())?),
                _ => None,
            },
        })
    }
}

/// Rows of a packed matrix in the model's dtype.
#[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "read on a GPU"))]
struct Part<'a> {
    layout: Int8Layout,
    first: usize,
    rows: usize,
    dtype: DType,
    expand: &'a Expand,
}

impl CustomOp1 for Part<'_> {
    fn name(&self) -> &'static str {
        "expand-int8"
    }

    fn cpu_fwd(&self, packed: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        if self.dtype != DType::F32 {
            candle_core::bail!("an INT8 matrix on the CPU is expanded to F32, not to {:?}", self.dtype);
        }
        let values = unpack_rows(bytes(packed, layout)?, &self.layout, self.first, self.rows);
        let values = values.map_err(candle_core::Error::wrap)?;
        Ok((CpuStorage::F32(values), (self.rows, self.layout.inputs).into()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        packed: &candle_core::CudaStorage,
        layout: &Layout,
    ) -> Result<(candle_core::CudaStorage, Shape)> {
        let (Some(kernel), Some((start, _))) = (&self.expand.kernel, layout.contiguous_offsets()) else {
            candle_core::bail!("an INT8 matrix in {layout:?} without its kernel");
        };
        let out = kernel.run(packed, start, &self.layout, (self.first, self.rows), self.dtype)?;
        Ok((out, (self.rows, self.layout.inputs).into()))
    }
}

/// One token's product on the CPU.
struct Product(Int8Layout);

impl CustomOp2 for Product {
    fn name(&self) -> &'static str {
        "int8-product"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        packed: &CpuStorage,
        layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let y = multiply(bytes(packed, layout)?, &self.0, cpu::slice(x, x_layout)?);
        Ok((CpuStorage::F32(y.map_err(candle_core::Error::wrap)?), (1, self.0.outputs).into()))
    }
}

fn bytes<'a>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [u8]> {
    match layout.contiguous_offsets() {
        Some((start, end)) => Ok(&storage.as_slice::<u8>()?[start..end]),
        None => candle_core::bail!("expected contiguous bytes, got {layout:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blocks::int8::unpack_int8;
    use crate::testing::{close, random};

    #[test]
    fn products_are_those_of_the_expanded_matrix_also_in_parts() {
        // The second is expanded in parts.
        for (outputs, inputs) in [(40, 300), (3, EXPANDED_AT_ONCE / 2)] {
            let values = random(&[outputs, inputs], 1).flatten_all().unwrap().to_vec1::<f32>().unwrap();
            let values: Vec<f32> = values.iter().map(|v| v / (inputs as f32).sqrt()).collect();
            let expand = Expand::load(&Device::Cpu).unwrap();
            let matrix =
                Int8Matrix::new(&values, outputs, inputs, DType::F32, &Device::Cpu, &expand).unwrap();
            let whole = unpack_int8(&pack_int8(&values, outputs, inputs).unwrap(), outputs, inputs).unwrap();
            let whole = Tensor::from_vec(whole, (outputs, inputs), &Device::Cpu).unwrap();
            for tokens in [1, 2] {
                let x = random(&[tokens, inputs], 2);
                close(&matrix.forward(&x).unwrap(), &x.matmul(&whole.t().unwrap()).unwrap(), 1e-4);
            }
            assert!(matrix.forward(&random(&[1, inputs + 1], 3)).is_err());
        }
    }
}
