//! One cache over several devices: each owns a part of every layer's experts (see [`Placement`]) and has an engine of its
//! own for them, with pool, policy, queues and link. The first device is the caller's; a layer step goes to all of them,
//! each computes the results of the assignments whose experts it owns, and the first sums them up in the same order as if
//! it had computed them all. So the bits are those of one device, and a miss comes over its owner's link.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use candle_core::{Device, Tensor};

use super::{Core, ExpertCache};
use crate::backend::bond::Bond;
use crate::backend::{BackendInfo, DeviceStep, Work};
use crate::error::{Error, Result};
use crate::expert::{ExpertLayout, ExpertSpec};
use crate::placement::Placement;
use crate::schedule::{Engine, Finish, Need, Rows, Shortages, Step, covers};
use crate::stats::{CacheStats, DeviceStats};
use crate::store::{LayerEntry, RecordIndex, RecordSource};

/// What a cache over several devices has besides its first engine.
pub(super) struct Fleet {
    pub(super) placement: Placement,
    /// By device, the first included: what it owns.
    pub(super) sources: Vec<Arc<dyn RecordSource>>,
    pub(super) infos: Vec<BackendInfo>,
    /// How long one device is waited for.
    pub(super) deadline: Duration,
    pub(super) others: Mutex<Others>,
}

/// The devices behind the first.
pub(super) struct Others {
    // Before the engines: what is between devices uses their memory.
    pub(super) bond: Box<dyn Bond>,
    pub(super) engines: Vec<Engine>,
}

/// A step of the host's, as the caller gives it, besides its set.
pub(super) struct SharedStep<'a> {
    pub(super) layer: usize,
    pub(super) spec: &'a ExpertSpec,
    pub(super) layout: &'a ExpertLayout,
    pub(super) x: &'a Tensor,
    /// `[tokens * top_k]`
    pub(super) choices: &'a [u32],
    pub(super) weights: &'a [f32],
    pub(super) top_k: usize,
    pub(super) guess: &'a [u32],
}

impl SharedStep<'_> {
    /// Its work with `x` where the device has it.
    fn work<'w>(&'w self, x: &'w Tensor) -> Work<'w> {
        let &SharedStep { spec, layout, weights, top_k, .. } = self;
        Work::Ffn { spec, layout, x, weights, top_k }
    }
}

/// One device's part of a step.
#[derive(Default)]
struct Part {
    needs: Vec<Need>,
    choices: Vec<u32>,
    /// Of a step of one token, and 1 else: rows differ in length then.
    top_k: usize,
    guess: Vec<u32>,
    assignments: Vec<u32>,
}

impl Fleet {
    /// The engines behind the first. Whoever wants both locks the first one's before.
    pub(super) fn others(&self) -> MutexGuard<'_, Others> {
        self.others.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A step's set, device by device.
    fn split(&self, core: &Core, needs: Vec<Need>, step: &SharedStep<'_>) -> Vec<Part> {
        let one = step.choices.len() == step.top_k;
        let mut parts: Vec<Part> = Vec::new();
        parts.resize_with(self.placement.devices(), Part::default);
        let all = &core.directory.layers()[step.layer];
        for need in needs {
            let owner = self.placement.owner(need.record);
            let first = self.sources[owner].directory().layers()[step.layer].first;
            let part = &mut parts[owner];
            part.assignments.extend_from_slice(&need.assignments);
            let record = RecordIndex(first + self.placement.number(need.record));
            part.needs.push(Need { record, ..need });
        }
        for &expert in step.choices {
            let record = RecordIndex(all.first + expert);
            parts[self.placement.owner(record)].choices.push(self.placement.number(record));
        }
        let next = core.directory.layers().get(step.layer + 1);
        for record in next.into_iter().flat_map(|next| step.guess.iter().map(|g| RecordIndex(next.first + g)))
        {
            parts[self.placement.owner(record)].guess.push(self.placement.number(record));
        }
        parts.iter_mut().for_each(|p| p.top_k = if one { p.choices.len().max(1) } else { 1 });
        parts
    }

