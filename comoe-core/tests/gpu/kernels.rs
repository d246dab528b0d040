//! Every kernel against an F64 reference or the CPU's bytes, into poisoned memory.

use candle_core::DType;
use comoe_core::backend::cuda::kernels::{
    CombineArgs, DequantArgs, DeviceItem, GateUpArgs, GatherArgs, Items,
};
use comoe_core::expert::ExpertLayout;
use comoe_core::format::record::convert_record;
use comoe_core::{Activation, ExpertFormat, ExpertSpec};
use half::{bf16, f16};

use crate::case::{Buffer, Experts, FORMATS, Gpu, Outcome, PageLocked, Rng, Routing, X, check, gpu, run};

const ACTIVATIONS: [Activation; 3] =
    [Activation::Silu, Activation::GeluTanh, Activation::SwigluClamped { limit: 7.0, alpha: 1.702 }];
const DTYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];
const SHAPES: [(usize, usize); 9] =
    [(2048, 768), (2880, 2880), (704, 1408), (16, 20), (20, 16), (1408, 704), (33, 130), (1, 1), (512, 9000)];

pub(crate) fn upload(gpu: &Gpu, experts: &Experts) -> (Vec<Buffer>, Vec<(u64, u64)>) {
    let buffers: Vec<_> = experts.records.iter().map(|r| gpu.upload(r)).collect();
    let places = buffers.iter().map(|b| (b.at, 0)).collect();
    (buffers, places)
}

pub(crate) fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

#[test]
#[ignore = "needs a CUDA device"]
fn gate_up_and_down_are_what_f64_says() {
    let gpu = gpu();
    let mut rng = Rng::new(1);
    let mut cases = 0;
    for format in FORMATS {
        for (n, (hidden, intermediate)) in SHAPES.into_iter().enumerate() {
            let spec = ExpertSpec {
                activation: ACTIVATIONS[n % 3],
                bias: n % 2 == 1,
                ..ExpertSpec::swiglu(hidden, intermediate)
            };
            let big = hidden * intermediate > 2_000_000;
            let (count, all_tokens): (_, &[usize]) = if big { (3, &[1, 5]) } else { (5, &[1, 2, 7, 32]) };
            let experts = Experts::random(spec, format, count, &mut rng);
            let (_records, places) = upload(&gpu, &experts);
            for &tokens in all_tokens {
                let routing = Routing::random(tokens, count, 1 + cases % 3, &mut rng);
                let x = X::new(&rng.many(tokens * hidden, 3.0), DTYPES[cases % 3]);
                let mut groups = routing.groups();
                groups.reverse();
                let got = run(&gpu, &experts, &places, &x, &routing, &groups);
                let what = format!("{format} {hidden}x{intermediate}, {tokens} tokens, {:?}", x.dtype);
                check(&what, &experts, &x, &routing, &got, 0.0);
                cases += 1;
            }
        }
    }
    println!("{cases} cases");
}

