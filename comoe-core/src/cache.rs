//! The one door: [`ExpertCache`] for experts, [`RecordCache`] for any other keyed bytes.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::{DType, Device, Tensor};

use crate::backend::cpu::CpuBackend;
use crate::backend::cuda::{CudaOptions, cuda_memory};
use crate::backend::{Backend, BackendInfo, DeviceStep, DriverKind, MOST_DEVICE_TOKENS, Work};
use crate::error::{Error, Result};
use crate::expert::{ExpertId, ExpertLayout, ExpertSpec};
use crate::format::ExpertFormat;
use crate::machine;
use crate::policy::PolicyKind;
use crate::pool::{Pool, PoolShape};
use crate::predict::{Correlation, EvidenceGate, GateOptions, Predictor, Prefetch};
use crate::schedule::{Engine, Need, PrefetchEngine, PrefetchTrigger, Rules, Step};
use crate::stats::CacheStats;
use crate::store::{Directory, ExpertStore, RecordIndex, RecordSource};
use crate::trace::{Routed, RoutingObserver};

/// How many records the pool holds.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[non_exhaustive]
pub enum Capacity {
    /// Every record: the resident run, the reference for exactness and speed.
    #[default]
    All,
    /// So many slots in all.
    Slots(usize),
    /// As many slots as fit this many bytes.
    Bytes(u64),
    /// This part of all records, 0 to 1.
    Fraction(f64),
    /// As many slots as fit the memory that is free on the device, less [`CacheOptions::reserve`].
    Fit,
}

/// Which records compete for a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Scope {
    /// Those of the same layer: each layer has slots of its own.
    #[default]
    Layer,
    /// All.
    Global,
}

impl std::fmt::Display for Scope {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Layer => "layer",
            Self::Global => "global",
        })
    }
}

impl std::str::FromStr for Scope {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self> {
        match s {
            "layer" => Ok(Self::Layer),
            "global" => Ok(Self::Global),
            _ => Err(Error::BadArgument {
                what: "scope",
                reason: format!("{s:?} is unknown: use layer or global"),
            }),
        }
    }
}

/// How a cache is run. What both kinds of cache have in common.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct CacheOptions {
    /// Slots.
    pub capacity: Capacity,
    /// Who leaves.
    pub policy: PolicyKind,
    /// Who competes.
    pub scope: Scope,
    /// Who is brought ahead of time.
    pub prefetch: Prefetch,
    /// When.
    pub prefetch_trigger: PrefetchTrigger,
    /// Most records that one row of a step uses (the model's top-k); 0 when it is not known. Fewer slots are
    /// refused.
    pub top_k: usize,
    /// Device memory that slots leave free, in bytes: for dense weights, KV cache and workspace that come later. On a
    /// GPU, slots that do not fit beside it are refused before anything is loaded.
    pub reserve: u64,
    /// Who drives a step.
    pub driver: DriverKind,
}

/// Memory of a device that slots may take.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Room {
    device: String,
    free: u64,
    reserve: u64,
    /// Whether more than this is refused. Host memory is no hard limit: it holds the page cache too.
    hard: bool,
}

impl Room {
    fn of(device: &Device, reserve: u64) -> Result<Option<Self>> {
        Ok(match device {
            Device::Cuda(_) => {
                let (free, _) = cuda_memory(device)?;
                Some(Self { device: format!("{:?}", device.location()), free, reserve, hard: true })
            }
            _ => {
                let room = |free| Self { device: "this machine".to_owned(), free, reserve, hard: false };
                machine::ram_available().map(room)
            }
        })
    }

    /// Slots of `slot_bytes` that fit.
    fn slots(&self, slot_bytes: usize) -> usize {
        let bytes = self.free.saturating_sub(self.reserve);
        usize::try_from(bytes / slot_bytes as u64).unwrap_or(usize::MAX)
    }

    fn refuse(&self, slots: usize, slot_bytes: usize) -> Error {
        Error::NoRoom {
            device: self.device.clone(),
            slots,
            asked: slots as u64 * slot_bytes as u64,
            free: self.free,
            reserve: self.reserve,
            most: self.slots(slot_bytes),
        }
    }
}

/// What a cache will use: computed from the options and a directory alone.
#[derive(Debug, Clone, PartialEq)]
struct Layout {
    shape: PoolShape,
    prefetch: Prefetch,
    notes: Vec<String>,
}

