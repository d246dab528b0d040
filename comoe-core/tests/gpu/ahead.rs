//! Records that the device brings ahead of their layer: no result, no table and no slot depends on them.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use comoe_core::backend::cuda::SideStream;
use comoe_core::backend::{DeviceGuess, DriverKind};
use comoe_core::{
    CacheOptions, CacheStats, CudaOptions, Error, ExpertCache, ExpertFormat, ExpertSpec, Prefetch,
    ResidentFormat, Rules,
};

use crate::backend::{Call, Model, cache, device, forward, numbers, options, same, with_faults};
use crate::capture::{captured, driven_token};
use crate::conformance::{Experts, Noise};
use crate::device::driven;

const LAYERS: usize = 4;
const EXPERTS: usize = 12;
const TOP_K: usize = 3;

/// Of a layer's experts, in the order of a router.
fn chosen(call: &Call) -> Vec<u32> {
    call.ids.flatten_all().and_then(|t| t.to_vec1()).expect("ids")
}

/// What might be guessed of `call`: its set, none of it, or numbers that no expert has.
fn guess(call: &Call, noise: &mut Noise, right: usize) -> Vec<u32> {
    match noise.below(100) {
        n if n < right => chosen(call),
        n if n % 5 == 0 => vec![u32::MAX, EXPERTS as u32],
        // None of the set.
        _ => {
            let set = chosen(call);
            let others: Vec<u32> = (0..EXPERTS as u32).filter(|id| !set.contains(id)).collect();
            (0..TOP_K).map(|_| others[noise.below(others.len())]).collect()
        }
    }
}

/// A token through all layers, none of which is waited for, each with a guess of the next one; half of them on a stream of
/// their own.
fn token(
    cache: &ExpertCache,
    calls: &[Call],
    guesses: &[Tensor],
    side: Option<&SideStream>,
) -> Vec<Vec<f32>> {
    let run = || Ok::<_, Error>(layers(cache, calls, guesses, side));
    cache.run_token(1, TOP_K, run).expect("a token")
}

fn layers(
    cache: &ExpertCache,
    calls: &[Call],
    guesses: &[Tensor],
    side: Option<&SideStream>,
) -> Vec<Vec<f32>> {
    let mut results = Vec::new();
    for (call, guess) in calls.iter().zip(guesses) {
        let layer = cache.layer(call.layer);
        assert_eq!(layer.wants_device_guess(1, TOP_K), call.layer + 1 < LAYERS);
        let stream = side.filter(|_| call.layer % 2 == 0).map(|side| {
            let main = call.x.device().as_cuda_device().expect("a GPU").cuda_stream();
            side.behind(&main).expect("a branch")
        });
        let layer = layer.with_device_guess(DeviceGuess { ids: guess, stream });
        results.push(layer.forward(&call.x, &call.ids, &call.weights).expect("a step"));
    }
    results.iter().map(numbers).collect()
}

struct Run<'a> {
    experts: &'a Arc<Experts>,
    device: &'a Device,
    cuda: &'a CudaOptions,
    prefetch: Prefetch,
    slots: usize,
    right: usize,
    tokens: usize,
}

