//! From options, a store and a device to a cache.

use std::sync::{Arc, Mutex};

use std::time::Duration;

use candle_core::Device;

use super::options::{cannot_drive, not_a_devices};
use super::ram;
use super::token::Turns;
use super::{CacheOptions, Capacity, Core, Devices, ExpertCache, RecordCache, Scope};
use crate::backend::bond::BondOptions;
use crate::backend::cpu::CpuBackend;
use crate::backend::cuda::CudaOptions;
use crate::backend::{Backend, BackendInfo, DriverKind, MOST_DEVICE_TOKENS, PeerAccess};
use crate::error::{Error, Result};
use crate::plan::{Room, places};
use crate::policy::PolicyKind;
use crate::pool::{PINNED_PART, Pool, PoolShape, most_pinned};
use crate::predict::{Correlation, EvidenceGate, GateOptions, Predictor, Prefetch, StaleGate};
use crate::schedule::{Engine, PrefetchEngine, PrefetchTrigger, Rules};
use crate::stats::human_bytes;
use crate::store::{Directory, ExpertStore, RecordIndex, RecordSource, TierOptions, TieredSource};

/// Makes the backend of the device with this number, for what it owns.
pub(super) type MakeBackend<'a> = &'a dyn Fn(usize, Arc<dyn RecordSource>) -> Result<Box<dyn Backend>>;

/// How long one of several devices is waited for, unless another time is asked for.
const DEADLINE: Duration = Duration::from_secs(20);

/// Builds a cache; see [`ExpertCache::builder`] and [`RecordCache::builder`].
#[must_use]
pub struct CacheBuilder<S> {
    pub(super) store: S,
    pub(super) devices: Devices,
    pub(super) options: CacheOptions,
    /// By device, where they differ.
    pub(super) capacities: Vec<Capacity>,
    /// By device, where they differ.
    pub(super) budgets: Vec<u64>,
    pub(super) reserve_elsewhere: u64,
    pub(super) bond: BondOptions,
    pub(super) backend: Option<Box<dyn Backend>>,
    pub(super) cuda: CudaOptions,
    pub(super) rules: Rules,
}