impl CacheOptions {
    /// Slots for a store, before it is known how they are divided.
    fn slots(&self, directory: &Directory, slot_bytes: usize, room: Option<&Room>) -> Result<usize> {
        let all = directory.len();
        let least = self.top_k.clamp(1, all);
        if self.capacity == Capacity::Fit {
            let Some(room) = room else { return Ok(all) };
            let fit = room.slots(slot_bytes);
            // With a slot for every record nothing is staged.
            let slots = if fit >= all { all } else { fit.saturating_sub(self.staging()) };
            return if slots < least { Err(room.refuse(least, slot_bytes)) } else { Ok(slots) };
        }
        let slot_bytes = slot_bytes as u64;
        let slots = match self.capacity {
            Capacity::All | Capacity::Fit => all,
            Capacity::Slots(n) => n,
            Capacity::Bytes(bytes) => usize::try_from(bytes / slot_bytes).unwrap_or(usize::MAX),
            Capacity::Fraction(f) if f > 0.0 && f <= 1.0 => (all as f64 * f).round() as usize,
            Capacity::Fraction(f) => {
                let reason = format!("a fraction of the experts must be above 0 and at most 1, not {f}");
                return Err(Error::BadArgument { what: "capacity", reason });
            }
        };
        match self.capacity {
            Capacity::Bytes(asked) if slots < least => Err(Error::PoolTooSmall {
                asked,
                record_bytes: slot_bytes as usize,
                least: least as u64 * slot_bytes,
                slots: least,
            }),
            _ if slots < least => Err(Error::TooFewSlots { asked: slots, least }),
            _ => Ok(slots.min(all)),
        }
    }

    /// Staging slots, unless every record has a slot.
    fn staging(&self) -> usize {
        match self.prefetch {
            Prefetch::Off => 0,
            // Room for what was guessed for this layer and for the next.
            Prefetch::Correlation | Prefetch::Auto => 2 * self.prefetch_width(),
        }
    }

    fn layout(&self, directory: &Directory, slot_bytes: usize, room: Option<&Room>) -> Result<Layout> {
        let slots = self.slots(directory, slot_bytes, room)?;
        let experts: Vec<usize> = directory.layers().iter().map(|e| e.experts).collect();
        let mut notes = Vec::new();
        let resident = slots == directory.len();
        let mut prefetch = self.prefetch;
        if resident && prefetch != Prefetch::Off {
            prefetch = Prefetch::Off;
            notes.push("every expert has a slot, so nothing is prefetched".to_owned());
        }
        let staging = if prefetch == Prefetch::Off { 0 } else { self.staging() };
        if let Some(room) = room.filter(|room| room.hard && room.slots(slot_bytes) < slots + staging) {
            return Err(room.refuse(slots + staging, slot_bytes));
        }
        let one_token = experts.len() * self.top_k.max(1);
        let shape = if self.scope == Scope::Global {
            PoolShape::global(slots, experts.len(), staging)
        } else if slots < one_token && !resident {
            notes.push(format!(
                "{slots} slots are less than one token uses ({one_token}), too few to give every layer its own: all \
                 layers share one pool and will seldom hit; {one_token} slots or more would help"
            ));
            PoolShape::global(slots, experts.len(), staging)
        } else {
            PoolShape::by_layer(slots, &experts, staging)
        };
        Ok(Layout { shape, prefetch, notes })
    }

    fn prefetch_width(&self) -> usize {
        self.top_k.max(1)
    }
}

/// Builds a cache; see [`ExpertCache::builder`] and [`RecordCache::builder`].
#[must_use]
pub struct CacheBuilder<S> {
    store: S,
    device: Device,
    options: CacheOptions,
    backend: Option<Box<dyn Backend>>,
    cuda: CudaOptions,
    rules: Rules,
}

impl<S> CacheBuilder<S> {
    fn new(store: S, device: &Device) -> Self {
        Self {
            store,
            device: device.clone(),
            options: CacheOptions::default(),
            backend: None,
            cuda: CudaOptions::default(),
            rules: Rules::default(),
        }
    }

    /// Sets every option at once.
    pub fn options(mut self, options: CacheOptions) -> Self {
        self.options = options;
        self
    }

