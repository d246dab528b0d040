//! Guesses of what the GPU learns of routing: the host's to the bit, whether steps are enqueued or replayed, and no result
//! depends on them.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use comoe_core::backend::cuda::{CudaBackend, Faults, learned_bytes};
use comoe_core::backend::{Backend, DriverKind};
use comoe_core::predict::{Correlation, Predictor};
use comoe_core::store::RecordSource;
use comoe_core::{CacheOptions, CudaOptions, ExpertCache, ExpertFormat, ExpertSpec, Prefetch, Rules};

use crate::backend::{Call, cache, device, forward, numbers, options, same, with_faults};
use crate::capture::{captured, driven_token};
use crate::conformance::learned::{Routing, table_of};
use crate::conformance::{self, Experts, Make, Noise};
use crate::device::driven;

#[test]
#[ignore = "needs a CUDA device"]
fn the_gpu_learns_what_the_host_would() {
    let (shared, plain) = (device(), Device::new_cuda(0).expect("a GPU"));
    let delays = |seed| with_faults(Faults { delay_seed: Some(seed), ..Default::default() });
    let part = options(|o| o.page_lock_limit = Some(250_000));
    for (name, device, cuda, tokens) in [
        ("quiet", &shared, CudaOptions::default(), 450),
        ("plain device", &plain, CudaOptions::default(), 200),
        ("delays", &shared, delays(3), 120),
        ("partly page-locked", &shared, part, 150),
    ] {
        println!("{name}");
        let gpu = device.as_cuda_device().expect("a GPU");
        let backend = |source: Arc<dyn RecordSource>| {
            Box::new(CudaBackend::new(gpu, source, cuda.clone()).expect("a backend")) as Box<dyn Backend>
        };
        let make = |driver| Make::one(driver, &backend);
        let (host, by_device) = (make(DriverKind::Host), make(DriverKind::Device));
        let driven = (by_device, name == "partly page-locked");
        conformance::a_device_learns_what_the_host_would(device, host, driven, tokens);
        if name == "quiet" {
            conformance::what_was_learned_long_ago_is_scaled_down(device, host, by_device);
        }
    }
}

/// As many layers and experts as make tables of several waves of threads; top-8.
const LAYERS: usize = 5;
const EXPERTS: usize = 300;
const TOP_K: usize = 8;

fn caches(device: &Device) -> (Arc<Experts>, [ExpertCache; 2]) {
    let experts =
        Experts::random(ExpertSpec::swiglu(64, 32), ExpertFormat::Int4 { group: 32 }, LAYERS, EXPERTS, 6);
    let of = |prefetch, driver| {
        let options = CacheOptions { prefetch, ..driven(LAYERS * 64, TOP_K, driver) };
        cache(&experts, device, options, &CudaOptions::default(), Rules::default())
    };
    let caches = [of(Prefetch::Off, DriverKind::Device), of(Prefetch::Correlation, DriverKind::Device)];
    (experts, caches)
}

fn calls(routing: &mut Routing, device: &Device) -> Vec<Call> {
    let token = routing.token();
    let noise = &mut routing.noise;
    let call = |(layer, ids): (usize, Vec<u32>)| {
        let tensor = |values: Vec<f32>| {
            let n = values.len();
            Tensor::from_vec(values, (1, n), device).expect("a tensor")
        };
        let x = tensor(noise.floats(64, 1.0)).to_dtype(DType::BF16).expect("x");
        let weights = tensor((0..TOP_K).map(|_| noise.float().abs()).collect());
        let ids = Tensor::from_vec(ids, (1, TOP_K), device).expect("ids");
        Call { layer, x, ids, weights }
    };
    token.into_iter().enumerate().map(call).collect()
}

