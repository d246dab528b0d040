//! A GPU's memory, as the driver counts it.

use candle_core::Device;
use candle_core::cuda_backend::cudarc::driver::{DriverError, result, sys};

use crate::error::Result;

/// Memory of a GPU in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuMemory {
    /// Free for everybody.
    pub free: u64,
    /// Of the pool from which tensors are made: in use.
    pub pool_used: u64,
}

fn failed(error: DriverError) -> candle_core::Error {
    candle_core::Error::wrap(error)
}

/// Memory now, after what was enqueued is done; `None` when `device` is no GPU.
///
/// # Errors
/// Those of the driver.
pub fn memory(device: &Device) -> Result<Option<GpuMemory>> {
    let Device::Cuda(gpu) = device else { return Ok(None) };
    let stream = gpu.cuda_stream();
    let ctx = stream.context();
    ctx.synchronize().map_err(failed)?;
    let mut used = 0u64;
    // SAFETY: the device is open, the attribute is a u64, and `used` is one.
    unsafe {
        let pool = result::device::get_default_mem_pool(ctx.cu_device()).map_err(failed)?;
        let attribute = sys::CUmemPool_attribute_enum::CU_MEMPOOL_ATTR_USED_MEM_CURRENT;
        sys::cuMemPoolGetAttribute(pool, attribute, (&raw mut used).cast()).result().map_err(failed)?;
    }
    let (free, _) = ctx.mem_get_info().map_err(failed)?;
    Ok(Some(GpuMemory { free: free as u64, pool_used: used }))
}

/// Free memory after the pool has given back what no tensor uses; `None` when `device` is no GPU.
///
/// # Errors
/// Those of the driver.
pub fn free_after_trim(device: &Device) -> Result<Option<u64>> {
    let Device::Cuda(gpu) = device else { return Ok(None) };
    let stream = gpu.cuda_stream();
    let ctx = stream.context();
    ctx.synchronize().map_err(failed)?;
    // SAFETY: the device is open; trimming frees only memory that nothing uses.
    unsafe {
        let pool = result::device::get_default_mem_pool(ctx.cu_device()).map_err(failed)?;
        sys::cuMemPoolTrimTo(pool, 0).result().map_err(failed)?;
    }
    Ok(memory(device)?.map(|m| m.free))
}
