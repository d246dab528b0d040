use half::bf16;
use proptest::prelude::*;

use super::super::decode::scale_at;
use super::*;
use crate::expert::{ExpertSpec, WeightOn};
use crate::format::record::{ExpertBiases, ExpertWeights, Weights, pack_expert, unpack_expert};

/// Pseudo-random numbers in -1..1.
pub(crate) struct Noise(pub(crate) u64);

impl Noise {
    pub(crate) fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    pub(crate) fn vec(&mut self, n: usize, scale: f32) -> Vec<f32> {
        (0..n).map(|_| self.next() * scale).collect()
    }
}

/// A random record of `spec`.
pub(crate) fn random_record(spec: &ExpertSpec, format: ExpertFormat, seed: u64) -> (ExpertLayout, Vec<u8>) {
    let mut noise = Noise(seed | 1);
    let n = spec.hidden * spec.intermediate;
    let scale = 1.0 / (spec.hidden as f32).sqrt();
    let mut weights = || noise.vec(n, scale).into_iter().map(bf16::from_f32).collect::<Vec<_>>();
    let (gate, up, down) = (weights(), weights(), weights());
    let biases = [spec.intermediate, spec.intermediate, spec.hidden].map(|n| noise.vec(n, 0.5));
    let parts = ExpertWeights {
        gate: Weights::Bf16(&gate),
        up: Weights::Bf16(&up),
        down: Weights::Bf16(&down),
        bias: spec.bias.then(|| ExpertBiases {
            gate: Weights::F32(&biases[0]),
            up: Weights::F32(&biases[1]),
            down: Weights::F32(&biases[2]),
        }),
    };
    let layout = ExpertLayout::new(spec, format);
    let mut record = vec![0; layout.record_bytes];
    pack_expert(&layout, &parts, &mut record).unwrap();
    (layout, record)
}

/// The FFN of one token in f64, and the sum of magnitudes that bounds each output's rounding error.
pub(crate) fn reference(
    spec: &ExpertSpec,
    layout: &ExpertLayout,
    record: &[u8],
    x: &[f32],
) -> Vec<(f64, f64)> {
    let e = unpack_expert(layout, record).unwrap();
    let dot = |w: &[f32], x: &[f64]| -> (f64, f64) {
        w.iter().zip(x).fold((0.0, 0.0), |(s, m), (w, x)| {
            let p = f64::from(*w) * x;
            (s + p, m + p.abs())
        })
    };
    let x: Vec<f64> = x.iter().map(|&x| f64::from(x)).collect();
    let sigmoid = |v: f64| 1.0 / (1.0 + (-v).exp());
    let bias = |part: usize, i: usize| e.bias.as_ref().map_or(0.0, |b| f64::from(b[part][i]));
    let h: Vec<(f64, f64)> = (0..spec.intermediate)
        .map(|i| {
            let (g, gm) = dot(&e.gate[i * spec.hidden..][..spec.hidden], &x);
            let (u, um) = dot(&e.up[i * spec.hidden..][..spec.hidden], &x);
            let (g, u) = (g + bias(0, i), u + bias(1, i));
            let y = match spec.activation {
                Activation::Silu => g * sigmoid(g) * u,
                Activation::GeluTanh => {
                    0.5 * g
                        * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (g + 0.044715 * g * g * g)).tanh())
                        * u
                }
                Activation::SwigluClamped { limit, alpha } => {
                    let (limit, alpha) = (f64::from(limit), f64::from(alpha));
                    let g = g.min(limit);
                    (u.clamp(-limit, limit) + 1.0) * g * sigmoid(alpha * g)
                }
            };
            // How much the magnitudes behind g and u can move y; slopes of the gates are below 1.5.
            (y, 1.5 * (gm + 1.0) * (u.abs() + 1.0) + (um + 1.0) * (g.abs() + 1.0))
        })
        .collect();
    let (values, spread): (Vec<f64>, Vec<f64>) = h.into_iter().unzip();
    (0..spec.hidden)
        .map(|r| {
            let w = &e.down[r * spec.intermediate..][..spec.intermediate];
            let (y, m) = dot(w, &values);
            let through: f64 = w.iter().zip(&spread).map(|(w, s)| f64::from(*w).abs() * s).sum();
            (y + bias(2, r), m + through + 1.0)
        })
        .collect()
}

