//! Prompts through the ring: the resident run's bits for every pool and ring, under poison and delays, and a cache that
//! is warm afterwards.

use candle_core::{DType, Device};
use comoe_core::backend::cuda::{Faults, ResidentFormat};
use comoe_core::{CacheOptions, Capacity, CudaOptions, ExpertCache, ExpertFormat, ExpertSpec, Rules};

use crate::backend::{Call, Model, cache, device, forward, options, same};
use crate::conformance::{Experts, Noise};

const LAYERS: usize = 4;
const EXPERTS: usize = 16;

fn model(device: &Device) -> Model<'_> {
    Model { device, hidden: 256, layers: LAYERS, experts: EXPERTS, top_k: 4 }
}

/// A prompt of two chunks and a few tokens behind it, which a device may drive.
fn calls(device: &Device, dtype: DType, seed: u64) -> Vec<Call> {
    let mut noise = Noise(seed);
    let steps = [100, 257].into_iter().chain([1; 6]);
    let layers = steps.flat_map(|tokens| (0..LAYERS).map(move |layer| (layer, tokens)));
    layers.map(|(layer, tokens)| model(device).call(layer, tokens, dtype, &mut noise)).collect()
}

fn run(cache: &ExpertCache, calls: &[Call]) -> Vec<Vec<f32>> {
    calls.iter().map(|call| forward(cache, call).expect("a step")).collect()
}

fn with_ring(slots: usize, ring: u64) -> CacheOptions {
    CacheOptions { capacity: Capacity::Slots(slots), top_k: 4, ring: Some(ring), ..CacheOptions::default() }
}

#[test]
#[ignore = "needs a CUDA device"]
fn prompts_give_the_same_bits_for_every_pool_and_ring() {
    let device = device();
    let spec = ExpertSpec::swiglu(256, 160);
    for (n, format) in [ExpertFormat::INT4, ExpertFormat::INT8, ExpertFormat::Bf16].into_iter().enumerate() {
        let experts = Experts::random(spec, format, LAYERS, EXPERTS, 31);
        let record = experts.layout.record_bytes as u64;
        for dtype in [DType::BF16, DType::F32] {
            let calls = calls(&device, dtype, 7);
            let resident =
                cache(&experts, &device, CacheOptions::default(), &CudaOptions::default(), Rules::default());
            let want = run(&resident, &calls);
            for (i, slots) in [4, 16, 23, 40, 63].into_iter().enumerate() {
                for (j, ring) in [0, 1, 3, 16, 40].into_iter().enumerate() {
                    let cuda = options(|o| {
                        o.faults = Faults {
                            poison: true,
                            delay_seed: (j == (i + n) % 5).then_some(i as u64),
                            ..Faults::default()
                        };
                        // Now and then some records pass through the bounce buffer.
                        o.page_lock_limit = ((i + j) % 4 == 3).then_some(30 * record);
                    });
                    let cache =
                        cache(&experts, &device, with_ring(slots, ring * record), &cuda, Rules::default());
                    for (step, (got, want)) in run(&cache, &calls).iter().zip(&want).enumerate() {
                        assert!(
                            same(got, want),
                            "{format} {dtype:?}, {slots} slots, ring of {ring}, step {step}"
                        );
                    }
                    cache.check().expect("slots equal the store");
                    let stats = cache.stats();
                    assert_eq!(stats.ring_slots as u64, ring, "{stats}");
                    assert_eq!(stats.prefetched > 0, ring > 0, "{stats}");
                    assert_eq!(stats.records_moved + stats.late(), stats.misses(), "{stats}");
                }
            }
        }
    }
}

/// With records expanded on load the ring holds expanded ones.
#[test]
#[ignore = "needs a CUDA device"]
fn prompts_of_expanded_records_pass_the_ring_too() {
    let device = device();
    let experts = Experts::random(ExpertSpec::swiglu(256, 160), ExpertFormat::INT4, LAYERS, EXPERTS, 32);
    let calls = calls(&device, DType::BF16, 9);
    let expanded = |capacity, ring| {
        let cuda = options(|o| {
            o.resident = ResidentFormat::Bf16;
            o.faults.poison = true;
        });
        let options = CacheOptions { capacity, top_k: 4, ring, ..CacheOptions::default() };
        ExpertCache::builder(experts.store(), &device).cuda(cuda).options(options).build().expect("a cache")
    };
    let want = run(&expanded(Capacity::All, None), &calls);
    for ring in [Some(3 * 2 * 256 * 160), None] {
        let few = expanded(Capacity::Slots(20), ring);
        assert!(run(&few, &calls).iter().zip(&want).all(|(got, want)| same(got, want)), "{ring:?}");
        few.check().expect("slots equal the expanded store");
    }
}

/// The default ring has room for a layer; a cold cache fills up with what a prompt uses, and a prompt said twice finds
/// what it used last.
#[test]
#[ignore = "needs a CUDA device"]
fn the_cache_is_warm_after_a_prompt() {
    let device = device();
    let experts = Experts::random(ExpertSpec::swiglu(256, 160), ExpertFormat::INT4, LAYERS, EXPERTS, 33);
    let model = model(&device);
    let options = CacheOptions { capacity: Capacity::Slots(6 * LAYERS), top_k: 4, ..CacheOptions::default() };
    let cache = cache(&experts, &device, options, &CudaOptions::default(), Rules::default());
    let mut noise = Noise(3);
    let prompt: Vec<Call> = (0..LAYERS).map(|l| model.call(l, 64, DType::BF16, &mut noise)).collect();
    run(&cache, &prompt);
    let stats = cache.stats();
    assert_eq!((stats.ring_slots, stats.slots), (EXPERTS, 6 * LAYERS));
    let moved = stats.records_moved + stats.prefetched;
    assert_eq!(moved as usize, LAYERS * EXPERTS, "every record came once: {stats}");

    // The last token's experts are in their slots.
    for call in &prompt {
        let last = |t: &candle_core::Tensor| t.narrow(0, 63, 1).and_then(|t| t.contiguous()).expect("a row");
        let call =
            Call { layer: call.layer, x: last(&call.x), ids: last(&call.ids), weights: last(&call.weights) };
        let before = cache.stats();
        forward(&cache, &call).expect("a token");
        let after = cache.stats();
        assert_eq!(after.misses(), before.misses(), "layer {}", call.layer);
    }
}
