//! What is taken down of when things happen: as much as was counted, in the order in which it must be, and no bit depends on
//! it. How long anything takes is no test's business.

use std::collections::BTreeSet;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use comoe_core::backend::cuda::ResidentFormat;
use comoe_core::backend::{DeviceGuess, DeviceSpan, DeviceSpans, DriverKind, Queue};
use comoe_core::store::{RecordIndex, RecordSource};
use comoe_core::{
    CacheOptions, CacheStats, CudaOptions, ExpertCache, ExpertFormat, ExpertSpec, Prefetch, Rules,
};

use crate::backend::{Call, Model, cache, device, forward, numbers, options, same};
use crate::capture::{captured, driven_token};
use crate::conformance::{Experts, Noise};
use crate::device::driven;

const LAYERS: usize = 4;
const EXPERTS: usize = 12;
const TOP_K: usize = 3;
/// Events are as fine as half a microsecond, and the clock of some GPUs ticks once in one.
const TICK: f64 = 1.0;

fn model(device: &Device) -> Model<'_> {
    Model { device, hidden: 512, layers: LAYERS, experts: EXPERTS, top_k: TOP_K }
}

fn of(spans: &DeviceSpans, queue: Queue) -> Vec<&DeviceSpan> {
    spans.list.iter().filter(|s| s.queue == queue).collect()
}

fn bytes(spans: &[&DeviceSpan]) -> u64 {
    spans.iter().map(|s| s.bytes).sum()
}

/// Runs `f` with spans, and hands out these and what was counted.
fn taken<R>(cache: &ExpertCache, f: impl FnOnce() -> R) -> (R, DeviceSpans, CacheStats) {
    cache.begin_spans().expect("a device that works").expect("a GPU takes times down");
    cache.reset_stats();
    let result = f();
    let spans = cache.take_spans().expect("a device that works");
    assert_eq!(spans.left_out, 0);
    assert!(spans.list.is_sorted_by(|a, b| a.begin <= b.begin));
    (result, spans, cache.stats())
}

/// Experts of `call` that are in no slot.
fn absent(cache: &ExpertCache, experts: &Experts, call: &Call) -> BTreeSet<String> {
    let ids: Vec<u32> = call.ids.flatten_all().and_then(|t| t.to_vec1()).expect("ids");
    let first = experts.directory().layers()[call.layer].first;
    cache.with_backend(|_, pool| {
        let records = ids.iter().map(|id| RecordIndex(first + id));
        let missed = records.filter(|&record| pool.locate(record).is_none());
        missed.map(|record| experts.directory().id(record).to_string()).collect()
    })
}

/// Each record that a step misses has a span within its layer's, and none that it finds, by every kernel that reads through.
#[test]
#[ignore = "needs a CUDA device"]
fn a_device_driven_step_says_what_it_missed() {
    let device = device();
    let model = model(&device);
    let quiet = CudaOptions::default();
    let expanded = options(|o| o.resident = ResidentFormat::Bf16);
    for (name, format, cuda, most) in [
        ("int4 g64", ExpertFormat::Int4 { group: 64 }, &quiet, 1),
        ("int4 g32", ExpertFormat::Int4 { group: 32 }, &quiet, 1),
        ("int8", ExpertFormat::INT8, &quiet, 1),
        ("bf16", ExpertFormat::Bf16, &quiet, 1),
        ("int4 g64, two tokens", ExpertFormat::Int4 { group: 64 }, &quiet, 2),
        ("bf16, two tokens", ExpertFormat::Bf16, &quiet, 2),
        ("int4 g64 in bf16 slots", ExpertFormat::Int4 { group: 64 }, &expanded, 1),
    ] {
        let experts = Experts::random(ExpertSpec::swiglu(512, 320), format, LAYERS, EXPERTS, 6);
        let make = || {
            let options = driven(6 * LAYERS, TOP_K, DriverKind::Device);
            cache(&experts, &device, options, cuda, Rules::default())
        };
        let (timed, plain) = (make(), make());
        let mut noise = Noise(4);
        let (mut hits, mut misses) = (0, 0);
        for n in 0..40 {
            let call = model.call(n, 1 + n % most, DType::BF16, &mut noise);
            let missing = absent(&timed, &experts, &call);
            let (got, spans, stats) = taken(&timed, || forward(&timed, &call).expect("a step"));
            assert!(same(&got, &forward(&plain, &call).expect("a step")), "{name}, step {n}");
            let read = of(&spans, Queue::Demand);
            let said: BTreeSet<String> = read.iter().map(|s| s.what.clone()).collect();
            assert_eq!((said, read.len()), (missing, stats.misses() as usize), "{name}, step {n}");
            assert_eq!(bytes(&read), stats.bytes_moved, "{name}, step {n}");
            let step = of(&spans, Queue::Compute);
            assert_eq!(step.len(), 1, "{name}: {step:?}");
            let apart = spans.clock_error + TICK;
            for span in read {
                assert!(span.begin < span.end, "{name}, step {n}: {span:?}");
                let inside = span.begin + apart >= step[0].begin && span.end <= step[0].end + apart;
                assert!(inside, "{name}, step {n}: {span:?} in {step:?}, clocks {apart} us apart");
            }
            hits += stats.hits();
            misses += stats.misses();
        }
        assert!(hits > 10 && misses > 10, "{name}: {hits} hits, {misses} misses");
        timed.check().expect("slots equal the store");
    }
}

