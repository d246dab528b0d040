//! The CUDA backend.

use std::any::Any;
use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use candle_core::{CudaDevice, DType, Device, Tensor};
use cudarc::driver::{CudaStream, result};

use super::ahead::Ahead;
use super::arena::Arena;
use super::batch;
use super::compute::{Compute, address_of};
use super::context::{Doing, Gpu};
use super::copies::{Copies, Slots};
use super::ffn::{Ffn, device_items};
use super::kernels::{GatherArgs, Kernels};
use super::options::CudaOptions;
use super::slab::Slab;
use super::spans::Spans;
use super::stamps::Stamps;
use super::tables::Tables;
use super::tier::LockedTier;
use super::timeline::Timelines;
use super::upload::{UploadRing, bytes_of};
use crate::backend::{
    Backend, BackendInfo, BackendMemory, Chunks, DeviceDriver, DeviceSpans, Fill, PageLocking, Queue, SlotId,
    SpanZero, Ticket, TransferTime, Work, WorkItem,
};
use crate::error::{Error, Result};
use crate::format::record::convert_record;
use crate::stats::human_bytes;
use crate::store::{RecordIndex, RecordSource};

/// Runs a cache on one GPU.
///
/// Every driver call is made under `&mut self` by the calling thread, or by the two copy workers; any thread may call,
/// one at a time.
pub struct CudaBackend {
    // In order of dropping: first who enqueues, then what is used, then the memory.
    copies: Option<Copies>,
    step: Option<Step>,
    /// Memory for the result of the step that `reserve` announced.
    pub(super) result: Option<Tensor>,
    pub(super) kernels: Arc<Kernels>,
    pub(super) upload: UploadRing,
    pub(super) hidden: Workspace,
    pub(super) partial: Workspace,
    /// x in BF16, where it does not come so.
    pub(super) rounded: Workspace,
    /// Of the driver on the GPU, once it has been used.
    pub(super) tables: Option<Tables>,
    /// Of the same, where it brings what is guessed.
    pub(super) ahead: Option<Ahead>,
    pub(super) compute: Compute,
    timelines: Arc<Timelines>,
    pub(super) spans: Arc<Spans>,
    pub(super) arena: Arc<Arena>,
    /// Every record is in the arena, as far as steps know: see `use_page_locked`.
    pub(super) whole: bool,
    /// Bytes in the arena when that was last looked at; `None` where no more will come.
    pub(super) seen_locked: Option<u64>,
    /// Where RAM holds fewer records than there are, and could be page-locked.
    tier: Option<Arc<LockedTier>>,
    pub(super) slab: Option<Slab>,
    pub(super) source: Arc<dyn RecordSource>,
    pub(super) options: CudaOptions,
    /// Occasions for an injected delay on the compute queue.
    pub(super) runs: u64,
    pub(super) gpu: Gpu,
}

/// The work between `begin` and `finish`.
enum Step {
    Ffn(Box<Ffn>),
    Gather { out: Tensor, address: u64, bytes: usize, caller: Arc<CudaStream> },
}

/// Memory that grows to the largest step so far and stays.
pub(super) struct Workspace {
    what: &'static str,
    slab: Slab,
}

impl Workspace {
    pub(super) fn new(gpu: &Gpu, what: &'static str) -> Result<Self> {
        Ok(Self { what, slab: Slab::new(gpu, what, 0)? })
    }

    /// At least `bytes`, at an address that holds until a larger step. Growing waits for the GPU.
    pub(super) fn reserve(&mut self, gpu: &Gpu, bytes: usize) -> Result<u64> {
        if bytes > self.slab.bytes() {
            // Freed first, so that both are never there at once; dropping waits for the GPU.
            self.slab = Slab::new(gpu, self.what, 0)?;
            self.slab = Slab::new(gpu, self.what, bytes.next_multiple_of(1 << 16))?;
        }
        Ok(self.slab.address())
    }

    pub(super) fn bytes(&self) -> usize {
        self.slab.bytes()
    }

    pub(super) fn address(&self) -> u64 {
        self.slab.address()
    }
}

/// Bytes of an item and of the tiles that its last assignments begin, each rounded up.
const UPLOADED_OF_RECORD: usize = 64;
/// Bytes of an assignment: its number, its weight, its part of a tile.
const UPLOADED_OF_ROW: usize = 12;

