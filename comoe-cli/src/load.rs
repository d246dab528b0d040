//! From arguments to a model that is ready, and what is in force said aloud.

use std::cell::Cell;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use candle_core::{DType, Device};
use comoe_core::machine::ram_available;
use comoe_core::stats::human_bytes;
use comoe_core::{CacheOptions, Capacity, CudaOptions, PeerAccess, Prefetch};
use comoe_models::{Decoder, DenseFormat, KvFormat, LoadOptions, Model, Progress};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::args::{Format, ModelArgs};
use crate::device;
use crate::error::Result;
use crate::hub;
use crate::output::{say, watched};
use crate::pins::Pins;
use crate::places::CacheFolder;
use crate::predictor::PredictorTable;

/// Part of the memory available that experts may take when nothing is asked for. The rest is for the dense part,
/// the KV cache, and the page cache that misses are read through.
const SHARE: u64 = 2;

/// A model, or its decoder alone, and how it came about.
pub(crate) struct Loaded<M = Model> {
    pub(crate) model: M,
    pub(crate) folder: PathBuf,
    pub(crate) options: LoadOptions,
    pub(crate) took: Duration,
    started: Instant,
    /// From the start of loading to the first token of the first answer.
    first_token: Cell<Option<Duration>>,
    /// Nothing was said yet of experts that are not page-locked, since that was not known.
    locking: Cell<bool>,
    /// Where the device is not what would have been best, and why.
    notes: Vec<String>,
    /// Where what prefetching learns is kept.
    table: Option<PredictorTable>,
    /// Where the experts to pin come from.
    pins: Option<Pins>,
    /// Decode steps between checks of slots; 0: never.
    pub(crate) check: usize,
    /// Whether a GPU may replay decode steps as a graph.
    pub(crate) graph: bool,
}

/// Loads the model in `folder`.
///
/// # Errors
/// Names the file, tensor or number that is wrong.
pub(crate) fn load(folder: PathBuf, args: &ModelArgs, quiet: bool) -> Result<Loaded> {
    load_with(Model::load, folder, args, quiet)
}

/// Loads what computes in the model in `folder`; no tokenizer is needed.
///
/// # Errors
/// Names the file, tensor or number that is wrong.
pub(crate) fn load_decoder(folder: PathBuf, args: &ModelArgs, quiet: bool) -> Result<Loaded<Decoder>> {
    load_with(Decoder::open, folder, args, quiet)
}

/// How models are loaded: from a folder to a device, with options and reports.
type Load<M> = fn(&Path, &Device, &LoadOptions, &(dyn Fn(Progress) + Sync)) -> comoe_models::Result<M>;

fn load_with<M: AsRef<Decoder>>(
    load: Load<M>,
    folder: PathBuf,
    args: &ModelArgs,
    quiet: bool,
) -> Result<Loaded<M>> {
    args.check()?;
    let cache = CacheFolder::open();
    let say_where = || {
        if let Some(note) = &cache.note {
            say!("warning: {note}");
        }
    };
    if args.format != Format::Source {
        say_where();
    }
    let opened = device::open(&args.device)?;
    let on_gpu = opened.device.is_cuda();
    let bar = Bar::new();
    let locking = bar.clone();
    let mut options = options(args, on_gpu, 1 + opened.more.len());
    options.more_devices = opened.more.clone();
    options.cuda.page_lock_later = opened.more.is_empty() && options.cache.prefetch == Prefetch::Off;
    if !options.cuda.page_lock_later {
        options.cuda.progress = Some(Arc::new(move |done, total| locking.page_locking(done, total)));
    }
    options.cache_dir = cache.path.clone();
    let pins = Pins::find(args.pin.as_deref(), &folder, quiet)?;
    options.cache.pinned = pins.as_ref().map(Pins::experts).unwrap_or_default();
    let started = Instant::now();
    let converted = AtomicBool::new(false);
    let model = load(&folder, &opened.device, &options, &|p| {
        converted.fetch_or(matches!(p, Progress::Convert { .. }), Ordering::Relaxed);
        bar.show(p);
    });
    let model = model.and_then(|model| {
        if on_gpu {
            bar.preparing();
            model.as_ref().warm_up()?;
        }
        Ok(model)
    });
    let took = started.elapsed();
    bar.clear();
    if args.format == Format::Source && converted.into_inner() {
        say_where();
    }
    let mut notes = opened.notes;
    let (given, used) = (options.capacities.len().max(options.budgets.len()), 1 + opened.more.len());
    if given > used {
        notes.push(format!("room is given for {given} devices, and {used} used: the first count"));
    }
    if !on_gpu && (args.resident_format.is_some() || args.page_lock_limit().is_some()) {
        notes.push(
            "--resident-format, --page-lock-limit and --no-page-lock change nothing on the CPU".to_owned(),
        );
    }
    let (model, check, graph) = (model?, args.check.unwrap_or(0), !args.no_graph);
    let goes_on = model.as_ref().experts().page_locking().is_some_and(|locking| locking.took.is_none());
    let (first_token, locking) = (Cell::new(None), Cell::new(goes_on));
    let table = None;
    let mut loaded = Loaded {
        model,
        folder,
        options,
        took,
        started,
        first_token,
        locking,
        notes,
        table,
        pins,
        check,
        graph,
    };
    let (asked, experts) = (args.predictor_table.as_deref(), loaded.model.as_ref().experts());
    loaded.table = PredictorTable::open(asked, &loaded.folder, loaded.name(), experts, quiet)?;
    loaded.say_what_is_in_force(quiet);
    Ok(loaded)
}

