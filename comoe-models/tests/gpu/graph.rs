//! Decode steps replayed as a graph: the same bits as one by one, whoever drives the experts and wherever they are.

use std::ops::ControlFlow;

use candle_core::{DType, Tensor};
use comoe_core::{CacheOptions, Capacity, DriverKind, ExpertFormat, Scope};
use comoe_models::blocks::kv_cache::KvCache;
use comoe_models::{
    Decoder, DeviceSteps, Error, Event, Finish, GenerateOptions, Generation, LoadOptions, Model, Rows,
    SamplerOptions, Session,
};

use crate::files::{Family, families, prompts, tiny};
use crate::tiny::{GPU, converted};

/// Tokens that follow a prompt.
pub(crate) struct Run {
    pub(crate) tokens: Vec<u32>,
    /// Bits of all keys and values.
    pub(crate) kept: Vec<u32>,
    /// Steps that were replayed.
    pub(crate) replayed: usize,
    pub(crate) note: Option<String>,
}

/// Bits of what `kv` holds of its tokens. Every layer's input is in it, of every token.
pub(crate) fn kept(kv: &KvCache) -> Vec<u32> {
    let bits = |t: &Tensor| -> Vec<u32> {
        let t = t.narrow(1, 0, kv.len()).and_then(|t| t.contiguous()).expect("rows");
        let t = t.to_dtype(DType::F32).and_then(|t| t.flatten_all()).expect("F32");
        t.to_vec1::<f32>().expect("values").iter().map(|v| v.to_bits()).collect()
    };
    kv.tensors().flat_map(bits).collect()
}

pub(crate) fn decode(
    decoder: &Decoder,
    prompt: &[u32],
    n: usize,
    options: &SamplerOptions,
    graph: bool,
) -> Run {
    let mut kv = decoder.new_kv().expect("a KV cache");
    let mut steps = DeviceSteps::of(decoder).expect("memory").expect("fused steps");
    steps.begin(options, prompt).expect("options");
    let logits = decoder.forward(prompt, &mut kv, Rows::Last).expect("a prompt");
    let mut tokens = vec![steps.choose(&logits, &mut kv).expect("a token")];
    while tokens.len() < n {
        let replayed = if graph { steps.next(&mut kv, n - tokens.len()).expect("a step") } else { None };
        let next = match replayed {
            Some(token) => token,
            None => {
                let last = tokens[tokens.len() - 1];
                let logits = decoder.forward(&[last], &mut kv, Rows::Last).expect("a step");
                steps.choose(&logits, &mut kv).expect("a token")
            }
        };
        tokens.push(next);
    }
    steps.settle();
    assert_eq!(kv.len(), prompt.len() + n - 1, "no step is enqueued that nobody wants");
    Run { tokens, kept: kept(&kv), replayed: steps.replayed(), note: steps.note().map(str::to_owned) }
}

pub(crate) fn same(have: &Run, want: &Run, what: &str) {
    let differs = have.tokens.iter().zip(&want.tokens).position(|(a, b)| a != b);
    assert_eq!((have.tokens.len(), differs), (want.tokens.len(), None), "{what}: tokens");
    assert!(have.kept == want.kept, "{what}: keys and values differ in bits");
}

pub(crate) fn open(options: &LoadOptions) -> Decoder {
    Decoder::open(&tiny(), &GPU, options, &|_| {}).expect("comoe-tiny loads")
}

