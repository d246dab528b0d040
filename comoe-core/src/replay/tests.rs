//! Replay against a naive one that was written from the rules alone, and what must hold of any.

use proptest::prelude::*;

use super::*;
use crate::policy::Blend;
use crate::trace::testing::{info, made};
use crate::trace::{Choice, Token, TraceBuilder};

/// The rules word by word, with lists and no cleverness.
fn naive(trace: &Trace, policy: &str, scope: Scope, slots_per_layer: usize) -> (u64, u64) {
    let layers = trace.layers();
    let capacity = if scope == Scope::Global { slots_per_layer * layers } else { slots_per_layer };
    let steps: Vec<(usize, usize)> =
        (0..trace.tokens().len()).flat_map(|t| (0..layers).map(move |l| (t, l))).collect();
    let all: Vec<(usize, u32)> =
        steps.iter().flat_map(|&(t, l)| trace.chosen(t, l).iter().map(move |&e| (l, e))).collect();
    let per_token = trace.info().top_k * if scope == Scope::Global { layers } else { 1 };
    let mine = |l: usize| move |r: &(usize, u32)| scope == Scope::Global || r.0 == l;
    let mut resident: Vec<(usize, u32)> = Vec::new();
    let (mut hits, mut accesses, mut at) = (0, 0, 0);
    for (t, l) in steps {
        let set: Vec<(usize, u32)> = trace.chosen(t, l).iter().map(|&e| (l, e)).collect();
        let counted = trace.tokens()[t].phase == Phase::Decode;
        let held: Vec<_> = set.iter().filter(|r| resident.contains(r)).collect();
        if counted {
            hits += held.len() as u64;
            accesses += set.len() as u64;
        }
        let mut gone: Vec<_> = Vec::new();
        for (i, r) in set.iter().enumerate() {
            let history: Vec<_> = all[..at + i].iter().filter(|r| mine(l)(r)).copied().collect();
            if !resident.contains(r) {
                if resident.iter().filter(|r| mine(l)(r)).count() == capacity {
                    let value = |x: &(usize, u32)| -> f64 {
                        let last = history.iter().rposition(|y| y == x).unwrap() as f64;
                        let decayed = |half_life: f64| {
                            let ages = history.iter().enumerate().filter(|(_, y)| *y == x);
                            ages.map(|(j, _)| ((j as f64 - history.len() as f64) / half_life).exp2()).sum()
                        };
                        match policy {
                            "lru" => last,
                            "lfu" => history.iter().filter(|y| *y == x).count() as f64 + last / 1e9,
                            "lfru" => decayed(4.0 * capacity as f64),
                            "aged" => decayed(PolicyKind::AGED_TOKENS * per_token as f64),
                            "blend" => {
                                let frequency = |tokens: f64| {
                                    let half_life = tokens * per_token as f64;
                                    // `decayed` has the last access a tick ago; here it counts whole.
                                    decayed(half_life) * ((1.0 / half_life).exp2() - 1.0)
                                };
                                frequency(Blend::SHORT_TOKENS)
                                    + Blend::LONG_WEIGHT * frequency(Blend::LONG_TOKENS)
                            }
                            "belady" => {
                                -(all[at + i..].iter().position(|y| y == x).map_or(1e9, |p| p as f64))
                            }
                            other => unreachable!("{other}"),
                        }
                    };
                    let candidates = resident.iter().filter(|x| mine(l)(x) && !set.contains(x));
                    let victim =
                        candidates.min_by(|a, b| value(a).total_cmp(&value(b)).then(a.cmp(b))).copied();
                    let Some(victim) = victim else { continue };
                    resident.retain(|x| *x != victim);
                    gone.push(victim);
                }
                resident.push(*r);
            }
        }
        at += set.len();
        assert!(set.iter().all(|r| !gone.contains(r)));
    }
    (hits, accesses)
}

fn trace(most: usize) -> impl Strategy<Value = Trace> {
    let set = prop::sample::subsequence((0..10u32).collect::<Vec<_>>(), 1..=most).prop_shuffle();
    let token = (any::<bool>(), prop::collection::vec(set, 2));
    prop::collection::vec(token, 1..40).prop_map(|tokens| {
        let tokens: Vec<_> = tokens.into_iter().enumerate().map(|(i, (d, l))| (0, d && i > 2, l)).collect();
        made(&info(&[(1, 10), (2, 10)], 3), &tokens)
    })
}

