//! Memory for slots on the host, the CPU's and the places in RAM of records from disk: one lazily backed mapping, cut
//! into equal slots that are lent out one borrower at a time.

use std::ops::{Deref, DerefMut, Range};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};

use memmap2::{MmapMut, MmapOptions};

use crate::backend::{Chunks, SlotId};
use crate::error::{Error, Result};

/// Lock word of a slot that is being written; otherwise it counts readers.
const WRITTEN: u32 = u32::MAX;

/// Memory goes back to the system in such pieces: whole pages, whatever their size.
const CHUNK: usize = 64 << 10;

/// All slots. Untouched slots are not backed by memory.
///
/// Bytes are reached only through [`SlotRead`] and [`SlotWrite`], which hold the slot's lock word. The schedule keeps
/// readers and writers apart; should it fail to, a borrow is refused and no byte is read while it changes.
pub(crate) struct Slab {
    base: *mut u8,
    slot_bytes: usize,
    locks: Box<[AtomicU32]>,
    chunks: Chunks,
    /// Slots that nobody may use: their lock words are [`WRITTEN`], by this slab itself.
    unused: Mutex<Range<u32>>,
    /// Keeps `base` mapped, and gives pages back.
    map: MmapMut,
}

// SAFETY: `base` is memory that `map` owns; every access to it goes through a guard that holds the slot's lock word,
// so threads never touch a byte that another one is writing.
unsafe impl Send for Slab {}
// SAFETY: as for `Send`.
unsafe impl Sync for Slab {}

impl Slab {
    /// Maps `slots` times `slot_bytes` zero bytes.
    pub(crate) fn new(slots: usize, slot_bytes: usize) -> Result<Self> {
        let refused = |reason: String| Error::BadArgument { what: "pool", reason };
        let bytes = slots
            .checked_mul(slot_bytes)
            .filter(|&bytes| bytes > 0 && isize::try_from(bytes).is_ok())
            .ok_or_else(|| refused(format!("{slots} slots of {slot_bytes} bytes cannot be made")))?;
        let mut map = MmapOptions::new().len(bytes).map_anon().map_err(|e| {
            refused(format!(
                "{slots} slots of {slot_bytes} bytes, {bytes} bytes in all: {e}; use fewer slots"
            ))
        })?;
        let locks = (0..slots).map(|_| AtomicU32::new(0)).collect();
        let chunks = Chunks::new(slots, slot_bytes, CHUNK, 1);
        Ok(Self { base: map.as_mut_ptr(), slot_bytes, locks, chunks, unused: Mutex::default(), map })
    }

    pub(crate) fn slots(&self) -> usize {
        self.locks.len()
    }

    pub(crate) fn slot_bytes(&self) -> usize {
        self.slot_bytes
    }

    pub(crate) fn chunks(&self) -> Chunks {
        self.chunks
    }

    /// Lends the slots `unused` to nobody from now on, and gives their memory back; those that were lent to nobody before
    /// are empty. `None`, and nothing has changed, when one of them is borrowed or does not exist.
    pub(crate) fn set_unused(&self, unused: Range<u32>) -> Option<std::io::Result<u64>> {
        let mut before = self.unused.lock().unwrap_or_else(PoisonError::into_inner);
        if unused.end as usize > self.slots() {
            return None;
        }
        let mut taken = Vec::new();
        for slot in unused.clone().filter(|s| !before.contains(s)) {
            taken.push(self.write(SlotId(slot))?);
        }
        // From here on their words stay as they are.
        taken.into_iter().for_each(std::mem::forget);
        for slot in before.clone().filter(|s| !unused.contains(s)) {
            self.locks[slot as usize].store(0, Ordering::Release);
        }
        *before = unused.clone();
        let bytes = self.chunks.bytes(&self.chunks.within(&unused));
        Some(self.give_back(bytes).map(|()| self.chunks.bytes_without(&unused) as u64))
    }

