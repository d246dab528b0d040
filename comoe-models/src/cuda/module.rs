//! This crate's fatbin, once in each GPU that uses it.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use comoe_core::Result;
use comoe_core::backend::cuda::kernels::load_error;
use cudarc::driver::{CudaContext, CudaModule, DriverError};
use cudarc::nvrtc::Ptx;

static FATBIN: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/kernels.fatbin"));

/// By context. Kernels hold their module, and modules their context, so an address here is of one that lives, or its
/// module is gone.
static LOADED: Mutex<Vec<(usize, Weak<CudaModule>)>> = Mutex::new(Vec::new());

/// What `take` makes of the kernels in `ctx`'s GPU.
///
/// # Errors
/// [`comoe_core::Error::Device`] when this build has no kernels for the GPU, or its driver is too old for them.
pub(crate) fn with_module<T>(
    ctx: &Arc<CudaContext>,
    take: impl FnOnce(&Arc<CudaModule>) -> std::result::Result<T, DriverError>,
) -> Result<T> {
    module(ctx).and_then(|module| take(&module)).map_err(|error| load_error(ctx, error))
}

fn module(ctx: &Arc<CudaContext>) -> std::result::Result<Arc<CudaModule>, DriverError> {
    let key = ctx.cu_ctx() as usize;
    // Whoever panicked has at most left out a module.
    let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    loaded.retain(|(_, module)| module.strong_count() > 0);
    if let Some(module) = loaded.iter().find(|(of, _)| *of == key).and_then(|(_, module)| module.upgrade()) {
        return Ok(module);
    }
    let module = ctx.load_module(Ptx::from_binary(FATBIN.to_vec()))?;
    loaded.push((key, Arc::downgrade(&module)));
    Ok(module)
}
