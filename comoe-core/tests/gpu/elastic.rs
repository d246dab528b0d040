//! Slots that come and go on a GPU: the memory goes back to the driver, addresses stay, and what is measured says so.

use std::time::Instant;

use candle_core::{DType, Device};
use comoe_core::backend::cuda::Faults;
use comoe_core::backend::{DriverKind, SlotId};
use comoe_core::{
    CacheOptions, Capacity, CudaOptions, Error, ExpertCache, ExpertFormat, ExpertSpec, Rules, cuda_memory,
};

use crate::backend::{Model, cache, device, forward, same, with_faults};
use crate::conformance::{Experts, Noise};

const MIB: u64 = 1 << 20;
const LAYERS: usize = 4;
const EXPERTS: usize = 32;
const TOP_K: usize = 4;

fn free(device: &Device) -> u64 {
    device.synchronize().expect("works");
    cuda_memory(device).expect("memory").0
}

/// Records of 6 MiB, 128 of them: 768 MiB when all have a slot.
fn large() -> std::sync::Arc<Experts> {
    Experts::random(ExpertSpec::swiglu(1024, 1024), ExpertFormat::Bf16, LAYERS, EXPERTS, 5)
}

fn build(experts: &std::sync::Arc<Experts>, device: &Device, slots: usize) -> ExpertCache {
    let options = CacheOptions {
        capacity: Capacity::Slots(slots),
        top_k: TOP_K,
        driver: DriverKind::Device,
        ring: Some(0),
        ..CacheOptions::default()
    };
    cache(experts, device, options, &CudaOptions::default(), Rules::default())
}

#[test]
#[ignore = "needs a CUDA device"]
fn memory_goes_back_to_the_driver_and_comes_from_there() {
    let device = device();
    let experts = large();
    let slot = experts.layout.record_bytes as u64;
    let started = Instant::now();
    let cache = build(&experts, &device, LAYERS * EXPERTS);
    let built = started.elapsed();
    let resident = build(&experts, &device, LAYERS * EXPERTS);
    let model = Model { device: &device, hidden: 1024, layers: LAYERS, experts: EXPERTS, top_k: TOP_K };
    let mut noise = Noise(2);
    let mut walk = |what: &str| {
        for step in 0..40 {
            let call = model.call(step, 1 + step % 3, DType::BF16, &mut noise);
            let want = forward(&resident, &call).expect("resident");
            assert!(same(&forward(&cache, &call).expect("a step"), &want), "{what}, step {step}");
        }
    };
    walk("all");
    let (before, whole) = (free(&device), cache.slots_in_force());
    let started = Instant::now();
    let half = cache.resize(LAYERS * EXPERTS / 2).expect("half of them");
    let shrinking = started.elapsed();
    let came = free(&device) - before;
    println!(
        "built in {built:.0?}; 64 of 128 slots of {slot} bytes given up in {shrinking:.1?}: {} MiB in the books, {} MiB free",
        (whole.bytes - half.bytes) / MIB,
        came / MIB
    );
    assert_eq!((half.slots, whole.bytes - half.bytes), (64, came), "what the books say is free");
    assert!(came + 4 * MIB >= 64 * slot, "all but the pieces at the ends");
    walk("half");
    let least = cache.resize(0).expect("as few as there may be");
    assert_eq!(least.slots, LAYERS * TOP_K);
    walk("least");
    // Half of what is there at first is lent, and then the rest.
    cache.resize(usize::MAX).expect("all of them");
    let lent = cache.lend(whole.bytes / 2).expect("half");
    assert!(free(&device) - before >= whole.bytes / 2 && lent.slots <= 64, "{lent:?}");
    walk("lent");
    let refused = cache.lend(whole.bytes / 2);
    assert!(matches!(refused, Err(Error::NothingToLend { least: 16, .. })), "{refused:?}");
    let started = Instant::now();
    assert_eq!(cache.take_back(u64::MAX).expect("all of them"), whole);
    println!("{} slots came back in {:.1?}", 128 - lent.slots, started.elapsed());
    assert_eq!(free(&device), before);
    walk("back");
    let stats = cache.stats();
    assert_eq!((stats.least_slots, stats.most_slots, stats.resizes), (16, 128, 5), "{stats}");
    assert_eq!(stats.device_steps, stats.steps);
    cache.check().expect("slots equal the store");
}

