//! From options, a store and several devices to a cache: shares by slots, an engine for each device, and what is between
//! them.

use std::sync::{Arc, Mutex};

use super::builder::{CacheBuilder, Made, MakeBackend, PoolSetup, driver_in_force, tell};
use super::fleet::{Fleet, Others, share_memory};
use super::{CacheOptions, Capacity, Core};
use crate::backend::bond::{Bond, BondOptions, SameMemory, Shared};
use crate::backend::{Backend, BackendInfo, DriverKind};
use crate::error::{Error, Result};
use crate::expert::ExpertSpec;
use crate::placement::Placement;
use crate::plan::{Room, Seat, Seats};
use crate::store::{ExpertStore, PartSource, RecordSource};

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
        let slot_bytes = self.cuda.slot_bytes(source.directory());
        let asked = (0..self.devices.as_slice().len()).map(|n| (self.name(n), self.asked(n), self.room(n)));
        let mut seats = Seats::new(&self.options, source.directory(), slot_bytes, asked)?;
        // Ends: each time round some device has fewer slots.
        let (placement, sources, mut made) = loop {
            let placement = seats.placement();
            match self.make_all(&source, &placement, &seats, make) {
                Ok((sources, made)) => break (placement, sources, made),
                Err((d, e)) => seats.shrink(d, e)?,
            }
        };
        let Seats { seats, mut notes, .. } = seats;
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

    fn name(&self, number: usize) -> String {
        match self.devices.as_slice()[number].location() {
            candle_core::DeviceLocation::Cpu => format!("device {number} (cpu)"),
            candle_core::DeviceLocation::Cuda { gpu_id } => format!("device {number} (cuda:{gpu_id})"),
            other => format!("device {number} ({other:?})"),
        }
    }

    /// What a device is asked for.
    fn asked(&self, number: usize) -> Capacity {
        let last = self.capacities.last().copied();
        self.capacities.get(number).copied().or(last).unwrap_or(self.options.capacity)
    }

    /// Memory of a device that its slots may take.
    fn room(&self, number: usize) -> Result<Option<Room>> {
        let reserve = if number == 0 { self.options.reserve } else { self.reserve_elsewhere };
        let options = CacheOptions { reserve, ..self.options.clone() };
        options.room_of(self.devices.as_slice(), number, &self.budgets)
    }

    /// Makes every device's engine, or says which one failed.
    #[expect(clippy::type_complexity, reason = "used in one place")]
    fn make_all(
        &self,
        source: &Arc<dyn RecordSource>,
        placement: &Placement,
        seats: &Seats<'_>,
        make: Option<MakeBackend<'_>>,
    ) -> std::result::Result<(Vec<Arc<dyn RecordSource>>, Vec<Made>), (usize, Error)> {
        let (mut sources, mut made) = (Vec::new(), Vec::new());
        for (d, seat) in seats.seats.iter().enumerate() {
            let part = PartSource::new(source.clone(), |record| placement.owner(record) == d);
            let part: Arc<dyn RecordSource> = Arc::new(part);
            let options = seats.options(d, part.directory());
            let engine = self.make_one(seat, &part, &options, make);
            made.push(engine.map_err(|e| (d, e))?);
            sources.push(part);
        }
        Ok((sources, made))
    }

    fn make_one(
        &self,
        seat: &Seat,
        part: &Arc<dyn RecordSource>,
        options: &CacheOptions,
        make: Option<MakeBackend<'_>>,
    ) -> Result<Made> {
        let device = &self.devices.as_slice()[seat.number];
        let backend = make.map(|make| make(seat.number, part.clone())).transpose()?;
        let room = self.room(seat.number)?;
        let (cuda, rules) = (self.cuda.clone(), self.rules);
        PoolSetup { device, source: part, options, room, cuda, rules, alone: false }.make(backend, true)
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
