//! The schedule on the simulated backend: exactness for every shape of pool, counters that add up, and a test per
//! ordering rule that the simulation catches its absence.

use std::collections::BTreeSet;
use std::sync::Arc;

use candle_core::{DType, Device};
use proptest::prelude::*;

use crate::backend::Queue;
use crate::backend::sim::{SimBackend, SimEvent, SimLog};
use crate::schedule::{PrefetchTrigger, Rules};
use crate::store::{Directory, RecordIndex, RecordSource};
use crate::{CacheBuilder, Capacity, Error, PolicyKind, Prefetch, RecordCache, Result, Scope};

const LAYERS: usize = 3;
const EXPERTS: usize = 8;

/// Records whose every word says whose they are.
struct Tagged(Directory);

impl Tagged {
    fn source() -> Arc<dyn RecordSource> {
        Arc::new(Self(Directory::new((0..LAYERS).map(|l| (l, EXPERTS, 512))).unwrap()))
    }
}

impl RecordSource for Tagged {
    fn directory(&self) -> &Directory {
        &self.0
    }

    fn read(&self, record: RecordIndex, out: &mut [u8]) -> Result<()> {
        out.chunks_exact_mut(4).for_each(|word| word.copy_from_slice(&record.0.to_le_bytes()));
        Ok(())
    }
}

struct Sim {
    cache: RecordCache,
    log: SimLog,
}

fn sim(
    seed: u64,
    set: impl FnOnce(SimBackend) -> SimBackend,
    options: impl FnOnce(Builder) -> Builder,
) -> Sim {
    let source = Tagged::source();
    let backend = set(SimBackend::new(source.clone(), seed));
    let log = backend.log();
    let builder = RecordCache::builder(source, &Device::Cpu).backend(Box::new(backend));
    Sim { cache: options(builder).build().unwrap(), log }
}

type Builder = CacheBuilder<Arc<dyn RecordSource>>;

/// The first two words of each gathered record, or the error.
fn gather(cache: &RecordCache, layer: usize, ids: &[u32]) -> Result<Vec<Vec<u32>>> {
    Ok(cache.gather(layer, ids, DType::U32, &[2])?.to_vec2()?)
}

fn expected(layer: usize, ids: &[u32]) -> Vec<Vec<u32>> {
    ids.iter().map(|e| vec![(layer * EXPERTS) as u32 + e; 2]).collect()
}

/// Steps that walk the layers in order, as a model does.
fn steps() -> impl Strategy<Value = Vec<Vec<u32>>> {
    prop::collection::vec(prop::collection::vec(0..EXPERTS as u32, 1..12), 1..24)
}

fn play(cache: &RecordCache, steps: &[Vec<u32>]) -> Result<bool> {
    let mut right = true;
    for (i, ids) in steps.iter().enumerate() {
        right &= gather(cache, i % LAYERS, ids)? == expected(i % LAYERS, ids);
    }
    Ok(right)
}

/// A fixed walk with repeats, sets larger than the slots, and changes of mind.
fn long_walk() -> Vec<Vec<u32>> {
    (0..60u32)
        .map(|i| (0..1 + i % 7).map(|j| (i * i / 3 + j * (1 + i % 3)) % EXPERTS as u32).collect())
        .collect()
}