impl<S> CacheBuilder<S> {
    pub(super) fn new(store: S, devices: Devices) -> Self {
        Self {
            store,
            devices,
            options: CacheOptions::default(),
            capacities: Vec::new(),
            budgets: Vec::new(),
            reserve_elsewhere: 0,
            bond: BondOptions { peer_access: PeerAccess::default(), deadline: DEADLINE },
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

    /// How many records the pool of each of several devices holds, in their order, where they differ; the last one given
    /// holds for those behind it. What is asked for in slots, bytes or parts of all experts is each device's own.
    pub fn capacities(mut self, capacities: &[Capacity]) -> Self {
        self.capacities = capacities.to_vec();
        self
    }

    /// The most memory, in bytes, that slots and what is reserved may take of each of several devices, in their order, where
    /// that is not [`CacheOptions::budget`] on all; the last one given holds for those behind it.
    pub fn budgets(mut self, budgets: &[u64]) -> Self {
        self.budgets = budgets.to_vec();
        self
    }

    /// Device memory that slots leave free on every device but the first, which [`CacheOptions::reserve`] is for.
    pub fn reserve_elsewhere(mut self, bytes: u64) -> Self {
        self.reserve_elsewhere = bytes;
        self
    }

    /// How several GPUs hand things to each other. Default: by each other's memory, where they can.
    pub fn peer_access(mut self, peer_access: PeerAccess) -> Self {
        self.bond.peer_access = peer_access;
        self
    }

    /// How long one of several devices is waited for before a step fails ([`Error::DeviceLate`]). Default: 20 seconds.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.bond.deadline = deadline;
        self
    }

    /// How many records the pool holds. Default: all. Of several devices each has such a pool; see [`Self::capacities`].
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

    /// Device memory for the ring that a prompt's records pass through: see [`CacheOptions::ring`].
    pub fn ring(mut self, bytes: u64) -> Self {
        self.options.ring = Some(bytes);
        self
    }

    /// Most host memory for records: see [`CacheOptions::ram`].
    pub fn ram(mut self, bytes: u64) -> Self {
        self.options.ram = Some(bytes);
        self
    }

    /// A backend of the caller's own, instead of the only device's; for several see
    /// [`Self::build_with`](CacheBuilder::<ExpertStore>::build_with).
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
        let Self { store, devices, options, backend, cuda, rules, .. } = self;
        let device = devices.first()?.clone();
        if let Some(other) = devices.as_slice().get(1) {
            let reason = format!("{:?} too: only a cache of experts can have several", other.location());
            return Err(Error::BadArgument { what: "devices", reason });
        }
        if source.directory().is_empty() {
            return Err(Error::NoExperts { what: "the store".to_owned() });
        }
        let room = options.room(&device)?;
        let pool =
            PoolSetup { device: &device, source: &source, options: &options, room, cuda, rules, alone: true };
        let Made { engine, tier, mut info, mut notes, policy, drives } = pool.make(backend, of_experts)?;
        let driver = driver_in_force(options.driver, &device, of_experts, drives, &mut info, &mut notes)?;
        if engine.waits_to_drive() {
            info.notes.push("until all experts are page-locked, they are the host's, too".to_owned());
        }
        tell(&notes, [&info]);
        let (takes_hints, fetches_ahead) = (engine.takes_hints(), engine.fetches_ahead());
        let core = Core {
            engine: Mutex::new(engine),
            fleet: None,
            tier,
            directory: Arc::new(source.directory().clone()),
            source,
            info,
            notes,
            device,
            policy,
            driver,
            takes_hints,
            fetches_ahead,
            observer: Mutex::new(None),
        };
        Ok((core, store))
    }
}

/// What a device's engine is made from.
pub(super) struct PoolSetup<'a> {
    pub(super) device: &'a Device,
    /// What it serves.
    pub(super) source: &'a Arc<dyn RecordSource>,
    pub(super) options: &'a CacheOptions,
    pub(super) room: Option<Room>,
    pub(super) cuda: CudaOptions,
    pub(super) rules: Rules,
    /// No other device has part in its steps.
    pub(super) alone: bool,
}

/// A device's engine, and what there is to say about it.
pub(super) struct Made {
    pub(super) engine: Engine,
    pub(super) tier: Option<Arc<TieredSource>>,
    pub(super) info: BackendInfo,
    pub(super) notes: Vec<String>,
    pub(super) policy: PolicyKind,
    /// The device drives steps of few tokens, or why not.
    pub(super) drives: std::result::Result<(), String>,
}

