//! The device-driven driver: residency tables in GPU memory, steps without a host round trip.
//!
//! A step is its launches and nothing else: resolve (see kernels/resolve.cu), then gate_up and down, which read a miss
//! through from page-locked memory into its slot, then the weighted sum. Where slots hold experts expanded to BF16, a
//! kernel of its own reads misses through first, and all is multiplied from slots: the BF16 values that a later hit
//! finds. All addresses hold from step to step, so that a graph may replay them; how many slots a layer has is in the
//! tables, so that they also hold when slots come and go.

use std::sync::Arc;

use candle_core::{DType, Tensor};
use cudarc::driver::CudaStream;

use super::ahead::{Ahead, Fetch};
use super::backend::CudaBackend;
use super::compute::address_of;
use super::context::Doing;
use super::correlate::{MOST_EXPERTS, Observed};
use super::kernels::{CombineArgs, DequantArgs, DownArgs, GateUpArgs, Items};
use super::options::Expansion;
use super::resolve::{
    COUNTERS_BYTES, FAULT_BAD_WEIGHT, FAULT_LATE, FAULT_MISSING, FAULT_UNKNOWN_EXPERT, MISSED_AT,
    PARTITION_BYTES, Resolve,
};
use super::tables::{FaultWord, Tables};
use crate::backend::{
    DeviceCounters, DeviceDriver, DeviceGuess, DeviceLimits, DeviceStep, MOST_DEVICE_SLOTS,
    MOST_DEVICE_TOKENS, Queue, RoutingFault, SlotId, StepFault, check_room,
};
use crate::error::{Error, Result};
use crate::expert::{ExpertLayout, ExpertSpec, WeightOn};
use crate::pool::{PoolShape, Residency};
use crate::predict::Learned;

fn no_tables() -> Error {
    Error::BadArgument { what: "device driver", reason: "step before take_over".to_owned() }
}

fn no_learner() -> Error {
    Error::BadArgument { what: "device driver", reason: "nothing is learned before learn".to_owned() }
}

impl CudaBackend {
    fn tables(&self) -> Result<&Tables> {
        self.tables.as_ref().ok_or_else(no_tables)
    }

    /// Why steps cannot be driven by the GPU, if so.
    pub(super) fn cannot_drive(&self) -> Option<String> {
        self.slab.is_none().then(|| "slots are not allocated yet".to_owned())
    }
}

/// What a step reads and writes, checked.
pub(super) struct StepIo {
    /// Kept, so that its memory is not reused before the kernels that read it are ordered.
    _x: Tensor,
    pub(super) x_at: u64,
    pub(super) x_dtype: DType,
    pub(super) y: Tensor,
    pub(super) y_at: u64,
    pub(super) ids: u64,
    pub(super) weights: u64,
    pub(super) tokens: usize,
    pub(super) top_k: usize,
}

impl StepIo {
    pub(super) fn new(step: &DeviceStep<'_>, caller: &CudaStream) -> Result<Self> {
        let DeviceStep { spec, x, ids, weights, room, .. } = *step;
        let ((tokens, width), (rows, top_k)) = (x.dims2()?, ids.dims2()?);
        if width != spec.hidden
            || rows != tokens
            || weights.dims() != ids.dims()
            || tokens > MOST_DEVICE_TOKENS
        {
            let reason = format!(
                "expected x [n <= {MOST_DEVICE_TOKENS}, {}] and [n, k] of both others, got {:?}, {:?} and {:?}",
                spec.hidden,
                x.dims(),
                ids.dims(),
                weights.dims()
            );
            return Err(Error::BadArgument { what: "x, ids and weights", reason });
        }
        let x = x.contiguous()?;
        let y = match room {
            Some(room) => {
                check_room(room, &x)?;
                room.clone()
            }
            // SAFETY: the weighted sum writes every element before anyone reads one.
            None => unsafe { Tensor::empty((tokens, spec.hidden), x.dtype(), x.device()) }?,
        };
        let [x_at, y_at, ids, weights] = [&x, &y, ids, weights].map(|t| address_of(t, caller));
        Ok(Self {
            x_at: x_at?,
            x_dtype: x.dtype(),
            _x: x,
            y_at: y_at?,
            y,
            ids: ids?,
            weights: weights?,
            tokens,
            top_k,
        })
    }
}