/// All layers of a token, each with a guess of the next one.
fn token(cache: &ExpertCache, calls: &[Call], guesses: &[Tensor], rooms: &[Tensor]) {
    for ((call, ids), room) in calls.iter().zip(guesses).zip(rooms) {
        let layer = cache.layer(call.layer).with_device_guess(DeviceGuess { ids, stream: None });
        layer.forward_to(&call.x, &call.ids, &call.weights, room).expect("a step");
    }
}

/// Layers of a token come one after the other, in a graph as well, and what is brought ahead is as much as was counted, or more:
/// what nobody could use of it is not counted.
#[test]
#[ignore = "needs a CUDA device"]
fn a_replayed_token_says_what_it_read_and_what_it_brought() {
    let device = device();
    let model = model(&device);
    let format = ExpertFormat::Int4 { group: 64 };
    let experts = Experts::random(ExpertSpec::swiglu(512, 320), format, LAYERS, EXPERTS, 6);
    let make = |prefetch| {
        let options = CacheOptions { prefetch, ..driven(4 * LAYERS, TOP_K, DriverKind::Device) };
        cache(&experts, &device, options, &CudaOptions::default(), Rules::default())
    };
    let (timed, plain) = (make(Prefetch::StaleGate), make(Prefetch::Off));
    let mut noise = Noise(17);
    let next = |noise: &mut Noise| -> Vec<Call> {
        (0..LAYERS).map(|l| model.call(l, 1, DType::BF16, noise)).collect()
    };
    let calls = next(&mut noise);
    let zeros = |n: usize, dtype| Tensor::zeros(n, dtype, &device).expect("room");
    let guesses: Vec<_> = (0..LAYERS).map(|_| zeros(TOP_K, DType::U32)).collect();
    let rooms: Vec<_> = calls.iter().map(Call::room).collect();
    let all_layers = || token(&timed, &calls, &guesses, &rooms);
    driven_token(&timed, TOP_K, all_layers);
    let record = || {
        let _token = timed.begin_token(1, TOP_K).expect("a token");
        captured(&device, all_layers).0
    };
    let unaware = record();
    let replay = |graph: &cudarc::driver::CudaGraph, noise: &mut Noise| {
        let new = next(noise);
        for (l, (into, from)) in calls.iter().zip(&new).enumerate() {
            into.take(from);
            // All that are guessed are right.
            let right = new[(l + 1) % LAYERS].ids.flatten_all().expect("ids");
            guesses[l].slice_set(&right, 0, 0).expect("a copy");
        }
        driven_token(&timed, TOP_K, || graph.launch().expect("a launch"));
        for (room, call) in rooms.iter().zip(&new) {
            assert!(same(&numbers(room), &forward(&plain, call).expect("a step")), "layer {}", call.layer);
        }
    };
    let (aware, spans, stats) = taken(&timed, || {
        let aware = record();
        for _ in 0..50 {
            replay(&aware, &mut noise);
        }
        aware
    });
    let (read, ahead) = (of(&spans, Queue::Demand), of(&spans, Queue::Prefetch));
    assert_eq!(read.len(), stats.misses() as usize, "{stats}");
    assert_eq!(bytes(&read), stats.bytes_moved, "{stats}");
    assert!(read.iter().any(|s| s.what.contains("brought ahead")), "{stats}");
    // Layer 3 of one token, then layer 0 of the next: the same clock says so of all.
    let layer = |s: &DeviceSpan| s.what["layer ".len()..].split(' ').next().map(str::to_owned);
    for pair in read.windows(2).filter(|pair| layer(pair[0]) != layer(pair[1])) {
        assert!(pair[0].end <= pair[1].begin, "{pair:?}");
    }
    assert!(read.iter().all(|s| s.begin < s.end));
    assert!(!ahead.is_empty() && bytes(&ahead) >= stats.prefetched_bytes, "{stats}");
    assert!(ahead.len() <= 50 * (LAYERS - 1), "a layer asks once: {} times", ahead.len());
    assert!(of(&spans, Queue::Compute).is_empty(), "a graph's parts are its own");

    // Graphs of before and of meanwhile go on as ever.
    let (_, spans, _) = taken(&timed, || replay(&unaware, &mut noise));
    assert!(spans.list.is_empty(), "{spans:?}");
    replay(&aware, &mut noise);
    timed.check().expect("slots equal the store");
}

