//! What the operating system is asked for: memory in use, and Ctrl-C.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

pub(crate) use interrupt::{Answering, catch_interrupts, end_by, go_on, input};

/// A line such as `RssAnon:    1234 kB` of a file under `/proc`, in bytes.
fn field(text: &str, name: &str) -> Option<u64> {
    let rest = text.lines().find_map(|line| line.strip_prefix(name))?;
    rest.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kb| kb * 1024)
}

/// Anonymous memory of this process right now, in bytes: its own, without mapped files.
fn anonymous_memory() -> Option<u64> {
    field(&std::fs::read_to_string("/proc/self/status").ok()?, "RssAnon:")
}

/// Watches this process's anonymous memory from a thread. The kernel keeps a peak of all resident memory, mapped
/// files included, but none of the anonymous part, so it is sampled.
#[derive(Debug)]
pub(crate) struct MemoryWatch {
    shared: Arc<Watched>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Watched {
    peak: AtomicU64,
    stop: AtomicBool,
}

impl Watched {
    fn sample(&self) {
        self.peak.fetch_max(anonymous_memory().unwrap_or(0), Ordering::Relaxed);
    }
}

impl MemoryWatch {
    /// Time between samples.
    pub(crate) const EVERY: Duration = Duration::from_millis(5);

    /// Starts watching.
    pub(crate) fn start() -> Self {
        let shared = Arc::<Watched>::default();
        let watched = shared.clone();
        let sample = move || {
            while !watched.stop.load(Ordering::Relaxed) {
                watched.sample();
                std::thread::park_timeout(Self::EVERY);
            }
        };
        // Without a thread the peak is that of the moments asked for.
        let thread = std::thread::Builder::new().name("memory watch".into()).spawn(sample).ok();
        Self { shared, thread }
    }

    /// Largest anonymous memory seen so far, in bytes; `None` where the system does not say.
    pub(crate) fn peak(&self) -> Option<u64> {
        self.shared.sample();
        Some(self.shared.peak.load(Ordering::Relaxed)).filter(|&p| p > 0)
    }
}

impl Drop for MemoryWatch {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // A sampler that panicked has nothing more to say.
            let _ = thread.join();
        }
    }
}

/// Bytes that this user may still write to the disk of `folder`; `None` where the system does not say.
#[cfg(unix)]
pub(crate) fn free_space(folder: &std::path::Path) -> Option<u64> {
    use std::os::unix::ffi::OsStrExt;

    let path = std::ffi::CString::new(folder.as_os_str().as_bytes()).ok()?;
    // SAFETY: `path` ends with a zero and outlives the call; `found` is a plain C struct for which all zeroes is valid,
    // and the call writes to nothing else.
    let found = unsafe {
        let mut found: libc::statvfs = std::mem::zeroed();
        (libc::statvfs(path.as_ptr(), &mut found) == 0).then_some(found)
    }?;
    // The fields' types differ between systems.
    #[allow(clippy::unnecessary_cast)]
    Some((found.f_bavail as u64).saturating_mul(found.f_frsize as u64))
}

/// Elsewhere a disk that is full is noticed when it is.
#[cfg(not(unix))]
pub(crate) fn free_space(_: &std::path::Path) -> Option<u64> {
    None
}

/// A number that tells this user from others.
#[cfg(unix)]
pub(crate) fn user() -> u32 {
    // SAFETY: takes nothing, cannot fail.
    unsafe { libc::geteuid() }
}

/// Makes a folder that only this user can write, or sees that it is one: others could put things into it otherwise,
/// in a place where everybody can make folders.
#[cfg(unix)]
pub(crate) fn private_folder(path: &std::path::Path) -> std::io::Result<()> {
    use std::os::unix::fs::{DirBuilderExt, MetadataExt};

    match std::fs::DirBuilder::new().mode(0o700).create(path) {
        Err(e) if e.kind() != std::io::ErrorKind::AlreadyExists => return Err(e),
        _ => {}
    }
    // Of the path itself: a link may lead anywhere.
    let found = std::fs::symlink_metadata(path)?;
    if found.is_dir() && found.uid() == user() && found.mode() & 0o022 == 0 {
        Ok(())
    } else {
        Err(std::io::Error::other("others can write it"))
    }
}

/// Elsewhere temporary files are the user's own.
#[cfg(not(unix))]
pub(crate) fn user() -> u32 {
    0
}

#[cfg(not(unix))]
pub(crate) fn private_folder(path: &std::path::Path) -> std::io::Result<()> {
    std::fs::create_dir_all(path)
}

#[cfg(unix)]
mod interrupt;

/// Elsewhere Ctrl-C ends the program.
#[cfg(not(unix))]
mod interrupt {
    #[derive(Debug)]
    pub(crate) struct Answering(());

    impl Answering {
        pub(crate) fn begin() -> Self {
            Self(())
        }

        pub(crate) fn interrupted(&self) -> bool {
            false
        }
    }

    pub(crate) fn catch_interrupts(_stops_answers: bool) {}

    pub(crate) fn end_by(_signal: i32) {}

    pub(crate) fn go_on() -> crate::error::Result<()> {
        Ok(())
    }

    pub(crate) fn input() -> std::io::Result<impl std::io::Read> {
        Ok(std::io::stdin())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_of_proc_are_read() {
        let text = "VmHWM:\t   20 kB\nRssAnon:\t    3084 kB\nRssFile:\t1 kB\nThreads:\t1\n";
        assert_eq!(field(text, "RssAnon:"), Some(3084 * 1024));
        assert_eq!(field(text, "Threads:"), None);
        assert_eq!(field(text, "Missing:"), None);
    }

    #[test]
    #[cfg(unix)]
    fn a_disk_has_room_and_a_folder_that_is_not_there_has_no_disk() {
        assert!(free_space(&std::env::temp_dir()).unwrap() > 0);
        assert_eq!(free_space(std::path::Path::new("/no/such/folder")), None);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_peak_stays_when_the_memory_is_given_back() {
        let watch = MemoryWatch::start();
        // Other tests of this process take memory as well: only lower bounds are certain.
        let block = vec![1u8; 64 << 20];
        let during = watch.peak().unwrap();
        assert!(std::hint::black_box(&block).iter().all(|b| *b == 1));
        drop(block);
        let after = watch.peak().unwrap();
        assert!(during >= 64 << 20 && after >= during, "{during} {after}");
    }
}
