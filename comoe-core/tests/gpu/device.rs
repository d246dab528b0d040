//! The device-driven driver: its tables after every step, its bits beside those of the host driver and the resident run,
//! routing that is wrong, and tables that change owners.

use std::time::Instant;

use candle_core::{DType, Device, Tensor};
use comoe_core::backend::cuda::{Faults, ResidentFormat};
use comoe_core::backend::{DeviceCounters, DeviceStep, DriverKind, Queue, RoutingFault, StepFault};
use comoe_core::policy::Lru;
use comoe_core::pool::{Pool, PoolShape};
use comoe_core::store::{RecordIndex, RecordSource};
use comoe_core::{
    Activation, CacheOptions, Capacity, CudaOptions, Error, ExpertCache, ExpertFormat, ExpertSpec,
    PolicyKind, Prefetch, Result, Rules, Scope, WeightOn,
};

use crate::backend::{
    Call, Model, backend, cache, device, forward, memory, numbers, options, same, with_faults,
};
use crate::conformance::{Experts, Noise};

pub(crate) fn driven(slots: usize, top_k: usize, driver: DriverKind) -> CacheOptions {
    CacheOptions { capacity: Capacity::Slots(slots), top_k, driver, ..CacheOptions::default() }
}

/// A call of `tokens` tokens whose experts may repeat, within a token too.
fn any_call(device: &Device, experts: &Experts, step: usize, tokens: usize, noise: &mut Noise) -> Call {
    let directory = experts.directory();
    let (layers, count) = (directory.layers().len(), directory.layers()[0].experts);
    let (hidden, top_k) = (experts.spec.hidden, 1 + noise.below(3));
    let dtype = [DType::F32, DType::BF16, DType::F16][noise.below(3)];
    let x = Tensor::from_vec(noise.floats(tokens * hidden, 1.0), (tokens, hidden), device).expect("x");
    let ids: Vec<u32> = (0..tokens * top_k).map(|_| noise.below(count) as u32).collect();
    let weights: Vec<f32> = (0..tokens * top_k).map(|_| noise.float()).collect();
    Call {
        layer: step % layers,
        x: x.to_dtype(dtype).expect("x"),
        ids: Tensor::from_vec(ids, (tokens, top_k), device).expect("ids"),
        weights: Tensor::from_vec(weights, (tokens, top_k), device).expect("weights"),
    }
}

/// Issue 4: every slot count, also fewer than one token's worth, gives the bits of the resident run and of the host
/// driver, and counts every access.
#[test]
#[ignore = "needs a CUDA device"]
fn every_slot_count_gives_the_resident_runs_bits() {
    let device = device();
    let clamped = Activation::SwigluClamped { limit: 7.0, alpha: 1.702 };
    let biased = ExpertSpec { activation: clamped, bias: true, ..ExpertSpec::swiglu(72, 40) };
    let on_input = ExpertSpec { weight_on: WeightOn::Input, ..ExpertSpec::swiglu(64, 48) };
    for (spec, format) in [
        (ExpertSpec::swiglu(64, 96), ExpertFormat::Bf16),
        (biased, ExpertFormat::INT8),
        (on_input, ExpertFormat::Int4 { group: 32 }),
    ] {
        let experts = Experts::random(spec, format, 3, 8, 11);
        let mut noise = Noise(3);
        let calls: Vec<_> = (0..30)
            .map(|step| {
                let tokens = if step % 3 == 2 { 1 + noise.below(32) } else { 1 };
                any_call(&device, &experts, step, tokens, &mut noise)
            })
            .collect();
        let run = |slots, driver, scope| {
            let options = CacheOptions { scope, ..driven(slots, 3, driver) };
            let cache = cache(&experts, &device, options, &CudaOptions::default(), Rules::default());
            let ys: Vec<_> = calls.iter().map(|c| forward(&cache, c).expect("a step")).collect();
            let stats = cache.stats();
            assert_eq!(stats.steps, 30, "{stats}");
            assert_eq!(stats.device_steps, if driver == DriverKind::Host { 0 } else { 30 }, "{stats}");
            assert_eq!(stats.hits() + stats.misses(), stats.accesses());
            assert_eq!(stats.bytes_moved, stats.misses() * experts.layout.record_bytes as u64);
            cache.check().expect("slots equal the store");
            (ys, stats)
        };
        let (want, _) = run(24, DriverKind::Host, Scope::Layer);
        for slots in 3..=24 {
            // Below one token's worth layers share their slots anyway.
            let scope = if slots % 5 == 4 { Scope::Global } else { Scope::Layer };
            let (got, stats) = run(slots, DriverKind::Device, scope);
            for (n, (got, want)) in got.iter().zip(&want).enumerate() {
                assert!(same(got, want), "{spec:?} {format}, {slots} slots ({scope}), call {n}");
            }
            if slots % 7 == 3 {
                let (host, host_stats) = run(slots, DriverKind::Host, scope);
                assert!(host.iter().zip(&want).all(|(a, b)| same(a, b)));
                assert_eq!(stats.accesses(), host_stats.accesses());
                if slots == 24 {
                    assert_eq!(stats.hits(), host_stats.hits(), "nothing ever leaves");
                }
            }
        }
    }
}

