//! What a run of decoding gave, and the memory that it took meanwhile.

use std::time::Duration;

use candle_core::Device;
use comoe_core::ExpertCache;
use serde::Serialize;

use super::{Decode, Part, Tiers, trigger_name};
use crate::counting::Evenness;
use crate::error::Result;

/// What a run gave.
#[derive(Debug, Clone, Serialize)]
pub struct Measured {
    /// Name of the shape.
    pub shape: String,
    /// Layers with experts.
    pub layers: usize,
    /// What ran.
    pub part: Part,
    /// The experts' format.
    pub format: String,
    /// As the backend names it.
    pub device: String,
    /// What the backend says is in force.
    pub notes: Vec<String>,
    /// Slots for each layer, and experts of each.
    pub slots_per_layer: [usize; 2],
    /// Driver in force: `device` or `host`.
    pub driver: String,
    /// Prefetch in force: `off`, or the trigger.
    pub prefetch: String,
    /// Tokens measured.
    pub steps: usize,
    /// Seconds to make the experts (and page-lock them) and the dense part.
    pub load_s: f64,
    /// Tokens a second over all that was measured.
    pub tokens_per_s: f64,
    /// Median time of a token, ms.
    pub median_ms: f64,
    /// Slowest token, ms.
    pub slowest_ms: f64,
    /// Hits per access.
    pub hit_rate: f64,
    /// Bytes moved on demand per token.
    pub bytes_per_token: f64,
    /// GB/s of the demand queue while it was busy; `None` where kernels read what was missed.
    pub gb_per_s: Option<f64>,
    /// Compute waiting for copies, ms per token.
    pub stalled_ms: f64,
    /// Records prefetched per token.
    pub prefetched: f64,
    /// Parts of them that were used.
    pub prefetch_used: f64,
    /// How evenly experts were used, by all steps that the host drove (at least the prompt).
    pub evenness: Evenness,
    /// GPU memory; `None` on the CPU.
    pub memory: Option<Memory>,
    /// Anonymous memory of the process at the end, in bytes.
    pub rss_anon: u64,
    /// Where RAM is limited.
    pub tier: Option<Tiers>,
    /// Of the bits of every number that came out of the tokens measured: equal for equal runs, however experts are kept.
    pub digest: String,
}

/// FNV-1a (Fowler, Noll, Vo) over the bits of numbers.
pub(super) struct Digest(u64);

impl Default for Digest {
    fn default() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }
}

impl Digest {
    pub(super) fn add(&mut self, numbers: &[f32]) {
        for byte in numbers.iter().flat_map(|n| n.to_bits().to_le_bytes()) {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
}

impl std::fmt::Display for Digest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// GPU memory in bytes: what was to be expected, and what was there.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Memory {
    /// Slots with staging and ring, as the cache reports them.
    pub slots: u64,
    /// Workspace of the experts' kernels.
    pub workspace: u64,
    /// Weights of the dense part, and the KV cache.
    pub dense: u64,
    /// Free before the run less free at its end; the driver, kernels and libraries were loaded before.
    pub measured: u64,
    /// Least and most of the memory pool in use, over the tokens measured.
    pub pool_used: [u64; 2],
    /// Least and most of the GPU's free memory, over the tokens measured.
    pub free: [u64; 2],
}

impl Memory {
    /// All that was to be expected.
    pub fn expected(&self) -> u64 {
        self.slots + self.workspace + self.dense
    }

    /// Measured over expected, less one.
    pub fn off(&self) -> f64 {
        self.measured as f64 / self.expected().max(1) as f64 - 1.0
    }
}

impl Decode {
    pub(super) fn measured(
        &self,
        times: &[Duration],
        cache: &ExpertCache,
        load_s: f64,
        evenness: Evenness,
        memory: Option<Memory>,
    ) -> Measured {
        let (stats, info) = (cache.stats(), cache.backend_info().clone());
        let steps = times.len() as f64;
        let ms = |d: Duration| d.as_secs_f64() * 1e3;
        let mut sorted = times.to_vec();
        sorted.sort_unstable();
        Measured {
            shape: self.shape.name.to_owned(),
            layers: self.shape.layers,
            part: self.part,
            format: self.format.to_string(),
            device: info.device,
            notes: info.notes,
            slots_per_layer: [stats.slots / self.shape.layers, self.shape.experts],
            driver: cache.driver().to_string(),
            prefetch: match stats.staging_slots {
                0 => "off".to_owned(),
                _ => trigger_name(self.trigger).to_owned(),
            },
            steps: times.len(),
            load_s,
            tokens_per_s: steps / times.iter().sum::<Duration>().as_secs_f64(),
            median_ms: sorted.get(sorted.len() / 2).copied().map_or(0.0, ms),
            slowest_ms: sorted.last().copied().map_or(0.0, ms),
            hit_rate: stats.hit_rate(),
            bytes_per_token: stats.bytes_moved as f64 / steps,
            gb_per_s: (stats.read_through_bytes == 0)
                .then(|| comoe_core::machine::gb_per_s(stats.bytes_moved, stats.time.demand)),
            stalled_ms: ms(stats.time.stalled) / steps,
            prefetched: stats.prefetched as f64 / steps,
            prefetch_used: stats.prefetch_used as f64 / stats.prefetched.max(1) as f64,
            evenness,
            memory,
            rss_anon: 0,
            tier: None,
            digest: String::new(),
        }
    }
}

#[cfg(feature = "cuda")]
pub(super) fn free_memory(device: &Device) -> Result<Option<u64>> {
    crate::gpu::free_after_trim(device)
}

#[cfg(not(feature = "cuda"))]
pub(super) fn free_memory(_: &Device) -> Result<Option<u64>> {
    Ok(None)
}

/// Looks at a GPU's memory after each token.
#[derive(Debug, Default)]
pub(super) struct Watch {
    pub(super) pool_used: [u64; 2],
    pub(super) free: [u64; 2],
    #[cfg(feature = "cuda")]
    looked: bool,
}

impl Watch {
    #[cfg(feature = "cuda")]
    pub(super) fn look(&mut self, device: &Device) -> Result<()> {
        let Some(now) = crate::gpu::memory(device)? else { return Ok(()) };
        if !std::mem::replace(&mut self.looked, true) {
            (self.pool_used, self.free) = ([now.pool_used; 2], [now.free; 2]);
        }
        for (range, value) in [(&mut self.pool_used, now.pool_used), (&mut self.free, now.free)] {
            *range = [range[0].min(value), range[1].max(value)];
        }
        Ok(())
    }

    #[cfg(not(feature = "cuda"))]
    pub(super) fn look(&mut self, _: &Device) -> Result<()> {
        Ok(())
    }
}
