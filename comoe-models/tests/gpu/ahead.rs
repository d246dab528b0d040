//! Decoding with the stale gate on the device: the next layer's router, asked one layer early, has its experts brought on a
//! branch of the graph, and no token and no bit depends on it.

use candle_core::DType;
use comoe_core::{CacheOptions, Capacity, DriverKind, ExpertFormat, Prefetch};
use comoe_models::{Decoder, LoadOptions, SamplerOptions};

use crate::files::{Family, families, prompts};
use crate::graph::{decode, drawn, open, same};
use crate::tiny::{GPU, converted};

#[test]
#[ignore = "needs a CUDA device"]
fn the_stale_gate_brings_experts_and_changes_no_bit() {
    let prompt = &prompts()[0];
    for (format, dtype) in [
        (None, DType::BF16),
        (Some(ExpertFormat::Int4 { group: 64 }), DType::BF16),
        (Some(ExpertFormat::INT8), DType::F32),
    ] {
        let plain = LoadOptions { format, dtype, cache_dir: Some(converted()), ..LoadOptions::default() };
        let want = decode(&open(&plain), prompt, 400, &drawn(7), false);
        for slots in [72, 48, 24, 13] {
            for prefetch in [Prefetch::StaleGate, Prefetch::Auto] {
                let driver = DriverKind::Device;
                let cache = CacheOptions {
                    capacity: Capacity::Slots(slots),
                    driver,
                    prefetch,
                    ..plain.cache.clone()
                };
                let decoder = open(&LoadOptions { cache, ..plain.clone() });
                for graph in [true, false] {
                    let what = format!("{format:?}, {dtype:?}, {slots} slots, {prefetch}, graph {graph}");
                    decoder.experts().reset_stats();
                    let have = decode(&decoder, prompt, 400, &drawn(7), graph);
                    same(&have, &want, &what);
                    assert_eq!(
                        have.replayed > 380,
                        graph,
                        "{what}: {} replayed, {:?}",
                        have.replayed,
                        have.note
                    );
                    let stats = decoder.experts().stats();
                    assert!(stats.guessed > 0, "{what}: {stats}");
                    println!(
                        "{what}: {} of {} guesses right, of {} misses; {} brought, {} used, {} of {} layers on",
                        stats.guessed_right,
                        stats.guessed,
                        stats.misses(),
                        stats.prefetched,
                        stats.prefetch_used,
                        stats.layers.iter().filter(|l| l.prefetch_width > 0).count(),
                        stats.layers.len()
                    );
                }
                decoder.experts().check().expect("slots equal the store");
            }
        }
    }
}

/// The same with what the device learns of routing: no router is asked, and what was learned is as good a guess for prompts
/// and tokens to come, whoever drives them.
#[test]
#[ignore = "needs a CUDA device"]
fn what_the_device_learns_brings_experts_and_changes_no_bit() {
    let prompt = &prompts()[0];
    let plain = LoadOptions {
        format: Some(ExpertFormat::Int4 { group: 64 }),
        dtype: DType::BF16,
        cache_dir: Some(converted()),
        ..LoadOptions::default()
    };
    let want = decode(&open(&plain), prompt, 400, &drawn(7), false);
    let folder = tempfile::tempdir().expect("a folder");
    for slots in [72, 48, 24, 13] {
        let of = |driver| {
            let prefetch = Prefetch::Correlation;
            let cache =
                CacheOptions { capacity: Capacity::Slots(slots), driver, prefetch, ..plain.cache.clone() };
            open(&LoadOptions { cache, ..plain.clone() })
        };
        let decoder = of(DriverKind::Device);
        let experts = decoder.experts();
        assert_eq!(experts.driver(), DriverKind::Device);
        for graph in [true, false] {
            let what = format!("{slots} slots, graph {graph}");
            experts.reset_stats();
            let have = decode(&decoder, prompt, 400, &drawn(7), graph);
            same(&have, &want, &what);
            assert_eq!(have.replayed > 380, graph, "{what}: {} replayed, {:?}", have.replayed, have.note);
            let stats = experts.stats();
            assert!(stats.guessed_right > 0 && stats.prefetch_used > 0, "{what}: {stats}");
            println!(
                "{what}: {} of {} guesses right, of {} misses; {} brought, {} used, {} of {} KiB wasted",
                stats.guessed_right,
                stats.guessed,
                stats.misses(),
                stats.prefetched,
                stats.prefetch_used,
                stats.prefetch_wasted_bytes >> 10,
                stats.prefetched_bytes >> 10
            );
        }
        experts.check().expect("slots equal the store");
        // Both ways to decode have seen the same prompt and the same tokens: as the host alone would have learned.
        let host = of(DriverKind::Host);
        for _ in 0..2 {
            decode(&host, prompt, 400, &drawn(7), false);
        }
        let kept = [&decoder, &host].map(|decoder| {
            let path = folder.path().join("a.table");
            decoder.experts().save_predictor_table(&path, "m").expect("a file");
            (decoder.experts().predictor_table(), std::fs::read(path).expect("a file"))
        });
        assert!(kept[0] == kept[1], "{slots} slots: {:?} and {:?} tokens", kept[0].0, kept[1].0);
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn every_family_can_be_asked_one_layer_early() {
    for Family { name, folder, ids, .. } in families() {
        let prompt = &ids[..ids.len().min(5)];
        let options = LoadOptions { dtype: DType::BF16, ..LoadOptions::default() };
        let all = Decoder::open(&folder, &GPU, &options, &|_| {}).expect("a fixture");
        let n = 30.min(all.context() - prompt.len());
        let sampler = SamplerOptions { repetition_penalty: 1.1, ..drawn(5) };
        let want = decode(&all, prompt, n, &sampler, false);
        let cache = CacheOptions {
            capacity: Capacity::Fraction(0.75),
            driver: DriverKind::Device,
            prefetch: Prefetch::StaleGate,
            ..options.cache.clone()
        };
        let few =
            Decoder::open(&folder, &GPU, &LoadOptions { cache, ..options }, &|_| {}).expect("a fixture");
        let have = decode(&few, prompt, n, &sampler, true);
        same(&have, &want, &name);
        let stats = few.experts().stats();
        println!(
            "{name}: {} guessed, {} right, {} replayed",
            stats.guessed, stats.guessed_right, have.replayed
        );
    }
}