/// A prompt and tokens that the host drives: works and copies are as many as were counted, and no layer's last work begins
/// before the last record that it waits for is there.
#[test]
#[ignore = "needs a CUDA device"]
fn host_driven_steps_say_what_they_copied_and_computed() {
    let device = device();
    let model = model(&device);
    let experts = Experts::random(ExpertSpec::swiglu(512, 320), ExpertFormat::INT4, LAYERS, EXPERTS, 6);
    let record = experts.layout.record_bytes as u64;
    let every = (LAYERS * EXPERTS) as u64 * record;
    for (name, ring, locked) in [
        ("through a ring", Some(5 * record), None),
        ("in waves", Some(0), None),
        ("half of it through the bounce buffer", Some(5 * record), Some(every / 2)),
    ] {
        let cuda = options(|o| o.page_lock_limit = locked);
        let make = || {
            let options = CacheOptions { ring, ..driven(5 * LAYERS, TOP_K, DriverKind::Host) };
            cache(&experts, &device, options, &cuda, Rules::default())
        };
        let (timed, plain) = (make(), make());
        let mut noise = Noise(9);
        for tokens in [100, 1, 257, 1, 1] {
            let calls: Vec<_> = (0..LAYERS).map(|l| model.call(l, tokens, DType::BF16, &mut noise)).collect();
            let run = |cache: &ExpertCache| -> Vec<_> {
                calls.iter().map(|call| forward(cache, call).expect("a step")).collect()
            };
            let (got, spans, stats) = taken(&timed, || run(&timed));
            assert!(got.iter().zip(run(&plain)).all(|(a, b)| same(a, &b)), "{name}, {tokens} tokens");
            let (fills, compute) = (of(&spans, Queue::Demand), of(&spans, Queue::Compute));
            assert_eq!(bytes(&fills), stats.bytes_moved + stats.prefetched_bytes, "{name}: {stats}");
            assert!(of(&spans, Queue::Prefetch).is_empty(), "{name}");
            let mut computed = 0;
            for l in 0..LAYERS {
                let about = format!("layer {l}");
                let works: Vec<_> = compute.iter().filter(|s| s.what.starts_with(&about)).collect();
                let numbers = |at: usize| -> u64 {
                    let number =
                        |s: &DeviceSpan| s.what.split(' ').nth(at).and_then(|n| n.parse::<u64>().ok());
                    works.iter().map(|s| number(s).expect("a number")).sum()
                };
                computed += numbers(2);
                assert_eq!(numbers(4), (tokens * TOP_K) as u64, "{name}: rows of {works:?}");
                let last = works.last().expect("a layer computes");
                for fill in fills.iter().filter(|s| s.what.starts_with(&about)) {
                    assert!(fill.end <= last.begin, "{name}, {tokens} tokens: {fill:?} for {last:?}");
                }
            }
            assert_eq!(computed, stats.accesses(), "{name}: each member is computed once");
            let waits = compute.iter().filter(|s| s.what == "wait for records").count();
            assert!(waits <= fills.len(), "{name}: {waits} waits");
        }
        timed.check().expect("slots equal the store");
    }
}

/// What the host driver brings ahead, piece by piece.
#[test]
#[ignore = "needs a CUDA device"]
fn what_a_table_guesses_is_taken_down_as_it_is_sent() {
    let device = device();
    let model = model(&device);
    let experts: Arc<Experts> =
        Experts::random(ExpertSpec::swiglu(512, 320), ExpertFormat::INT8, LAYERS, EXPERTS, 6);
    let prefetch = Prefetch::Correlation;
    let options = CacheOptions { prefetch, ..driven(4 * LAYERS, TOP_K, DriverKind::Host) };
    let cache = cache(&experts, &device, options, &CudaOptions::default(), Rules::default());
    let mut noise = Noise(9);
    // Three tokens again and again, so that there is something to learn and, with four slots, something to bring.
    let calls: Vec<_> = (0..3 * LAYERS).map(|n| model.call(n, 1, DType::BF16, &mut noise)).collect();
    let run = || (0..60).for_each(|n| drop(forward(&cache, &calls[n % calls.len()]).expect("a step")));
    run();
    let (_, spans, stats) = taken(&cache, run);
    let (fills, ahead) = (of(&spans, Queue::Demand), of(&spans, Queue::Prefetch));
    assert_eq!(bytes(&fills), stats.bytes_moved, "{stats}");
    assert!(stats.prefetched > 0, "{stats}");
    assert_eq!(bytes(&ahead), stats.prefetched_bytes, "{stats}");
}