fn scope() -> impl Strategy<Value = Scope> {
    prop::sample::select(vec![Scope::Layer, Scope::Global])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]
    #[test]
    fn is_the_naive_replay(
        trace in trace(4),
        scope in scope(),
        slots in 1usize..8,
        // Decayed sums of different histories may tie to the last bit of one formula and not of the other.
        policy in prop::sample::select(vec!["lru", "lfu", "belady"]),
    ) {
        let score = replay(&trace, policy.parse().unwrap(), scope, slots);
        prop_assert_eq!((score.hits, score.accesses), naive(&trace, policy, scope, slots));
        prop_assert_eq!(score.bytes_missed, 512 * (score.accesses - score.hits));
    }

    #[test]
    fn decayed_counts_are_the_naive_ones_up_to_ties(
        trace in trace(3),
        scope in scope(),
        slots in 3usize..8,
        policy in prop::sample::select(vec!["lfru", "aged", "blend"]),
    ) {
        let score = replay(&trace, policy.parse().unwrap(), scope, slots);
        let (hits, accesses) = naive(&trace, policy, scope, slots);
        prop_assert_eq!(score.accesses, accesses);
        prop_assert!(score.hits.abs_diff(hits) <= 1 + accesses / 50, "{} and {}", score.hits, hits);
    }

    #[test]
    fn belady_is_never_beaten_by_a_policy_that_brings_in_every_miss(
        trace in trace(3),
        scope in scope(),
        slots in 3usize..9,
    ) {
        // Every set fits here. Where one does not, no policy can bring in every miss, and what stays out is luck.
        // Counted over everything: a prompt that only warms is not what the optimum is for.
        let tokens: Vec<_> = (0..trace.tokens().len())
            .map(|t| (0, true, (0..2).map(|l| trace.chosen(t, l).to_vec()).collect()))
            .collect();
        let trace = made(trace.info(), &tokens);
        let best = replay(&trace, ReplayPolicy::Belady, scope, slots).hits;
        for kind in PolicyKind::ALL {
            let hits = replay(&trace, ReplayPolicy::Online(kind), scope, slots).hits;
            prop_assert!(hits <= best, "{}: {} > {}", kind, hits, best);
        }
    }

    #[test]
    fn all_slots_miss_only_what_is_new(trace in trace(4), scope in scope()) {
        let first_uses: u64 = (0..2).map(|l| {
            let mut seen = [false; 10];
            let mut new = 0;
            for (t, token) in trace.tokens().iter().enumerate() {
                for &e in trace.chosen(t, l) {
                    let first = !std::mem::replace(&mut seen[e as usize], true);
                    new += u64::from(first && token.phase == Phase::Decode);
                }
            }
            new
        }).sum();
        for policy in ["lru", "lfu", "lfru", "aged", "blend", "belady", "lfru-admit", "lfru:3"] {
            let score = replay(&trace, policy.parse().unwrap(), scope, 10);
            prop_assert_eq!(score.accesses - score.hits, first_uses, "{}", policy);
        }
        let hindsight = replay(&trace, ReplayPolicy::Static, scope, 10);
        prop_assert_eq!(hindsight.hits, hindsight.accesses);
    }
}

fn one_layer(sets: &[&[u32]]) -> Trace {
    let tokens: Vec<_> = sets.iter().map(|s| (0, true, vec![s.to_vec()])).collect();
    made(&info(&[(0, 16)], 2), &tokens)
}

fn hits(trace: &Trace, policy: &str, slots: usize) -> u64 {
    replay(trace, policy.parse().unwrap(), Scope::Layer, slots).hits
}

#[test]
fn recency_within_a_set_follows_the_order_of_choice_hits_too() {
    // After {0, 1}, then {1, 0}: 1 is the older. 2 evicts it, 0 stays.
    assert_eq!(hits(&one_layer(&[&[0, 1], &[1, 0], &[2], &[0]]), "lru", 2), 2 + 1);
    assert_eq!(hits(&one_layer(&[&[0, 1], &[1, 0], &[2], &[1]]), "lru", 2), 2);
}

#[test]
fn a_set_larger_than_the_capacity_leaves_its_surplus_out() {
    let trace = one_layer(&[&[0, 1, 2], &[2], &[0], &[1]]);
    // 0 and 1 are in; 2 finds no room, then takes that of 0, which takes that of 1.
    assert_eq!(hits(&trace, "lru", 2), 0);
    assert_eq!(hits(&one_layer(&[&[0, 1, 2], &[1], &[0]]), "lru", 2), 2);
}

