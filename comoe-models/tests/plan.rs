//! What a model is planned to take is what it takes, for every family.

mod files;

use candle_core::Device;
use comoe_core::plan::Room;
use comoe_core::{CacheOptions, Capacity, ExpertFormat};
use comoe_models::{Decoder, DenseFormat, LoadOptions, ModelPlan, Target};

use files::fixtures;

const CPU: Target = Target { on_gpu: false, batch: 1 };

#[test]
fn every_family_takes_what_was_planned() {
    let folders = fixtures();
    assert!(folders.len() >= 20, "{folders:?}");
    for folder in folders {
        for (format, dense) in [
            (None, DenseFormat::Plain),
            (Some(ExpertFormat::Int4 { group: 32 }), DenseFormat::Int8),
            (Some(ExpertFormat::INT8), DenseFormat::Plain),
        ] {
            let what = format!("{}, {format:?}, {dense:?}", folder.display());
            let cache =
                CacheOptions { capacity: Capacity::Fit, budget: Some(1 << 30), ..CacheOptions::default() };
            let options = LoadOptions { format, dense, cache, ..LoadOptions::default() };
            let planned = ModelPlan::open(&folder, CPU, &options).unwrap_or_else(|e| panic!("{what}: {e}"));
            let room = options.cache.room(&Device::Cpu).unwrap().unwrap();
            let plan = planned.memory(&room, &options.cache).unwrap();
            let decoder = Decoder::open(&folder, &Device::Cpu, &options, &|_| {}).unwrap();
            assert_eq!(decoder.memory_plan(), Some(&plan), "{what}");
            let _kv = decoder.new_kv().unwrap();
            let measured = decoder.measure_memory().unwrap();
            let (now, want) = (measured.device.now, plan.device);
            assert_eq!((now.kv, now.slots, measured.arena), (want.kv, want.slots, plan.arena), "{what}");
            assert_eq!(planned.kv().iter().map(|p| p.bytes).sum::<u64>(), now.kv, "{what}");
            let off = now.dense.abs_diff(want.dense);
            assert!(
                off * 50 <= now.dense,
                "{what}: {} bytes of dense weights, {} planned",
                now.dense,
                want.dense
            );
            assert_eq!(measured.device.now, measured.device.peak, "{what}");
        }
    }
}

/// Where RAM holds some of the experts, a plan knows of the few places beside the slots.
#[test]
fn a_plan_with_ram_for_a_part_is_what_opening_does() {
    let tiny = files::tiny();
    for (quarters, budget) in [(1, None), (2, None), (3, Some(1 << 30)), (5, None)] {
        let all = ModelPlan::open(&tiny, CPU, &LoadOptions::default()).unwrap().directory().total_bytes();
        let ram = Some(all * quarters / 4);
        let cache = CacheOptions { capacity: Capacity::Fit, budget, ram, ..CacheOptions::default() };
        let options = LoadOptions { cache, ..LoadOptions::default() };
        let planned = ModelPlan::open(&tiny, CPU, &options).unwrap();
        let room = options.cache.room(&Device::Cpu).unwrap().unwrap();
        let plan = planned.memory(&room, &options.cache).unwrap();
        let decoder = Decoder::open(&tiny, &Device::Cpu, &options, &|_| {}).unwrap();
        assert_eq!(decoder.memory_plan(), Some(&plan), "{quarters}");
        let (measured, stats) = (decoder.measure_memory().unwrap(), decoder.experts().stats());
        assert_eq!((stats.slots, measured.device.now.slots), (plan.slots.slots, plan.device.slots));
        assert_eq!(measured.arena, plan.arena, "{quarters}");
        let places = stats.tier.map(|tier| tier.places);
        assert_eq!(places.is_some(), quarters < 4);
        if let Some(places) = places {
            assert!(stats.slots > 0 && places > 0 && places < stats.slots, "{quarters}: {places}");
            assert!(plan.device.slots + plan.arena <= all * quarters / 4);
        }
    }
}

/// A GPU's plan needs none, and its parts are there.
#[test]
fn a_plan_for_a_gpu_counts_activations_buffers_and_a_margin() {
    for folder in fixtures() {
        let what = folder.display();
        let options = LoadOptions { dtype: candle_core::DType::BF16, ..LoadOptions::default() };
        let gpu = |batch| ModelPlan::open(&folder, Target { on_gpu: true, batch }, &options).unwrap();
        let one = gpu(1);
        let others = one.others();
        assert!(others.workspace > 0 && others.buffers > 1 << 20 && one.margin() > 0, "{what}: {others:?}");
        assert_eq!(gpu(3).others().kv, 3 * others.kv, "{what}");
        let (alone, together) = (one.token_bytes(), gpu(3).token_bytes());
        assert!(together.experts > alone.experts && together.experts <= 3 * alone.experts, "{what}");
        let needed = others.total() + one.margin() + (one.top_k() * one.slot_bytes()) as u64;
        let room = |budget| Room {
            device: "gpu".to_owned(),
            free: u64::MAX,
            budget: Some(budget),
            reserve: 0,
            on_device: true,
        };
        let fit = CacheOptions { capacity: Capacity::Fit, ring: Some(0), ..CacheOptions::default() };
        assert!(one.memory(&room(needed - 1), &fit).is_err(), "{what}");
        let least = one.memory(&room(needed), &fit).unwrap();
        assert_eq!((least.slots.slots, least.device.total() + least.margin), (one.top_k(), needed), "{what}");
    }
}
