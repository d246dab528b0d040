//! Ctrl-C and SIGTERM: plain `sigaction`, since all that is needed are flags, and a pipe that wakes whoever waits for input.

use std::fs::File;
use std::io::{self, PipeReader, Read};
use std::os::fd::{AsFd, AsRawFd, IntoRawFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering};

use crate::error::{Error, Result};

/// Ctrl-C stops an answer and nothing else.
static STOPS_ANSWERS: AtomicBool = AtomicBool::new(false);
static ANSWERING: AtomicBool = AtomicBool::new(false);
/// The answer is to stop.
static STOP: AtomicBool = AtomicBool::new(false);
/// The signal that ends the run; 0: none came.
static ENDING: AtomicI32 = AtomicI32::new(0);
/// How often the end was asked for.
static ASKED: AtomicU32 = AtomicU32::new(0);
/// A pipe whose two ends are this program's; something is in it once the run is to end. Its end to write to, for the handler.
static WAKE: AtomicI32 = AtomicI32::new(-1);
static WOKEN: OnceLock<PipeReader> = OnceLock::new();

/// While this lives, a model answers.
#[derive(Debug)]
pub(crate) struct Answering(());

impl Answering {
    pub(crate) fn begin() -> Self {
        STOP.store(false, Ordering::SeqCst);
        ANSWERING.store(true, Ordering::SeqCst);
        Self(())
    }

    /// Whether it should stop.
    pub(crate) fn interrupted(&self) -> bool {
        STOP.load(Ordering::SeqCst) || ENDING.load(Ordering::SeqCst) != 0
    }
}

impl Drop for Answering {
    fn drop(&mut self) {
        ANSWERING.store(false, Ordering::SeqCst);
    }
}

/// Fails once the run is to end.
///
/// # Errors
/// [`Error::Interrupted`].
pub(crate) fn go_on() -> Result<()> {
    match ENDING.load(Ordering::SeqCst) {
        0 => Ok(()),
        signal => Err(Error::Interrupted { signal }),
    }
}

extern "C" fn on_signal(signal: libc::c_int) {
    let ends = signal != libc::SIGINT || !STOPS_ANSWERS.load(Ordering::SeqCst);
    if !ends && ANSWERING.load(Ordering::SeqCst) && ENDING.load(Ordering::SeqCst) == 0 {
        STOP.store(true, Ordering::SeqCst);
        return;
    }
    match ASKED.fetch_add(1, Ordering::SeqCst) {
        0 => {
            ENDING.store(signal, Ordering::SeqCst);
            // SAFETY: both are async-signal-safe (POSIX 2.4.3); the descriptor is this program's to its end, or -1, which is
            // refused. Where a person types, the line editor handles SIGINT, and that alone wakes it.
            unsafe {
                libc::write(WAKE.load(Ordering::SeqCst), [0u8].as_ptr().cast(), 1);
                if signal != libc::SIGINT && STOPS_ANSWERS.load(Ordering::SeqCst) {
                    libc::raise(libc::SIGINT);
                }
            }
        }
        // In haste: the run ends already, and its files are being finished.
        1 => {}
        _ => default_action(signal),
    }
}

/// Ends the program as if nothing had been caught, so that the parent sees why.
fn default_action(signal: libc::c_int) {
    // SAFETY: both calls are async-signal-safe. In a handler the signal is blocked and delivered when that returns.
    unsafe {
        libc::signal(signal, libc::SIG_DFL);
        libc::raise(signal);
    }
}

/// Ends the program, whose work is done, in the way that the shell expects after this signal.
pub(crate) fn end_by(signal: i32) {
    default_action(signal);
}

/// From now on Ctrl-C and SIGTERM end the run when the answer at hand has stopped: [`go_on`] fails, and so do reads of
/// [`input`]. The third ends it at once. With `stops_answers` Ctrl-C only stops an answer, if there is one. System calls that
/// Ctrl-C interrupts are started again.
pub(crate) fn catch_interrupts(stops_answers: bool) {
    STOPS_ANSWERS.store(stops_answers, Ordering::SeqCst);
    // Without a pipe, input that is waited for has to come first.
    if let Ok((woken, wake)) = io::pipe()
        && WOKEN.set(woken).is_ok()
    {
        WAKE.store(wake.into_raw_fd(), Ordering::SeqCst);
    }
    for signal in [libc::SIGINT, libc::SIGTERM] {
        // SAFETY: `action` is a plain C struct for which all zeroes is valid; the handler has the signature that
        // `sa_sigaction` without SA_SIGINFO calls, and touches atomics and async-signal-safe calls only.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = on_signal as extern "C" fn(libc::c_int) as libc::sighandler_t;
            // The line editor's read must not go on.
            action.sa_flags = if stops_answers && signal != libc::SIGINT { 0 } else { libc::SA_RESTART };
            libc::sigemptyset(&mut action.sa_mask);
            // Can fail for a wrong signal number only.
            libc::sigaction(signal, &action, std::ptr::null_mut());
        }
    }
}

/// Standard input, whose reads fail once the run is to end.
///
/// # Errors
/// When the process has no descriptor left.
pub(crate) fn input() -> io::Result<impl Read> {
    Ok(Input { file: File::from(io::stdin().as_fd().try_clone_to_owned()?) })
}

struct Input {
    /// Not the standard library's, which has a buffer that `poll` does not know.
    file: File,
}

impl Read for Input {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let waits = |fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        // A negative descriptor is passed over.
        let mut both = [waits(self.file.as_raw_fd()), waits(WOKEN.get().map_or(-1, AsRawFd::as_raw_fd))];
        loop {
            // SAFETY: the pointer and the length are those of an array that outlives the call.
            let ready = unsafe { libc::poll(both.as_mut_ptr(), both.len() as libc::nfds_t, -1) };
            if ENDING.load(Ordering::SeqCst) != 0 {
                return Err(io::Error::other("the run is to end"));
            }
            if ready > 0 {
                return self.file.read(buffer);
            }
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
        }
    }
}