#[test]
#[ignore = "needs a CUDA device"]
fn a_result_is_the_same_bits_whatever_the_batch_the_order_and_the_place() {
    let gpu = gpu();
    let mut rng = Rng::new(2);
    for format in FORMATS {
        for (hidden, intermediate) in [(2048, 768), (704, 1408), (33, 130)] {
            let spec = ExpertSpec::swiglu(hidden, intermediate);
            let experts = Experts::random(spec, format, 6, &mut rng);
            let (_records, places) = upload(&gpu, &experts);
            let host: Vec<_> = experts.records.iter().map(|r| PageLocked::new(r)).collect();
            let host_places: Vec<_> = host.iter().map(|h| (h.at, 0)).collect();
            let routing = Routing::random(32, 6, 3, &mut rng);
            let values = rng.many(32 * hidden, 1.0);
            let x = X::new(&values, DType::F32);
            let all = run(&gpu, &experts, &places, &x, &routing, &routing.groups());

            let mut groups = routing.groups();
            groups.reverse();
            for g in &mut groups {
                g.1.reverse();
            }
            let other = run(&gpu, &experts, &host_places, &x, &routing, &groups);
            assert_eq!(
                bits(&all.partial),
                bits(&other.partial),
                "{format} {hidden}x{intermediate}: host, reversed"
            );

            // One token alone has kernels of its own: see one_token.rs.
            for t in (0..32).step_by(2) {
                let own = Routing { top_k: 3, ids: routing.ids[3 * t..3 * t + 6].to_vec() };
                let x = X::new(&values[t * hidden..(t + 2) * hidden], DType::F32);
                let alone = run(&gpu, &experts, &places, &x, &own, &own.groups());
                let (h, p) = (3 * t * intermediate, 3 * t * hidden);
                let what = format!("{format} {hidden}x{intermediate} token {t}");
                assert_eq!(bits(&alone.h), bits(&all.h[h..h + alone.h.len()]), "{what}: h");
                assert_eq!(
                    bits(&alone.partial),
                    bits(&all.partial[p..p + alone.partial.len()]),
                    "{what}: partial"
                );
            }
        }
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn read_through_fills_the_slot_with_every_byte_and_changes_no_result() {
    let gpu = gpu();
    let mut rng = Rng::new(3);
    for format in FORMATS {
        for (n, (hidden, intermediate)) in
            [(2048, 768), (2880, 720), (16, 20), (33, 130)].into_iter().enumerate()
        {
            let spec = ExpertSpec { bias: n % 2 == 1, ..ExpertSpec::swiglu(hidden, intermediate) };
            let experts = Experts::random(spec, format, 4, &mut rng);
            let (_records, places) = upload(&gpu, &experts);
            let host: Vec<_> = experts.records.iter().map(|r| PageLocked::new(r)).collect();
            // One token an expert, and more than a pass holds.
            for tokens in [1, 11] {
                let slots: Vec<_> = experts.records.iter().map(|r| gpu.poisoned(r.len() + 512)).collect();
                let through: Vec<_> = host.iter().zip(&slots).map(|(h, s)| (h.at, s.at)).collect();
                let routing = Routing::random(tokens, 4, 2, &mut rng);
                let x = X::new(&rng.many(tokens * hidden, 1.0), DType::BF16);
                let groups = routing.groups();
                let plain = run(&gpu, &experts, &places, &x, &routing, &groups);
                let got = run(&gpu, &experts, &through, &x, &routing, &groups);
                let what = format!("{format} {hidden}x{intermediate}, {tokens} tokens");
                assert_eq!(bits(&plain.h), bits(&got.h), "{what}");
                assert_eq!(bits(&plain.partial), bits(&got.partial), "{what}");
                for (e, _) in &groups {
                    let (slot, record) = (gpu.download(&slots[*e]), &experts.records[*e]);
                    let wrong = record.iter().zip(&slot).position(|(a, b)| a != b);
                    assert_eq!(
                        wrong, None,
                        "{what}: first differing byte of expert {e} ({:?})",
                        experts.layout
                    );
                    assert!(
                        slot[record.len()..].iter().all(|b| *b == 0xff),
                        "{what}: written behind the slot"
                    );
                }
            }
        }
    }
}

/// Replaces every scale of the records by what `scale` makes of its running number.
fn with_scales(mut experts: Experts, scale: impl Fn(usize) -> f16) -> Experts {
    let l = experts.layout;
    for record in &mut experts.records {
        let mut n = 0;
        for m in [l.gate, l.up, l.down] {
            let group = l.format.group().expect("a format with scales");
            for row in 0..m.rows {
                for g in 0..m.cols.div_ceil(group) {
                    let at = m.scales + row * m.scale_row_bytes + 2 * g;
                    record[at..at + 2].copy_from_slice(&scale(n).to_le_bytes());
                    n += 1;
                }
            }
        }
    }
    Experts::from_records(experts.spec, l, experts.records)
}

/// Replaces every exponent byte of MXFP4 records by what `exponent` makes of its running number.
fn with_exponents(mut experts: Experts, exponent: impl Fn(usize) -> u8) -> Experts {
    let l = experts.layout;
    for record in &mut experts.records {
        let mut n = 0;
        for m in [l.gate, l.up, l.down] {
            for row in 0..m.rows {
                for g in 0..m.cols.div_ceil(32) {
                    record[m.scales + row * m.scale_row_bytes + g] = exponent(n);
                    n += 1;
                }
            }
        }
    }
    Experts::from_records(experts.spec, l, experts.records)
}

#[test]
#[ignore = "needs a CUDA device"]
fn extreme_inputs_and_scales_are_exact_too() {
    let gpu = gpu();
    let mut rng = Rng::new(4);
    for format in FORMATS {
        let spec = ExpertSpec::swiglu(704, 330);
        let random = Experts::random(spec, format, 3, &mut rng);
        let experts = match format {
            ExpertFormat::Bf16 => random,
            // The least power, zero's neighbours, and a large one side by side.
            ExpertFormat::Mxfp4 => with_exponents(random, |n| [0, 1, 120, 127, 131][n % 5]),
            // Subnormal, negative, zero and large f16 scales side by side.
            _ => with_scales(random, |n| match n % 5 {
                0 => f16::from_bits(1 + (n % 1000) as u16),
                1 => f16::from_f32(-0.01),
                2 => f16::ZERO,
                3 => f16::from_f32(0.02),
                _ => f16::from_f32(12.0),
            }),
        };
        let (_records, places) = upload(&gpu, &experts);
        let routing = Routing::random(6, 3, 2, &mut rng);
        let mut values = rng.many(6 * 704, 1.0);
        values[..704].iter_mut().for_each(|v| *v = v.signum() * 1e5); // all of it huge
        values[704 + 17] = 1e5; // one outlier channel among ones
        values[2 * 704..3 * 704].iter_mut().for_each(|v| *v *= 1e-30);
        values[3 * 704..4 * 704].iter_mut().for_each(|v| *v = 0.0);
        values[4 * 704..5 * 704].iter_mut().for_each(|v| *v *= 3e4);
        for dtype in [DType::F32, DType::BF16] {
            let x = X::new(&values, dtype);
            let got = run(&gpu, &experts, &places, &x, &routing, &routing.groups());
            assert!(got.partial.iter().all(|v| v.is_finite()), "{format}");
            check(&format!("{format} extremes"), &experts, &x, &routing, &got, 0.0);
            for t in 0..6 {
                let x = X::new(&values[t * 704..(t + 1) * 704], dtype);
                let own = Routing { top_k: 2, ids: routing.ids[2 * t..2 * t + 2].to_vec() };
                let got = run(&gpu, &experts, &places, &x, &own, &own.groups());
                assert!(got.partial.iter().all(|v| v.is_finite()), "{format} token {t}");
                check(&format!("{format} extremes, token {t} alone"), &experts, &x, &own, &got, 0.0);
            }
        }
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn a_nan_stays_with_its_token() {
    let gpu = gpu();
    let mut rng = Rng::new(5);
    for format in FORMATS {
        let experts = Experts::random(ExpertSpec::swiglu(300, 200), format, 2, &mut rng);
        let (_records, places) = upload(&gpu, &experts);
        let routing = Routing::random(4, 2, 2, &mut rng);
        let mut values = rng.many(4 * 300, 1.0);
        let clean = run(&gpu, &experts, &places, &X::new(&values, DType::F32), &routing, &routing.groups());
        values[2 * 300 + 5] = f32::NAN;
        let got = run(&gpu, &experts, &places, &X::new(&values, DType::F32), &routing, &routing.groups());
        for a in 0..8 {
            let range = a * 300..(a + 1) * 300;
            if a / 2 == 2 {
                assert!(got.partial[range].iter().all(|v| v.is_nan()), "{format}: a NaN was lost");
            } else {
                assert_eq!(
                    bits(&clean.partial[range.clone()]),
                    bits(&got.partial[range]),
                    "{format}: a NaN spread"
                );
            }
        }
        let own = Routing { top_k: 2, ids: routing.ids[4..6].to_vec() };
        let x = X::new(&values[2 * 300..3 * 300], DType::F32);
        let alone = run(&gpu, &experts, &places, &x, &own, &own.groups());
        assert!(alone.partial.iter().all(|v| v.is_nan()), "{format}: a token alone lost a NaN");
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn weights_on_the_input_scale_x_first() {
    let gpu = gpu();
    let mut rng = Rng::new(6);
    let formats = [ExpertFormat::Bf16, ExpertFormat::INT8, ExpertFormat::INT4, ExpertFormat::Mxfp4];
    for (format, tokens) in formats.into_iter().flat_map(|f| [(f, 5), (f, 1)]) {
        let experts = Experts::random(ExpertSpec::swiglu(256, 128), format, 3, &mut rng);
        let (_records, places) = upload(&gpu, &experts);
        let routing = Routing::random(tokens, 3, 1, &mut rng);
        let (values, weights) = (rng.many(tokens * 256, 1.0), rng.many(tokens, 1.0));
        let scaled: Vec<f32> = values.iter().enumerate().map(|(i, v)| v * weights[i / 256]).collect();
        let want = run(&gpu, &experts, &places, &X::new(&scaled, DType::F32), &routing, &routing.groups());

        let (x, w) = (gpu.upload_f32(&values), gpu.upload_f32(&weights));
        let h = gpu.poisoned(4 * tokens * 128);
        let (mut items, mut list) = (Vec::new(), Vec::new());
        for (e, assignments) in routing.groups() {
            let (first, count) = (list.len() as u32, assignments.len() as u32);
            items.push(DeviceItem { src: places[e].0, dst: 0, first, count, ..DeviceItem::default() });
            list.extend(assignments);
        }
        let (items_on, list_on) = (gpu.upload_items(&items), gpu.upload_u32(&list));
        let args = GateUpArgs {
            items: Items {
                layout: &experts.layout,
                items: items_on.at,
                len: items.len(),
                assignments: list_on.at,
                most: tokens,
                tokens,
            },
            activation: Activation::Silu,
            x: x.at,
            x_dtype: DType::F32,
            top_k: 1,
            input_weights: w.at,
            h: h.at,
        };
        // SAFETY: every buffer is as long as documented and lives until the download has waited.
        unsafe { gpu.kernels.gate_up(&gpu.stream, &args) }.expect("gate_up");
        assert_eq!(bits(&gpu.download_f32(&h, tokens * 128)), bits(&want.h), "{format}, {tokens} tokens");
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn dequantised_records_are_the_cpus_byte_for_byte() {
    let gpu = gpu();
    let mut rng = Rng::new(7);
    for format in FORMATS {
        for (n, (hidden, intermediate)) in SHAPES.into_iter().enumerate() {
            let spec = ExpertSpec { bias: n % 2 == 0, ..ExpertSpec::swiglu(hidden, intermediate) };
            let experts = Experts::random(spec, format, 2, &mut rng);
            let to = ExpertLayout::new(&spec, ExpertFormat::Bf16);
            let (_records, places) = upload(&gpu, &experts);
            let out: Vec<_> = (0..2).map(|_| gpu.poisoned(to.record_bytes + 512)).collect();
            let items: Vec<_> = (0..2)
                .map(|e| DeviceItem {
                    src: places[e].0,
                    dst: out[e].at,
                    first: 0,
                    count: 0,
                    ..DeviceItem::default()
                })
                .chain([DeviceItem { src: places[0].0, ..DeviceItem::default() }])
                .collect();
            let items_on = gpu.upload_items(&items);
            let args = DequantArgs { from: &experts.layout, to: &to, items: items_on.at, len: items.len() };
            // SAFETY: sources and destinations are whole records and live until the downloads have waited.
            unsafe { gpu.kernels.dequant(&gpu.stream, &args) }.expect("dequant");
            for (record, out) in experts.records.iter().zip(&out) {
                let mut want = vec![0; to.record_bytes];
                convert_record(&experts.layout, record, &to, &mut want).expect("convert");
                let got = gpu.download(out);
                let wrong = want.iter().zip(&got).position(|(a, b)| a != b);
                assert_eq!(wrong, None, "{format} {hidden}x{intermediate}: first differing byte ({to:?})");
                assert!(got[want.len()..].iter().all(|b| *b == 0xff), "{format}: written behind the record");
            }
        }
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn combine_adds_in_order() {
    let gpu = gpu();
    let mut rng = Rng::new(9);
    for (tokens, top_k, hidden) in [(1, 8, 2048), (32, 4, 2880), (3, 1, 17), (300, 2, 16)] {
        let (partial, weights) = (rng.many(tokens * top_k * hidden, 2.0), rng.many(tokens * top_k, 1.0));
        let (partial_on, weights_on) = (gpu.upload_f32(&partial), gpu.upload_f32(&weights));
        for dtype in DTYPES {
            for weighted in [true, false] {
                let size = dtype.size_in_bytes();
                let y = gpu.poisoned(tokens * hidden * size + 64);
                let args = CombineArgs {
                    partial: partial_on.at,
                    weights: if weighted { weights_on.at } else { 0 },
                    tokens,
                    top_k,
                    hidden,
                    y_dtype: dtype,
                    y: y.at,
                };
                // SAFETY: every buffer is as long as documented and lives until the download has waited.
                unsafe { gpu.kernels.combine(&gpu.stream, &args) }.expect("combine");
                let mut want = Vec::new();
                for t in 0..tokens {
                    for c in 0..hidden {
                        let sum = (0..top_k).fold(0.0f32, |sum, j| {
                            let p = partial[(t * top_k + j) * hidden + c];
                            if weighted { weights[t * top_k + j].mul_add(p, sum) } else { sum + p }
                        });
                        match dtype {
                            DType::BF16 => want.extend(bf16::from_f32(sum).to_le_bytes()),
                            DType::F16 => want.extend(f16::from_f32(sum).to_le_bytes()),
                            _ => want.extend(sum.to_le_bytes()),
                        }
                    }
                }
                want.extend([0xff; 64]);
                assert!(
                    want == gpu.download(&y),
                    "{tokens} x {top_k} x {hidden} {dtype:?} weighted {weighted}"
                );
            }
        }
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn gather_copies_the_start_of_each_record() {
    let gpu = gpu();
    let mut rng = Rng::new(10);
    for bytes in [1usize, 16, 250, 4096, 10_000, 16_384] {
        let records: Vec<Vec<u8>> =
            (0..3).map(|_| (0..bytes.next_multiple_of(512)).map(|_| rng.next() as u8).collect()).collect();
        let on: Vec<_> = records.iter().map(|r| gpu.upload(r)).collect();
        let groups = [(2usize, vec![0u32, 4]), (0, vec![1]), (1, vec![2, 3, 5])];
        let (mut items, mut list, mut want) = (Vec::new(), Vec::new(), vec![0xff; 6 * bytes + 16]);
        for (r, assignments) in &groups {
            let (first, count) = (list.len() as u32, assignments.len() as u32);
            items.push(DeviceItem { src: on[*r].at, dst: 0, first, count, ..DeviceItem::default() });
            for a in assignments {
                want[*a as usize * bytes..(*a as usize + 1) * bytes].copy_from_slice(&records[*r][..bytes]);
                list.push(*a);
            }
        }
        let (items_on, list_on) = (gpu.upload_items(&items), gpu.upload_u32(&list));
        let out = gpu.poisoned(6 * bytes + 16);
        let args = GatherArgs { items: items_on.at, len: 3, assignments: list_on.at, bytes, out: out.at };
        // SAFETY: every buffer is as long as documented and lives until the download has waited.
        unsafe { gpu.kernels.gather(&gpu.stream, &args) }.expect("gather");
        assert!(want == gpu.download(&out), "{bytes} bytes");
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn bad_arguments_are_refused_in_words() {
    let gpu = gpu();
    let mut rng = Rng::new(11);
    let experts = Experts::random(ExpertSpec::swiglu(64, 32), ExpertFormat::INT4, 1, &mut rng);
    let other = ExpertLayout::new(&ExpertSpec::swiglu(64, 48), ExpertFormat::Bf16);
    // SAFETY: refused before anything is launched, so no address is used.
    unsafe {
        let args = DequantArgs { from: &experts.layout, to: &other, items: 0, len: 1 };
        let error = gpu.kernels.dequant(&gpu.stream, &args).expect_err("another shape");
        assert!(error.to_string().contains("(64, 32, false)"), "{error}");
        let args =
            CombineArgs { partial: 0, weights: 0, tokens: 1, top_k: 1, hidden: 1, y_dtype: DType::F64, y: 0 };
        let error = gpu.kernels.combine(&gpu.stream, &args).expect_err("another dtype");
        assert!(error.to_string().contains("F64"), "{error}");
    }
    // Nothing is left broken on the GPU.
    let (_records, places) = upload(&gpu, &experts);
    let routing = Routing::random(1, 1, 1, &mut rng);
    let x = X::new(&rng.many(64, 1.0), DType::F32);
    let Outcome { partial, .. } = run(&gpu, &experts, &places, &x, &routing, &routing.groups());
    assert!(partial.iter().all(|v| v.is_finite()));
}
