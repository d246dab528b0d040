//! The simulated device drives steps itself: what a [`DeviceDriver`] promises, without a GPU.

use std::collections::HashMap;

use candle_core::{DType, Tensor};

use super::{QUEUES, SimBackend, SlotAccess, index};
use crate::backend::{DeviceCounters, DeviceDriver, DeviceStep, RoutingFault, Ticket, Work, WorkItem};
use crate::error::{Error, Result};
use crate::policy::Lru;
use crate::pool::{Pool, PoolShape, Residency};
use crate::store::RecordIndex;

/// The tables of a simulated device.
#[derive(Default)]
pub(super) struct Tables {
    pool: Option<Pool>,
    counters: Vec<DeviceCounters>,
    fault: Option<RoutingFault>,
}

impl Tables {
    fn pool(&mut self) -> Result<&mut Pool> {
        let reason = "step before take_over".to_owned();
        self.pool.as_mut().ok_or(Error::BadArgument { what: "device driver", reason })
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
}

impl DeviceDriver for SimBackend {
    fn take_over(&mut self, shape: &PoolShape, residency: &Residency) -> Result<()> {
        if let Some(&(record, _)) = residency.partitions.iter().flatten().next()
            && QUEUES.iter().any(|&q| self.reached[index(q)] < self.enqueued[index(q)])
        {
            self.broken("the device took over before every queue was empty", record)?;
        }
        let records = self.source.directory().len();
        let mut pool = Pool::new(shape.clone(), records, |_| Box::new(Lru::new(records)));
        pool.restore(residency)?;
        self.tables.pool = Some(pool);
        self.tables.counters.resize(self.source.directory().layers().len(), DeviceCounters::default());
        Ok(())
    }

    fn residency(&mut self) -> Result<Residency> {
        Ok(self.tables.pool()?.residency())
    }

    fn step(&mut self, step: DeviceStep<'_>) -> Result<Tensor> {
        let DeviceStep { layer, spec, layout, x, ids, weights } = step;
        let top_k = ids.dims2()?.1;
        let values = weights.flatten_all()?.to_vec1::<f32>()?;
        let items = match (self.tables.fault, self.resolve(&step, &values)?) {
            (None, Ok(items)) => items,
            (earlier, found) => {
                self.tables.fault = earlier.or(found.err());
                let nan = Tensor::new(f32::NAN, x.device())?.to_dtype(DType::F32)?;
                return Ok(nan.broadcast_as(x.shape())?.to_dtype(x.dtype())?.contiguous()?);
            }
        };
        let set: Vec<RecordIndex> = items.iter().map(|i| i.record).collect();
        let missed = self.tables.pool()?.access(layer, &set);
        let count = &mut self.tables.counters[layer];
        count.steps += 1;
        count.steps_with_miss += u64::from(!missed.is_empty());
        count.accesses += set.len() as u64;
        count.hits += (set.len() - missed.len()) as u64;

        let bytes = layout.record_bytes;
        let mut unstored = HashMap::new();
        for (record, slot) in missed {
            let mut read = vec![0; bytes];
            self.source.read(record, &mut read)?;
            match slot {
                Some(slot) => {
                    let slot = slot.0 as usize;
                    self.slab[slot * self.slot_bytes..][..bytes].copy_from_slice(&read);
                    self.slots[slot] = SlotAccess { filled: Ticket::DONE, read: 0, holds: Some(record) };
                }
                None => {
                    unstored.insert(record, read);
                }
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

    fn fault(&mut self, wait: bool) -> Result<Option<RoutingFault>> {
        // Without waiting it may not be known yet.
        let known = wait || self.draw().is_multiple_of(2);
        Ok(if known { self.tables.fault.take() } else { None })
    }

    fn counters(&mut self) -> Result<Vec<DeviceCounters>> {
        let layers = self.source.directory().layers().len();
        self.tables.counters.resize(layers, DeviceCounters::default());
        Ok(self.tables.counters.clone())
    }
}