proptest! {
    #[test]
    fn what_is_read_is_what_was_asked_for_in_every_order(
        steps in steps(),
        slots in 1usize..=LAYERS * EXPERTS,
        policy in prop::sample::select(vec![PolicyKind::Lru, PolicyKind::Lfu, PolicyKind::Lfru]),
        scope in prop::sample::select(vec![Scope::Layer, Scope::Global]),
        prefetch in prop::sample::select(vec![Prefetch::Off, Prefetch::Correlation, Prefetch::Auto]),
        trigger in prop::sample::select(vec![
            PrefetchTrigger::AfterRouting, PrefetchTrigger::MidLayer, PrefetchTrigger::EndOfLayer
        ]),
        top_k in 1usize..4,
        ring in 0u64..20,
        seed in any::<u64>(),
    ) {
        let Sim { cache, .. } = sim(seed, |b| b, |b| {
            let b = b.capacity(Capacity::Slots(slots.max(top_k))).policy(policy).scope(scope).ring(512 * ring);
            b.prefetch(prefetch).prefetch_trigger(trigger).top_k(top_k)
        });
        prop_assert!(play(&cache, &steps).unwrap());
        cache.check().unwrap();
        prop_assert_eq!(cache.with_backend(|_, pool| pool.inconsistency()), None);

        let stats = cache.stats();
        let distinct: usize = steps.iter().map(|s| s.iter().collect::<BTreeSet<_>>().len()).sum();
        prop_assert_eq!(stats.accesses(), distinct as u64);
        prop_assert_eq!(stats.hits() + stats.misses(), stats.accesses());
        prop_assert_eq!(stats.records_moved, stats.misses() - stats.late());
        prop_assert_eq!(stats.bytes_moved, stats.records_moved * 512);
        prop_assert!(stats.prefetch_used + stats.prefetch_wasted <= stats.prefetched);
        prop_assert_eq!(stats.steps, steps.len() as u64);
    }

    #[test]
    fn a_record_moves_at_most_once_per_layer_step_and_sets_that_fit_move_in_one_batch(
        steps in steps(),
        slots in 1usize..=EXPERTS,
        seed in any::<u64>(),
    ) {
        let Sim { cache, log } = sim(seed, |b| b, |b| b.capacity(Capacity::Slots(slots * LAYERS)));
        for (i, ids) in steps.iter().enumerate() {
            gather(&cache, i % LAYERS, ids).unwrap();
            let batches: Vec<Vec<RecordIndex>> = log.take().into_iter().filter_map(|e| match e {
                SimEvent::Fill { queue: Queue::Demand, records } => Some(records),
                _ => None,
            }).collect();
            let moved: Vec<_> = batches.concat();
            prop_assert_eq!(moved.iter().collect::<BTreeSet<_>>().len(), moved.len());
            let distinct = ids.iter().collect::<BTreeSet<_>>().len();
            if distinct <= slots {
                prop_assert!(batches.len() <= 1, "{} batches for {distinct} records in {slots} slots", batches.len());
            }
        }
    }
}

#[test]
fn copies_of_a_layer_are_enqueued_before_its_hits_run() {
    let Sim { cache, log } = sim(1, |b| b, |b| b.capacity(Capacity::Slots(4 * LAYERS)));
    gather(&cache, 0, &[0, 1]).unwrap();
    log.take();
    gather(&cache, 0, &[0, 1, 2]).unwrap();
    let events = log.take();
    let kinds: Vec<_> = events
        .iter()
        .map(|e| match e {
            SimEvent::Fill { records, .. } => ("fill", records.iter().map(|r| r.0).collect()),
            SimEvent::Run(records) => ("run", records.iter().map(|r| r.0).collect()),
            SimEvent::Wait(_) => ("wait", vec![]),
        })
        .collect();
    assert_eq!(kinds, [("fill", vec![2]), ("run", vec![0, 1]), ("wait", vec![]), ("run", vec![2])]);
}

/// What the checked simulation says when a rule is dropped, and whether the unchecked one gives wrong output for some
/// order of execution.
fn drop_rule(rules: Rules, prefetch: Prefetch) -> (Option<String>, bool) {
    let options =
        |b: Builder| b.capacity(Capacity::Slots(4 * LAYERS)).top_k(2).prefetch(prefetch).rules(rules);
    let Sim { cache, .. } = sim(1, |b| b, options);
    let said = play(&cache, &long_walk()).err().map(|e| e.to_string());
    let wrong = (0..50).any(|seed| {
        let Sim { cache, .. } = sim(seed, SimBackend::unchecked, options);
        !play(&cache, &long_walk()).unwrap_or(false)
    });
    (said, wrong)
}

#[test]
fn with_every_rule_kept_nothing_is_caught() {
    for prefetch in [Prefetch::Off, Prefetch::Correlation, Prefetch::Auto] {
        assert_eq!(drop_rule(Rules::default(), prefetch), (None, false));
    }
}

#[test]
fn reading_without_waiting_for_the_fill_is_caught() {
    for prefetch in [Prefetch::Off, Prefetch::Correlation, Prefetch::Auto] {
        let (said, wrong) = drop_rule(Rules { wait_before_read: false, ..Rules::default() }, prefetch);
        assert!(said.unwrap().contains("read before its fill was done"));
        assert!(wrong);
    }
}

