//! From arguments to a model that is ready, and what is in force said aloud.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use candle_core::Device;
use comoe_core::stats::human_bytes;
use comoe_core::{CacheOptions, Capacity};
use comoe_models::{LoadOptions, Model, Progress};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::args::{Format, ModelArgs};
use crate::error::Result;
use crate::output::{say, watched};
use crate::places::CacheFolder;
use crate::sys;

/// Part of the memory available that experts may take when nothing is asked for. The rest is for the dense part,
/// the KV cache, and the page cache that misses are read through.
const SHARE: u64 = 2;

/// A model and how it came about.
pub(crate) struct Loaded {
    pub(crate) model: Model,
    pub(crate) folder: PathBuf,
    pub(crate) options: LoadOptions,
    pub(crate) took: Duration,
}

/// Loads the model in `folder`.
///
/// # Errors
/// Names the file, tensor or number that is wrong.
pub(crate) fn load(folder: PathBuf, args: &ModelArgs, quiet: bool) -> Result<Loaded> {
    let cache_dir = match args.format {
        Format::Source => None,
        Format::Converted(_) => {
            let cache = CacheFolder::open();
            if let Some(note) = &cache.note {
                say!("note: {note}");
            }
            cache.path
        }
    };
    let options = LoadOptions {
        context: args.context,
        cache: CacheOptions {
            capacity: args.capacity().unwrap_or_else(default_capacity),
            policy: args.policy,
            scope: args.scope,
            prefetch: args.prefetch,
            ..CacheOptions::default()
        },
        format: match args.format {
            Format::Source => None,
            Format::Converted(format) => Some(format),
        },
        cache_dir,
        ..LoadOptions::default()
    };
    let bar = Bar::new();
    let started = Instant::now();
    let model = Model::load(&folder, &Device::Cpu, &options, &|p| bar.show(p));
    let took = started.elapsed();
    bar.clear();
    let loaded = Loaded { model: model?, folder, options, took };
    loaded.say_what_is_in_force(quiet);
    Ok(loaded)
}

/// As many experts as fit the share of memory that experts may take, all of them if they fit.
fn default_capacity() -> Capacity {
    sys::available_memory().map_or(Capacity::All, |bytes| Capacity::Bytes(bytes / SHARE))
}

impl Loaded {
    /// The model's name: that of its folder.
    pub(crate) fn name(&self) -> String {
        name_of(&self.folder)
    }

    fn say_what_is_in_force(&self, quiet: bool) {
        let experts = self.model.experts();
        if !quiet {
            let (stats, directory) = (experts.stats(), experts.directory());
            let layers = directory.layers();
            let device = experts.backend_info();
            let details = device.notes.iter().map(|n| format!(", {n}")).collect::<String>();
            say!(
                "{} on {}{details}: {} layers with experts, context {}, loaded in {:.2} s",
                self.name(),
                device.device,
                layers.len(),
                self.model.decoder().context(),
                self.took.as_secs_f64()
            );
            let room = if stats.slots == stats.records {
                format!("all {} resident ({})", stats.records, human_bytes(stats.pool_bytes()))
            } else {
                format!(
                    "{} slots for {} ({} of {}), {}, scope {}, prefetch {}",
                    stats.slots,
                    stats.records,
                    human_bytes(stats.pool_bytes()),
                    human_bytes(directory.total_bytes()),
                    experts.policy(),
                    self.options.cache.scope,
                    self.options.cache.prefetch
                )
            };
            say!("experts: {}, {room}", self.format());
        }
        for note in self.model.decoder().notes() {
            say!("note: {note}");
        }
    }

    /// The experts' format in force.
    pub(crate) fn format(&self) -> String {
        self.model.experts().format().to_string()
    }
}

/// Last part of a path, also of `.` and the like.
fn name_of(folder: &Path) -> String {
    let full = folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
    full.file_name().map_or_else(|| full.display().to_string(), |n| n.to_string_lossy().into_owned())
}

/// A load that is done before this needs no bar: it would only flicker.
const PATIENCE: Duration = Duration::from_millis(300);

/// Progress of loading, drawn where a person watches.
struct Bar {
    bar: ProgressBar,
    started: Instant,
}

impl Bar {
    fn new() -> Self {
        let target = if watched() { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        Self { bar: ProgressBar::with_draw_target(None, target), started: Instant::now() }
    }

    fn show(&self, progress: Progress) {
        if self.started.elapsed() < PATIENCE {
            return;
        }
        match progress {
            Progress::Convert { done, total } => {
                self.bar.set_style(style("converting {wide_bar} {pos} of {len} experts {eta:>4}"));
                self.bar.set_length(total as u64);
                // Reports come from several threads, in any order.
                self.bar.set_position(self.bar.position().max(done as u64));
            }
            Progress::Dense { done, total } => {
                if self.bar.length() != Some(total) {
                    self.bar.set_style(style("loading {wide_bar} {bytes} of {total_bytes} {eta:>4}"));
                    self.bar.set_length(total);
                }
                self.bar.set_position(done);
            }
            _ => {}
        }
    }

    fn clear(&self) {
        self.bar.finish_and_clear();
        let _ = std::io::stderr().flush();
    }
}

/// A template of ours; if it were wrong, a bar of the default style would do as well.
fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}
