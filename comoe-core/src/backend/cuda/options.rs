//! How the CUDA backend is run. Present in every build, so that callers need no `cfg`.

use std::sync::Arc;

use crate::expert::{ExpertLayout, ExpertSpec};
use crate::format::ExpertFormat;
use crate::store::{Directory, RecordIndex, TieredSource};

/// Called while experts are read into page-locked memory with the bytes done so far and in all.
pub type Progress = Arc<dyn Fn(u64, u64) + Send + Sync>;

/// What a slot holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum ResidentFormat {
    /// The record as it is stored; kernels dequantise while they multiply. The most experts fit.
    #[default]
    AsStored,
    /// The record expanded to BF16 when it is loaded. Fewer experts fit (a third or so of INT4's), and steps of many
    /// tokens need not expand them again.
    Bf16,
}

impl std::str::FromStr for ResidentFormat {
    type Err = crate::Error;

    fn from_str(s: &str) -> crate::Result<Self> {
        match s {
            "quantized" => Ok(Self::AsStored),
            "bf16" => Ok(Self::Bf16),
            _ => {
                let reason = format!("{s:?} is unknown: use quantized or bf16");
                Err(crate::Error::BadArgument { what: "resident format", reason })
            }
        }
    }
}

/// A stored layout, and the BF16 one that it becomes in a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Expansion {
    pub(crate) from: ExpertLayout,
    pub(crate) to: ExpertLayout,
}

/// Options of the CUDA backend.
#[derive(Clone, Default)]
#[non_exhaustive]
pub struct CudaOptions {
    /// Most host memory to page-lock for experts, in bytes. Default: as much as memory allows. What is not locked
    /// passes through a small locked buffer, which is slower; 0 locks no expert.
    pub page_lock_limit: Option<u64>,
    /// Reads and page-locks the experts on threads of its own while the cache answers already: what is not there yet passes
    /// through the buffer, and steps are the host's until all of it is there. Not with several devices, nor where anything is prefetched. Default:
    /// no, a cache that is built has all that it will have.
    pub page_lock_later: bool,
    /// What slots hold. Only for experts: a cache of other records holds them as they are.
    pub resident: ResidentFormat,
    /// By layer ordinal, once the experts are known (`with_experts`); empty: records are opaque.
    pub(crate) expansions: Arc<[Expansion]>,
    /// The source that the backend reads, where it keeps only some of the records in RAM.
    pub(crate) tier: Option<Arc<TieredSource>>,
    /// Told how far loading is.
    pub progress: Option<Progress>,
    /// Pretend that the driver refuses to page-lock more than this, in bytes.
    #[doc(hidden)]
    pub page_lock_fails_at: Option<u64>,
    /// Page-lock so many bytes at once.
    #[doc(hidden)]
    pub page_lock_chunk: Option<usize>,
    #[doc(hidden)]
    pub faults: Faults,
}

impl CudaOptions {
    /// Tells the options what the records are, by layer ordinal. The builder of an expert cache does this.
    #[must_use]
    pub fn with_experts(mut self, experts: impl IntoIterator<Item = (ExpertSpec, ExpertLayout)>) -> Self {
        self.expansions = match self.resident {
            ResidentFormat::AsStored => Arc::default(),
            ResidentFormat::Bf16 => {
                let to = |spec: &ExpertSpec| ExpertLayout::new(spec, ExpertFormat::Bf16);
                let all: Vec<_> =
                    experts.into_iter().map(|(spec, from)| Expansion { from, to: to(&spec) }).collect();
                // What is stored in BF16 is copied as it is.
                if all.iter().all(|e| e.from == e.to) { Arc::default() } else { all.into() }
            }
        };
        self
    }

    /// Tells the options that the backend's source is `tier`, whose memory is then page-locked. The builder of a cache does
    /// this.
    #[must_use]
    pub fn with_tier(mut self, tier: Arc<TieredSource>) -> Self {
        self.tier = Some(tier);
        self
    }

    /// Bytes that a slot needs for any record of `directory`.
    pub fn slot_bytes(&self, directory: &Directory) -> usize {
        self.expansions.iter().map(|e| e.to.record_bytes).max().unwrap_or_else(|| directory.largest_record())
    }
}

impl std::fmt::Debug for CudaOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CudaOptions")
            .field("page_lock_limit", &self.page_lock_limit)
            .field("page_lock_later", &self.page_lock_later)
            .field("resident", &self.resident)
            .field("tier", &self.tier.is_some())
            .field("progress", &self.progress.is_some())
            .field("page_lock_fails_at", &self.page_lock_fails_at)
            .field("page_lock_chunk", &self.page_lock_chunk)
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
    /// Copies records one by one, as with a driver older than CUDA 12.8.
    pub no_batches: bool,
    /// Slots are one allocation, as with a driver that cannot map memory.
    pub no_mapping: bool,
    /// Breaks the transfer of this record half-way.
    pub fail_half_way: Option<RecordIndex>,
    /// Holds the compute queue up for so long, before its step with this number (from 1).
    pub stall: Option<(u64, std::time::Duration)>,
}

#[cfg(feature = "cuda")]
impl Faults {
    /// Perhaps holds `stream` up; `point` numbers the occasions.
    pub(super) fn delay(&self, stream: &cudarc::driver::CudaStream, point: u64) -> crate::Result<()> {
        use super::context::Doing;

        unsafe extern "C" fn nap(micros: *mut std::ffi::c_void) {
            std::thread::sleep(std::time::Duration::from_micros(micros as u64));
        }
        let hold = |micros: u64| {
            // SAFETY: `nap` takes a number, not memory, makes no CUDA call, and does not unwind.
            unsafe {
                cudarc::driver::result::stream::launch_host_function(
                    stream.cu_stream(),
                    nap,
                    micros as *mut std::ffi::c_void,
                )
            }
            .doing("injecting a delay")
        };
        if let Some((_, time)) = self.stall.filter(|(at, _)| *at == point) {
            hold(time.as_micros() as u64)?;
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
        hold(1000 + (z >> 32) % 4000)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_as_large_as_what_they_hold() {
        let spec = ExpertSpec::swiglu(256, 128);
        let stored = ExpertLayout::new(&spec, ExpertFormat::INT4);
        let directory = Directory::new([(0, 2, stored.record_bytes)]).unwrap();
        let plain = CudaOptions::default().with_experts([(spec, stored)]);
        assert_eq!(plain.slot_bytes(&directory), stored.record_bytes);
        let expanded = CudaOptions { resident: ResidentFormat::Bf16, ..Default::default() };
        // Opaque records stay as they are.
        assert_eq!(expanded.slot_bytes(&directory), stored.record_bytes);
        let expanded = expanded.with_experts([(spec, stored)]);
        assert_eq!(expanded.slot_bytes(&directory), 3 * 2 * 256 * 128);

        assert_eq!("bf16".parse::<ResidentFormat>().unwrap(), ResidentFormat::Bf16);
        assert!("int4".parse::<ResidentFormat>().unwrap_err().to_string().contains("quantized or bf16"));
    }
}
