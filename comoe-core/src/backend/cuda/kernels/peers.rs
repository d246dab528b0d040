//! The launches of kernels/peers.cu: steps that several GPUs share.

use std::ffi::c_void;
use std::sync::Arc;

use candle_core::DType;
use cudarc::driver::{
    CudaFunction, CudaModule, CudaStream, DeviceRepr, DriverError, LaunchConfig, PushKernelArg,
};

use super::super::resolve::Resolve;
use super::early::launch_early;
use super::{Kernels, dtype_code, grid_extent};
use crate::error::Result;

/// GPUs besides the first, at most.
pub(in crate::backend::cuda) const MOST_MEMBERS: usize = 7;

/// Where the parts of an inbox lie, in bytes from its start.
pub(in crate::backend::cuda) mod inbox {
    use crate::backend::MOST_DEVICE_ASSIGNMENTS;

    pub(in crate::backend::cuda) const IDS: usize = 256;
    pub(in crate::backend::cuda) const WEIGHTS: usize = IDS + 4 * MOST_DEVICE_ASSIGNMENTS;
    pub(in crate::backend::cuda) const X: usize = WEIGHTS + 4 * MOST_DEVICE_ASSIGNMENTS;
}

/// What the first GPU hands out; fields are explained in kernels/peers.cu, also those of the next two.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(in crate::backend::cuda) struct Hand {
    pub(in crate::backend::cuda) x: u64,
    pub(in crate::backend::cuda) x_bytes: u64,
    pub(in crate::backend::cuda) inbox: [u64; MOST_MEMBERS],
    pub(in crate::backend::cuda) handed: u64,
    pub(in crate::backend::cuda) awaited: u64,
    pub(in crate::backend::cuda) members: u32,
    pub(in crate::backend::cuda) unused: u32,
}

/// What a member takes.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(in crate::backend::cuda) struct Take {
    pub(in crate::backend::cuda) inbox: u64,
    pub(in crate::backend::cuda) x: u64,
    pub(in crate::backend::cuda) x_bytes: u64,
    pub(in crate::backend::cuda) step: u64,
    pub(in crate::backend::cuda) deadline: u64,
}

/// What the first GPU sums up.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(in crate::backend::cuda) struct Sum {
    pub(in crate::backend::cuda) own: u64,
    pub(in crate::backend::cuda) parts: [u64; MOST_MEMBERS],
    pub(in crate::backend::cuda) done: [u64; MOST_MEMBERS],
    pub(in crate::backend::cuda) ids: u64,
    pub(in crate::backend::cuda) owner: u64,
    pub(in crate::backend::cuda) factors: u64,
    pub(in crate::backend::cuda) handed: u64,
    pub(in crate::backend::cuda) awaited: u64,
    pub(in crate::backend::cuda) fault: u64,
    pub(in crate::backend::cuda) host: u64,
    pub(in crate::backend::cuda) y: u64,
    pub(in crate::backend::cuda) deadline: u64,
    pub(in crate::backend::cuda) members: u32,
    pub(in crate::backend::cuda) experts: u32,
    pub(in crate::backend::cuda) top_k: u32,
    pub(in crate::backend::cuda) hidden: u32,
    pub(in crate::backend::cuda) dtype: u32,
    pub(in crate::backend::cuda) layer: u32,
}

// SAFETY: plain integers without padding, mirrored field by field in kernels/peers.cu.
unsafe impl DeviceRepr for Hand {}
// SAFETY: as above.
unsafe impl DeviceRepr for Take {}
// SAFETY: as above.
unsafe impl DeviceRepr for Sum {}

pub(super) struct PeerKernels {
    resolve_lead: CudaFunction,
    resolve_member: CudaFunction,
    member_done: CudaFunction,
    combine_all: CudaFunction,
    move_rows: CudaFunction,
}

impl PeerKernels {
    pub(super) fn load(module: &Arc<CudaModule>) -> std::result::Result<Self, DriverError> {
        Ok(Self {
            resolve_lead: module.load_function("resolve_lead")?,
            resolve_member: module.load_function("resolve_member")?,
            member_done: module.load_function("member_done")?,
            combine_all: module.load_function("combine_all")?,
            move_rows: module.load_function("move_rows")?,
        })
    }
}

fn at<T: DeviceRepr>(argument: &T) -> *mut c_void {
    std::ptr::from_ref(argument).cast_mut().cast()
}

impl Kernels {
    /// # Safety
    /// As [`launch_early`]; every kernel of peers.cu waits for the one before it before it reads or writes anything.
    unsafe fn launch_peer(
        &self,
        what: &str,
        stream: &Arc<CudaStream>,
        function: &CudaFunction,
        config: LaunchConfig,
        early: bool,
        arguments: &mut [*mut c_void],
    ) -> Result<()> {
        let launched = if early && self.starts_early() {
            // SAFETY: the caller's promise.
            unsafe { launch_early(stream, function, config, arguments) }
        } else {
            stream.context().bind_to_thread().and_then(|()| {
                // SAFETY: the caller's promise.
                unsafe {
                    cudarc::driver::result::launch_kernel(
                        function.cu_function(),
                        config.grid_dim,
                        config.block_dim,
                        config.shared_mem_bytes,
                        stream.cu_stream(),
                        arguments,
                    )
                }
            })
        };
        launched.map_err(|error| self.launch_error(what, error))
    }

