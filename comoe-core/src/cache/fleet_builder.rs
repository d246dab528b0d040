//! From options, a store and several devices to a cache: shares by slots, an engine for each device, and what is between
//! them.

use std::sync::{Arc, Mutex};

use super::builder::{CacheBuilder, Made, MakeBackend, PoolSetup, driver_in_force, tell};
use super::fleet::{Fleet, Others, share_memory};
use super::{CacheOptions, Capacity, Core};
use crate::backend::bond::{Bond, BondOptions, SameMemory, Shared};
use crate::backend::{Backend, BackendInfo, DriverKind};
use crate::error::{Error, Result};
use crate::expert::{ExpertId, ExpertSpec};
use crate::placement::Placement;
use crate::plan::{Room, SlotPlan};
use crate::store::{ExpertStore, PartSource, RecordSource};

/// What one device is asked for.
struct Seat {
    /// Its number among the devices given.
    number: usize,
    capacity: Capacity,
    /// Slots that it would have if it owned every record: its weight.
    slots: usize,
}

impl CacheBuilder<ExpertStore> {
    pub(super) fn fleet(
        &self,
        source: Arc<dyn RecordSource>,
        specs: &[ExpertSpec],
        make: Option<MakeBackend<'_>>,
    ) -> Result<Core> {
        if self.backend.is_some() {
            let reason = "one for several devices: give them with build_with".to_owned();
            return Err(Error::BadArgument { what: "backend", reason });
        }
        if source.directory().is_empty() {
            return Err(Error::NoExperts { what: "the store".to_owned() });
        }
        if self.options.ram.is_some() {
            let reason =
                "several devices hold all experts in memory: leave the limit out, or use one".to_owned();
            return Err(Error::BadArgument { what: "ram", reason });
        }
        for &id in &self.options.pinned {
            source.directory().record(id)?;
        }
        let mut notes = Vec::new();
        let mut seats = self.seats(&source, &mut notes)?;
        // Ends: each time round some device has fewer slots.
        let (placement, sources, mut made) = loop {
            let weights: Vec<u64> = seats.iter().map(|s| s.slots as u64).collect();
            let placement = Placement::new(source.directory(), &weights);
            if let Some(idle) = (1..seats.len()).find(|&d| placement.owned(d) == 0) {
                notes.push(format!(
                    "{} has no share of the experts, and is not used",
                    self.name(&seats[idle])
                ));
                seats.remove(idle);
                continue;
            }
            match self.make_all(&source, &placement, &seats, make) {
                Ok((sources, made)) => break (placement, sources, made),
                Err((d, e)) => self.shrink(&mut seats, d, e, &mut notes)?,
            }
        };
        let device = self.devices.first()?.clone();
        let all = self.devices.as_slice();
        let mut bond: Box<dyn Bond> = match seats.iter().all(|s| share_memory(&device, &all[s.number])) {
            true => Box::new(SameMemory),
            false => {
                let mut backends: Vec<&mut dyn Backend> =
                    made.iter_mut().map(|m| m.engine.shared_backend()).collect();
                bond_of_gpus(&mut backends, self.bond)?
            }
        };
        let drives = self.drive_together(&mut made, &mut *bond, &source, &placement, specs);
        let mut infos: Vec<BackendInfo> = made.iter().map(|m| m.info.clone()).collect();
        for (m, info) in made.iter_mut().zip(&infos) {
            notes.extend(m.notes.drain(..).map(|note| format!("{}: {note}", info.device)));
        }
        let driver = driver_in_force(self.options.driver, &device, true, drives, &mut infos[0], &mut notes)?;
        infos[0].notes.extend(bond.notes());
        tell(&notes, &infos);
        let (takes_hints, policy) = (made.iter().any(|m| m.engine.takes_hints()), made[0].policy);
        let mut engines = made.into_iter().map(|m| m.engine);
        let Some(first) = engines.next() else {
            return Err(Error::BadArgument { what: "devices", reason: "none can be used".to_owned() });
        };
        Ok(Core {
            engine: Mutex::new(first),
            directory: Arc::new(source.directory().clone()),
            source,
            info: joined(&infos),
            notes,
            device,
            policy,
            driver,
            takes_hints,
            fetches_ahead: false,
            observer: Mutex::new(None),
            tier: None,
            fleet: Some(Fleet {
                placement,
                sources,
                infos,
                deadline: self.bond.deadline,
                others: Mutex::new(Others { engines: engines.collect(), bond }),
            }),
        })
    }