    /// How many records the pool holds. Default: all.
    pub fn capacity(mut self, capacity: Capacity) -> Self {
        self.options.capacity = capacity;
        self
    }

    /// Who leaves when a slot is needed. Default: [`PolicyKind::Auto`].
    pub fn policy(mut self, policy: PolicyKind) -> Self {
        self.options.policy = policy;
        self
    }

    /// Whether layers share slots. Default: each has its own.
    pub fn scope(mut self, scope: Scope) -> Self {
        self.options.scope = scope;
        self
    }

    /// What is brought ahead of time. Default: nothing.
    pub fn prefetch(mut self, prefetch: Prefetch) -> Self {
        self.options.prefetch = prefetch;
        self
    }

    /// When it is brought. Default: once all of the layer's work is enqueued.
    pub fn prefetch_trigger(mut self, trigger: PrefetchTrigger) -> Self {
        self.options.prefetch_trigger = trigger;
        self
    }

    /// Most records that one row of a step uses (the model's top-k), so that a pool that cannot hold even those is
    /// refused at once.
    pub fn top_k(mut self, top_k: usize) -> Self {
        self.options.top_k = top_k;
        self
    }

    /// Who drives a step: see [`DriverKind`]. Default: the device where it can, the host otherwise.
    pub fn driver(mut self, driver: DriverKind) -> Self {
        self.options.driver = driver;
        self
    }

    /// A backend of the caller's own, instead of the device's.
    pub fn backend(mut self, backend: Box<dyn Backend>) -> Self {
        self.backend = Some(backend);
        self
    }

    /// How a GPU is used: page-locking, progress of loading. Other devices do not look at it.
    pub fn cuda(mut self, options: CudaOptions) -> Self {
        self.cuda = options;
        self
    }

    #[doc(hidden)]
    pub fn rules(mut self, rules: Rules) -> Self {
        self.rules = rules;
        self
    }

    /// `of_experts`: the records are experts, which a device can drive.
    fn core(self, source: Arc<dyn RecordSource>, of_experts: bool) -> Result<(Core, S)> {
        let Self { store, device, options, backend, cuda, rules } = self;
        let directory = Arc::new(source.directory().clone());
        if directory.is_empty() {
            return Err(Error::NoExperts { what: "the store".to_owned() });
        }
        let slot_bytes = match device {
            Device::Cuda(_) => cuda.slot_bytes(&directory),
            _ => directory.largest_record(),
        };
        let room = Room::of(&device, options.reserve)?;
        let mut layout = options.layout(&directory, slot_bytes, room.as_ref())?;
        let backend = match backend {
            Some(backend) => backend,
            None => backend_for(&device, &source, cuda)?,
        };
        let mut info = backend.info();
        let records = directory.len();
        let may_drive = matches!(device, Device::Cuda(_)) || options.driver == DriverKind::Device;
        let policy = options.policy.in_force(may_drive);
        let sharing = directory.layers().len().div_ceil(layout.shape.partitions.len().max(1));
        let per_token = options.top_k.max(1) * sharing;
        let pool = Pool::new(layout.shape, records, |slots| policy.build(slots, records, per_token));
        let experts: Vec<usize> = directory.layers().iter().map(|e| e.experts).collect();
        let (trigger, width) = (options.prefetch_trigger, options.prefetch_width());
        let prefetch =
            |predictor: Box<dyn Predictor>, gate| Some(PrefetchEngine::new(predictor, trigger, width, gate));
        let prefetch = match layout.prefetch {
            Prefetch::Off => None,
            Prefetch::Correlation => prefetch(Box::new(Correlation::new(&experts, 1)), None),
            Prefetch::Auto => {
                let gate = EvidenceGate::new(experts.len(), GateOptions::new(width));
                prefetch(Box::new(Correlation::new(&experts, 1)), Some(gate))
            }
        };
        let mut engine = Engine::new(backend, directory.clone(), pool, prefetch, slot_bytes, rules)?;
        match drive(options.driver, policy, &mut engine, of_experts) {
            Ok(()) => info.notes.push(format!(
                "steps of up to {MOST_DEVICE_TOKENS} tokens are driven by the device, without a host round trip"
            )),
            Err(reason) if options.driver == DriverKind::Device => {
                let reason = format!("the device cannot drive this cache: {reason}; use auto or host");
                return Err(Error::BadArgument { what: "driver", reason });
            }
            // Elsewhere there is nothing but the host to expect.
            Err(reason) if options.driver == DriverKind::Auto && of_experts && device.is_cuda() => {
                layout.notes.push(format!("every step is driven by the host: {reason}"));
            }
            Err(_) => {}
        }
        layout.notes.iter().for_each(|note| tracing::warn!("{note}"));
        info.notes.iter().for_each(|note| tracing::info!("{}: {note}", info.device));
        let core = Core {
            engine: Mutex::new(engine),
            directory,
            source,
            info,
            notes: layout.notes,
            device,
            policy,
            observer: Mutex::new(None),
        };
        Ok((core, store))
    }
}

