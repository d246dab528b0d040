//! The conformance suite on the backends that need no device.

mod conformance;

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use comoe_core::backend::cpu::CpuBackend;
use comoe_core::backend::sim::SimBackend;
use comoe_core::backend::{Backend, DeviceGuess, DriverKind, Fill, Queue, SlotId, WorkItem};
use comoe_core::store::{RecordIndex, RecordSource};
use comoe_core::{
    CacheOptions, Capacity, Error, ExpertCache, ExpertFormat, ExpertSpec, PeerAccess, PolicyKind, Prefetch,
    RecordCache, Scope,
};

use crate::conformance::{Experts, Make, Several};

#[test]
fn cpu() {
    let backend = &|source| Box::new(CpuBackend::new(source)) as Box<dyn Backend>;
    conformance::all(&Device::Cpu, Make::one(DriverKind::Auto, backend));
}

#[test]
fn simulated() {
    for seed in 0..5 {
        let backend = &move |source| Box::new(SimBackend::new(source, seed)) as Box<dyn Backend>;
        let driver = if seed % 2 == 0 { DriverKind::Auto } else { DriverKind::Host };
        conformance::all(&Device::Cpu, Make::one(driver, backend));
    }
}

#[test]
fn several_simulated_devices() {
    for (seed, count) in [(0, 2), (1, 2), (2, 3), (3, 2), (4, 4), (5, 3)] {
        let backend = &move |source| Box::new(SimBackend::new(source, seed)) as Box<dyn Backend>;
        let nth = &move |n: usize, source| {
            Box::new(SimBackend::new(source, 100 * seed + n as u64)) as Box<dyn Backend>
        };
        let devices = vec![Device::Cpu; count];
        let several = Several { devices: &devices, peer_access: PeerAccess::Auto, backend: nth };
        let make = Make::one(DriverKind::Host, backend);
        match seed {
            0..3 => conformance::several_devices(make, several),
            // What matters there are other orders.
            _ => conformance::several_devices_in_brief(make, several),
        }
    }
}

#[test]
fn several_pools_on_the_cpu() {
    let backend = &|source| Box::new(CpuBackend::new(source)) as Box<dyn Backend>;
    let nth = &|_, source| Box::new(CpuBackend::new(source)) as Box<dyn Backend>;
    let several =
        Several { devices: &[Device::Cpu, Device::Cpu], peer_access: PeerAccess::Off, backend: nth };
    conformance::several_devices(Make::one(DriverKind::Auto, backend), several);
}

/// A device that cannot be used, or that runs out of memory, has less or nothing, and that is said.
#[test]
fn a_device_that_fails_shrinks_its_share() {
    let experts = Experts::random(ExpertSpec::swiglu(16, 16), ExpertFormat::INT8, 2, 8, 1);
    let build = |capacities: &[Capacity], fails: &dyn Fn(usize, usize) -> Option<Error>| {
        ExpertCache::builder(experts.store(), &[Device::Cpu, Device::Cpu]).capacities(capacities).build_with(
            |number, source| match fails(number, source.directory().len()) {
                Some(error) => Err(error),
                None => Ok(Box::new(CpuBackend::new(source))),
            },
        )
    };
    let slots =
        |cache: &ExpertCache| cache.stats().devices.iter().map(|d| (d.slots, d.records)).collect::<Vec<_>>();
    let plain = build(&[Capacity::All], &|_, _| None).unwrap();
    assert_eq!((slots(&plain), plain.notes().len()), (vec![(8, 8), (8, 8)], 0));

    let full = |device: usize, records| {
        let (asked, free, total) = (9, 1, 2);
        let what = "slots".to_owned();
        let error = Error::OutOfDeviceMemory { device: "gpu".to_owned(), what, asked, free, total };
        (device == 1 && records > 3).then_some(error)
    };
    let shrunk = build(&[Capacity::All], &full).unwrap();
    assert_eq!(slots(&shrunk), [(13, 13), (3, 3)]);
    assert!(
        shrunk.notes().iter().all(|n| n.contains("device 1") && n.contains("slots instead of")),
        "{:?}",
        shrunk.notes()
    );

    let broken = |device, _| {
        let reason = "it fell off the bus".to_owned();
        (device == 1).then(|| Error::Device { asked: "cuda:1".to_owned(), reason })
    };
    let left = build(&[Capacity::Slots(4)], &broken).unwrap();
    assert_eq!(slots(&left), [(4, 16)]);
    assert!(left.notes()[0].contains("device 1") && left.notes()[0].contains("bus"), "{:?}", left.notes());
    let first = |device: usize, _| {
        let reason = "none".to_owned();
        (device == 0).then(|| Error::Device { asked: "cuda:0".to_owned(), reason })
    };
    assert!(
        matches!(build(&[Capacity::All], &first), Err(Error::Device { .. })),
        "the caller's own must work"
    );
    let none = ExpertCache::builder(experts.store(), &[] as &[Device]).build().map(drop).unwrap_err();
    assert!(none.to_string().contains("at least one"), "{none}");
    let driven =
        ExpertCache::builder(experts.store(), &[Device::Cpu, Device::Cpu]).driver(DriverKind::Device);
    let error = driven.build().map(drop).unwrap_err().to_string();
    assert!(error.contains("use auto or host"), "{error}");
}