    fn name(&self, seat: &Seat) -> String {
        match self.devices.as_slice()[seat.number].location() {
            candle_core::DeviceLocation::Cpu => format!("device {} (cpu)", seat.number),
            candle_core::DeviceLocation::Cuda { gpu_id } => format!("device {} (cuda:{gpu_id})", seat.number),
            other => format!("device {} ({other:?})", seat.number),
        }
    }

    /// Memory of a device that its slots may take.
    fn room(&self, number: usize) -> Result<Option<Room>> {
        let all = self.devices.as_slice();
        let device = &all[number];
        let reserve = if number == 0 { self.options.reserve } else { self.reserve_elsewhere };
        let options = CacheOptions { reserve, ..self.options.clone() };
        let pools = all.iter().filter(|d| d.location() == device.location()).count();
        Ok(options.room(device)?.map(|room| Room { free: room.free / pools as u64, ..room }))
    }

    /// What each device is asked for, and gets as far as its memory goes.
    fn seats(&self, source: &Arc<dyn RecordSource>, notes: &mut Vec<String>) -> Result<Vec<Seat>> {
        let directory = source.directory();
        let slot_bytes = self.cuda.slot_bytes(directory);
        let mut seats = Vec::new();
        for number in 0..self.devices.as_slice().len() {
            let last = self.capacities.last().copied();
            let asked = self.capacities.get(number).copied().or(last).unwrap_or(self.options.capacity);
            let mut seat = Seat { number, capacity: asked, slots: 0 };
            let slots = self.room(number).and_then(|room| {
                // What the devices have together decides whether it is enough.
                let options = CacheOptions { capacity: asked, top_k: 0, ..self.options.clone() };
                // What does not fit is less and not refused.
                let limit = room.as_ref().filter(|_| asked == Capacity::Fit);
                let SlotPlan { slots, .. } = SlotPlan::new(&options, directory, slot_bytes, limit)?;
                Ok((
                    slots,
                    room.filter(|room| room.on_device)
                        .map_or(slots, |room| slots.min(room.slots(slot_bytes))),
                ))
            });
            match slots {
                Ok((slots, fit)) => {
                    // Of all experts a device need only have room for its share.
                    if fit < slots && !matches!(asked, Capacity::All | Capacity::Fit) {
                        notes.push(format!(
                            "{}: only {fit} of {slots} slots fit its memory",
                            self.name(&seat)
                        ));
                        seat.capacity = Capacity::Slots(fit);
                    }
                    seat.slots = fit;
                    seats.push(seat);
                }
                Err(e) if number == 0 => return Err(e),
                Err(e) => notes.push(format!("{} is not used: {e}", self.name(&seat))),
            }
        }
        let (slots, least) =
            (seats.iter().map(|s| s.slots).sum(), self.options.top_k.clamp(1, directory.len()));
        if slots < least {
            return Err(Error::TooFewSlots { asked: slots, least });
        }
        Ok(seats)
    }

    /// Makes every device's engine, or says which one failed.
    #[expect(clippy::type_complexity, reason = "used in one place")]
    fn make_all(
        &self,
        source: &Arc<dyn RecordSource>,
        placement: &Placement,
        seats: &[Seat],
        make: Option<MakeBackend<'_>>,
    ) -> std::result::Result<(Vec<Arc<dyn RecordSource>>, Vec<Made>), (usize, Error)> {
        let (mut sources, mut made) = (Vec::new(), Vec::new());
        for (d, seat) in seats.iter().enumerate() {
            let part = PartSource::new(source.clone(), |record| placement.owner(record) == d);
            let part: Arc<dyn RecordSource> = Arc::new(part);
            let engine = self.make_one(seat, &part, source.directory().len(), make);
            made.push(engine.map_err(|e| (d, e))?);
            sources.push(part);
        }
        Ok((sources, made))
    }

