//! Memory of a loaded model by owner: as it was planned, as it is now, and as it was at most.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use candle_core::Device;
use comoe_core::plan::{DeviceBytes, DevicePlan, PoolBytes};
use comoe_core::{cuda_memory, cuda_pool};
use serde::Serialize;

use crate::decoder::Decoder;
use crate::error::Result;

/// Now, and at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct NowAndPeak<T> {
    /// Now.
    pub now: T,
    /// The most so far.
    pub peak: T,
}

/// What a model's run holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MeasuredMemory {
    /// Device memory by owner. On a CPU, where activations are not counted, what is held from step to step.
    pub device: NowAndPeak<DeviceBytes>,
    /// Bytes of experts' records in host memory, slots not counted: page-locked for a GPU, else mapped or in memory; where
    /// RAM has places for some of them, those.
    pub arena: u64,
    /// Of a GPU: what the driver's pool holds.
    pub pool: Option<PoolBytes>,
    /// Of a GPU: bytes of its memory that are gone since the model began to be opened, whoever has them.
    pub taken: Option<NowAndPeak<u64>>,
}

/// Bytes of things that come and go.
#[derive(Debug, Default)]
pub(crate) struct Gauge {
    now: AtomicU64,
    peak: AtomicU64,
}

impl Gauge {
    /// Counts `bytes` until the result is dropped.
    pub(crate) fn hold(self: &Arc<Self>, bytes: u64) -> Held {
        let now = self.now.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.peak.fetch_max(now, Ordering::Relaxed);
        Held { gauge: self.clone(), bytes }
    }

    fn read(&self) -> NowAndPeak<u64> {
        NowAndPeak { now: self.now.load(Ordering::Relaxed), peak: self.peak.load(Ordering::Relaxed) }
    }
}

/// Counted bytes.
#[derive(Debug)]
pub(crate) struct Held {
    gauge: Arc<Gauge>,
    bytes: u64,
}

impl Held {
    /// Counts them as `bytes` from now on.
    pub(crate) fn set(&mut self, bytes: u64) {
        *self = self.gauge.hold(bytes);
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.gauge.now.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// What a decoder knows of its memory.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    /// By device.
    pub(crate) plans: Vec<DevicePlan>,
    /// Bytes of dense weights as they were loaded.
    pub(crate) dense: u64,
    /// Free on the GPU before anything was loaded.
    pub(crate) free: Option<u64>,
    pub(crate) kv: Arc<Gauge>,
}

impl Decoder {
    /// What its device and the host hold of it.
    ///
    /// Of a GPU, peaks are those of the driver's pool and of allocations that only grow; what neither owns (the libraries'
    /// own memory, kernels, graphs) is the rest of [`MeasuredMemory::taken`].
    ///
    /// # Errors
    /// When the device does not say.
    pub fn measure_memory(&self) -> Result<MeasuredMemory> {
        let (stats, held, kv) =
            (self.experts().stats(), self.experts().device_memory(), self.memory.kv.read());
        let of = |slots: usize| (slots * stats.slot_bytes) as u64;
        // Of several devices what the first has.
        let beside = stats.devices.first().map(|first| (first.staging_slots, first.ring_slots));
        let (staging, ring) = beside.unwrap_or((stats.staging_slots, stats.ring_slots));
        let (staging, ring) = (of(staging), of(ring));
        let own = DeviceBytes {
            dense: self.memory.dense,
            workspace: held.workspace,
            buffers: held.buffers + self.fused().map_or(0, |fused| fused.held_bytes()),
            slots: held.slots.saturating_sub(staging + ring),
            staging,
            ring,
            kv: 0,
        };
        let device =
            NowAndPeak { now: DeviceBytes { kv: kv.now, ..own }, peak: DeviceBytes { kv: kv.peak, ..own } };
        let tier = stats.tier.map(|tier| (tier.places * tier.place_bytes) as u64);
        let arena = tier.unwrap_or_else(|| self.experts().directory().total_bytes());
        let mut measured = MeasuredMemory { device, arena, pool: None, taken: None };
        if let Device::Cuda(_) = self.device() {
            let pool = cuda_pool(self.device())?;
            // What the pool has beyond what is accounted for are activations.
            let others = |kv: u64| self.memory.dense + kv + own.buffers - held.buffers;
            measured.device.now.workspace += pool.used.saturating_sub(others(kv.now));
            measured.device.peak.workspace += pool.used_peak.saturating_sub(others(kv.peak));
            let locked = self.experts().page_locking().map(|locking| locking.locked);
            measured.arena = tier.or(locked).unwrap_or(0);
            if let Some(free) = self.memory.free {
                let now = free.saturating_sub(cuda_memory(self.device())?.0);
                // Everything else only grows.
                let peak = now + (pool.reserved_peak - pool.reserved);
                measured.taken = Some(NowAndPeak { now, peak });
            }
            measured.pool = Some(pool);
        }
        Ok(measured)
    }

    /// Lets the run take no more than `bytes` bytes of the device's memory from here on, whatever it was opened with: as many
    /// slots leave, or come back, as what was planned besides them says. Output does not change. Returns the bytes planned
    /// then: more than `bytes` where even the fewest slots that work take more, less where the cache was not built with as
    /// many slots as would fit.
    ///
    /// # Errors
    /// [`comoe_core::Error::BadArgument`] where nothing was planned, or for several devices;
    /// [`comoe_core::Error::FixedSlots`] where slots cannot come and go.
    pub fn set_budget(&self, bytes: u64) -> Result<u64> {
        let bad = |reason: &str| comoe_core::Error::BadArgument { what: "budget", reason: reason.to_owned() };
        let plan = match self.device_plans() {
            [one] => &one.memory,
            [] => return Err(bad("the model was put together without a plan").into()),
            _ => return Err(bad("each of several devices has its own: start again with other ones").into()),
        };
        let others = plan.device.total() - plan.device.slots + plan.margin;
        let slots = bytes.saturating_sub(others) / plan.slot_bytes as u64;
        let force = self.experts().resize(usize::try_from(slots).unwrap_or(usize::MAX))?;
        self.be_budgeted(true);
        Ok(others + force.slots as u64 * plan.slot_bytes as u64 + force.lent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_dropped_counts_no_more_and_the_peak_stays() {
        let gauge = Arc::new(Gauge::default());
        let (a, b) = (gauge.hold(100), gauge.hold(20));
        drop(a);
        assert_eq!(gauge.read(), NowAndPeak { now: 20, peak: 120 });
        drop((b, gauge.hold(7)));
        assert_eq!(gauge.read(), NowAndPeak { now: 0, peak: 120 });
    }
}