/// Lets the device drive, or says why not.
fn drive(
    asked: DriverKind,
    policy: PolicyKind,
    engine: &mut Engine,
    of_experts: bool,
) -> std::result::Result<(), String> {
    if !of_experts {
        return Err("its records are no experts".to_owned());
    }
    match (asked, policy) {
        (DriverKind::Host, _) => Err("the host driver was asked for".to_owned()),
        (_, PolicyKind::Lru) => engine.offer_device(),
        (_, other) => Err(format!("the policy is {other}, the device knows lru")),
    }
}

#[cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "only GPUs have options"))]
fn backend_for(
    device: &Device,
    source: &Arc<dyn RecordSource>,
    cuda: CudaOptions,
) -> Result<Box<dyn Backend>> {
    match device {
        Device::Cpu => Ok(Box::new(CpuBackend::new(source.clone()))),
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => Ok(Box::new(crate::backend::cuda::CudaBackend::new(gpu, source.clone(), cuda)?)),
        other => Err(Error::Device {
            asked: format!("{:?}", other.location()),
            reason: "this build of comoe-core has no backend for it: use the CPU, or build with feature cuda"
                .into(),
        }),
    }
}

/// What both caches share.
struct Core {
    engine: Mutex<Engine>,
    directory: Arc<Directory>,
    source: Arc<dyn RecordSource>,
    info: BackendInfo,
    notes: Vec<String>,
    device: Device,
    policy: PolicyKind,
    observer: Mutex<Option<Box<dyn RoutingObserver>>>,
}

