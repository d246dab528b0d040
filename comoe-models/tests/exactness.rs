//! Output never depends on the pool: for every slot count from one layer's top-k to all, both scopes, every policy,
//! prefetch on and off and each format, tokens and logits of comoe-tiny equal the resident run's bit for bit.

use std::ops::ControlFlow;
use std::path::Path;

use candle_core::Device;
use comoe_core::{CacheOptions, Capacity, ExpertFormat, PolicyKind, Prefetch, Scope};
use comoe_models::chat::Tokenizer;
use comoe_models::{Decoder, Finish, GenerateOptions, LoadOptions, Model, Rows, Session};

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

/// RAM for fewer experts than there are, from the least that works to all but one: in slots and beside them.
#[test]
fn however_few_experts_ram_holds() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../assets/comoe-tiny");
    let converted = tempfile::tempdir().unwrap();
    for format in [None, Some(ExpertFormat::INT4)] {
        let load = |cache: CacheOptions| {
            let cache_dir = Some(converted.path().to_owned());
            let options =
                LoadOptions { cache, format, cache_dir, context: Some(64), ..LoadOptions::default() };
            Model::load(&folder, &Device::Cpu, &options, &|_| {}).unwrap()
        };
        let all = load(CacheOptions::default());
        let (want, record) = (answer(&all), all.experts().stats().slot_bytes as u64);
        for (i, held) in (TOP_K + 1..EXPERTS).step_by(3).enumerate() {
            let prefetch = match i % 4 {
                n if held < 8 * TOP_K || n == 0 => Prefetch::Off,
                n => [Prefetch::Correlation, Prefetch::StaleGate, Prefetch::Auto][n - 1],
            };
            let policy = [PolicyKind::Auto, PolicyKind::Lru, PolicyKind::Lfu, PolicyKind::Lfru][i / 4 % 4];
            // As few slots as work, a third of it, and what the cache makes of it.
            let capacity =
                [Capacity::Slots(TOP_K), Capacity::Slots((held / 3).max(TOP_K)), Capacity::Fit][i % 3];
            let ram = Some(held as u64 * record);
            let cache = CacheOptions { capacity, policy, prefetch, ram, ..CacheOptions::default() };
            let model = load(cache.clone());
            assert!(answer(&model) == want, "{format:?} {cache:?}");
            model.experts().check().unwrap();
            let stats = model.experts().stats();
            let tier = stats.tier.unwrap();
            assert_eq!(stats.slots + stats.staging_slots + tier.places, held, "{cache:?}");
            assert!(tier.cold > 0 && tier.cold <= tier.reads, "{cache:?} {tier:?}");
            let came = tier.warm + tier.cold;
            assert!(
                (stats.records_moved..=stats.records_moved + stats.prefetched).contains(&came),
                "{cache:?}"
            );
        }
    }
}

/// Two pools on the CPU in place of two devices: slots spread in many ways, evenly and not.
#[test]
fn over_two_devices() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../assets/comoe-tiny");
    let converted = tempfile::tempdir().unwrap();
    for format in [None, Some(ExpertFormat::INT4)] {
        let load = |more: &[Device], capacities: &[Capacity], cache: CacheOptions| {
            let (cache_dir, context) = (Some(converted.path().to_owned()), Some(64));
            let options = LoadOptions {
                cache,
                format,
                cache_dir,
                context,
                more_devices: more.to_vec(),
                capacities: capacities.to_vec(),
                ..LoadOptions::default()
            };
            Model::load(&folder, &Device::Cpu, &options, &|_| {}).unwrap()
        };
        let want = answer(&load(&[], &[], CacheOptions::default()));
        for first in (1..=EXPERTS).step_by(5) {
            for (second, prefetch) in
                [(1, Prefetch::Off), (24, Prefetch::StaleGate), (EXPERTS - first + 1, Prefetch::Off)]
            {
                let slots = [Capacity::Slots(first), Capacity::Slots(second)];
                let ring = Some((first as u64 % 3) << 19);
                let model =
                    load(&[Device::Cpu], &slots, CacheOptions { prefetch, ring, ..CacheOptions::default() });
                assert!(answer(&model) == want, "{format:?}, {first} and {second} slots");
                let stats = model.experts().stats();
                assert_eq!(stats.devices.len(), 2);
                assert!(stats.devices.iter().all(|d| d.accesses > 0), "{first} and {second} slots: {stats}");
            }
        }
        let three = load(&[Device::Cpu, Device::Cpu], &[], CacheOptions::default());
        assert!(answer(&three) == want);
    }
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