    /// Enqueues a step's schedule on the first GPU, and its handing out.
    ///
    /// # Errors
    /// As [`Kernels::resolve`].
    ///
    /// # Safety
    /// As [`Kernels::resolve`]; inboxes have room for x, and the members are done with what was handed to them before.
    pub(in crate::backend::cuda) unsafe fn resolve_lead(
        &self,
        stream: &Arc<CudaStream>,
        resolve: &Resolve,
        hand: &Hand,
    ) -> Result<()> {
        let config = resolve.launch_config(1 + hand.members)?;
        let function = &self.peers.resolve_lead;
        // SAFETY: types and order are those of kernels/peers.cu; the rest is the caller's promise.
        unsafe {
            self.launch_peer("resolve_lead", stream, function, config, true, &mut [at(resolve), at(hand)])
        }
    }

    /// Enqueues a step's schedule on a member, behind the arrival of its input. `early`: right behind a kernel of the
    /// same stream.
    ///
    /// # Errors
    /// As [`Kernels::resolve`].
    ///
    /// # Safety
    /// As [`Kernels::resolve`].
    pub(in crate::backend::cuda) unsafe fn resolve_member(
        &self,
        stream: &Arc<CudaStream>,
        resolve: &Resolve,
        take: &Take,
        early: bool,
    ) -> Result<()> {
        let (config, function) = (resolve.launch_config(1)?, &self.peers.resolve_member);
        // SAFETY: types and order are those of kernels/peers.cu; the rest is the caller's promise.
        unsafe {
            self.launch_peer("resolve_member", stream, function, config, early, &mut [at(resolve), at(take)])
        }
    }

    /// Enqueues the word that a member's results are there.
    ///
    /// # Errors
    /// [`Error::Device`](crate::Error::Device) when the launch fails.
    ///
    /// # Safety
    /// Both counts are valid on the stream's GPU until the kernel is done.
    pub(in crate::backend::cuda) unsafe fn member_done(
        &self,
        stream: &Arc<CudaStream>,
        done: u64,
        step: u64,
    ) -> Result<()> {
        let config = LaunchConfig { grid_dim: (1, 1, 1), block_dim: (1, 1, 1), shared_mem_bytes: 0 };
        let function = &self.peers.member_done;
        // SAFETY: types and order are those of kernels/peers.cu; the rest is the caller's promise.
        unsafe {
            self.launch_peer("member_done", stream, function, config, true, &mut [at(&done), at(&step)])
        }
    }

    /// Enqueues the weighted sum of the results of all GPUs, behind their arrival. `early`: as above.
    ///
    /// # Errors
    /// [`Error::BadArgument`](crate::Error::BadArgument) for a type that y cannot have.
    ///
    /// # Safety
    /// Addresses are valid on the stream's GPU for what kernels/peers.cu says of them, until the kernel is done.
    pub(in crate::backend::cuda) unsafe fn combine_all(
        &self,
        stream: &Arc<CudaStream>,
        sum: &Sum,
        (tokens, y_dtype): (usize, DType),
        early: bool,
    ) -> Result<()> {
        let sum = Sum { dtype: dtype_code("y", y_dtype)?, ..*sum };
        let config = LaunchConfig {
            grid_dim: (sum.hidden.div_ceil(256), grid_extent("tokens", tokens)?, 1),
            block_dim: (256, 1, 1),
            shared_mem_bytes: 0,
        };
        let function = &self.peers.combine_all;
        // SAFETY: types and order are those of kernels/peers.cu; the rest is the caller's promise.
        unsafe { self.launch_peer("combine_all", stream, function, config, early, &mut [at(&sum)]) }
    }

    /// Enqueues a copy of `rows` rows of `cols` floats: those that `list` names at `from` to rows in a row at `to`
    /// (`pack`), or the other way.
    ///
    /// # Errors
    /// [`Error::Device`](crate::Error::Device) when the launch fails.
    ///
    /// # Safety
    /// Addresses are valid on the stream's GPU for all of these rows until the kernel is done.
    pub(in crate::backend::cuda) unsafe fn move_rows(
        &self,
        stream: &Arc<CudaStream>,
        (from, to, list): (u64, u64, u64),
        (rows, cols): (usize, usize),
        pack: bool,
    ) -> Result<()> {
        if rows == 0 || cols == 0 {
            return Ok(());
        }
        let config = LaunchConfig {
            grid_dim: (cols.div_ceil(256) as u32, rows.min(1 << 15) as u32, 1),
            block_dim: (256, 1, 1),
            shared_mem_bytes: 0,
        };
        let (rows, cols, pack) = (rows as u32, cols as u32, u32::from(pack));
        let mut launch = stream.launch_builder(&self.peers.move_rows);
        launch.arg(&from).arg(&to).arg(&list).arg(&rows).arg(&cols).arg(&pack);
        // SAFETY: types and order are those of kernels/peers.cu; the addresses are the caller's promise.
        unsafe { launch.launch(config) }.map_err(|error| self.launch_error("move_rows", error))?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_as_long_as_on_the_device() {
        assert_eq!((size_of::<Hand>(), size_of::<Take>(), size_of::<Sum>()), (96, 40, 216));
        assert_eq!((inbox::IDS, inbox::WEIGHTS, inbox::X), (256, 256 + 4096, 256 + 8192));
    }
}