/// Runs calls given as lists of rows of `x`, `[n, hidden]`; the results start as NaN.
fn run(
    spec: &ExpertSpec,
    layout: &ExpertLayout,
    records: &[(&[u8], Vec<u32>)],
    x: &[f32],
) -> Vec<Vec<Vec<f32>>> {
    let stride = padded(spec.hidden);
    let mut data = vec![0.0; x.len() / spec.hidden * stride];
    for (to, from) in data.chunks_mut(stride).zip(x.chunks(spec.hidden)) {
        to[..spec.hidden].copy_from_slice(from);
    }
    let calls: Vec<_> = records.iter().map(|(record, rows)| Call { record, rows }).collect();
    let mut out: Vec<Vec<Vec<f32>>> =
        calls.iter().map(|c| vec![vec![f32::NAN; spec.hidden]; c.rows.len()]).collect();
    let mut scratch =
        Scratch { by_row: vec![f32::NAN; 100], between: vec![f32::NAN; 100], ..Scratch::default() };
    ffn(layout, spec.activation, Inputs { data: &data, stride }, &calls, &mut scratch, |c, i, y| {
        assert!(out[c][i][0].is_nan(), "call {c} row {i} was emitted twice");
        out[c][i].copy_from_slice(y);
    });
    out
}

fn bits(v: &[f32]) -> Vec<u32> {
    v.iter().map(|v| v.to_bits()).collect()
}

const DIMS: [usize; 12] = [1, 7, 16, 20, 31, 32, 33, 48, 100, 130, 192, 257];

