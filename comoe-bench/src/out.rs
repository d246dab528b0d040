//! Standard output of the program. Whoever reads it may leave, and what is measured goes on without panic.

use std::fmt::Arguments;
use std::io::{ErrorKind, Write};
use std::sync::OnceLock;

static FAILED: OnceLock<std::io::Error> = OnceLock::new();

/// Prints a line on standard output; the first failure is kept for [`failure`].
macro_rules! out {
    ($($text:tt)*) => { $crate::out::line(format_args!($($text)*)) };
}
pub(crate) use out;

/// Prints a line on standard error. Nobody listening is no reason to fail.
macro_rules! note {
    ($($text:tt)*) => {{
        use std::io::Write;
        let _ = writeln!(std::io::stderr().lock(), $($text)*);
    }};
}
pub(crate) use note;

pub(crate) fn line(text: Arguments<'_>) {
    if FAILED.get().is_some() {
        return;
    }
    let mut stdout = std::io::stdout().lock();
    if let Err(error) = writeln!(stdout, "{text}").and_then(|()| stdout.flush()) {
        let _ = FAILED.set(error);
    }
}

/// What went wrong with standard output; nothing where its reader only left.
pub(crate) fn failure() -> Option<&'static std::io::Error> {
    FAILED.get().filter(|error| error.kind() != ErrorKind::BrokenPipe)
}
