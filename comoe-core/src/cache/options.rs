//! How a cache is run: how many slots, who competes for them, what comes early.

use candle_core::Device;

use crate::backend::DriverKind;
use crate::backend::cuda::cuda_memory;
use crate::error::{Error, Result};
use crate::machine;
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
    /// Who drives a step.
    pub driver: DriverKind,
    /// Device memory for the ring that a prompt's records pass through, in bytes, on top of the slots; 0 is none, and
    /// nothing is sent for ahead of its layer. Default: on a GPU, room for as many records as a layer has (less where
    /// memory is short), elsewhere none. A pool with a slot for every record has none, and needs none.
    pub ring: Option<u64>,
}

/// Without being asked, the ring takes no more than this part of the slots' memory.
const MOST_OF_SLOTS: usize = 8;

/// Memory of a device that slots may take.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Room {
    device: String,
    free: u64,
    reserve: u64,
    /// Whether more than this is refused. Host memory is no hard limit: it holds the page cache too.
    hard: bool,
}

impl Room {
    pub(super) fn of(device: &Device, reserve: u64) -> Result<Option<Self>> {
        Ok(match device {
            Device::Cuda(_) => {
                let (free, _) = cuda_memory(device)?;
                Some(Self { device: format!("{:?}", device.location()), free, reserve, hard: true })
            }
            _ => {
                let room = |free| Self { device: "this machine".to_owned(), free, reserve, hard: false };
                machine::ram_available().map(room)
            }
        })
    }

    /// Slots of `slot_bytes` that fit.
    fn slots(&self, slot_bytes: usize) -> usize {
        let bytes = self.free.saturating_sub(self.reserve);
        usize::try_from(bytes / slot_bytes as u64).unwrap_or(usize::MAX)
    }

    fn refuse(&self, slots: usize, slot_bytes: usize) -> Error {
        Error::NoRoom {
            device: self.device.clone(),
            slots,
            asked: slots as u64 * slot_bytes as u64,
            free: self.free,
            reserve: self.reserve,
            most: self.slots(slot_bytes),
        }
    }
}

/// What a cache will use: computed from the options and a directory alone.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Layout {
    pub(super) shape: PoolShape,
    pub(super) prefetch: Prefetch,
    /// How prompts are served.
    pub(super) stream: StreamPlan,
    /// Slots that stay whatever is given up: those of one token.
    pub(super) least: usize,
    pub(super) notes: Vec<String>,
}

impl CacheOptions {
    /// Slots for a store, before it is known how they are divided.
    fn slots(&self, directory: &Directory, slot_bytes: usize, room: Option<&Room>) -> Result<usize> {
        let all = directory.len();
        let least = self.top_k.clamp(1, all);
        if self.capacity == Capacity::Fit {
            let Some(room) = room else { return Ok(all) };
            let fit = room.slots(slot_bytes);
            // With a slot for every record nothing is staged or streamed.
            let beside = self.staging() + self.ring_of_fit(directory, slot_bytes, room, fit);
            let slots = if fit >= all { all } else { fit.saturating_sub(beside) };
            return if slots < least { Err(room.refuse(least, slot_bytes)) } else { Ok(slots) };
        }
        let slot_bytes = slot_bytes as u64;
        let slots = match self.capacity {
            Capacity::All | Capacity::Fit => all,
            Capacity::Slots(n) => n,
            Capacity::Bytes(bytes) => usize::try_from(bytes / slot_bytes).unwrap_or(usize::MAX),
            Capacity::Fraction(f) if f > 0.0 && f <= 1.0 => (all as f64 * f).round() as usize,
            Capacity::Fraction(f) => {
                let reason = format!("a fraction of the experts must be above 0 and at most 1, not {f}");
                return Err(Error::BadArgument { what: "capacity", reason });
            }
        };
        match self.capacity {
            Capacity::Bytes(asked) if slots < least => Err(Error::PoolTooSmall {
                asked,
                record_bytes: slot_bytes as usize,
                least: least as u64 * slot_bytes,
                slots: least,
            }),
            _ if slots < least => Err(Error::TooFewSlots { asked: slots, least }),
            _ => Ok(slots.min(all)),
        }
    }

