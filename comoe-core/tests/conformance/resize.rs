//! Slots that come and go while a cache is in use.

use candle_core::{DType, Device};
use comoe_core::{CacheOptions, Capacity, Error, ExpertFormat, ExpertSpec, PolicyKind, Prefetch, Scope};

use super::{Experts, Make, Noise, cache, calls, run};

/// Whatever the number of slots becomes between steps, the bits are the resident run's, slots equal the store, and what one
/// token needs stays.
pub(crate) fn slots_come_and_go(device: &Device, make: Make<'_>) {
    const TOP_K: usize = 3;
    // Records of about 10 KB: chunks of 2 MiB have many slots, those of 64 KiB few, the simulation's are smaller than one.
    let experts = Experts::random(ExpertSpec::swiglu(64, 48), ExpertFormat::INT8, 3, 8, 21);
    let mut few = calls(&experts, device, DType::F32, 60, 3, 5);
    few.extend(calls(&experts, device, DType::F32, 12, 40, 6));
    let resident = cache(&experts, device, make, CacheOptions::default());
    let want: Vec<_> = few.iter().map(|c| run(&resident, c)).collect();
    for (i, slots) in [24, 18, 13, 20, 24, 12].into_iter().enumerate() {
        let scope = if i % 3 == 2 { Scope::Global } else { Scope::Layer };
        let options = CacheOptions {
            capacity: Capacity::Slots(slots),
            policy: [PolicyKind::Lru, PolicyKind::Aged, PolicyKind::Blend, PolicyKind::Lfru][i % 4],
            scope,
            prefetch: if i % 2 == 1 { Prefetch::Auto } else { Prefetch::Off },
            top_k: TOP_K,
            ring: Some([0, 5][i / 2 % 2] * experts.layout.record_bytes as u64),
            ..CacheOptions::default()
        };
        let cache = cache(&experts, device, make, options.clone());
        let least = if scope == Scope::Global { TOP_K } else { 3 * TOP_K };
        let whole = cache.slots_in_force();
        assert_eq!(whole.slots, slots);
        let (mut noise, mut changes, mut now) = (Noise(i as u64), 0, slots);
        let (mut fewest, mut lent) = (slots, 0);
        for round in 0..3 {
            for (n, (call, want)) in few.iter().zip(&want).enumerate() {
                let had = now;
                let what = || format!("round {round}, call {n}, {had} slots, {options:?}");
                let got = run(&cache, call);
                assert!(got.iter().zip(want).all(|(a, b)| a.to_bits() == b.to_bits()), "{}", what());
                if noise.below(3) > 0 {
                    continue;
                }
                now = match noise.below(4) {
                    0 => {
                        let bytes = (noise.below(6) * experts.layout.record_bytes) as u64;
                        match cache.lend(bytes) {
                            Ok(force) => {
                                lent += bytes;
                                assert!(force.bytes + lent <= whole.bytes, "{force:?}, {}", what());
                                force.slots
                            }
                            Err(Error::NothingToLend { most, least: kept, .. }) => {
                                assert!(most < bytes && kept == least, "{most} of {bytes}");
                                now
                            }
                            Err(e) => panic!("{e}"),
                        }
                    }
                    1 => {
                        lent = 0;
                        cache.take_back(u64::MAX).unwrap().slots
                    }
                    _ => cache.resize(noise.below(30)).unwrap().slots,
                };
                assert_eq!(cache.slots_in_force().lent, lent);
                assert!((least..=slots).contains(&now), "{}", what());
                fewest = fewest.min(now);
                changes += u64::from(had != now);
                cache.with_backend(|_, pool| {
                    assert_eq!((pool.inconsistency(), pool.shape().slots()), (None, now));
                });
            }
            assert!(cache.check().unwrap() <= now + cache.stats().staging_slots);
        }
        let stats = cache.stats();
        assert!(changes > 10, "{changes}");
        assert_eq!((stats.resizes, stats.slots, stats.least_slots), (changes, now, fewest), "{stats}");
        assert_eq!(stats.hits() + stats.misses(), stats.accesses());
        cache.take_back(u64::MAX).unwrap();
        assert_eq!(cache.resize(usize::MAX).unwrap(), whole, "all of them are back");
        assert_eq!(cache.resize(0).unwrap().slots, least);
        assert!(cache.slots_in_force().bytes <= whole.bytes);
        for (call, want) in few.iter().zip(&want) {
            assert_eq!(&run(&cache, call), want);
        }
        let refused = cache.run_token(1, TOP_K, || cache.resize(slots));
        assert!(refused.unwrap_err().to_string().contains("end and drop that first"));
    }
}
