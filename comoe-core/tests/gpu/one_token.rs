//! One token, the shape of decode: its bits, and down with the weighted sum in one kernel.

use candle_core::DType;
use comoe_core::backend::cuda::kernels::{CombineArgs, DeviceItem, DownArgs, Items};
use comoe_core::{Activation, ExpertFormat, ExpertSpec};

use crate::case::{Experts, FORMATS, Gpu, PageLocked, Rng, Routing, X, check, gpu, run};
use crate::kernels::{bits, upload};

/// Whole rows in one and in several passes, ragged rows, and scales that more than one load of a warp holds.
const SHAPES: [(usize, usize); 5] = [(2048, 768), (2880, 2880), (704, 1408), (33, 130), (1, 1)];

#[test]
#[ignore = "needs a CUDA device"]
fn one_token_is_the_same_bits_whatever_the_order_and_the_place() {
    let gpu = gpu();
    let mut rng = Rng::new(21);
    for format in FORMATS {
        for (n, (hidden, intermediate)) in SHAPES.into_iter().enumerate() {
            let spec = ExpertSpec { bias: n % 2 == 1, ..ExpertSpec::swiglu(hidden, intermediate) };
            let count = if hidden * intermediate > 2_000_000 { 2 } else { 12 };
            let experts = Experts::random(spec, format, count, &mut rng);
            let (_records, places) = upload(&gpu, &experts);
            let host: Vec<_> = experts.records.iter().map(|r| PageLocked::new(r)).collect();
            let slots: Vec<_> = experts.records.iter().map(|r| gpu.poisoned(r.len() + 512)).collect();
            let x = X::new(&rng.many(hidden, 1.0), DType::F32);
            // One expert is named twice.
            let mut routing = Routing::random(1, count, count, &mut rng);
            routing.ids.push(routing.ids[0]);
            routing.top_k += 1;
            let groups = routing.groups();
            let what = format!("{format} {hidden}x{intermediate}");
            let want = run(&gpu, &experts, &places, &x, &routing, &groups);
            check(&what, &experts, &x, &routing, &want, 0.0);

            let mut reversed = groups.clone();
            reversed.reverse();
            for g in &mut reversed {
                g.1.reverse();
            }
            let resident_or_host = places
                .iter()
                .zip(&host)
                .enumerate()
                .map(|(e, (p, h))| if e % 2 == 0 { *p } else { (h.at, 0) });
            let through = host.iter().zip(&slots).map(|(h, s)| (h.at, s.at)).collect::<Vec<_>>();
            for places in [resident_or_host.collect::<Vec<_>>(), through] {
                let got = run(&gpu, &experts, &places, &x, &routing, &reversed);
                assert_eq!(bits(&want.h), bits(&got.h), "{what}");
                assert_eq!(bits(&want.partial), bits(&got.partial), "{what}");
            }
            for (slot, record) in slots.iter().zip(&experts.records) {
                let slot = gpu.download(slot);
                let wrong = record.iter().zip(&slot).position(|(a, b)| a != b);
                assert_eq!(wrong, None, "{what}: first differing byte ({:?})", experts.layout);
                assert!(slot[record.len()..].iter().all(|b| *b == 0xff), "{what}: written behind the slot");
            }
        }
    }
}

struct Case<'a> {
    gpu: &'a Gpu,
    experts: &'a Experts,
    routing: &'a Routing,
    places: &'a [(u64, u64)],
    h: &'a [f32],
    weights: Option<&'a [f32]>,
    y_dtype: DType,
}

