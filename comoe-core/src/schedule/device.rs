//! Steps that the device drives, and who owns the residency tables: the host's pool or the device, one at a time.

use candle_core::Tensor;

use super::Engine;
use super::guesses::Guesses;
use super::token::Token;
use crate::backend::{
    COPIED_RECORD_BYTES, DeviceCounters, DeviceDriver, DeviceLimits, DeviceStep, DriverKind,
    MOST_DEVICE_ASSIGNMENTS, MOST_DEVICE_SLOTS, MOST_DEVICE_TOKENS, STAGED_AHEAD, SlotId,
};
use crate::error::{Error, Result};
use crate::stats::{CacheStats, human_bytes};

/// Device-driven steps, where the cache has them.
#[derive(Default)]
pub(super) struct Drive {
    pub(super) offered: bool,
    /// The device owns the tables.
    pub(super) owns: bool,
    pub(super) limits: DeviceLimits,
    pub(super) token: Option<Token>,
    /// A token was given up that the device may have stopped in.
    pub(super) left_open: bool,
    /// What the host brought for device-driven steps since the cache's counters began.
    pub(super) brought_bytes: u64,
    /// The device's counters when the cache's began.
    base: Vec<DeviceCounters>,
    /// How often the device had used each record then.
    base_uses: Vec<u64>,
    /// The device brings what is guessed for the next layer.
    pub(super) ahead: Option<Ahead>,
}

pub(super) struct Ahead {
    judged: bool,
    pub(super) guesses: Guesses,
}

impl Engine {
    /// Lets the device drive steps of few tokens from here on, or from when all is page-locked, where that goes on; or says
    /// why it cannot, or should not where that was not `asked` for. Prefetching is the device's from then on, too, if it is
    /// `alone`.
    pub(crate) fn offer_device(&mut self, asked: DriverKind, alone: bool) -> std::result::Result<(), String> {
        if let Some(prefetch) = &mut self.prefetch {
            let (limits, learns) =
                (self.backend.device_driver()?.limits(), prefetch.predictor.table().is_some());
            if !alone || !limits.ahead || (learns && !limits.learns) {
                return Err("prefetching is the host driver's here".to_owned());
            }
        }
        if let Some(&most) = self.pool.shape().partitions.iter().max().filter(|&&n| n > MOST_DEVICE_SLOTS) {
            return Err(format!(
                "up to {most} slots compete for one layer, the device searches up to {MOST_DEVICE_SLOTS} (scope layer \
                 makes them fewer)"
            ));
        }
        let limits = self.backend.device_driver()?.limits();
        let (largest, shape) = (self.directory.largest_record(), self.pool.shape());
        let by_name = asked == DriverKind::Device;
        // With a slot for every record there is nothing to move but once.
        if !by_name && largest >= COPIED_RECORD_BYTES && shape.slots() < self.directory.len() {
            let largest = human_bytes(largest as u64);
            return Err(format!(
                "records of {largest} arrive sooner by copies than by kernels that read them"
            ));
        }
        let shares = shape.partitions.len() < shape.partition_of.len();
        match &limits.partial {
            // Who prefetches is settled once.
            Some(_) if self.locking.goes_on && self.prefetch.is_none() && (!by_name || shares) => {
                self.locking.offer = Some(asked);
                return Ok(());
            }
            // A token that is cut short at every other layer takes longer than the host's round trips.
            Some(why) if !by_name => return Err(format!("{why} (driver device would run tokens again)")),
            // A later layer must not take away what an earlier one of the same token was brought.
            Some(why) if shares => {
                let advice = "give each its own (scope layer, more slots)";
                return Err(format!("{why}, and layers share their slots: {advice}"));
            }
            _ => {}
        }
        if let Some(prefetch) = &mut self.prefetch {
            let (judged, first) = (prefetch.gate.is_some(), shape.slots() as u32);
            let staging: Vec<SlotId> = (first..).take(shape.staging.min(STAGED_AHEAD)).map(SlotId).collect();
            self.backend.device_driver()?.fetch_ahead(&staging, judged).map_err(|e| e.to_string())?;
            self.drive.ahead = Some(Ahead { judged, guesses: Guesses::of(&mut *prefetch.predictor) });
            // Its staging slots are the device's now, and prompts have the ring.
            self.prefetch = None;
        }
        self.drive.limits = limits;
        self.drive.offered = true;
        Ok(())
    }

