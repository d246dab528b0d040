//! Several GPUs under one cache: how they reach each other, and what they hand to each other.
//!
//! `lane` carries tensors from one to the other for steps that the host drives; `drive` is for steps that the GPUs drive
//! themselves. Everything is enqueued behind and before the right things on both streams, and no GPU touches another's
//! memory but what lies in a [`Space`].

mod drive;
mod lane;

use std::time::{Duration, Instant};

use candle_core::Tensor;
use cudarc::driver::{DriverError, sys};

use self::drive::Drive;
use self::lane::{Lane, Side};
use super::backend::CudaBackend;
use super::context::{Doing, Gpu};
use super::pinned::PinnedBuffer;
use super::slab::Slab;
use crate::backend::bond::{Bond, BondOptions, PeerAccess, Shared};
use crate::backend::{Backend, DeviceStep};
use crate::error::{Error, Result};

/// How one GPU reaches another's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Path {
    /// It is the same GPU.
    Same,
    /// Over the bus or a link of their own.
    Peer,
    /// Both reach page-locked host memory.
    Host,
}

impl Path {
    /// The path between two GPUs, made ready for both directions.
    pub(super) fn between(a: &Gpu, b: &Gpu, access: PeerAccess) -> Result<Self> {
        if a.ctx.ordinal() == b.ctx.ordinal() {
            return Ok(Self::Same);
        }
        if access == PeerAccess::Off || !can_reach(a, b)? || !can_reach(b, a)? {
            return Ok(Self::Host);
        }
        reach(a, b)?;
        reach(b, a)?;
        Ok(Self::Peer)
    }
}

/// Whether `from`'s kernels could read and write `to`'s memory.
pub(super) fn can_reach(from: &Gpu, to: &Gpu) -> Result<bool> {
    let mut can = 0;
    // SAFETY: a valid place for one int, and two devices that are open.
    unsafe { sys::cuDeviceCanAccessPeer(&mut can, from.ctx.cu_device(), to.ctx.cu_device()) }
        .result()
        .doing("asking how GPUs reach each other")?;
    Ok(can != 0)
}

/// Lets `from`'s kernels use `to`'s memory.
pub(super) fn reach(from: &Gpu, to: &Gpu) -> Result<()> {
    from.bind()?;
    // SAFETY: two contexts that live as long as their devices; `from`'s is current.
    match unsafe { sys::cuCtxEnablePeerAccess(to.ctx.cu_ctx(), 0) }.result() {
        Ok(()) | Err(DriverError(sys::cudaError_enum::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED)) => Ok(()),
        Err(error) => Err(error).doing("letting GPUs use each other's memory"),
    }
}

/// Memory that two GPUs see.
pub(super) enum Space {
    /// Of one of them.
    Gpu(Slab),
    /// Page-locked.
    Host(PinnedBuffer),
}

impl Space {
    /// `bytes` zeroes for what goes to `receiver`, whose own memory they are in wherever the sender reaches that.
    pub(super) fn new(path: Path, receiver: &Gpu, bytes: usize) -> Result<Self> {
        let bytes = bytes.next_multiple_of(1 << 12);
        if path == Path::Host {
            let space = PinnedBuffer::new(receiver, bytes)
                .map_err(|e| receiver.explain_allocation("a page-locked buffer", bytes as u64, e))?;
            return Ok(Self::Host(space));
        }
        let slab = Slab::new(receiver, "what GPUs hand to each other", bytes)?;
        slab.write(0, &vec![0; bytes])?;
        Ok(Self::Gpu(slab))
    }

    /// The address that all GPUs have for it.
    pub(super) fn address(&self) -> Result<u64> {
        match self {
            Self::Gpu(slab) => Ok(slab.address()),
            Self::Host(buffer) => buffer.device_address(),
        }
    }

    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Gpu(slab) => slab.bytes(),
            Self::Host(buffer) => buffer.bytes(),
        }
    }
}

/// One of the GPUs behind the first.
struct Member {
    name: String,
    path: Path,
    out: Lane,
    back: Lane,
    /// Whether `back` has carried anything.
    has_brought: bool,
}

/// What is between the first GPU of a cache and the others.
pub(crate) struct Peers {
    options: BondOptions,
    first: String,
    members: Vec<Member>,
    drive: Option<Drive>,
}

