//! What bookkeeping costs: an access of each policy at 128 and 512 experts, and a token of each predictor.
//!
//! Policies see a skewed random walk over one layer's experts, a quarter of which fit, in sets of eight; reported is the
//! time of one access, victims included. Predictors see 48 layers; reported is the time of one layer step: observed once,
//! and the next layer predicted.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use std::hint::black_box;

use comoe_core::policy::EvictionPolicy;
use comoe_core::replay::PredictorKind;
use comoe_core::store::RecordIndex;
use comoe_core::{PolicyKind, predict::Scored};

const TOP_K: usize = 8;
const TOKENS: usize = 512;
const LAYERS: usize = 48;

/// Sets of distinct experts, most of them from a window that drifts: `[TOKENS, TOP_K]`.
fn sets(experts: u32) -> Vec<Vec<u32>> {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut random = |below: u32| {
        // xorshift64* (Vigna 2014).
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        ((state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as u32) % below
    };
    let set = |t: usize| {
        let mut set = Vec::with_capacity(TOP_K);
        while set.len() < TOP_K {
            let near = random(4) > 0;
            let e = if near { (t as u32 / 8 + random(experts / 4)) % experts } else { random(experts) };
            if !set.contains(&e) {
                set.push(e);
            }
        }
        set
    };
    (0..TOKENS).map(set).collect()
}

/// Plays the sets as the pool does: members may not leave. Returns hits.
fn play(policy: &mut dyn EvictionPolicy, slots: usize, experts: usize, sets: &[Vec<u32>]) -> u64 {
    let (mut resident, mut pinned) = (vec![false; experts], vec![false; experts]);
    let (mut held, mut hits) = (0, 0);
    for set in sets {
        set.iter().for_each(|&e| pinned[e as usize] = true);
        for &e in set {
            let record = RecordIndex(e);
            if resident[e as usize] {
                policy.hit(record);
                hits += 1;
                continue;
            }
            if held == slots {
                let Some(victim) = policy.victim(&|r| !pinned[r.0 as usize]) else { continue };
                policy.remove(victim);
                resident[victim.0 as usize] = false;
                held -= 1;
            }
            policy.insert(record);
            resident[e as usize] = true;
            held += 1;
        }
        set.iter().for_each(|&e| pinned[e as usize] = false);
    }
    hits
}

fn policies(c: &mut Criterion) {
    for experts in [128usize, 512] {
        let sets = sets(experts as u32);
        let mut group = c.benchmark_group(format!("policy/{experts} experts"));
        group.throughput(Throughput::Elements((TOKENS * TOP_K) as u64));
        for kind in [PolicyKind::Lru, PolicyKind::Lfu, PolicyKind::Lfru, PolicyKind::Aged, PolicyKind::Blend]
        {
            group.bench_function(kind.name(), |b| {
                b.iter(|| {
                    let mut policy = kind.build(experts / 4, experts, TOP_K);
                    black_box(play(&mut *policy, experts / 4, experts, &sets))
                });
            });
        }
    }
}

fn predictors(c: &mut Criterion) {
    for experts in [128usize, 512] {
        let sets = sets(experts as u32);
        let mut group = c.benchmark_group(format!("predictor/{experts} experts, one layer step"));
        group.throughput(Throughput::Elements(1));
        for kind in PredictorKind::ALL {
            let mut predictor = kind.build(&[experts; LAYERS], 1);
            let mut guesses: Vec<Scored> = Vec::new();
            let mut step = 0;
            group.bench_function(kind.to_string(), |b| {
                b.iter(|| {
                    let layer = step % LAYERS;
                    predictor.observe(layer, &sets[step % TOKENS], TOP_K);
                    predictor.hint((layer + 1) % LAYERS, &sets[(step + 1) % TOKENS]);
                    predictor.predict((layer + 1) % LAYERS, &mut guesses);
                    step += 1;
                    guesses.len()
                });
            });
        }
    }
}

criterion_group!(benches, policies, predictors);
criterion_main!(benches);
