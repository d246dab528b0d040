//! Steps that several GPUs drive together: kernels/peers.cu.
//!
//! Numbers of steps order the GPUs: a member's kernels wait for the words of their step, the first GPU's for those of the
//! results, and neither longer than the deadline. Streams wait for each other besides, by events, where kernels should not
//! wait (two streams of one GPU, whose kernels would take each other's place; a member that the first GPU has nothing for
//! yet), but not in a graph, where an event a layer would take longer: there a member's stream joins the capture with the
//! first step of a token and leaves it with the last, so such a graph holds whole tokens.

use std::sync::Arc;
use std::time::Duration;

use candle_core::Tensor;
use cudarc::driver::{CudaEvent, CudaStream, sys::CUstreamCaptureStatus};

use super::{Path, Space};
use crate::backend::bond::{BondOptions, Shared};
use crate::backend::cuda::backend::CudaBackend;
use crate::backend::cuda::context::{Doing, Gpu};
use crate::backend::cuda::device::{Ask, Launches, StepIo};
use crate::backend::cuda::kernels::{Back, Hand, MOST_MEMBERS, Sum, Take, copy, in_words};
use crate::backend::cuda::slab::Slab;
use crate::backend::cuda::upload::bytes_of;
use crate::backend::{DeviceStep, MOST_DEVICE_TOKENS};
use crate::error::{Error, Result};
use crate::store::RecordIndex;

/// The expert is another device's.
const ELSEWHERE: u32 = u32::MAX;
/// Bytes of a count, and of what keeps it apart from the next thing.
const COUNT: usize = 256;

/// What GPUs need to drive together.
pub(super) struct Drive {
    members: Vec<Seat>,
    /// By record: its number on the first GPU, and its owner.
    numbers: Slab,
    owners: Slab,
    /// Steps handed out, and steps awaited.
    counts: Slab,
    /// By layer ordinal: first record, experts.
    layers: Vec<(u32, usize)>,
    names: Vec<String>,
    deadline: Duration,
}

/// What one member has.
struct Seat {
    path: Path,
    gpu: Gpu,
    lead: Gpu,
    /// Ids, weights and x, in words for the member.
    inbox: Space,
    /// The same in the member's own memory, as its kernels read it.
    copy: Slab,
    /// The last step that the member has taken, and results in words, for the first GPU.
    parts: Option<Space>,
    /// By record: its number on this GPU.
    numbers: Slab,
    /// Steps so far.
    count: Slab,
    handed: CudaEvent,
    done: CudaEvent,
}

/// A member's part of a step.
struct Job<'a> {
    launches: Launches<'a>,
    take: Take,
    back: Back,
    assignments: usize,
}

/// What orders the streams of one step.
struct Order {
    /// A member waits for the first GPU's stream, and the other way round.
    enter: bool,
    leave: bool,
}

impl Drive {
    pub(super) fn new(
        gpus: &[&mut CudaBackend],
        paths: &[Path],
        shared: &Shared<'_>,
        options: BondOptions,
        names: Vec<String>,
    ) -> std::result::Result<Self, String> {
        if paths.len() > MOST_MEMBERS {
            return Err(format!(
                "{} devices, of which up to {} drive together",
                paths.len() + 1,
                MOST_MEMBERS + 1
            ));
        }
        Self::allocated(gpus, paths, shared, options, names).map_err(|e| e.to_string())
    }

    fn allocated(
        gpus: &[&mut CudaBackend],
        paths: &[Path],
        shared: &Shared<'_>,
        options: BondOptions,
        names: Vec<String>,
    ) -> Result<Self> {
        let Shared { directory, placement, specs } = *shared;
        let table = |gpu: &Gpu, of: &dyn Fn(RecordIndex) -> u32| {
            let words: Vec<u32> = (0..directory.len() as u32).map(|r| of(RecordIndex(r))).collect();
            let slab = Slab::new(gpu, "tables of who owns what", 4 * words.len())?;
            slab.write(0, bytes_of(&words))?;
            Ok::<_, Error>(slab)
        };
        let zeroes = |gpu: &Gpu| {
            let slab = Slab::new(gpu, "counts of steps", 2 * COUNT)?;
            slab.write(0, &[0; 2 * COUNT])?;
            Ok::<_, Error>(slab)
        };
        let numbers = |gpu: &Gpu, device: usize| {
            table(gpu, &|r| if placement.owner(r) == device { placement.number(r) } else { ELSEWHERE })
        };
        let hidden = specs.iter().map(|s| s.hidden).max().unwrap_or(0);
        let handed = copy::X + 4 * MOST_DEVICE_TOKENS * hidden;
        let lead = &gpus[0].gpu;
        let seat = |(m, &path): (usize, &Path)| {
            let gpu = &gpus[1 + m].gpu;
            let event = |gpu: &Gpu| gpu.ctx.new_event(None).doing("making an event");
            Ok::<_, Error>(Seat {
                path,
                gpu: gpu.clone(),
                lead: lead.clone(),
                inbox: Space::new(path, gpu, in_words(handed))?,
                copy: Slab::new(gpu, "a step's input", handed)?,
                parts: None,
                numbers: numbers(gpu, 1 + m)?,
                count: zeroes(gpu)?,
                handed: event(lead)?,
                done: event(gpu)?,
            })
        };
        Ok(Self {
            members: paths.iter().enumerate().map(seat).collect::<Result<_>>()?,
            numbers: numbers(lead, 0)?,
            owners: table(lead, &|r| placement.owner(r) as u32)?,
            counts: zeroes(lead)?,
            layers: directory.layers().iter().map(|l| (l.first, l.experts)).collect(),
            names,
            deadline: options.deadline,
        })
    }