/// Issue 4: after each of 5,000 random steps the tables are those of the pure pool, and all slots equal the store.
#[test]
#[ignore = "needs a CUDA device"]
fn tables_equal_the_pools_after_each_of_5000_steps() {
    const LAYERS: usize = 3;
    const EXPERTS: usize = 12;
    const RECORDS: usize = LAYERS * EXPERTS;
    let device = device();
    let experts = Experts::random(ExpertSpec::swiglu(32, 16), ExpertFormat::INT4, LAYERS, EXPERTS, 8);
    let whole = CudaOptions::default();
    // A third of the records in page-locked memory.
    let partial = options(|o| o.page_lock_limit = Some((RECORDS * experts.layout.record_bytes / 3) as u64));
    let expanded = options(|o| o.resident = ResidentFormat::Bf16);
    let expanded = expanded.with_experts([(experts.spec, experts.layout); LAYERS]);
    let uneven = PoolShape { partitions: vec![5, 1, 12], partition_of: vec![0, 1, 2], staging: 0 };
    let roomy = PoolShape { partitions: vec![7, 9, 12], partition_of: vec![0, 1, 2], staging: 0 };
    let global = PoolShape::global(9, LAYERS, 0);
    let (lru, aged, lfru) = (PolicyKind::Lru, PolicyKind::Aged, PolicyKind::Lfru);
    for (name, cuda, shape, policy, steps) in [
        ("whole", &whole, &uneven, lru, 2_500),
        ("whole", &whole, &global, lru, 2_500),
        ("whole", &whole, &uneven, aged, 2_500),
        ("whole", &whole, &global, lfru, 2_500),
        ("partial", &partial, &roomy, lru, 2_500),
        ("partial", &partial, &roomy, aged, 2_500),
        ("expanded", &expanded, &roomy, lru, 2_500),
        ("expanded", &expanded, &roomy, lfru, 2_500),
    ] {
        let name = format!("{name}, {policy}, {:?}", shape.partitions);
        let mut backend = backend(&device, experts.clone(), cuda);
        let slot_bytes = cuda.slot_bytes(experts.directory());
        backend.allocate(shape.slots(), slot_bytes).expect("slots");
        let stored: Vec<Vec<u8>> = (0..RECORDS as u32)
            .map(|r| {
                let mut bytes = vec![0; experts.layout.record_bytes];
                experts.read(RecordIndex(r), &mut bytes).expect("a record");
                backend.slot_image(RecordIndex(r), &bytes).expect("a record").into_owned()
            })
            .collect();
        let mut pool = Pool::new(shape.clone(), RECORDS, |slots| policy.build(slots, RECORDS, 2));
        let mut counts = [DeviceCounters::default(); LAYERS];
        let (mut noise, mut surplus, mut brought) = (Noise(6), 0, 0);
        let mut have = vec![0; stored[0].len()];
        let driver = backend.device_driver().expect("a driver");
        driver.take_over(shape, &pool.residency()).expect("tables");
        let limits = driver.limits();
        for step in 0..steps {
            if step % 200 == 199 {
                // Some slots leave or come back; the driver goes on at the same addresses, with its counters.
                let (least, most) =
                    (LAYERS * if limits.only_into_slots { 3 } else { 1 }, pool.most().slots());
                pool.resize(least + noise.below(most + 1 - least));
                let unused = pool.shape().slots() as u32..most as u32;
                backend.set_unused(unused).expect("memory");
                let driver = backend.device_driver().expect("a driver");
                driver.take_over(pool.shape(), &pool.residency()).expect("tables");
            }
            let layer = noise.below(LAYERS);
            // Of up to three experts each. Without room for them all, no more than the layer has slots.
            let slots = pool.shape().partitions[shape.partition_of[layer]];
            let most = if limits.only_into_slots && slots < EXPERTS { slots / 3 } else { 32 };
            let tokens = if noise.below(2) == 0 { 1 } else { 1 + noise.below(most) };
            let call = any_call(&device, &experts, layer, tokens, &mut noise);
            let step_of_layer = DeviceStep {
                layer,
                spec: &experts.spec,
                layout: &experts.layout,
                x: &call.x,
                ids: &call.ids,
                weights: &call.weights,
                ordinal: 0,
                room: None,
                guess: None,
            };
            let driver = backend.device_driver().expect("a driver");
            driver.step(step_of_layer).expect("a step");
            if let Some(StepFault::Missing(fills)) = driver.fault(true).expect("works") {
                brought += fills.len();
                let ticket = backend.fill(Queue::Demand, &[], &fills).expect("fills");
                backend.wait(ticket).expect("filled");
                let driver = backend.device_driver().expect("a driver");
                // The step again: it changes nothing, and its result is no NaN.
                let before = driver.residency().expect("tables");
                let y = driver.step(step_of_layer).expect("a step");
                assert!(numbers(&y).iter().all(|v| v.is_finite()), "{name}, step {step}");
                assert_eq!(driver.residency().expect("tables"), before, "{name}, step {step}");
            }

            let ids: Vec<u32> = call.ids.flatten_all().and_then(|t| t.to_vec1()).expect("ids");
            let mut set: Vec<RecordIndex> = Vec::new();
            for id in ids {
                let record = RecordIndex((layer * EXPERTS) as u32 + id);
                if !set.contains(&record) {
                    set.push(record);
                }
            }
            let missed = pool.access(layer, &set);
            surplus += missed.iter().filter(|(_, slot)| slot.is_none()).count();
            let count = &mut counts[layer];
            count.steps += 1;
            count.steps_with_miss += u64::from(!missed.is_empty());
            count.accesses += set.len() as u64;
            count.hits += (set.len() - missed.len()) as u64;

            let tables = backend.device_driver().and_then(|d| d.residency().map_err(|e| e.to_string()));
            let tables = tables.expect("tables");
            assert_eq!(tables, pool.residency(), "{name}, step {step}");
            // All slots are looked at now and then, the layer's own always.
            let all = step % 16 == 0;
            for (p, held) in tables.partitions.iter().enumerate() {
                for &(record, slot) in held.iter().filter(|_| all || shape.partition_of[layer] == p) {
                    backend.read_slot(slot, &mut have).expect("a slot");
                    assert!(
                        have == stored[record.0 as usize],
                        "{name}, step {step}: {slot:?} is not {record:?}"
                    );
                }
            }
        }
        let driver = backend.device_driver().expect("a driver");
        assert_eq!(driver.counters().expect("counters"), counts);
        assert_eq!(driver.fault(true).expect("no error"), None);
        println!("{name}: {counts:?}, {surplus} read without being stored, {brought} brought by the host");
        assert_eq!(surplus > 100, !limits.only_into_slots, "{name}: sets larger than the slots occur");
        assert_eq!(brought > 100, limits.partial.is_some(), "{name}");
    }
}