    /// Slots of the ring beside `slots` others.
    fn ring_slots(
        &self,
        directory: &Directory,
        slot_bytes: usize,
        room: Option<&Room>,
        slots: usize,
    ) -> usize {
        let all = directory.len();
        if slots >= all {
            return 0;
        }
        let left = room.map_or(usize::MAX, |room| room.slots(slot_bytes).saturating_sub(slots));
        match self.ring {
            Some(bytes) => usize::try_from(bytes / slot_bytes as u64).unwrap_or(usize::MAX).min(all),
            // Where records are in the same memory anyway, nothing is gained.
            None if room.is_none_or(|room| !room.hard) => 0,
            None => directory.layers().iter().map(|e| e.experts).max().unwrap_or(0).min(left),
        }
    }

    /// Slots of the ring, when all that fits is shared out.
    fn ring_of_fit(&self, directory: &Directory, slot_bytes: usize, room: &Room, fit: usize) -> usize {
        let wanted = self.ring_slots(directory, slot_bytes, Some(room), 0);
        if self.ring.is_some() { wanted } else { wanted.min(fit / MOST_OF_SLOTS) }
    }

    /// Staging slots, unless every record has a slot.
    fn staging(&self) -> usize {
        match self.prefetch {
            Prefetch::Off => 0,
            // Room for what was guessed for this layer and for the next.
            Prefetch::Correlation | Prefetch::StaleGate | Prefetch::Auto => 2 * self.prefetch_width(),
        }
    }

    pub(super) fn layout(
        &self,
        directory: &Directory,
        slot_bytes: usize,
        room: Option<&Room>,
    ) -> Result<Layout> {
        let slots = self.slots(directory, slot_bytes, room)?;
        let experts: Vec<usize> = directory.layers().iter().map(|e| e.experts).collect();
        let mut notes = Vec::new();
        let resident = slots == directory.len();
        let mut prefetch = self.prefetch;
        if resident && prefetch != Prefetch::Off {
            prefetch = Prefetch::Off;
            notes.push("every expert has a slot, so nothing is prefetched".to_owned());
        }
        let staging = if prefetch == Prefetch::Off { 0 } else { self.staging() };
        let ring = match (self.capacity, room) {
            (Capacity::Fit, Some(room)) if !resident => {
                self.ring_of_fit(directory, slot_bytes, room, room.slots(slot_bytes))
            }
            _ => self.ring_slots(directory, slot_bytes, room, slots + staging),
        };
        let wanted = slots + staging + ring;
        if let Some(room) = room.filter(|room| room.hard && room.slots(slot_bytes) < wanted) {
            return Err(room.refuse(wanted, slot_bytes));
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
        let ahead = self.ring.map_or_else(|| room.is_some_and(|r| r.hard), |bytes| bytes > 0);
        let stream = StreamPlan { ahead, ring_slots: ring };
        let top_k = self.top_k.max(1);
        let least = match shape.partitions.len() < experts.len() {
            true => top_k,
            false => experts.iter().map(|&n| n.min(top_k)).sum(),
        };
        Ok(Layout { shape, prefetch, stream, least, notes })
    }

    pub(super) fn prefetch_width(&self) -> usize {
        self.top_k.max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SLOT: usize = 512;

    fn slots(options: &CacheOptions, free: u64, hard: bool) -> Result<usize> {
        let directory = Directory::new([(0, 8, SLOT), (1, 8, SLOT)]).unwrap();
        let room = Room { device: "gpu".to_owned(), free, reserve: options.reserve, hard };
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
            let room = Room { device: "gpu".to_owned(), free: (free * SLOT) as u64, reserve: 0, hard };
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
