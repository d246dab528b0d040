//! Prompts through the ring, on the simulated backend: what is sent for when, what stays, and that every ordering rule is
//! needed.

use std::sync::Arc;

use candle_core::{DType, Device};

use crate::backend::sim::{SimBackend, SimEvent, SimLog};
use crate::schedule::Rules;
use crate::stats::CacheStats;
use crate::store::{Directory, RecordIndex, RecordSource};
use crate::{Capacity, RecordCache, Result, Scope};

const LAYERS: usize = 4;
const EXPERTS: usize = 8;

/// Records whose every word says whose they are.
struct Tagged(Directory);

impl RecordSource for Tagged {
    fn directory(&self) -> &Directory {
        &self.0
    }

    fn read(&self, record: RecordIndex, out: &mut [u8]) -> Result<()> {
        out.chunks_exact_mut(4).for_each(|word| word.copy_from_slice(&record.0.to_le_bytes()));
        Ok(())
    }
}

fn cache(
    seed: u64,
    slots: usize,
    ring: u64,
    scope: Scope,
    rules: Rules,
    set: fn(SimBackend) -> SimBackend,
) -> (RecordCache, SimLog) {
    let source: Arc<dyn RecordSource> =
        Arc::new(Tagged(Directory::new((0..LAYERS).map(|l| (l, EXPERTS, 512))).unwrap()));
    let backend = set(SimBackend::new(source.clone(), seed));
    let log = backend.log();
    let builder = RecordCache::builder(source, &Device::Cpu).backend(Box::new(backend)).rules(rules);
    let cache = builder.capacity(Capacity::Slots(slots)).scope(scope).top_k(1).ring(512 * ring).build();
    (cache.unwrap(), log)
}

fn plain(slots: usize, ring: u64) -> (RecordCache, SimLog) {
    cache(1, slots, ring, Scope::Layer, Rules::default(), |b| b)
}

fn right(cache: &RecordCache, layer: usize, ids: &[u32]) -> Result<bool> {
    let got = cache.gather(layer, ids, DType::U32, &[1])?.flatten_all()?.to_vec1::<u32>()?;
    Ok(got.iter().zip(ids).all(|(record, id)| *record == (layer * EXPERTS) as u32 + id))
}

/// Every expert of every layer, the last ones last.
fn prompt(cache: &RecordCache) -> Result<bool> {
    let ids: Vec<u32> = (0..EXPERTS as u32).collect();
    (0..LAYERS).try_fold(true, |all, layer| Ok(all & right(cache, layer, &ids)?))
}

fn cached(cache: &RecordCache, layer: usize) -> Vec<u32> {
    let records = (0..EXPERTS).map(|e| RecordIndex((layer * EXPERTS + e) as u32));
    let held = |r: &RecordIndex| cache.with_backend(|_, pool| pool.locate(*r).is_some());
    records.filter(held).map(|r| r.0 - (layer * EXPERTS) as u32).collect()
}

/// Records sent for, in order.
fn sent(events: &[SimEvent]) -> Vec<u32> {
    let fills = events.iter().filter_map(|e| match e {
        SimEvent::Fill { records, .. } => Some(records.iter().map(|r| r.0)),
        _ => None,
    });
    fills.flatten().collect()
}

#[test]
fn the_next_layer_is_sent_for_before_it_is_asked_for_and_every_record_moves_once() {
    let (cache, log) = plain(2 * LAYERS, 6);
    let all: Vec<u32> = (0..EXPERTS as u32).collect();
    assert!(right(&cache, 0, &all).unwrap());
    // Layer 0 on demand, then layer 1 unasked: to its two free slots, and to the ring.
    assert_eq!(sent(&log.take()), (0..16).collect::<Vec<_>>());
    assert!(right(&cache, 1, &all).unwrap());
    assert_eq!(sent(&log.take()), (16..24).collect::<Vec<_>>());
    assert!(right(&cache, 2, &all).unwrap() && right(&cache, 3, &all).unwrap());
    assert_eq!(sent(&log.take()), (24..32).collect::<Vec<_>>(), "nothing lies behind the last layer");

    let CacheStats { records_moved, bytes_moved, prefetched, prefetched_bytes, .. } = cache.stats();
    assert_eq!((records_moved, bytes_moved, prefetched, prefetched_bytes), (8, 8 * 512, 24, 24 * 512));
    let stats = cache.stats();
    assert_eq!((stats.prefetch_used, stats.prefetch_wasted, stats.ring_slots), (24, 0, 6));
    cache.check().unwrap();
}