impl Run<'_> {
    fn cache(&self, prefetch: Prefetch) -> ExpertCache {
        let options = CacheOptions { prefetch, ..driven(self.slots, TOP_K, DriverKind::Device) };
        cache(self.experts, self.device, options, self.cuda, Rules::default())
    }

    /// Compares every result with those of a cache that brings nothing; returns what was counted.
    fn compare(&self, name: &str) -> CacheStats {
        let Self { experts, device, right, .. } = *self;
        let model =
            Model { device, hidden: experts.spec.hidden, layers: LAYERS, experts: EXPERTS, top_k: TOP_K };
        let (plain, ahead) = (self.cache(Prefetch::Off), self.cache(self.prefetch));
        let side = SideStream::new(device).expect("a stream");
        let mut noise = Noise(5);
        let next = |n: usize, noise: &mut Noise| {
            let calls: Vec<_> = (0..LAYERS).map(|l| model.call(l, 1, DType::BF16, noise)).collect();
            let guesses: Vec<_> = (1..=LAYERS)
                .map(|l| guess(&calls[l % LAYERS], noise, right))
                .map(|ids| Tensor::new(ids.as_slice(), device).expect("a guess"))
                .collect();
            let side = (n % 2 == 0).then_some(&side);
            for (l, got) in token(&ahead, &calls, &guesses, side).iter().enumerate() {
                let want = forward(&plain, &calls[l]).expect("a step");
                assert!(same(got, &want), "{name}: token {n}, layer {l}");
            }
        };
        for n in 0..self.tokens {
            next(n, &mut noise);
        }
        ahead.check().expect("slots equal the store");
        let (stats, without) = (ahead.stats(), plain.stats());
        assert_eq!((stats.accesses(), stats.hits()), (without.accesses(), without.hits()), "{name}");
        let saved = stats.prefetched_bytes - stats.prefetch_wasted_bytes;
        assert_eq!(stats.bytes_moved + saved, without.bytes_moved, "{name}: {stats}");
        assert_eq!(stats.prefetched, stats.prefetch_used + stats.prefetch_wasted);
        assert!(stats.guessed_right <= stats.guessed && stats.prefetched <= stats.guessed, "{stats}");
        println!(
            "{name}: {} guessed, {} right, {} brought, {} used; {saved} of {} bytes were there",
            stats.guessed, stats.guessed_right, stats.prefetched, stats.prefetch_used, without.bytes_moved
        );
        // The host has the tables in between; what its ring brings is counted with what is brought ahead.
        for n in 0..4 {
            let call = model.call(n, 40, DType::BF16, &mut noise);
            let (got, want) =
                (forward(&ahead, &call).expect("a step"), forward(&plain, &call).expect("a step"));
            assert!(same(&got, &want), "{name}: prompt {n}");
            (0..5).for_each(|n| next(n, &mut noise));
            ahead.check().expect("slots equal the store");
        }
        stats
    }
}

/// Issue 4: prefetch on and off gives the same bits, tables and slots, whatever is guessed, in every format, with delays.
#[test]
#[ignore = "needs a CUDA device"]
fn what_is_brought_ahead_changes_nothing() {
    let (shared, plain) = (device(), Device::new_cuda(0).expect("a GPU"));
    let quiet = CudaOptions::default();
    let delays = |seed| {
        with_faults(comoe_core::backend::cuda::Faults { delay_seed: Some(seed), ..Default::default() })
    };
    // Several pieces a block; a last piece that is none whole.
    let spec = ExpertSpec::swiglu(512, 320);
    for (name, format, device, cuda, tokens) in [
        ("int4 g64", ExpertFormat::Int4 { group: 64 }, &shared, quiet.clone(), 150),
        ("int4 g64, plain device", ExpertFormat::Int4 { group: 64 }, &plain, quiet.clone(), 100),
        ("int4 g64, delays", ExpertFormat::Int4 { group: 64 }, &shared, delays(7), 60),
        ("int8", ExpertFormat::INT8, &shared, quiet.clone(), 100),
        ("bf16", ExpertFormat::Bf16, &shared, quiet.clone(), 50),
        ("int4 g64, half page-locked", ExpertFormat::Int4 { group: 64 }, &shared, quiet.clone(), 50),
        ("int4 g32 in bf16 slots", ExpertFormat::Int4 { group: 32 }, &shared, quiet, 50),
    ] {
        let experts = Experts::random(spec, format, LAYERS, EXPERTS, 6);
        let half = (LAYERS * EXPERTS * experts.layout.record_bytes / 2) as u64;
        let cuda = match name {
            n if n.ends_with("half page-locked") => options(|o| o.page_lock_limit = Some(half)),
            n if n.ends_with("bf16 slots") => options(|o| o.resident = ResidentFormat::Bf16),
            _ => cuda,
        };
        for prefetch in [Prefetch::StaleGate, Prefetch::Auto] {
            let run = Run { experts: &experts, device, cuda: &cuda, prefetch, slots: 20, right: 70, tokens };
            let stats = run.compare(&format!("{name}, {prefetch}"));
            assert!(stats.prefetched > 0, "{name}: {stats}");
            // Judged while it runs, or so slow that little arrives; of BF16, whose kernels take whole records, nothing does.
            let all_arrives = !name.ends_with("delays") && format != ExpertFormat::Bf16;
            if prefetch == Prefetch::StaleGate && all_arrives {
                assert!(stats.prefetch_used > 0, "{name}: {stats}");
            }
        }
    }
}

