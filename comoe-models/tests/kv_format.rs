//! Keys and values in INT8 on the CPU: the error stated, the same numbers for a prompt and for single tokens, the same bits
//! for every slot count, and every family.

mod distance;
mod files;

use std::path::Path;

use candle_core::{Device, Tensor};
use comoe_core::{CacheOptions, Capacity, Scope};
use comoe_models::arch::MixerPlan;
use comoe_models::blocks::kv_cache::KvCache;
use comoe_models::evaluate::{divergence, likeliest};
use comoe_models::{Decoder, Error, KvFormat, LoadOptions, Rows};
use half::f16;

use distance::{largest_difference, logits};
use files::{Family, families, prompts, tiny};

fn open(folder: &Path, options: &LoadOptions) -> Decoder {
    Decoder::open(folder, &Device::Cpu, options, &|_| {})
        .unwrap_or_else(|e| panic!("{}: {e}", folder.display()))
}

fn int8() -> LoadOptions {
    LoadOptions { kv: KvFormat::Int8, ..LoadOptions::default() }
}

fn bits(rows: Vec<Vec<f32>>) -> Vec<u32> {
    rows.into_iter().flatten().map(f32::to_bits).collect()
}

/// `[mean, largest]` divergence of the rows, and how many of them find the same token likeliest.
fn apart(want: &[Vec<f32>], have: &[Vec<f32>]) -> ([f64; 2], usize) {
    let divergences: Vec<f64> = want.iter().zip(have).map(|(p, q)| divergence(p, q)).collect();
    let mean = divergences.iter().sum::<f64>() / divergences.len() as f64;
    let same = want.iter().zip(have).filter(|(a, b)| likeliest(a) == likeliest(b)).count();
    ([mean, divergences.iter().fold(0.0, |m, d| m.max(*d))], same)
}

#[test]
fn the_error_of_int8_is_small_and_stated() {
    let (plain, packed) = (open(&tiny(), &LoadOptions::default()), open(&tiny(), &int8()));
    let (mut want, mut have) = (Vec::new(), Vec::new());
    for ids in prompts() {
        want.extend(logits(&plain, &ids, ids.len()));
        have.extend(logits(&packed, &ids, ids.len()));
    }
    let ([mean, most], same) = apart(&want, &have);
    let (off, n) = (largest_difference(&want, &have), want.len());
    println!(
        "an INT8 KV cache at {n} positions: logits differ by at most {off:.3}, KL {mean:.2e} in the mean and {most:.2e} at \
         most, the likeliest token the same at {same}"
    );
    assert!(off > 0.0, "INT8 is not the same");
    assert!(mean < 1e-2 && same * 100 >= 97 * n, "KL {mean}, {same} of {n}");
}

/// A prompt's own tokens are read as the cache holds them: how it is cut moves no more than the order of sums does, which
/// sometimes takes a number to its neighbour.
#[test]
fn a_prompt_reads_the_numbers_that_single_tokens_read() {
    let (plain, packed) = (open(&tiny(), &LoadOptions::default()), open(&tiny(), &int8()));
    for ids in prompts() {
        let whole = logits(&packed, &ids, ids.len());
        let [quantised, _] = apart(&logits(&plain, &ids, ids.len()), &whole).0;
        for step in [7, 1] {
            let [cut, _] = apart(&whole, &logits(&packed, &ids, step)).0;
            println!(
                "{} tokens, {step} at a time: KL {cut:.2e}; from the plain cache {quantised:.2e}",
                ids.len()
            );
            assert!(cut < quantised / 4.0, "{step} at a time: {cut} of {quantised}");
        }
    }
}

#[test]
fn bits_do_not_depend_on_the_slots() {
    let ids: Vec<u32> = prompts().into_iter().flatten().take(40).collect();
    let run = |capacity, scope| {
        let cache = CacheOptions { capacity, scope, ..CacheOptions::default() };
        let decoder = open(&tiny(), &LoadOptions { cache, ..int8() });
        [ids.len(), 7, 1].map(|step| bits(logits(&decoder, &ids, step)))
    };
    let want = run(Capacity::All, Scope::Layer);
    for (slots, scope) in [(2, Scope::Global), (13, Scope::Layer), (40, Scope::Global), (95, Scope::Layer)] {
        assert!(run(Capacity::Slots(slots), scope) == want, "{slots} slots, scope {scope}");
    }
}

