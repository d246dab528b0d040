//! Attention of prompts against F64.

use candle_core::{DType, Device, Tensor};
use comoe_models::KvFormat;
use comoe_models::arch::Mask;
use comoe_models::blocks::int8_rows::Int8Rows;
use comoe_models::blocks::kv_cache::Cached;
use comoe_models::blocks::prefill_attention::{Look, PrefillAttention};
use half::bf16;

/// BF16 values in -1..1, the same on every machine.
fn random(dims: &[usize], seed: u64, device: &Device) -> Tensor {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        bf16::from_f32((state >> 40) as f32 / 8_388_608.0 - 1.0)
    };
    let values: Vec<bf16> = (0..dims.iter().product()).map(|_| next()).collect();
    Tensor::from_vec(values, dims, device).expect("a tensor")
}

fn host(t: &Tensor) -> Vec<f32> {
    t.to_dtype(DType::F32).and_then(|t| t.flatten_all()?.to_vec1()).expect("download")
}

/// In F64: what each output is, and the sum of the magnitudes that it is made of.
fn reference(q: &Tensor, k: &Tensor, v: &Tensor, look: Look<'_>, sinks: &[f32]) -> Vec<(f64, f64)> {
    let (heads, tokens, width) = q.dims3().expect("q");
    let (kv_heads, seen, _) = k.dims3().expect("k");
    let (q, k, v) = (host(q), host(&k.contiguous().expect("k")), host(&v.contiguous().expect("v")));
    let mut out = vec![(0.0, 0.0); tokens * heads * width];
    for head in 0..heads {
        let kv = head / (heads / kv_heads) * seen * width;
        for t in 0..tokens {
            let position = look.position + t;
            let range = look.mask.first(position)..position + 1;
            let q = &q[(head * tokens + t) * width..][..width];
            let score = |r: usize| -> f64 {
                let k = &k[kv + r * width..][..width];
                f64::from(look.scale)
                    * q.iter().zip(k).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>()
            };
            let scores: Vec<f64> = range.clone().map(score).collect();
            let sink = sinks.get(head).map(|s| f64::from(*s));
            let top = scores.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = scores.iter().copied().chain(sink).map(|s| (s - top).exp()).sum();
            for (r, s) in range.zip(&scores) {
                let p = (s - top).exp() / sum;
                for d in 0..width {
                    let value = p * f64::from(v[kv + r * width + d]);
                    let out = &mut out[(t * heads + head) * width + d];
                    *out = (out.0 + value, out.1 + value.abs());
                }
            }
        }
    }
    out
}

