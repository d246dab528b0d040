//! How a cache is run: how many slots, who competes for them, what comes early.

use candle_core::{Device, DeviceLocation};

use crate::backend::cuda::cuda_memory;
use crate::backend::{DriverKind, no_driver};
use crate::error::{Error, Result};
use crate::expert::ExpertId;
use crate::machine;
use crate::plan::{Room, SlotPlan};
use crate::policy::PolicyKind;
use crate::pool::PoolShape;
use crate::predict::Prefetch;
use crate::schedule::{PrefetchTrigger, StreamPlan};
use crate::store::Directory;

/// How many records the pool holds.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[non_exhaustive]
pub enum Capacity {
    /// Every record: the resident run, the reference for exactness and speed.
    #[default]
    All,
    /// So many slots in all.
    Slots(usize),
    /// As many slots as fit this many bytes.
    Bytes(u64),
    /// This part of all records, 0 to 1.
    Fraction(f64),
    /// As many slots as fit the memory that is free on the device, less [`CacheOptions::reserve`].
    Fit,
}

/// Which records compete for a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Scope {
    /// Those of the same layer: each layer has slots of its own.
    #[default]
    Layer,
    /// All.
    Global,
}

impl std::fmt::Display for Scope {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Layer => "layer",
            Self::Global => "global",
        })
    }
}

impl std::str::FromStr for Scope {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self> {
        match s {
            "layer" => Ok(Self::Layer),
            "global" => Ok(Self::Global),
            _ => Err(Error::BadArgument {
                what: "scope",
                reason: format!("{s:?} is unknown: use layer or global"),
            }),
        }
    }
}

/// How a cache is run. What both kinds of cache have in common.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct CacheOptions {
    /// Slots.
    pub capacity: Capacity,
    /// Who leaves.
    pub policy: PolicyKind,
    /// Who competes.
    pub scope: Scope,
    /// Who is brought ahead of time.
    pub prefetch: Prefetch,
    /// When.
    pub prefetch_trigger: PrefetchTrigger,
    /// Most records that one row of a step uses (the model's top-k); 0 when it is not known. Fewer slots are
    /// refused.
    pub top_k: usize,
    /// Device memory that slots leave free, in bytes: for dense weights, KV cache and workspace that come later. On a
    /// GPU, slots that do not fit beside it are refused before anything is loaded.
    pub reserve: u64,
    /// The most device memory that slots and [`Self::reserve`] may take together, in bytes; what does not fit is refused,
    /// on the CPU too. Default: what is free.
    pub budget: Option<u64>,
    /// Experts that stay in slots for good, most wanted first: they are brought when the cache is built, and are never
    /// victims. As many as fit an eighth of the slots that a layer competes for; a token's worth stays free for the others.
    pub pinned: Vec<ExpertId>,
    /// Most host memory for records, in bytes; on the CPU slots are part of it, on a GPU page-locked memory is. Those that
    /// it does not hold stay where the source has them, and are brought as they are needed by threads of their own, with
    /// the policy of slots deciding who leaves. Default: no limit.
    pub ram: Option<u64>,
    /// Who drives a step.
    pub driver: DriverKind,
    /// Device memory for the ring that a prompt's records pass through, in bytes, on top of the slots; 0 is none, and
    /// nothing is sent for ahead of its layer. Default: on a GPU, room for as many records as a layer has (less where
    /// memory is short), elsewhere none. A pool with a slot for every record has none, and needs none.
    pub ring: Option<u64>,
}

impl CacheOptions {
    /// The memory that slots may take on `device`; `None` where nobody knows.
    ///
    /// # Errors
    /// When the device does not say.
    pub fn room(&self, device: &Device) -> Result<Option<Room>> {
        let room = |device: String, free, on_device| Room {
            device,
            free,
            budget: self.budget,
            reserve: self.reserve,
            on_device,
        };
        Ok(match device {
            Device::Cuda(_) => {
                let name = match device.location() {
                    DeviceLocation::Cuda { gpu_id } => format!("cuda:{gpu_id}"),
                    other => format!("{other:?}"),
                };
                Some(room(name, cuda_memory(device)?.0, true))
            }
            _ => match (machine::ram_available(), self.budget.or(self.ram)) {
                // What the page cache holds counts as taken there, so it is no end.
                (_, Some(_)) => Some(room("this machine".to_owned(), u64::MAX, false)),
                (free, None) => free.map(|free| room("this machine".to_owned(), free, false)),
            },
        })
    }

    /// Sees, before anything is loaded, that the driver asked for can be had on a GPU or on the CPU.
    ///
    /// # Errors
    /// [`Error::BadArgument`] where a device is to drive that cannot, in the words of building.
    pub fn check_driver(&self, on_gpu: bool) -> Result<()> {
        if self.driver != DriverKind::Device {
            return Ok(());
        }
        let policy = self.policy.in_force(false, true);
        match (policy.is_a_devices(), on_gpu) {
            (false, _) => Err(cannot_drive(&not_a_devices(policy))),
            (true, false) => Err(cannot_drive(&no_driver("cpu"))),
            (true, true) => Ok(()),
        }
    }

