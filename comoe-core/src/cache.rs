//! The one door: [`ExpertCache`] for experts, [`RecordCache`] for any other keyed bytes.

mod builder;
mod devices;
mod elastic;
mod fleet;
mod fleet_builder;
mod options;
mod ram;
mod spans;
mod token;

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::{DType, Device, Tensor};

pub use builder::CacheBuilder;
pub use devices::Devices;
pub use elastic::SlotsInForce;
use fleet::{Fleet, SharedStep};
pub use options::{CacheOptions, Capacity, Scope};
pub use token::{Token, TokenOutcome};

use crate::backend::{
    Backend, BackendInfo, BackendMemory, DeviceGuess, DeviceStep, DriverKind, PageLocking, Work, check_room,
};
use crate::error::{Error, Result};
use crate::expert::{ExpertId, ExpertLayout, ExpertSpec};
use crate::format::ExpertFormat;
use crate::placement::Placement;
use crate::policy::PolicyKind;
use crate::pool::Pool;
use crate::predict::Correlation;
use crate::schedule::{Engine, Finish, Need, Step, covers};
use crate::stats::CacheStats;
use crate::store::{Directory, ExpertStore, RecordIndex, RecordSource, TieredSource};
use crate::trace::{Routed, RoutingObserver};

/// What both caches share.
struct Core {
    /// Of the only device, or of the first of several.
    engine: Mutex<Engine>,
    /// The other devices, where there are several.
    fleet: Option<Fleet>,
    directory: Arc<Directory>,
    /// What slots are compared with.
    source: Arc<dyn RecordSource>,
    /// Where RAM holds less than all of it: what the backend reads.
    tier: Option<Arc<TieredSource>>,
    info: BackendInfo,
    notes: Vec<String>,
    device: Device,
    policy: PolicyKind,
    driver: DriverKind,
    /// The prefetch in force uses guesses of the caller, on the host or, in device-driven steps, on the device.
    takes_hints: bool,
    fetches_ahead: bool,
    observer: Mutex<Option<Box<dyn RoutingObserver>>>,
}

impl Core {
    fn is_observed(&self) -> bool {
        self.observer.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    fn observer_wants_guesses(&self) -> bool {
        let observer = self.observer.lock().unwrap_or_else(PoisonError::into_inner);
        observer.as_ref().is_some_and(|o| o.wants_guesses())
    }

    /// The caller's guess for the layer after `ordinal`, if its experts are there.
    fn guess<'g>(&self, ordinal: usize, guess: &'g [u32]) -> Result<&'g [u32]> {
        let next = self.directory.layers().get(ordinal + 1);
        let (layer, available) = next.map_or((0, 0), |e| (e.layer, e.experts));
        match guess.iter().find(|&&e| e as usize >= available) {
            // Nothing comes after the last layer, so nothing is guessed.
            _ if next.is_none() => Ok(&[]),
            Some(&e) => Err(Error::UnknownExpert { id: ExpertId { layer, expert: e as usize }, available }),
            None => Ok(guess),
        }
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

    fn reset_stats(&self) {
        self.each_engine(|engine, _| engine.reset_stats());
        if let Some(tier) = &self.tier {
            tier.reset_stats();
        }
    }

    /// Runs a step of a cache on one device.
    fn step(&self, step: Step<'_>) -> Result<Tensor> {
        self.engine().step(step)?.ok_or_else(fleet::no_result)
    }

    fn page_locking(&self) -> Option<PageLocking> {
        let all = self.each_engine(|engine, _| engine.page_locking());
        let add = |a: PageLocking, b: PageLocking| PageLocking {
            locked: a.locked + b.locked,
            total: a.total + b.total,
            took: a.took.zip(b.took).map(|(a, b)| a.max(b)),
            why_partial: a.why_partial.or(b.why_partial),
        };
        all.into_iter().flatten().reduce(add)
    }

    fn check(&self) -> Result<usize> {
        let checked =
            self.each_engine(|engine, source| engine.check_slots(&|record, out| source.read(record, out)));
        checked.into_iter().sum()
    }

    fn check_sample(&self, most: usize) -> Result<usize> {
        let engines = 1 + self.fleet.as_ref().map_or(0, |fleet| fleet.others().engines.len());
        let checked = self.each_engine(|engine, source| {
            engine.check_sample(most.div_ceil(engines), &|record, out| source.read(record, out))
        });
        checked.into_iter().sum()
    }
}