/// A step of this GPU's: shapes, and where its input lies.
#[derive(Clone, Copy)]
pub(super) struct Ask<'a> {
    pub(super) layer: usize,
    pub(super) spec: &'a ExpertSpec,
    /// Of what slots hold.
    pub(super) layout: &'a ExpertLayout,
    pub(super) expansion: Option<&'a Expansion>,
    pub(super) tokens: usize,
    pub(super) top_k: usize,
    pub(super) x: u64,
    pub(super) x_dtype: DType,
    pub(super) ids: u64,
    pub(super) weights: u64,
    /// Of the layer's experts, where others own some: their numbers here, and how many there are in all.
    pub(super) numbers: Option<(u64, usize)>,
    pub(super) ordinal: u32,
}

/// A guess for the next layer: where it lies, and how many experts it names.
struct Guess<'a> {
    at: u64,
    len: usize,
    stream: Option<&'a Arc<CudaStream>>,
}

impl<'a> Guess<'a> {
    fn new(guess: &DeviceGuess<'a>, caller: &CudaStream) -> Result<Self> {
        guess.check()?;
        let at = address_of(guess.ids, guess.stream.map_or(caller, |s| s))?;
        Ok(Self { at, len: guess.ids.elem_count(), stream: guess.stream })
    }
}

impl<'a> Ask<'a> {
    pub(super) fn new(step: &DeviceStep<'a>, io: &StepIo, expansion: Option<&'a Expansion>) -> Self {
        Self {
            layer: step.layer,
            spec: step.spec,
            layout: expansion.map_or(step.layout, |e| &e.to),
            expansion,
            tokens: io.tokens,
            top_k: io.top_k,
            x: io.x_at,
            x_dtype: io.x_dtype,
            ids: io.ids,
            weights: io.weights,
            numbers: None,
            ordinal: step.ordinal,
        }
    }
}

/// A step's launches. Tables, h and partial are as large as the most tokens need; `resolve` writes one item per record of
/// the step, whose sources are slots of the pool or the whole arena and whose destinations are slots that no other item
/// names.
pub(super) struct Launches<'a> {
    pub(super) resolve: Resolve,
    pub(super) dequant: Option<DequantArgs<'a>>,
    pub(super) gate_up: GateUpArgs<'a>,
    pub(super) down: DownArgs<'a>,
}

impl CudaBackend {
    /// How a layer's records are expanded in slots, if they are.
    pub(super) fn expansion(&self, layer: usize) -> Option<Expansion> {
        self.options.expansions.get(layer).copied()
    }

