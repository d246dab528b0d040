//! Every policy against a naive model, and exact eviction orders.

use proptest::prelude::*;

use super::*;

fn r(n: u32) -> RecordIndex {
    RecordIndex(n)
}

/// Feeds accesses to a policy of `slots` slots, as a pool would. Returns hits.
fn play(policy: &mut dyn EvictionPolicy, slots: usize, accesses: &[u32]) -> usize {
    let mut resident = Vec::new();
    let mut hits = 0;
    for &a in accesses {
        if resident.contains(&a) {
            policy.hit(r(a));
            hits += 1;
            continue;
        }
        if resident.len() == slots {
            let victim = policy.victim(&|_| true).unwrap();
            policy.remove(victim);
            resident.retain(|&x| x != victim.0);
        }
        policy.insert(r(a));
        resident.push(a);
        let mut order: Vec<u32> = policy.eviction_order().iter().map(|r| r.0).collect();
        order.sort_unstable();
        let mut expected = resident.clone();
        expected.sort_unstable();
        assert_eq!(order, expected);
    }
    hits
}

/// Keeps every access and recomputes each record's value from scratch.
struct Naive<F>(Vec<u32>, Vec<u32>, F);

impl<F: Fn(&[u32], u32) -> f64> Naive<F> {
    /// Eviction order: smallest value first, ties by record number.
    fn order(&self) -> Vec<u32> {
        let mut keyed: Vec<(f64, u32)> = self.1.iter().map(|&x| ((self.2)(&self.0, x), x)).collect();
        keyed.sort_by(|a, b| a.partial_cmp(b).unwrap());
        keyed.into_iter().map(|k| k.1).collect()
    }
}

fn last_use(history: &[u32], x: u32) -> f64 {
    history.iter().rposition(|&y| y == x).map_or(-1.0, |p| p as f64)
}

fn compare<F: Fn(&[u32], u32) -> f64>(
    policy: &mut dyn EvictionPolicy,
    value: F,
    slots: usize,
    accesses: &[u32],
) {
    let mut naive = Naive(vec![], vec![], value);
    for &a in accesses {
        let pinned = a; // as a pool pins the set
        if naive.1.contains(&a) {
            policy.hit(r(a));
        } else {
            if naive.1.len() == slots {
                let got = policy.victim(&|x| x.0 != pinned && x.0 % 7 != 6);
                let want = naive.order().into_iter().find(|&x| x != pinned && x % 7 != 6);
                assert_eq!(got.map(|x| x.0), want);
                let Some(victim) = got else { continue };
                policy.remove(victim);
                naive.1.retain(|&x| x != victim.0);
            }
            policy.insert(r(a));
            naive.1.push(a);
        }
        naive.0.push(a);
        assert_eq!(policy.eviction_order().iter().map(|x| x.0).collect::<Vec<_>>(), naive.order());
    }
}