macro_rules! shared_methods {
    () => {
        /// Counters since the cache was built or reset. Where the device drives steps, waits for those so far.
        pub fn stats(&self) -> CacheStats {
            self.core.stats()
        }

        /// Starts the counters anew. What is in the slots stays.
        pub fn reset_stats(&self) {
            self.core.reset_stats();
        }

        /// The device, and what is in force on it; of several devices all in one.
        pub fn backend_info(&self) -> &BackendInfo {
            &self.core.info
        }

        /// Where what is in force differs from what was asked, and why.
        pub fn notes(&self) -> &[String] {
            &self.core.notes
        }

        /// Device memory that the cache holds now; of several devices, the first one's.
        pub fn device_memory(&self) -> BackendMemory {
            self.core.engine().device_memory()
        }

        /// The policy in force, also where [`PolicyKind::Auto`] was asked for.
        pub fn policy(&self) -> PolicyKind {
            self.core.policy
        }

        /// Who drives steps of few tokens: [`DriverKind::Device`] or [`DriverKind::Host`], whatever was asked for. While
        /// page-locking goes on beside the steps ([`CudaOptions::page_lock_later`](crate::CudaOptions::page_lock_later)),
        /// who will.
        pub fn driver(&self) -> DriverKind {
            match self.core.engine().is_a_devices() {
                true => self.core.driver,
                false => DriverKind::Host,
            }
        }

        /// How far records are page-locked, of several devices all together; `None` where that does not matter to them.
        pub fn page_locking(&self) -> Option<PageLocking> {
            self.core.page_locking()
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

        /// Runs `f` on the backend, of several that of the first device, while nobody else uses it. For tests that look into slots or damage them.
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
    tokens: token::Turns,
}

impl ExpertCache {
    /// Starts building a cache of `store`'s experts on one device (`&device`), or over several (`&[first, second]`), of
    /// which the first is the one that layer steps are called on.
    pub fn builder(store: ExpertStore, devices: impl Into<Devices>) -> CacheBuilder<ExpertStore> {
        CacheBuilder::new(store, devices.into())
    }

    /// Which device owns which expert, where there are several.
    pub fn placement(&self) -> Option<&Placement> {
        self.core.fleet.as_ref().map(|fleet| &fleet.placement)
    }

    /// The experts of the model's layer `layer`. A layer without experts is reported by the call that uses it.
    pub fn layer(&self, layer: usize) -> CacheLayer<'_> {
        CacheLayer { cache: self, layer, guess: &[], on_device: None }
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

    /// How often each record was asked for since the cache was built, whoever drove the steps, by record number. Where the
    /// device drives steps, waits for those so far.
    pub fn uses(&self) -> Vec<u64> {
        self.core.uses()
    }

    /// Tokens that the prefetch in force has learned its table from; `None` where it learns none.
    pub fn predictor_table(&self) -> Option<u64> {
        match self.core.fleet {
            None => {
                let mut engine = self.core.engine();
                // A device that stopped working is reported by the next step; what was known before is known still.
                let _ = engine.update_predictor_table();
                engine.predictor_table().map(|t| t.tokens())
            }
            // Each device learns of its own experts alone.
            Some(_) => None,
        }
    }

    /// Keeps what the prefetch in force has learned in the file at `path`, for [`Self::load_predictor_table`] in a later
    /// run; `model` is the model's name. The format is described at [`Correlation::save`](crate::predict::Correlation::save).
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::BadArgument`] where nothing is learned; where the device learned it, when that stopped working.
    pub fn save_predictor_table(&self, path: &Path, model: &str) -> Result<()> {
        let mut engine = self.core.engine();
        engine.update_predictor_table()?;
        table_of(&self.core, &mut engine)?.save(path, model, &self.core.directory)
    }

    /// Takes over what an earlier run of the same `model` has learned.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::BadPredictorTable`] or [`Error::TableOfAnotherModel`], and then nothing has changed;
    /// [`Error::BadArgument`] where nothing is learned.
    pub fn load_predictor_table(&self, path: &Path, model: &str) -> Result<()> {
        let mut engine = self.core.engine();
        // Who drives on the device takes it over with its next step.
        engine.host_owns()?;
        table_of(&self.core, &mut engine)?.load(path, model, &self.core.directory)
    }

    /// Waits for the device-driven steps so far, and reports what was wrong with their routing. Without such steps it
    /// does nothing.
    ///
    /// # Errors
    /// As [`CacheLayer::forward`].
    pub fn flush(&self) -> Result<()> {
        self.core.report_faults(true)
    }

    shared_methods!();
}

fn table_of<'e>(core: &Core, engine: &'e mut Engine) -> Result<&'e mut Correlation> {
    let reason = match core.fleet {
        None => "this cache learns none: nothing is prefetched, or not by a table",
        Some(_) => "each of several devices learns one of its own, and none is kept",
    };
    let reason = reason.to_owned();
    engine
        .predictor_table()
        .filter(|_| core.fleet.is_none())
        .ok_or(Error::BadArgument { what: "predictor table", reason })
}

