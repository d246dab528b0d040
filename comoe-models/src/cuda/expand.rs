//! INT8 matrices expanded for products of many tokens.

use std::sync::Arc;

use candle_core::cuda::WrapErr;
use candle_core::cuda_backend::CudaStorageSlice;
use candle_core::{CudaStorage, DType};
use cudarc::driver::{CudaContext, CudaFunction, DevicePtr, DeviceRepr, LaunchConfig, PushKernelArg};

use super::{Int8Layout, with_module};

const THREADS: usize = 256;

/// The kernel, loaded into one GPU.
#[derive(Debug, Clone)]
pub(crate) struct ExpandKernel(CudaFunction);

/// As kernels/expand.cu has it.
#[repr(C)]
#[derive(Clone, Copy)]
struct Args {
    weights: u64,
    scales: u64,
    out: u64,
    row_bytes: u64,
    scale_row_bytes: u64,
    rows: u32,
    inputs: u32,
    dtype: u32,
    pad: u32,
}

// SAFETY: plain numbers without padding, mirrored field by field in kernels/expand.cu.
unsafe impl DeviceRepr for Args {}

impl ExpandKernel {
    /// Loads it into `ctx`'s GPU.
    ///
    /// # Errors
    /// [`comoe_core::Error::Device`] when this build has no kernel for the GPU.
    pub(crate) fn load(ctx: &Arc<CudaContext>) -> comoe_core::Result<Self> {
        with_module(ctx, |module| module.load_function("expand_int8")).map(Self)
    }

    /// Rows `first..first + rows` of a matrix that lies at `packed` from byte `start` on, as `[rows, inputs]`.
    ///
    /// # Errors
    /// For a storage that does not hold the matrix, or rows that it has not; those of the launch.
    pub(crate) fn run(
        &self,
        packed: &CudaStorage,
        start: usize,
        layout: &Int8Layout,
        (first, rows): (usize, usize),
        dtype: DType,
    ) -> candle_core::Result<CudaStorage> {
        let bytes = packed.as_cuda_slice::<u8>()?;
        if bytes.len() < start + layout.bytes || first + rows > layout.outputs {
            candle_core::bail!("rows {first} and {rows} on of {layout:?} in {} bytes", bytes.len());
        }
        let device = packed.device.clone();
        let stream = device.cuda_stream();
        let elements = rows * layout.inputs;
        // SAFETY: the kernel writes every element, and nothing reads them before it on the stream.
        let out = unsafe {
            match dtype {
                DType::F32 => CudaStorageSlice::F32(device.alloc::<f32>(elements)?),
                DType::BF16 => CudaStorageSlice::BF16(device.alloc::<half::bf16>(elements)?),
                DType::F16 => CudaStorageSlice::F16(device.alloc::<half::f16>(elements)?),
                other => candle_core::bail!("an INT8 matrix is not expanded to {other:?}"),
            }
        };
        let to = match &out {
            CudaStorageSlice::F32(s) => s.device_ptr(&stream).0,
            CudaStorageSlice::BF16(s) => s.device_ptr(&stream).0,
            CudaStorageSlice::F16(s) => s.device_ptr(&stream).0,
            _ => candle_core::bail!("an INT8 matrix is not expanded to {dtype:?}"),
        };
        let at = bytes.device_ptr(&stream).0 + start as u64;
        let args = Args {
            weights: at + (first * layout.row_bytes) as u64,
            scales: at + (layout.scales + first * layout.scale_row_bytes) as u64,
            out: to,
            row_bytes: layout.row_bytes as u64,
            scale_row_bytes: layout.scale_row_bytes as u64,
            rows: u32::try_from(rows).map_err(candle_core::Error::wrap)?,
            inputs: u32::try_from(layout.inputs).map_err(candle_core::Error::wrap)?,
            dtype: super::dtype_code("an expanded matrix", dtype).map_err(candle_core::Error::wrap)?,
            pad: 0,
        };
        let blocks = (rows * layout.inputs.div_ceil(8)).div_ceil(THREADS);
        let config = LaunchConfig {
            grid_dim: (u32::try_from(blocks).map_err(candle_core::Error::wrap)?, 1, 1),
            block_dim: (THREADS as u32, 1, 1),
            shared_mem_bytes: 0,
        };
        let mut launch = stream.launch_builder(&self.0);
        launch.arg(&args);
        // SAFETY: the one argument is the struct that the kernel takes; the matrix lies within the storage that is
        // borrowed here, and `out` has an element for each of its threads' results.
        unsafe { launch.launch(config) }.w()?;
        Ok(CudaStorage { slice: out, device })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    super::super::mirrored!(Args, 56);
}
