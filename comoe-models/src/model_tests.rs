//! Whole models: small random checkpoints through the door, beside candle-transformers' own Qwen3-MoE.

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Mutex;

use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::qwen3_moe;
use comoe_core::pool::SlotState;
use comoe_core::{CacheOptions, Capacity, ExpertFormat, Scope};
use half::bf16;

use crate::testing::{close, tiny_config, tiny_weights, write_model, write_weights};
use crate::*;

fn load_with(folder: &Path, options: &LoadOptions) -> Result<Model> {
    Model::load(folder, &Device::Cpu, options, &|_| {})
}

fn load(folder: &Path) -> Model {
    load_with(folder, &LoadOptions::default()).unwrap()
}

/// A model folder of this configuration.
fn folder(config: &serde_json::Value) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    write_model(dir.path(), config);
    dir
}

/// Token ids that wander over the vocabulary.
fn ids(n: usize) -> Vec<u32> {
    (0..n as u32).map(|i| (i * 37 + i * i * 5) % 256).collect()
}

fn run(model: &Model, ids: &[u32], rows: Rows) -> Tensor {
    model.decoder().forward(ids, &mut model.decoder().new_kv().unwrap(), rows).unwrap()
}

struct Reference(qwen3_moe::ModelForCausalLM);

impl Reference {
    fn load(folder: &Path, config: &serde_json::Value) -> Self {
        let config: qwen3_moe::Config = serde_json::from_value(config.clone()).unwrap();
        let tensors = candle_core::safetensors::load(folder.join("model.safetensors"), &Device::Cpu).unwrap();
        let vb = VarBuilder::from_tensors(
            tensors.into_iter().map(|(k, v)| (k, v.to_dtype(DType::F32).unwrap())).collect(),
            DType::F32,
            &Device::Cpu,
        );
        Self(qwen3_moe::ModelForCausalLM::new(&config, vb).unwrap())
    }

    /// Logits of the last of `ids`, `[1, vocab]`.
    fn last(&mut self, ids: &[u32]) -> Tensor {
        self.0.clear_kv_cache();
        let ids = Tensor::new(ids, &Device::Cpu).unwrap().unsqueeze(0).unwrap();
        self.0.forward(&ids, 0).unwrap().squeeze(0).unwrap()
    }
}

fn variants() -> Vec<serde_json::Value> {
    let mut mixed = tiny_config();
    for (field, value) in [
        ("decoder_sparse_step", 2.into()),
        ("num_hidden_layers", 4.into()),
        ("tie_word_embeddings", true.into()),
        ("attention_bias", true.into()),
        ("norm_topk_prob", false.into()),
        ("num_experts_per_tok", 3.into()),
    ] {
        mixed[field] = value;
    }
    vec![tiny_config(), mixed]
}

#[test]
fn logits_equal_those_of_candle_transformers_at_every_position() {
    for config in variants() {
        let dir = folder(&config);
        let (model, mut reference) = (load(dir.path()), Reference::load(dir.path(), &config));
        let ids = ids(30);
        let all = run(&model, &ids, Rows::All);
        let mut kv = model.decoder().new_kv().unwrap();
        for t in 0..ids.len() {
            let want = reference.last(&ids[..=t]);
            close(&all.narrow(0, t, 1).unwrap(), &want, 1e-4);
            let step = model.decoder().forward(&ids[t..=t], &mut kv, Rows::Last).unwrap();
            close(&step, &want, 1e-4);
        }
        close(&run(&model, &ids, Rows::Last), &all.narrow(0, 29, 1).unwrap(), 1e-5);
    }
}

#[test]
fn a_prompt_longer_than_a_chunk_equals_candle_transformers() {
    let config = tiny_config();
    let dir = folder(&config);
    let model = load(dir.path());
    let ids = ids(700);
    assert_eq!((model.decoder().next_chunk(0, 700), model.decoder().next_chunk(512, 188)), (512, 188));
    assert_eq!(model.decoder().next_chunk(500, 200), 12);
    let all = run(&model, &ids, Rows::All);
    assert_eq!(all.dims(), [700, 272]);
    let mut reference = Reference::load(dir.path(), &config);
    for t in [0, 511, 512, 699] {
        close(&all.narrow(0, t, 1).unwrap(), &reference.last(&ids[..=t]), 1e-4);
    }
}