fn specs() -> impl Strategy<Value = ExpertSpec> {
    let activation = prop_oneof![
        Just(Activation::Silu),
        Just(Activation::GeluTanh),
        Just(Activation::SwigluClamped { limit: 7.0, alpha: 1.702 })
    ];
    let dim = || proptest::sample::select(DIMS.to_vec());
    (dim(), dim(), activation, any::<bool>()).prop_map(|(hidden, intermediate, activation, bias)| {
        ExpertSpec { hidden, intermediate, activation, bias, weight_on: WeightOn::Output }
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn ffn_equals_the_f64_reference_and_batches_equal_single_tokens(
        spec in specs(), seed: u64, tokens in 1usize..8, power in -3i32..6,
    ) {
        let x = Noise(seed ^ 5).vec(tokens * spec.hidden, 10f32.powi(power));
        for format in ExpertFormat::all_for_tests() {
            let (layout, record) = random_record(&spec, format, seed);
            let (_, other) = random_record(&spec, format, seed ^ 77);
            let all: Vec<u32> = (0..tokens as u32).collect();
            let together = run(&spec, &layout, &[(&record, all), (&other, vec![0])], &x);
            for t in 0..tokens {
                let x = &x[t * spec.hidden..][..spec.hidden];
                let alone = run(&spec, &layout, &[(&record, vec![0])], x);
                prop_assert_eq!(bits(&alone[0][0]), bits(&together[0][t]), "{} token {}", format, t);
                for (y, (expected, magnitude)) in alone[0][0].iter().zip(reference(&spec, &layout, &record, x)) {
                    // 24 bits, at most 257 roundings in 16 lanes, and the exponential's own error.
                    let allowed = magnitude * 2e-6;
                    prop_assert!(
                        (f64::from(*y) - expected).abs() <= allowed, "{format}: {y} {expected} within {allowed}"
                    );
                }
            }
        }
    }
}

#[test]
fn large_batches_are_split_without_changing_a_bit() {
    // More tokens than one call computes at once, several calls, enough work for threads, rows in any order.
    let spec = ExpertSpec { bias: true, ..ExpertSpec::swiglu(272, 130) };
    for format in [ExpertFormat::Bf16, ExpertFormat::INT8, ExpertFormat::INT4, ExpertFormat::Mxfp4] {
        let records: Vec<_> = (0..6).map(|s| random_record(&spec, format, s)).collect();
        let layout = records[0].0;
        let n = 300;
        let x = Noise(3).vec(n * spec.hidden, 1.0);
        let calls: Vec<(&[u8], Vec<u32>)> = records
            .iter()
            .enumerate()
            .map(|(i, r)| (&r.1[..], (0..n as u32).rev().step_by(i + 1).collect()))
            .collect();
        let out = run(&spec, &layout, &calls, &x);
        for (c, i, t) in [(0, 0, 299), (0, 128, 171), (0, 299, 0), (3, 50, 99), (5, 49, 5)] {
            let alone = run(&spec, &layout, &[(calls[c].0, vec![t])], &x);
            assert_eq!(bits(&alone[0][0]), bits(&out[c][i]), "{format} call {c} row {i}");
        }
        assert!(out.iter().flatten().flatten().all(|v| v.is_finite()));
        // One thread gives what many give.
        let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
        assert_eq!(pool.install(|| run(&spec, &layout, &calls, &x)), out);
    }
}

#[test]
fn every_vector_unit_computes_the_same() {
    use crate::simd::{Unit, tests::WIDEST};
    let spec = ExpertSpec { bias: true, ..ExpertSpec::swiglu(100, 70) };
    for format in ExpertFormat::all_for_tests() {
        let (layout, record) = random_record(&spec, format, 9);
        let x = Noise(3).vec(7 * spec.hidden, 1.0);
        let calls = [(&record[..], vec![2]), (&record[..], (0..7).collect())];
        let on = |unit| {
            WIDEST.set(unit);
            let out = run(&spec, &layout, &calls, &x);
            WIDEST.set(Unit::Avx512);
            assert_eq!(out[0][0], out[1][2], "{format} {unit:?}: one token and many");
            out
        };
        let (widest, avx2, portable) = (on(Unit::Avx512), on(Unit::Avx2), on(Unit::Portable));
        #[cfg(target_arch = "x86_64")]
        if std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma") {
            assert_eq!(widest, avx2, "{format}");
        }
        let flat = |out: Vec<Vec<Vec<f32>>>| out.concat().concat();
        for (a, b) in flat(avx2).into_iter().zip(flat(portable)) {
            assert!((a - b).abs() < 1e-4, "{format}: {a} {b}");
        }
    }
}

#[test]
fn large_inputs_outliers_and_subnormal_scales_stay_finite() {
    let spec = ExpertSpec::swiglu(64, 48);
    let n = 64 * 48;
    for format in ExpertFormat::all_for_tests() {
        let layout = ExpertLayout::new(&spec, format);
        let mut gate = Noise(1).vec(n, 3e-6);
        gate.iter_mut().step_by(64).for_each(|v| *v = 0.5);
        let up = Noise(2).vec(n, 1e-6);
        let down = Noise(3).vec(n, 100.0);
        let parts = ExpertWeights {
            gate: Weights::F32(&gate),
            up: Weights::F32(&up),
            down: Weights::F32(&down),
            bias: None,
        };
        let mut record = vec![0; layout.record_bytes];
        pack_expert(&layout, &parts, &mut record).unwrap();
        let x = Noise(4).vec(64, 1e5);
        let out = run(&spec, &layout, &[(&record, vec![0])], &x);
        for (y, (expected, magnitude)) in out[0][0].iter().zip(reference(&spec, &layout, &record, &x)) {
            assert!((f64::from(*y) - expected).abs() <= 2e-6 * magnitude, "{format}: {y} {expected}");
        }
    }
}

#[test]
fn nan_inputs_come_out_as_nan() {
    for activation in
        [Activation::Silu, Activation::GeluTanh, Activation::SwigluClamped { limit: 7.0, alpha: 1.702 }]
    {
        let spec = ExpertSpec { activation, ..ExpertSpec::swiglu(16, 16) };
        let (layout, record) = random_record(&spec, ExpertFormat::INT4, 1);
        let mut x = vec![0.5; 16];
        x[3] = f32::NAN;
        assert!(run(&spec, &layout, &[(&record, vec![0])], &x)[0][0].iter().all(|y| y.is_nan()));
    }
}

#[test]
fn every_f16_scale_is_read_exactly() {
    for b in (0..=u16::MAX).filter(|b| b & 0x7c00 != 0x7c00) {
        let expected = half::f16::from_bits(b).to_f32();
        assert_eq!(scale_at(&b.to_le_bytes(), 0).to_bits(), expected.to_bits(), "{b:#x}");
    }
}