    #[cfg(unix)]
    fn give_back(&self, bytes: Range<usize>) -> std::io::Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        let advice = memmap2::UncheckedAdvice::DontNeed;
        // SAFETY: private anonymous memory of slots that are lent to nobody, so no reference to it exists; it reads as zeroes
        // afterwards, which are initialised bytes.
        unsafe { self.map.unchecked_advise_range(advice, bytes.start, bytes.len()) }
    }

    #[cfg(not(unix))]
    fn give_back(&self, _: Range<usize>) -> std::io::Result<()> {
        Err(std::io::ErrorKind::Unsupported.into())
    }

    /// Has all of its memory backed now, by all threads, before anything is in it: slots that nobody has borrowed are all zeroes
    /// behind this. By touching it, since not every system populates memory when it is told to.
    #[cfg(any(feature = "cuda", test))]
    pub(crate) fn populate(&self) {
        use rayon::prelude::*;

        crate::sys::want_huge_pages(&self.map);
        // Neighbours by one thread, so that few huge pages are touched by two.
        (0..self.slots()).into_par_iter().with_min_len(8).for_each(|slot| {
            if let Some(mut slot) = self.write(SlotId(slot as u32)) {
                slot.iter_mut().step_by(crate::sys::LEAST_PAGE).for_each(|byte| *byte = 0);
            }
        });
    }

    /// Where the first slot begins. The others follow without gaps.
    #[cfg(feature = "cuda")]
    pub(crate) fn base(&self) -> *mut u8 {
        self.base
    }

    /// Borrows a slot for reading; `None` when there is no such slot or it is being written.
    pub(crate) fn read(&self, slot: SlotId) -> Option<SlotRead<'_>> {
        let lock = self.locks.get(slot.0 as usize)?;
        // One below WRITTEN is left unused, so that the count cannot become it.
        let more = |readers| (readers < WRITTEN - 1).then_some(readers + 1);
        lock.fetch_update(Ordering::Acquire, Ordering::Relaxed, more).ok()?;
        Some(SlotRead { slab: self, slot })
    }

    /// Borrows a slot for writing; `None` when there is no such slot or it is borrowed.
    pub(crate) fn write(&self, slot: SlotId) -> Option<SlotWrite<'_>> {
        let lock = self.locks.get(slot.0 as usize)?;
        lock.compare_exchange(0, WRITTEN, Ordering::Acquire, Ordering::Relaxed).ok()?;
        Some(SlotWrite { slab: self, slot })
    }

    /// Start of a slot that exists, for its guards.
    fn at(&self, slot: SlotId) -> *mut u8 {
        debug_assert!((slot.0 as usize) < self.locks.len());
        // SAFETY: guards are made for existing slots only, so the offset lies inside the one mapping that `new` made.
        unsafe { self.base.add(slot.0 as usize * self.slot_bytes) }
    }
}

/// A slot that nobody writes while this lives.
pub(crate) struct SlotRead<'a> {
    slab: &'a Slab,
    slot: SlotId,
}

impl Deref for SlotRead<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the slot exists, its bytes are initialised (the mapping is zeroed), and this guard's share of the lock
        // word keeps writers out.
        unsafe { std::slice::from_raw_parts(self.slab.at(self.slot), self.slab.slot_bytes) }
    }
}

impl Drop for SlotRead<'_> {
    fn drop(&mut self) {
        self.slab.locks[self.slot.0 as usize].fetch_sub(1, Ordering::Release);
    }
}

/// A slot that nobody else touches while this lives.
pub(crate) struct SlotWrite<'a> {
    slab: &'a Slab,
    slot: SlotId,
}

impl Deref for SlotWrite<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: as in `deref_mut`.
        unsafe { std::slice::from_raw_parts(self.slab.at(self.slot), self.slab.slot_bytes) }
    }
}

impl DerefMut for SlotWrite<'_> {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: the slot exists, its bytes are initialised (the mapping is zeroed), and the lock word is WRITTEN
        // while this guard lives, so no other guard of the slot exists.
        unsafe { std::slice::from_raw_parts_mut(self.slab.at(self.slot), self.slab.slot_bytes) }
    }
}