proptest! {
    #[test]
    fn lru_is_the_naive_lru(slots in 1usize..9, accesses in prop::collection::vec(0u32..24, 0..200)) {
        compare(&mut Lru::new(24), last_use, slots, &accesses);
    }

    #[test]
    fn lfu_is_the_naive_lfu(slots in 1usize..9, accesses in prop::collection::vec(0u32..24, 0..200)) {
        let value = |h: &[u32], x: u32| h.iter().filter(|&&y| y == x).count() as f64 + last_use(h, x) / 1e6;
        compare(&mut Lfu::new(24), value, slots, &accesses);
    }

    #[test]
    fn lfru_is_the_naive_decayed_count(slots in 1usize..9, accesses in prop::collection::vec(0u32..24, 0..200)) {
        // Ticks are accesses since the start; a half-life with no exact ties among distinct histories.
        let half_life = 7.3;
        let value = |h: &[u32], x: u32| {
            let now = h.len() as f64;
            h.iter().enumerate().filter(|(_, y)| **y == x).map(|(t, _)| ((t as f64 + 1.0 - now) / half_life).exp2()).sum()
        };
        compare(&mut Lfru::new(half_life, 24), value, slots, &accesses);
    }

    #[test]
    fn aged_is_the_naive_decayed_count_in_tokens(
        slots in 1usize..9,
        per_token in 1usize..5,
        accesses in prop::collection::vec(0u32..24, 0..200),
    ) {
        let half_life = PolicyKind::AGED_TOKENS * per_token as f64;
        // Distinct histories can tie to the last bit when accesses are a half-life apart: as many are not made.
        let accesses = &accesses[..accesses.len().min(half_life as usize)];
        let value = |h: &[u32], x: u32| {
            let now = h.len() as f64;
            h.iter().enumerate().filter(|(_, y)| **y == x).map(|(t, _)| ((t as f64 + 1.0 - now) / half_life).exp2()).sum()
        };
        compare(&mut *PolicyKind::Aged.build(slots, 24, per_token), value, slots, accesses);
    }

    #[test]
    fn blend_is_the_naive_sum_of_two_frequencies(
        slots in 1usize..9,
        per_token in 1usize..5,
        accesses in prop::collection::vec(0u32..24, 0..200),
    ) {
        let frequency = |h: &[u32], x: u32, half_life: f64| -> f64 {
            let value = |t: usize| ((t as f64 + 1.0 - h.len() as f64) / half_life).exp2();
            let sum: f64 = h.iter().enumerate().filter(|(_, y)| **y == x).map(|(t, _)| value(t)).sum();
            sum * (1.0 - (-1.0 / half_life).exp2())
        };
        let per_token_f = per_token as f64;
        let value = |h: &[u32], x: u32| {
            let (short, long) = (Blend::SHORT_TOKENS * per_token_f, Blend::LONG_TOKENS * per_token_f);
            frequency(h, x, short) + Blend::LONG_WEIGHT * frequency(h, x, long)
        };
        compare(&mut *PolicyKind::Blend.build(slots, 24, per_token), value, slots, &accesses);
    }

    #[test]
    fn belady_is_never_beaten(slots in 1usize..9, accesses in prop::collection::vec(0u32..24, 0..200)) {
        let future: Vec<_> = accesses.iter().map(|&a| r(a)).collect();
        let best = play(&mut Belady::new(&future, 24), slots, &accesses);
        for kind in PolicyKind::ALL {
            let hits = play(&mut *kind.build(slots, 24, 2), slots, &accesses);
            prop_assert!(hits <= best, "{kind}: {hits} > {best}");
        }
    }
}

#[test]
fn orders_are_exact() {
    let order = |policy: &mut dyn EvictionPolicy| {
        for a in [1, 2, 3] {
            policy.insert(r(a));
        }
        for a in [1, 1, 2, 1] {
            policy.hit(r(a));
        }
        policy.eviction_order().iter().map(|x| x.0).collect::<Vec<_>>()
    };
    assert_eq!(order(&mut Lru::new(8)), [3, 2, 1]);
    assert_eq!(order(&mut Lfu::new(8)), [3, 2, 1]);
    assert_eq!(order(&mut Lfru::new(0.01, 8)), [3, 2, 1]);
    let future = [1, 2, 3, 1, 1, 2, 1, 3, 1].map(r);
    assert_eq!(order(&mut Belady::new(&future, 8)), [2, 1, 3]);
}

#[test]
fn blend_keeps_its_order_however_long_it_runs() {
    // Weights grow by 2^(1/1.25) a tick, and are scaled down every 620 ticks or so.
    let mut policy = Blend::new(4, 1);
    for record in [0, 1, 2] {
        policy.insert(r(record));
    }
    for round in 0..20_000u32 {
        policy.hit(r(round % 2));
        policy.hit(r(2 * (round % 2)));
    }
    // 0 was used every second time, 1 and 2 every fourth, 2 last.
    assert_eq!(policy.eviction_order(), [1, 2, 0].map(r));
    policy.insert(r(3));
    assert_eq!(policy.victim(&|x| x != r(1)), Some(r(3)), "a newcomer has little behind it");
}

#[test]
fn lfru_with_a_short_memory_forgets_an_old_favourite_and_lfu_does_not() {
    let mut accesses = vec![0; 50];
    accesses.extend([1, 2, 1, 2, 1, 2, 3]);
    for (kind, leaves) in [(PolicyKind::Lfru, 0), (PolicyKind::Lfu, 1)] {
        let mut policy = match kind {
            PolicyKind::Lfru => Box::new(Lfru::new(1.0, 8)),
            other => other.build(3, 8, 1),
        };
        play(&mut *policy, 3, &accesses);
        assert!(!policy.eviction_order().contains(&r(leaves)), "{kind}");
    }
}