impl Core {
    fn is_observed(&self) -> bool {
        self.observer.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// Tells the observer, if there is one.
    fn observed(&self, step: &Routed<'_>) {
        if let Some(observer) = self.observer.lock().unwrap_or_else(PoisonError::into_inner).as_mut() {
            observer.step(step);
        }
    }

    /// Callers take turns. A panic in another thread leaves the engine as an error would: its own state decides.
    fn engine(&self) -> MutexGuard<'_, Engine> {
        self.engine.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ordinal(&self, layer: usize) -> Result<usize> {
        let unknown = Error::UnknownExpert { id: ExpertId { layer, expert: 0 }, available: 0 };
        self.directory.ordinal(layer).ok_or(unknown)
    }

    /// The step set in order of first use: every record once, with all assignments that chose it.
    fn needs(&self, ordinal: usize, choices: &[u32]) -> Result<Vec<Need>> {
        let entry = &self.directory.layers()[ordinal];
        let mut place = vec![usize::MAX; entry.experts];
        let mut needs: Vec<Need> = Vec::new();
        for (assignment, &expert) in choices.iter().enumerate() {
            let id = ExpertId { layer: entry.layer, expert: expert as usize };
            let Some(at) = place.get_mut(expert as usize) else {
                return Err(Error::UnknownExpert { id, available: entry.experts });
            };
            if *at == usize::MAX {
                *at = needs.len();
                needs.push(Need { record: RecordIndex(entry.first + expert), assignments: Vec::new() });
            }
            needs[*at].assignments.push(assignment as u32);
        }
        Ok(needs)
    }

    fn check(&self) -> Result<usize> {
        self.engine().check_slots(&|record, out| self.source.read(record, out))
    }

    fn check_sample(&self, most: usize) -> Result<usize> {
        self.engine().check_sample(most, &|record, out| self.source.read(record, out))
    }
}

macro_rules! shared_methods {
    () => {
        /// Counters since the cache was built or reset. Where the device drives steps, waits for those so far.
        pub fn stats(&self) -> CacheStats {
            self.core.engine().stats()
        }

        /// Starts the counters anew. What is in the slots stays.
        pub fn reset_stats(&self) {
            self.core.engine().reset_stats();
        }

        /// The device, and what is in force on it.
        pub fn backend_info(&self) -> &BackendInfo {
            &self.core.info
        }

        /// Where what is in force differs from what was asked, and why.
        pub fn notes(&self) -> &[String] {
            &self.core.notes
        }

        /// The policy in force, also where [`PolicyKind::Auto`] was asked for.
        pub fn policy(&self) -> PolicyKind {
            self.core.policy
        }

        /// The records that the cache serves.
        pub fn directory(&self) -> &Directory {
            &self.core.directory
        }

        /// Compares every resident slot with the store and returns how many were compared. Slow: for debugging.
        ///
        /// # Errors
        /// [`Error::SlotDiffers`] for the first slot that differs, or the failure of a transfer.
        pub fn check(&self) -> Result<usize> {
            self.core.check()
        }

        /// Compares up to `most` resident slots, and the keys they are found under, with the store; returns how many
        /// were compared. Repeated calls go round all slots. A difference stops the cache: nothing in it is trusted
        /// from then on.
        ///
        /// # Errors
        /// [`Error::SlotDiffers`] or [`Error::KeyDiffers`] for the first slot that differs, [`Error::Stopped`] after
        /// an earlier failure, or the failure of a transfer.
        pub fn check_sample(&self, most: usize) -> Result<usize> {
            self.core.check_sample(most)
        }

        /// Runs `f` on the backend while nobody else uses it. For tests that look into slots or damage them.
        #[doc(hidden)]
        pub fn with_backend<R>(&self, f: impl FnOnce(&mut dyn Backend, &Pool) -> R) -> R {
            let mut engine = self.core.engine();
            engine.with_backend(f)
        }
    };
}

/// Experts in host memory, slots on the device, and the schedule between them.
///
/// Output never depends on how many slots there are, nor on policy, scope or prefetch: hit and miss run the same
/// arithmetic on the same bytes in the same order. Callers on several threads take turns.
pub struct ExpertCache {
    core: Core,
    specs: Vec<ExpertSpec>,
    layouts: Vec<ExpertLayout>,
}

impl ExpertCache {
    /// Starts building a cache of `store`'s experts on `device`.
    pub fn builder(store: ExpertStore, device: &Device) -> CacheBuilder<ExpertStore> {
        CacheBuilder::new(store, device)
    }

    /// The experts of the model's layer `layer`. A layer without experts is reported by the call that uses it.
    pub fn layer(&self, layer: usize) -> CacheLayer<'_> {
        CacheLayer { cache: self, layer }
    }

    /// The records' format: what the slots hold.
    pub fn format(&self) -> ExpertFormat {
        // A store has one format, and an empty one is refused when the cache is built.
        self.layouts[0].format
    }

    /// From now on `observer` sees the routing of every layer step, before it runs; `None` ends that. While there is one
    /// the host drives every step, because only there is the routing seen. Without one a step pays for one uncontended
    /// lock.
    pub fn observe(&self, observer: Option<Box<dyn RoutingObserver>>) {
        *self.core.observer.lock().unwrap_or_else(PoisonError::into_inner) = observer;
    }

    /// Waits for the device-driven steps so far, and reports what was wrong with their routing. Without such steps it
    /// does nothing.
    ///
    /// # Errors
    /// As [`CacheLayer::forward`].
    pub fn flush(&self) -> Result<()> {
        self.core.engine().report_fault(true)
    }

    shared_methods!();
}

impl CacheBuilder<ExpertStore> {
    /// Makes the pool and starts the backend. Nothing is loaded yet.
    ///
    /// # Errors
    /// [`Error::TooFewSlots`], [`Error::PoolTooSmall`] or [`Error::BadArgument`] for a capacity that does not work,
    /// [`Error::Device`] for a device that cannot be used, [`Error::NoExperts`] for an empty store.
    pub fn build(mut self) -> Result<ExpertCache> {
        let source = self.store.source();
        let layers = 0..source.directory().layers().len();
        let experts: Vec<_> = layers.map(|o| (*self.store.spec(o), *self.store.layout(o))).collect();
        self.cuda = self.cuda.with_experts(experts);
        let (core, store) = self.core(source, true)?;
        let ordinals = 0..core.directory.layers().len();
        let specs = ordinals.clone().map(|o| *store.spec(o)).collect();
        let layouts = ordinals.map(|o| *store.layout(o)).collect();
        Ok(ExpertCache { core, specs, layouts })
    }
}