#[test]
fn slots_hold_what_the_prompt_used_last_and_residents_are_not_sent_for_again() {
    let (cache, log) = plain(2 * LAYERS, 5);
    assert!(prompt(&cache).unwrap());
    for layer in 0..LAYERS {
        assert_eq!(cached(&cache, layer), [6, 7], "layer {layer}");
    }
    log.take();
    // Its residents are read from their slots, and others take their place in the end.
    let ids: Vec<u32> = [6, 7, 0, 1, 2, 3, 4, 5].into();
    for layer in 0..LAYERS {
        assert!(right(&cache, layer, &ids).unwrap());
        assert_eq!(cached(&cache, layer), [4, 5], "layer {layer}");
    }
    let again = sent(&log.take());
    assert_eq!(again.len(), LAYERS * (EXPERTS - 2));
    assert!(again.iter().all(|r| r % 8 < 6), "{again:?}");
    cache.check().unwrap();
}

#[test]
fn a_ring_of_any_size_gives_the_same_and_leaves_the_same() {
    for scope in [Scope::Layer, Scope::Global] {
        for slots in [1, 4, 9, 31] {
            for ring in 1..20 {
                for seed in 0..4 {
                    let (cache, _) = cache(seed, slots, ring, scope, Rules::default(), |b| b);
                    assert!(prompt(&cache).unwrap() && prompt(&cache).unwrap(), "{slots} slots, ring {ring}");
                    if scope == Scope::Layer && slots % LAYERS == 0 {
                        let want: Vec<u32> = (0..EXPERTS as u32).skip(EXPERTS - slots / LAYERS).collect();
                        assert_eq!(cached(&cache, 2), want, "{slots} slots, ring {ring}");
                    }
                    cache.check().unwrap();
                    assert_eq!(cache.with_backend(|_, pool| pool.inconsistency()), None);
                }
            }
        }
    }
}

#[test]
fn a_set_that_leaves_many_out_streams_nothing_and_what_is_unused_is_waste() {
    let (cache, log) = plain(2 * LAYERS, 6);
    assert!(right(&cache, 0, &[0, 1, 2, 3, 4, 5]).unwrap());
    assert_eq!(sent(&log.take()).len(), 6, "three quarters say little of the next layer");
    assert!(right(&cache, 1, &[0, 1, 2, 3, 4, 5, 6]).unwrap());
    assert!(right(&cache, 2, &[1, 2, 3]).unwrap());
    let stats = cache.stats();
    assert_eq!((stats.prefetched, stats.prefetch_used, stats.prefetch_wasted), (8, 3, 5));
    assert_eq!((stats.prefetch_wasted_bytes, stats.layers[2].prefetch_wasted), (5 * 512, 5));
    // A prompt that ends half-way leaves records behind, which the next one gives back.
    let all: Vec<u32> = (0..EXPERTS as u32).collect();
    assert!(right(&cache, 0, &all).unwrap());
    assert!(prompt(&cache).unwrap());
    cache.check().unwrap();
}

#[test]
fn dropping_a_wait_is_caught() {
    let walk = |rules, seed, set| {
        let (cache, _) = cache(seed, 2 * LAYERS, 5, Scope::Layer, rules, set);
        prompt(&cache).and_then(|first| Ok(first & prompt(&cache)?))
    };
    for (rules, said) in [
        (Rules { wait_before_read: false, ..Rules::default() }, "before its fill was done"),
        (Rules { wait_before_refill: false, ..Rules::default() }, "refilled before its last reader was done"),
    ] {
        let error = walk(rules, 1, |b: SimBackend| b).unwrap_err().to_string();
        assert!(error.contains(said), "{error}");
        let wrong = (0..50).any(|seed| !walk(rules, seed, SimBackend::unchecked).unwrap_or(false));
        assert!(wrong, "{said}");
    }
    assert!((0..50).all(|seed| walk(Rules::default(), seed, SimBackend::unchecked).unwrap()));
}