impl Peers {
    /// Between the GPUs of these backends.
    ///
    /// # Errors
    /// [`Error::BadArgument`] where one is no GPU's.
    pub(crate) fn new(backends: &mut [&mut dyn Backend], options: BondOptions) -> Result<Self> {
        let sides = sides(backends)?;
        let Some((first, others)) = sides.split_first() else {
            return Err(Error::BadArgument {
                what: "devices",
                reason: "a cache needs at least one".to_owned(),
            });
        };
        let member = |other: &Side| {
            let path = Path::between(&first.gpu, &other.gpu, options.peer_access)?;
            Ok::<_, Error>(Member {
                name: other.gpu.name(),
                path,
                out: Lane::new(first.clone(), other.clone(), path)?,
                back: Lane::new(other.clone(), first.clone(), path)?,
                has_brought: false,
            })
        };
        let members = others.iter().map(member).collect::<Result<_>>()?;
        Ok(Self { options, first: first.gpu.name(), members, drive: None })
    }

    fn names(&self) -> Vec<String> {
        std::iter::once(&self.first).chain(self.members.iter().map(|m| &m.name)).cloned().collect()
    }
}

/// The backends as what they are.
fn gpus<'b>(backends: &'b mut [&mut dyn Backend]) -> Result<Vec<&'b mut CudaBackend>> {
    let gpu = |backend: &'b mut &mut dyn Backend| {
        let device = backend.info().device;
        backend.as_any().and_then(|b| b.downcast_mut()).ok_or_else(|| {
            let reason =
                format!("{device} is no GPU of this build's: several devices share a cache where all are");
            Error::BadArgument { what: "devices", reason }
        })
    };
    backends.iter_mut().map(gpu).collect()
}

fn sides(backends: &mut [&mut dyn Backend]) -> Result<Vec<Side>> {
    let side = |b: &mut CudaBackend| Side { gpu: b.gpu.clone(), kernels: b.kernels.clone() };
    Ok(gpus(backends)?.into_iter().map(side).collect())
}

impl Bond for Peers {
    fn send(&mut self, member: usize, x: &Tensor) -> Result<Tensor> {
        self.members[member].out.carry(x)
    }

    fn bring(&mut self, member: usize, rows: &Tensor) -> Result<Tensor> {
        let member = &mut self.members[member];
        member.has_brought = true;
        member.back.carry(rows)
    }

    fn settle(&mut self) -> Result<()> {
        for member in self.members.iter().filter(|m| m.has_brought) {
            let late = || Error::DeviceLate { device: member.name.clone(), deadline: self.options.deadline };
            wait_until(self.options.deadline, || member.back.is_sent(), late)?;
        }
        Ok(())
    }

    fn prepare_to_drive(
        &mut self,
        backends: &mut [&mut dyn Backend],
        shared: &Shared<'_>,
    ) -> std::result::Result<(), String> {
        let paths: Vec<Path> = self.members.iter().map(|m| m.path).collect();
        let gpus = gpus(backends).map_err(|e| e.to_string())?;
        let drive = Drive::new(&gpus, &paths, shared, self.options, self.names())?;
        self.drive = Some(drive);
        Ok(())
    }

    fn step(&mut self, backends: &mut [&mut dyn Backend], step: DeviceStep<'_>) -> Result<Tensor> {
        let Some(drive) = &mut self.drive else {
            let reason = "these GPUs were not made ready to drive".to_owned();
            return Err(Error::BadArgument { what: "driver", reason });
        };
        drive.step(&mut gpus(backends)?, step)
    }

    fn notes(&self) -> Vec<String> {
        let note = |m: &Member| match m.path {
            Path::Same => format!("shares its memory with {}", m.name),
            Path::Peer => format!("uses the memory of {} and the other way round (peer access)", m.name),
            Path::Host if self.options.peer_access == PeerAccess::Off => {
                format!("reaches {} through page-locked memory (peer access is switched off)", m.name)
            }
            Path::Host => format!("reaches {} through page-locked memory (they have no peer access)", m.name),
        };
        self.members.iter().map(note).collect()
    }
}

/// Asks again and again, until the answer is yes or `deadline` has passed.
fn wait_until(
    deadline: Duration,
    mut is_done: impl FnMut() -> Result<bool>,
    late: impl FnOnce() -> Error,
) -> Result<()> {
    let begun = Instant::now();
    while !is_done()? {
        if begun.elapsed() > deadline {
            return Err(late());
        }
        std::thread::yield_now();
    }
    Ok(())
}