#[test]
fn bits_do_not_depend_on_the_slots() {
    let dir = folder(&tiny_config());
    let bits = |capacity, scope| {
        let cache = CacheOptions { capacity, scope, ..CacheOptions::default() };
        let model = load_with(dir.path(), &LoadOptions { cache, ..LoadOptions::default() }).unwrap();
        let mut kv = model.decoder().new_kv().unwrap();
        let mut bits = Vec::new();
        for ids in [&ids(20)[..], &[7], &[8], &[9]] {
            let logits = model.decoder().forward(ids, &mut kv, Rows::All).unwrap();
            bits.extend(logits.flatten_all().unwrap().to_vec1::<f32>().unwrap().iter().map(|x| x.to_bits()));
        }
        bits
    };
    let resident = bits(Capacity::All, Scope::Layer);
    for (slots, scope) in [(2, Scope::Global), (5, Scope::Global), (6, Scope::Layer), (13, Scope::Layer)] {
        assert!(bits(Capacity::Slots(slots), scope) == resident, "{slots} slots, {scope}");
    }
}

#[test]
fn a_truncated_cache_continues_as_a_fresh_one() {
    let dir = folder(&tiny_config());
    let model = load(dir.path());
    let ids = ids(40);
    let mut kv = model.decoder().new_kv().unwrap();
    model.decoder().forward(&[&ids[..15], &[1, 2, 3, 4]].concat(), &mut kv, Rows::Last).unwrap();
    kv.truncate(15);
    kv.truncate(99);
    assert_eq!(kv.len(), 15);
    let got = model.decoder().forward(&ids[15..], &mut kv, Rows::All).unwrap();
    close(&got, &run(&model, &ids, Rows::All).narrow(0, 15, 25).unwrap(), 1e-5);
}

#[test]
fn bad_steps_are_refused_and_leave_the_cache_usable() {
    let dir = folder(&tiny_config());
    let model = load_with(
        dir.path(),
        &LoadOptions { context: Some(8), most_context: Some(0), ..LoadOptions::default() },
    )
    .unwrap();
    let mut kv = model.decoder().new_kv().unwrap();
    let mut go = |ids: &[u32]| model.decoder().forward(ids, &mut kv, Rows::Last).map(|t| t.dims().to_vec());
    assert!(matches!(go(&[]), Err(Error::EmptyPrompt)));
    assert!(matches!(go(&[1, 272]), Err(Error::UnknownToken { id: 272, vocab: 272 })));
    assert_eq!(go(&[1, 2, 3, 4, 5]).unwrap(), [1, 272]);
    let full = go(&[1, 2, 3, 4]);
    assert!(matches!(full, Err(Error::ContextExceeded { tokens: 4, position: 5, context: 8 })));
    assert_eq!(go(&[6, 7, 8]).unwrap(), [1, 272]);
    assert!(go(&[1]).is_err());

    let context = |n| {
        load_with(
            dir.path(),
            &LoadOptions { context: Some(n), most_context: Some(0), ..LoadOptions::default() },
        )
    };
    assert!(matches!(context(1025), Err(Error::ContextTooLarge { asked: 1025, available: 1024 })));
    assert!(matches!(context(0), Err(Error::BadOption { .. })));
}

#[test]
fn a_broken_router_is_an_error_with_its_layer() {
    let config = tiny_config();
    let dir = folder(&config);
    let mut weights = tiny_weights(&config);
    let router = weights.iter_mut().find(|(n, _, _)| n == "model.layers.2.mlp.gate.weight").unwrap();
    router.2[40] = bf16::NAN;
    write_weights(dir.path(), &weights);
    let model = load(dir.path());
    let mut kv = model.decoder().new_kv().unwrap();
    let e = model.decoder().forward(&[1, 2], &mut kv, Rows::Last).unwrap_err();
    assert!(matches!(e, Error::BadRouter { layer: 2, token: 0 }), "{e}");
}

