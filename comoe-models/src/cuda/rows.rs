//! INT8 KV caches in steps of many tokens: rows quantised into a cache, and cached rows as whole numbers.

use std::sync::Arc;

use candle_core::cuda::WrapErr;
use candle_core::cuda_backend::CudaStorageSlice;
use candle_core::{CudaStorage, DType, Error, Layout, Result, Tensor};
use cudarc::driver::{
    CudaContext, CudaFunction, CudaStream, DevicePtr, DeviceRepr, LaunchConfig, PushKernelArg,
};

use super::{dtype_code, with_module};
use crate::blocks::fused::address;

/// Rows of a block that quantises, and threads of one that expands.
const ROWS: usize = 4;
const THREADS: usize = 256;

/// The kernels, loaded into one GPU.
#[derive(Debug, Clone)]
pub(crate) struct RowKernels {
    keep: CudaFunction,
    integers: CudaFunction,
}

/// As kernels/kv.cu has it.
#[repr(C)]
#[derive(Clone, Copy)]
struct Keep {
    from: u64,
    q: u64,
    scales: u64,
    from_head_stride: u64,
    from_row_stride: u64,
    tokens: u32,
    width: u32,
    capacity: u32,
    position: u32,
    dtype: u32,
    pad: u32,
}

// SAFETY: plain numbers without padding, mirrored field by field in kernels/kv.cu.
unsafe impl DeviceRepr for Keep {}

/// As kernels/kv.cu has it.
#[repr(C)]
#[derive(Clone, Copy)]
struct Integers {
    q: u64,
    out: u64,
    head_stride: u64,
    row_stride: u64,
    rows: u32,
    width: u32,
    dtype: u32,
    pad: u32,
}

// SAFETY: plain numbers without padding, mirrored field by field in kernels/kv.cu.
unsafe impl DeviceRepr for Integers {}

impl RowKernels {
    /// Loads them into `ctx`'s GPU.
    ///
    /// # Errors
    /// [`comoe_core::Error::Device`] when this build has no kernels for the GPU.
    pub(crate) fn load(ctx: &Arc<CudaContext>) -> comoe_core::Result<Self> {
        with_module(ctx, |module| {
            Ok(Self {
                keep: module.load_function("keep_int8")?,
                integers: module.load_function("int8_integers")?,
            })
        })
    }

    /// Writes `x [heads, tokens, width]` to `q [heads, capacity, width]` and `scales [heads, capacity]` from `position` on.
    ///
    /// # Errors
    /// For tensors that do not fit, and those of the launch.
    pub(crate) fn keep(&self, x: &Tensor, q: &Tensor, scales: &Tensor, position: usize) -> Result<()> {
        let ((heads, tokens, width), (_, capacity, _)) = (x.dims3()?, q.dims3()?);
        let &[head_stride, row_stride, 1] = x.stride() else {
            candle_core::bail!("rows of layout {:?} for a KV cache", x.layout());
        };
        let fits = q.dims() == [heads, capacity, width] && scales.dims() == [heads, capacity];
        if !fits || position + tokens > capacity || !q.is_contiguous() || !scales.is_contiguous() {
            candle_core::bail!("{x:?} at {position} of a KV cache {q:?} under {scales:?}");
        }
        let stream = x.device().as_cuda_device()?.cuda_stream();
        let args = Keep {
            from: address(x, &stream)?,
            q: address(q, &stream)?,
            scales: address(scales, &stream)?,
            from_head_stride: head_stride as u64,
            from_row_stride: row_stride as u64,
            tokens: number(tokens)?,
            width: number(width)?,
            capacity: number(capacity)?,
            position: number(position)?,
            dtype: dtype_code("rows of a KV cache", x.dtype()).map_err(Error::wrap)?,
            pad: 0,
        };
        // SAFETY: the struct is the kernel's; x, q and scales live until what is enqueued on their stream is done, and
        // were checked to hold the rows that are read and written.
        unsafe { launch(&stream, &self.keep, (tokens.div_ceil(ROWS), heads), 32 * ROWS, &args) }
    }

    /// The rows of `q` in `layout`, `[heads, rows, width]`, as numbers of `dtype`, without gaps.
    ///
    /// # Errors
    /// For another layout or dtype, and those of the launch.
    pub(crate) fn integers(&self, q: &CudaStorage, layout: &Layout, dtype: DType) -> Result<CudaStorage> {
        let (heads, rows, width) = layout.shape().dims3()?;
        let &[head_stride, row_stride, 1] = layout.stride() else {
            candle_core::bail!("rows of an INT8 KV cache in {layout:?}");
        };
        let device = q.device.clone();
        let stream = device.cuda_stream();
        let elements = heads * rows * width;
        // SAFETY: the kernel writes every element, and nothing reads them before it on the stream.
        let (out, to) = unsafe {
            match dtype {
                DType::F32 => {
                    let s = device.alloc::<f32>(elements)?;
                    let to = s.device_ptr(&stream).0;
                    (CudaStorageSlice::F32(s), to)
                }
                DType::BF16 => {
                    let s = device.alloc::<half::bf16>(elements)?;
                    let to = s.device_ptr(&stream).0;
                    (CudaStorageSlice::BF16(s), to)
                }
                DType::F16 => {
                    let s = device.alloc::<half::f16>(elements)?;
                    let to = s.device_ptr(&stream).0;
                    (CudaStorageSlice::F16(s), to)
                }
                other => candle_core::bail!("an INT8 KV cache is not expanded to {other:?}"),
            }
        };
        let args = Integers {
            q: q.as_cuda_slice::<u8>()?.device_ptr(&stream).0 + layout.start_offset() as u64,
            out: to,
            head_stride: head_stride as u64,
            row_stride: row_stride as u64,
            rows: number(rows)?,
            width: number(width)?,
            dtype: dtype_code("rows of a KV cache", dtype).map_err(Error::wrap)?,
            pad: 0,
        };
        let blocks = (rows * width.div_ceil(8)).div_ceil(THREADS);
        // SAFETY: the struct is the kernel's; the layout is that of the storage that is borrowed here, and `out` has room
        // for all of it.
        unsafe { launch(&stream, &self.integers, (blocks, heads), THREADS, &args) }?;
        Ok(CudaStorage { slice: out, device })
    }
}

fn number(n: usize) -> Result<u32> {
    u32::try_from(n).map_err(Error::wrap)
}

/// # Safety
/// `args` is the struct that the kernel takes, and its addresses are valid until it is done.
unsafe fn launch<T: DeviceRepr>(
    stream: &Arc<CudaStream>,
    function: &CudaFunction,
    (x, y): (usize, usize),
    threads: usize,
    args: &T,
) -> Result<()> {
    if x == 0 || y == 0 {
        return Ok(());
    }
    let config = LaunchConfig {
        grid_dim: (number(x)?, number(y)?, 1),
        block_dim: (threads as u32, 1, 1),
        shared_mem_bytes: 0,
    };
    let mut launch = stream.launch_builder(function);
    launch.arg(args);
    // SAFETY: the caller's promise.
    unsafe { launch.launch(config) }.w()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_as_long_as_on_the_device() {
        assert_eq!((size_of::<Keep>(), size_of::<Integers>()), (64, 48));
    }
}
