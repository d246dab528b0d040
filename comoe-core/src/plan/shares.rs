//! Several devices under one cache: what each is asked for, what it owns of the experts, and who takes what of its memory.
//! Caches are built by it, so a plan is what building will do.

use super::{DeviceBytes, MemoryPlan, Room, SlotPlan};
use crate::cache::{CacheOptions, Capacity};
use crate::error::{Error, Result};
use crate::expert::ExpertId;
use crate::placement::Placement;
use crate::store::Directory;

/// What one device is asked for.
#[derive(Debug, Clone)]
pub(crate) struct Seat {
    /// Its number among the devices given.
    pub(crate) number: usize,
    /// For messages.
    pub(crate) name: String,
    pub(crate) capacity: Capacity,
    /// Slots that it would have if it owned every record: its weight.
    pub(crate) slots: usize,
}

/// The devices that a cache is spread over, as far as they can be used.
#[derive(Debug)]
pub(crate) struct Seats<'a> {
    options: &'a CacheOptions,
    directory: &'a Directory,
    pub(crate) seats: Vec<Seat>,
    /// Whose share is less than was asked for, and why.
    pub(crate) notes: Vec<String>,
}

/// A device to be asked: its name, what it is asked for, and its memory, if anybody knows.
pub(crate) type Asked = (String, Capacity, Result<Option<Room>>);

impl<'a> Seats<'a> {
    /// What each device is asked for, and gets as far as its memory goes.
    ///
    /// # Errors
    /// What the first device's room or capacity reports; [`Error::TooFewSlots`] where all of them together have too few.
    pub(crate) fn new(
        options: &'a CacheOptions,
        directory: &'a Directory,
        slot_bytes: usize,
        devices: impl IntoIterator<Item = Asked>,
    ) -> Result<Self> {
        let (mut seats, mut notes) = (Vec::new(), Vec::new());
        for (number, (name, asked, room)) in devices.into_iter().enumerate() {
            let mut seat = Seat { number, name, capacity: asked, slots: 0 };
            let slots = room.and_then(|room| {
                // What the devices have together decides whether it is enough.
                let options = CacheOptions { capacity: asked, top_k: 0, ..options.clone() };
                // What does not fit is less and not refused.
                let limit = room.as_ref().filter(|_| asked == Capacity::Fit);
                let SlotPlan { slots, .. } = SlotPlan::new(&options, directory, slot_bytes, limit)?;
                let room = room.filter(|room| room.on_device);
                Ok((slots, room.map_or(slots, |room| slots.min(room.slots(slot_bytes)))))
            });
            match slots {
                Ok((slots, fit)) => {
                    // Of all experts a device need only have room for its share.
                    if fit < slots && !matches!(asked, Capacity::All | Capacity::Fit) {
                        notes.push(format!("{}: only {fit} of {slots} slots fit its memory", seat.name));
                        seat.capacity = Capacity::Slots(fit);
                    }
                    seat.slots = fit;
                    seats.push(seat);
                }
                Err(e) if number == 0 => return Err(e),
                Err(e) => notes.push(format!("{} is not used: {e}", seat.name)),
            }
        }
        let (slots, least) =
            (seats.iter().map(|s| s.slots).sum(), options.top_k.clamp(1, directory.len().max(1)));
        if slots < least {
            return Err(Error::TooFewSlots { asked: slots, least });
        }
        Ok(Self { options, directory, seats, notes })
    }

    /// Who owns which record. A device without any is left out.
    pub(crate) fn placement(&mut self) -> Placement {
        loop {
            let weights: Vec<u64> = self.seats.iter().map(|s| s.slots as u64).collect();
            let placement = Placement::new(self.directory, &weights);
            let Some(idle) = (1..self.seats.len()).find(|&d| placement.owned(d) == 0) else {
                return placement;
            };
            let name = self.seats.remove(idle).name;
            self.notes.push(format!("{name} has no share of the experts, and is not used"));
        }
    }