/// y by down and combine, or by down_combine.
fn y(case: &Case<'_>, fused: bool) -> Vec<u8> {
    let Case { gpu, experts, routing, places, .. } = case;
    let (top_k, hidden) = (routing.top_k, experts.spec.hidden);
    let tokens = routing.ids.len() / top_k;
    let (mut items, mut list) = (vec![DeviceItem::default()], Vec::new());
    for (e, assignments) in routing.groups() {
        let (first, count) = (list.len() as u32, assignments.len() as u32);
        items.push(DeviceItem { src: places[e].0, dst: places[e].1, first, count, ..DeviceItem::default() });
        list.extend(assignments);
    }
    let most = items.iter().map(|i| i.count as usize).max().unwrap_or(0);
    let (items_on, list_on, h) = (gpu.upload_items(&items), gpu.upload_u32(&list), gpu.upload_f32(case.h));
    let partial = gpu.poisoned(4 * tokens * top_k * hidden);
    let y = gpu.poisoned(tokens * hidden * case.y_dtype.size_in_bytes() + 64);
    let weights = case.weights.map(|w| gpu.upload_f32(w));
    let items = Items {
        layout: &experts.layout,
        items: items_on.at,
        len: items.len(),
        assignments: list_on.at,
        most,
        tokens,
    };
    let down = DownArgs { items, h: h.at, partial: partial.at };
    let combine = CombineArgs {
        partial: partial.at,
        weights: weights.as_ref().map_or(0, |w| w.at),
        tokens,
        top_k,
        hidden,
        y_dtype: case.y_dtype,
        y: y.at,
    };
    // SAFETY: every buffer is as long as documented and lives until the download has waited.
    unsafe {
        if fused {
            gpu.kernels.down_combine(&gpu.stream, &down, &combine).expect("down_combine");
        } else {
            gpu.kernels.down(&gpu.stream, &down).expect("down");
            gpu.kernels.combine(&gpu.stream, &combine).expect("combine");
        }
    }
    gpu.download(&y)
}

#[test]
#[ignore = "needs a CUDA device"]
fn down_combine_is_down_and_combine() {
    let gpu = gpu();
    let mut rng = Rng::new(22);
    for format in FORMATS {
        for (n, (hidden, intermediate)) in [(2048, 768), (33, 130), (20, 16)].into_iter().enumerate() {
            let spec = ExpertSpec {
                bias: n % 2 == 1,
                activation: Activation::GeluTanh,
                ..ExpertSpec::swiglu(hidden, intermediate)
            };
            let experts = Experts::random(spec, format, 11, &mut rng);
            let (_records, places) = upload(&gpu, &experts);
            // Fewer experts than a block has warps, as many, and more; then several tokens.
            for (tokens, top_k) in [(1, 1), (1, 3), (1, 8), (1, 11), (3, 2)] {
                let routing = Routing::random(tokens, 11, top_k, &mut rng);
                let h = rng.many(tokens * top_k * intermediate, 1.0);
                let weights = rng.many(tokens * top_k, 1.0);
                for (y_dtype, weights) in
                    [(DType::F32, Some(&weights[..])), (DType::BF16, Some(&weights[..])), (DType::F16, None)]
                {
                    let (gpu, experts) = (&*gpu, &experts);
                    let case =
                        Case { gpu, experts, routing: &routing, places: &places, h: &h, weights, y_dtype };
                    let what = format!("{format} {hidden}x{intermediate} {tokens}x{top_k} {y_dtype:?}");
                    assert!(y(&case, true) == y(&case, false), "{what}");
                }
            }
        }
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn down_combine_refuses_two_calls_in_one() {
    let gpu = gpu();
    let mut rng = Rng::new(23);
    let experts = Experts::random(ExpertSpec::swiglu(64, 32), ExpertFormat::INT4, 1, &mut rng);
    let items = Items { layout: &experts.layout, items: 0, len: 1, assignments: 0, most: 1, tokens: 1 };
    let down = DownArgs { items, h: 0, partial: 16 };
    let combine =
        CombineArgs { partial: 16, weights: 0, tokens: 1, top_k: 1, hidden: 63, y_dtype: DType::F32, y: 0 };
    // SAFETY: refused before anything is launched, so no address is used.
    let error = unsafe { gpu.kernels.down_combine(&gpu.stream, &down, &combine) }.expect_err("another width");
    assert!(error.to_string().contains("63"), "{error}");
}