impl ExpertCache {
    /// Whether the device brings a caller's guesses ([`CacheLayer::with_device_guess`]) only where they have been right lately
    /// ([`Prefetch::Auto`](crate::Prefetch::Auto)). Then the caller does well to find out whether asking pays: making guesses,
    /// which all steps do that give them, takes time too, and the cache does not see it.
    pub fn judges_device_guesses(&self) -> bool {
        self.core.fetches_ahead && self.core.engine().judges_guesses()
    }

    /// Where device-driven steps count the records that they miss: the address of a u32 in the memory of the (first) GPU, for
    /// kernels behind a step. It begins anew when the host has had its turn. `None` before the first such step, and on devices
    /// that do not drive.
    pub fn missed_address(&self) -> Option<u64> {
        self.core.engine().missed_address()
    }
}

/// One layer of an [`ExpertCache`]: everything after top-k.
pub struct CacheLayer<'a> {
    cache: &'a ExpertCache,
    layer: usize,
    guess: &'a [u32],
    on_device: Option<DeviceGuess<'a>>,
}

impl<'a> CacheLayer<'a> {
    /// Whether a step of `tokens` tokens would use a guess of the caller for the next layer ([`Self::with_guess`]), so that
    /// it is worth computing: prefetching asks for it, or an observer.
    pub fn wants_guess(&self, tokens: usize) -> bool {
        let core = &self.cache.core;
        tokens == 1 && !self.is_last() && (core.takes_hints || core.observer_wants_guesses())
    }

    /// Whether a step of `tokens` tokens with `top_k` experts each is the device's, and would use a guess that is on the
    /// device ([`Self::with_device_guess`]).
    pub fn wants_device_guess(&self, tokens: usize, top_k: usize) -> bool {
        let core = &self.cache.core;
        tokens == 1
            && core.fetches_ahead
            && !self.is_last()
            && !core.is_observed()
            && core.engine().device_serves(tokens, top_k)
    }

    fn is_last(&self) -> bool {
        let directory = &self.cache.core.directory;
        directory.ordinal(self.layer).is_none_or(|o| o + 1 >= directory.layers().len())
    }

    /// Gives with this layer's step what the caller guesses that its token will choose in the next layer with experts,
    /// likeliest first: what that layer's router says to this layer's input (the stale gate). More than the next layer will
    /// choose, twice as many say, let the likely ones that are cached already be passed over. Only what is prefetched
    /// depends on it, never the result.
    #[must_use]
    pub fn with_guess(self, guess: &'a [u32]) -> Self {
        Self { guess, ..self }
    }

    /// The same on the device, for a step that the device drives: what the caller computes there and need not wait for. No
    /// more than the next layer will choose: each of them is brought if it is in no slot. Whoever captures steps with
    /// guesses in a graph captures all layers of a token: a branch of the graph is joined in the last one.
    #[must_use]
    pub fn with_device_guess(self, guess: DeviceGuess<'a>) -> Self {
        Self { on_device: Some(guess), ..self }
    }

    /// `y[t] = sum over j of weights[t, j] * expert ids[t, j] (x[t])`, summed in the order of j, in F32.
    ///
    /// `x` is `[tokens, hidden]` in F32, F16 or BF16, `ids` `[tokens, k]` in U32 or I64, `weights` `[tokens, k]` in any
    /// float type, all on the cache's device. The result is `[tokens, hidden]` in `x`'s type. An expert that a token
    /// names twice counts twice.
    ///
    /// # Errors
    /// [`Error::BadArgument`] for shapes, types or devices that do not fit, [`Error::UnknownExpert`] for ids or guesses out of
    /// range, [`Error::BadRoutingWeight`] for weights that are no numbers; none of these disturbs the cache.
    /// [`Error::FillFailed`] when a record cannot be brought; the cache then stays stopped.
    ///
    /// A step that the device drives (see [`DriverKind`]) returns at once, and its ids and weights are looked at there:
    /// what is wrong with them is reported by a later call or by [`ExpertCache::flush`], and from the step concerned to
    /// that report every result is NaN.
    pub fn forward(&self, x: &Tensor, ids: &Tensor, weights: &Tensor) -> Result<Tensor> {
        self.serve(x, ids, weights, None)
    }

