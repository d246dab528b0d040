//! The grouped GEMM against an F64 reference, into poisoned memory.

use candle_core::DType;
use comoe_core::backend::cuda::kernels::{
    DeviceItem, GemmDownArgs, GemmGateUpArgs, GemmItems, GemmRoundArgs, GemmTile, gemm_stride,
};
use comoe_core::{Activation, ExpertFormat, ExpertSpec};
use half::bf16;

use crate::case::{Experts, FORMATS, Gpu, Outcome, Places, Rng, Routing, X, check, gpu};
use crate::kernels::{bits, upload};

const ACTIVATIONS: [Activation; 3] =
    [Activation::Silu, Activation::GeluTanh, Activation::SwigluClamped { limit: 7.0, alpha: 1.702 }];

/// h is rounded to BF16, which keeps 8 bits.
const H_ERROR: f64 = 1.0 / 256.0;

/// Values that BF16 holds, so that x is not rounded on the way.
fn bf16_values(rng: &mut Rng, n: usize) -> Vec<f32> {
    rng.many(n, 2.0).iter().map(|v| bf16::from_f32(*v).to_f32()).collect()
}

/// Rows of `stride` BF16 values, without what lies between them.
fn rows(bytes: &[u8], rows: usize, cols: usize, stride: usize) -> Vec<f32> {
    let value = |i: usize| bf16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]]).to_f32();
    (0..rows).flat_map(|r| (0..cols).map(move |c| value(r * stride + c))).collect()
}

/// x as the GEMM reads it, through the kernel that rounds, unless it is that already.
fn run_gemm(
    gpu: &Gpu,
    experts: &Experts,
    places: &Places,
    x: &X,
    weights: Option<&[f32]>,
    routing: &Routing,
    groups: &[(usize, Vec<u32>)],
) -> Outcome {
    let (mut items, mut list) = (vec![DeviceItem::default()], Vec::new());
    for (e, assignments) in groups {
        let (first, count) = (list.len() as u32, assignments.len() as u32);
        items.push(DeviceItem { src: places[*e].0, dst: 0, first, count, ..DeviceItem::default() });
        // Items without assignments, as a schedule may leave them.
        items.push(DeviceItem { src: places[*e].0, dst: 0, first, count: 0, ..DeviceItem::default() });
        list.extend(assignments);
    }
    let (hidden, inner) = (experts.spec.hidden, experts.spec.intermediate);
    let (assignments, guard) = (routing.ids.len(), 64);
    let tokens = assignments / routing.top_k;
    let tiles = GemmTile::of(items.iter().map(|i| i.count));
    let (items_on, list_on, tiles_on) =
        (gpu.upload_items(&items), gpu.upload_u32(&list), gpu.upload_tiles(&tiles));

    let x_on = gpu.upload(&x.bytes);
    let weights_on = weights.map(|w| gpu.upload_f32(w));
    let x_rows = if weights.is_some() { assignments } else { tokens };
    let rounded = gpu.poisoned(2 * (x_rows * gemm_stride(hidden) + guard));
    let direct = x.dtype == DType::BF16 && hidden == gemm_stride(hidden) && weights.is_none();
    let h = gpu.poisoned(2 * (assignments * gemm_stride(inner) + guard));
    let partial = gpu.poisoned(4 * (assignments * hidden + guard));
    let items = GemmItems {
        layout: &experts.layout,
        items: items_on.at,
        assignments: list_on.at,
        tiles: tiles_on.at,
        len: tiles.len(),
    };
    let round = GemmRoundArgs {
        x: x_on.at,
        dtype: x.dtype,
        rows: x_rows,
        cols: hidden,
        weights: weights_on.as_ref().map_or(0, |w| w.at),
        top_k: routing.top_k,
        out: rounded.at,
    };
    let gate_up = GemmGateUpArgs {
        items,
        activation: experts.spec.activation,
        x: if direct { x_on.at } else { rounded.at },
        per_row: if weights.is_some() { 1 } else { routing.top_k },
        h: h.at,
    };
    let down = GemmDownArgs { items, h: h.at, partial: partial.at };
    // SAFETY: every buffer above is as long as documented and lives until the downloads below have waited.
    unsafe {
        if !direct {
            gpu.kernels.gemm_round(&gpu.stream, &round).expect("gemm_round");
        }
        gpu.kernels.gemm_gate_up(&gpu.stream, &gate_up).expect("gemm_gate_up");
        gpu.kernels.gemm_down(&gpu.stream, &down).expect("gemm_down");
    }
    let h = gpu.download(&h);
    let end = 2 * assignments * gemm_stride(inner);
    assert!(h[end..].iter().all(|b| *b == 0xff), "gate_up wrote behind its result");
    Outcome {
        h: rows(&h, assignments, inner, gemm_stride(inner)),
        partial: gpu.download_f32(&partial, assignments * hidden),
    }
}

/// Everybody's first choice is expert 0.
fn crowded(tokens: usize, experts: usize, top_k: usize, rng: &mut Rng) -> Routing {
    let mut routing = Routing::random(tokens, experts, top_k, rng);
    for choices in routing.ids.chunks_mut(top_k) {
        if !choices.contains(&0) {
            choices[0] = 0;
        }
    }
    routing
}

