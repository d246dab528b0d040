//! Records that are page-locked while steps are served.

use std::time::{Duration, Instant};

use candle_core::Device;
use comoe_core::backend::DriverKind;
use comoe_core::{CacheOptions, Capacity, ExpertCache, ExpertFormat, ExpertSpec, PolicyKind, Scope};

use super::tokens::{fixed_call, steps};
use super::{Experts, Make, Noise, cache};

/// While page-locking goes on, tokens give the bits, counts and tables of a cache that had everything from the start, whoever
/// drives them; when it has ended, the device does. `more(round)` lets it go on.
pub(crate) fn tokens_are_served_while_pages_are_locked(
    device: &Device,
    whole: Make<'_>,
    later: Make<'_>,
    more: &dyn Fn(usize),
) {
    const TOP_K: usize = 3;
    let experts = Experts::random(ExpertSpec::swiglu(64, 48), ExpertFormat::INT8, 3, 8, 17);
    for (policy, slots, scope) in [
        (PolicyKind::Lru, 9, Scope::Layer),
        (PolicyKind::Aged, 13, Scope::Layer),
        (PolicyKind::Lru, 12, Scope::Global),
        (PolicyKind::Lru, 24, Scope::Layer),
    ] {
        let options = CacheOptions {
            capacity: Capacity::Slots(slots),
            top_k: TOP_K,
            policy,
            scope,
            ring: Some(0),
            ..CacheOptions::default()
        };
        let what = format!("{policy}, {slots} slots, {scope}, {}", later.driver);
        more(0);
        let all = cache(&experts, device, whole, options.clone());
        let some = cache(&experts, device, later, options);
        let begun = some.page_locking().unwrap();
        assert_eq!((begun.locked, begun.took), (0, None), "{what}");
        assert_eq!((all.driver(), some.driver()), (DriverKind::Device, DriverKind::Device), "{what}");
        // Asked for by name, the device drives and tokens run again, unless a later layer could take away what they bring.
        let at_once = later.driver == DriverKind::Device && scope == Scope::Layer;
        assert_eq!(some.drives_tokens(1, TOP_K), at_once, "{what}");

        let mut noise = Noise(slots as u64);
        let (mut by_host, mut parts, mut runs, mut tokens) = (0, Vec::new(), 0, 0);
        let mut token = |round: usize| {
            let calls: Vec<_> = (0..3).map(|_| fixed_call(&experts, device, 1, TOP_K, &mut noise)).collect();
            let want = all.run_token(1, TOP_K, || steps(&all, &calls)).unwrap();
            let got = some.run_token(1, TOP_K, || {
                runs += 1;
                steps(&some, &calls)
            });
            tokens += 1;
            assert_eq!(got.unwrap(), want, "{what}, round {round}");
            let tables = |cache: &ExpertCache| cache.with_backend(|_, pool| pool.residency());
            assert_eq!(tables(&all), tables(&some), "{what}, round {round}");
        };
        let started = Instant::now();
        let mut round = 0;
        while some.page_locking().unwrap().took.is_none() || round < 4 {
            assert!(started.elapsed() < Duration::from_secs(60), "{what}: {:?}", some.page_locking());
            token(round);
            by_host += u64::from(!some.drives_tokens(1, TOP_K));
            parts.push(some.page_locking().unwrap().locked);
            round += 1;
            more(round);
        }
        let ended = some.page_locking().unwrap();
        assert_eq!(ended.locked, ended.total, "{what}");
        parts.dedup();
        assert!(parts.len() > 2, "{what}: it came all at once: {parts:?}");
        // The next token hears of it.
        let before = some.stats();
        (0..20).for_each(|n| token(round + n));
        assert!(some.drives_tokens(1, TOP_K) && by_host > 0 || at_once, "{what}");
        assert_eq!(some.stats().device_steps, before.device_steps + 60, "{what}");
        assert!(!at_once || slots == 24 || runs > tokens, "{what}: nothing was ever missing");
        some.check().unwrap();
        let (a, b) = (all.stats(), some.stats());
        assert_eq!(
            (a.accesses(), a.hits(), a.bytes_moved),
            (b.accesses(), b.hits(), b.bytes_moved),
            "{what}"
        );
    }
}