#[test]
fn refilling_without_waiting_for_the_reader_is_caught() {
    let (said, wrong) = drop_rule(Rules { wait_before_refill: false, ..Rules::default() }, Prefetch::Off);
    assert!(said.unwrap().contains("refilled before its last reader was done"));
    assert!(wrong);
}

#[test]
fn choosing_victims_before_pinning_the_set_is_caught() {
    let (said, wrong) = drop_rule(Rules { pin_before_victims: false, ..Rules::default() }, Prefetch::Off);
    assert!(said.unwrap().contains("another record in the slot"));
    assert!(wrong);
}

#[test]
fn running_hits_before_enqueuing_the_fills_shows_in_the_log() {
    let rules = Rules { fills_before_hits: false, ..Rules::default() };
    let Sim { cache, log } = sim(1, |b| b, |b| b.capacity(Capacity::Slots(4 * LAYERS)).rules(rules));
    gather(&cache, 0, &[0, 1]).unwrap();
    log.take();
    gather(&cache, 0, &[0, 1, 2]).unwrap();
    assert!(matches!(&log.take()[0], SimEvent::Run(_)));
}

#[test]
fn a_failed_fill_names_the_expert_and_stops_the_cache() {
    let fail = |b: SimBackend| b.failing_at(RecordIndex(EXPERTS as u32 + 5));
    let Sim { cache, .. } = sim(3, fail, |b| b.capacity(Capacity::Slots(9)));
    gather(&cache, 1, &[4]).unwrap();
    let first = gather(&cache, 1, &[5]).unwrap_err().to_string();
    assert!(first.contains("layer 1 expert 5"), "{first}");
    let later = gather(&cache, 1, &[4]).unwrap_err();
    assert!(matches!(&later, Error::Stopped { first: text } if *text == first), "{later}");
}

#[test]
fn bad_arguments_leave_the_cache_usable() {
    let Sim { cache, .. } = sim(3, |b| b, |b| b.capacity(Capacity::Slots(9)));
    let unknown = gather(&cache, 1, &[3, 8]).unwrap_err().to_string();
    assert!(unknown.contains("layer 1 expert 8") && unknown.contains("8 experts"), "{unknown}");
    assert!(gather(&cache, 7, &[0]).unwrap_err().to_string().contains("layer 7 has 0 experts"));
    assert!(cache.gather(0, &[0], DType::F32, &[129]).unwrap_err().to_string().contains("a record has 512"));
    assert_eq!(cache.gather(0, &[], DType::F32, &[4]).unwrap().dims(), [0, 4]);
    assert_eq!(gather(&cache, 1, &[3]).unwrap(), expected(1, &[3]));
}

#[test]
fn capacities_that_do_not_work_say_what_would() {
    let build = |capacity| {
        let source = Tagged::source();
        RecordCache::builder(source, &Device::Cpu)
            .capacity(capacity)
            .top_k(2)
            .build()
            .map(|c| c.stats().slots)
    };
    assert_eq!(build(Capacity::All).unwrap(), 24);
    assert_eq!(build(Capacity::Slots(1000)).unwrap(), 24);
    assert_eq!(build(Capacity::Fraction(0.5)).unwrap(), 12);
    assert_eq!(build(Capacity::Bytes(512 * 7 + 100)).unwrap(), 7);
    let error = |capacity| build(capacity).unwrap_err().to_string();
    assert!(error(Capacity::Slots(1)).contains("needs 2"));
    assert!(error(Capacity::Bytes(600)).contains("needs 2 experts of 512 bytes; give at least 1024"));
    for f in [0.0, 1.5, -1.0, f64::NAN] {
        assert!(error(Capacity::Fraction(f)).contains("above 0"));
    }
}

#[test]
fn fewer_slots_than_one_token_uses_share_one_pool_and_say_so() {
    let Sim { cache, .. } = sim(1, |b| b, |b| b.capacity(Capacity::Slots(4)).top_k(2));
    assert!(cache.notes()[0].contains("less than one token uses (6)"), "{:?}", cache.notes());
    assert!(play(&cache, &long_walk()).unwrap());
}