    /// Enqueues a layer step on all GPUs, and hands out its result.
    pub(super) fn step(&mut self, gpus: &mut [&mut CudaBackend], step: DeviceStep<'_>) -> Result<Tensor> {
        let (first, experts) = self.layers[step.layer];
        let deadline = u64::try_from(self.deadline.as_nanos()).unwrap_or(u64::MAX);
        let rows = MOST_DEVICE_TOKENS * step.ids.dims2()?.1;
        for backend in gpus.iter_mut() {
            if let Some(tables) = backend.tables.as_mut().filter(|t| t.together.is_empty()) {
                (tables.together, tables.deadline) = (self.names.clone(), self.deadline);
            }
            backend.runs += 1;
        }
        let Some((lead, others)) = gpus.split_first_mut() else {
            return Err(Error::BadArgument { what: "devices", reason: "there is none".to_owned() });
        };
        lead.gpu.bind()?;
        let caller = lead.gpu.candle_stream();
        let io = StepIo::new(&step, &caller)?;
        let x_bytes = (io.tokens * step.spec.hidden * io.x_dtype.size_in_bytes()) as u64;
        let expansion = lead.expansion(step.layer);
        let mut ask = Ask::new(&step, &io, expansion.as_ref());
        ask.numbers = Some((self.numbers.address() + 4 * u64::from(first), experts));
        let launches = lead.launches(&ask)?;
        let (handed, awaited) = (self.counts.address(), self.counts.address() + COUNT as u64);
        let mut hand = Hand {
            x: io.x_at,
            x_bytes,
            inbox: [0; MOST_MEMBERS],
            handed,
            awaited,
            members: self.members.len() as u32,
            unused: 0,
        };
        let mut sum = Sum {
            own: launches.down.partial,
            parts: [0; MOST_MEMBERS],
            taken: [0; MOST_MEMBERS],
            ids: io.ids,
            owner: self.owners.address() + 4 * u64::from(first),
            factors: launches.resolve.factors,
            handed,
            awaited,
            fault: launches.resolve.fault,
            host: launches.resolve.host,
            y: io.y_at,
            deadline,
            members: self.members.len() as u32,
            experts: experts as u32,
            top_k: io.top_k as u32,
            hidden: step.spec.hidden as u32,
            dtype: 0,
            layer: step.layer as u32,
            is_near: self.members.iter().all(|seat| seat.path != Path::Host).into(),
            unused: 0,
        };
        // Whatever memory is short is found before anything is enqueued.
        let expansions: Vec<_> = others.iter().map(|member| member.expansion(step.layer)).collect();
        let mut jobs = Vec::with_capacity(self.members.len());
        for (m, (seat, member)) in self.members.iter_mut().zip(others.iter_mut()).enumerate() {
            let parts = seat.parts(in_words(4 * rows * step.spec.hidden))?;
            let expansion = expansions[m].as_ref();
            let layout = expansion.map_or(step.layout, |e| &e.to);
            let job = seat.job(member, &Ask { layout, expansion, ..ask }, parts, x_bytes, first, deadline)?;
            (hand.inbox[m], sum.taken[m], sum.parts[m]) = (job.take.inbox, job.take.taken, job.back.words);
            jobs.push(job);
        }

        lead.gpu.bind()?;
        lead.compute.enter(&caller)?;
        let stream = lead.compute.stream().clone();
        lead.options.faults.delay(&stream, lead.runs)?;
        let is_last = step.layer + 1 == self.layers.len();
        let captured = is_capturing(&stream)?;
        let mut orders = Vec::with_capacity(self.members.len());
        for (seat, member) in self.members.iter().zip(others.iter()) {
            let order = match is_same(&stream, member.compute.stream()) {
                true => Order { enter: false, leave: false },
                // Counts alone keep the order within a capture.
                false if captured && seat.path != Path::Same => {
                    Order { enter: !is_capturing(member.compute.stream())?, leave: is_last }
                }
                false => Order { enter: true, leave: seat.path == Path::Same },
            };
            if order.enter && captured && seat.path != Path::Same {
                // Before this step is handed out, so that nobody waits for a stream that has work of its own.
                seat.fork(&stream, member)?;
            }
            orders.push(order);
        }
        // SAFETY: as in a step of one GPU; inboxes, parts and tables are as large as the most tokens need, and
        // freeing any of them waits for its GPU; the sum waits until members have taken what was handed to them, so nothing
        // is handed out too early, and it has read what they handed back before they are handed anything else.
        unsafe { lead.kernels.resolve_lead(&stream, &launches.resolve, &hand)? };
        let members = self.members.iter().zip(others.iter_mut());
        for (((seat, member), job), order) in members.zip(&jobs).zip(&orders) {
            if order.enter && !(captured && seat.path != Path::Same) {
                seat.fork(&stream, member)?;
            }
            seat.enqueue(member, job, !order.enter)?;
            if order.leave {
                seat.done.record(member.compute.stream()).doing("recording an event")?;
            }
        }
        lead.gpu.bind()?;
        // SAFETY: as above.
        unsafe {
            lead.read_expanded(&launches)?;
            lead.kernels.gate_up(&stream, &launches.gate_up)?;
            lead.kernels.down(&stream, &launches.down)?;
        }
        // Without experts of its own nothing is between `resolve` and the sum, which reads what that writes at once.
        let mut early = launches.down.items.len > 0;
        for (seat, order) in self.members.iter().zip(&orders) {
            if order.leave {
                stream.wait(&seat.done).doing("waiting for an event")?;
                early = false;
            }
        }
        // SAFETY: as above.
        unsafe { lead.kernels.combine_all(&stream, &sum, (io.tokens, io.y.dtype()), early)? };
        lead.compute.leave(&caller)?;
        Ok(io.y)
    }
}

