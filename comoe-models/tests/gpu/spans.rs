//! When the parts of a replayed step run, beside what the experts' cache says of records: the same clock, as much as was counted,
//! and no bit depends on it.

use candle_core::DType;
use comoe_core::backend::{DeviceSpan, Queue};
use comoe_core::{CacheOptions, Capacity, DriverKind, ExpertFormat, Prefetch};
use comoe_models::blocks::kv_cache::KvCache;
use comoe_models::{Decoder, DeviceSteps, LoadOptions, Rows};

use crate::files::prompts;
use crate::graph::{drawn, kept, open};
use crate::tiny::converted;

const STEPS: usize = 12;

/// A prompt and `n` tokens behind it.
fn begin<'d>(decoder: &'d Decoder, kv: &mut KvCache, n: usize) -> DeviceSteps<'d> {
    let mut steps = DeviceSteps::of(decoder).expect("memory").expect("fused steps");
    steps.begin(&drawn(7), &prompts()[0]).expect("options");
    let logits = decoder.forward(&prompts()[0], kv, Rows::Last).expect("a prompt");
    let mut last = steps.choose(&logits, kv).expect("a token");
    for done in 0..n {
        last = match steps.next(kv, n - done).expect("a step") {
            Some(token) => token,
            None => {
                let logits = decoder.forward(&[last], kv, Rows::Last).expect("a step");
                steps.choose(&logits, kv).expect("a token")
            }
        };
    }
    steps.settle();
    steps
}

#[test]
#[ignore = "needs a CUDA device"]
fn parts_of_a_step_and_records_are_on_one_clock() {
    for format in [ExpertFormat::Int4 { group: 64 }, ExpertFormat::INT8] {
        let cache = CacheOptions {
            capacity: Capacity::Slots(24),
            driver: DriverKind::Device,
            prefetch: Prefetch::StaleGate,
            ..CacheOptions::default()
        };
        let (format, dtype, cache_dir) = (Some(format), DType::BF16, Some(converted()));
        let decoder = open(&LoadOptions { format, dtype, cache_dir, cache, ..LoadOptions::default() });
        let experts = decoder.experts();

        let mut plain = decoder.new_kv().expect("a KV cache");
        drop(begin(&decoder, &mut plain, 5 + STEPS));
        let mut kv = decoder.new_kv().expect("a KV cache");
        let mut steps = begin(&decoder, &mut kv, 5);
        let zero = experts.begin_spans().expect("a device that works").expect("a GPU takes times down");
        experts.reset_stats();
        let profile = steps.profile(&mut kv, STEPS).expect("steps").expect("they are replayed");
        let spans = experts.take_spans().expect("a device that works");
        let stats = experts.stats();
        assert!(kept(&kv) == kept(&plain), "keys and values differ in bits");

        assert_eq!(profile.steps.len(), STEPS);
        assert!(profile.steps.iter().all(|times| times.len() == profile.parts.len() + 1));
        assert!(profile.steps.concat().is_sorted(), "steps and their parts come one after the other");
        let of = |queue| spans.list.iter().filter(move |s: &&DeviceSpan| s.queue == queue);
        let bytes = |queue| of(queue).map(|s| s.bytes).sum::<u64>();
        assert_eq!(of(Queue::Demand).count() as u64, stats.misses(), "{stats}");
        assert_eq!(bytes(Queue::Demand), stats.bytes_moved, "{stats}");
        assert!(bytes(Queue::Prefetch) >= stats.prefetched_bytes && stats.prefetched > 0, "{stats}");

        // All of these are by one clock.
        let us = |ns: u64| (ns - zero.device_ns) as f64 / 1e3;
        let within =
            |span: &DeviceSpan, [begin, end]: [u64; 2]| span.begin >= us(begin) && span.end <= us(end);
        let parts = profile.steps.iter().flat_map(|times| times.windows(2).zip(&profile.parts));
        let experts_parts: Vec<[u64; 2]> =
            parts.filter(|(_, part)| part.what == "experts").map(|(times, _)| [times[0], times[1]]).collect();
        for span in of(Queue::Demand) {
            let inside = experts_parts.iter().any(|&part| within(span, part));
            assert!(span.begin < span.end && inside, "{span:?}");
        }
        for span in of(Queue::Prefetch) {
            let inside = profile.steps.iter().any(|times| within(span, [times[0], times[times.len() - 1]]));
            assert!(inside, "{span:?}");
        }
    }
}
