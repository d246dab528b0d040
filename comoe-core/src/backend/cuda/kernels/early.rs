//! Programmatic dependent launch: a kernel whose blocks may be set up while the kernel before it on the stream ends.

use std::ffi::c_void;
use std::mem::zeroed;

use cudarc::driver::{CudaFunction, CudaStream, DriverError, LaunchConfig, sys};

/// Enqueues `function`, which may start before the kernel right before it on `stream` has ended; after anything else
/// (a copy, an event) it starts as usual. Captured graphs keep this.
///
/// # Safety
/// `arguments` point to what the kernel takes, in its order, and the addresses among them are valid until it is done.
/// The kernel itself waits (`griddepcontrol.wait`) before it touches what the one before it reads or writes.
pub(in crate::backend::cuda) unsafe fn launch_early(
    stream: &CudaStream,
    function: &CudaFunction,
    config: LaunchConfig,
    arguments: &mut [*mut c_void],
) -> Result<(), DriverError> {
    stream.context().bind_to_thread()?;
    // SAFETY: integers and unions of integers, for which zeros are values.
    let mut attribute: sys::CUlaunchAttribute = unsafe { zeroed() };
    attribute.id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    attribute.value.programmaticStreamSerializationAllowed = 1;
    let config = sys::CUlaunchConfig {
        gridDimX: config.grid_dim.0,
        gridDimY: config.grid_dim.1,
        gridDimZ: config.grid_dim.2,
        blockDimX: config.block_dim.0,
        blockDimY: config.block_dim.1,
        blockDimZ: config.block_dim.2,
        sharedMemBytes: config.shared_mem_bytes,
        hStream: stream.cu_stream(),
        attrs: &mut attribute,
        numAttrs: 1,
    };
    // SAFETY: the configuration and its attribute outlive the call, which copies the arguments; the rest is the
    // caller's promise.
    unsafe {
        sys::cuLaunchKernelEx(&config, function.cu_function(), arguments.as_mut_ptr(), std::ptr::null_mut())
    }
    .result()
}