/// A token of which a graph holds all layers and what is learned of each.
#[test]
#[ignore = "needs a CUDA device"]
fn a_captured_token_learns_and_guesses_and_changes_nothing() {
    let device = device();
    let (_experts, [plain, learns]) = caches(&device);
    let mut routing = Routing { layers: LAYERS, experts: EXPERTS, top_k: TOP_K, noise: Noise(11) };
    let mut alone = Correlation::new(&[EXPERTS; LAYERS], 1);
    let input = calls(&mut routing, &device);
    let rooms: Vec<_> = input.iter().map(Call::room).collect();
    let layers = |n: usize| {
        for call in &input[..n] {
            let layer = learns.layer(call.layer);
            layer.forward_to(&call.x, &call.ids, &call.weights, &rooms[call.layer]).expect("a step");
        }
    };
    let observe = |alone: &mut Correlation, calls: &[Call]| {
        calls
            .iter()
            .map(|call| {
                let ids: Vec<u32> = call.ids.flatten_all().and_then(|t| t.to_vec1()).expect("ids");
                alone.observe(call.layer, &ids, TOP_K);
                let mut guess = Vec::new();
                alone.predict(call.layer + 1, &mut guess);
                guess.iter().take(TOP_K).map(|s| s.expert).collect::<Vec<_>>()
            })
            .collect::<Vec<_>>()
    };
    driven_token(&learns, TOP_K, || layers(LAYERS));
    observe(&mut alone, &input);
    // One that is given up half-way, right ahead of the capture.
    {
        let _given_up = learns.begin_token(1, TOP_K).expect("a token");
        layers(2);
    }
    observe(&mut alone, &input[..2]);
    let (graph, ()) = {
        let _first = learns.begin_token(1, TOP_K).expect("a token");
        captured(&device, || layers(LAYERS))
    };
    // Without prefetch, all went through the same steps.
    for call in input.iter().chain(&input[..2]) {
        forward(&plain, call).expect("a step");
    }
    for n in 0..400 {
        let next = calls(&mut routing, &device);
        input.iter().zip(&next).for_each(|(into, from)| into.take(from));
        driven_token(&learns, TOP_K, || graph.launch().expect("a launch"));
        for (room, call) in rooms.iter().zip(&next) {
            assert!(
                same(&numbers(room), &forward(&plain, call).expect("a step")),
                "token {n}, layer {}",
                call.layer
            );
        }
        let want = observe(&mut alone, &next);
        if n % 40 == 39 {
            let guesses = learns.with_backend(|b, _| b.device_driver()?.guesses().map_err(|e| e.to_string()));
            assert_eq!(guesses.expect("guesses")[1..], want[..LAYERS - 1], "token {n}");
        }
    }
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("alone.table");
    alone.save(&path, "m", plain.directory()).expect("a file");
    assert!(table_of(&learns) == std::fs::read(&path).expect("a file"), "the tables differ");
    let (stats, without) = (learns.stats(), plain.stats());
    assert_eq!((stats.accesses(), stats.hits()), (without.accesses(), without.hits()));
    // Layers are so short here that most guesses come too late to be brought.
    assert!(stats.prefetched > 0, "{stats}");
    println!("{} of {} guessed were right, {} used", stats.guessed_right, stats.guessed, stats.prefetch_used);
    learns.check().expect("slots equal the store");
}

/// What the table takes of the GPU is what is planned for it; `auto` takes it with the first step without a guess.
#[test]
#[ignore = "needs a CUDA device"]
fn the_table_is_counted() {
    let device = device();
    let experts = Experts::random(ExpertSpec::swiglu(64, 32), ExpertFormat::INT8, LAYERS, EXPERTS, 6);
    let table = learned_bytes(&[EXPERTS; LAYERS]);
    let mut routing = Routing { layers: LAYERS, experts: EXPERTS, top_k: TOP_K, noise: Noise(2) };
    let buffers = |prefetch| {
        let options = CacheOptions { prefetch, ..driven(LAYERS * 64, TOP_K, DriverKind::Device) };
        let cache = cache(&experts, &device, options, &CudaOptions::default(), Rules::default());
        for call in calls(&mut routing, &device) {
            forward(&cache, &call).expect("a step");
        }
        cache.with_backend(|backend, _| backend.memory().buffers)
    };
    let [gate, table_alone, auto] = [Prefetch::StaleGate, Prefetch::Correlation, Prefetch::Auto].map(buffers);
    assert_eq!((table_alone - gate, auto - gate), (table, table));
}
