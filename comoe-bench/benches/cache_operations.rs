//! What the cache costs beside copies and arithmetic, per layer step of one token: 48 layers of 128 experts, top-8
//! uniform at random, 64 slots a layer (half hit).
//!
//! `policy`: looking the eight up in one layer's policy, evicting and inserting the missing. `pool`: the same through
//! the pool, with pins and slots. `step`: the whole schedule (deduplication, split, batch, tickets, statistics) on a
//! backend that does nothing; `step, prefetch` adds the correlation table's learning and guessing. Times are per layer
//! step, to be held against the step's own work: some 20 us on a GPU, milliseconds on a CPU.

use std::sync::Arc;
use std::time::Duration;

use candle_core::{DType, Device};
use comoe_bench::noise::Noise;
use comoe_bench::null::NullBackend;
use comoe_core::pool::{Pool, PoolShape};
use comoe_core::store::{Directory, RecordIndex, RecordSource};
use comoe_core::{CacheOptions, Capacity, PolicyKind, Prefetch, RecordCache};
use criterion::{BatchSize, Criterion, criterion_group, criterion_main};

const LAYERS: usize = 48;
const EXPERTS: usize = 128;
const TOP_K: usize = 8;
const SLOTS: usize = 64;
const POLICIES: [PolicyKind; 4] = [PolicyKind::Lru, PolicyKind::Lfu, PolicyKind::Lfru, PolicyKind::Blend];

/// Keys without bytes.
struct Keys(Directory);

impl RecordSource for Keys {
    fn directory(&self) -> &Directory {
        &self.0
    }

    fn read(&self, _: RecordIndex, out: &mut [u8]) -> comoe_core::Result<()> {
        out.fill(0);
        Ok(())
    }
}

fn policies(c: &mut Criterion) {
    let mut group = c.benchmark_group("cache_operations");
    for kind in POLICIES {
        group.bench_function(format!("policy/{kind}"), |b| {
            let mut policy = kind.build(SLOTS, EXPERTS, TOP_K);
            let mut resident = [false; EXPERTS];
            (0..SLOTS).for_each(|e| {
                policy.insert(RecordIndex(e as u32));
                resident[e] = true;
            });
            let mut noise = Noise::new(1);
            b.iter_batched(
                || noise.distinct(EXPERTS, TOP_K),
                |set| {
                    for &e in &set {
                        if resident[e as usize] {
                            policy.hit(RecordIndex(e));
                            continue;
                        }
                        let victim = policy.victim(&|r| !set.contains(&r.0)).expect("64 slots, 8 in use");
                        policy.remove(victim);
                        resident[victim.0 as usize] = false;
                        policy.insert(RecordIndex(e));
                        resident[e as usize] = true;
                    }
                },
                BatchSize::SmallInput,
            );
        });
        group.bench_function(format!("pool/{kind}"), |b| {
            let shape = PoolShape::by_layer(LAYERS * SLOTS, &[EXPERTS; LAYERS], 0);
            let mut pool =
                Pool::new(shape, LAYERS * EXPERTS, |slots| kind.build(slots, LAYERS * EXPERTS, TOP_K));
            let mut noise = Noise::new(1);
            let mut layer = 0;
            let mut step = |pool: &mut Pool, set: Vec<u32>| {
                layer = (layer + 1) % LAYERS;
                let records = set.iter().map(|e| RecordIndex((layer * EXPERTS) as u32 + e));
                pool.pin(records.clone());
                for record in records.clone() {
                    match pool.locate(record) {
                        Some(_) => pool.hit(layer, record),
                        None => {
                            let slot = pool.place(layer, record).expect("64 slots, 8 in use");
                            pool.arrived(slot);
                        }
                    }
                }
                pool.unpin(records);
            };
            (0..40 * LAYERS).for_each(|_| step(&mut pool, noise.distinct(EXPERTS, TOP_K)));
            b.iter_batched(
                || noise.distinct(EXPERTS, TOP_K),
                |set| step(&mut pool, set),
                BatchSize::SmallInput,
            );
        });
    }
    group.finish();
}

fn steps(c: &mut Criterion) {
    let mut group = c.benchmark_group("cache_operations");
    let cases =
        POLICIES.map(|p| (p, Prefetch::Off)).into_iter().chain([(PolicyKind::Lru, Prefetch::Correlation)]);
    for (policy, prefetch) in cases {
        let name = match prefetch {
            Prefetch::Off => format!("step/{policy}"),
            _ => format!("step, prefetch/{policy}"),
        };
        group.bench_function(name, |b| {
            let directory = Directory::new((0..LAYERS).map(|l| (l, EXPERTS, 512))).expect("layers in order");
            let options = CacheOptions {
                capacity: Capacity::Slots(LAYERS * SLOTS),
                policy,
                prefetch,
                top_k: TOP_K,
                ..CacheOptions::default()
            };
            let cache = RecordCache::builder(Arc::new(Keys(directory)), &Device::Cpu)
                .backend(Box::new(NullBackend::new().expect("one zero")))
                .options(options)
                .build()
                .expect("a cache");
            let mut noise = Noise::new(1);
            let mut layer = 0;
            let mut step = |set: Vec<u32>| {
                layer = (layer + 1) % LAYERS;
                cache.gather(layer, &set, DType::F32, &[1]).expect("a step")
            };
            (0..40 * LAYERS).for_each(|_| drop(step(noise.distinct(EXPERTS, TOP_K))));
            b.iter_batched(|| noise.distinct(EXPERTS, TOP_K), &mut step, BatchSize::SmallInput);
        });
    }
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_millis(1000));
    targets = policies, steps
}
criterion_main!(benches);