#[test]
fn static_holds_the_most_used_with_hindsight() {
    let trace = one_layer(&[&[3], &[5], &[3], &[4], &[4]]);
    assert_eq!(hits(&trace, "static", 2), 4, "3 and 4, from the first token on");
    assert_eq!(hits(&trace, "static", 1), 2, "a tie goes to the smaller number");
}

#[test]
fn the_prompt_warms_and_is_not_counted() {
    let tokens: Vec<_> =
        [(false, 1), (true, 1), (true, 2)].map(|(d, e)| (0, d, vec![vec![e]])).into_iter().collect();
    let score = replay(&made(&info(&[(0, 4)], 1), &tokens), "lru".parse().unwrap(), Scope::Layer, 2);
    assert_eq!((score.hits, score.accesses), (1, 2));
}

#[test]
fn halves_add_up() {
    let sets: Vec<Vec<u32>> = (0..31).map(|t| vec![t * 7 % 16, t * 5 % 16]).collect();
    let trace = one_layer(&sets.iter().map(Vec::as_slice).collect::<Vec<_>>());
    let score = |span| replay_span(&trace, "lru".parse().unwrap(), Scope::Layer, 6, span);
    let (all, a, b) = (score(Span::All), score(Span::FirstHalf), score(Span::SecondHalf));
    assert_eq!((a.hits + b.hits, a.accesses + b.accesses), (all.hits, all.accesses));
    assert!(a.accesses > 0 && b.accesses > 0);
}

#[test]
fn unknown_policies_are_named() {
    for bad in ["fifo", "lfru:", "lfru:0", "lfru:-1", "lfru:x", ""] {
        let e = bad.parse::<ReplayPolicy>().unwrap_err().to_string();
        assert!(e.contains("belady") && e.contains("lru"), "{e}");
    }
    for good in ["lru", "lfu", "lfru", "aged", "blend", "belady", "static", "lfru-admit", "lfru:2.5"] {
        assert_eq!(good.parse::<ReplayPolicy>().unwrap().to_string(), good);
    }
}

fn batches(trace: &Trace, batch: usize, grouping: Grouping, eviction: Eviction) -> BatchScore {
    let options = BatchOptions {
        policy: PolicyKind::Lru,
        scope: Scope::Layer,
        slots_per_layer: 4,
        sequences: 4,
        batch,
        grouping,
        eviction,
    };
    replay_batches(trace, &options).unwrap()
}

#[test]
fn a_batch_needs_its_union_once() {
    // Four sequences of two tokens; 0 and 2 agree, and 1 and 3.
    let sets: [&[u32]; 8] = [&[0, 1], &[0, 1], &[8, 9], &[8, 9], &[0, 1], &[0, 1], &[8, 9], &[8, 9]];
    let trace = one_layer(&sets);
    let alone = batches(&trace, 1, Grouping::None, Eviction::Expert);
    assert_eq!((alone.tokens, alone.score.accesses, alone.union), (8, 16, 2.0));
    let plain = batches(&trace, 2, Grouping::None, Eviction::Expert);
    assert_eq!((plain.tokens, plain.union), (8, 4.0));
    // The first step has nothing to go by, the second groups those that agree.
    let similar = batches(&trace, 2, Grouping::Similar, Eviction::Expert);
    assert_eq!(similar.union, 3.0);
    assert_eq!(batches(&trace, 4, Grouping::None, Eviction::Expert).score.accesses, 8);
    assert!(
        replay_batches(
            &trace,
            &BatchOptions {
                policy: PolicyKind::Lru,
                scope: Scope::Layer,
                slots_per_layer: 4,
                sequences: 9,
                batch: 3,
                grouping: Grouping::None,
                eviction: Eviction::Expert
            }
        )
        .unwrap_err()
        .to_string()
        .contains("has 8")
    );
}

#[test]
fn a_group_leaves_as_it_came() {
    // 4 slots: {0, 1}, {2, 3}, then {4}: with 0 goes 1.
    let mut partition = Partition::new(PolicyKind::Lru.build(4, 8, 1), 8, 4);
    for set in [&[0u32, 1][..], &[2, 3]] {
        partition.step_evicting_groups(set);
    }
    partition.step_evicting_groups(&[4]);
    let held: Vec<u32> = (0..8).filter(|&r| partition.holds(r)).collect();
    assert_eq!(held, [2, 3, 4]);
}

