//! Eight nibbles as a word of a record: column `c` at bit [`NIBBLE_SHIFTS`](crate::simd::NIBBLE_SHIFTS)`[c]`.

/// From a word whose nibbles are in the order of columns, the lowest first.
#[inline(always)]
pub(crate) fn from_nibbles(word: u32) -> u32 {
    let evens = |w: u32| {
        let w = w & 0x0f0f_0f0f;
        let w = (w | w >> 4) & 0x00ff_00ff;
        (w | w >> 8) & 0xffff
    };
    evens(word) | evens(word >> 4) << 16
}

/// From the low nibbles of eight bytes, one a column.
#[inline(always)]
pub(crate) fn from_bytes(bytes: u64) -> u32 {
    let evens = |w: u64| {
        let w = w & 0x000f_000f_000f_000f;
        let w = (w | w >> 12) & 0x0000_00ff_0000_00ff;
        ((w | w >> 24) & 0xffff) as u32
    };
    evens(bytes) | evens(bytes >> 8) << 16
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::NIBBLE_SHIFTS;

    #[test]
    fn nibbles_go_to_their_places() {
        let word = (0..8).fold(0, |w, column| w | (column as u32 + 3) << NIBBLE_SHIFTS[column]);
        assert_eq!(from_nibbles(0xa987_6543), word);
        // What is above a byte's low nibble does not count.
        assert_eq!(from_bytes(0x7a39_5847_06a5_f4c3), word);
    }
}