    /// The same, and where the device drives the step, the result is written to `room`, `[tokens, hidden]` of `x`'s type
    /// on the cache's device, and what is handed out is `room` itself: with ids in U32 and weights in F32 nothing is
    /// allocated then, and a graph that captures the step holds addresses of the caller's alone. Elsewhere the result is
    /// a tensor of its own.
    ///
    /// # Errors
    /// As [`Self::forward`], and [`Error::BadArgument`] for room that does not fit.
    pub fn forward_to(&self, x: &Tensor, ids: &Tensor, weights: &Tensor, room: &Tensor) -> Result<Tensor> {
        self.serve(x, ids, weights, Some(room))
    }

    fn serve(&self, x: &Tensor, ids: &Tensor, weights: &Tensor, room: Option<&Tensor>) -> Result<Tensor> {
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
        room.map_or(Ok(()), |room| check_room(room, x))?;
        self.on_device.as_ref().map_or(Ok(()), DeviceGuess::check)?;
        if tokens == 0 {
            return Ok(x.clone());
        }
        let layout = &self.cache.layouts[ordinal];
        let mut engine = core.engine();
        engine.follow_page_locking()?;
        if !core.is_observed() && engine.device_serves(tokens, top_k) {
            let on_device = |t: &Tensor, dtype| t.to_device(&core.device)?.to_dtype(dtype)?.contiguous();
            let (ids, weights) = (on_device(ids, DType::U32)?, on_device(weights, DType::F32)?);
            let (ids, weights) = (&ids, &weights);
            let guess = self.on_device.filter(|_| core.fetches_ahead && tokens == 1 && !self.is_last());
            let step = DeviceStep { layer: ordinal, spec, layout, x, ids, weights, ordinal: 0, room, guess };
            let Some(fleet) = &core.fleet else { return engine.device_step(step) };
            drop(engine);
            return fleet.device_step(core, step);
        }
        drop(engine);
        if let Some(fleet) = &core.fleet {
            fleet.settle(core)?;
        }
        let choices = ids.to_dtype(DType::U32)?.flatten_all()?.to_vec1::<u32>()?;
        let weights = weights.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
        if let Some(at) = weights.iter().position(|w| !w.is_finite()) {
            return Err(Error::BadRoutingWeight { layer: self.layer, token: at / top_k, value: weights[at] });
        }
        let needs = core.needs(ordinal, &choices)?;
        let guess = core.guess(ordinal, self.guess)?;
        core.observed(&Routed { layer: ordinal, top_k, choices: &choices, weights: Some(&weights), guess });
        let (choices, weights) = (&choices[..], &weights[..]);
        if let Some(fleet) = &core.fleet {
            let step = SharedStep { layer: ordinal, spec, layout, x, choices, weights, top_k, guess };
            return fleet.step(core, needs, &step);
        }
        let work = Work::Ffn { spec, layout, x, weights, top_k };
        core.step(Step {
            layer: ordinal,
            covers: covers(needs.len(), core.directory.layers()[ordinal].experts),
            needs,
            choices,
            top_k,
            guess,
            work,
            finish: Finish::Result(&[]),
        })
    }
}

/// A cache of records that are no experts: any bytes under `(layer, index)` keys, for example rows of a big table.
pub struct RecordCache {
    core: Core,
}

impl RecordCache {
    /// Starts building a cache of `source`'s records on `device`.
    pub fn builder(source: Arc<dyn RecordSource>, device: &Device) -> CacheBuilder<Arc<dyn RecordSource>> {
        CacheBuilder::new(source, device.into())
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
        let needed = shape.iter().try_fold(dtype.size_in_bytes(), |bytes, &dim| bytes.checked_mul(dim));
        let record_bytes = core.directory.layers()[ordinal].record_bytes;
        if needed.is_none_or(|bytes| bytes == 0 || bytes > record_bytes) {
            let needed = needed.map_or("more bytes than can be counted".to_owned(), |n| format!("{n} bytes"));
            let reason = format!("{shape:?} of {dtype:?} is {needed}, a record has {record_bytes}");
            return Err(Error::BadArgument { what: "shape", reason });
        }
        if indices.is_empty() {
            let dims: Vec<usize> = std::iter::once(0).chain(shape.iter().copied()).collect();
            return Ok(Tensor::zeros(dims, dtype, &core.device)?);
        }
        let needs = core.needs(ordinal, indices)?;
        let work = Work::Gather { assignments: indices.len(), dtype, shape };
        core.step(Step {
            layer: ordinal,
            covers: covers(needs.len(), core.directory.layers()[ordinal].experts),
            needs,
            choices: indices,
            top_k: indices.len(),
            guess: &[],
            work,
            finish: Finish::Result(&[]),
        })
    }

    shared_methods!();
}