    /// Runs one layer's step, driven by the host.
    pub(super) fn step(&self, core: &Core, needs: Vec<Need>, step: &SharedStep<'_>) -> Result<Tensor> {
        core.report_faults(true)?;
        let mut parts = self.split(core, needs, step);
        let used = parts.iter().map(|p| p.needs.len()).sum();
        let covers = covers(used, core.directory.layers()[step.layer].experts);
        let mut lead = core.engine();
        let mut others = self.others();
        let Others { engines, bond } = &mut *others;
        let mut rows = Vec::new();
        let mut own = parts.remove(0);
        // Who serves nothing still goes along, so that what it has under way for this layer is settled.
        let sent = parts.iter().enumerate().map(|(member, part)| match part.assignments.is_empty() {
            true => Ok(step.x.clone()),
            false => bond.send(member, step.x),
        });
        let sent = sent.collect::<Result<Vec<_>>>().and_then(|sent| {
            // Before any of them changes anything.
            lead.reserve(&step.work(step.x))?;
            engines.iter_mut().zip(&sent).try_for_each(|(engine, x)| engine.reserve(&step.work(x)))?;
            Ok(sent)
        });
        let sent = match sent {
            // As with one device, the caller may find some memory and ask again.
            Err(e) if e.is_out_of_memory() => return Err(e),
            sent => sent,
        };
        let done = sent.and_then(|sent| {
            let mut work = engines.iter_mut().zip(parts).zip(sent).enumerate();
            work.try_for_each(|(member, ((engine, part), x))| {
                let Part { needs, choices, top_k, guess, assignments } = part;
                let done = engine.step_reserved(Step {
                    layer: step.layer,
                    needs,
                    choices: &choices,
                    top_k,
                    guess: &guess,
                    covers,
                    work: step.work(&x),
                    finish: Finish::Rows(&assignments),
                })?;
                if let Some(done) = done {
                    rows.push(Rows { rows: bond.bring(member, &done)?, assignments });
                }
                Ok(())
            })
        });
        let result = done.and_then(|()| {
            let finish = Finish::Result(&rows);
            let result = lead.step_reserved(Step {
                layer: step.layer,
                needs: std::mem::take(&mut own.needs),
                choices: &own.choices,
                top_k: own.top_k,
                guess: &own.guess,
                covers,
                work: step.work(step.x),
                finish,
            })?;
            if step.layer + 1 == core.directory.layers().len() {
                // What comes behind the last layer waits for it without a deadline.
                bond.settle()?;
            }
            result.ok_or_else(no_result)
        });
        if let Err(e) = &result {
            // Some devices may have gone further than others.
            lead.stop(e);
            engines.iter_mut().for_each(|engine| engine.stop(e));
        }
        result
    }

    /// Waits until the members have done what was asked of them, before the host waits for the first device.
    pub(super) fn settle(&self, core: &Core) -> Result<()> {
        core.engine().refuse_stopped()?;
        let settled = self.others().bond.settle();
        settled.inspect_err(|e| core.stop(e))
    }

    /// Enqueues one layer's step, driven by the devices.
    pub(super) fn device_step(&self, core: &Core, step: DeviceStep<'_>) -> Result<Tensor> {
        // Within a token its end reports.
        if !core.engine().is_in_token() {
            core.report_faults(false)?;
        }
        let mut lead = core.engine();
        let mut others = self.others();
        let Others { engines, bond } = &mut *others;
        let mut run = |lead: &mut Engine, engines: &mut [Engine]| {
            let mut all: Vec<&mut Engine> = std::iter::once(lead).chain(engines).collect();
            all.iter_mut().try_for_each(|engine| engine.begin_shared())?;
            let mut backends: Vec<_> = all.into_iter().map(Engine::shared_backend).collect();
            bond.step(&mut backends, step)
        };
        let mut shortages = Shortages::default();
        let result = loop {
            let result = run(&mut lead, engines);
            // Nothing has been enqueued. Who is short of memory has fewer slots from here on.
            let Err(error @ Error::OutOfDeviceMemory { device, .. }) = &result else { break result };
            let short = self.infos.iter().position(|info| info.device == *device).unwrap_or(0);
            let engine = if short == 0 { &mut *lead } else { &mut engines[short - 1] };
            if !shortages.is_new(error) || !engine.give_way(error)? {
                // As with one device, the caller may find some and ask again.
                return result;
            }
        };
        if let Err(e) = &result {
            lead.stop(e);
            engines.iter_mut().for_each(|engine| engine.stop(e));
        }
        result
    }
}

impl ExpertCache {
    /// Waits until `is_done` says yes: for something behind device-driven steps on the first device. Of several devices one
    /// that does not come back is named after the deadline and stops the cache, where waiting in the driver would hang.
    ///
    /// # Errors
    /// [`Error::DeviceLate`], and what `is_done` reports.
    pub fn wait_until(&self, mut is_done: impl FnMut() -> Result<bool>) -> Result<()> {
        let begun = Instant::now();
        while !is_done()? {
            if let Some(fleet) = &self.core.fleet
                // Twice: what the devices themselves find late comes first.
                && begun.elapsed() > 2 * fleet.deadline
            {
                let others = fleet.infos[1..].iter().map(|i| i.device.as_str()).collect::<Vec<_>>();
                let late = Error::DeviceLate { device: others.join(" or "), deadline: 2 * fleet.deadline };
                self.core.stop(&late);
                return Err(late);
            }
            std::thread::yield_now();
        }
        Ok(())
    }
}

impl Core {
    /// Calls `f` for every engine and what it owns, the first device's first.
    pub(super) fn each_engine<R>(
        &self,
        mut f: impl FnMut(&mut Engine, &Arc<dyn RecordSource>) -> R,
    ) -> Vec<R> {
        let mut lead = self.engine();
        let Some(fleet) = &self.fleet else { return vec![f(&mut lead, &self.source)] };
        let mut others = fleet.others();
        let engines = std::iter::once(&mut *lead).chain(others.engines.iter_mut());
        engines.zip(&fleet.sources).map(|(engine, source)| f(engine, source)).collect()
    }