/// Wrong routing changes nothing, shows as NaN, is reported once, and then all goes on.
#[test]
#[ignore = "needs a CUDA device"]
fn wrong_routing_is_reported_later_and_changes_nothing() {
    let device = device();
    let experts = Experts::random(ExpertSpec::swiglu(64, 48), ExpertFormat::INT8, 2, 8, 4);
    let model = Model { device: &device, hidden: 64, layers: 2, experts: 8, top_k: 2 };
    let new = |slots| {
        let options = driven(slots, 2, DriverKind::Device);
        cache(&experts, &device, options, &CudaOptions::default(), Rules::default())
    };
    let (resident, few) = (new(16), new(6));
    let mut noise = Noise(9);
    for round in 0..20 {
        for step in 0..6 {
            let call = model.call(step, 1 + step, DType::F32, &mut noise);
            let want = forward(&resident, &call).expect("resident");
            assert!(same(&forward(&few, &call).expect("few slots"), &want), "round {round}, step {step}");
        }
        let before = few.stats();
        let good = model.call(1, 3, DType::F32, &mut noise);
        let (spoil, token) = (round % 3, noise.below(3));
        let (mut ids, mut weights): (Vec<u32>, Vec<f32>) = (
            good.ids.flatten_all().and_then(|t| t.to_vec1()).expect("ids"),
            good.weights.flatten_all().and_then(|t| t.to_vec1()).expect("weights"),
        );
        match spoil {
            0 => weights[2 * token + 1] = f32::NAN,
            1 => weights[2 * token] = f32::INFINITY,
            _ => ids[2 * token] = 8 + round as u32,
        }
        let bad = Call {
            layer: 1,
            x: good.x.clone(),
            ids: Tensor::from_vec(ids, (3, 2), &device).expect("ids"),
            weights: Tensor::from_vec(weights, (3, 2), &device).expect("weights"),
        };
        // Asked for before anything waits: the device may not have come to it.
        let y = few.layer(1).forward(&bad.x, &bad.ids, &bad.weights).expect("not known yet");
        let y: Vec<f32> = y.flatten_all().and_then(|t| t.to_vec1()).expect("y");
        assert!(y.iter().all(|v| v.is_nan()), "{y:?}");
        // Three ways to hear of it: the next call, a flush, and a step of the host's.
        let error = match round % 4 {
            0 => forward(&few, &good).expect_err("the fault of the call before"),
            1 => few.check().map(drop).expect_err("the fault of the call before"),
            2 => forward(&few, &model.call(1, 40, DType::F32, &mut noise)).expect_err("the fault"),
            _ => few.flush().expect_err("the fault"),
        };
        match (spoil, &error) {
            (2, Error::UnknownExpert { id, available: 8 }) => {
                assert_eq!((id.layer, id.expert), (1, 8 + round));
            }
            (0 | 1, Error::BadRoutingWeight { layer: 1, token: at, value }) => {
                assert_eq!((*at, value.is_nan()), (token, spoil == 0));
            }
            other => panic!("{other:?}"),
        }
        few.flush().expect("reported once");
        assert_eq!(few.stats(), before, "the bad step left no trace");
    }
}

