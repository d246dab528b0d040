//! Keys and values in INT8 on a GPU: the CPU's bytes, with and without the graph the same bits, the error stated, and what
//! cannot be held reported.

use candle_core::{DType, Device, Tensor};
use comoe_core::{CacheOptions, Capacity};
use comoe_models::blocks::int8_rows::Int8Rows;
use comoe_models::blocks::kv_cache::KvCache;
use comoe_models::evaluate::divergence;
use comoe_models::{Decoder, DeviceSteps, Error, KvFormat, LoadOptions, Rows, SamplerOptions};
use half::f16;

use crate::distance::{largest_difference, logits};
use crate::files::{Family, families, prompts, tiny};
use crate::graph::{decode, drawn, same};
use crate::tiny::GPU;

fn open(device: &Device, options: &LoadOptions) -> Decoder {
    Decoder::open(&tiny(), device, options, &|_| {}).expect("comoe-tiny loads")
}

fn int8(dtype: DType) -> LoadOptions {
    LoadOptions { kv: KvFormat::Int8, dtype, ..LoadOptions::default() }
}

#[test]
#[ignore = "needs a CUDA device"]
fn rows_are_the_cpus_bytes() {
    for (heads, tokens, width) in [(2, 70, 64), (4, 1, 128), (3, 9, 20)] {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            // Large, small, zero and unlike rows, and some that cannot be held.
            let mut values: Vec<f32> = (0..(heads + 1) * tokens * width)
                .map(|i| ((i as u32).wrapping_mul(2_654_435_761) >> 8) as f32 / 8_388_608.0 - 1.0)
                .collect();
            for (row, values) in values.chunks_mut(width).enumerate() {
                let factor = [1.0, 1e-6, 300.0, 0.0, 1e-3][row % 5];
                values.iter_mut().for_each(|v| *v *= factor);
                match row % 17 {
                    5 => values[width - 1] = f32::NAN,
                    11 => values[1] = f32::INFINITY,
                    _ => {}
                }
            }
            let x = Tensor::from_vec(values, (heads + 1, tokens, width), &Device::Cpu);
            let x = x.and_then(|x| x.to_dtype(dtype)).expect("values");
            let kept = |device: &Device, dtype: DType| {
                let rows = Int8Rows::zeros(heads, tokens + 5, width, device).expect("memory");
                let x = x.to_device(device).and_then(|x| x.to_dtype(dtype)?.narrow(0, 1, heads));
                rows.write(3, &x.expect("a view")).expect("rows");
                rows
            };
            let (on_gpu, on_cpu) = (kept(&GPU, dtype), kept(&Device::Cpu, DType::F32));
            let bytes = |rows: &Int8Rows| rows.q().flatten_all().and_then(|q| q.to_vec1::<u8>()).expect("q");
            let scales = |rows: &Int8Rows| -> Vec<u16> {
                let scales = rows.scales().flatten_all().and_then(|s| s.to_vec1::<f16>()).expect("scales");
                scales.iter().map(|s| s.to_bits()).collect()
            };
            let what = format!("{heads} x {tokens} x {width}, {dtype:?}");
            assert_eq!(scales(&on_gpu), scales(&on_cpu), "{what}");
            assert_eq!(bytes(&on_gpu), bytes(&on_cpu), "{what}");
            let numbers = |rows: &Int8Rows, dtype: DType| {
                let part =
                    rows.part((1, heads - 1), (2, tokens)).and_then(|p| p.expand(dtype)).expect("numbers");
                let flat =
                    |t: &Tensor| t.to_dtype(DType::F32).and_then(|t| t.flatten_all()?.to_vec1::<f32>());
                let all = [flat(&part.0).expect("q"), flat(&part.1).expect("scales")];
                // Which NaN a conversion makes is the machine's choice.
                let bits = |v: &f32| if v.is_nan() { u32::MAX } else { v.to_bits() };
                all.concat().iter().map(bits).collect::<Vec<_>>()
            };
            assert_eq!(numbers(&on_gpu, dtype), numbers(&on_cpu, DType::F32), "{what}");
        }
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn the_error_of_int8_is_small_and_stated() {
    let ids: Vec<u32> = prompts().into_iter().flatten().take(120).collect();
    let mean = |want: &[Vec<f32>], have: &[Vec<f32>]| {
        want.iter().zip(have).map(|(p, q)| divergence(p, q)).sum::<f64>() / want.len() as f64
    };
    let on_cpu = logits(&open(&Device::Cpu, &int8(DType::F32)), &ids, ids.len());
    for dtype in [DType::F32, DType::BF16] {
        let packed = open(&GPU, &int8(dtype));
        let plain = open(&GPU, &LoadOptions { dtype, ..LoadOptions::default() });
        let whole = logits(&packed, &ids, ids.len());
        let quantised = mean(&logits(&plain, &ids, ids.len()), &whole);
        let cpu = mean(&on_cpu, &whole);
        let by_one = logits(&packed, &ids, 1);
        let cut = mean(&whole, &by_one);
        let plain_cut = mean(&logits(&plain, &ids, ids.len()), &logits(&plain, &ids, 1));
        println!(
            "INT8 KV cache, {dtype:?}: KL {quantised:.2e} in the mean, logits differ by at most {:.3}; one by one {cut:.2e} \
             from the prompt (plain: {plain_cut:.2e}); the CPU's {cpu:.2e}",
            largest_difference(&logits(&plain, &ids, ids.len()), &whole)
        );
        assert!(quantised > 0.0 && quantised < 5e-2, "{dtype:?}: KL {quantised}");
        if dtype == DType::F32 {
            // As far as the order of sums takes a number to its neighbour.
            assert!(cut < quantised / 2.0 && cpu < quantised / 2.0, "{cut} and {cpu} of {quantised}");
        }
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn a_graph_gives_the_bits_of_single_steps_for_every_slot_count() {
    // Longer than a fused step, so that a part of the cache is a prompt's.
    let prompt: Vec<u32> = prompts().into_iter().flatten().take(70).collect();
    for dtype in [DType::F32, DType::BF16] {
        let want = decode(&open(&GPU, &int8(dtype)), &prompt, 200, &drawn(7), false);
        for slots in [96, 48, 13, 2] {
            let cache = CacheOptions { capacity: Capacity::Slots(slots), ..CacheOptions::default() };
            let few = open(&GPU, &LoadOptions { cache, ..int8(dtype) });
            let have = decode(&few, &prompt, 200, &drawn(7), true);
            same(&have, &want, &format!("{dtype:?}, {slots} slots"));
            assert!(have.replayed > 180, "{} of 200 replayed, {:?}", have.replayed, have.note);
        }
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn every_family_is_replayed_with_the_bits_of_single_steps() {
    for Family { name, folder, ids, .. } in families() {
        for dtype in [DType::F32, DType::BF16] {
            let decoder = Decoder::open(&folder, &GPU, &int8(dtype), &|_| {}).expect("a fixture");
            if dtype == DType::F32 {
                let cpu = Decoder::open(&folder, &Device::Cpu, &int8(dtype), &|_| {}).expect("a fixture");
                let want = logits(&cpu, &ids, ids.len());
                for step in [ids.len(), 1] {
                    let off = largest_difference(&want, &logits(&decoder, &ids, step));
                    println!("{name}, {step} at a time: {off:.1e} from the CPU");
                    assert!(off < 0.1, "{name}, {step} at a time: {off} from the CPU");
                }
            }
            let prompt = &ids[..ids.len().min(5)];
            let n = 40.min(decoder.context() - prompt.len());
            let want = decode(&decoder, prompt, n, &drawn(5), false);
            same(&decode(&decoder, prompt, n, &drawn(5), true), &want, &format!("{name}, {dtype:?}"));
        }
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn the_plan_counts_the_bytes_of_int8() {
    for kv in KvFormat::ALL {
        let options = LoadOptions { kv, dtype: DType::BF16, ..LoadOptions::default() };
        let decoder = open(&GPU, &options);
        let held: usize = {
            let cache = decoder.new_kv().expect("a KV cache");
            cache.tensors().map(|t| t.elem_count() * t.dtype().size_in_bytes()).sum()
        };
        assert_eq!(decoder.memory_plan().expect("a plan").device.kv, held as u64, "{kv:?}");
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn a_row_that_is_no_number_is_reported_and_the_next_sequence_is_well() {
    let decoder = open(&GPU, &int8(DType::BF16));
    let prompt = &prompts()[0];
    let options = SamplerOptions::default();
    let want = decode(&decoder, prompt, 20, &options, false);
    for graph in [true, false] {
        let mut kv = decoder.new_kv().expect("a KV cache");
        let mut steps = DeviceSteps::of(&decoder).expect("memory").expect("fused steps");
        let mut run = |kv: &mut KvCache| -> comoe_models::Result<()> {
            steps.begin(&options, prompt)?;
            let mut last = steps.choose(&decoder.forward(prompt, kv, Rows::Last)?, kv)?;
            for step in 0..20 {
                if step == 10 {
                    let scales = kv.tensors().nth(1).expect("scales").clone();
                    let (heads, _) = scales.dims2()?;
                    scales.slice_set(&Tensor::full(f16::NAN, (heads, 1), &GPU)?, 1, 3)?;
                }
                let next = if graph { steps.next(kv, 20 - step)? } else { None };
                last = match next {
                    Some(token) => token,
                    None => steps.choose(&decoder.forward(&[last], kv, Rows::Last)?, kv)?,
                };
            }
            Ok(())
        };
        let e = run(&mut kv).expect_err("a key is not a number");
        assert!(matches!(e, Error::BadRouter { layer: 0, token: 0 }), "graph {graph}: {e}");
        same(&decode(&decoder, prompt, 20, &options, graph), &want, &format!("graph {graph}"));
    }
}
