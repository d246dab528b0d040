//! How far a download has come: bars where a person watches, a line now and then elsewhere.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use comoe_core::stats::human_bytes;
use indicatif::{HumanDuration, MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::output::{say, watched};

/// Where nobody watches, how often a line is printed.
const LINES: Duration = Duration::from_secs(15);
/// Longest file name that is shown whole.
const NAME: usize = 34;
const ROW: &str =
    "{prefix} {wide_bar} {binary_bytes:>10} of {binary_total_bytes:>10} {binary_bytes_per_sec:>12} {eta:>4}";

/// A download's progress, in all and by file.
pub(super) struct Progress {
    bars: MultiProgress,
    total: ProgressBar,
    fetched: AtomicU64,
    started: Instant,
    /// When the last line was printed; `None` where bars or nothing are shown.
    lines: Option<Mutex<Instant>>,
}

impl Progress {
    /// Shows a download of `files` files with `bytes` in all, or nothing.
    pub(super) fn new(files: usize, bytes: u64, quiet: bool) -> Self {
        let drawn = watched() && !quiet;
        let target = if drawn { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let bars = MultiProgress::with_draw_target(target);
        let total = bars.add(ProgressBar::new(bytes).with_style(style(ROW)));
        total.set_prefix(padded(&format!("{files} files")));
        let lines = (!drawn && !quiet).then(|| Mutex::new(Instant::now()));
        Self { bars, total, fetched: AtomicU64::new(0), started: Instant::now(), lines }
    }

    /// A file that begins.
    pub(super) fn file(&self, name: &str, bytes: u64) -> FileProgress<'_> {
        let bar = self.bars.insert_before(&self.total, ProgressBar::new(bytes).with_style(style(ROW)));
        bar.set_prefix(padded(name));
        FileProgress { all: self, bar }
    }

    /// Says something without tearing the bars.
    pub(super) fn say(&self, text: &str) {
        self.bars.suspend(|| say!("{text}"));
    }

    /// Bytes that came over the network.
    pub(super) fn fetched(&self) -> u64 {
        self.fetched.load(Ordering::Relaxed)
    }

    /// Since it began.
    pub(super) fn took(&self) -> Duration {
        self.started.elapsed()
    }

    fn line(&self) {
        let Some(Ok(mut last)) = self.lines.as_ref().map(Mutex::try_lock) else { return };
        if last.elapsed() < LINES {
            return;
        }
        *last = Instant::now();
        let (done, all) = (self.total.position(), self.total.length().unwrap_or(0));
        let rate = self.fetched() as f64 / self.took().as_secs_f64();
        let left = Duration::try_from_secs_f64(all.saturating_sub(done) as f64 / rate).unwrap_or_default();
        say!(
            "{} of {}, {}/s, {} left",
            human_bytes(done),
            human_bytes(all),
            human_bytes(rate as u64),
            HumanDuration(left)
        );
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.total.finish_and_clear();
        // Nobody watching is no reason to fail.
        let _ = self.bars.clear();
    }
}

/// One file's progress.
pub(super) struct FileProgress<'a> {
    all: &'a Progress,
    bar: ProgressBar,
}

impl FileProgress<'_> {
    /// These bytes were here already: they say nothing about the speed.
    pub(super) fn had(&self, bytes: u64) {
        for bar in [&self.bar, &self.all.total] {
            bar.inc(bytes);
            bar.reset_eta();
        }
    }

    /// These came now.
    pub(super) fn fetched(&self, bytes: u64) {
        self.bar.inc(bytes);
        self.all.total.inc(bytes);
        self.all.fetched.fetch_add(bytes, Ordering::Relaxed);
        self.all.line();
    }

    /// What there was counts no more.
    pub(super) fn restart(&self) {
        self.all.total.dec(self.bar.position());
        self.bar.set_position(0);
        self.bar.reset_eta();
    }
}

impl Drop for FileProgress<'_> {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
        self.all.bars.remove(&self.bar);
    }
}

/// The end of a name says most, with the same width for all.
fn padded(name: &str) -> String {
    let letters = name.chars().count();
    match letters > NAME {
        true => format!("…{}", name.chars().skip(letters - NAME + 1).collect::<String>()),
        false => format!("{name:<NAME$}"),
    }
}

/// A template of ours; if it were wrong, a bar of the default style would do as well.
fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_one_width_and_the_template_is_right() {
        for name in
            ["model.safetensors", &"é".repeat(40), "a/very/long/folder/model-00001-of-00016.safetensors"]
        {
            assert_eq!(padded(name).chars().count(), NAME, "{name}");
        }
        assert!(padded("x/model-00001-of-00016.safetensors-y").ends_with(".safetensors-y"));
        ProgressStyle::with_template(ROW).unwrap();
    }

    #[test]
    fn what_was_here_is_not_counted_as_fetched_and_a_restart_takes_all_back() {
        let progress = Progress::new(1, 100, true);
        let file = progress.file("a", 100);
        file.had(40);
        file.fetched(10);
        assert_eq!((progress.total.position(), progress.fetched()), (50, 10));
        file.restart();
        file.fetched(100);
        assert_eq!((progress.total.position(), progress.fetched()), (100, 110));
    }
}
