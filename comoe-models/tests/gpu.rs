//! The tests of this crate that need a GPU, in one executable. Where it runs without this checkout, COMOE_ASSETS names
//! the `assets` folder of another:
//!
//!     cargo test --release -p comoe-models --features cuda --test gpu -- --ignored --test-threads 1
#![cfg(feature = "cuda")]

#[path = "gpu/prefill.rs"]
mod prefill;
#[path = "gpu/tiny.rs"]
mod tiny;

use candle_core::DType;
use comoe_models::cuda::{RouteArgs, RouteKernel, Scoring};
use cudarc::driver::{CudaContext, DevicePtr};
use half::{bf16, f16};

/// What f64 says: (ids, weights) of one token.
fn reference(logits: &[f64], bias: Option<&[f32]>, args: &RouteArgs) -> (Vec<u32>, Vec<f64>) {
    let greatest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let score: Vec<f64> = match args.scoring {
        Scoring::Softmax => {
            let e: Vec<f64> = logits.iter().map(|l| (l - greatest).exp()).collect();
            let sum: f64 = e.iter().sum();
            e.iter().map(|e| e / sum).collect()
        }
        Scoring::Sigmoid => logits.iter().map(|l| 1.0 / (1.0 + (-l).exp())).collect(),
    };
    let key: Vec<f64> =
        score.iter().enumerate().map(|(e, s)| s + bias.map_or(0.0, |b| f64::from(b[e]))).collect();
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|a, b| key[*b].total_cmp(&key[*a]).then(a.cmp(b)));
    order.truncate(args.top_k);
    let sum: f64 = order.iter().map(|e| score[*e]).sum();
    let factor = f64::from(args.scale) / if args.normalise { sum } else { 1.0 };
    (order.iter().map(|e| *e as u32).collect(), order.iter().map(|e| score[*e] * factor).collect())
}

#[test]
#[ignore = "needs a CUDA device"]
fn routing_is_what_f64_says() {
    let ctx = CudaContext::new(0).expect("a CUDA device");
    // SAFETY: one stream only, so nothing needs the events that tracking would record.
    unsafe { ctx.disable_event_tracking() };
    let stream = ctx.new_stream().expect("a stream");
    let kernel = RouteKernel::load(&ctx).expect("kernels");
    let mut state = 1u64;
    let mut random = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / 8_388_608.0 - 1.0
    };
    let mut case = 0;
    for (experts, top_k) in [(128, 8), (8, 2), (60, 4), (256, 8), (512, 10), (33, 33), (1, 1), (6144, 2)] {
        for (scoring, biased, normalise, scale) in [
            (Scoring::Softmax, false, true, 1.0),
            (Scoring::Softmax, false, false, 1.0),
            (Scoring::Sigmoid, true, true, 2.5),
            (Scoring::Sigmoid, false, false, 0.5),
        ] {
            let (tokens, dtype) = (37, [DType::F32, DType::BF16, DType::F16][case % 3]);
            case += 1;
            // A coarse grid, so that keys that differ do so by far more than F32 rounds, and ties are many.
            let mut values: Vec<f32> =
                (0..tokens * experts).map(|_| (random() * 32.0).round() / 8.0).collect();
            let bias: Vec<f32> = (0..experts).map(|_| (random() * 4.0).round() / 4.0).collect();
            // A masked expert is allowed, where others are left.
            if experts > top_k {
                values[experts] = f32::NEG_INFINITY;
            }
            let poison = |tokens: usize| vec![0xffu8; 4 * (tokens * top_k + 16)];
            let route = |values: &[f32]| {
                let tokens = values.len() / experts;
                let bytes: Vec<u8> = match dtype {
                    DType::BF16 => values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect(),
                    DType::F16 => values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect(),
                    _ => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
                };
                let logits = stream.clone_htod(&bytes).expect("upload");
                let bias_on = stream.clone_htod(&bias).expect("upload");
                let (ids, weights) = (
                    stream.clone_htod(&poison(tokens)).expect("upload"),
                    stream.clone_htod(&poison(tokens)).expect("upload"),
                );
                let error = stream.alloc_zeros::<u32>(1).expect("memory");
                let args = RouteArgs {
                    logits: logits.device_ptr(&stream).0,
                    logits_dtype: dtype,
                    bias: if biased { bias_on.device_ptr(&stream).0 } else { 0 },
                    tokens,
                    experts,
                    top_k,
                    scoring,
                    normalise,
                    scale,
                    ids: ids.device_ptr(&stream).0,
                    weights: weights.device_ptr(&stream).0,
                    error: error.device_ptr(&stream).0,
                };
                // SAFETY: every buffer is as long as documented and lives until the downloads have waited.
                unsafe { kernel.route(&stream, &args) }.expect("route");
                let words = |bytes: Vec<u8>| -> Vec<u32> {
                    bytes.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect()
                };
                let ids = words(stream.clone_dtoh(&ids).expect("download"));
                let weights = words(stream.clone_dtoh(&weights).expect("download"));
                let error = stream.clone_dtoh(&error).expect("download")[0];
                stream.synchronize().expect("kernels ran");
                assert!(
                    ids[tokens * top_k..].iter().chain(&weights[tokens * top_k..]).all(|w| *w == u32::MAX)
                );
                (args, ids[..tokens * top_k].to_vec(), weights[..tokens * top_k].to_vec(), error)
            };
            let what = format!("{experts} experts, top-{top_k}, {scoring:?}, {dtype:?}");
            let (args, ids, weights, error) = route(&values);
            assert_eq!(error, 0, "{what}");
            for t in 0..tokens {
                let logits: Vec<f64> =
                    values[t * experts..(t + 1) * experts].iter().map(|v| f64::from(*v)).collect();
                let (want_ids, want) = reference(&logits, biased.then_some(&bias[..]), &args);
                let range = t * top_k..(t + 1) * top_k;
                // With a bias, two different sums may lie within F32's rounding of each other; without, never.
                if !biased {
                    assert_eq!(ids[range.clone()], want_ids, "{what}: token {t}");
                    for (have, want) in weights[range.clone()].iter().zip(&want) {
                        let have = f64::from(f32::from_bits(*have));
                        assert!(
                            (have - want).abs() <= 2e-6 * want.abs(),
                            "{what}: token {t}: {have}, want {want}"
                        );
                    }
                } else {
                    let mut seen = ids[range.clone()].to_vec();
                    seen.sort_unstable();
                    seen.dedup();
                    assert_eq!(seen.len(), top_k, "{what}: token {t} chose an expert twice");
                    let key =
                        |e: u32| 1.0 / (1.0 + (-logits[e as usize]).exp()) + f64::from(bias[e as usize]);
                    for (have, want) in ids[range.clone()].iter().zip(&want_ids) {
                        assert!(
                            (key(*have) - key(*want)).abs() < 1e-6,
                            "{what}: token {t}: {have}, want {want}"
                        );
                    }
                }
                // Alone, the token gets the same bits.
                let alone = route(&values[t * experts..(t + 1) * experts]);
                assert_eq!(
                    (&alone.1[..], &alone.2[..]),
                    (&ids[range.clone()], &weights[range]),
                    "{what}: token {t}"
                );
            }
            // A NaN is reported, and the ids stay usable.
            let mut broken = values[..3 * experts].to_vec();
            broken[2 * experts + experts / 2] = f32::NAN;
            let (_, ids, _, error) = route(&broken);
            assert_eq!(error, 3, "{what}");
            assert!(ids.iter().all(|id| (*id as usize) < experts), "{what}");
        }
    }
}