#[test]
fn simulated_pages_are_locked_while_tokens_are_served() {
    for (seed, driver) in [(0, DriverKind::Auto), (1, DriverKind::Device)] {
        let whole = &move |source| Box::new(SimBackend::new(source, seed)) as Box<dyn Backend>;
        let later = &move |source| {
            Box::new(SimBackend::new(source, seed).locking_later(1, u32::MAX)) as Box<dyn Backend>
        };
        conformance::tokens_are_served_while_pages_are_locked(
            &Device::Cpu,
            Make::one(DriverKind::Device, whole),
            Make::one(driver, later),
            &|_| {},
        );
    }
}

/// Where page-locking ends before all is locked, everything goes on as where it was so from the start; a record that cannot
/// be read stops the cache by its name.
#[test]
fn page_locking_that_ends_early_leaves_the_rest_to_the_host() {
    let experts = Experts::random(ExpertSpec::swiglu(16, 16), ExpertFormat::INT8, 2, 4, 3);
    let options = CacheOptions { capacity: Capacity::Slots(6), top_k: 2, ..CacheOptions::default() };
    let options = CacheOptions { policy: PolicyKind::Lru, ..options };
    let cache = |driver, backend: SimBackend| {
        let options = CacheOptions { driver, ..options.clone() };
        let builder = ExpertCache::builder(experts.store(), &Device::Cpu).options(options);
        builder.backend(Box::new(backend)).build().unwrap()
    };
    let token = |cache: &ExpertCache, first: u32| {
        cache.run_token(1, 2, || {
            let x = Tensor::ones((1, 16), DType::F32, &Device::Cpu)?;
            let ids = Tensor::new(&[[first % 4, (first + 1) % 4]], &Device::Cpu)?;
            let weights = Tensor::new(&[[0.5f32, 0.5]], &Device::Cpu)?;
            let x = cache.layer(0).forward(&x, &ids, &weights)?;
            cache.layer(1).forward(&x, &ids, &weights)?.flatten_all()?.to_vec1::<f32>().map_err(Error::from)
        })
    };
    let whole = cache(DriverKind::Device, SimBackend::new(experts.clone(), 1));
    for asked in [DriverKind::Auto, DriverKind::Device] {
        let early = cache(asked, SimBackend::new(experts.clone(), 1).locking_later(1, 5));
        for n in 0..12 {
            assert_eq!(token(&early, n).unwrap(), token(&whole, n).unwrap(), "{asked}, token {n}");
        }
        let ended = early.page_locking().unwrap();
        assert!(ended.took.is_some() && ended.locked < ended.total, "{ended:?}");
        assert_eq!(ended.why_partial.as_deref(), Some("the simulation ends it"));
        let by_name = asked == DriverKind::Device;
        assert_eq!(early.driver() == DriverKind::Device, by_name);
        assert_eq!(early.drives_tokens(1, 2), by_name);
        early.check().unwrap();

        let broken = SimBackend::new(experts.clone(), 1).locking_later(2, u32::MAX);
        let broken = cache(asked, broken.locking_fails_at(RecordIndex(6)));
        let said = (0..8).find_map(|n| token(&broken, n).err()).unwrap().to_string();
        assert!(said.contains("layer 1 expert 2") && said.contains("the simulated disk broke"), "{said}");
        assert!(matches!(token(&broken, 0), Err(Error::Stopped { .. })));
    }
}

