//! Output never depends on the pool: for every slot count from one layer's top-k to all, both scopes, every policy,
//! prefetch on and off and each format, tokens and logits of comoe-tiny equal the resident run's bit for bit.

use std::path::Path;

use candle_core::Device;
use comoe_core::{CacheOptions, Capacity, ExpertFormat, PolicyKind, Prefetch, Scope};
use comoe_models::{LoadOptions, Model, Rows};

const EXPERTS: usize = 96;
const TOP_K: usize = 2;
const STEPS: usize = 6;

/// Tokens and the bits of the logits of a short greedy answer. The prompt's union is larger than small pools, so it
/// goes through them in waves.
fn answer(model: &Model) -> (Vec<u32>, Vec<Vec<u32>>) {
    let prompt = "<|im_start|>user\nWhat is 384 minus 127?<|im_end|>\n<|im_start|>assistant\n";
    let mut ids = model.tokenizer().encode(prompt, false).unwrap();
    let mut kv = model.decoder().new_kv().unwrap();
    let (mut tokens, mut all) = (Vec::new(), Vec::new());
    for _ in 0..STEPS {
        let logits = model.decoder().forward(&ids, &mut kv, Rows::Last).unwrap();
        let logits = logits.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap() as u32;
        all.push(logits.iter().map(|l| l.to_bits()).collect());
        tokens.push(best);
        ids = vec![best];
    }
    (tokens, all)
}

fn every_pool_equals_the_resident_run(format: Option<ExpertFormat>) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../assets/comoe-tiny");
    let converted = tempfile::tempdir().unwrap();
    let load = |cache: CacheOptions| {
        let cache_dir = Some(converted.path().to_owned());
        let options = LoadOptions { cache, format, cache_dir, context: Some(64), ..LoadOptions::default() };
        Model::load(&folder, &Device::Cpu, &options, &|_| {}).unwrap()
    };
    let want = answer(&load(CacheOptions::default()));
    let mut runs = 0;
    for slots in TOP_K..=EXPERTS {
        for scope in [Scope::Layer, Scope::Global] {
            for policy in [PolicyKind::Lru, PolicyKind::Lfu, PolicyKind::Lfru, PolicyKind::Blend] {
                let on = [Prefetch::Correlation, Prefetch::StaleGate, Prefetch::Auto][slots % 3];
                for prefetch in [Prefetch::Off, on] {
                    let capacity = Capacity::Slots(slots);
                    // From none to several layers of records.
                    let ring = Some((slots as u64 % 4) << 20);
                    let cache =
                        CacheOptions { capacity, policy, scope, prefetch, ring, ..CacheOptions::default() };
                    let model = load(cache.clone());
                    assert!(answer(&model) == want, "{format:?} {cache:?}");
                    let stats = model.experts().stats();
                    assert_eq!(stats.hits() + stats.misses(), stats.accesses(), "{cache:?}");
                    assert_eq!(stats.records_moved + stats.late(), stats.misses(), "{cache:?}");
                    assert!(stats.prefetch_used + stats.prefetch_wasted <= stats.prefetched, "{cache:?}");
                    runs += 1;
                }
            }
        }
    }
    assert_eq!(runs, (EXPERTS - TOP_K + 1) * 16);
}

#[test]
fn as_in_the_checkpoint() {
    every_pool_equals_the_resident_run(None);
}

#[test]
fn int8() {
    every_pool_equals_the_resident_run(Some(ExpertFormat::INT8));
}

#[test]
fn int4() {
    every_pool_equals_the_resident_run(Some(ExpertFormat::INT4));
}

#[test]
fn mxfp4() {
    every_pool_equals_the_resident_run(Some(ExpertFormat::Mxfp4));
}
