//! How much fits? From an amount of device memory to slots, who takes what, and how fast that may be. Pure: no device
//! types, no threads, no clocks.

mod shares;
mod speed;
mod tier;

use serde::{Deserialize, Serialize};

pub use shares::{DeviceNeeds, DevicePlan, SharedPlan};
pub(crate) use shares::{Seat, Seats};
pub use speed::{Bandwidths, HitRates, STEP_OVERHEAD_US, TokenBytes, TokensPerSecond};
pub(crate) use tier::places;

use crate::backend::STAGED_AHEAD;
use crate::cache::{CacheOptions, Capacity};
use crate::error::{Error, Result};
use crate::predict::Prefetch;
use crate::store::Directory;

/// Without being asked, the ring takes no more than this part of the slots' memory.
const MOST_OF_SLOTS: usize = 8;

/// Memory that slots may take.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Room {
    /// Whose, for messages.
    pub device: String,
    /// Bytes free there.
    pub free: u64,
    /// The most that may be taken of them, where that was asked for: see [`CacheOptions::budget`].
    pub budget: Option<u64>,
    /// Bytes that go to others than slots.
    pub reserve: u64,
    /// It is a device's, with a hard end, and no host memory, which holds the page cache too.
    pub on_device: bool,
}

impl Room {
    /// Bytes for all slots.
    fn bytes(&self) -> u64 {
        self.free.min(self.budget.unwrap_or(u64::MAX)).saturating_sub(self.reserve)
    }

    /// Slots of `slot_bytes` that fit.
    pub fn slots(&self, slot_bytes: usize) -> usize {
        usize::try_from(self.bytes() / slot_bytes.max(1) as u64).unwrap_or(usize::MAX)
    }

    /// Whether more than fits is refused.
    fn is_hard(&self) -> bool {
        self.on_device || self.budget.is_some()
    }

    fn refuse(&self, wanted: SlotPlan, slot_bytes: usize) -> Error {
        let SlotPlan { staging, ring, .. } = wanted;
        let slots = wanted.all();
        let (asked, most) = ((slots as u64).saturating_mul(slot_bytes as u64), self.slots(slot_bytes));
        match self.budget.filter(|budget| *budget < self.free) {
            Some(budget) => {
                let device = self.device.clone();
                Error::OverBudget { device, slots, staging, ring, asked, budget, reserve: self.reserve, most }
            }
            None => Error::NoRoom {
                device: self.device.clone(),
                slots,
                staging,
                ring,
                asked,
                free: self.free,
                reserve: self.reserve,
                most,
            },
        }
    }
}

/// Slots by what they are for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct SlotPlan {
    /// Those that records stay in.
    pub slots: usize,
    /// Those of what is prefetched, on top.
    #[serde(rename = "staging_slots")]
    pub staging: usize,
    /// Those that a prompt's records pass through, on top.
    #[serde(rename = "ring_slots")]
    pub ring: usize,
}

impl SlotPlan {
    /// All of them together.
    pub(crate) fn all(&self) -> usize {
        self.slots + self.staging + self.ring
    }

    /// The slots of `slot_bytes` that a cache with these options makes for the records of `directory`; `room` is `None`
    /// where nobody knows. In host memory [`CacheOptions::ram`] bounds them, too.
    ///
    /// # Errors
    /// [`Error::NoRoom`] or [`Error::OverBudget`] where what was asked for, or the least that works, does not fit;
    /// [`Error::TooFewSlots`], [`Error::PoolTooSmall`] and [`Error::BadArgument`] for a capacity that does not work
    /// anywhere.
    pub fn new(
        options: &CacheOptions,
        directory: &Directory,
        slot_bytes: usize,
        room: Option<&Room>,
    ) -> Result<Self> {
        let Some(narrowed) = room.and_then(|room| tier::narrowed(options, directory, room)) else {
            return Self::within(options, directory, slot_bytes, room);
        };
        match Self::within(options, directory, slot_bytes, Some(&narrowed)) {
            // As many as fit are too few: the fewest that work say what they need.
            Err(Error::NoRoom { slots, staging, ring, .. }) => {
                let slots = slots - staging - ring;
                let fewest = CacheOptions { capacity: Capacity::Slots(slots), ..options.clone() };
                let plan = Self::within(&fewest, directory, slot_bytes, Some(&narrowed))?;
                places(&fewest, directory, plan, slot_bytes, false).map(|_| plan)
            }
            plan => plan,
        }
    }