/// How a model is loaded to so many GPUs or pools of the CPU; which, and where converted experts are kept, is not among it.
pub(crate) fn options(args: &ModelArgs, on_gpu: bool, devices: usize) -> LoadOptions {
    let mut cuda = CudaOptions::default();
    cuda.page_lock_limit = args.page_lock_limit();
    cuda.resident = args.resident_format.unwrap_or_default();
    LoadOptions {
        dtype: args.compute.unwrap_or(if on_gpu { DType::BF16 } else { DType::F32 }),
        dense: args.dense_format,
        kv: args.kv_format,
        context: args.context,
        most_context: args.context_limit,
        cache: CacheOptions {
            capacity: args.capacities().first().copied().unwrap_or_else(|| {
                match on_gpu || !args.vram.is_empty() || args.ram.is_some() {
                    true => Capacity::Fit,
                    false => share_of(ram_available().map(|bytes| bytes / devices as u64)),
                }
            }),
            policy: args.policy,
            scope: args.scope,
            prefetch: args.prefetch,
            driver: args.driver,
            ring: args.ring,
            budget: args.vram.first().copied(),
            ram: args.ram,
            ..CacheOptions::default()
        },
        format: match args.format {
            Format::Source => None,
            Format::Converted(format) => Some(format),
        },
        cache_dir: None,
        cuda,
        more_devices: Vec::new(),
        capacities: args.capacities(),
        budgets: args.vram.clone(),
        peer_access: if args.no_peer_access { PeerAccess::Off } else { PeerAccess::Auto },
    }
}

/// The share of so much host memory that experts may take when nothing is asked for.
pub(crate) fn share_of(ram: Option<u64>) -> Capacity {
    ram.map_or(Capacity::All, |bytes| Capacity::Bytes(bytes / SHARE))
}

impl<M: AsRef<Decoder>> Loaded<M> {
    /// The model's name: that on the hub, or that of its folder.
    pub(crate) fn name(&self) -> String {
        name_of_model(&self.folder)
    }

    /// An answer is done, whose tokens behind the first took `decode`.
    pub(crate) fn answered(&self, decode: Duration) {
        if self.first_token.get().is_none() {
            self.first_token.set(Some(self.started.elapsed().saturating_sub(decode)));
        }
    }

    /// From the start of loading to the first token of the first answer.
    pub(crate) fn first_token(&self) -> Option<Duration> {
        self.first_token.get()
    }

    /// Once, when page-locking has ended before all was locked: what is in force.
    pub(crate) fn partly_locked(&self) -> Option<String> {
        let locking = self.model.as_ref().experts().page_locking().filter(|_| self.locking.get())?;
        self.locking.set(locking.took.is_none());
        locking.why_partial.is_some().then(|| locking.to_string())
    }

    /// Keeps what the run learned for the next one: what prefetching and pinning go by.
    pub(crate) fn keep_learned(&self) {
        if let Some(table) = &self.table {
            table.save(self.model.as_ref().experts());
        }
        if let Some(pins) = &self.pins {
            pins.save(&self.name(), self.model.as_ref().experts());
        }
    }

    /// What is known of it, for `--stats`.
    pub(crate) fn predictor_table(&self) -> Option<String> {
        self.table.as_ref().and_then(|table| table.line(self.model.as_ref().experts()))
    }

