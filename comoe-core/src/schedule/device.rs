//! Steps that the device drives, and who owns the residency tables: the host's pool or the device, one at a time.

use candle_core::Tensor;

use super::Engine;
use crate::backend::{
    DeviceCounters, DeviceDriver, DeviceStep, MOST_DEVICE_ASSIGNMENTS, MOST_DEVICE_SLOTS, MOST_DEVICE_TOKENS,
};
use crate::error::{Error, Result};
use crate::pool::SlotState;
use crate::stats::CacheStats;

/// Device-driven steps, where the cache has them.
#[derive(Default)]
pub(super) struct Drive {
    offered: bool,
    /// The device owns the tables.
    owns: bool,
    /// The device's counters when the cache's began.
    base: Vec<DeviceCounters>,
}

impl Engine {
    /// Lets the device drive steps of few tokens from here on, or says why it cannot.
    pub(crate) fn offer_device(&mut self) -> std::result::Result<(), String> {
        if self.prefetch.is_some() {
            return Err("prefetching is the host driver's".to_owned());
        }
        if let Some(&most) = self.pool.shape().partitions.iter().max().filter(|&&n| n > MOST_DEVICE_SLOTS) {
            return Err(format!(
                "up to {most} slots compete for one layer, the device searches up to {MOST_DEVICE_SLOTS} (scope layer \
                 makes them fewer)"
            ));
        }
        self.backend.device_driver()?;
        self.drive.offered = true;
        Ok(())
    }

    /// Whether a step of `tokens` tokens with `top_k` experts each is the device's.
    pub(crate) fn device_serves(&self, tokens: usize, top_k: usize) -> bool {
        self.drive.offered && tokens <= MOST_DEVICE_TOKENS && tokens * top_k <= MOST_DEVICE_ASSIGNMENTS
    }

    fn driver(&mut self) -> Result<&mut dyn DeviceDriver> {
        self.backend.device_driver().map_err(|reason| Error::BadArgument { what: "driver", reason })
    }

    /// Runs `f` unless the cache has stopped; its error stops the cache.
    pub(super) fn guarded<R>(&mut self, f: impl FnOnce(&mut Self) -> Result<R>) -> Result<R> {
        if let Some(first) = &self.failed {
            return Err(Error::Stopped { first: first.clone() });
        }
        let result = f(self);
        if let Err(e) = &result {
            self.failed = Some(e.to_string());
        }
        result
    }

    /// Enqueues one layer's step on the device and returns its result, which may not be there yet.
    ///
    /// # Errors
    /// What was wrong with the routing of an earlier device-driven step, as far as that is known; this step is then not
    /// run.
    pub(crate) fn device_step(&mut self, step: DeviceStep<'_>) -> Result<Tensor> {
        self.report_fault(false)?;
        self.guarded(|this| {
            this.device_owns()?;
            this.driver()?.step(step)
        })
    }

    /// Runs `f`, which enqueues device-driven steps that were recorded before (a graph), with the tables in the
    /// device's hands.
    ///
    /// # Errors
    /// As [`Self::device_step`]; `f` is then not run.
    pub(crate) fn device_replay<R>(&mut self, f: impl FnOnce() -> R) -> Result<R> {
        self.report_fault(false)?;
        self.guarded(Self::device_owns)?;
        Ok(f())
    }

    /// The first routing fault of the device-driven steps so far, as an error, once. `wait`: waits for them first.
    /// Such a fault does not stop the cache: nothing was changed by it.
    pub(crate) fn report_fault(&mut self, wait: bool) -> Result<()> {
        if !self.drive.owns {
            return Ok(());
        }
        match self.guarded(|this| this.driver()?.fault(wait))? {
            Some(fault) => Err(fault.error(&self.directory)),
            None => Ok(()),
        }
    }

    fn device_owns(&mut self) -> Result<()> {
        if self.drive.owns {
            return Ok(());
        }
        // Every fill has arrived and every reader is done.
        self.backend.synchronize()?;
        let loading = |(slot, state)| matches!(state, SlotState::Loading(_)).then_some(slot);
        for slot in self.pool.states().filter_map(loading).collect::<Vec<_>>() {
            self.pool.arrived(slot);
        }
        let (shape, residency) = (self.pool.shape().clone(), self.pool.residency());
        self.driver()?.take_over(&shape, &residency)?;
        self.drive.owns = true;
        Ok(())
    }

    /// Brings the tables back to the host, after whatever the device is doing.
    ///
    /// # Errors
    /// As [`Self::report_fault`]; the tables are back all the same.
    pub(crate) fn host_owns(&mut self) -> Result<()> {
        if !self.drive.owns {
            return Ok(());
        }
        let fault = self.report_fault(true);
        self.guarded(|this| {
            let residency = this.driver()?.residency()?;
            this.pool.restore(&residency)
        })?;
        self.drive.owns = false;
        fault
    }

    /// The device's counters since the cache's began, added to `stats`.
    pub(super) fn add_device_counts(&mut self, stats: &mut CacheStats) {
        let Some(counters) = self.device_counters() else { return };
        for (i, now) in counters.iter().enumerate() {
            let then = self.drive.base.get(i).copied().unwrap_or_default();
            let (steps, missed) = (now.steps - then.steps, now.steps_with_miss - then.steps_with_miss);
            let (accesses, hits) = (now.accesses - then.accesses, now.hits - then.hits);
            let layer = &mut stats.layers[i];
            layer.accesses += accesses;
            layer.hits += hits;
            layer.misses += accesses - hits;
            stats.steps += steps;
            stats.device_steps += steps;
            stats.steps_with_transfer += missed;
            stats.transfers += missed;
            stats.records_moved += accesses - hits;
            stats.bytes_moved += (accesses - hits) * self.directory.layers()[i].record_bytes as u64;
        }
    }

    pub(super) fn reset_device_counts(&mut self) {
        self.drive.base = self.device_counters().unwrap_or_default();
    }

    /// `None` where the device has driven nothing, or stopped working (which every later step reports).
    fn device_counters(&mut self) -> Option<Vec<DeviceCounters>> {
        if !self.drive.offered {
            return None;
        }
        self.guarded(|this| this.driver()?.counters()).ok()
    }
}