#[test]
fn simulated_tokens_run_again() {
    for seed in 0..4 {
        let whole = &move |source| Box::new(SimBackend::new(source, seed)) as Box<dyn Backend>;
        let n = 2 + seed as u32;
        let partial =
            &move |source| Box::new(SimBackend::new(source, seed).leaving_to_the_host(n)) as Box<dyn Backend>;
        let make = |backend| Make::one(DriverKind::Device, backend);
        conformance::tokens_run_again_until_all_is_there(&Device::Cpu, make(whole), make(partial));
    }
}

#[test]
fn a_simulated_device_learns_what_the_host_would() {
    for seed in 0..2 {
        let whole = &move |source| Box::new(SimBackend::new(source, seed)) as Box<dyn Backend>;
        let partial =
            &move |source| Box::new(SimBackend::new(source, seed).leaving_to_the_host(3)) as Box<dyn Backend>;
        let host = Make::one(DriverKind::Host, whole);
        let device = |backend| Make::one(DriverKind::Device, backend);
        for device in [(device(whole), false), (device(partial), true)] {
            conformance::a_device_learns_what_the_host_would(&Device::Cpu, host, device, 300);
        }
        let device = Make::one(DriverKind::Device, whole);
        conformance::what_was_learned_long_ago_is_scaled_down(&Device::Cpu, host, device);
    }
}

/// `auto` guesses by a table where the first step of one token comes without a guess, and by the caller's word for good
/// where it comes with one.
#[test]
fn who_guesses_is_settled_with_the_first_step() {
    let experts = Experts::random(ExpertSpec::swiglu(16, 16), ExpertFormat::INT8, 3, 8, 3);
    let tensor = |ids: [u32; 2]| Tensor::new(&[ids], &Device::Cpu).unwrap();
    let (x, weights) = (
        Tensor::ones((1, 16), DType::F32, &Device::Cpu).unwrap(),
        Tensor::new(&[[0.5f32, 0.5]], &Device::Cpu).unwrap(),
    );
    for hinted in [false, true] {
        let cache = ExpertCache::builder(experts.store(), &Device::Cpu)
            .options(CacheOptions { capacity: Capacity::Slots(9), top_k: 2, ..CacheOptions::default() })
            .prefetch(Prefetch::Auto)
            .driver(DriverKind::Device)
            .backend(Box::new(SimBackend::new(experts.clone(), 1)))
            .build()
            .unwrap();
        assert_eq!(cache.predictor_table(), Some(0));
        for token in 0..60u32 {
            for layer in 0..3u32 {
                let ids = |layer: u32| [(token * 3 + layer) % 8, (token * 3 + layer + 4) % 8];
                let (now, next) = (tensor(ids(layer)), tensor(ids(layer + 1)));
                let step = cache.layer(layer as usize);
                assert!(step.wants_device_guess(1, 2) == (layer < 2));
                let step = if hinted { step.with_device_guess(guess_of(&next)) } else { step };
                step.forward(&x, &now, &weights).unwrap();
            }
        }
        let stats = cache.stats();
        assert_eq!(cache.predictor_table(), (!hinted).then_some(60));
        assert!(stats.guessed > 60 && stats.guessed_right * 10 > stats.guessed * 8, "{hinted}: {stats}");
        assert!(stats.prefetch_judged && stats.bytes_moved > 0, "{stats}");
    }
}

fn guess_of(ids: &Tensor) -> DeviceGuess<'_> {
    DeviceGuess {
        ids,
        #[cfg(feature = "cuda")]
        stream: None,
    }
}

#[test]
fn simulated_with_records_left_to_the_host() {
    let backend = &|source| Box::new(SimBackend::new(source, 1).leaving_to_the_host(2)) as Box<dyn Backend>;
    conformance::all(&Device::Cpu, Make::one(DriverKind::Auto, backend));
}

/// A record that cannot be brought for a device-driven token is named, and stops the cache.
#[test]
fn a_fill_that_fails_in_a_token_names_the_expert() {
    let experts = Experts::random(ExpertSpec::swiglu(16, 16), ExpertFormat::INT8, 2, 4, 1);
    let backend = SimBackend::new(experts.clone(), 1).leaving_to_the_host(1).failing_at(RecordIndex(6));
    let cache = ExpertCache::builder(experts.store(), &Device::Cpu)
        .options(CacheOptions { capacity: Capacity::Slots(4), top_k: 2, ..CacheOptions::default() })
        .driver(DriverKind::Device)
        .backend(Box::new(backend))
        .build()
        .unwrap();
    let tensor = |dims, dtype| Tensor::ones(dims, dtype, &Device::Cpu).unwrap();
    let (x, weights) = (tensor((1, 16), DType::F32), tensor((1, 2), DType::F32));
    let token = |experts: [u32; 2]| {
        cache.run_token(1, 2, || {
            let ids = Tensor::from_vec(experts.to_vec(), (1, 2), &Device::Cpu)?;
            let y = cache.layer(0).forward(&x, &ids, &weights)?;
            cache.layer(1).forward(&y, &ids, &weights)
        })
    };
    token([0, 3]).unwrap();
    let error = token([1, 2]).unwrap_err();
    assert!(matches!(&error, Error::FillFailed { id, .. } if (id.layer, id.expert) == (1, 2)), "{error}");
    assert!(matches!(token([0, 3]), Err(Error::Stopped { .. })));
}

