//! The simulated device drives steps itself: what a [`DeviceDriver`] promises, without a GPU.

use std::collections::HashMap;

use candle_core::{DType, Tensor};

use super::{Locking, SimBackend, SlotAccess};
use crate::backend::{
    Backend, DeviceCounters, DeviceDriver, DeviceLimits, DeviceStep, Fill, Queue, RoutingFault, STAGED_AHEAD,
    SlotId, StepFault, Ticket, Work, WorkItem,
};
use crate::error::{Error, Result};
use crate::policy::{EvictionPolicy, Lfru, Lru};
use crate::pool::{Pool, PoolShape, Residency};
use crate::predict::{Correlation, Learned, Predictor};
use crate::store::RecordIndex;

/// Most experts of a guess.
const MOST_GUESSED: usize = 32;
/// Bytes of tables for a record.
const TABLE_BYTES: u64 = 64 << 10;

/// The tables of a simulated device.
#[derive(Default)]
pub(super) struct Tables {
    pool: Option<Pool>,
    counters: Vec<DeviceCounters>,
    uses: Vec<u64>,
    fault: Option<StepFault>,
    /// Steps of the token under way that are done.
    done: u32,
    /// The next step 0 is not another token's.
    again: bool,
    /// Guesses are taken, and whether they are judged.
    ahead: Option<bool>,
    /// What they come from where a step has none, and the last ones by layer.
    learns: Option<Correlation>,
    guesses: Vec<Vec<u32>>,
    /// Layer, and its records that were brought for it.
    brought: (usize, Vec<RecordIndex>),
    /// Of the device's memory, where that is counted.
    pub(super) bytes: u64,
}

impl Tables {
    fn pool(&mut self) -> Result<&mut Pool> {
        let reason = "step before take_over".to_owned();
        self.pool.as_mut().ok_or(Error::BadArgument { what: "device driver", reason })
    }
}

impl Tables {
    /// Says what became of what was brought for `layer`, which missed `missed`.
    fn count_brought(&mut self, layer: usize, missed: &[(RecordIndex, Option<SlotId>)], record_bytes: u64) {
        let (of, brought) = std::mem::take(&mut self.brought);
        if of != layer || brought.is_empty() {
            return;
        }
        let right = brought.iter().filter(|&&b| missed.iter().any(|&(record, _)| record == b)).count() as u64;
        let (guessed, ahead) = (brought.len() as u64, &mut self.counters[layer].ahead);
        ahead.guessed += guessed;
        ahead.right += right;
        ahead.brought += guessed;
        ahead.used += right;
        ahead.bytes += guessed * record_bytes;
        ahead.saved_bytes += right * record_bytes;
        ahead.width = STAGED_AHEAD / 2;
    }
}

impl SimBackend {
    /// The step set in order of first use, with its assignments, or what is wrong with the routing.
    fn resolve(
        &self,
        step: &DeviceStep<'_>,
        weights: &[f32],
    ) -> Result<std::result::Result<Vec<WorkItem>, RoutingFault>> {
        let (layer, top_k) = (step.layer, step.ids.dims2()?.1);
        let entry = &self.source.directory().layers()[layer];
        if let Some(at) = weights.iter().position(|w| !w.is_finite()) {
            return Ok(Err(RoutingFault::BadWeight { layer, token: at / top_k, value: weights[at] }));
        }
        let mut items: Vec<WorkItem> = Vec::new();
        for (assignment, id) in (0u32..).zip(step.ids.flatten_all()?.to_vec1::<u32>()?) {
            if id as usize >= entry.experts {
                return Ok(Err(RoutingFault::UnknownExpert { layer, expert: id as usize }));
            }
            let record = RecordIndex(entry.first + id);
            match items.iter_mut().find(|i| i.record == record) {
                Some(item) => item.assignments.push(assignment),
                // Which slot it is in does not matter here: records are found by name.
                None => {
                    items.push(WorkItem { record, slot: super::SlotId(0), assignments: vec![assignment] });
                }
            }
        }
        Ok(Ok(items))
    }

    /// Brings the likeliest guesses for `layer` that are in no slot.
    fn look_ahead(&mut self, layer: usize, guess: &[u32]) -> Result<()> {
        let Some(entry) = self.source.directory().layers().get(layer) else { return Ok(()) };
        let (experts, first) = (entry.experts as u32, entry.first);
        let pool = self.tables.pool()?;
        let known = guess.iter().filter(|&&id| id < experts).map(|id| RecordIndex(first + id));
        let absent: Vec<_> = known.filter(|&r| pool.locate(r).is_none()).take(STAGED_AHEAD / 2).collect();
        self.tables.brought = (layer, absent);
        Ok(())
    }