    fn within(
        options: &CacheOptions,
        directory: &Directory,
        slot_bytes: usize,
        room: Option<&Room>,
    ) -> Result<Self> {
        let this = Shares { options, directory, slot_bytes, room };
        let slots = this.slots()?;
        let resident = slots == directory.len();
        let staging = if resident { 0 } else { this.staging() };
        let ring = match (options.capacity, room) {
            (Capacity::Fit, Some(room)) if !resident => this.ring_of_fit(room.slots(slot_bytes)),
            _ => this.ring(slots + staging),
        };
        let wanted = Self { slots, staging, ring };
        match room.filter(|room| room.is_hard() && room.slots(slot_bytes) < wanted.all()) {
            Some(room) => Err(room.refuse(wanted, slot_bytes)),
            None => Ok(wanted),
        }
    }
}

/// What slots are shared out by.
struct Shares<'a> {
    options: &'a CacheOptions,
    directory: &'a Directory,
    slot_bytes: usize,
    room: Option<&'a Room>,
}

impl Shares<'_> {
    /// Slots that records stay in.
    fn slots(&self) -> Result<usize> {
        let (options, all, least) = (self.options, self.directory.len(), self.least());
        if options.capacity == Capacity::Fit {
            let Some(room) = self.room else { return Ok(all) };
            let fit = room.slots(self.slot_bytes);
            // With a slot for every record nothing is staged or streamed.
            let (staging, ring) = (self.staging(), self.ring_of_fit(fit));
            let slots = if fit >= all { all } else { fit.saturating_sub(staging + ring) };
            let fewest = SlotPlan { slots: least, staging, ring };
            return if slots < least { Err(room.refuse(fewest, self.slot_bytes)) } else { Ok(slots) };
        }
        let slot_bytes = self.slot_bytes as u64;
        let slots = match options.capacity {
            Capacity::All | Capacity::Fit => all,
            Capacity::Slots(n) => n,
            Capacity::Bytes(bytes) => usize::try_from(bytes / slot_bytes).unwrap_or(usize::MAX),
            Capacity::Fraction(f) if f > 0.0 && f <= 1.0 => (all as f64 * f).round() as usize,
            Capacity::Fraction(f) => {
                let reason = format!("a fraction of the experts must be above 0 and at most 1, not {f}");
                return Err(Error::BadArgument { what: "capacity", reason });
            }
        };
        match options.capacity {
            Capacity::Bytes(asked) if slots < least => Err(Error::PoolTooSmall {
                asked,
                record_bytes: self.slot_bytes,
                least: least as u64 * slot_bytes,
                slots: least,
            }),
            _ if slots < least => Err(Error::TooFewSlots { asked: slots, least }),
            _ => Ok(slots.min(all)),
        }
    }

    /// The fewest slots that work.
    fn least(&self) -> usize {
        self.options.top_k.clamp(1, self.directory.len().max(1))
    }

    /// Staging slots, unless every record has a slot.
    fn staging(&self) -> usize {
        match self.options.prefetch {
            Prefetch::Off => 0,
            // Room for what was guessed for this layer and for the next, whoever drives.
            Prefetch::Correlation | Prefetch::StaleGate | Prefetch::Auto => {
                (2 * self.options.prefetch_width()).max(STAGED_AHEAD)
            }
        }
    }

    /// Slots of the ring beside `slots` others.
    fn ring(&self, slots: usize) -> usize {
        let all = self.directory.len();
        if slots >= all {
            return 0;
        }
        let left = self.room.map_or(usize::MAX, |room| room.slots(self.slot_bytes).saturating_sub(slots));
        match self.options.ring {
            Some(bytes) => usize::try_from(bytes / self.slot_bytes as u64).unwrap_or(usize::MAX).min(all),
            // Where records are in the same memory anyway, nothing is gained.
            None if self.room.is_none_or(|room| !room.on_device) => 0,
            None => self.directory.layers().iter().map(|e| e.experts).max().unwrap_or(0).min(left),
        }
    }

    /// Slots of the ring, when `fit` are shared out.
    fn ring_of_fit(&self, fit: usize) -> usize {
        let wanted = self.ring(0);
        if self.options.ring.is_some() {
            return wanted;
        }
        // Without being asked it takes nothing from the fewest that work.
        let needed = self.least() + self.staging();
        wanted.min(fit / MOST_OF_SLOTS).min(fit.saturating_sub(needed))
    }
}