impl PoolSetup<'_> {
    /// Makes the pool and starts the backend, the device's own unless another is given.
    pub(super) fn make(self, backend: Option<Box<dyn Backend>>, of_experts: bool) -> Result<Made> {
        let Self { device, source, options, room, cuda, rules, alone } = self;
        let directory = Arc::new(source.directory().clone());
        let slot_bytes = match device {
            Device::Cuda(_) => cuda.slot_bytes(&directory),
            _ => directory.largest_record(),
        };
        let on_gpu = device.is_cuda();
        let mut layout = options.layout(&directory, slot_bytes, room.as_ref())?;
        let tier = match places(options, &directory, layout.slots, slot_bytes, on_gpu)? {
            Some(places) => {
                let (policy, top_k) = (options.policy, options.top_k);
                Some(Arc::new(TieredSource::new(source.clone(), TierOptions { places, policy, top_k })?))
            }
            None => None,
        };
        let backend = match (backend, &tier) {
            (Some(_), Some(_)) => {
                let reason =
                    "a backend of the caller's own reads its own source: give that one a TieredSource"
                        .to_owned();
                return Err(Error::BadArgument { what: "ram", reason });
            }
            (Some(backend), None) => backend,
            (None, Some(tier)) => {
                backend_for(device, &(tier.clone() as Arc<dyn RecordSource>), cuda.with_tier(tier.clone()))?
            }
            (None, None) => backend_for(device, source, cuda)?,
        };
        let mut info = backend.info();
        if let Some(tier) = tier.as_ref().map(|tier| tier.stats()) {
            info.notes.push(format!(
                "RAM holds {} of {} experts ({}){}, the others are on disk",
                tier.places,
                directory.len(),
                human_bytes((tier.places * tier.place_bytes) as u64),
                if on_gpu { "" } else { " beside the slots" }
            ));
        }
        let records = directory.len();
        let may_drive = options.driver != DriverKind::Host
            && (matches!(device, Device::Cuda(_)) || options.driver == DriverKind::Device);
        let policy = options.policy.in_force(layout.shape.slots() == records, may_drive);
        let sharing = directory.layers().len().div_ceil(layout.shape.partitions.len().max(1));
        let per_token = options.top_k.max(1) * sharing;
        let pool_shape = layout.shape.clone();
        let pool = Pool::new(layout.shape, records, |slots| policy.build(slots, records, per_token));
        let experts: Vec<usize> = directory.layers().iter().map(|e| e.experts).collect();
        let (trigger, width) = (options.prefetch_trigger, options.prefetch_width());
        let prefetch =
            |predictor: Box<dyn Predictor>, gate| Some(PrefetchEngine::new(predictor, trigger, width, gate));
        let prefetch = match layout.prefetch {
            Prefetch::Off => None,
            Prefetch::Correlation => prefetch(Box::new(Correlation::new(&experts, 1)), None),
            Prefetch::StaleGate => prefetch(Box::new(StaleGate::new()), None),
            Prefetch::Auto => {
                let gate = EvidenceGate::new(experts.len(), GateOptions::new(width));
                prefetch(Box::new(StaleGate::or(Correlation::new(&experts, 1))), Some(gate))
            }
        };
        let mut engine =
            Engine::new(backend, directory.clone(), pool, prefetch, slot_bytes, layout.stream, rules)?;
        engine.keep_at_least(layout.least);
        if let (Some(reason), true) = (engine.fixed(), device.is_cuda()) {
            layout.notes.push(format!("the number of slots is fixed: {reason}"));
        }
        let (pins, left_out) = pins(options, &directory, &pool_shape)?;
        if let Some(note) = left_out {
            layout.notes.push(note);
        }
        engine.keep(&pins)?;
        let drives = drive(options.driver, policy, &mut engine, of_experts, alone);
        Ok(Made { engine, tier, info, notes: layout.notes, policy, drives })
    }
}

/// Who drives steps of few tokens, said in `info` or `notes`; an error where the device was asked for and does not.
pub(super) fn driver_in_force(
    asked: DriverKind,
    device: &Device,
    of_experts: bool,
    drives: std::result::Result<(), String>,
    info: &mut BackendInfo,
    notes: &mut Vec<String>,
) -> Result<DriverKind> {
    match drives {
        Ok(()) => {
            info.notes.push(format!(
                "steps of up to {MOST_DEVICE_TOKENS} tokens are driven by the device, without a host round trip"
            ));
            Ok(DriverKind::Device)
        }
        Err(reason) if asked == DriverKind::Device => Err(cannot_drive(&reason)),
        // Elsewhere there is nothing but the host to expect.
        Err(reason) if asked == DriverKind::Auto && of_experts && device.is_cuda() => {
            notes.push(format!("every step is driven by the host: {reason}"));
            Ok(DriverKind::Host)
        }
        Err(_) => Ok(DriverKind::Host),
    }
}

/// Logs what is in force.
pub(super) fn tell<'a>(notes: &[String], infos: impl IntoIterator<Item = &'a BackendInfo>) {
    notes.iter().for_each(|note| tracing::warn!("{note}"));
    for info in infos {
        info.notes.iter().for_each(|note| tracing::info!("{}: {note}", info.device));
    }
}