    /// Learns from a step that was not learned from before; what that guesses for the next layer.
    fn learn_from(&mut self, layer: usize, ids: &[u32], top_k: usize) -> Option<Vec<u32>> {
        let layers = self.source.directory().layers().len();
        let tables = &mut self.tables;
        let table = tables.learns.as_mut()?;
        table.observe(layer, ids, top_k);
        if ids.len() > top_k || layer + 1 >= layers {
            return None;
        }
        let mut scored = Vec::new();
        table.predict(layer + 1, &mut scored);
        let guess: Vec<u32> = scored.iter().take(top_k.min(MOST_GUESSED)).map(|s| s.expert).collect();
        tables.guesses.resize(layers, Vec::new());
        tables.guesses[layer + 1].clone_from(&guess);
        Some(guess)
    }

    /// Whether only the host can bring a record.
    fn is_host_only(&self, record: RecordIndex) -> bool {
        self.host_only.is_some_and(|n| record.0.is_multiple_of(n))
            || self.locking.is_some_and(|locking| record.0 >= locking.locked)
    }
}

fn nothing(x: &Tensor) -> Result<Tensor> {
    let nan = Tensor::new(f32::NAN, x.device())?.to_dtype(DType::F32)?;
    Ok(nan.broadcast_as(x.shape())?.to_dtype(x.dtype())?.contiguous()?)
}

impl DeviceDriver for SimBackend {
    fn limits(&self) -> DeviceLimits {
        let left = |n| format!("one record in {n} is left to the host");
        let unlocked = self.locking.filter(|l| (l.locked as usize) < self.source.directory().len());
        let partial = match unlocked {
            Some(Locking { locked, .. }) => Some(format!("only {locked} records are page-locked")),
            None => self.host_only.map(left),
        };
        DeviceLimits { only_into_slots: partial.is_some(), partial, ahead: true, learns: true }
    }

    /// What is brought is counted and no more: here every record is as near as every other.
    fn fetch_ahead(&mut self, staging: &[SlotId], judged: bool) -> Result<()> {
        if staging.len() != STAGED_AHEAD {
            let reason = format!("{} staging slots, expected {STAGED_AHEAD}", staging.len());
            return Err(Error::BadArgument { what: "device driver", reason });
        }
        self.tables.ahead = Some(judged);
        Ok(())
    }

    fn learn(&mut self, learned: &Learned) -> Result<()> {
        let experts: Vec<usize> = self.source.directory().layers().iter().map(|l| l.experts).collect();
        let mut table = Correlation::new(&experts, 1);
        table.set_learned(learned)?;
        self.tables.learns = Some(table);
        Ok(())
    }

    fn learned(&mut self) -> Result<Learned> {
        let reason = "learned before learn".to_owned();
        let table = self.tables.learns.as_ref();
        table.map(Correlation::learned).ok_or(Error::BadArgument { what: "device driver", reason })
    }

    fn guesses(&mut self) -> Result<Vec<Vec<u32>>> {
        Ok(self.tables.guesses.clone())
    }

    fn take_over(&mut self, shape: &PoolShape, residency: &Residency) -> Result<()> {
        if let Some(&(record, _)) = residency.partitions.iter().flatten().next()
            && Queue::ALL.iter().any(|q| self.reached[q.index()] < self.enqueued[q.index()])
        {
            self.broken("the device took over before every queue was empty", record)?;
        }
        let records = self.source.directory().len();
        if let (Some(memory), 0) = (self.memory, self.tables.bytes) {
            let (device, what) = (self.info().device, "residency tables".to_owned());
            let (asked, free) = (TABLE_BYTES * records as u64, memory.saturating_sub(self.taken()));
            if asked > free {
                return Err(Error::OutOfDeviceMemory { device, what, asked, free, total: memory });
            }
            self.tables.bytes = asked;
        }
        let mut half_lives = residency.counts.iter().flat_map(|c| &c.half_lives);
        let policy = |_| -> Box<dyn EvictionPolicy> {
            match half_lives.next() {
                Some(&half_life) => Box::new(Lfru::new(half_life, records)),
                None => Box::new(Lru::new(records)),
            }
        };
        let mut pool = Pool::new(shape.clone(), records, policy);
        pool.restore(residency)?;
        self.tables.pool = Some(pool);
        (self.tables.done, self.tables.again) = (0, false);
        self.tables.counters.resize(self.source.directory().layers().len(), DeviceCounters::default());
        self.tables.uses.resize(records, 0);
        Ok(())
    }

    fn residency(&mut self) -> Result<Residency> {
        Ok(self.tables.pool()?.residency())
    }

