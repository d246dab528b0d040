//! Steps that several GPUs drive together: kernels/peers.cu.
//!
//! Counts order the GPUs: a member's kernels wait for the count in front of what they are handed, the first GPU's for the
//! counts behind the results, and neither longer than the deadline. Streams wait for each other besides, by events, where
//! kernels should not wait (two streams of one GPU, whose kernels would take each other's place; a member that the first
//! GPU has nothing for yet), but not in a graph, where an event a layer would take longer than the counts: there a
//! member's stream joins the capture with the first step of a token and leaves it with the last, so such a graph holds
//! whole tokens.

use std::sync::Arc;
use std::time::Duration;

use candle_core::Tensor;
use cudarc::driver::{CudaEvent, CudaStream, sys::CUstreamCaptureStatus};

use super::{Path, Space};
use crate::backend::bond::{BondOptions, Shared};
use crate::backend::cuda::backend::CudaBackend;
use crate::backend::cuda::context::{Doing, Gpu};
use crate::backend::cuda::device::{Ask, StepIo};
use crate::backend::cuda::kernels::{Hand, MOST_MEMBERS, Sum, Take, inbox};
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
    /// Count, ids, weights and x, for the member.
    inbox: Space,
    /// Count and results, for the first GPU.
    parts: Option<Space>,
    /// x in the member's own memory, where the inbox is not.
    x: Option<Slab>,
    /// By record: its number on this GPU.
    numbers: Slab,
    /// Steps so far.
    count: Slab,
    handed: CudaEvent,
    done: CudaEvent,
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
        let x_bytes = (4 * MOST_DEVICE_TOKENS * hidden).next_multiple_of(16);
        let lead = &gpus[0].gpu;
        let seat = |(m, &path): (usize, &Path)| {
            let gpu = &gpus[1 + m].gpu;
            let event = |gpu: &Gpu| gpu.ctx.new_event(None).doing("making an event");
            Ok::<_, Error>(Seat {
                path,
                gpu: gpu.clone(),
                lead: lead.clone(),
                inbox: Space::new(path, gpu, inbox::X + x_bytes)?,
                parts: None,
                x: match path {
                    Path::Host => Some(Slab::new(gpu, "a step's input", x_bytes)?),
                    Path::Peer | Path::Same => None,
                },
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
            done: [0; MOST_MEMBERS],
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
        };
        for (m, seat) in self.members.iter_mut().enumerate() {
            hand.inbox[m] = seat.inbox.address()?;
            let parts = seat.parts(4 * rows * step.spec.hidden)?;
            (sum.done[m], sum.parts[m]) = (parts, parts + COUNT as u64);
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
        // freeing any of them waits for its GPU; members take what is handed to them before they are done, and the sum
        // waits for that, so nothing is handed out too early.
        unsafe { lead.kernels.resolve_lead(&stream, &launches.resolve, &hand)? };
        for (m, ((seat, member), order)) in
            self.members.iter().zip(others.iter_mut()).zip(&orders).enumerate()
        {
            let enter = order.enter && !(captured && seat.path != Path::Same);
            if enter {
                seat.fork(&stream, member)?;
            }
            seat.enqueue(
                member,
                &ask,
                &step,
                (hand.inbox[m], sum.done[m]),
                x_bytes,
                (first, experts),
                deadline,
                !order.enter,
            )?;
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
        let mut early = true;
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

    /// Enqueues the member's part.
    #[expect(clippy::too_many_arguments, reason = "one place, private")]
    fn enqueue(
        &self,
        member: &mut CudaBackend,
        lead: &Ask<'_>,
        step: &DeviceStep<'_>,
        (inbox, parts): (u64, u64),
        x_bytes: u64,
        (first, experts): (u32, usize),
        deadline: u64,
        early: bool,
    ) -> Result<()> {
        self.gpu.bind()?;
        let x = self.x.as_ref().map_or(0, Slab::address);
        let expansion = member.expansion(step.layer);
        let ask = Ask {
            layout: expansion.as_ref().map_or(step.layout, |e| &e.to),
            expansion: expansion.as_ref(),
            x: if x == 0 { inbox + inbox::X as u64 } else { x },
            ids: inbox + inbox::IDS as u64,
            weights: inbox + inbox::WEIGHTS as u64,
            numbers: Some((self.numbers.address() + 4 * u64::from(first), experts)),
            ..*lead
        };
        let mut launches = member.launches(&ask)?;
        launches.down.partial = parts + COUNT as u64;
        let count = self.count.address();
        let take = Take { inbox, x, x_bytes, step: count, deadline };
        let stream = member.compute.stream().clone();
        member.options.faults.delay(&stream, member.runs)?;
        // SAFETY: as in `Drive::step`.
        unsafe {
            member.kernels.resolve_member(&stream, &launches.resolve, &take, early)?;
            member.read_expanded(&launches)?;
            member.kernels.gate_up(&stream, &launches.gate_up)?;
            member.kernels.down(&stream, &launches.down)?;
            member.kernels.member_done(&stream, parts, count)
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