    /// As [`Self::room`], of the device with this number among several; those that are the same device share its memory.
    /// `budgets` are by device, the last for those behind it, and none is [`Self::budget`] for all.
    ///
    /// # Errors
    /// As [`Self::room`], and [`Error::BadArgument`] for a number that no device has.
    pub fn room_of(&self, devices: &[Device], number: usize, budgets: &[u64]) -> Result<Option<Room>> {
        let Some(device) = devices.get(number) else {
            let reason = format!("{number} of {} devices", devices.len());
            return Err(Error::BadArgument { what: "device", reason });
        };
        let budget = budgets.get(number).or(budgets.last()).copied().or(self.budget);
        let pools = devices.iter().filter(|d| d.location() == device.location()).count();
        let room = Self { budget, ..self.clone() }.room(device)?;
        Ok(room.map(|room| Room { free: room.free / pools as u64, ..room }))
    }
}

/// Why a device that was to drive does not.
pub(super) fn cannot_drive(reason: &str) -> Error {
    let reason = format!("the device cannot drive this cache: {reason}; use auto or host");
    Error::BadArgument { what: "driver", reason }
}

pub(super) fn not_a_devices(policy: PolicyKind) -> String {
    format!("the policy is {policy}, the device knows lru, lfru and aged")
}

/// What a cache will use: computed from the options and a directory alone.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Layout {
    pub(super) slots: SlotPlan,
    pub(super) shape: PoolShape,
    pub(super) prefetch: Prefetch,
    /// How prompts are served.
    pub(super) stream: StreamPlan,
    /// Slots that stay whatever is given up: those of one token.
    pub(super) least: usize,
    pub(super) notes: Vec<String>,
}

impl CacheOptions {
    pub(super) fn layout(
        &self,
        directory: &Directory,
        slot_bytes: usize,
        room: Option<&Room>,
    ) -> Result<Layout> {
        let plan = SlotPlan::new(self, directory, slot_bytes, room)?;
        let SlotPlan { slots, staging, ring } = plan;
        let experts: Vec<usize> = directory.layers().iter().map(|e| e.experts).collect();
        let mut notes = Vec::new();
        let resident = slots == directory.len();
        let mut prefetch = self.prefetch;
        if resident && prefetch != Prefetch::Off {
            prefetch = Prefetch::Off;
            notes.push("every expert has a slot, so nothing is prefetched".to_owned());
        }
        let one_token = experts.len() * self.top_k.max(1);
        let shape = if self.scope == Scope::Global {
            PoolShape::global(slots, experts.len(), staging)
        } else if slots < one_token && !resident {
            notes.push(format!(
                "{slots} slots are less than one token uses ({one_token}), too few to give every layer its own: all \
                 layers share one pool and will seldom hit; {one_token} slots or more would help"
            ));
            PoolShape::global(slots, experts.len(), staging)
        } else {
            PoolShape::by_layer(slots, &experts, staging)
        };
        let ahead = self.ring.map_or_else(|| room.is_some_and(|r| r.on_device), |bytes| bytes > 0);
        let stream = StreamPlan { ahead, ring_slots: ring };
        let top_k = self.top_k.max(1);
        let least = match shape.partitions.len() < experts.len() {
            true => top_k,
            false => experts.iter().map(|&n| n.min(top_k)).sum(),
        };
        Ok(Layout { slots: plan, shape, prefetch, stream, least, notes })
    }