#[test]
fn folders_that_do_not_fit_together_are_refused_by_name() {
    let fails = |change: &dyn Fn(&Path)| {
        let dir = folder(&tiny_config());
        change(dir.path());
        load_with(dir.path(), &LoadOptions::default()).map(|_| ()).unwrap_err().to_string()
    };
    let rewrite = |dir: &Path, field: &str, value: serde_json::Value| {
        let mut config = tiny_config();
        config[field] = value;
        std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
    };
    let mentions = |e: String, parts: &[&str]| {
        for part in parts {
            assert!(e.contains(part), "{part}: {e}");
        }
    };
    let remove = |name: &'static str| fails(&move |d| std::fs::remove_file(d.join(name)).unwrap());
    mentions(remove("config.json"), &["config.json"]);
    mentions(remove("tokenizer.json"), &["tokenizer.json"]);
    mentions(remove("model.safetensors"), &["safetensors"]);
    mentions(fails(&|d| rewrite(d, "model_type", "gpt2".into())), &["gpt2", "qwen3_moe"]);
    mentions(fails(&|d| rewrite(d, "num_experts", 0.into())), &["no experts"]);
    mentions(fails(&|d| rewrite(d, "num_experts", 9.into())), &["layer 0", "9 experts", "8 experts"]);
    mentions(fails(&|d| rewrite(d, "moe_intermediate_size", 16.into())), &["layer 0", "16", "24"]);
    mentions(fails(&|d| rewrite(d, "vocab_size", 100.into())), &["tokenizer.json", "265", "100"]);
    mentions(fails(&|d| rewrite(d, "head_dim", 8.into())), &["q_proj", "[32, 32]", "[64, 32]"]);
    mentions(fails(&|d| rewrite(d, "num_hidden_layers", 4.into())), &["layer 3"]);
    let lost = fails(&|d| {
        let mut weights = tiny_weights(&tiny_config());
        weights.retain(|(n, _, _)| n != "model.layers.1.self_attn.k_norm.weight");
        write_weights(d, &weights);
    });
    mentions(lost, &["model.layers.1.self_attn.k_norm.weight"]);
    let nowhere = load_with(Path::new("no/such/model"), &LoadOptions::default()).map(|_| ()).unwrap_err();
    mentions(nowhere.to_string(), &["no/such/model", "no such folder"]);
}

#[test]
fn dense_weights_refuse_experts_and_report_progress() {
    use comoe_core::store::{Checkpoint, Naming};
    let dir = folder(&tiny_config());
    let checkpoint = Checkpoint::open(&[dir.path()]).unwrap();
    let naming = Naming::auto();
    let seen = Mutex::new(Vec::new());
    let progress = |p| seen.lock().unwrap().push(p);
    let mut weights =
        load::DenseWeights::new(&checkpoint, &naming, DType::F32, &Device::Cpu, &progress).unwrap();
    let e = weights.tensor("model.layers.0.mlp.experts.3.up_proj.weight", &[24, 32]).unwrap_err();
    assert!(matches!(e, Error::ExpertAsDense { .. }), "{e}");
    assert!(weights.tensor("model.norm.weight", &[33]).is_err());
    weights.tensor("model.norm.weight", &[32]).unwrap();
    assert!(matches!(seen.lock().unwrap()[..], [Progress::Dense { done: 64, total }] if total > 64));

    seen.lock().unwrap().clear();
    let options = LoadOptions { format: Some(ExpertFormat::INT8), ..LoadOptions::default() };
    Model::load(dir.path(), &Device::Cpu, &options, &progress).unwrap();
    let seen = seen.into_inner().unwrap();
    assert!(matches!(seen.last(), Some(Progress::Dense { done, total }) if done == total), "{seen:?}");
    // Three layers of eight experts.
    assert!(seen.contains(&Progress::Convert { done: 24, total: 24 }), "{seen:?}");
}

