//! The NVIDIA driver's library, loaded when it is there. Linked against it, a program does not even start on a machine
//! without a driver; so what is called of it are jumps through a table, which [`load`] fills. Until then, and without
//! the library, every function reports `CUDA_ERROR_STUB_LIBRARY`.
//!
//! A function that is missing in the list below makes the program need the library from its start again; a test looks.

#![allow(non_snake_case, non_camel_case_types, reason = "the driver's names")]

use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

/// `CUDA_ERROR_STUB_LIBRARY` of cuda.h.
extern "C" fn missing() -> i32 {
    34
}

macro_rules! functions {
    ($($name:ident)*) => {
        enum Index { $($name),* }

        const NAMES: &[&str] = &[$(stringify!($name)),*];

        /// Where each function is.
        static TABLE: [AtomicPtr<c_void>; NAMES.len()] =
            [const { AtomicPtr::new(missing as extern "C" fn() -> i32 as *mut c_void) }; NAMES.len()];

        $(
            // SAFETY: the name is the driver's, whose library is not linked where all of its functions are here. The
            // jump leaves arguments and the return address as the caller put them.
            #[unsafe(no_mangle)]
            #[unsafe(naked)]
            unsafe extern "C" fn $name() {
                std::arch::naked_asm!(
                    "jmp qword ptr [rip + {table} + {at}]",
                    table = sym TABLE,
                    at = const 8 * Index::$name as usize,
                )
            }
        )*
    };
}

functions! {
    cuCtxDestroy_v2 cuCtxEnablePeerAccess cuCtxGetCurrent cuCtxGetStreamPriorityRange cuCtxSetCurrent
    cuCtxSynchronize cuDeviceCanAccessPeer cuDeviceGet cuDeviceGetAttribute cuDeviceGetCount
    cuDeviceGetDefaultMemPool cuDeviceGetName cuDeviceGetPCIBusId cuDevicePrimaryCtxRelease_v2
    cuDevicePrimaryCtxRetain cuDriverGetVersion cuEventCreate cuEventDestroy_v2 cuEventElapsedTime_v2
    cuEventQuery cuEventRecord cuEventSynchronize cuFuncSetAttribute cuGetErrorName
    cuGetErrorString cuGetProcAddress_v2 cuGraphDestroy cuGraphExecDestroy cuGraphGetNodes
    cuGraphInstantiateWithFlags cuGraphLaunch cuGraphUpload cuInit cuLaunchHostFunc cuLaunchKernel
    cuLaunchKernelEx cuMemAddressFree cuMemAddressReserve cuMemAlloc_v2 cuMemAllocAsync cuMemcpyDtoDAsync_v2
    cuMemcpyDtoH_v2 cuMemcpyDtoHAsync_v2 cuMemcpyHtoD_v2 cuMemcpyHtoDAsync_v2 cuMemcpyPeerAsync cuMemCreate
    cuMemFree_v2 cuMemFreeAsync cuMemFreeHost cuMemGetAllocationGranularity cuMemGetInfo_v2 cuMemHostAlloc
    cuMemHostGetDevicePointer_v2 cuMemHostRegister_v2 cuMemHostUnregister cuMemMap cuMemPoolGetAttribute
    cuMemPoolSetAttribute cuMemPoolTrimTo cuMemRelease cuMemSetAccess cuMemsetD8Async cuMemUnmap
    cuModuleGetFunction cuModuleLoad cuModuleLoadData cuModuleUnload cuStreamBeginCapture_v2 cuStreamCreate
    cuStreamCreateWithPriority cuStreamDestroy_v2 cuStreamEndCapture cuStreamIsCapturing cuStreamSynchronize
    cuStreamWaitEvent
}

/// Loads the driver's library, if it is there. Called before anything else.
pub(crate) fn load() {
    const LIBRARY: &CStr = c"libcuda.so.1";
    // SAFETY: a NUL-terminated name; the library's initialisers are the driver's own, which run like this in every
    // program that uses it.
    let library = unsafe { libc::dlopen(LIBRARY.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
    if library.is_null() {
        return;
    }
    for (name, entry) in NAMES.iter().zip(&TABLE) {
        let name = std::ffi::CString::new(*name).unwrap_or_default();
        // SAFETY: an open library, and a NUL-terminated name.
        let address = unsafe { libc::dlsym(library, name.as_ptr()) };
        if !address.is_null() {
            entry.store(address, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    /// The program's own test executable links what the program links.
    #[test]
    fn the_program_starts_without_a_driver() {
        let Ok(me) = std::env::current_exe() else { return };
        let Ok(listed) = Command::new("readelf").arg("-d").arg(me).output() else { return };
        let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
        assert!(listed.contains("NEEDED"), "{listed}");
        assert!(!listed.contains("libcuda.so"), "add the function that is missing above: {listed}");
    }
}