fn not_begun() -> Error {
    Error::BadArgument { what: "work", reason: "run or finish without begin".to_owned() }
}

impl CudaBackend {
    /// Loads the kernels and reads the records of `source` into page-locked memory, as far as that goes.
    ///
    /// # Errors
    /// [`Error::Device`] for a GPU that cannot be used, [`Error::OutOfDeviceMemory`], and what the source says when a
    /// record cannot be read.
    pub fn new(device: &CudaDevice, source: Arc<dyn RecordSource>, options: CudaOptions) -> Result<Self> {
        let gpu = Gpu::of(device);
        gpu.bind()?;
        let kernels = Arc::new(Kernels::load(&gpu.ctx)?);
        let arena = Arc::new(Arena::load(&gpu, &source, &options)?);
        let tier = match &options.tier {
            Some(tier) => LockedTier::new(&gpu, tier, &options)?.map(Arc::new),
            None => None,
        };
        Ok(Self {
            copies: None,
            step: None,
            result: None,
            upload: UploadRing::new(&gpu, &kernels)?,
            kernels,
            hidden: Workspace::new(&gpu, "the experts' hidden activations")?,
            partial: Workspace::new(&gpu, "the experts' outputs")?,
            rounded: Workspace::new(&gpu, "a step's input in bf16")?,
            tables: None,
            ahead: None,
            compute: Compute::new(&gpu)?,
            timelines: Arc::new(Timelines::new(&gpu)?),
            spans: Spans::new(&gpu),
            whole: arena.is_whole(),
            seen_locked: arena.goes_on().then_some(0),
            arena,
            tier,
            slab: None,
            source,
            options,
            runs: 0,
            gpu,
        })
    }

    /// Which records are page-locked, for people to read.
    pub(super) fn memory_note(&self) -> String {
        match (&self.options.tier, &self.tier) {
            (None, _) => self.arena.locking().to_string(),
            (Some(_), Some(tier)) => {
                format!("what RAM holds of the experts is page-locked ({})", human_bytes(tier.bytes()))
            }
            (Some(_), None) => {
                "RAM holds a part of the experts and is not page-locked: they pass through a page-locked \
                                buffer, which is slower"
                    .to_owned()
            }
        }
    }

    pub(super) fn copies(&self) -> Result<&Copies> {
        self.copies
            .as_ref()
            .ok_or(Error::BadArgument { what: "backend", reason: "allocate comes first".to_owned() })
    }

    pub(super) fn slots(&self) -> Result<Slots> {
        Ok(self.copies()?.slots())
    }

    fn slab(&self) -> Result<&Slab> {
        self.slab
            .as_ref()
            .ok_or(Error::BadArgument { what: "backend", reason: "allocate comes first".to_owned() })
    }

    /// Uploads what one launch reads, as one piece, and returns the parts' addresses; they hold for launches that are
    /// enqueued before the next upload.
    pub(super) fn upload_parts<const N: usize>(&mut self, parts: [&[u8]; N]) -> Result<[u64; N]> {
        let mut at =
            self.upload.upload(self.compute.stream(), parts.iter().map(|p| p.len()).sum(), |to| {
                let mut to = to;
                for part in parts {
                    let (head, tail) = to.split_at_mut(part.len());
                    head.copy_from_slice(part);
                    to = tail;
                }
            })?;
        Ok(parts.map(|part| {
            let start = at;
            at += part.len() as u64;
            start
        }))
    }
}

impl CudaBackend {
    /// Places for times on the GPU's clock.
    pub(crate) fn stamps(&self, places: usize) -> Result<Stamps> {
        Stamps::new(&self.gpu, &self.kernels, places)
    }

    /// The experts' work that was begun.
    fn take_ffn(&mut self) -> Result<Box<Ffn>> {
        match self.step.take() {
            Some(Step::Ffn(ffn)) => Ok(ffn),
            _ => Err(not_begun()),
        }
    }

    fn begin_gather(&mut self, assignments: usize, dtype: DType, shape: &[usize]) -> Result<Step> {
        let bytes = shape.iter().product::<usize>() * dtype.size_in_bytes();
        let dims: Vec<usize> = std::iter::once(assignments).chain(shape.iter().copied()).collect();
        let caller = self.gpu.candle_stream();
        // SAFETY: every assignment is served by exactly one item, so every element is written before it is read.
        let out = unsafe { Tensor::empty(dims, dtype, &Device::Cuda(self.gpu.device.clone())) }?;
        let address = address_of(&out, &caller)?;
        self.compute.enter(&caller)?;
        Ok(Step::Gather { out, address, bytes, caller })
    }

