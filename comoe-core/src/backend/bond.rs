//! What devices that share one cache need of each other: activations go out to all of them, results come back to the
//! first, in the order of the devices' own work and without the host waiting for it.

use std::time::Duration;

use candle_core::Tensor;

use super::{Backend, DeviceStep};
use crate::error::{Error, Result};
use crate::expert::ExpertSpec;
use crate::placement::Placement;
use crate::store::Directory;

/// How devices hand things to each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum PeerAccess {
    /// By each other's memory where the driver allows that, through page-locked host memory elsewhere.
    #[default]
    Auto,
    /// Through page-locked host memory.
    Off,
}

/// How devices share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BondOptions {
    pub(crate) peer_access: PeerAccess,
    /// How long one device is waited for.
    pub(crate) deadline: Duration,
}

/// What is between the first device of a cache and the others. Members are counted from 0: member 0 is the second device.
pub(crate) trait Bond: Send {
    /// `x`, on the first device, as a tensor on a member's.
    fn send(&mut self, member: usize, x: &Tensor) -> Result<Tensor>;

    /// `rows`, on a member's device, as a tensor on the first.
    fn bring(&mut self, member: usize, rows: &Tensor) -> Result<Tensor>;

    /// Waits until every member has done what results were brought of so far.
    ///
    /// # Errors
    /// [`Error::DeviceLate`] for one that has not within the deadline.
    fn settle(&mut self) -> Result<()>;

    /// Prepares for steps that the devices drive themselves, together; or says why there are none.
    fn prepare_to_drive(
        &mut self,
        backends: &mut [&mut dyn Backend],
        shared: &Shared<'_>,
    ) -> std::result::Result<(), String>;

    /// Enqueues one layer's step on all devices, the first of which is `backends[0]`, and hands out its result as
    /// [`DeviceDriver::step`](super::DeviceDriver::step) does.
    fn step(&mut self, backends: &mut [&mut dyn Backend], step: DeviceStep<'_>) -> Result<Tensor>;

    /// What is in force, for people to read.
    fn notes(&self) -> Vec<String>;
}

/// What is shared.
#[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "only GPUs drive together"))]
pub(crate) struct Shared<'a> {
    /// Every record of the model.
    pub(crate) directory: &'a Directory,
    pub(crate) placement: &'a Placement,
    /// By layer ordinal.
    pub(crate) specs: &'a [ExpertSpec],
}

/// Backends whose tensors are all in main memory.
pub(crate) struct SameMemory;

impl Bond for SameMemory {
    fn send(&mut self, _member: usize, x: &Tensor) -> Result<Tensor> {
        Ok(x.clone())
    }

    fn bring(&mut self, _member: usize, rows: &Tensor) -> Result<Tensor> {
        Ok(rows.clone())
    }

    fn settle(&mut self) -> Result<()> {
        Ok(())
    }

    fn prepare_to_drive(
        &mut self,
        _backends: &mut [&mut dyn Backend],
        _shared: &Shared<'_>,
    ) -> std::result::Result<(), String> {
        Err("several devices drive steps together only where they are GPUs".to_owned())
    }

    fn step(&mut self, _backends: &mut [&mut dyn Backend], _step: DeviceStep<'_>) -> Result<Tensor> {
        Err(Error::BadArgument { what: "driver", reason: "these devices drive no steps together".to_owned() })
    }

    fn notes(&self) -> Vec<String> {
        Vec::new()
    }
}
