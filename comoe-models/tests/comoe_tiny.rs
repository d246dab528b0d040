//! comoe-tiny, the model that comes with CoMoE: logits, tokens and chat format against Hugging Face transformers
//! (`assets/fixtures`, made by `assets/training/fixtures.py`), and what it says.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, IndexOp, Tensor};
use comoe_core::{CacheOptions, Capacity};
use comoe_models::{Event, Finish, GenerateOptions, LoadOptions, Message, Model, Rows};

fn assets(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../assets").join(name)
}

fn load(options: &LoadOptions) -> Model {
    Model::load(&assets("comoe-tiny"), &Device::Cpu, options, &|_| {}).unwrap()
}

fn json(name: &str) -> serde_json::Value {
    serde_json::from_str(&std::fs::read_to_string(assets(name)).unwrap()).unwrap()
}

fn ids(value: &serde_json::Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

/// Largest difference of two tensors; NaN counts as infinite.
fn difference(a: &Tensor, b: &Tensor) -> f32 {
    assert_eq!(a.dims(), b.dims());
    let flat = |t: &Tensor| t.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
    let differences = flat(a).into_iter().zip(flat(b)).map(|(a, b)| (a - b).abs());
    differences.fold(0.0, |worst, d| if d.is_nan() { f32::INFINITY } else { worst.max(d) })
}

#[test]
fn logits_equal_those_of_transformers() {
    let model = load(&LoadOptions::default());
    let meta = json("fixtures/comoe_tiny_logits.json");
    let stride = meta["stride"].as_u64().unwrap() as usize;
    let tolerance = meta["tolerance"].as_f64().unwrap() as f32;
    let golden =
        candle_core::safetensors::load(assets("fixtures/comoe_tiny_logits.safetensors"), &Device::Cpu);
    let golden = golden.unwrap();
    let prompts = meta["prompts"].as_array().unwrap();
    assert_eq!(prompts.len(), 10);
    let every = Tensor::arange_step(0u32, 4096, stride as u32, &Device::Cpu).unwrap();
    for (i, prompt) in prompts.iter().enumerate() {
        let ids = ids(&prompt["ids"]);
        let text = prompt["text"].as_str().unwrap();
        assert_eq!(model.tokenizer().encode(text, false).unwrap(), ids, "{text:?}");
        for step in [ids.len(), 1] {
            let mut kv = model.decoder().new_kv().unwrap();
            let parts =
                ids.chunks(step).map(|part| model.decoder().forward(part, &mut kv, Rows::All).unwrap());
            let logits = Tensor::cat(&parts.collect::<Vec<_>>(), 0).unwrap();
            let last = difference(&logits.i(ids.len() - 1).unwrap(), &golden[&format!("last_{i}")]);
            let strided = logits.index_select(&every, 1).unwrap();
            let all = difference(&strided, &golden[&format!("all_{i}")]);
            assert!(last < tolerance && all < tolerance, "{text:?} by {step}: {last} and {all}");
        }
    }
}

#[test]
fn the_chat_template_and_its_tokens_are_those_of_transformers() {
    let model = load(&LoadOptions::default());
    let cases = json("fixtures/chat_template.json");
    let cases = cases.as_array().unwrap();
    assert!(cases.len() >= 4);
    for case in cases {
        let messages: Vec<Message> = case["messages"]
            .as_array()
            .unwrap()
            .iter()
            .map(|m| {
                let content = m["content"].as_str().unwrap();
                match m["role"].as_str().unwrap() {
                    "system" => Message::system(content),
                    "user" => Message::user(content),
                    _ => Message::assistant(content),
                }
            })
            .collect();
        let ask = case["add_generation_prompt"].as_bool().unwrap();
        let text = model.template().unwrap().render(&messages, ask).unwrap();
        assert_eq!(text, case["text"].as_str().unwrap());
        assert_eq!(model.tokenizer().encode(&text, false).unwrap(), ids(&case["ids"]));
    }
}

#[test]
fn it_adds_with_few_slots_as_with_all() {
    let ask = |capacity| {
        let cache = CacheOptions { capacity, ..CacheOptions::default() };
        let model = load(&LoadOptions { cache, ..LoadOptions::default() });
        let mut chat = model.conversation(None).unwrap();
        let mut streamed = String::new();
        let mut show = |event: Event<'_>| {
            if let Event::Text(text) = event {
                streamed.push_str(text);
            }
            ControlFlow::Continue(())
        };
        let options = GenerateOptions { max_tokens: Some(60), ..GenerateOptions::default() };
        let answers = ["What is 17 plus 25?", "What is 100 minus 1?"].map(|question| {
            let g = chat.say(question, &options, &mut show).unwrap().generation;
            assert_eq!(g.finish, Finish::Stop, "{}", g.text);
            g
        });
        assert_eq!(streamed, answers[0].text.clone() + &answers[1].text);
        assert!(answers[1].reused_tokens > 15, "{}", answers[1].reused_tokens);
        answers.map(|g| (g.text, g.tokens))
    };
    let all = ask(Capacity::All);
    assert!(all[0].0.contains("42") && all[1].0.contains("99"), "{all:?}");
    assert_eq!(all, ask(Capacity::Slots(9)));
    assert_eq!(all, ask(Capacity::Fraction(0.5)));
}