/// Where guesses are judged, bad ones are no longer brought, and good ones are.
#[test]
#[ignore = "needs a CUDA device"]
fn guesses_that_are_not_worth_it_are_not_brought() {
    let device = device();
    let experts = Experts::random(ExpertSpec::swiglu(256, 128), ExpertFormat::INT4, LAYERS, EXPERTS, 6);
    let cuda = CudaOptions::default();
    let run = |right, tokens| {
        let prefetch = Prefetch::Auto;
        let run = Run { experts: &experts, device: &device, cuda: &cuda, prefetch, slots: 16, right, tokens };
        run.compare(&format!("{right} of 100 right"))
    };
    let (bad, good) = (run(0, 250), run(100, 250));
    let on = |stats: &CacheStats| stats.layers.iter().filter(|l| l.prefetch_width > 0).count();
    assert!(bad.prefetch_judged && on(&bad) <= 1, "{bad}");
    assert!(bad.prefetched * 4 < bad.guessed, "most are not brought: {bad}");
    assert_eq!(on(&good), LAYERS, "{good}");
    assert_eq!(good.prefetched, good.guessed, "{good}");
}

/// Steps of two tokens in turn, layer by layer, and tokens that are given up: what was brought for one is never taken for
/// what the other misses.
#[test]
#[ignore = "needs a CUDA device"]
fn tokens_that_take_turns_find_only_what_was_brought_for_their_layer() {
    let device = device();
    // Large enough that records do not arrive whole.
    let spec = ExpertSpec::swiglu(1024, 1024);
    for (name, format) in [("int4", ExpertFormat::INT4), ("bf16", ExpertFormat::Bf16)] {
        let experts = Experts::random(spec, format, LAYERS, EXPERTS, 8);
        let of = |prefetch| {
            let options = CacheOptions { prefetch, ..driven(4 * LAYERS, TOP_K, DriverKind::Device) };
            cache(&experts, &device, options, &CudaOptions::default(), Rules::default())
        };
        let (plain, ahead) = (of(Prefetch::Off), of(Prefetch::StaleGate));
        let model = Model { device: &device, hidden: 1024, layers: LAYERS, experts: EXPERTS, top_k: TOP_K };
        let side = SideStream::new(&device).expect("a stream");
        let mut noise = Noise(17);
        for n in 0..150 {
            let tokens: Vec<Vec<Call>> = (0..2)
                .map(|_| (0..LAYERS).map(|l| model.call(l, 1, DType::BF16, &mut noise)).collect())
                .collect();
            // Now and then both end half-way.
            let depth = if n % 5 == 4 { 1 + noise.below(LAYERS - 1) } else { LAYERS };
            let mut results = Vec::new();
            for l in 0..depth {
                for calls in &tokens {
                    let ids = guess(&calls[(l + 1) % LAYERS], &mut noise, 90);
                    let ids = Tensor::new(ids.as_slice(), &device).expect("a guess");
                    let main = device.as_cuda_device().expect("a GPU").cuda_stream();
                    let stream = (n % 2 == 0).then(|| side.behind(&main).expect("a branch"));
                    let layer = ahead.layer(l).with_device_guess(DeviceGuess { ids: &ids, stream });
                    let Call { x, ids, weights, .. } = &calls[l];
                    results.push((&calls[l], layer.forward(x, ids, weights).expect("a step")));
                }
            }
            for (call, result) in results {
                let want = forward(&plain, call).expect("a step");
                assert!(same(&numbers(&result), &want), "{name}: token {n}, layer {}", call.layer);
            }
        }
        ahead.check().expect("slots equal the store");
        let (stats, without) = (ahead.stats(), plain.stats());
        assert_eq!((stats.accesses(), stats.hits()), (without.accesses(), without.hits()), "{name}");
        // Records in BF16 are taken whole or not at all.
        assert!(
            stats.guessed_right > 0 && (format == ExpertFormat::Bf16 || stats.prefetch_used > 0),
            "{stats}"
        );
    }
}