/// An answer of `n` tokens that nothing stops, from a session that is then cut back, and one after that.
fn long_answers(model: &Model, n: usize) -> (Vec<u32>, Option<String>, Vec<u32>) {
    let prompt = model.tokenizer().encode("<|im_start|>user\nTell me a story.<|im_end|>\n", false).unwrap();
    let mut session = model.session().unwrap();
    let ask = |session: &mut Session<'_>, n| {
        let options = GenerateOptions { max_tokens: Some(n), ..GenerateOptions::default() };
        session.generate(&prompt, &options, &mut |_| ControlFlow::Continue(())).unwrap()
    };
    let long = ask(&mut session, n);
    session.reset().unwrap();
    let short = ask(&mut session, 20);
    assert_eq!(short.context_note, None);
    (long.tokens, long.context_note, short.tokens)
}

/// Issue 7: a context that outgrows its plan until slots have halved gives the resident run's tokens, and the slots come
/// back with it.
#[test]
fn a_context_that_grows_takes_slots_and_gives_them_back() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../assets/comoe-tiny");
    let load = |cache: CacheOptions, most_context| {
        let options = LoadOptions { cache, context: Some(64), most_context, ..LoadOptions::default() };
        let decoder = Decoder::open(&folder, &Device::Cpu, &options, &|_| {}).unwrap();
        let tokenizer = Tokenizer::of_model(&folder).unwrap();
        Model::from_parts(decoder, tokenizer, None, Vec::new())
    };
    const LONG: usize = 900;
    let resident = load(CacheOptions::default(), None);
    let want = long_answers(&resident, LONG);
    assert_eq!((want.0.len(), resident.experts().stats().resizes), (LONG, 0));
    assert!(want.1.as_ref().unwrap().contains("from 64 to 1"), "{:?}", want.1);
    for (scope, policy) in [
        (Scope::Layer, PolicyKind::Lru),
        (Scope::Layer, PolicyKind::Blend),
        (Scope::Global, PolicyKind::Auto),
    ] {
        let cache = CacheOptions { capacity: Capacity::Slots(58), scope, policy, ..CacheOptions::default() };
        let model = load(cache, None);
        let have = long_answers(&model, LONG);
        assert!((&have.0, &have.2) == (&want.0, &want.2), "{scope} {policy}");
        let stats = model.experts().stats();
        assert!(2 * stats.least_slots <= 58 && stats.resizes >= 6, "{stats}");
        assert_eq!((stats.slots, stats.most_slots), (58, 58), "{stats}");
        assert!(have.1.unwrap().contains("slots of 58 left"));
        model.experts().check().unwrap();
    }
    // A limit on memory holds for what grows, too, where every expert has a slot.
    let model = load(CacheOptions { budget: Some(1 << 30), ..CacheOptions::default() }, None);
    assert_eq!(long_answers(&model, LONG).0, want.0);
    let stats = model.experts().stats();
    assert!(stats.least_slots < EXPERTS && stats.slots == EXPERTS, "{stats}");
    // Where slots have nothing to give, an answer ends early, and a prompt is refused.
    let cache = CacheOptions { capacity: Capacity::Slots(16), ..CacheOptions::default() };
    let model = load(cache, None);
    let (tokens, _, short) = long_answers(&model, LONG);
    assert!((64..300).contains(&tokens.len()) && want.0.starts_with(&tokens), "{} tokens", tokens.len());
    assert_eq!(short, want.2);
    let mut session = model.session().unwrap();
    let options = GenerateOptions { max_tokens: Some(1), ..GenerateOptions::default() };
    let refused = session.generate(&[7; 900], &options, &mut |_| ControlFlow::Continue(())).unwrap_err();
    let text = refused.to_string();
    assert!(text.contains("cannot grow from 64 to 901") && text.contains("12 slots are needed"), "{text}");
    assert_eq!(model.experts().stats().slots, 16, "nothing is kept of what was tried");
    // A limit of one's own.
    let model = load(CacheOptions::default(), Some(100));
    let mut session = model.session().unwrap();
    let options = GenerateOptions::default();
    let all = session.generate(&[7; 30], &options, &mut |_| ControlFlow::Continue(())).unwrap();
    assert_eq!((all.tokens.len(), all.finish), (70, Finish::Length));
}