/// `[kv_heads, rows, width]` in a cache of `capacity` rows, behind which all is NaN, and what the cache holds of it.
fn cached(rows: &Tensor, capacity: usize, format: KvFormat) -> (Cached, Tensor) {
    let (kv_heads, n, width) = rows.dims3().expect("rows");
    let device = rows.device();
    let behind = Tensor::full(f32::NAN, (kv_heads, capacity - n, width), device);
    let behind = behind.and_then(|t| t.to_dtype(DType::BF16)).expect("NaN");
    match format {
        KvFormat::Plain => {
            let cache = Tensor::zeros((kv_heads, capacity, width), DType::BF16, device).expect("a cache");
            cache.slice_set(rows, 1, 0).expect("rows");
            cache.slice_set(&behind, 1, n).expect("NaN behind");
            (Cached::Plain(cache.narrow(1, 0, n).expect("a view")), rows.clone())
        }
        KvFormat::Int8 => {
            let cache = Int8Rows::zeros(kv_heads, capacity, width, device).expect("a cache");
            cache.write(0, rows).expect("rows");
            cache.write(n, &behind).expect("NaN behind");
            let part = cache.part((0, kv_heads), (0, n)).expect("a view");
            let (q, scales) = part.expand(DType::F32).expect("numbers");
            let numbers = scales.transpose(1, 2).and_then(|s| q.broadcast_mul(&s)).expect("numbers");
            (Cached::Int8(part), numbers)
        }
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn attention_of_prompts_is_what_f64_says() {
    let device = comoe_core::cuda_device(0).expect("a GPU");
    let attention = PrefillAttention::load(&device, DType::BF16).expect("loads").expect("a kernel");
    let (heads, kv_heads, capacity) = (6, 2, 500);
    let mut worst: f64 = 0.0;
    for (width, format) in
        [(64, KvFormat::Plain), (128, KvFormat::Plain), (64, KvFormat::Int8), (128, KvFormat::Int8)]
    {
        let sinks = random(&[heads, 1, 1], 9, &device).to_dtype(DType::F32).expect("sinks");
        for (mask, with_sinks) in [
            (Mask::Causal, false),
            (Mask::Causal, true),
            (Mask::Sliding(7), true),
            (Mask::Sliding(100), false),
            (Mask::Chunked(48), false),
        ] {
            for (tokens, position) in [(33, 0), (64, 0), (100, 37), (300, 0), (129, 200)] {
                let q = random(&[heads + 2, tokens, width], 1, &device).narrow(0, 1, heads).expect("q");
                let rows = |seed| random(&[kv_heads, position + tokens, width], seed, &device);
                let ((k, k_held), (v, v_held)) =
                    (cached(&rows(2), capacity, format), cached(&rows(3), capacity, format));
                let look = Look {
                    // As large as scores get, so that some probabilities are nearly 1.
                    scale: 3.0 / (width as f32).sqrt(),
                    mask,
                    sinks: with_sinks.then_some(&sinks),
                    position,
                };
                let got = host(&attention.forward(&q, &k, &v, look).expect("attention"));
                let host_sinks = if with_sinks { host(&sinks) } else { Vec::new() };
                let want = reference(&q, &k_held, &v_held, look, &host_sinks);
                for (i, (got, (want, size))) in got.iter().zip(&want).enumerate() {
                    // Probabilities and the result are rounded to 8 bits each.
                    let off = (f64::from(*got) - want).abs() / (size / 256.0 + want.abs() / 256.0 + 1e-6);
                    assert!(
                        off <= 1.0,
                        "{format:?} {mask:?} {width} {tokens} at {position}: [{i}] {got}, want {want}"
                    );
                    worst = worst.max(off);
                }
                // Queries' bits do not depend on how the prompt is cut.
                if tokens > 80 {
                    let (from, rest) = (tokens - 40, 40);
                    let part = q.narrow(1, from, rest).and_then(|q| q.contiguous()).expect("q");
                    let look = Look { position: position + from, ..look };
                    let again = host(&attention.forward(&part, &k, &v, look).expect("attention"));
                    assert_eq!(
                        again,
                        got[from * heads * width..],
                        "{format:?} {mask:?} {width} {tokens}, cut"
                    );
                }
            }
        }
    }
    println!("worst error: {worst:.2} of two roundings to BF16");
}

/// Printed, not asserted: one layer of Qwen3-30B-A3B.
#[test]
#[ignore = "needs a CUDA device"]
fn time_attention_of_prompts() {
    let device = comoe_core::cuda_device(0).expect("a GPU");
    let attention = PrefillAttention::load(&device, DType::BF16).expect("loads").expect("a kernel");
    for (format, tokens) in KvFormat::ALL.into_iter().flat_map(|f| [512, 2048, 4096, 8192].map(|n| (f, n))) {
        let q = random(&[32, tokens, 128], 1, &device);
        let rows = |seed| cached(&random(&[4, tokens, 128], seed, &device), tokens + 1, format).0;
        let (k, v) = (rows(2), rows(3));
        let look = Look { scale: 0.088, mask: Mask::Causal, sinks: None, position: 0 };
        let mut best = f64::INFINITY;
        for _ in 0..4 {
            device.synchronize().expect("idle");
            let start = std::time::Instant::now();
            for _ in 0..8 {
                attention.forward(&q, &k, &v, look).expect("attention");
            }
            device.synchronize().expect("done");
            best = best.min(start.elapsed().as_secs_f64() / 8.0);
        }
        let flops = 2.0 * (tokens * tokens) as f64 * 32.0 * 128.0;
        println!(
            "{tokens:>5} tokens, 32 heads of 128, {} cache: {:>7.1} us a layer, {:.0} TFLOP/s (causal)",
            format.name(),
            best * 1e6,
            flops / best / 1e12
        );
    }
}
