//! Memory to be filled at start.

use std::io;
use std::ops::Range;

use memmap2::{MmapMut, MmapOptions};

/// Bytes of a huge page, where the system has them: memory that begins at a multiple of it is backed by whole ones.
pub(crate) const HUGE_PAGE: usize = 2 << 20;

/// Memory that nobody has touched, all zeroes, in huge pages where the system has them.
pub(crate) struct FreshMemory {
    map: MmapMut,
    start: usize,
    bytes: usize,
}

impl FreshMemory {
    /// Maps `bytes`, which take no memory before they are written.
    pub(crate) fn new(bytes: usize) -> io::Result<Self> {
        let mapped = bytes.checked_add(HUGE_PAGE).ok_or(io::ErrorKind::OutOfMemory)?;
        let map = MmapOptions::new().len(mapped).map_anon()?;
        // Fewer pages to fault in and to lock; where the system has none of them, small pages serve.
        super::want_huge_pages(&map);
        let at = map.as_ptr().addr();
        Ok(Self { start: at.next_multiple_of(HUGE_PAGE) - at, map, bytes })
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.map[self.start..][..self.bytes]
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.map[self.start..][..self.bytes]
    }

    /// Gives back what lies in `range`, whose ends are ends of pages; it reads as zeroes afterwards.
    #[cfg(unix)]
    pub(crate) fn give_back(&mut self, range: Range<usize>) -> io::Result<()> {
        assert!(range.end <= self.bytes.next_multiple_of(HUGE_PAGE), "{range:?} of {} bytes", self.bytes);
        let start = self.start + range.start;
        // SAFETY: private anonymous memory, borrowed mutably through `self`; zeroes are initialised bytes.
        unsafe { self.map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, start, range.len()) }
    }

    /// Elsewhere it stays.
    #[cfg(not(unix))]
    pub(crate) fn give_back(&mut self, _: Range<usize>) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fresh_memory_begins_with_a_huge_page_and_is_zero_again_when_given_back() {
        let mut memory = FreshMemory::new(3 * HUGE_PAGE + 5).unwrap();
        assert!(memory.bytes().as_ptr().addr().is_multiple_of(HUGE_PAGE));
        assert_eq!(memory.bytes().len(), 3 * HUGE_PAGE + 5);
        memory.bytes_mut().fill(7);
        memory.give_back(HUGE_PAGE..2 * HUGE_PAGE).unwrap();
        assert_eq!(memory.bytes()[HUGE_PAGE - 1], 7);
        #[cfg(unix)]
        assert!(memory.bytes()[HUGE_PAGE..2 * HUGE_PAGE].iter().all(|b| *b == 0));
        assert_eq!(memory.bytes()[3 * HUGE_PAGE + 4], 7);
        assert!(FreshMemory::new(usize::MAX).is_err());
    }
}
