//! Experts that stay in their slots for good.

use candle_core::{DType, Device};
use comoe_core::store::RecordIndex;
use comoe_core::{CacheOptions, Capacity, Error, ExpertCache, ExpertFormat, ExpertId, ExpertSpec, Scope};

use super::{Experts, Make, PolicyKind, cache, calls, run};

/// Pinned experts are there from the start and never leave, whatever is asked for; output is the resident run's, and hits
/// on them are counted apart. Uses are counted by record, whoever drives.
pub(crate) fn pinned_experts_never_leave(device: &Device, make: Make<'_>) {
    const EXPERTS: usize = 24;
    let experts = Experts::random(ExpertSpec::swiglu(64, 48), ExpertFormat::INT8, 2, EXPERTS, 23);
    let id = |layer, expert| ExpertId { layer, expert };
    // Three of a layer's eighteen slots may be pinned, three of twenty in one pool for both, and always one.
    let asked = [id(0, 7), id(1, 0), id(0, 6), id(0, 7), id(0, 5), id(0, 1)];
    let mut calls = calls(&experts, device, DType::F32, 60, 2, 9);
    calls.extend(super::calls(&experts, device, DType::F32, 6, 40, 6));
    let resident = cache(&experts, device, make, CacheOptions::default());
    let want: Vec<_> = calls.iter().map(|c| run(&resident, c)).collect();
    for (slots, scope, policy, pins) in [
        (36, Scope::Layer, PolicyKind::Lru, vec![6, 7, 24, 5]),
        (36, Scope::Layer, PolicyKind::Aged, vec![6, 7, 24, 5]),
        (36, Scope::Layer, PolicyKind::Blend, vec![6, 7, 24, 5]),
        (20, Scope::Global, PolicyKind::Aged, vec![6, 7, 24]),
        (8, Scope::Layer, PolicyKind::Auto, vec![7, 24]),
    ] {
        let mut pins: Vec<RecordIndex> = pins.into_iter().map(RecordIndex).collect();
        pins.sort_unstable();
        let options = CacheOptions {
            capacity: Capacity::Slots(slots),
            scope,
            policy,
            top_k: 3,
            pinned: asked.to_vec(),
            ring: Some(0),
            ..CacheOptions::default()
        };
        let what = format!("{slots} slots, {policy}, {scope}");
        let cache = cache(&experts, device, make, options);
        assert!(cache.notes().iter().any(|n| n.contains("of 6 experts are pinned")), "{:?}", cache.notes());
        let places = |cache: &ExpertCache| {
            cache.with_backend(|_, pool| {
                assert_eq!(pool.inconsistency(), None);
                assert_eq!(pool.kept(), pins, "{what}");
                pins.iter().map(|&r| pool.locate(r).map(|l| (l.slot, l.loading))).collect::<Vec<_>>()
            })
        };
        let before = places(&cache);
        assert!(before.iter().all(|p| p.is_some_and(|(_, loading)| !loading)), "{what}: {before:?}");
        assert_eq!((cache.stats().records_moved, cache.stats().pinned_slots), (0, pins.len()), "{what}");
        let (mut uses, mut on_pinned) = (vec![0u64; 2 * EXPERTS], 0);
        for (n, (call, want)) in calls.iter().zip(&want).enumerate() {
            let got = run(&cache, call);
            assert!(got.iter().zip(want).all(|(a, b)| a.to_bits() == b.to_bits()), "{what}: call {n}");
            let mut set: Vec<usize> = call.raw.1.iter().map(|&e| call.layer * EXPERTS + e as usize).collect();
            set.sort_unstable();
            set.dedup();
            set.iter().for_each(|&r| uses[r] += 1);
            on_pinned += set.iter().filter(|&&r| pins.contains(&RecordIndex(r as u32))).count() as u64;
            if n % 5 == 0 {
                assert_eq!(places(&cache), before, "{what}: call {n}");
            }
        }
        cache.check().unwrap();
        let stats = cache.stats();
        assert_eq!((stats.pinned_hits(), cache.uses()), (on_pinned, uses), "{what}: {stats}");
        assert!(on_pinned > 0 && stats.hits() > on_pinned && stats.misses() > 0, "{what}: {stats}");
        assert!(stats.to_string().contains(&format!("pinned   {} experts", pins.len())), "{stats}");
    }

    let build = |slots: usize, pin| {
        ExpertCache::builder(experts.store(), device)
            .backend((make.backend)(experts.clone()))
            .options(CacheOptions {
                capacity: Capacity::Slots(slots),
                pinned: vec![pin],
                ..CacheOptions::default()
            })
            .build()
    };
    let all = build(2 * EXPERTS, id(0, 1)).unwrap();
    assert_eq!(all.stats().pinned_slots, 0);
    assert!(all.notes().iter().any(|n| n.contains("none is pinned")), "{:?}", all.notes());
    assert!(matches!(build(8, id(0, EXPERTS)), Err(Error::UnknownExpert { .. })));
}