/// Device memory by owner, in bytes: planned, or measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct DeviceBytes {
    /// Weights outside the experts.
    pub dense: u64,
    /// Keys and values of the sequences.
    pub kv: u64,
    /// Activations of the largest step.
    pub workspace: u64,
    /// What steps of few tokens use again and again: results, rotary and residency tables, the sampler's.
    pub buffers: u64,
    /// Experts' slots.
    pub slots: u64,
    /// Slots for what is prefetched.
    pub staging: u64,
    /// Slots that a prompt's experts pass through.
    pub ring: u64,
}

impl DeviceBytes {
    /// Their names, as they are told, and values.
    pub fn by_owner(&self) -> [(&'static str, u64); 7] {
        [
            ("dense", self.dense),
            ("kv", self.kv),
            ("workspace", self.workspace),
            ("buffers", self.buffers),
            ("slots", self.slots),
            ("staging", self.staging),
            ("ring", self.ring),
        ]
    }

    /// All of them.
    pub fn total(&self) -> u64 {
        self.by_owner().iter().map(|(_, bytes)| bytes).fold(0, |sum, &bytes| sum.saturating_add(bytes))
    }

    /// With the bytes of these slots.
    #[must_use]
    pub fn with_slots(self, plan: SlotPlan, slot_bytes: usize) -> Self {
        let bytes = |slots: usize| slots as u64 * slot_bytes as u64;
        Self { slots: bytes(plan.slots), staging: bytes(plan.staging), ring: bytes(plan.ring), ..self }
    }
}

/// The driver's pool, which allocations of candle come from, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct PoolBytes {
    /// In use.
    pub used: u64,
    /// The most that was.
    pub used_peak: u64,
    /// Taken from the device, in use or not.
    pub reserved: u64,
    /// The most that was.
    pub reserved_peak: u64,
}

/// Memory of a run: who takes what, before anything is loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryPlan {
    /// Device memory that the run may take, in bytes; on a CPU without a budget, host memory that is free, or
    /// [`CacheOptions::ram`] and what is needed besides.
    pub budget: u64,
    /// Who takes what of it.
    pub device: DeviceBytes,
    /// Of it, kept for what cannot be computed.
    pub margin: u64,
    /// Slots.
    pub slots: SlotPlan,
    /// Bytes of a slot.
    pub slot_bytes: usize,
    /// Experts in all.
    pub experts: usize,
    /// Bytes of experts' records in host memory, slots not counted: all of them, or as many as
    /// [`CacheOptions::ram`] has places for.
    pub arena: u64,
}

impl MemoryPlan {
    /// Shares out the memory of `room` (its own reserve does not count): what `others` (slots left out) and `margin` leave
    /// goes to slots, as `options` say.
    ///
    /// # Errors
    /// As [`SlotPlan::new`]; [`Error::BadArgument`] for less [`CacheOptions::ram`] than works.
    pub fn new(
        room: &Room,
        (others, margin): (DeviceBytes, u64),
        options: &CacheOptions,
        directory: &Directory,
        slot_bytes: usize,
    ) -> Result<Self> {
        let room = Room { reserve: others.total().saturating_add(margin), ..room.clone() };
        let slots = SlotPlan::new(options, directory, slot_bytes, Some(&room))?;
        let places = places(options, directory, slots, slot_bytes, room.on_device)?;
        let ram = options.ram.filter(|_| !room.on_device);
        let with_ram = ram.map_or(u64::MAX, |ram| ram.saturating_add(room.reserve));
        Ok(Self {
            budget: room.free.min(room.budget.unwrap_or(u64::MAX)).min(with_ram),
            device: others.with_slots(slots, slot_bytes),
            margin,
            slots,
            slot_bytes,
            experts: directory.len(),
            arena: match places {
                Some(places) => places as u64 * directory.largest_record() as u64,
                None => directory.total_bytes(),
            },
        })
    }