    fn step(&mut self, step: DeviceStep<'_>) -> Result<Tensor> {
        // A tensor of the CPU is new each time: nothing is gained by room for it.
        let DeviceStep { layer, spec, layout, x, ids, weights, ordinal, room: _, guess } = step;
        let top_k = ids.dims2()?.1;
        let values = weights.flatten_all()?.to_vec1::<f32>()?;
        if self.tables.fault.is_some() {
            return nothing(x);
        }
        let items = match self.resolve(&step, &values)? {
            Ok(items) => items,
            Err(found) => {
                self.tables.fault = Some(StepFault::Routing(found));
                return nothing(x);
            }
        };
        let set: Vec<RecordIndex> = items.iter().map(|i| i.record).collect();
        if ordinal == 0 && !std::mem::take(&mut self.tables.again) {
            self.tables.done = 0;
        }
        let was_done = ordinal < self.tables.done;
        let pool = self.tables.pool()?;
        let missed = match was_done && set.iter().all(|&r| pool.locate(r).is_some()) {
            true => Vec::new(),
            false => {
                let missed = pool.access(layer, &set);
                let count = &mut self.tables.counters[layer];
                count.steps += 1;
                count.steps_with_miss += u64::from(!missed.is_empty());
                count.accesses += set.len() as u64;
                count.hits += (set.len() - missed.len()) as u64;
                set.iter().for_each(|r| self.tables.uses[r.0 as usize] += 1);
                self.tables.done = ordinal + 1;
                self.tables.count_brought(layer, &missed, layout.record_bytes as u64);
                let learned = self.learn_from(layer, &ids.flatten_all()?.to_vec1::<u32>()?, top_k);
                let guess = match guess {
                    Some(guess) => Some(guess.ids.flatten_all()?.to_vec1::<u32>()?),
                    None => learned,
                };
                if let (Some(guess), Some(_)) = (guess, self.tables.ahead) {
                    self.look_ahead(layer + 1, &guess)?;
                }
                missed
            }
        };
        if missed.iter().any(|&(record, _)| self.is_host_only(record)) {
            let fills = missed.into_iter().map(|(record, slot)| match slot {
                Some(slot) => Ok(Fill { record, slot }),
                None => {
                    let reason = "a set larger than its slots, with a record that only the host can bring";
                    Err(Error::BadArgument { what: "step", reason: reason.to_owned() })
                }
            });
            self.tables.fault = Some(StepFault::Missing(fills.collect::<Result<_>>()?));
            return nothing(x);
        }

        let bytes = layout.record_bytes;
        let mut unstored = HashMap::new();
        for (record, slot) in missed {
            let mut read = vec![0; bytes];
            self.source.read(record, &mut read)?;
            match slot {
                Some(slot) => {
                    self.check_memory(slot, record)?;
                    let slot = slot.0 as usize;
                    self.slab[slot * self.slot_bytes..][..bytes].copy_from_slice(&read);
                    self.slots[slot] = SlotAccess { filled: Ticket::DONE, read: 0, holds: Some(record) };
                }
                None => {
                    unstored.insert(record, read);
                }
            }
        }
        for &record in set.iter().filter(|r| !unstored.contains_key(r)) {
            let located = self.tables.pool()?.locate(record);
            let Some(SlotAccess { filled, holds, .. }) = located.map(|at| self.slots[at.slot.0 as usize])
            else {
                continue;
            };
            if holds != Some(record) || self.reached[filled.queue.index()] < filled.seq {
                self.broken("the device read a slot before the host had filled it", record)?;
            }
        }
        self.step.begin(Work::Ffn { spec, layout, x, weights: &values, top_k })?;
        let (pool, slab, slot_bytes) = (self.tables.pool.as_ref(), &self.slab, self.slot_bytes);
        let open = |item: &WorkItem| match pool.and_then(|p| p.locate(item.record)) {
            Some(at) => Ok(&slab[at.slot.0 as usize * slot_bytes..][..bytes]),
            None => Ok(&unstored[&item.record][..]),
        };
        self.step.run(self.source.directory(), &items, open)?;
        self.step.finish()
    }

    fn fault(&mut self, wait: bool) -> Result<Option<StepFault>> {
        // Without waiting it may not be known yet.
        let known = wait || self.draw().is_multiple_of(2);
        let fault = if known { self.tables.fault.take() } else { None };
        self.tables.again |= matches!(fault, Some(StepFault::Missing(_)));
        Ok(fault)
    }

    fn counters(&mut self) -> Result<Vec<DeviceCounters>> {
        let layers = self.source.directory().layers().len();
        self.tables.counters.resize(layers, DeviceCounters::default());
        Ok(self.tables.counters.clone())
    }

    fn uses(&mut self) -> Result<Vec<u64>> {
        Ok(self.tables.uses.clone())
    }
}
