//! The driver's memory pool, as it tells of itself: what candle allocates comes from there.

use candle_core::Device;
use cudarc::driver::{result, sys};

use super::context::{Doing, Gpu};
use crate::error::Result;
use crate::plan::PoolBytes;

/// What the pool of a CUDA device holds, and held at most since the process began; zeros where the driver has no pools.
///
/// # Errors
/// [`Error::Cuda`](crate::Error::Cuda) when the driver does not say, [`Error::Candle`](crate::Error::Candle) for another
/// kind of device.
pub fn cuda_pool(device: &Device) -> Result<PoolBytes> {
    use sys::CUmemPool_attribute_enum as A;
    let gpu = Gpu::of(device.as_cuda_device()?);
    if !gpu.ctx.has_async_alloc() {
        return Ok(PoolBytes::default());
    }
    gpu.bind()?;
    // SAFETY: the device is open.
    let pool = unsafe { result::device::get_default_mem_pool(gpu.ctx.cu_device()) }
        .doing("finding the memory pool")?;
    let read = |attribute| {
        let mut bytes = 0u64;
        // SAFETY: the pool is the device's own, and `bytes` is the u64 that these attributes are.
        unsafe { result::mem_pool::get_attribute(pool, attribute, (&raw mut bytes).cast()) }
            .doing("reading the memory pool")
            .map(|()| bytes)
    };
    Ok(PoolBytes {
        used: read(A::CU_MEMPOOL_ATTR_USED_MEM_CURRENT)?,
        used_peak: read(A::CU_MEMPOOL_ATTR_USED_MEM_HIGH)?,
        reserved: read(A::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)?,
        reserved_peak: read(A::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH)?,
    })
}