/// Slots that find no memory when they are to come back stay away, and the others go on.
#[test]
#[ignore = "needs a CUDA device"]
fn slots_come_back_as_far_as_there_is_memory() {
    let device = device();
    let experts = large();
    let cache = build(&experts, &device, LAYERS * EXPERTS);
    let whole = cache.slots_in_force();
    cache.resize(16).expect("a few");
    // Somebody else takes the memory, all but about 200 MiB.
    let taken = free(&device) - 200 * MIB;
    // SAFETY: a context is bound by the calls above; freed below.
    let held = unsafe { cudarc::driver::result::malloc_sync(taken as usize) }.expect("memory");
    let some = cache.resize(usize::MAX).expect("as many as fit");
    println!("{} of 128 slots came back into 200 MiB", some.slots);
    assert!((17..60).contains(&some.slots), "{some:?}");
    let model = Model { device: &device, hidden: 1024, layers: LAYERS, experts: EXPERTS, top_k: TOP_K };
    let mut noise = Noise(2);
    for step in 0..20 {
        let y = forward(&cache, &model.call(step, 1, DType::F32, &mut noise)).expect("a step");
        assert!(y.iter().all(|v| v.is_finite()));
    }
    cache.check().expect("slots equal the store");
    // SAFETY: allocated above, used by nobody.
    unsafe { cudarc::driver::result::free_sync(held) }.expect("freed");
    assert_eq!(cache.resize(usize::MAX).expect("all"), whole);
    cache.with_backend(|backend, _| {
        backend.synchronize().expect("works");
        backend.write_slot(SlotId(127), &[1; 4096]).expect("it has memory");
    });
}

/// A driver that cannot map memory: the pool is what it was built with, and says so.
#[test]
#[ignore = "needs a CUDA device"]
fn a_driver_that_cannot_map_memory_has_a_fixed_pool() {
    let device = device();
    let experts = Experts::random(ExpertSpec::swiglu(256, 128), ExpertFormat::INT4, LAYERS, EXPERTS, 5);
    let cuda = with_faults(Faults { no_mapping: true, ..Faults::default() });
    let of = |slots| {
        let capacity = Capacity::Slots(slots);
        let options =
            CacheOptions { capacity, top_k: TOP_K, driver: DriverKind::Host, ..CacheOptions::default() };
        cache(&experts, &device, options, &cuda, Rules::default())
    };
    let (few, resident) = (of(20), of(LAYERS * EXPERTS));
    let model = Model { device: &device, hidden: 256, layers: LAYERS, experts: EXPERTS, top_k: TOP_K };
    let mut noise = Noise(6);
    for step in 0..60 {
        let call = model.call(step, [1, 1, 3, 40][step % 4], DType::BF16, &mut noise);
        let want = forward(&resident, &call).expect("resident");
        assert!(same(&forward(&few, &call).expect("a step"), &want), "step {step}");
    }
    few.check().expect("slots equal the store");
    assert!(matches!(few.resize(18), Err(Error::FixedSlots { .. })));
    assert_eq!(few.slots_in_force().slots, 20);
}

/// A prompt that finds no memory for its activations gets it from the slots.
#[test]
#[ignore = "needs a CUDA device"]
fn slots_make_room_for_a_step_that_is_short_of_memory() {
    let device = device();
    let experts = large();
    let (cache, resident) =
        (build(&experts, &device, LAYERS * EXPERTS), build(&experts, &device, LAYERS * EXPERTS));
    let model = Model { device: &device, hidden: 1024, layers: LAYERS, experts: EXPERTS, top_k: TOP_K };
    let mut noise = Noise(4);
    let call = model.call(0, 2048, DType::BF16, &mut noise);
    let want = forward(&resident, &call).expect("resident");
    let first = forward(&cache, &model.call(0, 1, DType::BF16, &mut noise)).expect("a step");
    drop(first);
    // About 48 MiB of activations; results are in candle's pool, which has room for them from here on.
    let taken = free(&device) - 20 * MIB;
    // SAFETY: a context is bound by the calls above; freed below.
    let held = unsafe { cudarc::driver::result::malloc_sync(taken as usize) }.expect("memory");
    let have = forward(&cache, &call).expect("slots make room");
    assert!(same(&have, &want));
    let stats = cache.stats();
    println!("{} of 128 slots left, {} free before", stats.slots, 20 * MIB);
    assert!(stats.resizes >= 1 && stats.slots < 128 && stats.slots > 100, "{stats}");
    cache.check().expect("slots equal the store");
    // SAFETY: allocated above, used by nobody.
    unsafe { cudarc::driver::result::free_sync(held) }.expect("freed");
}