#[test]
fn a_cache_that_is_cut_back_goes_on_as_a_fresh_one() {
    for Family { name, folder, ids, .. } in families() {
        let decoder = open(&folder, &int8());
        let run = |astray: &[u32]| {
            let mut kv = decoder.new_kv().unwrap();
            decoder.forward(&ids[..11], &mut kv, Rows::Last).unwrap();
            if !astray.is_empty() {
                decoder.forward(astray, &mut kv, Rows::Last).unwrap();
                kv.truncate(11);
            }
            let rest = |part: &[u32], kv: &mut KvCache| {
                bits(decoder.forward(part, kv, Rows::All).unwrap().to_vec2::<f32>().unwrap())
            };
            [rest(&ids[11..12], &mut kv), rest(&ids[12..], &mut kv)]
        };
        assert!(run(&[1, 2, 3, 4]) == run(&[]), "{name}");
    }
}

#[test]
fn every_family_says_what_is_in_int8() {
    for Family { name, folder, ids, .. } in families() {
        let (plain, packed) = (open(&folder, &LoadOptions::default()), open(&folder, &int8()));
        let layers = &packed.plan().layers;
        let attends = layers.iter().filter(|l| matches!(l.mixer, MixerPlan::Attention(_))).count();
        let said = packed.notes().iter().any(|n| n.contains("in int8: latent attention and convolutions"));
        assert_eq!(said, attends < layers.len(), "{name}: {:?}", packed.notes());
        assert!(!plain.notes().iter().any(|n| n.contains("int8")), "{name}: {:?}", plain.notes());

        let whole = logits(&packed, &ids, ids.len());
        let off = largest_difference(&logits(&plain, &ids, ids.len()), &whole);
        let by_one = largest_difference(&whole, &logits(&packed, &ids, 1));
        println!("{name}: {off:.1e} from the plain cache, {by_one:.1e} one by one");
        assert_eq!(off > 0.0, attends > 0, "{name}: {off}");
        // Random weights say little about how far INT8 is off, but that single tokens read what a prompt read: all but a
        // number that the order of sums takes to its neighbour (llama4 has one).
        assert!(off < 2.0 && by_one < 1e-4 + off / 4.0, "{name}: {off}, {by_one}");

        let kv = packed.new_kv().unwrap();
        let held: usize = kv.tensors().map(|t| t.elem_count() * t.dtype().size_in_bytes()).sum();
        assert_eq!(held, packed.context() * packed.plan().kv_bytes_per_token(4, KvFormat::Int8), "{name}");
        // A byte for four, and a scale for each of at least eight; what convolutions keep stays.
        let plain = packed.context() * packed.plan().kv_bytes_per_token(4, KvFormat::Plain);
        let most = if attends == layers.len() { plain / 2 } else { plain };
        assert!(if attends > 0 { held < most } else { held == plain }, "{name}: {held} of {plain}");
    }
}

#[test]
fn a_row_that_is_no_number_is_reported_and_the_next_sequence_is_well() {
    let decoder = open(&tiny(), &int8());
    let ids = &prompts()[0];
    let want = bits(logits(&decoder, ids, 1));
    let mut kv = decoder.new_kv().unwrap();
    decoder.forward(&ids[..8], &mut kv, Rows::Last).unwrap();
    let scales = kv.tensors().nth(1).unwrap();
    let (heads, _) = scales.dims2().unwrap();
    let nan = Tensor::full(f16::NAN, (heads, 1), &Device::Cpu).unwrap();
    scales.slice_set(&nan, 1, 3).unwrap();
    for step in [1, 5] {
        let e = decoder.forward(&ids[8..8 + step], &mut kv, Rows::Last).unwrap_err();
        assert!(matches!(e, Error::BadRouter { layer: 0, token: 0 }), "{step} at a time: {e}");
    }
    assert_eq!(bits(logits(&decoder, ids, 1)), want);
}