/// A token of which a graph holds all layers, with the branch that brings what is guessed.
#[test]
#[ignore = "needs a CUDA device"]
fn a_captured_token_brings_ahead_and_changes_nothing() {
    let device = device();
    let spec = ExpertSpec::swiglu(512, 320);
    let experts = Experts::random(spec, ExpertFormat::Int4 { group: 64 }, LAYERS, EXPERTS, 6);
    let model = Model { device: &device, hidden: 512, layers: LAYERS, experts: EXPERTS, top_k: TOP_K };
    let cuda = CudaOptions::default();
    let run = Run {
        experts: &experts,
        device: &device,
        cuda: &cuda,
        prefetch: Prefetch::StaleGate,
        slots: 16,
        right: 80,
        tokens: 0,
    };
    let (plain, ahead) = (run.cache(Prefetch::Off), run.cache(Prefetch::StaleGate));
    let mut noise = Noise(17);
    let calls: Vec<_> = (0..LAYERS).map(|l| model.call(l, 1, DType::BF16, &mut noise)).collect();
    let guesses: Vec<_> =
        (0..LAYERS).map(|_| Tensor::zeros(TOP_K, DType::U32, &device).expect("a guess")).collect();
    let rooms: Vec<_> = calls.iter().map(Call::room).collect();
    let all_layers = || {
        for (l, call) in calls.iter().enumerate() {
            let guess = DeviceGuess { ids: &guesses[l], stream: None };
            let layer = ahead.layer(l).with_device_guess(guess);
            layer.forward_to(&call.x, &call.ids, &call.weights, &rooms[l]).expect("a step");
        }
    };
    driven_token(&ahead, TOP_K, all_layers);
    let (graph, ()) = {
        let _first = ahead.begin_token(1, TOP_K).expect("a token");
        captured(&device, all_layers)
    };
    for n in 0..200 {
        let next: Vec<_> = (0..LAYERS).map(|l| model.call(l, 1, DType::BF16, &mut noise)).collect();
        for (l, (into, from)) in calls.iter().zip(&next).enumerate() {
            into.take(from);
            let ids = guess(&next[(l + 1) % LAYERS], &mut noise, run.right);
            guesses[l]
                .slice_set(&Tensor::new(ids.as_slice(), &device).expect("a guess"), 0, 0)
                .expect("a copy");
        }
        driven_token(&ahead, TOP_K, || graph.launch().expect("a launch"));
        for (l, call) in next.iter().enumerate() {
            assert!(
                same(&numbers(&rooms[l]), &forward(&plain, call).expect("a step")),
                "token {n}, layer {l}"
            );
        }
    }
    let stats = ahead.stats();
    assert!(stats.guessed_right > 0 && stats.prefetch_used > 0, "{stats}");
    println!("{} of {} guessed were right, {} used", stats.guessed_right, stats.guessed, stats.prefetch_used);
    ahead.check().expect("slots equal the store");
}
