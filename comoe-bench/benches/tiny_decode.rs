//! comoe-tiny telling a story: candle-transformers' own Qwen3-MoE beside this project's decoder, resident, with half
//! the slots, and with half the slots and prefetch.
//!
//! Everybody decodes the same tokens (the model's own answer, forced), one at a time, until the logits are on the host;
//! everybody reads the same files, computes in F32 and uses the same thread pool, whose size is printed. The prompt is
//! not timed. Besides criterion's figures a table is printed that is made from rounds in which everybody decodes the
//! story in turn, so that whatever else the machine does disturbs all alike: `best` and `median` of the rounds, each as
//! a ratio to candle's and to the resident run's. On the first GPU, too, when there is one and feature `cuda` is on
//! (there without candle, whose Qwen3-MoE wants BF16 and other kernels).

use std::time::{Duration, Instant};

use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::qwen3_moe::{Config, ModelForCausalLM};
use comoe_bench::report::{Table, machine, today};
use comoe_bench::tiny::{self, Hold, Script, Tiny};
use comoe_core::{Capacity, ExpertFormat, Prefetch};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};

/// Rounds of the table.
const ROUNDS: usize = 15;

enum Contender {
    Candle(Box<ModelForCausalLM>, Tensor),
    Comoe(Box<Tiny>),
}

impl Contender {
    /// The time of decoding the story.
    fn round(&mut self, script: &Script) -> Duration {
        match self {
            Self::Comoe(tiny) => {
                tiny.begin(script).expect("the prompt runs");
                let start = Instant::now();
                tiny.decode(script).expect("the story runs");
                start.elapsed()
            }
            Self::Candle(model, logits) => {
                let row = |model: &mut ModelForCausalLM, ids: &[u32], at: usize| {
                    let ids = Tensor::new(ids, &Device::Cpu).and_then(|t| t.unsqueeze(0)).expect("ids");
                    model.forward(&ids, at).expect("candle runs")
                };
                model.clear_kv_cache();
                row(model, &script.prompt, 0);
                let start = Instant::now();
                for (i, id) in script.answer.iter().enumerate() {
                    *logits = row(model, &[*id], script.prompt.len() + i);
                    logits.flatten_all().and_then(|l| l.to_vec1::<f32>()).expect("logits");
                }
                start.elapsed()
            }
        }
    }
}

fn candle() -> Contender {
    let folder = tiny::folder();
    let text = std::fs::read_to_string(folder.join("config.json")).expect("comoe-tiny is in assets");
    let mut config: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    // A field that candle asks for; it says nothing where windows do not slide.
    config["max_window_layers"] = config["num_hidden_layers"].clone();
    let config: Config = serde_json::from_value(config).expect("a Qwen3-MoE configuration");
    let mut files: Vec<_> = std::fs::read_dir(&folder)
        .expect("comoe-tiny is in assets")
        .filter_map(|e| Some(e.ok()?.path()))
        .filter(|p| p.extension().is_some_and(|e| e == "safetensors"))
        .collect();
    files.sort();
    // SAFETY: the files belong to this checkout, and nobody writes to them while the bench runs.
    let vb =
        unsafe { VarBuilder::from_mmaped_safetensors(&files, DType::F32, &Device::Cpu) }.expect("weights");
    let model = ModelForCausalLM::new(&config, vb).expect("candle's model");
    Contender::Candle(Box::new(model), Tensor::zeros(1, DType::F32, &Device::Cpu).expect("a zero"))
}

fn contenders(device: &Device) -> Vec<(&'static str, Contender)> {
    let half = Hold { capacity: Capacity::Fraction(0.5), ..Hold::RESIDENT };
    let holds = [
        ("resident", Hold::RESIDENT),
        ("half the slots", half),
        ("half the slots, prefetch", Hold { prefetch: Prefetch::Correlation, ..half }),
        ("resident, int8", Hold { format: ExpertFormat::INT8, ..Hold::RESIDENT }),
        ("half the slots, int8", Hold { format: ExpertFormat::INT8, ..half }),
        ("resident, int4", Hold { format: ExpertFormat::INT4, ..Hold::RESIDENT }),
        ("half the slots, int4", Hold { format: ExpertFormat::INT4, ..half }),
    ];
    let ours = holds.into_iter().map(|(name, hold)| {
        let tiny = Tiny::load(&tiny::folder(), device, &hold).expect("comoe-tiny is in assets");
        (name, Contender::Comoe(Box::new(tiny)))
    });
    let theirs = device.is_cpu().then(|| ("candle-transformers", candle()));
    theirs.into_iter().chain(ours).collect()
}