    fn run_gather(&mut self, address: u64, bytes: usize, work: &[WorkItem]) -> Result<()> {
        let (items, assignments) = device_items(&self.slots()?, work, bytes)?;
        let len = items.len();
        let [items, assignments] = self.upload_parts([bytes_of(&items), bytes_of(&assignments)])?;
        let args = GatherArgs { items, len, assignments, bytes, out: address };
        // SAFETY: slots are ones that compute was made to wait for; the result has a row per assignment.
        unsafe { self.kernels.gather(self.compute.stream(), &args) }
    }
}

impl Backend for CudaBackend {
    fn info(&self) -> BackendInfo {
        let mut notes = vec![self.memory_note()];
        notes.push(match batch::has_batches() && !self.options.faults.no_batches {
            true => "a step's missing experts are copied in one driver call".to_owned(),
            false => "the driver is older than CUDA 12.8: missing experts are copied one by one".to_owned(),
        });
        if !self.options.expansions.is_empty() {
            notes.push("slots hold experts expanded to bf16".to_owned());
        }
        if self.compute.is_apart() {
            notes.push(
                "the device has a stream per thread: a step waits for the caller's stream and back (open it with \
                 comoe_core::cuda_device to save that)"
                    .to_owned(),
            );
        }
        let locked = self.arena.locked() + self.tier.as_ref().map_or(0, |tier| tier.bytes());
        BackendInfo { device: self.gpu.name(), notes, page_locked: Some(locked) }
    }

    fn allocate(&mut self, slots: usize, slot_bytes: usize) -> Result<()> {
        if self.slab.is_some() {
            return Err(Error::BadArgument {
                what: "backend",
                reason: "slots are allocated once".to_owned(),
            });
        }
        let slot_bytes = slot_bytes
            .max(self.options.slot_bytes(self.source.directory()))
            .next_multiple_of(crate::expert::RECORD_ALIGN);
        let what = format!("{slots} slots of {slot_bytes} bytes");
        if slots.checked_mul(slot_bytes).is_none_or(|bytes| bytes > isize::MAX as usize) {
            let reason = format!("{what} are more than an address space");
            return Err(Error::BadArgument { what: "slots", reason });
        }
        let slab = match self.options.faults.no_mapping {
            true => Slab::new(&self.gpu, &what, slots * slot_bytes)?,
            false => Slab::of_slots(&self.gpu, &what, slots, slot_bytes)?,
        };
        let slots = Slots { base: slab.address(), stride: slot_bytes, count: slots };
        self.slab = Some(slab);
        let options = self.options.clone();
        self.copies = Some(Copies::new(
            &self.gpu,
            &self.timelines,
            &self.source,
            (&self.arena, self.tier.as_ref()),
            slots,
            (&self.kernels, &self.spans),
            options,
        )?);
        Ok(())
    }

    fn chunks(&self) -> std::result::Result<Chunks, String> {
        let slab = self.slab.as_ref().ok_or("slots are not allocated yet")?;
        slab.chunks().ok_or_else(|| "the driver maps no memory in pieces".to_owned())
    }

    fn set_unused(&mut self, unused: Range<u32>) -> Result<u64> {
        if let Err(reason) = self.chunks() {
            return Err(Error::FixedSlots { reason });
        }
        // Also what other streams of the device do: none of it may touch slots, but nothing shows that here.
        self.gpu.bind()?;
        self.gpu.ctx.synchronize().doing("waiting for the GPU")?;
        self.slab.as_mut().ok_or_else(not_begun)?.set_unused(&unused)
    }

    fn fill(&mut self, queue: Queue, after: &[Ticket], fills: &[Fill]) -> Result<Ticket> {
        self.copies()?.fill(queue, after, fills)
    }

    fn wait(&mut self, ticket: Ticket) -> Result<()> {
        self.gpu.bind()?;
        let copies = self.copies.as_ref().ok_or_else(not_begun)?;
        copies.check()?;
        if ticket.queue == Queue::Compute {
            return Ok(()); // in order anyway
        }
        let begun = match self.spans.is_on() && !copies.is_done(ticket)? {
            true => self.spans.begin(self.compute.stream())?,
            false => None,
        };
        self.compute.wait(|stream| copies.hold(stream, ticket))?;
        let what = || "wait for records".to_owned();
        self.spans.end(self.compute.stream(), begun, Queue::Compute, 0, what)
    }

