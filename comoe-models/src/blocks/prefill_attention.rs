//! Attention of many queries on a GPU, without a matrix of scores: kernels/prefill_attention.cu.

use candle_core::{DType, Device, Result, Tensor};

use super::kv_cache::Cached;
use crate::arch::Mask;

/// Fewer queries than this do not fill the kernel's tiles.
#[cfg(feature = "cuda")]
const LEAST_TOKENS: usize = 33;

/// Whether the kernel takes heads of such keys and values in `dtype`.
pub(crate) fn takes_heads(dtype: DType, key_width: usize, value_width: usize) -> bool {
    dtype == DType::BF16 && key_width == value_width && matches!(key_width, 64 | 128)
}

/// How queries look at keys.
#[derive(Debug, Clone, Copy)]
pub struct Look<'a> {
    /// On scores.
    pub scale: f32,
    /// Which keys a query sees.
    pub mask: Mask,
    /// `[heads, 1, 1]`, F32: logits that take part in the softmax and bring no value.
    pub sinks: Option<&'a Tensor>,
    /// Of the first query.
    pub position: usize,
}

/// The kernel, loaded into one GPU. There is none in a build without CUDA.
#[cfg(not(feature = "cuda"))]
#[derive(Debug, Clone)]
pub enum PrefillAttention {}

#[cfg(not(feature = "cuda"))]
impl PrefillAttention {
    /// For a model in `dtype`: this build has none.
    ///
    /// # Errors
    /// None.
    pub fn load(_: &Device, _: DType) -> crate::Result<Option<Self>> {
        Ok(None)
    }

    pub(super) fn takes(&self, _: &Tensor, _: &Cached, _: &Cached) -> Result<bool> {
        match *self {}
    }

    pub(super) fn forward(&self, _: &Tensor, _: &Cached, _: &Cached, _: Look<'_>) -> Result<Tensor> {
        match *self {}
    }
}

#[cfg(feature = "cuda")]
pub use gpu::PrefillAttention;

#[cfg(feature = "cuda")]
mod gpu {
    use std::sync::Arc;

    use candle_core::cuda::WrapErr;
    use candle_core::{CpuStorage, CudaStorage, CustomOp3, Layout, Shape};
    use cudarc::driver::{
        CudaFunction, DevicePtr, DeviceRepr, DriverError, LaunchConfig, PushKernelArg, sys,
    };
    use half::bf16;

    use super::{Cached, DType, Device, LEAST_TOKENS, Look, Mask, Result, Tensor, takes_heads};
    use crate::blocks::fused::{address, address_in};
    use crate::cuda::with_module;
    use crate::load::KvFormat;

    const QUERIES: usize = 64;

    /// As kernels/prefill_attention.cu has it.
    #[repr(C)]
    #[derive(Clone, Copy)]
    struct Args {
        q: u64,
        k: u64,
        v: u64,
        k_scales: u64,
        v_scales: u64,
        sinks: u64,
        out: u64,
        q_head: u64,
        k_head: u64,
        k_row: u64,
        v_head: u64,
        v_row: u64,
        scale_head: u64,
        scale: f32,
        tokens: u32,
        position: u32,
        group: u32,
        mask: u32,
        mask_size: u32,
    }

    // SAFETY: plain numbers without padding, mirrored field by field in kernels/prefill_attention.cu.
    unsafe impl DeviceRepr for Args {}

    /// The kernel, loaded into one GPU.
    #[derive(Debug, Clone)]
    pub struct PrefillAttention {
        /// For heads of 64 and of 128; over caches in BF16, then over those in INT8.
        functions: Arc<[[CudaFunction; 2]; 2]>,
    }

    fn shared_bytes(width: usize, format: KvFormat) -> usize {
        match format {
            // Two tiles of 64 keys and values.
            KvFormat::Plain => 512 * width,
            // One, the next one's bytes, and the scales of 64 keys and values.
            KvFormat::Int8 => 384 * width + 512,
        }
    }

    impl PrefillAttention {
        /// For a model in `dtype`; `None` where the device or the dtype has none.
        ///
        /// # Errors
        /// [`Error::Core`](crate::Error::Core) when this build has no kernel for the GPU.
        pub fn load(device: &Device, dtype: DType) -> crate::Result<Option<Self>> {
            let Device::Cuda(gpu) = device else { return Ok(None) };
            if dtype != DType::BF16 {
                return Ok(None);
            }
            let functions = with_module(gpu.cuda_stream().context(), |module| {
                let function = |width: usize, format: KvFormat| {
                    let of = if format == KvFormat::Int8 { "int8_" } else { "" };
                    let f = module.load_function(&format!("prefill_attention_{of}{width}"))?;
                    let most = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
                    f.set_attribute(most, shared_bytes(width, format) as i32)?;
                    Ok::<_, DriverError>(f)
                };
                let both = |format| Ok::<_, DriverError>([function(64, format)?, function(128, format)?]);
                Ok([both(KvFormat::Plain)?, both(KvFormat::Int8)?])
            })?;
            Ok(Some(Self { functions: Arc::new(functions) }))
        }