    pub(super) fn launches<'a>(&mut self, ask: &Ask<'a>) -> Result<Launches<'a>> {
        let &Ask { layer, spec, layout, tokens, top_k, .. } = ask;
        let entry = &self.source.directory().layers()[layer];
        let slots = self.slots()?;
        let tables = self.tables.as_mut().ok_or_else(no_tables)?;
        // For the most tokens, whatever their number now, so that addresses stay as they are.
        let most_rows = MOST_DEVICE_TOKENS * top_k;
        let stream = self.compute.stream();
        let (h, partial) = tables.reserve(&self.gpu, stream, most_rows, (spec.intermediate, spec.hidden))?;
        let partition = tables.shape.partition_of[layer];
        let (on_input, at) = (spec.weight_on == WeightOn::Input, &tables.at);
        let most_items = (tokens * top_k).min(entry.experts);
        if ask.expansion.is_some() && most_items > tables.shape.partitions[partition] {
            let reason = format!(
                "up to {most_items} experts for {} slots: what is expanded needs a slot",
                tables.shape.partitions[partition]
            );
            return Err(Error::BadArgument { what: "step", reason });
        }
        let (items, list, factors) =
            (tables.address(at.items), tables.address(at.list), tables.address(at.factors));
        let fills = tables.address(at.fills);
        let half_life = tables.half_lives.get(partition).copied();
        let (numbers, all) = ask.numbers.unwrap_or((0, entry.experts));
        let (ahead, foresight) = self.ahead.as_ref().map_or((0, 0), |a| a.addresses(layer));
        let items_of =
            |items| Items { layout, items, len: most_items, assignments: list, most: tokens, tokens };
        let resolve = Resolve {
            ids: ask.ids,
            weights: ask.weights,
            numbers,
            slot_of: tables.address(at.slot_of),
            address: tables.address(at.address),
            owner: tables.address(at.owner),
            stamp: tables.address(at.stamp),
            score: half_life.map_or(0, |_| tables.address(at.score)),
            partition: tables.address(at.partitions + PARTITION_BYTES * partition),
            slots: tables.address(at.slots),
            place: tables.address(at.place),
            counters: tables.address(at.counters + COUNTERS_BYTES * layer),
            uses: tables.address(at.uses),
            progress: tables.address(at.progress),
            missing: tables.address(at.missing),
            fault: tables.address(at.fault),
            host: tables.fault_address,
            items,
            fills: if ask.expansion.is_some() { fills } else { 0 },
            list,
            factors,
            pool: slots.base,
            stride: slots.stride as u64,
            half_life: half_life.unwrap_or(0.0),
            assignments: (tokens * top_k) as u32,
            top_k: top_k as u32,
            experts: entry.experts as u32,
            first_record: entry.first,
            layer: layer as u32,
            weight_on_input: on_input.into(),
            ordinal: ask.ordinal,
            all: all as u32,
            ahead,
            foresight,
            record_bytes: entry.record_bytes as u32,
            parts: self.kernels.takes_parts(&items_of(items)).into(),
            log: self.spans.log(),
        };
        let items = items_of(items);
        Ok(Launches {
            resolve,
            dequant: ask.expansion.map(|Expansion { from, to }| DequantArgs {
                from,
                to,
                items: fills,
                len: most_items,
            }),
            gate_up: GateUpArgs {
                items,
                activation: spec.activation,
                x: ask.x,
                x_dtype: ask.x_dtype,
                top_k,
                input_weights: if on_input { ask.weights } else { 0 },
                h,
            },
            down: DownArgs { items, h, partial },
        })
    }

    /// What may be brought behind a step of layer `layer`.
    fn fetch(&self, layer: usize, guess: &Guess<'_>) -> Result<Option<Fetch>> {
        let Some(next) = self.source.directory().layers().get(layer + 1).filter(|_| self.ahead.is_some())
        else {
            return Ok(None);
        };
        let tables = self.tables()?;
        Ok(Some(Fetch {
            guess: guess.at,
            guesses: guess.len as u32,
            slot_of: tables.address(tables.at.slot_of),
            address: tables.address(tables.at.address),
            experts: next.experts as u32,
            first_record: next.first,
            bytes: next.record_bytes as u32,
            layer: layer as u32,
            log: self.spans.log(),
            // The branch adds what is its own.
            ..Fetch::default()
        }))
    }

    /// Enqueues the reading of a step's misses, where slots hold experts expanded to BF16.
    ///
    /// # Safety
    /// Behind the step's `resolve`.
    pub(super) unsafe fn read_expanded(&self, launches: &Launches<'_>) -> Result<()> {
        match &launches.dequant {
            None => Ok(()),
            // SAFETY: what `resolve` wrote; see `Launches`.
            Some(args) => unsafe { self.kernels.dequant(self.compute.stream(), args) },
        }
    }
}

impl DeviceDriver for CudaBackend {
    fn limits(&self) -> DeviceLimits {
        let partial = (!self.whole).then(|| self.memory_note());
        let only_into_slots = partial.is_some() || !self.options.expansions.is_empty();
        // Places in a record are 32 bits there.
        let ahead = u32::try_from(self.source.directory().largest_record()).is_ok();
        let learns = ahead && self.source.directory().layers().iter().all(|l| l.experts <= MOST_EXPERTS);
        DeviceLimits { only_into_slots, partial, ahead, learns }
    }

