//! The launches of kernels/peers.cu: steps that several GPUs share.

use std::ffi::c_void;
use std::sync::Arc;

use candle_core::DType;
use cudarc::driver::{
    CudaFunction, CudaModule, CudaStream, DeviceRepr, DriverError, LaunchConfig, PushKernelArg,
};

use super::super::resolve::Resolve;
use super::early::launch_early;
use super::{DownArgs, Kernels, dtype_code, grid_extent};
use crate::error::Result;

/// GPUs besides the first, at most.
pub(in crate::backend::cuda) const MOST_MEMBERS: usize = 7;

/// Words that a thread hands over or takes, as long as there are threads.
const WORDS_EACH: u64 = 4;

/// Where a member has what it was handed, in bytes: ids, weights, x.
pub(in crate::backend::cuda) mod copy {
    use crate::backend::MOST_DEVICE_ASSIGNMENTS;

    pub(in crate::backend::cuda) const IDS: usize = 0;
    pub(in crate::backend::cuda) const WEIGHTS: usize = IDS + 4 * MOST_DEVICE_ASSIGNMENTS;
    pub(in crate::backend::cuda) const X: usize = WEIGHTS + 4 * MOST_DEVICE_ASSIGNMENTS;
}

/// Bytes that `bytes` bytes take in words of kernels/words.cuh.
pub(in crate::backend::cuda) const fn in_words(bytes: usize) -> usize {
    8 * bytes.div_ceil(4)
}

/// What the first GPU hands out; fields are explained in kernels/peers.cu, also those of the next three.
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
    pub(in crate::backend::cuda) copy: u64,
    pub(in crate::backend::cuda) x_bytes: u64,
    pub(in crate::backend::cuda) step: u64,
    pub(in crate::backend::cuda) taken: u64,
    pub(in crate::backend::cuda) deadline: u64,
}

/// What a member hands back.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(in crate::backend::cuda) struct Back {
    pub(in crate::backend::cuda) partial: u64,
    pub(in crate::backend::cuda) words: u64,
    pub(in crate::backend::cuda) ids: u64,
    pub(in crate::backend::cuda) numbers: u64,
    pub(in crate::backend::cuda) step: u64,
    pub(in crate::backend::cuda) fault: u64,
    pub(in crate::backend::cuda) experts: u32,
    pub(in crate::backend::cuda) hidden: u32,
}

/// What the first GPU sums up.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(in crate::backend::cuda) struct Sum {
    pub(in crate::backend::cuda) own: u64,
    pub(in crate::backend::cuda) parts: [u64; MOST_MEMBERS],
    pub(in crate::backend::cuda) taken: [u64; MOST_MEMBERS],
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
    pub(in crate::backend::cuda) is_near: u32,
    pub(in crate::backend::cuda) unused: u32,
}

// SAFETY: plain integers without padding, mirrored field by field in kernels/peers.cu.
unsafe impl DeviceRepr for Hand {}
// SAFETY: as above.
unsafe impl DeviceRepr for Take {}
// SAFETY: as above.
unsafe impl DeviceRepr for Back {}
// SAFETY: as above.
unsafe impl DeviceRepr for Sum {}

pub(super) struct PeerKernels {
    resolve_lead: CudaFunction,
    resolve_member: CudaFunction,
    hand_back: CudaFunction,
    combine_all: CudaFunction,
    move_rows: CudaFunction,
}

impl PeerKernels {
    pub(super) fn load(module: &Arc<CudaModule>) -> std::result::Result<Self, DriverError> {
        Ok(Self {
            resolve_lead: module.load_function("resolve_lead")?,
            resolve_member: module.load_function("resolve_member")?,
            hand_back: module.load_function("hand_back")?,
            combine_all: module.load_function("combine_all")?,
            move_rows: module.load_function("move_rows")?,
        })
    }
}

fn at<T: DeviceRepr>(argument: &T) -> *mut c_void {
    std::ptr::from_ref(argument).cast_mut().cast()
}

/// Threads for a step's assignments, and for what is handed over with them: few words each, all of which are under way at
/// once.
fn words_config(resolve: &Resolve, blocks: u32, x_bytes: u64) -> Result<LaunchConfig> {
    let config = resolve.launch_config(blocks)?;
    let words = 2 * u64::from(resolve.assignments) + x_bytes.div_ceil(4);
    let threads = words.div_ceil(WORDS_EACH).next_multiple_of(32).min(1024) as u32;
    Ok(LaunchConfig { block_dim: (threads.max(config.block_dim.0), 1, 1), ..config })
}

impl Kernels {
    /// # Safety
    /// As [`launch_early`]; a kernel of peers.cu waits for the one before it before it reads what that one writes, and
    /// before it writes anything that others read.
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
        let config = words_config(resolve, 1 + hand.members, hand.x_bytes)?;
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
        let (config, function) = (words_config(resolve, 1, take.x_bytes)?, &self.peers.resolve_member);
        // SAFETY: types and order are those of kernels/peers.cu; the rest is the caller's promise.
        unsafe {
            self.launch_peer("resolve_member", stream, function, config, early, &mut [at(resolve), at(take)])
        }
    }

    /// Enqueues [`Kernels::down`] on a member, whose results go back in words. `assignments`: how many the step has.
    ///
    /// # Errors
    /// As [`Kernels::down`].
    ///
    /// # Safety
    /// As [`Kernels::down`]; addresses of `back` are valid on the stream's GPU for what kernels/peers.cu says of them,
    /// until the kernels are done.
    pub(in crate::backend::cuda) unsafe fn down_and_back(
        &self,
        stream: &Arc<CudaStream>,
        down: &DownArgs<'_>,
        back: &Back,
        assignments: usize,
    ) -> Result<()> {
        if self.takes_one_token(&down.items) {
            // SAFETY: the caller's promise.
            return unsafe { self.one_token_down_in_words(stream, down, back.words, back.step) };
        }
        let config = LaunchConfig {
            grid_dim: (back.hidden.div_ceil(256), grid_extent("assignments", assignments)?, 1),
            block_dim: (256, 1, 1),
            shared_mem_bytes: 0,
        };
        let function = &self.peers.hand_back;
        // SAFETY: types and order are those of kernels/peers.cu; the rest is the caller's promise.
        unsafe {
            self.down(stream, down)?;
            self.launch_peer("hand_back", stream, function, config, true, &mut [at(back)])
        }
    }

    /// Enqueues the weighted sum of the results of all GPUs, behind their arrival. `early`: right behind the step's `down`,
    /// with a kernel between that and its `resolve`.
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
        let sizes = [size_of::<Hand>(), size_of::<Take>(), size_of::<Back>(), size_of::<Sum>()];
        assert_eq!(sizes, [96, 48, 56, 224]);
        assert_eq!((copy::IDS, copy::WEIGHTS, copy::X), (0, 4096, 8192));
        assert_eq!([in_words(4), in_words(6), in_words(0)], [8, 16, 0]);
    }
}