    fn make_one(
        &self,
        seat: &Seat,
        part: &Arc<dyn RecordSource>,
        records: usize,
        make: Option<MakeBackend<'_>>,
    ) -> Result<Made> {
        let owned = part.directory().len();
        let options = CacheOptions {
            capacity: match seat.capacity {
                // Of what it owns.
                Capacity::All | Capacity::Fraction(_) => Capacity::Slots(match seat.capacity {
                    Capacity::All => owned,
                    _ => seat.slots.min(owned),
                }),
                other => other,
            },
            pinned: {
                let here = |id: &&ExpertId| part.directory().record(**id).is_ok();
                self.options.pinned.iter().filter(here).copied().collect()
            },
            // On average a token uses so many of its experts.
            top_k: match self.options.top_k {
                0 => 0,
                k => (k * owned).div_ceil(records).min(owned),
            },
            ..self.options.clone()
        };
        let device = &self.devices.as_slice()[seat.number];
        let backend = make.map(|make| make(seat.number, part.clone())).transpose()?;
        let room = self.room(seat.number)?;
        let (cuda, rules) = (self.cuda.clone(), self.rules);
        PoolSetup { device, source: part, options: &options, room, cuda, rules, alone: false }
            .make(backend, true)
    }

    /// After device `d` of `seats` failed with `e`: gives it less, or leaves it out, and says so.
    fn shrink(&self, seats: &mut Vec<Seat>, d: usize, e: Error, notes: &mut Vec<String>) -> Result<()> {
        let name = self.name(&seats[d]);
        let seat = &mut seats[d];
        let less = match &e {
            Error::NoRoom { most, .. } | Error::OverBudget { most, .. } => {
                (*most).min(seat.slots.saturating_sub(1))
            }
            Error::OutOfDeviceMemory { .. } => seat.slots / 2,
            // What it has is too little to be of use.
            Error::TooFewSlots { .. } | Error::PoolTooSmall { .. } => 0,
            Error::Device { .. } | Error::Cuda { .. } | Error::HostMemory { .. } if d > 0 => 0,
            _ => return Err(e),
        };
        match less {
            0 if d == 0 => Err(e),
            0 => {
                notes.push(format!("{name} is not used: {e}"));
                seats.remove(d);
                Ok(())
            }
            less => {
                notes.push(format!("{name} has {less} slots instead of {}: {e}", seat.slots));
                (seat.slots, seat.capacity) = (less, Capacity::Slots(less));
                Ok(())
            }
        }
    }

    /// Whether all devices drive steps of few tokens, together.
    fn drive_together(
        &self,
        made: &mut [Made],
        bond: &mut dyn Bond,
        source: &Arc<dyn RecordSource>,
        placement: &Placement,
        specs: &[ExpertSpec],
    ) -> std::result::Result<(), String> {
        let one_by_one = made.iter().try_for_each(|m| {
            m.drives.clone()?;
            m.engine.device_is_partial().map_or(Ok(()), |why| Err(format!("{}: {why}", m.info.device)))
        });
        let together = one_by_one.and_then(|()| {
            let mut backends: Vec<&mut dyn Backend> =
                made.iter_mut().map(|m| m.engine.shared_backend()).collect();
            let shared = Shared { directory: source.directory(), placement, specs };
            bond.prepare_to_drive(&mut backends, &shared)
        });
        if together.is_err() {
            made.iter_mut().for_each(|m| m.engine.withdraw_device());
        }
        if self.options.driver == DriverKind::Host {
            return Err("the host driver was asked for".to_owned());
        }
        together
    }
}

#[cfg(feature = "cuda")]
fn bond_of_gpus(backends: &mut [&mut dyn Backend], options: BondOptions) -> Result<Box<dyn Bond>> {
    Ok(Box::new(crate::backend::cuda::Peers::new(backends, options)?))
}

#[cfg(not(feature = "cuda"))]
fn bond_of_gpus(_: &mut [&mut dyn Backend], _: BondOptions) -> Result<Box<dyn Bond>> {
    let reason = "several devices share a cache where all are CUDA devices, or all the CPU".to_owned();
    Err(Error::BadArgument { what: "devices", reason })
}

/// What all devices are, as one.
fn joined(infos: &[BackendInfo]) -> BackendInfo {
    let several =
        |info: &BackendInfo| info.notes.iter().map(|n| format!("{}: {n}", info.device)).collect::<Vec<_>>();
    BackendInfo {
        device: infos.iter().map(|i| i.device.as_str()).collect::<Vec<_>>().join(" and "),
        notes: infos.iter().flat_map(several).collect(),
        page_locked: infos.iter().map(|i| i.page_locked).sum(),
    }
}
