//! The memory of a slab as it comes and goes: chunks of equal size, which slots do not care about.

use std::ops::Range;

/// How a slab is cut into chunks. The last one may be shorter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chunks {
    slots: usize,
    slot_bytes: usize,
    chunk_bytes: usize,
    /// Of the slab: all slots, and what the last chunk is rounded up by.
    bytes: usize,
}

impl Chunks {
    /// For `slots` slots of `slot_bytes`, in chunks of `chunk_bytes`, which is a multiple of `granularity`; so is the last
    /// one. None of them is 0.
    pub fn new(slots: usize, slot_bytes: usize, chunk_bytes: usize, granularity: usize) -> Self {
        debug_assert!(chunk_bytes.is_multiple_of(granularity));
        let bytes = (slots * slot_bytes).next_multiple_of(granularity);
        Self { slots, slot_bytes, chunk_bytes, bytes }
    }

    /// Bytes of the whole slab.
    pub fn slab_bytes(&self) -> usize {
        self.bytes
    }

    /// How many chunks there are.
    pub fn count(&self) -> usize {
        self.bytes.div_ceil(self.chunk_bytes)
    }

    /// The bytes of the chunks `chunks`.
    pub fn bytes(&self, chunks: &Range<usize>) -> Range<usize> {
        let start = (chunks.start * self.chunk_bytes).min(self.bytes);
        start..(chunks.end * self.chunk_bytes).min(self.bytes).max(start)
    }

    /// The chunks that no slot but `slots` has a part in.
    pub fn within(&self, slots: &Range<u32>) -> Range<usize> {
        let (start, end) = (slots.start as usize, slots.end as usize);
        if start >= end {
            return 0..0;
        }
        let first = (start * self.slot_bytes).div_ceil(self.chunk_bytes);
        let last = match end >= self.slots {
            true => self.count(),
            false => end * self.slot_bytes / self.chunk_bytes,
        };
        first..last.max(first)
    }

    /// Bytes that are left of the slab when nobody uses `slots`.
    pub fn bytes_without(&self, slots: &Range<u32>) -> usize {
        self.bytes - self.bytes(&self.within(slots)).len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_chunks_leave() {
        // 10 slots of 3 in chunks of 4: 30 bytes, the last chunk has 2.
        let chunks = Chunks::new(10, 3, 4, 2);
        assert_eq!((chunks.slab_bytes(), chunks.count()), (30, 8));
        assert_eq!(chunks.within(&(0..10)), 0..8);
        assert_eq!(chunks.within(&(4..10)), 3..8);
        assert_eq!(chunks.within(&(5..10)), 4..8, "slot 4 has a part in chunk 3");
        assert_eq!(chunks.within(&(5..9)), 4..6, "slot 9 has one in chunk 6");
        assert_eq!(chunks.bytes(&(4..8)), 16..30);
        assert_eq!(chunks.bytes_without(&(5..10)), 16);
        for nothing in [3..3, 5..6, 9..9] {
            assert_eq!(chunks.bytes_without(&nothing), 30, "{nothing:?}");
        }
        assert_eq!(Chunks::new(3, 5, 8, 8).slab_bytes(), 16, "rounded up");
    }
}