    /// How the cache of seat `d` is run, which owns `part`.
    pub(crate) fn options(&self, d: usize, part: &Directory) -> CacheOptions {
        let (seat, owned) = (&self.seats[d], part.len());
        CacheOptions {
            capacity: match seat.capacity {
                // Of what it owns.
                Capacity::All => Capacity::Slots(owned),
                Capacity::Fraction(_) => Capacity::Slots(seat.slots.min(owned)),
                other => other,
            },
            pinned: {
                let here = |id: &&ExpertId| part.record(**id).is_ok();
                self.options.pinned.iter().filter(here).copied().collect()
            },
            // On average a token uses so many of its experts.
            top_k: match self.options.top_k {
                0 => 0,
                k => (k * owned).div_ceil(self.directory.len()).min(owned),
            },
            ..self.options.clone()
        }
    }

    /// After seat `d` failed with `e`: gives it less, or leaves it out, and says so.
    ///
    /// # Errors
    /// `e`, where nothing less would do.
    pub(crate) fn shrink(&mut self, d: usize, e: Error) -> Result<()> {
        let seat = &mut self.seats[d];
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
                self.notes.push(format!("{} is not used: {e}", seat.name));
                self.seats.remove(d);
                Ok(())
            }
            less => {
                self.notes.push(format!("{} has {less} slots instead of {}: {e}", seat.name, seat.slots));
                (seat.slots, seat.capacity) = (less, Capacity::Slots(less));
                Ok(())
            }
        }
    }
}

/// What one of several devices brings, and what it is to hold besides experts.
#[derive(Debug, Clone, PartialEq)]
pub struct DeviceNeeds {
    /// Its memory; the reserve does not count.
    pub room: Room,
    /// How many experts it is to hold.
    pub capacity: Capacity,
    /// Everything but slots.
    pub others: DeviceBytes,
    /// Kept for what cannot be computed.
    pub margin: u64,
}

/// One device's part of a [`SharedPlan`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DevicePlan {
    /// Its number among the devices given.
    pub number: usize,
    /// Who takes what of its memory; experts and arena are those that it owns.
    pub memory: MemoryPlan,
}

/// Memory of a run over several devices, before anything is loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SharedPlan {
    /// Those that have a share of the experts, the first given first.
    pub devices: Vec<DevicePlan>,
    /// Whose share is less than was asked for, and why.
    pub notes: Vec<String>,
}

impl SharedPlan {
    /// Shares out the experts of `directory` by slots, and each device's memory as [`MemoryPlan::new`] does. A device that
    /// has too little memory has a smaller share, or none, and `notes` say so.
    ///
    /// # Errors
    /// As [`MemoryPlan::new`] has of the first device, and [`Error::TooFewSlots`] where all together have too few.
    pub fn new(
        devices: &[DeviceNeeds],
        options: &CacheOptions,
        directory: &Directory,
        slot_bytes: usize,
    ) -> Result<Self> {
        let needs = |n: &DeviceNeeds| (n.others, n.margin);
        let room = |n: &DeviceNeeds| {
            let reserve = n.others.total().saturating_add(n.margin);
            Room { reserve, ..n.room.clone() }
        };
        let asked = devices
            .iter()
            .enumerate()
            .map(|(d, n)| (format!("device {d} ({})", n.room.device), n.capacity, Ok(Some(room(n)))));
        let mut seats = Seats::new(options, directory, slot_bytes, asked)?;
        // Ends: each time round some device has fewer slots.
        loop {
            let placement = seats.placement();
            let plan = |(d, seat): (usize, &Seat)| {
                let (part, _) = directory.part(|record| placement.owner(record) == d);
                let device = &devices[seat.number];
                let options = seats.options(d, &part);
                let memory = MemoryPlan::new(&device.room, needs(device), &options, &part, slot_bytes);
                memory.map(|memory| DevicePlan { number: seat.number, memory }).map_err(|error| (d, error))
            };
            let plans: std::result::Result<Vec<_>, _> = seats.seats.iter().enumerate().map(plan).collect();
            match plans {
                Ok(devices) => return Ok(Self { devices, notes: seats.notes }),
                Err((d, error)) => seats.shrink(d, error)?,
            }
        }
    }

    /// Slots of all devices.
    pub fn slots(&self) -> usize {
        self.devices.iter().map(|d| d.memory.slots.slots).sum()
    }

