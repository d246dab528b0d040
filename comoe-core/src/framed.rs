//! What our own small files have in common: little-endian numbers, compressed blocks, a hash that finds damage.

use ruzstd::decoding::FrameDecoder;
use ruzstd::encoding::{CompressionLevel, compress_to_vec};

/// FNV-1a of 64 bits (Fowler, Noll, Vo): finds damage, is no proof against forgery.
pub(crate) fn fnv(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(*b)).wrapping_mul(0x100_0000_01b3))
}

/// One Zstandard frame (RFC 8878).
pub(crate) fn compress(content: &[u8]) -> Vec<u8> {
    compress_to_vec(content, CompressionLevel::Fastest)
}

/// What [`compress`] made of `length` bytes; `None` if it is not that, or longer than `most`.
pub(crate) fn decompress(stored: &[u8], length: usize, most: usize) -> Option<Vec<u8>> {
    if length > most {
        return None;
    }
    let mut content = Vec::new();
    content.try_reserve_exact(length).ok()?;
    FrameDecoder::new().decode_all_to_vec(stored, &mut content).ok()?;
    (content.len() == length).then_some(content)
}

/// Reads from the front, and never beyond the end.
pub(crate) struct Cursor<'a> {
    pub(crate) bytes: &'a [u8],
    pub(crate) at: usize,
}

impl<'a> Cursor<'a> {
    pub(crate) fn take(&mut self, n: usize) -> Option<&'a [u8]> {
        let part = self.bytes.get(self.at..self.at.checked_add(n)?)?;
        self.at += n;
        Some(part)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.take(N)?.try_into().ok()
    }

    pub(crate) fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_le_bytes)
    }

    pub(crate) fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }
}