    fn fetch_ahead(&mut self, staging: &[SlotId], judged: bool) -> Result<()> {
        let (layers, slots) = (self.source.directory().layers().len(), self.slots()?);
        let delays = self.options.faults.delay_seed.is_some();
        self.ahead = Some(Ahead::new(&self.gpu, slots, staging, layers, judged, delays)?);
        Ok(())
    }

    fn learn(&mut self, learned: &Learned) -> Result<()> {
        let experts: Vec<usize> = self.source.directory().layers().iter().map(|l| l.experts).collect();
        match &mut self.ahead {
            Some(ahead) => ahead.learn(&self.gpu, &experts, learned),
            None => Err(no_learner()),
        }
    }

    fn learned(&mut self) -> Result<Learned> {
        self.ahead.as_ref().and_then(Ahead::learner).ok_or_else(no_learner)?.learned()
    }

    fn guesses(&mut self) -> Result<Vec<Vec<u32>>> {
        self.ahead.as_ref().and_then(Ahead::learner).ok_or_else(no_learner)?.guesses()
    }

    fn missed_address(&self) -> Option<u64> {
        self.tables.as_ref().map(|tables| tables.address(tables.at.progress + MISSED_AT))
    }

    fn take_over(&mut self, shape: &PoolShape, residency: &Residency) -> Result<()> {
        let directory = self.source.directory();
        let (slots, most) = (self.slots()?, shape.partitions.iter().max().copied().unwrap_or(0));
        if most > MOST_DEVICE_SLOTS || shape.slots() > slots.count {
            let reason = format!(
                "up to {most} slots a partition, {} of {} in all: the device drives up to {MOST_DEVICE_SLOTS}",
                shape.slots(),
                slots.count
            );
            return Err(Error::BadArgument { what: "pool", reason });
        }
        if self.tables.as_ref().is_none_or(|t| !t.fit(shape)) {
            let addresses = self.addresses();
            self.tables = Some(Tables::new(&self.gpu, directory, shape, slots.count, &addresses)?);
        }
        self.tables.as_mut().ok_or_else(no_tables)?.load(shape, residency)
    }

    fn residency(&mut self) -> Result<Residency> {
        self.compute.stream().synchronize().doing("waiting for kernels")?;
        self.tables()?.residency()
    }

    fn begin_token(&mut self) -> Result<()> {
        match &mut self.ahead {
            // Of a token that was given up; others have joined the branch.
            Some(ahead) => ahead.join(self.compute.stream()),
            None => Ok(()),
        }
    }

    fn step(&mut self, step: DeviceStep<'_>) -> Result<Tensor> {
        self.gpu.bind()?;
        let caller = self.gpu.candle_stream();
        let io = StepIo::new(&step, &caller)?;
        let expansion = self.expansion(step.layer);
        let ask = Ask::new(&step, &io, expansion.as_ref());
        let launches = self.launches(&ask)?;
        let observed =
            Observed { layer: step.layer, tokens: io.tokens, top_k: io.top_k, guesses: step.guess.is_none() };
        let guess = match step.guess {
            Some(guess) => Some(Guess::new(&guess, &caller)?),
            None => {
                let own = self.ahead.as_ref().and_then(|ahead| ahead.guess_of(observed));
                own.map(|at| Guess { at, len: io.top_k, stream: None })
            }
        };
        let fetch = match &guess {
            Some(guess) => self.fetch(step.layer, guess)?.map(|fetch| (fetch, guess.stream)),
            None => None,
        };
        let is_last = step.layer + 1 == self.source.directory().layers().len();
        let combine = CombineArgs {
            partial: launches.down.partial,
            weights: launches.resolve.factors,
            tokens: io.tokens,
            top_k: io.top_k,
            hidden: step.spec.hidden,
            y_dtype: io.y.dtype(),
            y: io.y_at,
        };
        self.compute.enter(&caller)?;
        self.runs += 1;
        self.options.faults.delay(self.compute.stream(), self.runs)?;
        let stream = self.compute.stream();
        let begun = self.spans.begin(stream)?;
        if let Some(ahead) = self.ahead.as_mut() {
            ahead.enter(stream, step.layer)?;
        }
        // SAFETY: x, ids, weights and y are tensors of the shapes that were checked, ordered before and after by
        // `enter` and `leave`; `launches` speaks for the rest; nobody else touches tables or slots while the device owns
        // them.
        unsafe {
            self.kernels.resolve(stream, &launches.resolve)?;
            if let Some(ahead) = self.ahead.as_mut() {
                ahead.observe(&self.kernels, stream, observed)?;
            }
            self.read_expanded(&launches)?;
            self.kernels.gate_up(stream, &launches.gate_up)?;
            // Most of what this layer misses is there by now, so what is brought for the next one holds it up little, and
            // is well under way when the link falls idle.
            if let (Some((fetch, from)), Some(ahead)) = (fetch, self.ahead.as_mut()) {
                ahead.fork(&self.kernels, stream, from, fetch)?;
            }
            self.kernels.down_combine(stream, &launches.down, &combine)?;
        }
        let layer = self.source.directory().layers()[step.layer].layer;
        self.spans.end(stream, begun, Queue::Compute, 0, || format!("layer {layer}: experts"))?;
        if let Some(ahead) = self.ahead.as_mut().filter(|_| is_last) {
            ahead.join(self.compute.stream())?;
        }
        self.compute.leave(&caller)?;
        Ok(io.y)
    }