/// A device-driven step sets the word; those behind it do nothing until it was asked for.
#[test]
#[ignore = "needs a CUDA device"]
fn nothing_runs_behind_a_fault() {
    let device = device();
    let experts = Experts::random(ExpertSpec::swiglu(64, 48), ExpertFormat::INT4, 2, 8, 4);
    let shape = PoolShape::by_layer(8, &[8, 8], 0);
    let mut backend = backend(&device, experts.clone(), &CudaOptions::default());
    backend.allocate(8, experts.layout.record_bytes).expect("slots");
    let pool = Pool::new(shape.clone(), 16, |_| Box::new(Lru::new(16)));
    let driver = backend.device_driver().expect("a driver");
    driver.take_over(&shape, &pool.residency()).expect("tables");
    let x = Tensor::ones((2, 64), DType::F32, &device).expect("x");
    let weights = Tensor::ones((2, 2), DType::F32, &device).expect("weights");
    let mut step = |layer, ids: [u32; 4]| {
        let ids = Tensor::from_vec(ids.to_vec(), (2, 2), &device).expect("ids");
        let (spec, layout) = (&experts.spec, &experts.layout);
        let weights = &weights;
        driver
            .step(DeviceStep {
                layer,
                spec,
                layout,
                x: &x,
                ids: &ids,
                weights,
                ordinal: 0,
                room: None,
                guess: None,
            })
            .expect("a step")
    };
    step(0, [0, 1, 2, 1]);
    step(1, [3, 9, 8, 3]);
    let behind = step(0, [7, 6, 5, 4]);
    step(1, [99, 0, 0, 0]);
    let behind: Vec<f32> = behind.flatten_all().and_then(|t| t.to_vec1()).expect("y");
    assert!(behind.iter().all(|v| v.is_nan()));
    let fault = RoutingFault::UnknownExpert { layer: 1, expert: 9 };
    assert_eq!(driver.fault(true).expect("works"), Some(StepFault::Routing(fault)));
    assert_eq!(driver.fault(true).expect("works"), None);
    let held: Vec<_> = driver.residency().expect("tables").partitions;
    let records: Vec<_> = held[0].iter().map(|(r, _)| r.0).collect();
    assert_eq!((records, held[1].len()), (vec![0, 1, 2], 0));
    assert_eq!(driver.counters().expect("counters").iter().map(|c| c.steps).sum::<u64>(), 1);
}