    /// The part of the experts that has a slot, 0 to 1.
    pub fn share(&self) -> f64 {
        self.slots.slots as f64 / self.experts.max(1) as f64
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::expert::{ExpertLayout, ExpertSpec};
    use crate::format::ExpertFormat;

    fn room(budget: u64, on_device: bool) -> Room {
        Room { device: "gpu".to_owned(), free: u64::MAX, budget: Some(budget), reserve: 0, on_device }
    }

    /// The design's example: a card of 24 GB, 6 GB of dense weights and 4 GB of KV cache leave 14 GB; an expert of hidden
    /// 4096 and intermediate 14336 in two bytes a weight is three matrices of 117 MB, so 39 fit.
    #[test]
    fn a_card_of_24_gb_holds_39_experts_of_352_mb() {
        const GB: u64 = 1_000_000_000;
        let layout = ExpertLayout::new(&ExpertSpec::swiglu(4096, 14336), ExpertFormat::Bf16);
        assert_eq!(layout.record_bytes, 352_321_536);
        let directory = Directory::new((0..32).map(|l| (l, 8, layout.record_bytes))).unwrap();
        let options = CacheOptions { capacity: Capacity::Fit, top_k: 2, ring: Some(0), ..Default::default() };
        let others = DeviceBytes { dense: 6 * GB, kv: 4 * GB, ..Default::default() };
        let plan = |budget: u64| {
            MemoryPlan::new(&room(budget, true), (others, 0), &options, &directory, layout.record_bytes)
        };
        let planned = plan(24 * GB).unwrap();
        assert_eq!((planned.slots.slots, planned.experts), (39, 256));
        assert_eq!(planned.device.total(), 10 * GB + 39 * 352_321_536);
        assert!(planned.device.total() <= 24 * GB && planned.arena == 256 * 352_321_536);
        // Too little for the two experts of a token.
        let e = plan(10 * GB + 2 * 352_321_536 - 1).unwrap_err().to_string();
        assert!(e.contains("2 slots") && e.contains("1 slots fit"), "{e}");
        assert!(plan(9 * GB).unwrap_err().to_string().contains("0 slots fit"));
    }

    proptest! {
        /// A plan never takes more than the budget, and one slot more would not fit.
        #[test]
        fn a_plan_keeps_to_its_budget_and_leaves_less_than_a_slot(
            budget in 0u64..4_000_000,
            dense in 0u64..1_000_000,
            kv in 0u64..500_000,
            margin in 0u64..100_000,
            record in 1usize..40,
            staged in any::<bool>(),
            ring in prop::option::of(0u64..200_000),
            asked in prop::option::of(1usize..40),
            on_device in any::<bool>(),
        ) {
            let slot = 512 * record;
            let directory = Directory::new([(0, 8, slot), (1, 16, slot), (3, 8, slot)]).unwrap();
            let options = CacheOptions {
                capacity: asked.map_or(Capacity::Fit, Capacity::Slots),
                prefetch: if staged { Prefetch::Correlation } else { Prefetch::Off },
                top_k: 2,
                ring,
                ..Default::default()
            };
            let others = DeviceBytes { dense, kv, ..Default::default() };
            let plan = MemoryPlan::new(&room(budget, on_device), (others, margin), &options, &directory, slot);
            let Ok(plan) = plan else {
                let least = asked.unwrap_or(2).min(32) as u64 * slot as u64;
                let more = (4 + 32) as u64 * slot as u64 + ring.unwrap_or(0);
                prop_assert!(asked == Some(1) || dense + kv + margin + least + more > budget);
                return Ok(());
            };
            prop_assert!(plan.device.total() + margin <= budget);
            prop_assert!(plan.slots.slots >= 2 && plan.slots.slots <= 32);
            match asked {
                Some(asked) => prop_assert_eq!(plan.slots.slots, asked.min(32)),
                None if plan.slots.slots < 32 => {
                    prop_assert!(plan.device.total() + margin + slot as u64 > budget);
                }
                None => prop_assert_eq!(plan.slots, SlotPlan { slots: 32, staging: 0, ring: 0 }),
            }
        }
    }
}
