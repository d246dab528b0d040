//! CUDA devices: found, opened the way this crate needs them, and asked what they are.

use std::sync::Arc;

use candle_core::{CudaDevice, Device};
use cudarc::driver::{CudaContext, CudaStream, DriverError, result, sys};

use crate::error::{Error, Result};

/// Turns a driver error into this crate's, saying what was being done.
pub(super) trait Doing<T> {
    fn doing(self, what: &str) -> Result<T>;
}

impl<T> Doing<T> for std::result::Result<T, DriverError> {
    fn doing(self, what: &str) -> Result<T> {
        self.map_err(|error| Error::Cuda { what: what.to_owned(), reason: describe(error) })
    }
}

fn describe(error: DriverError) -> String {
    let text =
        |s: std::result::Result<&std::ffi::CStr, DriverError>| s.map(|s| s.to_string_lossy().into_owned());
    match (text(error.error_name()), text(error.error_string())) {
        (Ok(name), Ok(says)) => format!("{name}: {says}"),
        _ => format!("driver error {}", error.0 as u32),
    }
}

fn is_out_of_memory(error: DriverError) -> bool {
    error.0 == sys::cudaError_enum::CUDA_ERROR_OUT_OF_MEMORY
}

/// What the driver said, where that is behind an error of candle's.
fn driver_error(error: &candle_core::Error) -> Option<DriverError> {
    use candle_core::Error as E;
    use candle_core::cuda_backend::CudaError;
    match error {
        E::Cuda(inner) => match inner.downcast_ref::<CudaError>() {
            Some(CudaError::Cuda(driver) | CudaError::Load { cuda: driver, .. }) => Some(*driver),
            _ => inner.downcast_ref::<DriverError>().copied(),
        },
        E::WithBacktrace { inner, .. } | E::Context { inner, .. } | E::WithPath { inner, .. } => {
            driver_error(inner)
        }
        _ => None,
    }
}

/// Whether an error of candle's is that a GPU's memory ran out.
pub(crate) fn candle_is_out_of_memory(error: &candle_core::Error) -> bool {
    driver_error(error).is_some_and(is_out_of_memory)
}

fn refuse(ordinal: usize, reason: String) -> Error {
    Error::Device { asked: format!("cuda:{ordinal}"), reason }
}

/// A version as CUDA counts it: `12080` is 12.8.
fn version(v: i32) -> String {
    format!("{}.{}", v / 1000, v % 1000 / 10)
}

/// The CUDA version that the driver supports at most, for example `13000`; 0 when there is no driver.
pub(super) fn driver_version() -> i32 {
    let mut version = 0;
    // SAFETY: `version` is a valid place for one int, and the call needs no context.
    match unsafe { sys::cuDriverGetVersion(&mut version) }.result() {
        Ok(()) => version,
        Err(_) => 0,
    }
}

/// Why CUDA cannot be used on this machine at all, if it cannot.
fn no_cuda() -> Option<String> {
    use sys::cudaError_enum as E;
    let built = sys::CUDA_VERSION as i32;
    let driver = driver_version();
    let too_old = || {
        format!(
            "the NVIDIA driver supports CUDA {}, this build needs {}: update the driver, or build with an older CUDA",
            version(driver),
            version(built / 1000 * 1000)
        )
    };
    match result::init() {
        Ok(()) if driver / 1000 < built / 1000 => Some(too_old()),
        Ok(()) => None,
        Err(DriverError(E::CUDA_ERROR_NO_DEVICE)) => Some(
            "the driver finds no NVIDIA GPU (check `nvidia-smi` and CUDA_VISIBLE_DEVICES): use the CPU"
                .into(),
        ),
        Err(DriverError(E::CUDA_ERROR_STUB_LIBRARY)) => {
            Some("there is no NVIDIA driver (libcuda.so.1): install it, or use the CPU".into())
        }
        Err(DriverError(E::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH)) => {
            Some("the driver's library does not fit the loaded kernel module: restart the machine".into())
        }
        Err(_) if driver > 0 && driver / 1000 < built / 1000 => Some(too_old()),
        Err(error) => Some(format!(
            "the NVIDIA driver does not work ({}): install or repair it (check `nvidia-smi`), or use the CPU",
            describe(error)
        )),
    }
}

/// How many CUDA devices there are.
///
/// # Errors
/// [`Error::Device`] when the driver is missing, too old or broken, or finds no GPU.
pub fn cuda_device_count() -> Result<usize> {
    if let Some(reason) = no_cuda() {
        return Err(Error::Device { asked: "cuda".to_owned(), reason });
    }
    let count = result::device::get_count().doing("counting GPUs")?;
    Ok(usize::try_from(count).unwrap_or(0))
}

