//! Page-locked host memory: the only kind that the GPU copies from at full speed and without holding up the caller.

use std::ptr::NonNull;

use cudarc::driver::{DriverError, result, sys};

use super::context::{Doing, Gpu};
use crate::error::{Error, Result};
use crate::sys::{FreshMemory, LEAST_PAGE};

/// Every context may copy from it, and kernels may read it.
const REGISTER: u32 = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
const ALLOCATE: u32 = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
/// Below this a smaller part is not worth a try.
const LEAST_LOCK: usize = 1 << 20;

/// Page-locks existing memory. A context must be bound.
///
/// # Safety
/// The range must stay mapped until it is unregistered.
pub(super) unsafe fn register(start: *mut u8, bytes: usize) -> std::result::Result<(), DriverError> {
    // SAFETY: the caller's promise.
    unsafe { sys::cuMemHostRegister_v2(start.cast(), bytes, REGISTER) }.result()
}

/// Whether that is how drivers say that they will not lock (so much) memory.
pub(super) fn locks_no_more(error: DriverError) -> bool {
    use sys::cudaError_enum as E;
    matches!(
        error.0,
        E::CUDA_ERROR_OUT_OF_MEMORY
            | E::CUDA_ERROR_INVALID_VALUE
            | E::CUDA_ERROR_NOT_PERMITTED
            | E::CUDA_ERROR_NOT_SUPPORTED
            | E::CUDA_ERROR_OPERATING_SYSTEM
    )
}

/// A small page-locked buffer that the driver allocates.
pub(super) struct PinnedBuffer {
    gpu: Gpu,
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: plain memory; who may touch which part when is up to the owner, as with a boxed slice.
unsafe impl Send for PinnedBuffer {}

impl PinnedBuffer {
    pub(super) fn new(gpu: &Gpu, bytes: usize) -> std::result::Result<Self, DriverError> {
        gpu.ctx.bind_to_thread()?;
        // SAFETY: a context is bound; `Drop` frees the memory once.
        let start = unsafe { result::malloc_host(bytes.max(1), ALLOCATE) }?;
        let start: NonNull<u8> =
            NonNull::new(start.cast()).ok_or(DriverError(sys::cudaError_enum::CUDA_ERROR_OUT_OF_MEMORY))?;
        // SAFETY: `start` is valid for `bytes` bytes; defined contents make the slices below sound.
        unsafe { start.as_ptr().write_bytes(0, bytes) };
        Ok(Self { gpu: gpu.clone(), start, bytes })
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// For writing. The caller makes sure that no copy in flight reads the range.
    pub(super) fn slice_mut(&mut self, at: usize, len: usize) -> &mut [u8] {
        assert!(at + len <= self.bytes, "{len} bytes at {at} of {}", self.bytes);
        // SAFETY: inside the allocation (asserted), initialised by `new`, borrowed mutably through `self`.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr().add(at), len) }
    }

    pub(super) fn address(&self) -> *const u8 {
        self.start.as_ptr()
    }

    /// Where kernels read it.
    pub(super) fn device_address(&self) -> Result<u64> {
        let mut address = 0;
        // SAFETY: allocated with DEVICEMAP in `new`.
        unsafe { sys::cuMemHostGetDevicePointer_v2(&mut address, self.start.as_ptr().cast(), 0) }
            .result()
            .doing("mapping host memory for the GPU")?;
        Ok(address)
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        self.gpu.ctx.record_err(self.gpu.ctx.synchronize());
        // SAFETY: allocated in `new`, freed only here, and nothing runs on the GPU that could still read it.
        self.gpu.ctx.record_err(unsafe { result::free_host(self.start.as_ptr().cast()) });
    }
}

/// Anonymous memory, a front part of which is page-locked.
pub(super) struct LockedMap {
    gpu: Gpu,
    map: FreshMemory,
    locked: usize,
}

impl LockedMap {
    /// Maps `bytes` of zeroes that take no memory before they are written. Nothing is locked yet.
    pub(super) fn new(gpu: &Gpu, bytes: usize) -> Result<Self> {
        let map = FreshMemory::new(bytes).map_err(|error| Error::HostMemory {
            what: format!("mapping {bytes} bytes for experts"),
            reason: error.to_string(),
        })?;
        Ok(Self { gpu: gpu.clone(), map, locked: 0 })
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        self.map.bytes_mut()
    }

    /// Locks as long a front part as the driver grants: all, else half, and so on. Memory behind that part that has
    /// no page in common with it goes back to the system. `most` is a limit of the caller's own.
    pub(super) fn lock(&mut self, most: usize) -> Result<usize> {
        self.gpu.bind()?;
        let bytes = self.map.bytes().len();
        let mut attempt = bytes;
        while attempt > 0 {
            if attempt <= most && self.register(attempt)? {
                self.locked = attempt;
                break;
            }
            attempt = if attempt / 2 < LEAST_LOCK { 0 } else { (attempt / 2).next_multiple_of(LEAST_PAGE) };
        }
        let kept = self.locked.next_multiple_of(LEAST_PAGE);
        if kept < bytes {
            // The GPU does not know that part, and the owner uses nothing behind `locked`.
            self.map.give_back(kept..bytes).map_err(|e| Error::HostMemory {
                what: "freeing memory".to_owned(),
                reason: e.to_string(),
            })?;
        }
        Ok(self.locked)
    }

    fn register(&mut self, bytes: usize) -> Result<bool> {
        // SAFETY: the range is mapped for as long as `self` lives, and `Drop` unregisters before it unmaps.
        match unsafe { register(self.map.bytes_mut().as_mut_ptr(), bytes) } {
            Ok(()) => Ok(true),
            Err(error) if locks_no_more(error) => Ok(false),
            Err(error) => Err(error).doing("page-locking experts"),
        }
    }

    /// Where kernels read the locked part.
    pub(super) fn device_address(&mut self) -> Result<u64> {
        let mut address = 0;
        // SAFETY: the front of the map is registered with DEVICEMAP (`lock` returned more than 0).
        unsafe {
            sys::cuMemHostGetDevicePointer_v2(&mut address, self.map.bytes_mut().as_mut_ptr().cast(), 0)
        }
        .result()
        .doing("mapping experts for the GPU")?;
        Ok(address)
    }

    pub(super) fn host_address(&self) -> *const u8 {
        self.map.bytes().as_ptr()
    }
}

impl Drop for LockedMap {
    fn drop(&mut self) {
        if self.locked == 0 {
            return;
        }
        self.gpu.ctx.record_err(self.gpu.ctx.synchronize());
        // SAFETY: registered in `lock`, and nothing runs on the GPU that could still read it.
        let done = unsafe { sys::cuMemHostUnregister(self.map.bytes_mut().as_mut_ptr().cast()) }.result();
        self.gpu.ctx.record_err(done);
    }
}