fn go(_: Event<'_>) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

fn at_most(n: usize) -> GenerateOptions {
    GenerateOptions { max_tokens: Some(n), ..GenerateOptions::default() }
}

#[test]
fn generation_streams_what_it_returns_and_ends_for_the_right_reason() {
    let dir = folder(&tiny_config());
    let model = load(dir.path());
    let prompt = model.tokenizer().encode("the tiny model", true).unwrap();
    let mut streamed = String::new();
    let mut prefill = Vec::new();
    let answer = model
        .session()
        .unwrap()
        .generate(&prompt, &at_most(40), &mut |e| {
            match e {
                Event::Text(t) => streamed.push_str(t),
                Event::Prefill { done, total } => prefill.push((done, total)),
                Event::Thought(t) => panic!("a session knows no thoughts: {t}"),
            }
            ControlFlow::Continue(())
        })
        .unwrap();
    assert_eq!(answer.text, streamed);
    assert_eq!(prefill, [(prompt.len(), prompt.len())]);
    assert_eq!(answer.finish, Finish::Length);
    assert_eq!((answer.tokens.len(), answer.timings.decode_steps), (40, 39));
    assert_eq!(answer.text, model.tokenizer().decode(&answer.tokens).unwrap());

    // A stop string that occurs in that very text ends it there.
    let middle = answer.text.char_indices().nth(answer.text.chars().count() / 2).unwrap().0;
    let stop: String = answer.text[middle..].chars().take(2).collect();
    let options = GenerateOptions { stop: vec![stop.clone()], ..at_most(40) };
    let stopped = model.session().unwrap().generate(&prompt, &options, &mut go).unwrap();
    assert_eq!(stopped.finish, Finish::Stop);
    assert_eq!(stopped.text, answer.text[..answer.text.find(&stop).unwrap()]);

    // So does a token that the configuration calls a stop token.
    let mut config = tiny_config();
    config["eos_token_id"] = serde_json::json!([264, answer.tokens[5]]);
    let dir = folder(&config);
    std::fs::write(dir.path().join("generation_config.json"), r#"{"eos_token_id": 263}"#).unwrap();
    let model = load(dir.path());
    assert!(model.stop_tokens().contains(&263) && model.stop_tokens().contains(&264));
    let ended = model.session().unwrap().generate(&prompt, &at_most(40), &mut go).unwrap();
    let first = answer.tokens.iter().position(|t| *t == answer.tokens[5]).unwrap();
    assert_eq!((ended.finish, &ended.tokens[..]), (Finish::Stop, &answer.tokens[..=first]));
}

#[test]
fn a_listener_can_break_off_and_the_session_goes_on() {
    let dir = folder(&tiny_config());
    let model = load(dir.path());
    let prompt = ids(600);
    let mut session = model.session().unwrap();
    // In the prefill, after its first chunk:
    let answer = session.generate(&prompt, &at_most(9), &mut |_| ControlFlow::Break(())).unwrap();
    assert_eq!((answer.finish, answer.tokens.len()), (Finish::Cancelled, 0));
    assert_eq!(session.tokens(), &prompt[..512]);
    // While it answers, after the third token:
    let mut texts = 0;
    let answer = session
        .generate(&prompt, &at_most(9), &mut |e| {
            texts += usize::from(matches!(e, Event::Text(_)));
            if texts == 3 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })
        .unwrap();
    assert_eq!((answer.finish, answer.tokens.len(), answer.reused_tokens), (Finish::Cancelled, 3, 512));
    // And the same answer as without all that, up to there.
    let fresh = model.session().unwrap().generate(&prompt, &at_most(9), &mut go).unwrap();
    assert_eq!(answer.tokens[..], fresh.tokens[..3]);
}

#[test]
fn a_session_keeps_the_common_prefix() {
    let dir = folder(&tiny_config());
    let model = load(dir.path());
    let mut session = model.session().unwrap();
    let (a, b) = ([1, 2, 3, 4, 5, 6], [1, 2, 3, 9, 9]);
    let first = session.generate(&a, &at_most(5), &mut go).unwrap();
    assert_eq!((first.reused_tokens, session.tokens().len()), (0, 10));
    let second = session.generate(&b, &at_most(5), &mut go).unwrap();
    assert_eq!((second.reused_tokens, second.timings.prefill_tokens), (3, 2));
    assert_eq!(second.tokens, model.session().unwrap().generate(&b, &at_most(5), &mut go).unwrap().tokens);
    // The same again: all but the last token is known, its logits are not.
    let again = session.generate(&b, &at_most(5), &mut go).unwrap();
    assert_eq!((again.reused_tokens, &again.tokens), (4, &second.tokens));
    // What was generated counts as known too.
    let on = [&b[..], &second.tokens[..4], &[7]].concat();
    assert_eq!(session.generate(&on, &at_most(1), &mut go).unwrap().reused_tokens, 9);
    session.reset().unwrap();
    assert_eq!(session.generate(&b, &at_most(1), &mut go).unwrap().reused_tokens, 0);
}

#[test]
fn impossible_requests_are_refused_before_anything_runs() {
    let dir = folder(&tiny_config());
    let model = load_with(
        dir.path(),
        &LoadOptions { context: Some(10), most_context: Some(0), ..LoadOptions::default() },
    )
    .unwrap();
    let mut session = model.session().unwrap();
    let mut ask = |prompt: &[u32], options: &GenerateOptions| session.generate(prompt, options, &mut go);
    assert!(matches!(ask(&[], &at_most(1)), Err(Error::EmptyPrompt)));
    assert!(matches!(ask(&ids(10), &at_most(1)), Err(Error::PromptTooLong { prompt: 10, context: 10, .. })));
    let e = ask(&ids(6), &at_most(5)).unwrap_err();
    assert!(matches!(e, Error::GenerationTooLong { prompt: 6, asked: 5, context: 10 }));
    assert!(e.to_string().contains("at most 4"), "{e}");
    assert!(matches!(ask(&ids(6), &at_most(0)), Err(Error::BadOption { option: "max_tokens", .. })));
    let hot = SamplerOptions { temperature: -1.0, ..SamplerOptions::default() };
    let e = ask(&ids(6), &GenerateOptions { sampler: hot, ..at_most(1) }).unwrap_err();
    assert!(matches!(e, Error::BadOption { option: "temperature", .. }));
    // To the very end of the context, asked for or not.
    assert_eq!(ask(&ids(6), &at_most(4)).unwrap().tokens.len(), 4);
    let to_the_end = ask(&ids(6), &GenerateOptions::default()).unwrap();
    assert_eq!((to_the_end.tokens.len(), to_the_end.finish), (4, Finish::Length));
}

#[test]
fn a_seed_fixes_an_answer() {
    let dir = folder(&tiny_config());
    let model = load(dir.path());
    let say = |seed| {
        let sampler = SamplerOptions { temperature: 1.5, seed, ..SamplerOptions::default() };
        let options = GenerateOptions { sampler, ..at_most(20) };
        model.session().unwrap().generate(&ids(5), &options, &mut go).unwrap().tokens
    };
    assert_eq!(say(1), say(1));
    assert_ne!(say(1), say(2));
}

#[test]
fn a_conversation_keeps_keys_and_drops_its_oldest_turns() {
    let dir = folder(&tiny_config());
    let model = load_with(
        dir.path(),
        &LoadOptions { context: Some(160), most_context: Some(0), ..LoadOptions::default() },
    )
    .unwrap();
    let mut chat = model.conversation(Some("Be brief.")).unwrap();
    let options = at_most(4);
    let mut dropped = 0;
    for turn in 0..6 {
        let reply = chat.say("tell me more about the weather", &options, &mut go).unwrap();
        dropped += reply.dropped_turns;
        let g = &reply.generation;
        assert!(g.prompt_tokens + 4 <= 160);
        if turn == 1 {
            // The whole first prompt, at the least, is a prefix of the second.
            assert!(g.reused_tokens > 30, "{}", g.reused_tokens);
        }
        assert_eq!(chat.messages()[0], Message::system("Be brief."));
        assert_eq!(chat.messages().len(), 1 + 2 * (turn + 1 - dropped));
    }
    assert!(dropped > 0);

    let before = chat.messages().to_vec();
    let e = chat.say(&"x".repeat(400), &options, &mut go).unwrap_err();
    assert!(matches!(e, Error::MessageTooLong { context: 160, .. }), "{e}");
    assert_eq!(chat.messages(), before);
    chat.reset().unwrap();
    assert_eq!(chat.messages(), [Message::system("Be brief.")]);
    assert_eq!(chat.say("hi", &options, &mut go).unwrap().generation.reused_tokens, 0);

    std::fs::remove_file(dir.path().join("tokenizer_config.json")).unwrap();
    let model = load(dir.path());
    assert!(matches!(model.conversation(None).map(|_| ()), Err(Error::NoTemplate)));
}

#[test]
fn an_answer_ends_with_the_tokenizers_end_token_too() {
    let dir = folder(&tiny_config());
    assert_eq!(load(dir.path()).stop_tokens(), [264]);
    let path = dir.path().join("tokenizer_config.json");
    for end in [r#""<|im_start|>""#, r#"{"content": "<|im_start|>", "special": true}"#] {
        std::fs::write(&path, format!(r#"{{"eos_token": {end}}}"#)).unwrap();
        assert_eq!(load(dir.path()).stop_tokens(), [263, 264]);
    }
    // What the tokenizer does not know cannot come.
    for other in [r#""<|nothing|>""#, "null"] {
        std::fs::write(&path, format!(r#"{{"eos_token": {other}}}"#)).unwrap();
        assert_eq!(load(dir.path()).stop_tokens(), [264]);
    }
}

#[test]
fn thoughts_are_told_from_answers_and_not_said_again() {
    let dir = folder(&tiny_config());
    // Everything that this model says is a thought: the prompt opens one, and it never closes.
    let template = "{% for m in messages %}{{ m.role }}:{{ m.content }};{{ m.reasoning_content is defined }}{% endfor %}<think>";
    let config = serde_json::json!({"chat_template": template});
    std::fs::write(dir.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    let model = load(dir.path());
    let mut chat = model.conversation(None).unwrap();
    let (mut thought, mut answer) = (String::new(), String::new());
    let reply = chat
        .say("hi", &at_most(12), &mut |event| {
            match event {
                Event::Thought(text) => thought.push_str(text),
                Event::Text(text) => answer.push_str(text),
                Event::Prefill { .. } => {}
            }
            ControlFlow::Continue(())
        })
        .unwrap();
    assert_eq!((reply.answer.as_str(), answer.as_str()), ("", ""));
    assert_eq!(reply.thought.as_deref(), Some(thought.as_str()));
    assert_eq!(reply.generation.text.trim(), thought);
    let said = &chat.messages()[1];
    assert_eq!((said.content.as_str(), &said.reasoning), ("", &reply.thought));
    let prompt = model.template().unwrap().render(chat.messages(), true).unwrap();
    assert_eq!(prompt, "user:hi;Falseassistant:;True<think>");
    // Breaking off works within a thought as well.
    let mut tokens = 0;
    let mut stop_at_three = |event: Event<'_>| {
        tokens += usize::from(!matches!(event, Event::Prefill { .. }));
        if tokens == 3 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let stopped = chat.say("hi", &at_most(12), &mut stop_at_three).unwrap();
    assert_eq!((stopped.generation.finish, stopped.generation.tokens.len()), (Finish::Cancelled, 3));
}

#[test]
fn a_damaged_slot_stops_the_answer_with_the_experts_name() {
    let dir = folder(&tiny_config());
    let model = load(dir.path());
    let mut session = model.session().unwrap();
    let checked = GenerateOptions { check_every: 1, ..at_most(20) };
    session.generate(&ids(5), &checked, &mut go).unwrap();

    model.experts().with_backend(|backend, pool| {
        backend.synchronize().unwrap();
        for (slot, state) in pool.states() {
            let SlotState::Resident(_) = state else { continue };
            let mut bytes = [0; 64];
            backend.read_slot(slot, &mut bytes).unwrap();
            bytes[5] ^= 0x10;
            backend.write_slot(slot, &bytes).unwrap();
        }
    });
    // Unchecked, it goes on with wrong numbers; every second step is looked at, so the second finds it.
    let e =
        session.generate(&ids(6), &GenerateOptions { check_every: 2, ..at_most(20) }, &mut go).unwrap_err();
    assert!(matches!(&e, Error::Core(comoe_core::Error::SlotDiffers { .. })), "{e}");
    assert!(e.to_string().contains("expert"), "{e}");
    let e = session.generate(&ids(6), &at_most(2), &mut go).unwrap_err();
    assert!(matches!(&e, Error::Core(comoe_core::Error::Stopped { .. })), "{e}");
}

#[test]
fn warming_up_leaves_no_trace_but_what_is_in_the_slots() {
    let dir = folder(&tiny_config());
    for context in [1, 2, 3, 64] {
        let options = LoadOptions { context: Some(context), ..LoadOptions::default() };
        let model = load_with(dir.path(), &options).unwrap();
        let want = run(&load_with(dir.path(), &options).unwrap(), &ids(1), Rows::All);
        model.decoder().warm_up().unwrap();
        let stats = model.experts().stats();
        assert_eq!((stats.accesses(), stats.records_moved), (0, 0));
        close(&run(&model, &ids(1), Rows::All), &want, 0.0);
    }
}