pub(crate) fn drawn(seed: u64) -> SamplerOptions {
    SamplerOptions {
        temperature: 1.0,
        top_k: Some(200),
        top_p: 0.98,
        min_p: 1e-4,
        seed,
        ..Default::default()
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn a_graph_gives_the_bits_of_single_steps_for_every_slot_count_and_driver() {
    let prompt = &prompts()[0];
    let mut replayed = 0;
    for (format, dtype) in [
        (None, DType::F32),
        (None, DType::BF16),
        (Some(ExpertFormat::INT8), DType::BF16),
        (Some(ExpertFormat::INT4), DType::F32),
        (Some(ExpertFormat::INT4), DType::BF16),
    ] {
        let options = LoadOptions { format, dtype, cache_dir: Some(converted()), ..LoadOptions::default() };
        let all = open(&options);
        let want = decode(&all, prompt, 400, &drawn(7), false);
        // 6 layers of 16 experts, two of which serve a token.
        for (slots, driver) in [
            (96, DriverKind::Auto),
            (95, DriverKind::Auto),
            (48, DriverKind::Auto),
            (24, DriverKind::Auto),
            (13, DriverKind::Auto),
            (11, DriverKind::Auto),
            (2, DriverKind::Auto),
            (24, DriverKind::Host),
        ] {
            let cache = CacheOptions {
                capacity: Capacity::Slots(slots),
                scope: if slots < 12 { Scope::Global } else { Scope::Layer },
                driver,
                ..CacheOptions::default()
            };
            let few = open(&LoadOptions { cache, ..options.clone() });
            let what = format!("{format:?}, {dtype:?}, {slots} slots, driver {driver}");
            let have = decode(&few, prompt, 400, &drawn(7), true);
            same(&have, &want, &what);
            if driver == DriverKind::Auto {
                assert!(have.replayed > 380, "{what}: {} of 400 replayed, {:?}", have.replayed, have.note);
            } else {
                assert_eq!(have.replayed, 0, "{what}");
                assert!(have.note.is_some(), "{what} says why");
            }
            few.experts().check().expect("slots equal the store");
            replayed += have.replayed;
        }
    }
    println!("{replayed} tokens replayed, each with the bits of single steps");
}

#[test]
#[ignore = "needs a CUDA device"]
fn a_graph_gives_the_bits_of_single_steps_over_two_thousand_tokens() {
    let cache = CacheOptions { capacity: Capacity::Slots(30), ..CacheOptions::default() };
    let decoder = open(&LoadOptions { dtype: DType::BF16, cache, ..LoadOptions::default() });
    let n = 2000.min(decoder.context() - prompts()[0].len());
    for options in [SamplerOptions::default(), drawn(3)] {
        let want = decode(&decoder, &prompts()[0], n, &options, false);
        let have = decode(&decoder, &prompts()[0], n, &options, true);
        same(&have, &want, &format!("{n} tokens"));
        println!("{n} tokens, {} replayed, note {:?}", have.replayed, have.note);
        assert!(have.replayed > n * 9 / 10);
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn every_family_is_replayed_with_the_bits_of_single_steps() {
    let mut wrong = Vec::new();
    for Family { name, folder, ids, .. } in families() {
        let prompt = &ids[..ids.len().min(5)];
        let int4 = Some(ExpertFormat::Int4 { group: 32 });
        for (format, dtype) in
            [(None, DType::F32), (None, DType::BF16), (int4, DType::F32), (int4, DType::BF16)]
        {
            let options = LoadOptions { format, dtype, ..LoadOptions::default() };
            let decoder = Decoder::open(&folder, &GPU, &options, &|_| {}).expect("a fixture");
            let n = 40.min(decoder.context() - prompt.len());
            let options = SamplerOptions { repetition_penalty: 1.1, ..drawn(5) };
            let want = decode(&decoder, prompt, n, &options, false);
            let have = decode(&decoder, prompt, n, &options, true);
            let what = format!("{name}, {}, {dtype:?}", decoder.experts().format());
            println!(
                "{what}: {} of {n} replayed, notes {:?} {:?}",
                have.replayed,
                have.note,
                decoder.notes()
            );
            if have.tokens != want.tokens || have.kept != want.kept || have.replayed + 3 < n {
                wrong.push(what);
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

fn go(_: Event<'_>) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

fn answer(session: &mut Session<'_>, prompt: &[u32], options: &GenerateOptions) -> Generation {
    session.generate(prompt, options, &mut go).expect("an answer")
}

#[test]
#[ignore = "needs a CUDA device"]
fn answers_do_not_depend_on_the_graph() {
    let cache = CacheOptions { capacity: Capacity::Slots(30), ..CacheOptions::default() };
    let options = LoadOptions { dtype: DType::BF16, cache, ..LoadOptions::default() };
    let model = Model::load(&tiny(), &GPU, &options, &|_| {}).expect("comoe-tiny loads");
    let samplers = [
        SamplerOptions::default(),
        SamplerOptions { temperature: 0.8, top_p: 0.9, seed: 11, ..SamplerOptions::default() },
        SamplerOptions {
            temperature: 1.2,
            min_p: 0.02,
            repetition_penalty: 1.3,
            seed: 5,
            ..Default::default()
        },
        SamplerOptions { repetition_penalty: 1.2, repetition_window: Some(16), ..SamplerOptions::default() },
    ];
    // One session each, all answers one after the other: prefixes are kept, sequences cut back and gone on with.
    let (mut with, mut without) = (model.session().expect("a session"), model.session().expect("a session"));
    let mut replayed = 0;
    for prompt in prompts().iter().take(3) {
        for sampler in &samplers {
            for (stop, check_every) in [(vec![], 0), (vec![".".to_owned()], 3)] {
                let asked = GenerateOptions {
                    max_tokens: Some(60),
                    sampler: sampler.clone(),
                    stop,
                    check_every,
                    graph: true,
                };
                let a = answer(&mut with, prompt, &asked);
                let b = answer(&mut without, prompt, &GenerateOptions { graph: false, ..asked.clone() });
                assert_eq!((&a.text, &a.tokens, a.finish), (&b.text, &b.tokens, b.finish), "{sampler:?}");
                assert_eq!((a.reused_tokens, with.tokens()), (b.reused_tokens, without.tokens()));
                assert_eq!((&a.graph_note, b.timings.graph_steps), (&None, 0));
                replayed += a.timings.graph_steps;
            }
        }
    }
    assert!(replayed > 200, "{replayed}");
    // Broken off in the middle, and gone on with.
    let mut left = 7;
    let mut stop_soon = |event: Event<'_>| {
        left -= i32::from(matches!(event, Event::Text(_)));
        if left <= 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let asked = GenerateOptions { max_tokens: Some(40), ..GenerateOptions::default() };
    let cut = with.generate(&prompts()[0], &asked, &mut stop_soon).expect("an answer");
    assert_eq!((cut.finish, cut.tokens.len()), (Finish::Cancelled, 7));
    let whole = answer(&mut without, &prompts()[0], &GenerateOptions { graph: false, ..asked.clone() });
    assert_eq!(cut.tokens, whole.tokens[..7]);
    let longer: Vec<u32> = prompts()[0].iter().chain(&cut.tokens).copied().collect();
    assert_eq!(answer(&mut with, &longer, &asked).tokens, whole.tokens[7..]);
    // To the last token that the context holds.
    let context = Some(prompts()[0].len() + 30);
    let short = LoadOptions { context, most_context: Some(0), ..options };
    let model = Model::load(&tiny(), &GPU, &short, &|_| {}).expect("comoe-tiny loads");
    let to_the_end = GenerateOptions { max_tokens: Some(30), ..GenerateOptions::default() };
    let full = answer(&mut model.session().expect("a session"), &prompts()[0], &to_the_end);
    let both = full.tokens.len().min(whole.tokens.len());
    assert_eq!(full.tokens[..both], whole.tokens[..both]);
}

#[test]
#[ignore = "needs a CUDA device"]
fn what_is_broken_in_a_graph_is_reported_as_it_is_without_one() {
    let decoder = open(&LoadOptions { dtype: DType::BF16, ..LoadOptions::default() });
    let prompt = &prompts()[0];
    let options = SamplerOptions::default();
    let want = decode(&decoder, prompt, 30, &options, false);
    for graph in [true, false] {
        let mut kv = decoder.new_kv().expect("a KV cache");
        let mut steps = DeviceSteps::of(&decoder).expect("memory").expect("fused steps");
        let mut run = |kv: &mut KvCache, break_at: Option<usize>| -> comoe_models::Result<Vec<u32>> {
            steps.begin(&options, prompt)?;
            let logits = decoder.forward(prompt, kv, Rows::Last)?;
            let mut tokens = vec![steps.choose(&logits, kv)?];
            while tokens.len() < 30 {
                if break_at == Some(tokens.len()) {
                    let k = kv.tensors().next().expect("keys").clone();
                    let (heads, _, width) = k.dims3().expect("a cache");
                    let nan = Tensor::full(f32::NAN, (heads, 1, width), &GPU)?.to_dtype(k.dtype())?;
                    k.slice_set(&nan, 1, 3)?;
                }
                let next = if graph { steps.next(kv, 30 - tokens.len())? } else { None };
                let last = tokens[tokens.len() - 1];
                tokens.push(match next {
                    Some(token) => token,
                    None => steps.choose(&decoder.forward(&[last], kv, Rows::Last)?, kv)?,
                });
            }
            steps.settle();
            Ok(tokens)
        };
        let e = run(&mut kv, Some(12)).expect_err("a key is not a number");
        assert!(matches!(e, Error::BadRouter { layer: 0, token: 0 }), "graph {graph}: {e}");
        // Both went on from a clean cache, with nothing left over.
        kv.truncate(0);
        assert_eq!(run(&mut kv, None).expect("tokens"), want.tokens, "graph {graph}");
    }
}
