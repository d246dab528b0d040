//! What happens when a mapped file loses pages: it was shortened while it was open, or its disk failed.
//!
//! The system then sends SIGBUS to the thread that reads, at any of a thousand places, and there is nothing to go on
//! with: the weights are gone. What can be done is not to die silently. [`exit_on_lost_pages`] has the program say which
//! file it was and end with an exit code. Everything else that SIGBUS can mean goes on to whoever handled it before.

use std::path::Path;

/// Has the process, when a mapped file of a checkpoint loses pages, write one line that begins with `program` and names the
/// file to standard error, and exit with `code`: without unwinding, as after any signal. Without this call the process
/// dies by the signal. A library must not decide that, so programs do. Does nothing on systems without SIGBUS.
pub fn exit_on_lost_pages(program: &'static str, code: u8) {
    imp::install(program, code);
}

/// While this lives, a mapping's file is known by its name.
#[derive(Debug)]
pub(super) struct Watched(#[allow(dead_code, reason = "dropped to forget")] Option<imp::Entry>);

/// Remembers that `map` is the file `path`.
pub(super) fn watch(path: &Path, map: &[u8]) -> Watched {
    Watched((!map.is_empty()).then(|| imp::remember(path, map)))
}

#[cfg(unix)]
mod imp {
    use std::cell::UnsafeCell;
    use std::ffi::CStr;
    use std::mem::MaybeUninit;
    use std::os::unix::ffi::OsStrExt;
    use std::path::Path;
    use std::ptr;
    use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, AtomicUsize, Ordering};

    /// Bytes of a path that are kept, the zero behind it included. Of a longer one the end is said.
    const PATH_BYTES: usize = 1024;

    /// A mapping: a link of a list that only grows, since a signal handler can wait for nobody. Links are used again.
    pub(super) struct Link {
        taken: AtomicBool,
        start: AtomicUsize,
        /// 0: none.
        len: AtomicUsize,
        path: [AtomicU8; PATH_BYTES],
        /// Whether that is all of it.
        whole: AtomicBool,
        next: AtomicPtr<Link>,
    }

    static FIRST: AtomicPtr<Link> = AtomicPtr::new(ptr::null_mut());

    fn links() -> impl Iterator<Item = &'static Link> {
        // SAFETY: pointers of the list are null or of links that were leaked when they were put into it.
        let at = |link: &AtomicPtr<Link>| unsafe { link.load(Ordering::Acquire).as_ref() };
        std::iter::successors(at(&FIRST), move |link| at(&link.next))
    }

    /// A link in use.
    pub(super) struct Entry(&'static Link);

    impl std::fmt::Debug for Entry {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("Entry")
        }
    }

    impl Drop for Entry {
        fn drop(&mut self) {
            self.0.len.store(0, Ordering::Release);
            self.0.taken.store(false, Ordering::Release);
        }
    }

    pub(super) fn remember(path: &Path, map: &[u8]) -> Entry {
        let take = |link: &&'static Link| !link.taken.swap(true, Ordering::AcqRel);
        let link = links().find(take).unwrap_or_else(|| {
            let link = Box::leak(Box::new(Link {
                taken: AtomicBool::new(true),
                start: AtomicUsize::new(0),
                len: AtomicUsize::new(0),
                path: [const { AtomicU8::new(0) }; PATH_BYTES],
                whole: AtomicBool::new(false),
                next: AtomicPtr::new(ptr::null_mut()),
            }));
            let mut first = FIRST.load(Ordering::Acquire);
            loop {
                link.next.store(first, Ordering::Relaxed);
                match FIRST.compare_exchange(first, link, Ordering::AcqRel, Ordering::Acquire) {
                    Ok(_) => return link,
                    Err(now) => first = now,
                }
            }
        });
        // The handler may run in a folder of another name by then.
        let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        let bytes = path.as_os_str().as_bytes();
        let kept = &bytes[bytes.len().saturating_sub(PATH_BYTES - 1)..];
        for (to, from) in link.path.iter().zip(kept.iter().chain([&0])) {
            to.store(*from, Ordering::Relaxed);
        }
        link.whole.store(kept.len() == bytes.len(), Ordering::Relaxed);
        link.start.store(map.as_ptr().addr(), Ordering::Relaxed);
        link.len.store(map.len(), Ordering::Release);
        Entry(link)
    }

    /// What `install` was given, and what it found. Written once, before the handler can run.
    struct Installed(UnsafeCell<MaybeUninit<(&'static str, u8, libc::sigaction)>>);

    // SAFETY: written by the one call of `install` that finds `STARTED` false, read by the handler that it installs
    // afterwards.
    unsafe impl Sync for Installed {}

    static INSTALLED: Installed = Installed(UnsafeCell::new(MaybeUninit::uninit()));
    static STARTED: AtomicBool = AtomicBool::new(false);

    pub(super) fn install(program: &'static str, code: u8) {
        if STARTED.swap(true, Ordering::AcqRel) {
            return;
        }
        // SAFETY: `sigaction` is a plain C struct for which all zeroes is valid; the first call only reads what is
        // installed, and `INSTALLED` is written before the second, see there. The handler has the signature that
        // SA_SIGINFO asks for. SA_ONSTACK takes the alternative stack where a thread has one, as Rust's do.
        unsafe {
            let mut before: libc::sigaction = std::mem::zeroed();
            if libc::sigaction(libc::SIGBUS, ptr::null(), &mut before) != 0 {
                return;
            }
            (*INSTALLED.0.get()).write((program, code, before));
            let mut action: libc::sigaction = std::mem::zeroed();
            let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) = on_bus_error;
            action.sa_sigaction = handler as libc::sighandler_t;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            libc::sigemptyset(&mut action.sa_mask);
            libc::sigaction(libc::SIGBUS, &action, ptr::null_mut());
        }
    }

    extern "C" fn on_bus_error(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
        // SAFETY: the system gives a valid `info`; `INSTALLED` was written before this handler was installed. All calls
        // are async-signal-safe (POSIX 2.4.3): stat, write, _exit, sigaction.
        unsafe {
            let (program, code, before) = (*INSTALLED.0.get()).assume_init_ref();
            let at = (*info).si_addr().addr();
            // Codes of 0 and less are signals that a process sent.
            let lost = links().find(|link| {
                let (start, len) = (link.start.load(Ordering::Acquire), link.len.load(Ordering::Acquire));
                (*info).si_code > 0 && (start..start.saturating_add(len)).contains(&at)
            });
            if let Some(link) = lost {
                say(program, link);
                libc::_exit((*code).into());
            }
            match before.sa_sigaction {
                libc::SIG_DFL | libc::SIG_IGN => {
                    // Comes again when this returns, and ends the process.
                    libc::sigaction(signal, before, ptr::null_mut());
                }
                handler if before.sa_flags & libc::SA_SIGINFO != 0 => {
                    let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
                        std::mem::transmute(handler);
                    handler(signal, info, context);
                }
                handler => {
                    let handler: extern "C" fn(libc::c_int) = std::mem::transmute(handler);
                    handler(signal);
                }
            }
        }
    }

    /// Writes the line. Allocates nothing.
    fn say(program: &str, link: &Link) {
        let mut path = [0; PATH_BYTES];
        for (to, from) in path.iter_mut().zip(&link.path) {
            *to = from.load(Ordering::Relaxed);
        }
        let Ok(name) = CStr::from_bytes_until_nul(&path) else { return };
        let now = link.whole.load(Ordering::Relaxed).then(|| length_of(name)).flatten();
        let reason = match now {
            Some(length) if length < link.len.load(Ordering::Relaxed) as u64 => {
                "it was shortened while it was open; download or make it again, and let nothing write to it in use"
            }
            _ => "its disk could not read it, or the connection to it was lost; see the system's log (dmesg)",
        };
        let cut = if link.whole.load(Ordering::Relaxed) { "" } else { "..." };
        for part in [program, ": ", cut].map(str::as_bytes).into_iter().chain([name.to_bytes()]) {
            write(part);
        }
        [": ", reason, "\n"].into_iter().for_each(|part| write(part.as_bytes()));
    }

    fn length_of(path: &CStr) -> Option<u64> {
        // SAFETY: `path` ends with a zero; all zeroes is valid for the plain C struct that the call fills.
        unsafe {
            let mut found: libc::stat = std::mem::zeroed();
            (libc::stat(path.as_ptr(), &mut found) == 0).then_some(found.st_size as u64)
        }
    }

    fn write(bytes: &[u8]) {
        // SAFETY: reads `bytes` only. What cannot be written is lost: the process ends.
        unsafe { libc::write(libc::STDERR_FILENO, bytes.as_ptr().cast(), bytes.len()) };
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        fn found(map: &[u8]) -> Vec<String> {
            let at = map.as_ptr().addr();
            let link = |l: &&Link| l.len.load(Ordering::Acquire) > 0 && l.start.load(Ordering::Acquire) == at;
            let name = |l: &Link| {
                let bytes: Vec<u8> = l.path.iter().map(|b| b.load(Ordering::Relaxed)).collect();
                CStr::from_bytes_until_nul(&bytes).unwrap().to_str().unwrap().to_owned()
            };
            links().filter(link).map(name).collect()
        }

        #[test]
        fn mappings_are_known_while_they_live_and_their_links_are_used_again() {
            let (a, b) = ([1u8; 3], [2u8; 3]);
            let first = remember(Path::new("/a/file"), &a);
            let second = remember(Path::new(&format!("/{}", "x".repeat(3000))), &b);
            assert_eq!(found(&a), ["/a/file"]);
            assert_eq!(found(&b), ["x".repeat(PATH_BYTES - 1)]);
            assert!(first.0.whole.load(Ordering::Relaxed) && !second.0.whole.load(Ordering::Relaxed));
            drop(first);
            assert!(found(&a).is_empty());
            let links_now = links().count();
            for _ in 0..1000 {
                drop(remember(Path::new("/b"), &a));
            }
            // Other tests map files at the same time.
            assert!(links().count() < links_now + 500);
        }
    }
}

#[cfg(not(unix))]
mod imp {
    #[derive(Debug)]
    pub(super) struct Entry;

    pub(super) fn remember(_: &std::path::Path, _: &[u8]) -> Entry {
        Entry
    }

    pub(super) fn install(_: &'static str, _: u8) {}
}