    pub(crate) fn prefetch_width(&self) -> usize {
        self.top_k.max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SLOT: usize = 512;

    fn room(free: u64, reserve: u64, on_device: bool) -> Room {
        Room { device: "gpu".to_owned(), free, budget: None, reserve, on_device }
    }

    fn slots(options: &CacheOptions, free: u64, hard: bool) -> Result<usize> {
        let directory = Directory::new([(0, 8, SLOT), (1, 8, SLOT)]).unwrap();
        let room = room(free, options.reserve, hard);
        options.layout(&directory, SLOT, Some(&room)).map(|l| l.shape.slots())
    }

    #[test]
    fn as_many_slots_as_fit_leave_the_reserve_and_the_staging_slots_free() {
        let slot = SLOT as u64;
        let fit =
            CacheOptions { capacity: Capacity::Fit, top_k: 2, reserve: 1000, ..CacheOptions::default() };
        assert_eq!(slots(&fit, 1000 + 6 * slot, true).unwrap(), 6);
        assert_eq!(slots(&fit, 999 + 6 * slot, true).unwrap(), 5);
        assert_eq!(slots(&fit, 1000 + 99 * slot, true).unwrap(), 16, "no more than there are");
        let staged = CacheOptions { prefetch: Prefetch::Correlation, ..fit.clone() };
        assert_eq!(slots(&staged, 1000 + 7 * slot, true).unwrap(), 3, "four are for staging");
        assert_eq!(slots(&fit, 1000 + 15 * slot, true).unwrap(), 14, "one of eight is for the ring");
        let ring = CacheOptions { ring: Some(5 * slot), ..fit.clone() };
        assert_eq!(slots(&ring, 1000 + 15 * slot, true).unwrap(), 10, "as large as it was asked for");
        assert_eq!(slots(&staged, 1000 + 16 * slot, true).unwrap(), 16, "nothing is staged when all fit");
        for free in [0, 999, 1000 + slot] {
            let e = slots(&fit, free, true).unwrap_err();
            assert!(matches!(e, Error::NoRoom { slots: 2, .. }), "{e}");
        }
    }

    #[test]
    fn the_ring_takes_what_slots_leave_and_no_more_than_a_layer_unless_asked() {
        let directory = Directory::new([(0, 8, SLOT), (1, 8, SLOT)]).unwrap();
        let layout = |options: &CacheOptions, free: usize, hard| {
            let room = room((free * SLOT) as u64, 0, hard);
            options.layout(&directory, SLOT, Some(&room)).map(|l| (l.stream.ahead, l.stream.ring_slots))
        };
        let four = CacheOptions { capacity: Capacity::Slots(4), ..CacheOptions::default() };
        assert_eq!(layout(&four, 100, true).unwrap(), (true, 8));
        assert_eq!(layout(&four, 7, true).unwrap(), (true, 3));
        assert_eq!(layout(&four, 100, false).unwrap(), (false, 0), "nothing is gained in host memory");
        assert_eq!(
            layout(&CacheOptions::default(), 100, true).unwrap(),
            (true, 0),
            "every record has a slot"
        );
        for (bytes, want) in [(0, (false, 0)), (3 * SLOT as u64 + 7, (true, 3)), (u64::MAX, (true, 16))] {
            let asked = CacheOptions { ring: Some(bytes), ..four.clone() };
            assert_eq!(layout(&asked, 100, false).unwrap(), want);
        }
        let asked = CacheOptions { ring: Some(5 * SLOT as u64), ..four };
        assert!(matches!(layout(&asked, 8, true), Err(Error::NoRoom { slots: 9, .. })));
    }

    #[test]
    fn a_ring_that_nobody_asked_for_takes_nothing_from_the_fewest_slots() {
        let fit = CacheOptions { capacity: Capacity::Fit, top_k: 8, ..CacheOptions::default() };
        assert_eq!(slots(&fit, 8 * SLOT as u64, true).unwrap(), 8);
        let asked = CacheOptions { ring: Some(SLOT as u64), ..fit };
        let e = slots(&asked, 8 * SLOT as u64, true).unwrap_err();
        assert!(matches!(e, Error::NoRoom { slots: 9, ring: 1, staging: 0, most: 8, .. }), "{e}");
        assert!(e.to_string().contains("9 slots (8 for experts, 1 of the ring for prompts)"), "{e}");
    }

    #[test]
    fn a_driver_that_cannot_be_had_is_known_before_building() {
        let check = |driver, policy, on_gpu| {
            CacheOptions { driver, policy, ..CacheOptions::default() }.check_driver(on_gpu)
        };
        for driver in [DriverKind::Auto, DriverKind::Host] {
            assert!(check(driver, PolicyKind::Lfu, false).is_ok());
        }
        assert!(check(DriverKind::Device, PolicyKind::Auto, true).is_ok());
        for (policy, on_gpu) in
            [(PolicyKind::Auto, false), (PolicyKind::Lfu, true), (PolicyKind::Blend, true)]
        {
            let e = check(DriverKind::Device, policy, on_gpu).unwrap_err().to_string();
            assert!(e.contains("use auto or host"), "{e}");
        }
    }

    #[test]
    fn what_one_token_needs_stays() {
        let directory = Directory::new([(0, 8, SLOT), (1, 2, SLOT)]).unwrap();
        let least = |slots, scope| {
            let capacity = Capacity::Slots(slots);
            let options = CacheOptions { capacity, scope, top_k: 3, ..CacheOptions::default() };
            options.layout(&directory, SLOT, None).unwrap().least
        };
        assert_eq!(least(8, Scope::Layer), 5, "the second layer has no third expert");
        assert_eq!((least(8, Scope::Global), least(4, Scope::Layer)), (3, 3), "layers share their slots");
    }

    #[test]
    fn what_does_not_fit_a_gpu_is_refused_and_host_memory_is_no_hard_limit() {
        let options = CacheOptions { capacity: Capacity::Slots(8), reserve: 1000, ..CacheOptions::default() };
        let free = 1000 + 7 * SLOT as u64;
        let e = slots(&options, free, true).unwrap_err();
        assert!(matches!(e, Error::NoRoom { slots: 8, most: 7, .. }), "{e}");
        assert!(e.to_string().contains("7 slots fit"), "{e}");
        assert_eq!(slots(&options, free, false).unwrap(), 8);
        assert_eq!(slots(&options, free + SLOT as u64, true).unwrap(), 8);
    }
}
