//! The decode kernels, each against plain F64: random values, ragged shapes, results full of NaN beforehand and bytes
//! around them that must stay; and each row of a batch against the row alone, bit for bit.

mod attention;
mod dense;
mod route;
mod sample;
mod timing;

use std::sync::{Arc, LazyLock};

use candle_core::DType;
use comoe_models::cuda::DecodeKernels;
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr};
use half::{bf16, f16};

/// Bytes on both sides of a result that no kernel may touch.
const GUARD: usize = 256;

struct Gpu {
    stream: Arc<CudaStream>,
    kernels: DecodeKernels,
}

static GPU: LazyLock<Gpu> = LazyLock::new(|| {
    let ctx = CudaContext::new(0).expect("a CUDA device");
    // SAFETY: one stream only, so nothing needs the events that tracking would record.
    unsafe { ctx.disable_event_tracking() };
    let stream = ctx.new_stream().expect("a stream");
    Gpu { kernels: DecodeKernels::load(&ctx).expect("kernels"), stream }
});

/// Memory on the device; a result's begins as NaN and is guarded.
struct Memory {
    slice: CudaSlice<u8>,
    bytes: usize,
}

impl Memory {
    fn of(bytes: &[u8]) -> Self {
        // A buffer of no bytes has no address.
        let some = if bytes.is_empty() { &[0; 16] } else { bytes };
        Self { slice: GPU.stream.clone_htod(some).expect("upload"), bytes: 0 }
    }

    fn floats(values: &[f32], dtype: DType) -> Self {
        Self::of(&encode(values, dtype))
    }

    fn words(values: &[u32]) -> Self {
        Self::of(&values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>())
    }

    fn zeros(bytes: usize) -> Self {
        Self { slice: GPU.stream.alloc_zeros(bytes.max(16)).expect("memory"), bytes: 0 }
    }

    fn result(bytes: usize) -> Self {
        let all = vec![0xff; bytes + 2 * GUARD];
        Self { slice: GPU.stream.clone_htod(&all).expect("upload"), bytes }
    }

    fn address(&self) -> u64 {
        let start = self.slice.device_ptr(&GPU.stream).0;
        if self.bytes == 0 { start } else { start + GUARD as u64 }
    }

    fn bytes(&self) -> Vec<u8> {
        let all = GPU.stream.clone_dtoh(&self.slice).expect("download");
        GPU.stream.synchronize().expect("kernels ran");
        if self.bytes == 0 {
            return all;
        }
        let (before, rest) = all.split_at(GUARD);
        let (inside, after) = rest.split_at(self.bytes);
        assert!(before.iter().chain(after).all(|b| *b == 0xff), "written beside a result");
        inside.to_vec()
    }

    fn read_words(&self) -> Vec<u32> {
        self.bytes().as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect()
    }

    fn read_floats(&self, dtype: DType) -> Vec<f32> {
        decode(&self.bytes(), dtype)
    }
}

fn encode(values: &[f32], dtype: DType) -> Vec<u8> {
    match dtype {
        DType::BF16 => values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect(),
        DType::F16 => values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect(),
        _ => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
    }
}

fn decode(bytes: &[u8], dtype: DType) -> Vec<f32> {
    let halves = || bytes.as_chunks::<2>().0.iter();
    match dtype {
        DType::BF16 => halves().map(|b| bf16::from_le_bytes(*b).to_f32()).collect(),
        DType::F16 => halves().map(|b| f16::from_le_bytes(*b).to_f32()).collect(),
        _ => bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
    }
}

/// As the dtype has it.
fn round(v: f64, dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => bf16::from_f64(v).to_f64(),
        DType::F16 => f16::from_f64(v).to_f64(),
        _ => f64::from(v as f32),
    }
}

/// Numbers in -1..1 as the dtype has them; the same seed gives the same.
fn random(n: usize, seed: u64, dtype: DType) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        f64::from((state >> 40) as u32) / 8_388_608.0 - 1.0
    };
    (0..n).map(|_| round(next(), dtype) as f32).collect()
}

/// A unit in the last place, relative, with room for a sum's order and for rounding twice.
fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 1.0 / 120.0,
        DType::F16 => 1.0 / 900.0,
        _ => 2e-5,
    }
}

/// Every value within `tolerance` of its reference, relative to the larger of that and `scale`.
fn close(have: &[f32], want: &[f64], tolerance: f64, scale: f64, what: &str) {
    assert_eq!(have.len(), want.len(), "{what}");
    for (i, (have, want)) in have.iter().zip(want).enumerate() {
        let off = (f64::from(*have) - want).abs();
        // A NaN fails, too.
        assert!(off <= tolerance * want.abs().max(scale), "{what}: element {i} is {have}, want {want}");
    }
}