    /// Whether device-driven steps of one token make use of a caller's guess for the next layer.
    pub(crate) fn fetches_ahead(&self) -> bool {
        self.drive.ahead.as_ref().is_some_and(|ahead| ahead.guesses.may_be_callers())
    }

    /// Whether those guesses are judged.
    pub(crate) fn judges_guesses(&self) -> bool {
        self.drive.ahead.as_ref().is_some_and(|ahead| ahead.judged && ahead.guesses.may_be_callers())
    }

    /// Where device-driven steps count what they miss.
    pub(crate) fn missed_address(&mut self) -> Option<u64> {
        self.backend.device_driver().ok()?.missed_address()
    }

    /// Takes back [`Self::offer_device`].
    pub(crate) fn withdraw_device(&mut self) {
        self.drive.offered = false;
        self.locking.offer = None;
    }

    /// Why some records only the host can bring to this device, if so.
    pub(crate) fn device_is_partial(&self) -> Option<&str> {
        self.drive.limits.partial.as_deref()
    }

    /// Makes ready for a step that this device drives together with others: it owns its tables from here on.
    pub(crate) fn begin_shared(&mut self) -> Result<()> {
        self.with_memory(Self::device_owns)
    }

    /// Whether a token is under way.
    pub(crate) fn is_in_token(&self) -> bool {
        self.drive.token.is_some()
    }

    /// Its backend, for such a step.
    pub(crate) fn shared_backend(&mut self) -> &mut dyn crate::backend::Backend {
        &mut *self.backend
    }

    /// [`Error::Stopped`] after a failure.
    pub(crate) fn refuse_stopped(&self) -> Result<()> {
        match &self.failed {
            Some(first) => Err(Error::Stopped { first: first.clone() }),
            None => Ok(()),
        }
    }

    /// Nothing in its slots is trusted from here on.
    pub(crate) fn stop(&mut self, why: &Error) {
        self.failed.get_or_insert(why.to_string());
    }

    /// Whether a step of `tokens` tokens with `top_k` experts each is the device's, now.
    pub(crate) fn device_serves(&self, tokens: usize, top_k: usize) -> bool {
        let drive = &self.drive;
        // What cannot be run again must not stop half-way.
        drive.offered
            && (drive.limits.partial.is_none() || drive.token.is_some())
            && self.device_fits(tokens, top_k)
    }

    /// Whether the steps of such a token could be the device's, in every layer.
    pub(crate) fn device_fits(&self, tokens: usize, top_k: usize) -> bool {
        let (assignments, shape) = (tokens * top_k, self.pool.shape());
        let has_slots = || {
            let mut layers = self.directory.layers().iter().zip(&shape.partition_of);
            layers.all(|(layer, &p)| assignments.min(layer.experts) <= self.pool.leaving(p))
        };
        self.drive.offered
            && tokens <= MOST_DEVICE_TOKENS
            && assignments <= MOST_DEVICE_ASSIGNMENTS
            && (!self.drive.limits.only_into_slots || has_slots())
    }

    /// A host-driven step in the middle of a token that the device may have stopped in has no input to work with.
    pub(super) fn refuse_within_token(&self) -> Result<()> {
        if self.drive.token.is_none() || self.drive.limits.partial.is_none() {
            return Ok(());
        }
        let reason = "this step is for the host (more tokens or experts than the token began with, or an observer), within \
                      a token that the device drives: end the token first"
            .to_owned();
        Err(Error::BadArgument { what: "token", reason })
    }

