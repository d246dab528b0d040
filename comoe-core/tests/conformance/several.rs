//! One cache over several devices: the suite's tests, and what is theirs alone.

use std::sync::Arc;

use candle_core::{DType, Device};
use comoe_core::backend::DriverKind;
use comoe_core::store::{RecordIndex, RecordSource};
use comoe_core::{
    CacheOptions, Capacity, Error, ExpertCache, ExpertFormat, ExpertSpec, PolicyKind, Prefetch, Scope,
};

use super::{Experts, Make, Several, calls, run};

/// All of the suite that is not about one device's slots, over `several.devices`, of which the first computes alone for
/// comparison.
pub(crate) fn several_devices(make: Make<'_>, several: Several<'_>) {
    let (device, alone) = (&several.devices[0], Make { several: None, ..make });
    let make = Make { several: Some(several), ..make };
    super::agrees_with_the_f64_reference(device, make);
    super::output_never_depends_on_the_pool(device, make);
    super::what_one_driver_brought_the_other_finds(device, make);
    super::bad_arguments_leave_the_cache_usable(device, make);
    super::callers_take_turns(device, make);
    let formats = [(ExpertFormat::INT4, false), (ExpertFormat::Bf16, true)];
    every_split_gives_the_bits_of_one_device(device, alone, make.driver, several, &formats);
    each_device_moves_what_it_owns(make, several);
    slots_of_all_devices_come_and_go(alone, make.driver, several);
    a_failing_source_names_the_expert_of_the_model(make, several);
}

/// What depends on who is ready first: every split, policy, scope, prefetch and ring, each in one format. For backends that
/// are slow on purpose.
pub(crate) fn several_devices_in_brief(make: Make<'_>, several: Several<'_>) {
    let (device, alone) = (&several.devices[0], Make { several: None, ..make });
    let make = Make { several: Some(several), ..make };
    super::output_is_the_same_for_every_nth_pool(device, make, &[ExpertFormat::INT8], 3);
    super::callers_take_turns(device, make);
    every_split_gives_the_bits_of_one_device(
        device,
        alone,
        make.driver,
        several,
        &[(ExpertFormat::INT4, false)],
    );
}

fn cache(
    experts: &Arc<Experts>,
    several: Several<'_>,
    driver: DriverKind,
    options: CacheOptions,
    capacities: &[usize],
) -> ExpertCache {
    let capacities: Vec<_> = capacities.iter().map(|&n| Capacity::Slots(n)).collect();
    ExpertCache::builder(experts.store(), several.devices)
        .options(options)
        .driver(driver)
        .capacities(&capacities)
        .peer_access(several.peer_access)
        .build_with(|number, source| Ok((several.backend)(number, source)))
        .unwrap()
}

/// Slots may be spread in any way, evenly or with one device that has a single one, or nearly all.
fn every_split_gives_the_bits_of_one_device(
    device: &Device,
    alone: Make<'_>,
    driver: DriverKind,
    several: Several<'_>,
    formats: &[(ExpertFormat, bool)],
) {
    const EXPERTS: usize = 8;
    const LAYERS: usize = 3;
    for &(format, weight_on_input) in formats {
        let mut spec = ExpertSpec::swiglu(64, 48);
        if weight_on_input {
            spec.weight_on = comoe_core::WeightOn::Input;
        }
        let experts = Experts::random(spec, format, LAYERS, EXPERTS, 23);
        // One token, few, and more than a device drives.
        let mut all = calls(&experts, device, DType::F32, 18, 1, 5);
        all.extend(calls(&experts, device, DType::F32, 12, 4, 6));
        all.extend(calls(&experts, device, DType::F32, 3, 40, 7));
        let one = super::cache(&experts, device, alone, CacheOptions::default());
        let want: Vec<_> = all.iter().map(|c| run(&one, c)).collect();
        let rest = |n: usize| std::iter::repeat_n(n, several.devices.len() - 1);
        let splits = [(3, 3), (12, 12), (24, 24), (23, 1), (1, 23), (4, 1), (2, 9), (7, 5)];
        for (i, (first, others)) in splits.into_iter().enumerate() {
            let options = CacheOptions {
                policy: [PolicyKind::Lru, PolicyKind::Aged, PolicyKind::Auto][i % 3],
                scope: [Scope::Layer, Scope::Global][i % 2],
                prefetch: [Prefetch::Off, Prefetch::StaleGate, Prefetch::Off, Prefetch::Auto][i % 4],
                top_k: 3,
                ring: Some([0, 3][i / 2 % 2] * experts.layout.record_bytes as u64),
                ..CacheOptions::default()
            };
            let slots: Vec<_> = std::iter::once(first).chain(rest(others)).collect();
            let cache = cache(&experts, several, driver, options.clone(), &slots);
            for (n, (call, want)) in all.iter().zip(&want).enumerate() {
                let got = run(&cache, call);
                let same = got.iter().zip(want).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same, "call {n}, slots {slots:?}, {options:?}");
            }
            cache.check().unwrap();
            let stats = cache.stats();
            assert_eq!(stats.hits() + stats.misses(), stats.accesses());
            assert_eq!(stats.records_moved + stats.late(), stats.misses());
            assert_eq!(stats.steps, all.len() as u64, "{slots:?}");
            assert_eq!(stats.records, LAYERS * EXPERTS, "{slots:?}");
        }
    }
}