/// Prefill between decode steps: the tables go to the host and come back, and what is resident stays known.
#[test]
#[ignore = "needs a CUDA device"]
fn tables_change_owners_and_nothing_is_lost() {
    let device = device();
    let experts = Experts::random(ExpertSpec::swiglu(128, 96), ExpertFormat::INT4, 3, 8, 5);
    let model = Model { device: &device, hidden: 128, layers: 3, experts: 8, top_k: 2 };
    let resident =
        cache(&experts, &device, driven(24, 2, DriverKind::Host), &CudaOptions::default(), Rules::default());
    for slots in [6, 9, 15, 21, 24] {
        let few = cache(
            &experts,
            &device,
            driven(slots, 2, DriverKind::Device),
            &CudaOptions::default(),
            Rules::default(),
        );
        let mut noise = Noise(slots as u64);
        for step in 0..400 {
            let tokens = if step % 7 == 3 { 33 + noise.below(20) } else { 1 + noise.below(3) };
            let call = model.call(step, tokens, DType::BF16, &mut noise);
            let want = forward(&resident, &call).expect("resident");
            assert!(same(&forward(&few, &call).expect("few"), &want), "{slots} slots, step {step}");
            // The same again: whoever has it next finds in the slots what the other left there.
            if tokens <= 3 {
                let before = few.stats();
                let again = model.wide(&call, 33);
                let other = forward(&few, &again).expect("few");
                assert!(same(&other, &forward(&resident, &again).expect("resident")));
                assert!(same(&forward(&few, &call).expect("few"), &want));
                let after = few.stats();
                if call.ids.elem_count() <= slots / 3 {
                    assert_eq!(after.misses(), before.misses(), "{slots} slots, step {step}");
                }
            }
            if step % 50 == 49 {
                few.check().expect("slots equal the store");
            }
        }
        let stats = few.stats();
        assert!(0 < stats.device_steps && stats.device_steps < stats.steps, "{stats}");
        assert_eq!(stats.hits() + stats.misses(), stats.accesses());
        few.reset_stats();
        assert_eq!((few.stats().steps, few.stats().accesses()), (0, 0));
    }
}

/// Random delays on the compute and copy queues change nothing, whoever drives.
#[test]
#[ignore = "needs a CUDA device"]
fn delays_change_nothing_across_drivers() {
    for device in [device(), Device::new_cuda(0).expect("a GPU")] {
        let experts = Experts::random(ExpertSpec::swiglu(256, 192), ExpertFormat::INT8, 3, 8, 3);
        let model = Model { device: &device, hidden: 256, layers: 3, experts: 8, top_k: 2 };
        let resident = cache(
            &experts,
            &device,
            driven(24, 2, DriverKind::Host),
            &CudaOptions::default(),
            Rules::default(),
        );
        for seed in 0..3 {
            let faults = Faults { delay_seed: Some(seed), poison: true, ..Faults::default() };
            let options = driven(7, 2, DriverKind::Device);
            let delayed = cache(&experts, &device, options, &with_faults(faults), Rules::default());
            let mut noise = Noise(seed);
            for step in 0..60 {
                let tokens = if step % 6 == 5 { 40 } else { 1 + step % 4 };
                let call = model.call(step, tokens, DType::F32, &mut noise);
                let want = forward(&resident, &call).expect("resident");
                assert!(same(&forward(&delayed, &call).expect("delayed"), &want), "seed {seed}, step {step}");
            }
        }
    }
}