    fn mark(&mut self) -> Result<Ticket> {
        self.gpu.bind()?;
        self.timelines.compute.record(self.compute.stream())
    }

    fn is_done(&mut self, ticket: Ticket) -> Result<bool> {
        self.gpu.bind()?;
        self.copies()?.is_done(ticket)
    }

    fn reserve(&mut self, work: &Work<'_>) -> Result<()> {
        match work {
            Work::Ffn { spec, x, top_k, .. } => {
                self.gpu.bind()?;
                let tokens = x.dims().first().copied().unwrap_or(0);
                self.reserve_ffn(spec, x.dtype(), tokens, *top_k)?;
                let records = self.source.directory().layers().iter().map(|l| l.experts).max().unwrap_or(0);
                self.upload.reserve(UPLOADED_OF_RECORD * records + UPLOADED_OF_ROW * tokens * top_k)?;
                // SAFETY: `combine` writes every element before anyone reads one.
                let result = unsafe { Tensor::empty((tokens, spec.hidden), x.dtype(), x.device()) };
                let bytes = tokens * spec.hidden * x.dtype().size_in_bytes();
                self.result = Some(result.map_err(|e| self.gpu.explain_result(bytes as u64, e))?);
                Ok(())
            }
            Work::Gather { .. } => Ok(()),
        }
    }

    fn begin(&mut self, work: Work<'_>) -> Result<()> {
        self.gpu.bind()?;
        self.copies()?.check()?;
        self.step = Some(match work {
            Work::Ffn { spec, layout, x, weights, top_k } => {
                Step::Ffn(Box::new(self.begin_ffn(spec, layout, x, weights, top_k)?))
            }
            Work::Gather { assignments, dtype, shape } => self.begin_gather(assignments, dtype, shape)?,
        });
        Ok(())
    }

    fn run(&mut self, items: &[WorkItem]) -> Result<()> {
        if items.is_empty() {
            return Ok(());
        }
        self.gpu.bind()?;
        self.runs += 1;
        self.options.faults.delay(self.compute.stream(), self.runs)?;
        let mut step = self.step.take().ok_or_else(not_begun)?;
        let begun = self.spans.begin(self.compute.stream())?;
        match &mut step {
            Step::Ffn(ffn) => ffn.summed = self.run_ffn(ffn, items)?,
            Step::Gather { address, bytes, .. } => self.run_gather(*address, *bytes, items)?,
        }
        self.step = Some(step);
        let what = || {
            let layer = self.source.directory().id(items[0].record).layer;
            let rows: usize = items.iter().map(|i| i.assignments.len()).sum();
            format!("layer {layer}: {} experts, {rows} rows", items.len())
        };
        self.spans.end(self.compute.stream(), begun, Queue::Compute, 0, what)
    }

    fn copy(&mut self, slots: &[(SlotId, SlotId)]) -> Result<()> {
        self.gpu.bind()?;
        let all = self.slots()?;
        let stream = self.compute.stream();
        let begun = self.spans.begin(stream)?;
        for &(from, to) in slots {
            let (from, to) = (all.address(from, all.stride)?, all.address(to, all.stride)?);
            // SAFETY: both are slots of the slab; the schedule made compute wait for the fills of both, and refills
            // neither before a later mark.
            unsafe { result::memcpy_dtod_async(to, from, all.stride, stream.cu_stream()) }
                .doing("copying a slot")?;
        }
        let what = || format!("{} slots copied", slots.len());
        self.spans.end(stream, begun, Queue::Compute, 0, what)
    }

    fn finish(&mut self) -> Result<Tensor> {
        self.gpu.bind()?;
        self.copies()?.check()?;
        match self.step.take().ok_or_else(not_begun)? {
            Step::Ffn(ffn) => self.finish_ffn(*ffn),
            Step::Gather { out, caller, .. } => {
                self.compute.leave(&caller)?;
                Ok(out)
            }
        }
    }

    fn begin_rows(&mut self, work: Work<'_>) -> Result<()> {
        self.begin(work)?;
        let mut ffn = self.take_ffn()?;
        ffn.rows = true;
        self.step = Some(Step::Ffn(ffn));
        Ok(())
    }

