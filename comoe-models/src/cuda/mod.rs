//! This crate's CUDA kernels (`kernels/*.cu`, one fatbin), with typed launches: what a decode step is made of besides
//! the experts.
//!
//! Everything in device memory is passed by address. A launch enqueues on the stream it is given, waits for nothing and
//! allocates nothing; what changes from token to token (ids, position, random numbers) is read from device memory, so
//! every launch can be captured in a CUDA graph and replayed. A token's results do not depend on how many others are in
//! the launch. Sums are F32, in an order fixed by shapes alone; where a result is rounded to the model's dtype is where
//! candle's kernels round.
//!
//! One thing that is broken on the device is told by an error word (one u32, device memory): the kernel sets it, others
//! leave it alone, and results stay within their ranges.

use std::ffi::c_void;
use std::mem::zeroed;
use std::sync::Arc;

use candle_core::DType;
use comoe_core::{Error, Result};
use cudarc::driver::{CudaContext, CudaFunction, CudaModule, CudaStream, DriverError, LaunchConfig, sys};

pub use self::attend::AttendArgs;
pub use self::conv::ConvArgs;
pub use self::embed::{AdvanceArgs, EmbedArgs};
pub(crate) use self::expand::ExpandKernel;
pub use self::gate::{AddGatedArgs, GateArgs};
pub use self::gemv::{GemvArgs, GemvWeight};
pub use self::heads::{HeadNormArgs, HeadsArgs, RopeArgs};
pub use self::kv::KvRows;
pub use self::latent::{LatentArgs, LatentValuesArgs};
pub(crate) use self::module::with_module;
pub use self::norm::{Centre, NormArgs};
pub use self::route::{GivenExperts, MOST_EXPERTS, RouteArgs};
pub(crate) use self::rows::RowKernels;
pub use self::sample::{SampleArgs, SampleSettings};
pub use crate::blocks::int8::{INT8_GROUP, Int8Layout, pack_int8, unpack_int8};

mod attend;
mod conv;
mod embed;
mod expand;
mod gate;
mod gemv;
mod heads;
mod kv;
mod latent;
mod module;
mod norm;
mod route;
mod rows;
mod sample;

/// Most tokens of one launch, where the arguments do not say otherwise.
pub const MOST_TOKENS: usize = 32;

/// The kernels of one GPU, loaded once.
pub struct DecodeKernels {
    ordinal: usize,
    /// Whether the GPU sets up a kernel while the one before it ends: since Hopper.
    early: bool,
    multiprocessors: usize,
    shared_limit: usize,
    norm: norm::NormKernels,
    gemv: gemv::GemvKernels,
    heads: CudaFunction,
    attend: attend::AttendKernels,
    route: route::RouteKernels,
    embed: CudaFunction,
    advance: CudaFunction,
    gate: CudaFunction,
    add_gated: CudaFunction,
    conv: CudaFunction,
    /// Append, queries, values.
    latent: [CudaFunction; 3],
    sample: CudaFunction,
}

impl DecodeKernels {
    /// Loads the kernels into `ctx`'s GPU.
    ///
    /// # Errors
    /// [`Error::Device`] when this build has no kernels for the GPU, or its driver is too old for them.
    pub fn load(ctx: &Arc<CudaContext>) -> Result<Self> {
        with_module(ctx, |module| Self::of(ctx, module))
    }