#[test]
#[ignore = "needs a CUDA device"]
fn is_what_f64_says_for_every_format_and_ragged_shape() {
    let gpu = gpu();
    let mut rng = Rng::new(20);
    let dtypes = [DType::BF16, DType::F32, DType::F16];
    let mut cases = 0;
    for format in FORMATS {
        let shapes = [(2048, 768), (704, 1408), (16, 20), (20, 16), (33, 130), (1, 1), (2880, 720)];
        for (n, (hidden, intermediate)) in shapes.into_iter().enumerate() {
            let spec = ExpertSpec {
                activation: ACTIVATIONS[n % 3],
                bias: n % 2 == 1,
                ..ExpertSpec::swiglu(hidden, intermediate)
            };
            let experts = Experts::random(spec, format, 5, &mut rng);
            let (_records, places) = upload(&gpu, &experts);
            for tokens in [1, 17, 64, 150] {
                let routing = Routing::random(tokens, 5, 2, &mut rng);
                // F16 holds what BF16 does in this range.
                let x = X::new(&bf16_values(&mut rng, tokens * hidden), dtypes[cases % 3]);
                let mut groups = routing.groups();
                groups.reverse();
                let got = run_gemm(&gpu, &experts, &places, &x, None, &routing, &groups);
                let what = format!("gemm {format} {hidden}x{intermediate}, {tokens} tokens, {:?}", x.dtype);
                check(&what, &experts, &x, &routing, &got, H_ERROR);
                cases += 1;
            }
        }
    }
    println!("{cases} cases");
}

#[test]
#[ignore = "needs a CUDA device"]
fn a_thousand_tokens_may_choose_one_expert() {
    let gpu = gpu();
    let mut rng = Rng::new(21);
    for format in [ExpertFormat::Bf16, ExpertFormat::INT8, ExpertFormat::INT4] {
        let experts = Experts::random(ExpertSpec::swiglu(320, 200), format, 40, &mut rng);
        let (_records, places) = upload(&gpu, &experts);
        let routing = crowded(1000, 40, 3, &mut rng);
        let x = X::new(&bf16_values(&mut rng, 1000 * 320), DType::BF16);
        let got = run_gemm(&gpu, &experts, &places, &x, None, &routing, &routing.groups());
        check(&format!("crowded {format}"), &experts, &x, &routing, &got, H_ERROR);
    }
}

/// A token's bits are the same alone and among any others, in any order, and a NaN stays with its token.
#[test]
#[ignore = "needs a CUDA device"]
fn a_tokens_bits_are_its_own() {
    let gpu = gpu();
    let mut rng = Rng::new(22);
    for format in FORMATS {
        for (hidden, inner) in [(2048, 768), (72, 130)] {
            let experts = Experts::random(ExpertSpec::swiglu(hidden, inner), format, 6, &mut rng);
            let (_records, places) = upload(&gpu, &experts);
            let (tokens, top_k) = (200, 3);
            let routing = Routing::random(tokens, 6, top_k, &mut rng);
            let mut values = bf16_values(&mut rng, tokens * hidden);
            let x = X::new(&values, DType::BF16);
            let all = run_gemm(&gpu, &experts, &places, &x, None, &routing, &routing.groups());

            let mut groups = routing.groups();
            groups.reverse();
            groups.iter_mut().for_each(|g| g.1.reverse());
            let other = run_gemm(&gpu, &experts, &places, &x, None, &routing, &groups);
            assert_eq!(bits(&all.partial), bits(&other.partial), "{format} {hidden}x{inner}: reversed");

            let spoilt = 77;
            values[spoilt * hidden + 5] = f32::NAN;
            let x = X::new(&values, DType::BF16);
            let nan = run_gemm(&gpu, &experts, &places, &x, None, &routing, &routing.groups());
            for t in 0..tokens {
                let range = t * top_k * hidden..(t + 1) * top_k * hidden;
                match t == spoilt {
                    true => {
                        assert!(nan.partial[range].iter().all(|v| v.is_nan()), "{format}: a NaN was lost")
                    }
                    false => assert_eq!(
                        bits(&nan.partial[range.clone()]),
                        bits(&all.partial[range]),
                        "{format}: a NaN spread to token {t}"
                    ),
                }
            }
            for t in [0, 63, 64, 199] {
                let own = Routing { top_k, ids: routing.ids[t * top_k..(t + 1) * top_k].to_vec() };
                values[spoilt * hidden + 5] = 0.0;
                let x = X::new(&values[t * hidden..(t + 1) * hidden], DType::BF16);
                let alone = run_gemm(&gpu, &experts, &places, &x, None, &own, &own.groups());
                let range = t * top_k * hidden..(t + 1) * top_k * hidden;
                assert_eq!(bits(&alone.partial), bits(&all.partial[range]), "{format}: token {t} alone");
            }
        }
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn weights_on_the_input_scale_x_before_it_is_rounded() {
    let gpu = gpu();
    let mut rng = Rng::new(23);
    for dtype in [DType::BF16, DType::F16] {
        let experts = Experts::random(ExpertSpec::swiglu(256, 128), ExpertFormat::INT4, 3, &mut rng);
        let (_records, places) = upload(&gpu, &experts);
        let routing = Routing::random(70, 3, 2, &mut rng);
        let x = X::new(&bf16_values(&mut rng, 70 * 256), dtype);
        let weights = rng.many(140, 1.0);
        let got = run_gemm(&gpu, &experts, &places, &x, Some(&weights), &routing, &routing.groups());
        // The same as rows of their own, each with one expert.
        let scaled: Vec<f32> = (0..140 * 256)
            .map(|i| bf16::from_f32(x.values[i / 512 * 256 + i % 256] * weights[i / 256]).to_f32())
            .collect();
        let own = Routing { top_k: 1, ids: routing.ids.clone() };
        let x = X::new(&scaled, DType::BF16);
        let want = run_gemm(&gpu, &experts, &places, &x, None, &own, &own.groups());
        assert_eq!(bits(&got.partial), bits(&want.partial), "{dtype:?}");
    }
}