impl Seat {
    /// Where this member's results go, with a count in front. Grows before anything is captured: with the first step of a
    /// kind.
    fn parts(&mut self, bytes: usize) -> Result<u64> {
        if self.parts.as_ref().is_none_or(|p| p.bytes() < COUNT + bytes) {
            // What was counted so far goes on counting.
            let mut count = [0; 4];
            self.count.read(0, &mut count)?;
            self.lead.bind()?;
            self.lead.ctx.synchronize().doing("waiting for the GPU")?;
            self.parts = None;
            let mut space = Space::new(self.path, &self.lead, COUNT + bytes)?;
            match &mut space {
                Space::Gpu(slab) => slab.write(0, &count)?,
                Space::Host(buffer) => buffer.slice_mut(0, count.len()).copy_from_slice(&count),
            }
            self.parts = Some(space);
        }
        self.parts.as_ref().map_or(Ok(0), Space::address)
    }

    /// What follows on the member's stream comes after everything on the first GPU's.
    fn fork(&self, stream: &CudaStream, member: &CudaBackend) -> Result<()> {
        self.handed.record(stream).doing("recording an event")?;
        member.compute.stream().wait(&self.handed).doing("waiting for an event")
    }

    /// The member's part of a step: `lead` says what the first GPU is asked, but for what this one has its own of.
    fn job<'a>(
        &self,
        member: &mut CudaBackend,
        lead: &Ask<'a>,
        parts: u64,
        x_bytes: u64,
        first: u32,
        deadline: u64,
    ) -> Result<Job<'a>> {
        self.gpu.bind()?;
        let (given, step) = (self.copy.address(), self.count.address());
        let numbers = self.numbers.address() + 4 * u64::from(first);
        let all = lead.numbers.map_or(0, |(_, experts)| experts);
        let ask = Ask {
            x: given + copy::X as u64,
            ids: given + copy::IDS as u64,
            weights: given + copy::WEIGHTS as u64,
            numbers: Some((numbers, all)),
            ..*lead
        };
        let launches = member.launches(&ask)?;
        let inbox = self.inbox.address()?;
        let take = Take { inbox, copy: given, x_bytes, step, taken: parts, deadline };
        let back = Back {
            partial: launches.down.partial,
            words: parts + COUNT as u64,
            ids: ask.ids,
            numbers,
            step,
            fault: launches.resolve.fault,
            experts: all as u32,
            hidden: ask.spec.hidden as u32,
        };
        Ok(Job { launches, take, back, assignments: ask.tokens * ask.top_k })
    }

    /// Enqueues it. `early`: its first kernel may start while the one before it on the stream ends.
    fn enqueue(&self, member: &mut CudaBackend, job: &Job<'_>, early: bool) -> Result<()> {
        self.gpu.bind()?;
        let stream = member.compute.stream().clone();
        member.options.faults.delay(&stream, member.runs)?;
        let Job { launches, take, back, assignments } = job;
        // SAFETY: as in `Drive::step`.
        unsafe {
            member.kernels.resolve_member(&stream, &launches.resolve, take, early)?;
            member.read_expanded(launches)?;
            member.kernels.gate_up(&stream, &launches.gate_up)?;
            member.kernels.down_and_back(&stream, &launches.down, back, *assignments)
        }
    }
}

fn is_capturing(stream: &CudaStream) -> Result<bool> {
    let status = stream.capture_status().doing("asking for a stream's state")?;
    Ok(status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
}

fn is_same(a: &Arc<CudaStream>, b: &Arc<CudaStream>) -> bool {
    a.cu_stream() == b.cu_stream() && a.context().ordinal() == b.context().ordinal()
}