/// Who drives, and why not the device, is said; `device` is refused where it cannot be had.
#[test]
#[ignore = "needs a CUDA device"]
fn what_the_device_cannot_drive_is_said() {
    let device = device();
    let experts = Experts::random(ExpertSpec::swiglu(64, 64), ExpertFormat::INT8, 2, 8, 2);
    let build = |cuda: CudaOptions, options: CacheOptions| -> Result<ExpertCache> {
        ExpertCache::builder(experts.store(), &device).cuda(cuda).options(options).build()
    };
    let whole = build(CudaOptions::default(), driven(8, 2, DriverKind::Device)).expect("a cache");
    let notes = &whole.backend_info().notes;
    assert!(notes.iter().any(|n| n.contains("driven by the device")), "{notes:?}");
    assert_eq!(whole.notes(), [] as [String; 0]);

    let expanded = options(|o| o.resident = ResidentFormat::Bf16);
    let bf16 = build(expanded, driven(8, 2, DriverKind::Device)).expect("a cache");
    assert_eq!(bf16.driver(), DriverKind::Device);

    let plain = driven(8, 2, DriverKind::Auto);
    let partial = options(|o| o.page_lock_limit = Some(20_000));
    let by_name = build(partial.clone(), driven(8, 2, DriverKind::Device)).expect("a cache");
    assert_eq!(by_name.driver(), DriverKind::Device);
    let shared = CacheOptions { scope: Scope::Global, ..driven(8, 2, DriverKind::Device) };
    let error = build(partial.clone(), shared).map(drop).expect_err("refused").to_string();
    assert!(error.contains("layers share their slots"), "{error}");
    let said = build(partial, plain.clone()).expect("a cache").notes().join("; ");
    assert!(said.contains("driven by the host") && said.contains("page-locked memory"), "{said}");
    let lfu = CacheOptions { policy: PolicyKind::Lfu, ..plain.clone() };
    let learned = CacheOptions { prefetch: Prefetch::Correlation, ..plain };
    let learned = build(CudaOptions::default(), learned).expect("a cache");
    assert_eq!((learned.driver(), learned.predictor_table()), (DriverKind::Device, Some(0)));
    let why = "policy is lfu";
    let said = build(CudaOptions::default(), lfu.clone()).expect("a cache").notes().join("; ");
    assert!(said.contains("driven by the host") && said.contains(why), "{said}");
    let asked = CacheOptions { driver: DriverKind::Device, ..lfu };
    let error = build(CudaOptions::default(), asked).map(drop).expect_err("refused").to_string();
    assert!(error.contains("use auto or host") && error.contains(why), "{error}");
}

/// Issue 4: experts expanded to BF16 in their slots, driven by the device: the bits of the host's driver, of every slot
/// count, of misses and hits.
#[test]
#[ignore = "needs a CUDA device"]
fn expanded_experts_give_the_same_bits_whoever_drives() {
    let device = device();
    let clamped = Activation::SwigluClamped { limit: 7.0, alpha: 1.702 };
    let biased = ExpertSpec { activation: clamped, bias: true, ..ExpertSpec::swiglu(72, 40) };
    let on_input = ExpertSpec { weight_on: WeightOn::Input, ..ExpertSpec::swiglu(64, 48) };
    for (spec, format) in [
        (ExpertSpec::swiglu(64, 96), ExpertFormat::INT4),
        (biased, ExpertFormat::INT8),
        (on_input, ExpertFormat::Int4 { group: 32 }),
    ] {
        let experts = Experts::random(spec, format, 3, 8, 11);
        let mut noise = Noise(3);
        let calls: Vec<_> = (0..40)
            .map(|step| {
                let tokens = if step % 3 == 2 { 1 + noise.below(40) } else { 1 };
                any_call(&device, &experts, step, tokens, &mut noise)
            })
            .collect();
        let run = |slots, driver, scope| {
            let store = ExpertCache::builder(experts.store(), &device);
            let options = CacheOptions { scope, ..driven(slots, 3, driver) };
            let cache = store.options(options).cuda(options_of_bf16()).build().expect("a cache");
            let ys: Vec<_> = calls.iter().map(|c| forward(&cache, c).expect("a step")).collect();
            cache.check().expect("slots equal the store");
            (ys, cache.stats())
        };
        let (want, _) = run(24, DriverKind::Host, Scope::Layer);
        for slots in [3, 8, 9, 12, 16, 20, 24] {
            let scope = if slots == 16 { Scope::Global } else { Scope::Layer };
            let (got, stats) = run(slots, DriverKind::Device, scope);
            assert!(stats.device_steps > 0, "{stats}");
            assert_eq!(stats.bytes_moved, stats.misses() * experts.layout.record_bytes as u64);
            for (n, (got, want)) in got.iter().zip(&want).enumerate() {
                assert!(same(got, want), "{spec:?} {format}, {slots} slots ({scope}), call {n}");
            }
        }
    }
}