/// Opens GPU `ordinal` for candle and for this crate: a stream of its own that every host thread shares, no event per
/// tensor, and freed memory stays with the process.
///
/// Make one device per GPU and clone it. The cache also works on a device made with `Device::new_cuda`, with two more
/// event waits per layer step.
///
/// # Errors
/// [`Error::Device`] when the driver is missing, too old or broken, or there is no such GPU.
pub fn cuda_device(ordinal: usize) -> Result<Device> {
    let count = cuda_device_count().map_err(|error| match error {
        Error::Device { reason, .. } => refuse(ordinal, reason),
        other => other,
    })?;
    if ordinal >= count {
        let there = match count {
            1 => "there is one GPU, cuda:0".to_owned(),
            n => format!("there are {n} GPUs, cuda:0 to cuda:{}", n - 1),
        };
        return Err(refuse(ordinal, format!("{there} (CUDA_VISIBLE_DEVICES hides others)")));
    }
    let device = Device::new_cuda_with_stream(ordinal).map_err(|error| {
        let reason =
            format!("it cannot be opened: {error}; another process may hold it or all of its memory");
        refuse(ordinal, reason)
    })?;
    let cuda = device.as_cuda_device()?;
    // SAFETY: no tensor exists yet, so no slice carries events; from here on every use of this device's memory goes
    // to its one stream, or is ordered by this crate's own events.
    unsafe { cuda.disable_event_tracking() };
    keep_freed_memory(&Gpu::of(cuda))?;
    Ok(device)
}

/// Free and total memory of a CUDA device, in bytes.
///
/// # Errors
/// [`Error::Cuda`] when the driver does not say, [`Error::Candle`] for another kind of device.
pub fn cuda_memory(device: &Device) -> Result<(u64, u64)> {
    let (free, total) = Gpu::of(device.as_cuda_device()?).memory()?;
    Ok((free as u64, total as u64))
}

/// Gives device memory that tensors have left, and that candle's pool keeps for the next ones, back to the driver, so that
/// others can have it. Waits for the device. On other devices there is no such pool.
///
/// # Errors
/// [`Error::Cuda`] when the driver refuses.
pub fn cuda_give_back(device: &Device) -> Result<()> {
    let Device::Cuda(cuda) = device else { return Ok(()) };
    let gpu = Gpu::of(cuda);
    gpu.bind()?;
    gpu.ctx.synchronize().doing("waiting for the GPU")?;
    if !gpu.ctx.has_async_alloc() {
        return Ok(());
    }
    // SAFETY: the device is open; what is in use stays.
    unsafe {
        let pool =
            result::device::get_default_mem_pool(gpu.ctx.cu_device()).doing("finding the memory pool")?;
        sys::cuMemPoolTrimTo(pool, 0).result().doing("giving memory back")
    }
}

/// Without this the driver hands freed memory back to the system at every synchronisation, once per layer.
fn keep_freed_memory(gpu: &Gpu) -> Result<()> {
    if !gpu.ctx.has_async_alloc() {
        return Ok(());
    }
    gpu.bind()?;
    let mut threshold = u64::MAX;
    // SAFETY: the device is open, and `threshold` is the u64 that this attribute takes.
    unsafe {
        let pool =
            result::device::get_default_mem_pool(gpu.ctx.cu_device()).doing("finding the memory pool")?;
        let attribute = sys::CUmemPool_attribute_enum::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        result::mem_pool::set_attribute(pool, attribute, (&raw mut threshold).cast())
            .doing("setting up the memory pool")
    }
}

/// One GPU, as everything in this folder knows it.
#[derive(Clone)]
pub(super) struct Gpu {
    pub(super) device: CudaDevice,
    pub(super) ctx: Arc<CudaContext>,
}

impl Gpu {
    pub(super) fn of(device: &CudaDevice) -> Self {
        Self { device: device.clone(), ctx: device.cuda_stream().context().clone() }
    }

    /// Makes the calling thread's driver calls go to this GPU.
    pub(super) fn bind(&self) -> Result<()> {
        self.ctx.bind_to_thread().doing("using the GPU")
    }

    /// candle's stream. Of a device made with `Device::new_cuda` this is the *calling thread's* stream.
    pub(super) fn candle_stream(&self) -> Arc<CudaStream> {
        self.device.cuda_stream()
    }

    pub(super) fn name(&self) -> String {
        let name = self.ctx.name().unwrap_or_else(|_| "unnamed GPU".to_owned());
        format!("cuda:{} ({name})", self.ctx.ordinal())
    }

    /// Free and total memory in bytes.
    pub(super) fn memory(&self) -> Result<(usize, usize)> {
        self.ctx.mem_get_info().doing("reading the GPU's memory")
    }

    /// The same of an allocation of `asked` bytes for a step's result, which candle makes.
    pub(super) fn explain_result(&self, asked: u64, error: candle_core::Error) -> Error {
        match driver_error(&error) {
            Some(driver) if is_out_of_memory(driver) => {
                self.explain_allocation("a step's results", asked, driver)
            }
            _ => error.into(),
        }
    }

    /// An out-of-memory error that says what was wanted and what there is; other errors as they are.
    pub(super) fn explain_allocation(&self, what: &str, asked: u64, error: DriverError) -> Error {
        if !is_out_of_memory(error) {
            return Error::Cuda { what: format!("allocating {what}"), reason: describe(error) };
        }
        let (free, total) = self.memory().unwrap_or_default();
        Error::OutOfDeviceMemory {
            device: self.name(),
            what: what.to_owned(),
            asked,
            free: free as u64,
            total: total as u64,
        }
    }
}
