//! The two streams: answers on standard output, everything else on standard error.

use std::io::{self, IsTerminal, Write};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

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
    thought: Thought,
}

/// What there is of a thought in front of the answer.
#[derive(Debug)]
enum Thought {
    None,
    /// Its marks are on standard output, the closing one excepted.
    Shown,
    /// A person sees that something happens.
    Hidden(ProgressBar),
}

/// What stands around a thought: faint letters for a person, the usual marks for a program.
fn marks() -> (&'static str, &'static str) {
    if io::stdout().is_terminal() { ("\x1b[2m", "\x1b[22m\n\n") } else { ("<think>\n", "\n</think>\n\n") }
}

impl Answers {
    pub(crate) fn new() -> Self {
        Self { failed: None, at_line_start: true, thought: Thought::None }
    }

    /// Writes a piece of a thought; whether it went through.
    pub(crate) fn thought(&mut self, text: &str) -> bool {
        if matches!(self.thought, Thought::None) {
            self.thought = Thought::Shown;
            self.write(marks().0);
        }
        self.write(text)
    }

    /// Shows that there is a thought, to whoever watches.
    pub(crate) fn hidden_thought(&mut self) -> bool {
        if matches!(self.thought, Thought::None) {
            let target = if watched() { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
            let style = ProgressStyle::with_template("thinking {elapsed}");
            let bar = ProgressBar::with_draw_target(None, target)
                .with_style(style.unwrap_or_else(|_| ProgressStyle::default_spinner()));
            bar.enable_steady_tick(Duration::from_millis(250));
            self.thought = Thought::Hidden(bar);
        }
        self.failed.is_none()
    }

    /// Writes a piece of an answer; whether it went through.
    pub(crate) fn piece(&mut self, text: &str) -> bool {
        if !text.is_empty() {
            self.end_thought();
        }
        self.write(text)
    }

    fn end_thought(&mut self) {
        match std::mem::replace(&mut self.thought, Thought::None) {
            Thought::None => {}
            Thought::Shown => drop(self.write(marks().1)),
            Thought::Hidden(bar) => bar.finish_and_clear(),
        }
    }

    fn write(&mut self, text: &str) -> bool {
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
        self.end_thought();
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