fn options_of_bf16() -> CudaOptions {
    options(|o| o.resident = ResidentFormat::Bf16)
}

/// Issue 3 and 4: a step allocates nothing but its result, and that from candle's pool. Prints both drivers' times.
#[test]
#[ignore = "needs a CUDA device"]
fn a_thousand_device_driven_steps_allocate_nothing() {
    let device = device();
    let experts = Experts::random(ExpertSpec::swiglu(512, 256), ExpertFormat::INT4, 4, 16, 6);
    let model = Model { device: &device, hidden: 512, layers: 4, experts: 16, top_k: 2 };
    for driver in [DriverKind::Host, DriverKind::Device] {
        let options = driven(32, 2, driver);
        let cache = cache(&experts, &device, options, &CudaOptions::default(), Rules::default());
        let mut noise = Noise(3);
        let calls: Vec<_> = (0..200).map(|s| model.call(s, 1, DType::BF16, &mut noise)).collect();
        let run = |c: &Call| drop(cache.layer(c.layer).forward(&c.x, &c.ids, &c.weights).expect("a step"));
        calls.iter().for_each(run);
        let before = memory(&device);
        let start = Instant::now();
        for _ in 0..5 {
            calls.iter().for_each(run);
        }
        device.synchronize().expect("idle");
        let micros = start.elapsed().as_secs_f64() * 1e6 / 1000.0;
        let after = memory(&device);
        println!("{driver}: {micros:.1} us a layer step, eager; memory (free, pool) {before:?} -> {after:?}");
        println!("{}", cache.stats());
        assert_eq!(before, after);
    }
}

/// Short enough for compute-sanitizer: both drivers' steps, in F32, so that all of them run the same kernels.
#[test]
#[ignore = "needs a CUDA device"]
fn short_for_the_sanitizer() {
    let device = device();
    let experts = Experts::random(ExpertSpec::swiglu(72, 40), ExpertFormat::INT4, 2, 6, 1);
    let options = driven(5, 2, DriverKind::Device);
    // initcheck does not see batched copies: what they fill is overwritten with NaN first, which it does see.
    let poison = || with_faults(Faults { poison: true, ..Faults::default() });
    let few = cache(&experts, &device, options, &poison(), Rules::default());
    let mut noise = Noise(1);
    for step in 0..12 {
        let tokens = [1, 5, 32, 40][step % 4];
        let mut call = any_call(&device, &experts, step / 4, tokens, &mut noise);
        call.x = call.x.to_dtype(DType::F32).expect("f32");
        let y = forward(&few, &call).expect("a step");
        assert!(y.iter().all(|v| v.is_finite()), "step {step}");
    }
    few.check().expect("slots equal the store");
    let slots = few.with_backend(|_, pool| pool.states().count());
    assert_eq!(slots, 5);

    // Expanded slots, and records that only the host can bring, under the policy with counts.
    for resident in [ResidentFormat::Bf16, ResidentFormat::AsStored] {
        let mut cuda = poison();
        cuda.resident = resident;
        cuda.page_lock_limit = (resident == ResidentFormat::AsStored).then_some(4_000);
        let options = CacheOptions { policy: PolicyKind::Aged, ..driven(6, 2, DriverKind::Device) };
        let few = ExpertCache::builder(experts.store(), &device)
            .options(options)
            .cuda(cuda)
            .build()
            .expect("a cache");
        let model = Model { device: &device, hidden: 72, layers: 2, experts: 6, top_k: 2 };
        for _ in 0..6 {
            let calls: Vec<_> = (0..2).map(|layer| model.call(layer, 1, DType::F32, &mut noise)).collect();
            let token = few
                .run_token(1, 2, || calls.iter().map(|call| forward(&few, call)).collect::<Result<Vec<_>>>());
            assert!(token.expect("a token").iter().flatten().all(|v| v.is_finite()));
        }
        few.check().expect("slots equal the store");
    }
}