    fn say_what_is_in_force(&self, quiet: bool) {
        let experts = self.model.as_ref().experts();
        if !quiet {
            let (stats, directory) = (experts.stats(), experts.directory());
            let layers = directory.layers();
            let device = experts.backend_info();
            let details = device.notes.iter().map(|n| format!(", {n}")).collect::<String>();
            say!(
                "{} on {}{details}: {}{}{}, {} layers with experts, context {}, loaded in {:.2} s",
                self.name(),
                device.device,
                if self.options.dtype == DType::BF16 { "bf16 activations" } else { "f32 activations" },
                match self.options.dense {
                    DenseFormat::Plain => "",
                    DenseFormat::Int8 => ", int8 dense weights",
                },
                match self.options.kv {
                    KvFormat::Plain => "",
                    KvFormat::Int8 => ", int8 KV cache",
                },
                layers.len(),
                self.model.as_ref().context(),
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
            let ring = match stats.ring_slots {
                0 => String::new(),
                n => format!(", a ring of {n} for prompts ({})", human_bytes((n * stats.slot_bytes) as u64)),
            };
            say!("experts: {}, {room}{ring}", self.format());
            let decoder = self.model.as_ref();
            let shown = decoder.device().is_cuda() || self.options.cache.budget.is_some();
            for (d, device) in decoder.device_plans().iter().enumerate().filter(|_| shown) {
                let m = &device.memory;
                let whose = stats.devices.get(d).map(|d| format!(" of {}", d.device)).unwrap_or_default();
                say!(
                    "memory{whose}: {} may be taken; {} for dense weights, {} for the KV cache, {} for activations and buffers, {} \
                     margin",
                    human_bytes(m.budget),
                    human_bytes(m.device.dense),
                    human_bytes(m.device.kv),
                    human_bytes(m.device.workspace + m.device.buffers),
                    human_bytes(m.margin)
                );
            }
            let notes = self.notes.iter().chain(self.model.as_ref().notes());
            notes.for_each(|note| say!("note: {note}"));
        }
    }

    /// The experts' format in force.
    pub(crate) fn format(&self) -> String {
        self.model.as_ref().experts().format().to_string()
    }
}

/// A model's name: that on the hub, or that of its folder or file.
pub(crate) fn name_of_model(path: &Path) -> String {
    hub::name_of_snapshot(path).unwrap_or_else(|| name_of(path))
}

/// Last part of a path, also of `.` and the like.
fn name_of(folder: &Path) -> String {
    let full = folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
    full.file_name().map_or_else(|| full.display().to_string(), |n| n.to_string_lossy().into_owned())
}

/// A load that is done before this needs no bar: it would only flicker.
const PATIENCE: Duration = Duration::from_millis(300);

/// Progress of loading, drawn where a person watches. Clones are the same bar.
#[derive(Clone)]
pub(crate) struct Bar {
    bar: ProgressBar,
    started: Instant,
}

impl Bar {
    pub(crate) fn new() -> Self {
        let target = if watched() { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        Self { bar: ProgressBar::with_draw_target(None, target), started: Instant::now() }
    }

    pub(crate) fn show(&self, progress: Progress) {
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
                self.bytes("loading {wide_bar} {bytes} of {total_bytes} {eta:>4}", done, total);
            }
            _ => {}
        }
    }

    fn page_locking(&self, done: u64, total: u64) {
        if self.started.elapsed() >= PATIENCE {
            self.bytes("page-locking {wide_bar} {bytes} of {total_bytes} {eta:>4}", done, total);
        }
    }

    /// Reports come from several threads, in any order.
    pub(crate) fn verifying(&self, done: u64, total: u64) {
        if self.started.elapsed() >= PATIENCE {
            let done = self.bar.position().max(done);
            self.bytes("reading {wide_bar} {bytes} of {total_bytes} {eta:>4}", done, total);
        }
    }

    /// Reports come from several threads, in any order.
    pub(crate) fn comparing(&self, done: usize, total: usize) {
        if self.bar.length() != Some(total as u64) {
            self.bar.set_style(style("comparing {wide_bar} {pos} of {len} experts {eta:>4}"));
            self.bar.set_length(total as u64);
        }
        self.bar.set_position(self.bar.position().max(done as u64));
    }

    pub(crate) fn evaluating(&self, done: u64, total: u64) {
        if self.bar.length() != Some(total) {
            self.bar.set_style(style("evaluating {wide_bar} {pos} of {len} tokens {eta:>4}"));
            self.bar.set_length(total);
        }
        self.bar.set_position(done);
    }

    /// Drawn at once: it is not known how long it takes.
    fn preparing(&self) {
        self.bar.set_style(style(
            "preparing the GPU's kernels (up to half a minute the first time) {elapsed:>4}",
        ));
        self.bar.enable_steady_tick(Duration::from_millis(500));
    }

    fn bytes(&self, template: &'static str, done: u64, total: u64) {
        if self.bar.length() != Some(total) {
            self.bar.set_style(style(template));
            self.bar.set_length(total);
        }
        self.bar.set_position(done);
    }

    pub(crate) fn clear(&self) {
        self.bar.finish_and_clear();
        let _ = std::io::stderr().flush();
    }
}

/// A template of ours; if it were wrong, a bar of the default style would do as well.
fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}