/// Which of the experts asked for stay for good, and a note where those are not all.
///
/// # Errors
/// [`Error::UnknownExpert`].
fn pins(
    options: &CacheOptions,
    directory: &Directory,
    shape: &PoolShape,
) -> Result<(Vec<RecordIndex>, Option<String>)> {
    let asked = options.pinned.len();
    if shape.slots() == directory.len() {
        let note = "every expert has a slot, so none is pinned".to_owned();
        return Ok((Vec::new(), (asked > 0).then_some(note)));
    }
    let most = |&slots: &usize| most_pinned(slots, options.top_k, PINNED_PART);
    let mut left: Vec<usize> = shape.partitions.iter().map(most).collect();
    let (mut pins, mut known) = (Vec::new(), vec![false; directory.len()]);
    for &id in &options.pinned {
        let record = directory.record(id)?;
        let left = &mut left[shape.partition_of[directory.ordinal_of(record)]];
        if *left > 0 && !std::mem::replace(&mut known[record.0 as usize], true) {
            *left -= 1;
            pins.push(record);
        }
    }
    let note = (pins.len() < asked).then(|| {
        format!(
            "{} of {asked} experts are pinned: up to an eighth of the slots that a layer competes for",
            pins.len()
        )
    });
    Ok((pins, note))
}

/// Lets the device drive, or says why not.
fn drive(
    asked: DriverKind,
    policy: PolicyKind,
    engine: &mut Engine,
    of_experts: bool,
    alone: bool,
) -> std::result::Result<(), String> {
    if !of_experts {
        return Err("its records are no experts".to_owned());
    }
    if asked == DriverKind::Host {
        return Err("the host driver was asked for".to_owned());
    }
    if !policy.is_a_devices() {
        return Err(not_a_devices(policy));
    }
    engine.offer_device(asked, alone)
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

impl CacheBuilder<ExpertStore> {
    /// Makes the pool and starts the backend. Nothing is loaded yet.
    ///
    /// # Errors
    /// [`Error::TooFewSlots`], [`Error::PoolTooSmall`] or [`Error::BadArgument`] for a capacity that does not work,
    /// [`Error::Device`] for a device that cannot be used, [`Error::NoExperts`] for an empty store.
    pub fn build(self) -> Result<ExpertCache> {
        self.build_from(None)
    }

    /// The same with backends of the caller's own: `make` gets a device's number and the records that it owns, and may be
    /// asked again where a device's share turns out too large for it.
    ///
    /// # Errors
    /// As [`Self::build`], and those of `make`.
    pub fn build_with(
        self,
        make: impl Fn(usize, Arc<dyn RecordSource>) -> Result<Box<dyn Backend>>,
    ) -> Result<ExpertCache> {
        self.build_from(Some(&make))
    }

    fn build_from(mut self, make: Option<MakeBackend<'_>>) -> Result<ExpertCache> {
        let source = self.store.source();
        let layers = 0..source.directory().layers().len();
        let experts: Vec<_> = layers.map(|o| (*self.store.spec(o), *self.store.layout(o))).collect();
        let (specs, layouts): (Vec<_>, Vec<_>) = experts.iter().copied().unzip();
        self.cuda = self.cuda.with_experts(experts);
        let advice = ram::advice(&self.options, &self.store);
        // Who drives several devices is settled once, and so is who prefetches.
        let settled = self.devices.as_slice().len() > 1 || self.options.prefetch != Prefetch::Off;
        self.cuda.page_lock_later &= !settled;
        let mut core = match self.devices.as_slice().len() {
            0 | 1 => {
                if let Some(make) = make {
                    self.backend = Some(make(0, source.clone())?);
                }
                self.core(source, true)?.0
            }
            _ => self.fleet(source, &specs, make)?,
        };
        core.notes.extend(advice);
        Ok(ExpertCache { core, specs, layouts, tokens: Turns::default() })
    }
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