/// Candle's logits must be ours, or the comparison compares nothing.
fn same_model(script: &Script, contenders: &mut [(&str, Contender)]) {
    let [(_, candle), ..] = contenders else { return };
    candle.round(script);
    let [(_, Contender::Candle(_, logits)), (_, Contender::Comoe(tiny)), ..] = contenders else { return };
    let theirs = logits.flatten_all().and_then(|l| l.to_vec1::<f32>()).expect("logits");
    tiny.begin(script).expect("the prompt runs");
    let ours = tiny.decode(script).expect("the story runs");
    let off = ours.iter().zip(&theirs).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(ours.len() == theirs.len() && off < 1e-2, "candle's logits differ by {off}");
    println!("largest difference of a logit to candle's after the story: {off:.1e}");
}

fn table(device: &Device, script: &Script, contenders: &mut [(&str, Contender)]) {
    let mut times = vec![Vec::new(); contenders.len()];
    for _ in 0..ROUNDS {
        for ((_, contender), times) in contenders.iter_mut().zip(&mut times) {
            times.push(contender.round(script));
        }
    }
    times.iter_mut().for_each(|t| t.sort_unstable());
    let rate = |d: Duration| script.answer.len() as f64 / d.as_secs_f64();
    let (best, median) = (|t: &[Duration]| rate(t[0]), |t: &[Duration]| rate(t[t.len() / 2]));
    println!(
        "\ncomoe-tiny, {} tokens decoded after a prompt of {}, F32, {} rounds in turn ({}, {}; candle {} threads)\n",
        script.answer.len(),
        script.prompt.len(),
        ROUNDS,
        machine(device),
        today(),
        candle_core::utils::get_num_threads(),
    );
    let resident = usize::from(device.is_cpu());
    let mut out = Table::new(&[
        "",
        "best tok/s",
        "median tok/s",
        "of candle's",
        "of resident",
        "hits %",
        "prefetch used",
    ]);
    for ((name, contender), t) in contenders.iter().zip(&times) {
        let ratio = |to: usize| {
            let (a, b) = (best(t) / best(&times[to]), median(t) / median(&times[to]));
            format!("{a:.2} / {b:.2}")
        };
        let (hits, used) = match contender {
            Contender::Candle(..) => (String::new(), String::new()),
            Contender::Comoe(tiny) => {
                let s = tiny.decoder().experts().stats();
                (format!("{:.1}", 100.0 * s.hit_rate()), format!("{} of {}", s.prefetch_used, s.prefetched))
            }
        };
        out.row([
            (*name).to_owned(),
            format!("{:.1}", best(t)),
            format!("{:.1}", median(t)),
            if device.is_cpu() { ratio(0) } else { String::new() },
            ratio(resident),
            hits,
            used,
        ]);
    }
    println!("{out}");
}

fn tiny_decode(c: &mut Criterion) {
    let script = tiny::script(&tiny::folder()).expect("comoe-tiny is in assets");
    for device in std::iter::once(Device::Cpu).chain(comoe_core::cuda_device(0).ok()) {
        let mut contenders = contenders(&device);
        let name = if device.is_cpu() { "cpu" } else { "cuda" };
        let mut group = c.benchmark_group(format!("tiny_decode/{name}"));
        group.throughput(Throughput::Elements(script.answer.len() as u64));
        for (name, contender) in &mut contenders {
            group.bench_function(*name, |b| {
                b.iter_custom(|n| (0..n).map(|_| contender.round(&script)).sum());
            });
        }
        group.finish();
        same_model(&script, &mut contenders);
        table(&device, &script, &mut contenders);
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_millis(1500));
    targets = tiny_decode
}
criterion_main!(benches);