/// The counters are those of the placement: who owns an expert moves it, once, and nobody else does.
fn each_device_moves_what_it_owns(make: Make<'_>, several: Several<'_>) {
    let experts = Experts::random(ExpertSpec::swiglu(32, 32), ExpertFormat::INT8, 3, 12, 4);
    let n = several.devices.len();
    let cache = super::cache(
        &experts,
        &several.devices[0],
        make,
        CacheOptions { top_k: 3, ..CacheOptions::default() },
    );
    let placement = cache.placement().unwrap().clone();
    assert_eq!(placement.devices(), n);
    let mut used = vec![std::collections::BTreeSet::new(); n];
    for call in calls(&experts, &several.devices[0], DType::F32, 30, 3, 8) {
        run(&cache, &call);
        for id in &call.raw.1 {
            let record = RecordIndex(experts.directory().layers()[call.layer].first + id);
            used[placement.owner(record)].insert(record);
        }
    }
    let stats = cache.stats();
    assert_eq!(stats.devices.len(), n);
    for (device, used) in stats.devices.iter().zip(&used) {
        assert_eq!(device.bytes_moved, used.len() as u64 * experts.layout.record_bytes as u64, "{device:?}");
        assert_eq!(device.slots, device.records, "{device:?}");
        assert!(!used.is_empty() && device.accesses > device.hits, "{device:?}");
    }
    assert_eq!(stats.devices.iter().map(|d| d.records).sum::<usize>(), 36);
    assert_eq!(stats.accesses(), stats.devices.iter().map(|d| d.accesses).sum::<u64>());
    let text = stats.to_string();
    assert_eq!(text.matches("of the experts, 0 staging").count(), n, "{text}");
    cache.reset_stats();
    assert_eq!(cache.stats().accesses(), 0);
}

/// Shares grow and shrink together, the first alone lends, and neither changes a bit.
fn slots_of_all_devices_come_and_go(alone: Make<'_>, driver: DriverKind, several: Several<'_>) {
    let experts = Experts::random(ExpertSpec::swiglu(64, 48), ExpertFormat::INT8, 3, 8, 21);
    let device = &several.devices[0];
    let mut all = calls(&experts, device, DType::F32, 40, 3, 5);
    all.extend(calls(&experts, device, DType::F32, 4, 40, 6));
    let resident = super::cache(&experts, device, alone, CacheOptions::default());
    let want: Vec<_> = all.iter().map(|c| run(&resident, c)).collect();
    let built: Vec<_> = std::iter::once(14).chain(several.devices[1..].iter().map(|_| 7)).collect();
    let options = CacheOptions { top_k: 2, ..CacheOptions::default() };
    let cache = cache(&experts, several, driver, options, &built);
    let by_device = || cache.stats().devices.iter().map(|d| d.slots).collect::<Vec<_>>();
    let (whole, made) = (cache.slots_in_force(), by_device());
    assert_eq!((whole.slots, whole.most), (made.iter().sum(), whole.slots));
    let (mut noise, mut seen) = (super::Noise(3), std::collections::BTreeSet::new());
    for (n, (call, want)) in all.iter().zip(&want).enumerate() {
        assert_eq!(&run(&cache, call), want, "call {n}, {:?} slots", by_device());
        let now = cache.resize(noise.below(whole.most + 4)).unwrap();
        assert_eq!(by_device().iter().sum::<usize>(), now.slots);
        assert!(by_device().iter().zip(&made).all(|(now, made)| (1..=*made).contains(now)));
        seen.insert(now.slots);
    }
    assert!(seen.len() > 3, "{seen:?}");
    cache.check().unwrap();
    assert_eq!(cache.resize(usize::MAX).unwrap(), whole);
    let lent = cache.lend(2 * experts.layout.record_bytes as u64);
    let now = by_device();
    match lent {
        Ok(force) => {
            assert!(
                now[0] < made[0] && now[1..] == made[1..] && force.slots < whole.slots,
                "{now:?} of {made:?}"
            );
        }
        // All slots lie in one chunk of memory, as these do on a GPU.
        Err(Error::NothingToLend { most: 0, .. }) => assert_eq!(now, made),
        Err(e) => panic!("{e}"),
    }
    assert_eq!(&run(&cache, &all[0]), &want[0]);
    assert_eq!(cache.take_back(u64::MAX).unwrap(), whole);
}

/// Devices number their experts by themselves; people hear of the model's.
fn a_failing_source_names_the_expert_of_the_model(make: Make<'_>, several: Several<'_>) {
    let experts = Experts::random(ExpertSpec::swiglu(32, 32), ExpertFormat::Bf16, 2, 12, 2);
    let options = CacheOptions { top_k: 1, capacity: Capacity::Slots(6), ..CacheOptions::default() };
    let cache = super::cache(&experts, &several.devices[0], make, options);
    let device = &several.devices[0];
    let ask = |e: u32| {
        let tensor = |dims: (usize, usize), dtype| candle_core::Tensor::ones(dims, dtype, device).unwrap();
        let ids = (tensor((1, 1), DType::U32) * f64::from(e)).unwrap();
        cache.layer(1).forward(&tensor((1, 32), DType::F32), &ids, &tensor((1, 1), DType::F32))
    };
    ask(0).unwrap();
    experts.unreadable.store(true, std::sync::atomic::Ordering::SeqCst);
    let Err(first) = ask(7) else {
        // A backend that keeps the whole store in an arena of its own no longer reads it.
        return;
    };
    assert!(first.to_string().contains("layer 1 expert 7"), "{first}");
    experts.unreadable.store(false, std::sync::atomic::Ordering::SeqCst);
    for e in 0..12 {
        assert!(matches!(ask(e), Err(comoe_core::Error::Stopped { .. })), "no device goes on alone");
    }
}
