//! What layers are made of. A block takes and gives plain candle tensors, one sequence at a time: `[tokens, width]`.
//!
//! Each fused operation has two paths with the same result up to rounding: a loop over slices for F32 on the CPU,
//! where decode would otherwise spend its time between many small candle operations, and candle operations for
//! everything else. Tests compare the two.

pub mod attention;
mod cpu;
pub mod ffn;
pub mod kv_cache;
pub mod linear;
pub mod moe;
pub mod norm;
pub mod rope;
pub mod router;

#[cfg(test)]
mod testing {
    use candle_core::{DType, Device, Tensor};

    /// Numbers between -1 and 1 that depend on the seed alone.
    pub(super) fn random(shape: &[usize], seed: u64) -> Tensor {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let n = shape.iter().product();
        let values: Vec<f32> = (0..n)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
            })
            .collect();
        Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
    }

    /// Same shape, and no element further apart than `within`.
    #[track_caller]
    pub(super) fn close(got: &Tensor, want: &Tensor, within: f32) {
        assert_eq!(got.dims(), want.dims());
        assert_eq!((got.dtype(), want.dtype()), (DType::F32, DType::F32));
        let flat = |t: &Tensor| t.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        for (i, (g, w)) in flat(got).iter().zip(flat(want)).enumerate() {
            assert!((g - w).abs() <= within, "element {i}: {g} and {w}");
        }
    }
}