#[test]
fn correlation_prefetch_is_used_when_routing_repeats() {
    let Sim { cache, .. } =
        sim(5, |b| b, |b| b.capacity(Capacity::Slots(3 * LAYERS)).top_k(2).prefetch(Prefetch::Correlation));
    // Four pairs in turn, each layer following the one before: nothing stays for long, everything is predictable.
    // `gather` counts a whole call as one token, so a call of two is a token with top-2.
    for i in 0..120u32 {
        for layer in 0..LAYERS {
            let e = (2 * i + layer as u32) % 8;
            assert_eq!(gather(&cache, layer, &[e, (e + 1) % 8]).unwrap(), expected(layer, &[e, (e + 1) % 8]));
        }
    }
    let stats = cache.stats();
    assert!(stats.prefetch_used > 300 && stats.prefetch_wasted < stats.prefetch_used / 4, "{stats}");
}

#[test]
fn auto_prefetch_opens_for_the_layer_where_it_pays_and_not_for_the_others() {
    let Sim { cache, .. } =
        sim(5, |b| b, |b| b.capacity(Capacity::Slots(3 * LAYERS)).top_k(2).prefetch(Prefetch::Auto));
    let mut state = 1u32;
    let mut random = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state >> 24
    };
    for _ in 0..600 {
        // Layer 1 follows layer 0, layer 2 follows nothing.
        let (first, last) = (random() % 8, random() % 8);
        for (layer, e) in [first, (first + 3) % 8, last].into_iter().enumerate() {
            assert_eq!(gather(&cache, layer, &[e, (e + 1) % 8]).unwrap(), expected(layer, &[e, (e + 1) % 8]));
        }
    }
    let stats = cache.stats();
    assert!(stats.prefetch_judged && stats.to_string().contains("prefetch pays in 1 of 3 layers"), "{stats}");
    assert!(stats.layers[1].prefetch_used > 200, "{stats}");
    assert!(stats.layers[1].prefetch_wasted < stats.layers[1].prefetch_used, "{stats}");
    assert_eq!(stats.layers[2].prefetch_width, 0, "{stats}");
    assert!(stats.layers[2].prefetch_wasted < 60, "{stats}");
}

#[test]
fn a_flipped_byte_in_a_slot_shows_and_is_found_by_check() {
    let Sim { cache, .. } = sim(1, |b| b, |b| b.capacity(Capacity::All));
    gather(&cache, 2, &[6]).unwrap();
    let slot = cache.with_backend(|_, pool| pool.locate(RecordIndex(22)).unwrap().slot);
    cache.with_backend(|backend, _| {
        backend.synchronize().unwrap();
        let mut bytes = vec![0; 512];
        backend.read_slot(slot, &mut bytes).unwrap();
        bytes[4] ^= 1;
        backend.write_slot(slot, &bytes).unwrap();
    });
    assert_eq!(gather(&cache, 2, &[6]).unwrap(), [[22, 23]]);
    let found = cache.check().unwrap_err().to_string();
    assert!(found.contains("layer 2 expert 6") && found.contains("byte 4"), "{found}");
}

#[test]
fn sampled_checks_go_round_and_a_difference_stops_the_cache() {
    let Sim { cache, .. } = sim(1, |b| b, |b| b.capacity(Capacity::All));
    assert_eq!(cache.check_sample(4).unwrap(), 0, "nothing is resident yet");
    for expert in 0..7 {
        gather(&cache, 2, &[expert]).unwrap();
    }
    for _ in 0..10 {
        assert_eq!(cache.check_sample(3).unwrap(), 3);
    }
    let slot = cache.with_backend(|_, pool| pool.locate(RecordIndex(22)).unwrap().slot);
    cache.with_backend(|backend, _| {
        let mut bytes = vec![0; 512];
        backend.read_slot(slot, &mut bytes).unwrap();
        bytes[9] ^= 1;
        backend.write_slot(slot, &bytes).unwrap();
    });
    // Seven resident slots, two at a time: found by the fourth call at the latest.
    let found = (0..4).find_map(|_| cache.check_sample(2).err()).expect("the damage is found");
    assert!(found.to_string().contains("layer 2 expert 6"), "{found}");
    let stopped = gather(&cache, 2, &[0]).unwrap_err().to_string();
    assert!(stopped.contains("stopped") && stopped.contains("layer 2 expert 6"), "{stopped}");
    assert!(cache.check_sample(2).is_err());
}