/// One layer of an [`ExpertCache`]: everything after top-k.
pub struct CacheLayer<'a> {
    cache: &'a ExpertCache,
    layer: usize,
}

impl CacheLayer<'_> {
    /// `y[t] = sum over j of weights[t, j] * expert ids[t, j] (x[t])`, summed in the order of j, in F32.
    ///
    /// `x` is `[tokens, hidden]` in F32, F16 or BF16, `ids` `[tokens, k]` in U32 or I64, `weights` `[tokens, k]` in any
    /// float type, all on the cache's device. The result is `[tokens, hidden]` in `x`'s type. An expert that a token
    /// names twice counts twice.
    ///
    /// # Errors
    /// [`Error::BadArgument`] for shapes, types or devices that do not fit, [`Error::UnknownExpert`] for ids out of
    /// range, [`Error::BadRoutingWeight`] for weights that are no numbers; none of these disturbs the cache.
    /// [`Error::FillFailed`] when a record cannot be brought; the cache then stays stopped.
    ///
    /// A step that the device drives (see [`DriverKind`]) returns at once, and its ids and weights are looked at there:
    /// what is wrong with them is reported by a later call or by [`ExpertCache::flush`], and from the step concerned to
    /// that report every result is NaN.
    pub fn forward(&self, x: &Tensor, ids: &Tensor, weights: &Tensor) -> Result<Tensor> {
        let core = &self.cache.core;
        let ordinal = core.ordinal(self.layer)?;
        let spec = &self.cache.specs[ordinal];
        let bad = |what, reason| Err(Error::BadArgument { what, reason });
        let (tokens, top_k) = match (x.dims(), ids.dims()) {
            (&[n, hidden], &[m, k]) if n == m && hidden == spec.hidden && k > 0 => (n, k),
            (x, ids) => {
                let hidden = spec.hidden;
                return bad(
                    "x and ids",
                    format!("expected [n, {hidden}] and [n, k > 0], got {x:?} and {ids:?}"),
                );
            }
        };
        if weights.dims() != ids.dims() {
            return bad("weights", format!("expected {:?} like ids, got {:?}", ids.dims(), weights.dims()));
        }
        if !matches!(x.dtype(), DType::F32 | DType::F16 | DType::BF16) {
            return bad("x", format!("expected F32, F16 or BF16, got {:?}", x.dtype()));
        }
        if !x.device().same_device(&core.device) {
            return bad("x", format!("is on {:?}, the cache on {:?}", x.device(), core.device));
        }
        if tokens == 0 {
            return Ok(x.clone());
        }
        let mut engine = core.engine();
        if !core.is_observed() && engine.device_serves(tokens, top_k) {
            let on_device = |t: &Tensor, dtype| t.to_device(&core.device)?.to_dtype(dtype)?.contiguous();
            let (ids, weights) = (on_device(ids, DType::U32)?, on_device(weights, DType::F32)?);
            let layout = &self.cache.layouts[ordinal];
            return engine.device_step(DeviceStep {
                layer: ordinal,
                spec,
                layout,
                x,
                ids: &ids,
                weights: &weights,
            });
        }
        drop(engine);
        let choices = ids.to_dtype(DType::U32)?.flatten_all()?.to_vec1::<u32>()?;
        let weights = weights.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
        if let Some(at) = weights.iter().position(|w| !w.is_finite()) {
            return Err(Error::BadRoutingWeight { layer: self.layer, token: at / top_k, value: weights[at] });
        }
        let needs = core.needs(ordinal, &choices)?;
        core.observed(&Routed { layer: ordinal, top_k, choices: &choices, weights: Some(&weights) });
        let work = Work::Ffn { spec, layout: &self.cache.layouts[ordinal], x, weights: &weights, top_k };
        core.engine().step(Step { layer: ordinal, needs, choices: &choices, top_k, work })
    }
}

/// A cache of records that are no experts: any bytes under `(layer, index)` keys, for example rows of a big table.
pub struct RecordCache {
    core: Core,
}