/// Where records are left to the host, the device drives only where it was asked for and tokens can be run again.
#[test]
fn records_that_only_the_host_can_bring_ask_for_slots_by_layer() {
    let experts = Experts::random(ExpertSpec::swiglu(16, 16), ExpertFormat::INT8, 2, 4, 1);
    let build = |driver, slots, scope| {
        let backend = SimBackend::new(experts.clone(), 1).leaving_to_the_host(3);
        let options = CacheOptions { capacity: Capacity::Slots(slots), top_k: 2, ..CacheOptions::default() };
        let builder = ExpertCache::builder(experts.store(), &Device::Cpu).options(options).scope(scope);
        builder.driver(driver).backend(Box::new(backend)).build()
    };
    assert_eq!(build(DriverKind::Device, 4, Scope::Layer).unwrap().driver(), DriverKind::Device);
    assert_eq!(build(DriverKind::Auto, 4, Scope::Layer).unwrap().driver(), DriverKind::Host);
    for (slots, scope) in [(4, Scope::Global), (3, Scope::Layer)] {
        let error = build(DriverKind::Device, slots, scope).map(drop).unwrap_err().to_string();
        assert!(error.contains("layers share their slots") && error.contains("use auto or host"), "{error}");
    }
}

/// The simulation reports a slot that is used after its memory was given up, and an early giving up.
#[test]
fn slots_without_memory_are_not_used() {
    let experts = Experts::random(ExpertSpec::swiglu(16, 16), ExpertFormat::INT8, 1, 8, 1);
    let fresh = || {
        let mut backend = SimBackend::new(experts.clone(), 1);
        backend.allocate(8, experts.layout.record_bytes).unwrap();
        backend
    };
    let fill = |slot| Fill { record: RecordIndex(3), slot: SlotId(slot) };
    let mut backend = fresh();
    backend.fill(Queue::Demand, &[], &[fill(6)]).unwrap();
    let early = backend.set_unused(4..8).unwrap_err().to_string();
    assert!(early.contains("before every queue was empty"), "{early}");
    let mut backend = fresh();
    backend.fill(Queue::Demand, &[], &[fill(6)]).unwrap();
    backend.synchronize().unwrap();
    let whole = backend.chunks().unwrap().slab_bytes() as u64;
    assert!(backend.set_unused(4..8).unwrap() < whole);
    let refused = backend.fill(Queue::Demand, &[], &[fill(6)]).unwrap_err().to_string();
    assert!(refused.contains("whose memory was given up") && refused.contains("expert 3"), "{refused}");
    let item = WorkItem { record: RecordIndex(3), slot: SlotId(6), assignments: vec![0] };
    assert!(backend.run(std::slice::from_ref(&item)).unwrap_err().to_string().contains("given up"));
    assert_eq!(backend.set_unused(0..0).unwrap(), whole);
    let lost = backend.run(&[item]).unwrap_err().to_string();
    assert!(lost.contains("another record"), "what it held is gone: {lost}");
    let ticket = backend.fill(Queue::Demand, &[], &[fill(6)]).unwrap();
    backend.wait(ticket).unwrap();
}