        /// Whether these heads are for the kernel: many queries, in rows that it can read.
        ///
        /// # Errors
        /// For tensors of other than three dimensions.
        pub fn takes(&self, q: &Tensor, k: &Cached, v: &Cached) -> Result<bool> {
            let (_, tokens, width) = q.dims3()?;
            let (_, _, value_width) = v.dims3()?;
            let ((k_rows, _), (v_rows, _)) = (k.parts(), v.parts());
            // Copies are of 16 bytes.
            let aligned = |t: &Tensor| {
                let (layout, at_once) = (t.layout(), 16 / t.dtype().size_in_bytes());
                let [head, row, one] = *layout.stride() else { return false };
                one == 1 && [layout.start_offset(), head, row].iter().all(|n| n.is_multiple_of(at_once))
            };
            let rows = q.stride()[1] == width;
            Ok(tokens >= LEAST_TOKENS
                && rows
                && k.format() == v.format()
                && takes_heads(q.dtype(), width, value_width)
                && [q, k_rows, v_rows].into_iter().all(aligned))
        }

        /// `q [heads, tokens, width]` over `k` and `v [kv_heads, position + tokens, width]`, which [`Self::takes`] was
        /// asked about, to `[tokens, heads * width]`.
        ///
        /// # Errors
        /// For heads that it does not take, and those of candle.
        pub fn forward(&self, q: &Tensor, k: &Cached, v: &Cached, look: Look<'_>) -> Result<Tensor> {
            if !self.takes(q, k, v)? {
                candle_core::bail!("prefill-attention does not take {q:?} over {k:?} and {v:?}");
            }
            let ((k, k_scales), (v, v_scales)) = (k.parts(), v.parts());
            let scales = k_scales.zip(v_scales);
            q.apply_op3_no_bwd(k, v, &Prefill { attention: self, look, scales })
        }
    }

    struct Prefill<'a> {
        attention: &'a PrefillAttention,
        look: Look<'a>,
        /// Of keys and values in INT8, `[kv_heads, position + tokens]` each.
        scales: Option<(&'a Tensor, &'a Tensor)>,
    }

    impl CustomOp3 for Prefill<'_> {
        fn name(&self) -> &'static str {
            "prefill-attention"
        }

        fn cpu_fwd(
            &self,
            _: &CpuStorage,
            _: &Layout,
            _: &CpuStorage,
            _: &Layout,
            _: &CpuStorage,
            _: &Layout,
        ) -> Result<(CpuStorage, Shape)> {
            candle_core::bail!("prefill-attention runs on a GPU")
        }

        fn cuda_fwd(
            &self,
            q: &CudaStorage,
            q_layout: &Layout,
            k: &CudaStorage,
            k_layout: &Layout,
            v: &CudaStorage,
            v_layout: &Layout,
        ) -> Result<(CudaStorage, Shape)> {
            let (heads, tokens, width) = q_layout.shape().dims3()?;
            let (kv_heads, seen, _) = k_layout.shape().dims3()?;
            let Look { scale, mask, sinks, position } = self.look;
            if k_layout.dims() != v_layout.dims()
                || k_layout.dims()[2] != width
                || position + tokens != seen
                || heads % kv_heads != 0
            {
                candle_core::bail!("prefill-attention: {q_layout:?} over {k_layout:?} and {v_layout:?}");
            }
            let device = q.device.clone();
            let stream = device.cuda_stream();
            let sinks = sinks.map_or(Ok(0), |sinks| address(sinks, &stream))?;
            let (format, [k_scales, v_scales], scale_head) = match self.scales {
                None => (KvFormat::Plain, [0, 0], 0),
                Some((of_k, of_v)) => {
                    let &[head, 1] = of_k.stride() else {
                        candle_core::bail!("prefill-attention: scales {of_k:?}");
                    };
                    if [of_k, of_v].iter().any(|s| s.dims() != [kv_heads, seen] || s.stride() != [head, 1]) {
                        candle_core::bail!("prefill-attention: scales {of_k:?} and {of_v:?}");
                    }
                    (KvFormat::Int8, [address(of_k, &stream)?, address(of_v, &stream)?], head)
                }
            };
            // SAFETY: the kernel writes every element, and nothing reads them before it on the stream.
            let out = unsafe { device.alloc::<bf16>(tokens * heads * width) }?;
            let stride = |layout: &Layout, dim: usize| layout.stride()[dim] as u64;
            let (mask, mask_size) = match mask {
                Mask::Causal => (0, 0),
                Mask::Sliding(window) => (1, window),
                Mask::Chunked(chunk) => (2, chunk),
            };
            let args = Args {
                q: address_in(q, q_layout, &stream)?,
                k: address_in(k, k_layout, &stream)?,
                v: address_in(v, v_layout, &stream)?,
                k_scales,
                v_scales,
                sinks,
                out: out.device_ptr(&stream).0,
                q_head: stride(q_layout, 0),
                k_head: stride(k_layout, 0),
                k_row: stride(k_layout, 1),
                v_head: stride(v_layout, 0),
                v_row: stride(v_layout, 1),
                scale_head: scale_head as u64,
                scale,
                tokens: tokens as u32,
                position: position as u32,
                group: (heads / kv_heads) as u32,
                mask,
                mask_size: mask_size as u32,
            };
            let config = LaunchConfig {
                grid_dim: (tokens.div_ceil(QUERIES) as u32, heads as u32, 1),
                block_dim: (128, 1, 1),
                shared_mem_bytes: shared_bytes(width, format) as u32,
            };
            let functions = &self.attention.functions[usize::from(format == KvFormat::Int8)];
            let function = &functions[usize::from(width == 128)];
            let mut launch = stream.launch_builder(function);
            launch.arg(&args);
            // SAFETY: the one argument is the struct that the kernel takes; its addresses are of storages that are
            // borrowed here, of shapes and strides that were checked (by `takes` those of rows), and of `out`.
            unsafe { launch.launch(config) }.w()?;
            Ok((CudaStorage::wrap_cuda_slice(out, device), (tokens, heads * width).into()))
        }
    }
}