impl Drop for SlotWrite<'_> {
    fn drop(&mut self) {
        self.slab.locks[self.slot.0 as usize].store(0, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_lent_to_readers_or_one_writer() {
        let slab = Slab::new(3, 512).unwrap();
        slab.write(SlotId(1)).unwrap().fill(7);
        {
            let (a, b) = (slab.read(SlotId(1)).unwrap(), slab.read(SlotId(1)).unwrap());
            assert!(a.iter().chain(b.iter()).all(|&v| v == 7));
            assert!(slab.write(SlotId(1)).is_none());
        }
        let w = slab.write(SlotId(1)).unwrap();
        assert!(slab.read(SlotId(1)).is_none() && slab.write(SlotId(1)).is_none());
        assert!(slab.read(SlotId(0)).unwrap().iter().all(|&v| v == 0));
        drop(w);
        assert_eq!(slab.read(SlotId(2)).unwrap().len(), 512);
        assert!(slab.read(SlotId(3)).is_none() && slab.write(SlotId(3)).is_none());
    }

    #[test]
    fn populated_memory_is_backed_and_zero_where_nobody_has_it() {
        let backed = || {
            let pages = std::fs::read_to_string("/proc/self/smaps").unwrap_or_default();
            let kib =
                |l: &str| l.strip_prefix("Anonymous:")?.trim().strip_suffix("kB")?.trim().parse::<u64>().ok();
            pages.lines().filter_map(kib).max().unwrap_or(0)
        };
        // More than any other mapping of the tests.
        let (slots, bytes) = (96, 2 << 20);
        let slab = Slab::new(slots, bytes).unwrap();
        let mut used = slab.write(SlotId(3)).unwrap();
        used.fill(7);
        slab.populate();
        assert!(used.iter().all(|&v| v == 7), "it is in use");
        drop(used);
        assert!(slab.read(SlotId(95)).unwrap().iter().all(|&v| v == 0));
        if cfg!(target_os = "linux") {
            assert!(backed() >= (slots * bytes) as u64 >> 10, "{} KiB", backed());
        }
    }

    #[test]
    fn unused_slots_are_lent_to_nobody_and_come_back_empty() {
        let slab = Slab::new(400, 1024).unwrap();
        (0..400).for_each(|s| slab.write(SlotId(s)).unwrap().fill(7));
        {
            let _reader = slab.read(SlotId(150)).unwrap();
            assert!(slab.set_unused(100..400).is_none());
            assert!(slab.write(SlotId(120)).is_some(), "nothing has changed");
        }
        assert!(slab.set_unused(100..401).is_none(), "there are 400");
        // 100 KiB stay, in chunks of 64.
        assert_eq!(slab.set_unused(100..400).unwrap().unwrap(), 128 << 10);
        assert!(slab.read(SlotId(100)).is_none() && slab.write(SlotId(399)).is_none());
        assert_eq!(slab.read(SlotId(99)).unwrap()[1023], 7);
        assert_eq!(slab.set_unused(190..330).unwrap().unwrap(), (400 - 128) << 10);
        assert_eq!((slab.read(SlotId(189)).unwrap()[0], slab.read(SlotId(330)).unwrap()[0]), (0, 0));
        assert!(slab.read(SlotId(200)).is_none());
        assert_eq!(slab.set_unused(0..0).unwrap().unwrap(), 400 << 10);
        slab.write(SlotId(250)).unwrap().fill(8);
    }

    #[test]
    fn impossible_pools_are_refused() {
        for (slots, bytes) in [(0, 512), (usize::MAX, 512), (1 << 40, 1 << 22)] {
            let text = Slab::new(slots, bytes).err().unwrap().to_string();
            assert!(text.contains(&format!("{slots} slots of {bytes} bytes")), "{text}");
        }
    }
}