    pub(super) fn driver(&mut self) -> Result<&mut dyn DeviceDriver> {
        self.backend.device_driver().map_err(|reason| Error::BadArgument { what: "driver", reason })
    }

    /// Runs `f` unless the cache has stopped; its error stops the cache.
    pub(super) fn guarded<R>(&mut self, f: impl FnOnce(&mut Self) -> Result<R>) -> Result<R> {
        self.refuse_stopped()?;
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
        if self.drive.token.is_none() {
            self.report_fault(false)?;
        }
        let ordinal = self.drive.next_ordinal();
        self.with_memory(|this| this.settle_guesses(&step))?;
        self.with_memory(|this| {
            this.device_owns()?;
            this.driver()?.step(DeviceStep { ordinal, ..step })
        })
    }

    pub(super) fn device_owns(&mut self) -> Result<()> {
        if self.drive.owns {
            return Ok(());
        }
        self.come_to_rest()?;
        let (shape, residency) = (self.pool.shape().clone(), self.pool.residency());
        self.driver()?.take_over(&shape, &residency)?;
        self.device_learns()?;
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
            this.pool.restore(&residency)?;
            this.hear_what_was_learned()
        })?;
        self.drive.owns = false;
        fault
    }

    /// The device's counters since the cache's began, added to `stats`.
    pub(super) fn add_device_counts(&mut self, stats: &mut CacheStats) {
        let Some(counters) = self.device_counters() else { return };
        let (mut bytes, mut ahead_bytes) = (0, 0);
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
            let ahead = now.ahead - then.ahead;
            let (wasted, wasted_bytes) = (ahead.brought - ahead.used, ahead.bytes - ahead.saved_bytes);
            bytes += (accesses - hits) * self.directory.layers()[i].record_bytes as u64 - ahead.saved_bytes;
            ahead_bytes += ahead.bytes;
            layer.prefetch_used += ahead.used;
            layer.prefetch_wasted += wasted;
            layer.prefetch_width = ahead.width;
            stats.guessed += ahead.guessed;
            stats.guessed_right += ahead.right;
            stats.prefetched += ahead.brought;
            stats.prefetched_bytes += ahead.bytes;
            stats.prefetch_used += ahead.used;
            stats.prefetch_wasted += wasted;
            stats.prefetch_wasted_bytes += wasted_bytes;
        }
        stats.prefetch_judged |= self.drive.ahead.as_ref().is_some_and(|a| a.judged);
        if stats.pinned_slots > 0 {
            let uses = self.device_uses();
            for record in self.pool.kept() {
                let r = record.0 as usize;
                let then = self.drive.base_uses.get(r).copied().unwrap_or(0);
                let since = uses.get(r).map_or(0, |n| n.saturating_sub(then));
                // What stays is always hit.
                stats.layers[self.directory.ordinal_of(record)].pinned_hits += since;
            }
        }
        stats.bytes_moved += bytes;
        // What the host brought, its copy queue has timed.
        stats.read_through_bytes += bytes.saturating_sub(self.drive.brought_bytes) + ahead_bytes;
    }

    pub(super) fn reset_device_counts(&mut self) {
        self.drive.base = self.device_counters().unwrap_or_default();
        self.drive.base_uses = self.device_uses();
        self.drive.brought_bytes = 0;
    }

    /// `None` where the device has driven nothing, or stopped working (which every later step reports).
    fn device_counters(&mut self) -> Option<Vec<DeviceCounters>> {
        if !self.drive.offered {
            return None;
        }
        self.guarded(|this| this.driver()?.counters()).ok()
    }

    /// How often device-driven steps have used each record; empty where there were none.
    pub(super) fn device_uses(&mut self) -> Vec<u64> {
        match self.drive.offered {
            true => self.guarded(|this| this.driver()?.uses()).unwrap_or_default(),
            false => Vec::new(),
        }
    }
}
