//! The next layer's router, asked one layer early, on comoe-tiny: what it guesses, that prefetching by it pays, and that
//! nobody computes it for nothing.

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::{Arc, Mutex};

use candle_core::{DType, Device, Tensor};
use comoe_core::trace::{Contents, Phase, Recorder, Routed, RoutingObserver, Trace, TraceInfo};
use comoe_core::{CacheOptions, CacheStats, Capacity, Prefetch};
use comoe_models::{GenerateOptions, LoadOptions, Model};

fn load(prefetch: Prefetch, slots: usize) -> Model {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../assets/comoe-tiny");
    let cache = CacheOptions { capacity: Capacity::Slots(slots), prefetch, ..CacheOptions::default() };
    let options = LoadOptions { cache, ..LoadOptions::default() };
    Model::load(&folder, &Device::Cpu, &options, &|_| {}).unwrap()
}

fn answer(model: &Model, prompt: &str) -> Vec<u32> {
    let options = GenerateOptions { max_tokens: Some(120), ..GenerateOptions::default() };
    let mut chat = model.conversation(None).unwrap();
    chat.say(prompt, &options, &mut |_| ControlFlow::Continue(())).unwrap().generation.tokens
}

const STORY: &str = "Tell me a story about a fox.";

#[test]
fn guesses_are_recorded_for_every_layer_but_the_first_and_mostly_come_true() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let model = load(Prefetch::Off, 96);
    let info = TraceInfo { model: "tiny".into(), top_k: 2, directory: model.experts().directory().clone() };
    let contents = Contents { weights: false, guesses: true };
    let recorder = Recorder::create(file.path(), info, contents).unwrap();
    model.experts().observe(Some(Box::new(recorder.clone())));
    recorder.begin(0, Phase::Decode);
    answer(&model, STORY);
    recorder.finish().unwrap();
    let trace = Trace::open(file.path()).unwrap();
    let (mut right, mut chosen, mut guessed) = (0, 0, 0);
    for t in 0..trace.tokens().len() {
        assert!(trace.guesses(t, 0).is_empty());
        for layer in 1..trace.layers() {
            let guesses = trace.guesses(t, layer);
            // Tokens of the prompt went through together.
            assert!([0, 4].contains(&guesses.len()), "{guesses:?}");
            if !guesses.is_empty() {
                guessed += 1;
                chosen += trace.chosen(t, layer).len();
                right += trace.chosen(t, layer).iter().filter(|e| guesses[..2].contains(e)).count();
            }
        }
    }
    // A guess at random is right one time of eight.
    assert!(guessed > 200 && right * 2 > chosen, "{right} of {chosen}, {guessed} guesses");
}

#[test]
fn prefetch_by_the_stale_gate_brings_what_is_used_and_changes_no_answer() {
    let want = answer(&load(Prefetch::Off, 96), STORY);
    let run = |prefetch| -> CacheStats {
        let model = load(prefetch, 36);
        assert_eq!(answer(&model, STORY), want, "{prefetch}");
        model.experts().stats()
    };
    let (gate, table) = (run(Prefetch::StaleGate), run(Prefetch::Correlation));
    let precision = |s: &CacheStats| s.prefetch_used as f64 / s.prefetched as f64;
    assert!(gate.prefetch_used > 100, "{gate}");
    assert!(precision(&gate) > precision(&table), "{gate}\n{table}");
    let auto = run(Prefetch::Auto);
    assert!(auto.prefetch_judged && auto.prefetch_used > 0, "{auto}");
}

/// Counts the steps that came with a guess.
struct Guesses(Arc<Mutex<usize>>);

impl RoutingObserver for Guesses {
    fn step(&mut self, step: &Routed<'_>) {
        *self.0.lock().unwrap() += usize::from(!step.guess.is_empty());
    }
}

#[test]
fn a_guess_that_nobody_looks_at_is_not_made() {
    for (prefetch, made) in [(Prefetch::Correlation, false), (Prefetch::StaleGate, true)] {
        let model = load(prefetch, 36);
        let count = Arc::new(Mutex::new(0));
        model.experts().observe(Some(Box::new(Guesses(count.clone()))));
        answer(&model, "What is 17 plus 25?");
        assert_eq!(*count.lock().unwrap() > 0, made, "{prefetch}");
        assert!(model.experts().layer(0).wants_guess(1) == made && !model.experts().layer(5).wants_guess(1));
        assert!(!model.experts().layer(0).wants_guess(2), "not for several tokens at once");
    }
}

#[test]
fn a_guess_out_of_range_is_refused_and_the_cache_stays_usable() {
    let model = load(Prefetch::StaleGate, 36);
    let x = Tensor::zeros((1, model.decoder().plan().hidden), DType::F32, &Device::Cpu).unwrap();
    let (ids, weights) =
        (Tensor::new(&[[3u32, 1]], &Device::Cpu), Tensor::new(&[[0.5f32, 0.5]], &Device::Cpu));
    let (ids, weights) = (ids.unwrap(), weights.unwrap());
    let step = |layer, guess: &[u32]| {
        model.experts().layer(layer).with_guess(guess).forward(&x, &ids, &weights).map(drop)
    };
    let e = step(0, &[2, 16]).unwrap_err().to_string();
    assert!(e.contains("layer 1 expert 16") && e.contains("16 experts"), "{e}");
    step(0, &[2, 15]).unwrap();
    step(5, &[99]).unwrap();
}