    /// Hears what the devices stopped for: see [`Engine::report_fault`]. All of them stop for the same routing, and are
    /// told together that it was heard.
    pub(super) fn report_faults(&self, wait: bool) -> Result<()> {
        let mut heard = self.engine().report_fault(wait);
        if let Some(fleet) = &self.fleet
            && !matches!(heard, Err(Error::DeviceLate { .. }))
        {
            for engine in &mut fleet.others().engines {
                heard = heard.and(engine.report_fault(wait));
            }
        }
        self.heard_by_all(heard)
    }

    /// Nothing in any slot is trusted from here on.
    pub(super) fn stop(&self, why: &Error) {
        self.each_engine(|engine, _| engine.stop(why));
    }

    /// Whether the devices could drive such tokens: see [`Engine::device_fits`].
    pub(super) fn device_fits(&self, tokens: usize, top_k: usize) -> bool {
        self.each_engine(|engine, _| engine.device_fits(tokens, top_k)).into_iter().all(|fits| fits)
    }

    /// See [`Engine::begin_token`].
    pub(super) fn begin_token(&self, tokens: usize, top_k: usize) -> Result<bool> {
        let begun: Result<Vec<bool>> =
            self.each_engine(|engine, _| engine.begin_token(tokens, top_k)).into_iter().collect();
        let all = begun.as_ref().is_ok_and(|b| b.iter().all(|b| *b));
        if !all {
            self.leave_token();
        }
        self.heard_by_all(begun.map(|_| all))
    }

    /// See [`Engine::end_token`].
    pub(super) fn end_token(&self) -> Result<bool> {
        let ended: Result<Vec<bool>> = self.each_engine(|engine, _| engine.end_token()).into_iter().collect();
        self.heard_by_all(ended.map(|e| e.into_iter().all(|done| done)))
    }

    /// See [`Engine::leave_token`].
    pub(super) fn leave_token(&self) {
        self.each_engine(|engine, _| engine.leave_token());
    }

    /// What one device reports, the others need not report again.
    fn heard_by_all<R>(&self, result: Result<R>) -> Result<R> {
        match &result {
            _ if self.fleet.is_none() => {}
            Ok(_) => {}
            // Whoever is late is not waited for.
            Err(e @ Error::DeviceLate { .. }) => self.stop(e),
            Err(_) => {
                self.each_engine(|engine, _| engine.report_fault(true).err());
            }
        }
        result
    }

    /// By record of the model: see [`Engine::uses`].
    pub(super) fn uses(&self) -> Vec<u64> {
        let by_device = self.each_engine(|engine, _| engine.uses());
        let Some(fleet) = &self.fleet else { return by_device.into_iter().next().unwrap_or_default() };
        let layers = self.directory.layers().iter().enumerate();
        let of = |(ordinal, layer): (usize, &LayerEntry)| {
            let records = layer.first..layer.first + layer.experts as u32;
            records.map(move |r| (ordinal, RecordIndex(r))).collect::<Vec<_>>()
        };
        let used = |(ordinal, record): (usize, RecordIndex)| {
            let owner = fleet.placement.owner(record);
            let first = fleet.sources[owner].directory().layers()[ordinal].first;
            by_device[owner].get((first + fleet.placement.number(record)) as usize).copied().unwrap_or(0)
        };
        layers.flat_map(of).map(used).collect()
    }

    pub(super) fn stats(&self) -> CacheStats {
        let all = self.each_engine(|engine, _| engine.stats());
        match &self.fleet {
            None => {
                let tier = self.tier.as_ref().map(|tier| tier.stats());
                CacheStats { tier, ..all.into_iter().next().unwrap_or_default() }
            }
            Some(fleet) => summed(fleet.infos.iter().map(|i| i.device.clone()).zip(all)),
        }
    }
}

/// Counters of all devices as one cache's, and each one's own.
fn summed(all: impl Iterator<Item = (String, CacheStats)>) -> CacheStats {
    let mut sum = CacheStats::default();
    for (device, one) in all {
        sum.devices.push(DeviceStats {
            device,
            slots: one.slots,
            staging_slots: one.staging_slots,
            ring_slots: one.ring_slots,
            records: one.records,
            accesses: one.accesses(),
            hits: one.hits(),
            bytes_moved: one.bytes_moved,
        });
        sum.add(&one);
    }
    sum
}

pub(super) fn no_result() -> Error {
    Error::BadArgument { what: "step", reason: "it has no assignment".to_owned() }
}

/// Whether tensors on both are in the same memory, so that nothing need be brought from one to the other.
pub(super) fn share_memory(a: &Device, b: &Device) -> bool {
    a.is_cpu() && b.is_cpu()
}