/// A step that finds no memory for one buffer or for several gets it from the slots; more than they have is told in the
/// device's own words, and stops nothing.
#[test]
fn slots_make_room_for_a_step_that_is_short_of_memory() {
    // Records of 1.6 MB: slots give up 4 MiB more than is missing.
    let experts = Experts::random(ExpertSpec::swiglu(512, 512), ExpertFormat::Bf16, 1, 16, 1);
    let slot = experts.layout.record_bytes as u64;
    let driven = |memory, driver| {
        let backend = SimBackend::new(experts.clone(), 1).with_memory(memory);
        let options = CacheOptions { driver, top_k: 2, ..CacheOptions::default() };
        let builder = ExpertCache::builder(experts.store(), &Device::Cpu).options(options);
        builder.backend(Box::new(backend)).build().unwrap()
    };
    let step = |cache: &ExpertCache, tokens: usize| {
        let x = Tensor::ones((tokens, 512), DType::F32, &Device::Cpu).unwrap();
        let ids = Tensor::from_vec([3u32, 9].repeat(tokens), (tokens, 2), &Device::Cpu).unwrap();
        let weights = Tensor::ones((tokens, 2), DType::F32, &Device::Cpu).unwrap();
        cache.layer(0).forward(&x, &ids, &weights).map(|y| y.flatten_all().unwrap().to_vec1::<f32>().unwrap())
    };
    let cache = |memory| driven(memory, DriverKind::Host);
    let (roomy, short) = (cache(u64::MAX), cache(16 * slot + 100_000));
    assert_eq!(step(&short, 8).unwrap(), step(&roomy, 8).unwrap());
    assert_eq!(short.stats().resizes, 0);
    // 64 rows of 2 KB and twice that, where 100 KB are free.
    assert_eq!(step(&short, 64).unwrap(), step(&roomy, 64).unwrap());
    let force = short.slots_in_force();
    assert!((12..15).contains(&force.slots) && force.lent > 4 << 20, "{force:?}");
    // Growing back finds the memory taken.
    let slots = short.take_back(u64::MAX).unwrap().slots;
    assert!((12..16).contains(&slots), "{slots}");
    assert_eq!(roomy.stats().resizes, 0);
    let error = step(&short, 8000).unwrap_err();
    assert!(matches!(error, Error::OutOfDeviceMemory { .. }), "{error}");
    // Nothing has changed: what fits goes on.
    assert_eq!(step(&short, 2).unwrap(), step(&roomy, 2).unwrap());

    // One buffer of 6 MB after the other: what is given up for the first does not do for the second.
    let short = cache(16 * slot + 100_000);
    assert_eq!(step(&short, 1500).unwrap(), step(&roomy, 1500).unwrap());
    let (force, stats) = (short.slots_in_force(), short.stats());
    assert!(stats.resizes == 2 && (2..9).contains(&force.slots) && force.lent > 12 << 20, "{force:?}");

    // The tables of a device that drives: 16 times 64 KiB, in a token and outside of one.
    for in_token in [false, true] {
        let driven = driven(16 * slot + 100_000, DriverKind::Device);
        let y = match in_token {
            true => driven.run_token(8, 2, || step(&driven, 8)),
            false => step(&driven, 8),
        };
        assert_eq!(y.unwrap(), step(&roomy, 8).unwrap());
        let (force, stats) = (driven.slots_in_force(), driven.stats());
        assert!((12..15).contains(&force.slots) && stats.device_steps == 1, "{force:?}");
    }
}

/// Of several devices the one that is short has fewer slots, and the others keep theirs.
#[test]
fn a_device_that_runs_out_of_memory_gives_up_slots_of_its_own() {
    let experts = Experts::random(ExpertSpec::swiglu(512, 512), ExpertFormat::Bf16, 1, 16, 1);
    let slot = experts.layout.record_bytes as u64;
    let cache = |memory| {
        let options = CacheOptions { driver: DriverKind::Host, top_k: 2, ..CacheOptions::default() };
        let builder = ExpertCache::builder(experts.store(), &[Device::Cpu, Device::Cpu]).options(options);
        let cache = builder.build_with(|number, source| {
            let backend = SimBackend::new(source, number as u64);
            Ok(Box::new(if number == 1 { backend.with_memory(memory) } else { backend }))
        });
        cache.unwrap()
    };
    let step = |cache: &ExpertCache| {
        let x = Tensor::ones((64, 512), DType::F32, &Device::Cpu).unwrap();
        let ids = Tensor::from_vec([3u32, 8].repeat(64), (64, 2), &Device::Cpu).unwrap();
        let y = cache.layer(0).forward(&x, &ids, &Tensor::ones((64, 2), DType::F32, &Device::Cpu).unwrap());
        y.unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap()
    };
    let slots = |cache: &ExpertCache| cache.stats().devices.iter().map(|d| d.slots).collect::<Vec<_>>();
    let (roomy, short) = (cache(u64::MAX), cache(8 * slot + 100_000));
    assert_eq!(step(&short), step(&roomy));
    assert_eq!((slots(&roomy), slots(&short)[0]), (vec![8, 8], 8));
    assert!((4..7).contains(&slots(&short)[1]), "{:?}", slots(&short));
}