    /// Experts of all devices.
    pub fn experts(&self) -> usize {
        self.devices.iter().map(|d| d.memory.experts).sum()
    }

    /// The part of the experts that has a slot, 0 to 1.
    pub fn share(&self) -> f64 {
        self.slots() as f64 / self.experts().max(1) as f64
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SLOT: usize = 512;

    fn device(budget: u64, dense: u64) -> DeviceNeeds {
        let room = Room {
            device: "gpu".to_owned(),
            free: u64::MAX,
            budget: Some(budget),
            reserve: 0,
            on_device: true,
        };
        let others = DeviceBytes { dense, ..DeviceBytes::default() };
        DeviceNeeds { room, capacity: Capacity::Fit, others, margin: 0 }
    }

    fn directory() -> Directory {
        Directory::new((0..4).map(|layer| (layer, 16, SLOT))).unwrap()
    }

    fn options() -> CacheOptions {
        CacheOptions { capacity: Capacity::Fit, top_k: 4, ring: Some(0), ..CacheOptions::default() }
    }

    fn plan(devices: &[DeviceNeeds]) -> Result<SharedPlan> {
        SharedPlan::new(devices, &options(), &directory(), SLOT)
    }

    #[test]
    fn the_dense_part_is_the_firsts_and_experts_go_where_slots_are() {
        let slots = |n: u64| n * SLOT as u64;
        let both = plan(&[device(slots(24), slots(8)), device(slots(16), 0)]).unwrap();
        let of = |d: usize| (both.devices[d].memory.slots.slots, both.devices[d].memory.experts);
        assert_eq!((of(0), of(1)), ((16, 32), (16, 32)));
        assert_eq!((both.slots(), both.share()), (32, 0.5));
        assert_eq!(both.devices[0].memory.device.dense, slots(8));
        assert!(both.notes.is_empty(), "{:?}", both.notes);
        // A card three times as large owns three times as much.
        let uneven = plan(&[device(slots(8), 0), device(slots(24), 0)]).unwrap();
        let owned: Vec<_> = uneven.devices.iter().map(|d| d.memory.experts).collect();
        assert_eq!(owned, [16, 48]);
    }

    #[test]
    fn a_device_with_too_little_is_left_out_aloud_and_the_first_is_not() {
        let slots = |n: u64| n * SLOT as u64;
        let one = plan(&[device(slots(24), slots(8)), device(slots(1) - 1, 0)]).unwrap();
        assert_eq!((one.devices.len(), one.devices[0].memory.experts), (1, 64));
        assert!(one.notes[0].contains("device 1 (gpu)"), "{:?}", one.notes);
        let none = plan(&[device(slots(8) - 1, slots(8)), device(slots(24), 0)]);
        assert!(matches!(none, Err(Error::OverBudget { .. })), "{none:?}");
    }

    proptest! {
        /// No device takes more than its budget, every expert has an owner, and no slot is without one.
        #[test]
        fn every_device_keeps_to_its_budget(
            budgets in prop::collection::vec(0u64..80, 1..4),
            dense in 0u64..30,
            margin in 0u64..1000,
            asked in prop::option::of(1usize..40),
            ring in prop::option::of(0u64..6),
        ) {
            let mut devices: Vec<_> = budgets.iter().map(|b| device(b * SLOT as u64, 0)).collect();
            devices[0].others.dense = dense * SLOT as u64;
            for d in &mut devices {
                d.margin = margin;
                d.capacity = asked.map_or(Capacity::Fit, Capacity::Slots);
            }
            let options = CacheOptions { ring: ring.map(|r| r * SLOT as u64), ..options() };
            let Ok(plan) = SharedPlan::new(&devices, &options, &directory(), SLOT) else { return Ok(()) };
            prop_assert_eq!(plan.devices[0].number, 0);
            prop_assert_eq!(plan.devices.iter().map(|d| d.memory.experts).sum::<usize>(), 64);
            for d in &plan.devices {
                let budget = budgets[d.number] * SLOT as u64;
                prop_assert!(d.memory.device.total() + margin <= budget);
                prop_assert!(d.memory.slots.slots <= d.memory.experts && d.memory.experts > 0);
            }
        }
    }
}