    fn fault(&mut self, wait: bool) -> Result<Option<StepFault>> {
        if self.tables.is_none() {
            return Ok(None);
        }
        self.gpu.bind()?;
        if wait {
            self.compute.stream().synchronize().doing("waiting for kernels")?;
        }
        let tables = self.tables.as_mut().ok_or_else(no_tables)?;
        if !tables.has_fault() {
            return Ok(None);
        }
        // Until the word is clear no step does anything; those that were enqueued meanwhile must have seen it.
        self.compute.stream().synchronize().doing("waiting for kernels")?;
        let FaultWord { kind, layer, token, value } = tables.take_fault()?;
        Ok(Some(match kind {
            FAULT_BAD_WEIGHT => {
                StepFault::Routing(RoutingFault::BadWeight { layer, token, value: f32::from_bits(value) })
            }
            FAULT_UNKNOWN_EXPERT => {
                StepFault::Routing(RoutingFault::UnknownExpert { layer, expert: value as usize })
            }
            FAULT_MISSING => StepFault::Missing(tables.take_missing(value as usize)?),
            FAULT_LATE => {
                let device = tables.together.get(value as usize).cloned();
                let device = device.unwrap_or_else(|| format!("device {value}"));
                return Err(Error::DeviceLate { device, deadline: tables.deadline });
            }
            other => {
                let reason = format!("it reported the unknown fault {other}");
                return Err(Error::Cuda { what: "driving a step on the GPU".to_owned(), reason });
            }
        }))
    }

    fn counters(&mut self) -> Result<Vec<DeviceCounters>> {
        let layers = self.source.directory().layers().len();
        let Some(tables) = &self.tables else { return Ok(vec![DeviceCounters::default(); layers]) };
        self.compute.stream().synchronize().doing("waiting for kernels")?;
        let words = tables.long_words(tables.at.counters, layers * COUNTERS_BYTES / 8)?;
        let of = |c: &[u64; 4]| DeviceCounters {
            steps: c[0],
            steps_with_miss: c[1],
            accesses: c[2],
            hits: c[3],
            ..Default::default()
        };
        let mut counters: Vec<DeviceCounters> = words.as_chunks().0.iter().map(of).collect();
        if let Some(ahead) = &self.ahead {
            counters.iter_mut().zip(ahead.counters()?).for_each(|(all, ahead)| all.ahead = ahead);
        }
        Ok(counters)
    }

    fn uses(&mut self) -> Result<Vec<u64>> {
        let Some(tables) = &self.tables else { return Ok(Vec::new()) };
        self.compute.stream().synchronize().doing("waiting for kernels")?;
        tables.uses()
    }
}
