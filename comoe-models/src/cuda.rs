//! This crate's CUDA kernels (`kernels/*.cu`, one fatbin), with typed launches.

use std::sync::Arc;

use candle_core::DType;
use comoe_core::{Error, Result};
use cudarc::driver::{CudaContext, CudaFunction, CudaStream, DriverError, LaunchConfig, PushKernelArg, sys};
use cudarc::nvrtc::Ptx;

pub(crate) static FATBIN: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/kernels.fatbin"));

/// The most experts that [`RouteKernel::route`] takes: two F32 each in 48 KiB of shared memory.
pub const MOST_EXPERTS: usize = 6144;

/// How a router's logits become scores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scoring {
    /// Softmax over all experts.
    Softmax,
    /// The sigmoid of each.
    Sigmoid,
}

/// Arguments of [`RouteKernel::route`]; addresses are device memory.
#[derive(Debug, Clone, Copy)]
pub struct RouteArgs {
    /// `[tokens, experts]`
    pub logits: u64,
    /// F32, BF16 or F16.
    pub logits_dtype: DType,
    /// `[experts]` F32, added to the scores for the choice alone (DeepSeek-V3, arXiv 2412.19437, section 2.1.2), or 0.
    pub bias: u64,
    /// Rows of the logits.
    pub tokens: usize,
    /// Experts of the layer, at most [`MOST_EXPERTS`].
    pub experts: usize,
    /// Experts per token.
    pub top_k: usize,
    /// Logits to scores.
    pub scoring: Scoring,
    /// Whether the weights of a token's experts are made to add up to 1 before `scale`.
    pub normalise: bool,
    /// What the weights are multiplied with.
    pub scale: f32,
    /// Result `[tokens, top_k]`, u32, best first; of equal scores the lowest id is better.
    pub ids: u64,
    /// Result `[tokens, top_k]`, F32.
    pub weights: u64,
    /// One u32, set to 1 + a token whose logits have a NaN or +inf (or no score above zero), else left alone.
    pub error: u64,
}

/// Top-k routing on the device.
pub struct RouteKernel {
    ordinal: usize,
    function: CudaFunction,
}

impl RouteKernel {
    /// Loads the kernel into `ctx`'s GPU.
    ///
    /// # Errors
    /// [`Error::Device`] when this build has no kernel for the GPU, or its driver is too old for it.
    pub fn load(ctx: &Arc<CudaContext>) -> Result<Self> {
        let fail = |error: DriverError| {
            use sys::CUresult as R;
            let reason = match error.0 {
                R::CUDA_ERROR_NO_BINARY_FOR_GPU | R::CUDA_ERROR_INVALID_IMAGE => {
                    "this build has no kernels for the GPU; CoMoE runs on compute capability 8.0 and later"
                        .to_owned()
                }
                R::CUDA_ERROR_UNSUPPORTED_PTX_VERSION | R::CUDA_ERROR_INVALID_PTX => {
                    "the driver is older than this build's CUDA: update the driver".to_owned()
                }
                _ => format!("loading the kernels failed: {error}"),
            };
            Error::Device { asked: format!("cuda:{}", ctx.ordinal()), reason }
        };
        let module = ctx.load_module(Ptx::from_binary(FATBIN.to_vec())).map_err(fail)?;
        Ok(Self { ordinal: ctx.ordinal(), function: module.load_function("route").map_err(fail)? })
    }

    /// Enqueues the choice of every token's experts.
    ///
    /// # Errors
    /// [`Error::BadArgument`] for sizes or a dtype that the kernel cannot do, [`Error::Device`] when the launch fails.
    ///
    /// # Safety
    /// Every address in `args` must be valid on the stream's GPU, for the sizes documented, until the kernel is done.
    pub unsafe fn route(&self, stream: &Arc<CudaStream>, args: &RouteArgs) -> Result<()> {
        let dtype = match args.logits_dtype {
            DType::F32 => 0u32,
            DType::BF16 => 1,
            DType::F16 => 2,
            other => {
                let reason = format!("expected F32, BF16 or F16, found {other:?}");
                return Err(Error::BadArgument { what: "router logits", reason });
            }
        };
        if args.experts == 0 || args.experts > MOST_EXPERTS {
            let reason = format!("expected 1 to {MOST_EXPERTS}, found {}", args.experts);
            return Err(Error::BadArgument { what: "experts of a layer", reason });
        }
        if args.top_k == 0 || args.top_k > args.experts {
            let reason =
                format!("expected 1 to {} (the layer's experts), found {}", args.experts, args.top_k);
            return Err(Error::BadArgument { what: "top_k", reason });
        }
        if args.tokens == 0 {
            return Ok(());
        }
        let config = LaunchConfig {
            grid_dim: (args.tokens as u32, 1, 1),
            block_dim: (32, 1, 1),
            shared_mem_bytes: 8 * args.experts as u32,
        };
        let (experts, top_k) = (args.experts as u32, args.top_k as u32);
        let (scoring, normalise) = (u32::from(args.scoring == Scoring::Sigmoid), u32::from(args.normalise));
        let mut launch = stream.launch_builder(&self.function);
        launch.arg(&args.logits).arg(&dtype).arg(&args.bias).arg(&experts).arg(&top_k).arg(&scoring);
        launch.arg(&normalise).arg(&args.scale).arg(&args.ids).arg(&args.weights).arg(&args.error);
        // SAFETY: types and order are those of kernels/route.cu; the addresses are the caller's promise.
        unsafe { launch.launch(config) }.map_err(|error| Error::Device {
            asked: format!("cuda:{}", self.ordinal),
            reason: format!("launching the kernel route failed: {error}"),
        })?;
        Ok(())
    }
}