    fn of(ctx: &Arc<CudaContext>, module: &Arc<CudaModule>) -> std::result::Result<Self, DriverError> {
        use sys::CUdevice_attribute as A;
        let shared_limit = ctx.attribute(A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
        let (major, _) = ctx.compute_capability()?;
        Ok(Self {
            ordinal: ctx.ordinal(),
            early: major >= 9,
            multiprocessors: ctx.attribute(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as usize,
            shared_limit: shared_limit as usize,
            norm: norm::NormKernels::load(module)?,
            gemv: gemv::GemvKernels::load(module)?,
            heads: module.load_function("split_norm_rope_append")?,
            attend: attend::AttendKernels::load(module, shared_limit)?,
            route: route::RouteKernels::load(module)?,
            embed: module.load_function("embed")?,
            advance: module.load_function("advance")?,
            gate: module.load_function("gate")?,
            add_gated: module.load_function("add_gated")?,
            conv: module.load_function("short_conv")?,
            latent: [
                module.load_function("latent_append")?,
                module.load_function("latent_queries")?,
                module.load_function("latent_values")?,
            ],
            sample: with_shared(module, "sample", shared_limit - sample::STATIC_SHARED as i32)?,
        })
    }

    /// Enqueues a kernel that takes one struct by value. Where the GPU can, it is set up while the kernel before it
    /// on the stream ends; captured graphs keep this.
    ///
    /// # Safety
    /// `arguments` mirrors the struct that the kernel takes, and the addresses in it are valid until it is done. The
    /// kernel waits (`wait_for_previous`) before it touches what those before it read or write.
    unsafe fn launch<T: Copy>(
        &self,
        what: &str,
        stream: &CudaStream,
        function: &CudaFunction,
        config: LaunchConfig,
        arguments: &T,
    ) -> Result<()> {
        // SAFETY: integers and unions of integers, for which zeros are values.
        let mut attribute: sys::CUlaunchAttribute = unsafe { zeroed() };
        attribute.id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        attribute.value.programmaticStreamSerializationAllowed = 1;
        // SAFETY: the caller keeps this function's contract.
        unsafe {
            self.launch_with(what, stream, function, config, arguments, self.early.then_some(attribute))
        }
    }

    /// The same for a kernel whose blocks wait for each other: they run all at once, or the launch fails.
    ///
    /// # Safety
    /// As [`Self::launch`].
    unsafe fn launch_together<T: Copy>(
        &self,
        what: &str,
        stream: &CudaStream,
        function: &CudaFunction,
        config: LaunchConfig,
        arguments: &T,
    ) -> Result<()> {
        // SAFETY: as in `launch`.
        let mut attribute: sys::CUlaunchAttribute = unsafe { zeroed() };
        attribute.id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
        attribute.value.cooperative = 1;
        // SAFETY: the caller keeps this function's contract.
        unsafe { self.launch_with(what, stream, function, config, arguments, Some(attribute)) }
    }

    /// # Safety
    /// As [`Self::launch`].
    unsafe fn launch_with<T: Copy>(
        &self,
        what: &str,
        stream: &CudaStream,
        function: &CudaFunction,
        config: LaunchConfig,
        arguments: &T,
        mut attribute: Option<sys::CUlaunchAttribute>,
    ) -> Result<()> {
        let launched = stream.context().bind_to_thread().and_then(|()| {
            let mut arguments: [*mut c_void; 1] = [std::ptr::from_ref(arguments).cast_mut().cast()];
            let config = sys::CUlaunchConfig {
                gridDimX: config.grid_dim.0,
                gridDimY: config.grid_dim.1,
                gridDimZ: config.grid_dim.2,
                blockDimX: config.block_dim.0,
                blockDimY: config.block_dim.1,
                blockDimZ: config.block_dim.2,
                sharedMemBytes: config.shared_mem_bytes,
                hStream: stream.cu_stream(),
                numAttrs: attribute.is_some().into(),
                attrs: attribute.as_mut().map_or(std::ptr::null_mut(), std::ptr::from_mut),
            };
            // SAFETY: the configuration and its attribute outlive the call, which copies the arguments; the rest is
            // the caller's promise.
            unsafe {
                let function = function.cu_function();
                sys::cuLaunchKernelEx(&config, function, arguments.as_mut_ptr(), std::ptr::null_mut())
            }
            .result()
        });
        launched.map_err(|error| Error::Device {
            asked: format!("cuda:{}", self.ordinal),
            reason: format!("launching the kernel {what} failed: {error}"),
        })
    }
}

/// A function that may be launched with `limit` bytes of shared memory, beside what it has of its own.
fn with_shared(
    module: &Arc<CudaModule>,
    name: &str,
    limit: i32,
) -> std::result::Result<CudaFunction, DriverError> {
    let function = module.load_function(name)?;
    let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    function.set_attribute(attribute, limit)?;
    Ok(function)
}

/// The number by which the kernels know an element type.
fn dtype_code(what: &'static str, dtype: DType) -> Result<u32> {
    match dtype {
        DType::F32 => Ok(0),
        DType::BF16 => Ok(1),
        DType::F16 => Ok(2),
        other => bad(what, format!("expected F32, BF16 or F16, found {other:?}")),
    }
}

fn bad<T>(what: &'static str, reason: String) -> Result<T> {
    Err(Error::BadArgument { what, reason })
}

/// A size that must be in `least..=most`, for the kernel.
fn within(what: &'static str, n: usize, least: usize, most: usize) -> Result<u32> {
    if n < least || n > most {
        return bad(what, format!("expected {least} to {most}, found {n}"));
    }
    u32::try_from(n).or_else(|_| bad(what, format!("{n} do not fit into 32 bits")))
}

fn tokens_of(n: usize) -> Result<u32> {
    within("tokens of a decode kernel", n, 1, MOST_TOKENS)
}

/// A grid of blocks of `threads`.
fn grid(x: usize, y: usize, z: usize, threads: usize, shared: usize) -> LaunchConfig {
    LaunchConfig {
        grid_dim: (x as u32, y as u32, z as u32),
        block_dim: (threads as u32, 1, 1),
        shared_mem_bytes: shared as u32,
    }
}

/// Sizes are those of the structs in `kernels/`, where a `static_assert` holds the same number.
#[cfg(test)]
macro_rules! mirrored {
    ($type:ty, $bytes:expr) => {
        #[test]
        fn arguments_are_as_long_as_on_the_device() {
            assert_eq!(size_of::<$type>(), $bytes);
        }
    };
}
#[cfg(test)]
use mirrored;
