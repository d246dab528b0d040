//! Calls that differ between operating systems.

use std::fs::File;
use std::io;
use std::ops::Range;

use memmap2::Mmap;

#[cfg(feature = "cuda")]
pub(crate) use self::fresh::{FreshMemory, HUGE_PAGE};

#[cfg(any(feature = "cuda", test))]
mod fresh;

/// No page is smaller.
#[cfg(any(feature = "cuda", test))]
pub(crate) const LEAST_PAGE: usize = 4 << 10;

/// Writes `bytes` at `offset` of `file`, without moving any shared position: threads may write at the same time.
#[cfg(unix)]
pub(crate) fn write_all_at(file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::write_all_at(file, bytes, offset)
}

/// Writes `bytes` at `offset` of `file`; the offset goes with each call, so threads may write at the same time.
#[cfg(windows)]
pub(crate) fn write_all_at(file: &File, mut bytes: &[u8], mut offset: u64) -> io::Result<()> {
    while !bytes.is_empty() {
        let written = std::os::windows::fs::FileExt::seek_write(file, bytes, offset)?;
        if written == 0 {
            return Err(io::ErrorKind::WriteZero.into());
        }
        bytes = &bytes[written..];
        offset += written as u64;
    }
    Ok(())
}

/// Fills `out` from `offset` of `file`, without moving any shared position.
#[cfg(unix)]
pub(crate) fn read_exact_at(file: &File, out: &mut [u8], offset: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, out, offset)
}

/// Fills `out` from `offset` of `file`; the offset goes with each call.
#[cfg(windows)]
pub(crate) fn read_exact_at(file: &File, mut out: &mut [u8], mut offset: u64) -> io::Result<()> {
    while !out.is_empty() {
        match std::os::windows::fs::FileExt::seek_read(file, out, offset) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(read) => {
                out = &mut out[read..];
                offset += read as u64;
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Has the system begin to read `len` bytes at `offset` of `file` into its page cache. Advice: what it does not take, a
/// read brings all the same.
pub(crate) fn will_need(file: &File, offset: u64, len: u64) {
    advise(file, offset, len, Advice::WillNeed);
}

/// Lets the system take the pages of `len` bytes at `offset` of `file` out of its page cache, where no process has them
/// mapped.
pub(crate) fn drop_cache(file: &File, offset: u64, len: u64) {
    advise(file, offset, len, Advice::DontNeed);
}

#[cfg_attr(not(target_os = "linux"), expect(dead_code, reason = "other systems take no such advice"))]
enum Advice {
    WillNeed,
    DontNeed,
}

#[cfg(target_os = "linux")]
fn advise(file: &File, offset: u64, len: u64, advice: Advice) {
    use std::os::fd::AsRawFd;

    let advice = match advice {
        Advice::WillNeed => libc::POSIX_FADV_WILLNEED,
        Advice::DontNeed => libc::POSIX_FADV_DONTNEED,
    };
    let (Ok(offset), Ok(len)) = (offset.try_into(), len.try_into()) else { return };
    // SAFETY: takes numbers only, and the descriptor is open as long as `file` is borrowed. Its error is of no use: see
    // the callers.
    let _ = unsafe { libc::posix_fadvise(file.as_raw_fd(), offset, len, advice) };
}

#[cfg(not(target_os = "linux"))]
fn advise(_: &File, _: u64, _: u64, _: Advice) {}

/// Has the pages of a mapped file leave this process; the next that touches one has it read again.
#[cfg(unix)]
pub(crate) fn unmap_pages(map: &Mmap, range: Range<usize>) {
    // SAFETY: a shared mapping of a file, through which nothing is ever written: a page that comes again has the file's
    // bytes, as it had before.
    let _ =
        unsafe { map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, range.start, range.len()) };
}

/// Elsewhere pages stay until the system wants them back.
#[cfg(not(unix))]
pub(crate) fn unmap_pages(_: &Mmap, _: Range<usize>) {}

/// Has the system back memory of this process's own in huge pages, where it has them.
#[cfg(all(any(feature = "cuda", test), target_os = "linux"))]
pub(crate) fn want_huge_pages(map: &memmap2::MmapMut) {
    // Advice: small pages serve.
    let _ = map.advise(memmap2::Advice::HugePage);
}

/// Elsewhere pages are as they are.
#[cfg(all(any(feature = "cuda", test), not(target_os = "linux")))]
pub(crate) fn want_huge_pages(_: &memmap2::MmapMut) {}