#[test]
fn predictors_know_nothing_of_what_comes_later() {
    // Alternating sets: the token before is always wrong, the one before that always right.
    let (a, b): (&[u32], &[u32]) = (&[0, 1], &[2, 3]);
    let trace = one_layer(&[a, b, a, b, a, b, a, b]);
    let score =
        |predictor, k| evaluate(&trace, &PredictOptions { predictor, depth: 1, k, slots: 2 }).unwrap();
    let previous = score(PredictorKind::Previous, 2);
    assert_eq!((previous.accesses, previous.guessed, previous.misses), (16, 0, 16));
    // All that is guessed is resident in the LRU of two slots, so nothing would be fetched, or wasted.
    assert_eq!((previous.useful_bytes, previous.wasted_bytes), (0, 0));
    let frequency = score(PredictorKind::Frequency, 4);
    assert_eq!(frequency.guessed, 12, "all but the first two tokens");
    // With one layer, the layer before is that of the token before: a becomes b.
    let correlation = score(PredictorKind::Correlation, 2);
    assert_eq!(correlation.guessed, 10, "known from the third token on, b to a from the fourth");
    assert_eq!(correlation.misses_guessed, 10);
    assert_eq!((correlation.useful_bytes, correlation.wasted_bytes), (10 * 512, 0));
}

#[test]
fn the_stale_gate_is_judged_by_the_guesses_in_the_trace() {
    let info = info(&[(0, 8), (1, 8)], 2);
    let mut builder = TraceBuilder::new(info);
    for t in 0..10u32 {
        let sets = [[t % 8, (t + 1) % 8], [(t + 3) % 8, (t + 5) % 8]];
        // The first guess is always right, the second never, the third every other time.
        let guesses = [(t + 3) % 8, (t + 4) % 8, (t + 5 + t % 2) % 8];
        builder.token(Token { turn: 0, phase: Phase::Decode }, |l| Choice {
            experts: &sets[l],
            guesses: if l == 1 { &guesses } else { &[] },
            ..Choice::default()
        });
    }
    let trace = builder.finish();
    let options = |depth, k| PredictOptions { predictor: PredictorKind::StaleGate, depth, k, slots: 2 };
    let by_layer = recall_by_layer(&trace, &options(1, 2)).unwrap();
    assert_eq!([by_layer[0].guessed, by_layer[1].guessed], [0, 10]);
    assert_eq!(evaluate(&trace, &options(1, 3)).unwrap().guessed, 15);
    assert!(PredictorKind::for_trace(&trace).contains(&PredictorKind::StaleGate));
    let deeper = evaluate(&trace, &options(2, 2)).unwrap_err().to_string();
    assert!(deeper.contains("use depth 1"), "{deeper}");
    let plain = one_layer(&[&[0, 1]]);
    let missing = evaluate(&plain, &options(1, 2)).unwrap_err().to_string();
    assert!(missing.contains("comoe trace record --stale-gate"), "{missing}");
    assert!(!PredictorKind::for_trace(&plain).contains(&PredictorKind::StaleGate));
}

#[test]
fn pinned_records_are_always_hit_and_none_is_as_without() {
    // Expert 0 comes every third time, too seldom for a least recently used one of three slots, and the others in turn.
    let set =
        |t: u32| if t.is_multiple_of(3) { vec![0, 1 + t % 4] } else { vec![1 + t % 4, 1 + (t + 1) % 4] };
    let tokens: Vec<_> = (0..60).map(|t| (0, true, vec![set(t)])).collect();
    let trace = made(&info(&[(0, 5)], 2), &tokens);
    let halves = |part| replay_pinned(&trace, PolicyKind::Lru, Scope::Layer, 3, part);
    let without =
        replay_span(&trace, ReplayPolicy::Online(PolicyKind::Lru), Scope::Layer, 3, Span::SecondHalf);
    assert_eq!(halves(0.0), without);
    assert_eq!(without.accesses, 60);
    // One may be pinned of three slots, with a token's two beside it.
    let one = halves(0.5);
    assert_eq!(halves(1.0), one, "a token's experts find room");
    let hottest_in = |range: std::ops::Range<u32>| {
        let uses = |e| range.clone().flat_map(set).filter(|x| *x == e).count();
        (0..5).max_by_key(|&e| (uses(e), Reverse(e))).map(|e| (e, uses(e))).unwrap()
    };
    let hottest = hottest_in(0..30).0;
    let uses = (30..60).flat_map(set).filter(|e| *e == hottest).count() as u64;
    assert!(one.hits >= uses && one != without, "{one:?} {without:?}");
    // With a slot for each, all that the first half has seen is hit.
    assert_eq!(replay_pinned(&trace, PolicyKind::Lru, Scope::Layer, 5, 0.25).hits, 60);
}
