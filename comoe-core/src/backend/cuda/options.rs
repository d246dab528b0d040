//! How the CUDA backend is run. Present in every build, so that callers need no `cfg`.

use std::sync::Arc;

use crate::store::RecordIndex;

/// Called while experts are read into page-locked memory with the bytes done so far and in all.
pub type Progress = Arc<dyn Fn(u64, u64) + Send + Sync>;

/// Options of the CUDA backend.
#[derive(Clone, Default)]
#[non_exhaustive]
pub struct CudaOptions {
    /// Most host memory to page-lock for experts, in bytes. Default: as much as memory allows. What is not locked
    /// passes through a small locked buffer, which is slower; 0 locks no expert.
    pub page_lock_limit: Option<u64>,
    /// Told how far loading is.
    pub progress: Option<Progress>,
    /// Pretend that the driver refuses to page-lock more than this, in bytes.
    #[doc(hidden)]
    pub page_lock_fails_at: Option<u64>,
    #[doc(hidden)]
    pub faults: Faults,
}

impl std::fmt::Debug for CudaOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CudaOptions")
            .field("page_lock_limit", &self.page_lock_limit)
            .field("progress", &self.progress.is_some())
            .field("page_lock_fails_at", &self.page_lock_fails_at)
            .field("faults", &self.faults)
            .finish()
    }
}

/// Faults that a test injects.
#[doc(hidden)]
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Faults {
    /// Holds every queue up at random, for 1 to 5 ms a time, as drawn from this seed.
    pub delay_seed: Option<u64>,
    /// Overwrites a slot with NaN before each fill.
    pub poison: bool,
    /// Breaks the transfer of this record half-way.
    pub fail_half_way: Option<RecordIndex>,
}

#[cfg(feature = "cuda")]
impl Faults {
    /// Perhaps holds `stream` up; `point` numbers the occasions.
    pub(super) fn delay(&self, stream: &cudarc::driver::CudaStream, point: u64) -> crate::Result<()> {
        use super::context::Doing;

        unsafe extern "C" fn nap(micros: *mut std::ffi::c_void) {
            std::thread::sleep(std::time::Duration::from_micros(micros as u64));
        }
        let Some(seed) = self.delay_seed else { return Ok(()) };
        // SplitMix64 (Steele et al. 2014, OOPSLA).
        let z = (seed ^ stream.cu_stream() as u64).wrapping_add(point.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let z = z ^ (z >> 31);
        if !z.is_multiple_of(4) {
            return Ok(());
        }
        let micros = 1000 + (z >> 32) % 4000;
        // SAFETY: `nap` takes a number, not memory, makes no CUDA call, and does not unwind.
        unsafe {
            cudarc::driver::result::stream::launch_host_function(
                stream.cu_stream(),
                nap,
                micros as *mut std::ffi::c_void,
            )
        }
        .doing("injecting a delay")
    }
}