    fn finish_rows(&mut self, assignments: &[u32]) -> Result<Tensor> {
        self.gpu.bind()?;
        self.copies()?.check()?;
        let ffn = self.take_ffn()?;
        // SAFETY: every row is written before anyone reads one.
        let rows =
            unsafe { Tensor::empty((assignments.len(), ffn.spec.hidden), DType::F32, ffn.x.device()) }?;
        self.move_rows(&ffn, assignments, &rows, true)?;
        self.compute.leave(&ffn.caller)?;
        Ok(rows)
    }

    fn accept(&mut self, assignments: &[u32], rows: &Tensor) -> Result<()> {
        self.gpu.bind()?;
        let ffn = self.take_ffn()?;
        // Behind whoever brought the rows.
        self.compute.enter(&ffn.caller)?;
        self.move_rows(&ffn, assignments, rows, false)?;
        self.step = Some(Step::Ffn(ffn));
        Ok(())
    }

    fn as_any(&mut self) -> Option<&mut dyn Any> {
        Some(self)
    }

    fn slot_image<'a>(&self, record: RecordIndex, stored: &'a [u8]) -> Result<Cow<'a, [u8]>> {
        let layer = self.source.directory().layers().partition_point(|e| e.first <= record.0).wrapping_sub(1);
        let Some(expansion) = self.options.expansions.get(layer) else { return Ok(Cow::Borrowed(stored)) };
        let mut image = vec![0; expansion.to.record_bytes];
        convert_record(&expansion.from, stored, &expansion.to, &mut image)?;
        Ok(Cow::Owned(image))
    }

    fn synchronize(&mut self) -> Result<()> {
        self.gpu.bind()?;
        if let Some(copies) = &self.copies {
            copies.synchronize()?;
        }
        self.compute.stream().synchronize().doing("waiting for kernels")
    }

    fn read_slot(&mut self, slot: SlotId, out: &mut [u8]) -> Result<()> {
        let at = self.slots()?.address(slot, out.len())? - self.slots()?.base;
        self.slab()?.read(at as usize, out)
    }

    fn write_slot(&mut self, slot: SlotId, bytes: &[u8]) -> Result<()> {
        let at = self.slots()?.address(slot, bytes.len())? - self.slots()?.base;
        self.slab()?.write(at as usize, bytes)
    }

    fn memory(&self) -> BackendMemory {
        let bytes = |parts: &[usize]| parts.iter().sum::<usize>() as u64;
        BackendMemory {
            slots: bytes(&[self.slab.as_ref().map_or(0, Slab::bytes)]),
            workspace: bytes(&[self.hidden.bytes(), self.partial.bytes(), self.rounded.bytes()]),
            buffers: bytes(&[
                self.upload.bytes(),
                self.tables.as_ref().map_or(0, Tables::bytes),
                self.ahead.as_ref().map_or(0, Ahead::bytes),
                self.spans.bytes(),
            ]),
        }
    }

    fn page_locking(&self) -> Option<PageLocking> {
        self.options.tier.is_none().then(|| self.arena.locking())
    }

    fn use_page_locked(&mut self) -> Result<bool> {
        self.take_page_locked()
    }

    /// Estimated: one batch in four and one wait in four are timed by events on the GPU, and the sums are scaled by
    /// bytes and by count. A prefetch counts while its pieces are on the link.
    fn transfer_time(&self) -> TransferTime {
        let of = |queue| self.copies.as_ref().map_or_else(Default::default, |c| c.time(queue));
        TransferTime {
            demand: of(Queue::Demand),
            prefetch: of(Queue::Prefetch),
            stalled: self.compute.waited(),
        }
    }

    fn begin_spans(&mut self) -> Result<Option<SpanZero>> {
        self.synchronize()?;
        self.spans.start(&self.kernels, self.compute.stream()).map(Some)
    }

    fn take_spans(&mut self) -> Result<DeviceSpans> {
        self.synchronize()?;
        self.spans.take(self.source.directory())
    }

    fn device_driver(&mut self) -> std::result::Result<&mut dyn DeviceDriver, String> {
        match self.cannot_drive() {
            Some(why) => Err(why),
            None => Ok(self),
        }
    }
}

impl Drop for CudaBackend {
    fn drop(&mut self) {
        // Workers stop enqueueing; then nothing is in flight while memory is given back, field by field.
        self.copies = None;
        self.gpu.ctx.record_err(self.gpu.ctx.synchronize());
    }
}
