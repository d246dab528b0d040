//! The two streams: answers on standard output, everything else on standard error.

use std::io::{self, IsTerminal, Write};

use crate::error::{Error, Result};

/// Prints a line on standard error. Nobody listening is no reason to fail.
macro_rules! say {
    ($($text:tt)*) => {{
        use std::io::Write;
        let _ = writeln!(std::io::stderr().lock(), $($text)*);
    }};
}
pub(crate) use say;

/// Standard output, written piece by piece and flushed at once. The first failure is kept.
#[derive(Debug)]
pub(crate) struct Answers {
    failed: Option<io::Error>,
    /// Whether the text so far ends a line.
    at_line_start: bool,
}

impl Answers {
    pub(crate) fn new() -> Self {
        Self { failed: None, at_line_start: true }
    }

    /// Writes a piece of an answer; whether it went through.
    pub(crate) fn piece(&mut self, text: &str) -> bool {
        if self.failed.is_none() && !text.is_empty() {
            let mut out = io::stdout().lock();
            if let Err(e) = out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
                self.failed = Some(e);
            }
            self.at_line_start = text.ends_with('\n');
        }
        self.failed.is_none()
    }

    /// Ends the answer's last line.
    ///
    /// # Errors
    /// The first write that failed, of this answer or before.
    pub(crate) fn end(&mut self) -> Result<()> {
        if !self.at_line_start {
            self.piece("\n");
        }
        self.at_line_start = true;
        self.failed.take().map_or(Ok(()), |e| Err(Error::output(e)))
    }
}

/// Whether a person reads standard error.
pub(crate) fn watched() -> bool {
    io::stderr().is_terminal()
}