impl RecordCache {
    /// Starts building a cache of `source`'s records on `device`.
    pub fn builder(source: Arc<dyn RecordSource>, device: &Device) -> CacheBuilder<Arc<dyn RecordSource>> {
        CacheBuilder::new(source, device)
    }

    /// The records `indices` of layer `layer`, in order and with repeats, read as `[indices, ..shape]` of `dtype`. A
    /// record may be longer than its part of the result: padding behind it is dropped.
    ///
    /// # Errors
    /// [`Error::BadArgument`] when a record is shorter than `shape` and `dtype` need, [`Error::UnknownExpert`] for an
    /// index out of range, [`Error::FillFailed`] when a record cannot be brought.
    pub fn gather(&self, layer: usize, indices: &[u32], dtype: DType, shape: &[usize]) -> Result<Tensor> {
        let core = &self.core;
        let ordinal = core.ordinal(layer)?;
        let needed = shape.iter().product::<usize>() * dtype.size_in_bytes();
        let record_bytes = core.directory.layers()[ordinal].record_bytes;
        if needed == 0 || needed > record_bytes {
            let reason = format!("{shape:?} of {dtype:?} is {needed} bytes, a record has {record_bytes}");
            return Err(Error::BadArgument { what: "shape", reason });
        }
        if indices.is_empty() {
            let dims: Vec<usize> = std::iter::once(0).chain(shape.iter().copied()).collect();
            return Ok(Tensor::zeros(dims, dtype, &core.device)?);
        }
        let needs = core.needs(ordinal, indices)?;
        let work = Work::Gather { assignments: indices.len(), dtype, shape };
        core.engine().step(Step { layer: ordinal, needs, choices: indices, top_k: indices.len(), work })
    }

    shared_methods!();
}

impl CacheBuilder<Arc<dyn RecordSource>> {
    /// Makes the pool and starts the backend. Nothing is loaded yet.
    ///
    /// # Errors
    /// As [`CacheBuilder::<ExpertStore>::build`].
    pub fn build(self) -> Result<RecordCache> {
        let source = self.store.clone();
        Ok(RecordCache { core: self.core(source, false)?.0 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SLOT: usize = 512;

    fn slots(options: &CacheOptions, free: u64, hard: bool) -> Result<usize> {
        let directory = Directory::new([(0, 8, SLOT), (1, 8, SLOT)]).unwrap();
        let room = Room { device: "gpu".to_owned(), free, reserve: options.reserve, hard };
        options.layout(&directory, SLOT, Some(&room)).map(|l| l.shape.slots())
    }

    #[test]
    fn as_many_slots_as_fit_leave_the_reserve_and_the_staging_slots_free() {
        let slot = SLOT as u64;
        let fit =
            CacheOptions { capacity: Capacity::Fit, top_k: 2, reserve: 1000, ..CacheOptions::default() };
        assert_eq!(slots(&fit, 1000 + 6 * slot, true).unwrap(), 6);
        assert_eq!(slots(&fit, 999 + 6 * slot, true).unwrap(), 5);
        assert_eq!(slots(&fit, 1000 + 99 * slot, true).unwrap(), 16, "no more than there are");
        let staged = CacheOptions { prefetch: Prefetch::Correlation, ..fit.clone() };
        assert_eq!(slots(&staged, 1000 + 10 * slot, true).unwrap(), 6, "four are for staging");
        assert_eq!(slots(&staged, 1000 + 16 * slot, true).unwrap(), 16, "nothing is staged when all fit");
        for free in [0, 999, 1000 + slot] {
            let e = slots(&fit, free, true).unwrap_err();
            assert!(matches!(e, Error::NoRoom { slots: 2, .. }), "{e}");
        }
    }

    #[test]
    fn what_does_not_fit_a_gpu_is_refused_and_host_memory_is_no_hard_limit() {
        let options = CacheOptions { capacity: Capacity::Slots(8), reserve: 1000, ..CacheOptions::default() };
        let free = 1000 + 7 * SLOT as u64;
        let e = slots(&options, free, true).unwrap_err();
        assert!(matches!(e, Error::NoRoom { slots: 8, most: 7, .. }), "{e}");
        assert!(e.to_string().contains("7 slots fit"), "{e}");
        assert_eq!(slots(&options, free, false).unwrap(), 8);
        assert_eq!(slots(&options, free + SLOT as u64, true).unwrap(), 8);
    }
}