/// Bytes of memory that are this process's own, where the system says.
#[cfg(target_os = "linux")]
fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|l| l.strip_prefix("RssAnon:")).unwrap();
    1024 * line.trim().trim_end_matches(" kB").parse::<u64>().unwrap()
}

/// The CPU's slots are memory that goes back to the system.
#[cfg(target_os = "linux")]
#[test]
fn memory_of_slots_on_the_cpu_goes_back_to_the_system() {
    let experts = Experts::random(ExpertSpec::swiglu(256, 512), ExpertFormat::Bf16, 2, 32, 3);
    let options = CacheOptions { top_k: 2, ..CacheOptions::default() };
    let cache = ExpertCache::builder(experts.store(), &Device::Cpu).options(options).build().unwrap();
    let fill = || {
        let x = Tensor::ones((32, 256), DType::F32, &Device::Cpu).unwrap();
        let ids = Tensor::arange(0u32, 32, &Device::Cpu).unwrap().reshape((32, 1)).unwrap();
        let weights = Tensor::ones((32, 1), DType::F32, &Device::Cpu).unwrap();
        (0..2).for_each(|l| drop(cache.layer(l).forward(&x, &ids, &weights).unwrap()));
    };
    fill();
    let (full, whole) = (resident_bytes(), cache.slots_in_force().bytes);
    let few = cache.resize(16).unwrap();
    let gone = whole - few.bytes;
    assert!(gone > 30 << 20, "{gone} bytes");
    // Other tests of this process take and give memory, too, but less than a third of that.
    let left = full.saturating_sub(resident_bytes());
    assert!(left > gone * 2 / 3, "{left} bytes left of {gone}");
    cache.resize(64).unwrap();
    fill();
    assert_eq!(cache.check().unwrap(), 64);
    assert!(resident_bytes() > full - gone / 3);
}

/// The CPU has no driver of its own; `auto` is the host there, without a word.
#[test]
fn a_driver_that_cannot_be_had_is_refused() {
    let experts = Experts::random(ExpertSpec::swiglu(16, 16), ExpertFormat::INT8, 2, 4, 1);
    let build = |driver| ExpertCache::builder(experts.store(), &Device::Cpu).driver(driver).build();
    let error = build(DriverKind::Device).map(drop).unwrap_err().to_string();
    assert!(error.contains("cpu") && error.contains("use auto or host"), "{error}");
    for driver in [DriverKind::Auto, DriverKind::Host] {
        assert_eq!(build(driver).unwrap().notes(), [] as [String; 0]);
    }
    let simulated = |policy, prefetch| {
        let builder = ExpertCache::builder(experts.store(), &Device::Cpu).driver(DriverKind::Device);
        let builder = builder.capacity(Capacity::Slots(4)).policy(policy).prefetch(prefetch);
        builder.backend(Box::new(SimBackend::new(experts.clone(), 1))).build()
    };
    for policy in [PolicyKind::Lru, PolicyKind::Lfru, PolicyKind::Aged, PolicyKind::Auto] {
        assert_eq!(simulated(policy, Prefetch::Off).unwrap().driver(), DriverKind::Device);
    }
    let error = simulated(PolicyKind::Lfu, Prefetch::Off).map(drop).unwrap_err().to_string();
    assert!(error.contains("the policy is lfu"), "{error}");
    let learns = simulated(PolicyKind::Lru, Prefetch::Correlation).unwrap();
    assert_eq!((learns.driver(), learns.predictor_table()), (DriverKind::Device, Some(0)));
    assert!(!learns.layer(0).wants_device_guess(1, 1) && !learns.layer(0).wants_guess(1));
    for prefetch in [Prefetch::StaleGate, Prefetch::Auto] {
        let cache = simulated(PolicyKind::Lru, prefetch).unwrap();
        assert_eq!(cache.driver(), DriverKind::Device);
        assert!(cache.layer(0).wants_device_guess(1, 1) && !cache.layer(1).wants_device_guess(1, 1));
        assert!(!cache.layer(0).wants_guess(1), "it is the device's");
    }
    let records = RecordCache::builder(experts.clone() as Arc<dyn RecordSource>, &Device::Cpu);
    let error = records.driver(DriverKind::Device).build().map(drop).unwrap_err().to_string();
    assert!(error.contains("no experts"), "{error}");
}
