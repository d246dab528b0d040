//! comoe-tiny and the small golden models on a GPU: against the resident run bit for bit, against the CPU and against
//! Hugging Face transformers within a tolerance.

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::LazyLock;

use candle_core::{DType, Device, Tensor};
use comoe_core::pool::SlotState;
use comoe_core::{
    CacheOptions, Capacity, CudaOptions, DriverKind, ExpertFormat, PolicyKind, Prefetch, ResidentFormat,
    Scope, cuda_device, cuda_memory,
};
use comoe_models::{Decoder, Error, GenerateOptions, KvFormat, LoadOptions, Model, Rows};

use crate::files::{Family, checkout, families, prompts, tiny};

/// Largest difference of a logit to the CPU's or to transformers', with F32 between the blocks: only the order of sums
/// differs. Logits of comoe-tiny reach about 20.
const F32_TOLERANCE: f32 = 1e-3;
/// Norm of the difference to the CPU's F32 logits over their norm, with BF16 between the blocks. A rounded router sends
/// some tokens to other experts, so single logits say little: transformers' own BF16 run of comoe-tiny is 0.03 to 0.036
/// from its F32 run, and up to 6.4 off in a single logit.
const BF16_TOLERANCE: f64 = 0.08;

/// One device for all: a second one would have a stream of its own.
pub(crate) static GPU: LazyLock<Device> = LazyLock::new(|| cuda_device(0).expect("a CUDA device"));

/// Converted experts, kept for the tests of this process.
pub(crate) fn converted() -> PathBuf {
    let folder = std::env::temp_dir().join(format!("comoe-gpu-tests-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder for converted experts");
    folder
}

fn values(logits: &Tensor) -> Vec<f32> {
    logits.flatten_all().and_then(|t| t.to_vec1()).expect("logits")
}

/// Tokens that follow `prompt`, and the logits of every step, prompt included.
fn greedy(decoder: &Decoder, prompt: &[u32], steps: usize) -> (Vec<u32>, Vec<f32>) {
    let mut kv = decoder.new_kv().expect("a KV cache");
    let vocab = decoder.plan().vocab;
    let (mut tokens, mut all) = (Vec::new(), Vec::new());
    let mut ids = prompt.to_vec();
    for _ in 0..=steps {
        let logits = values(&decoder.forward(&ids, &mut kv, Rows::All).expect("a step"));
        assert!(logits.iter().all(|l| l.is_finite()));
        let last = &logits[logits.len() - vocab..];
        let best = last.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).expect("logits").0 as u32;
        all.extend_from_slice(&logits);
        tokens.push(best);
        ids = vec![best];
    }
    (tokens, all)
}

/// Logits of `ids` in one pass.
fn at_once(decoder: &Decoder, ids: &[u32]) -> Vec<f32> {
    values(&decoder.forward(ids, &mut decoder.new_kv().expect("a KV cache"), Rows::All).expect("a pass"))
}

fn worst(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    // A NaN counts as infinite.
    let differences = a.iter().zip(b).map(|(a, b)| (a - b).abs());
    differences.fold(0.0, |worst, d| if d.is_nan() { f32::INFINITY } else { worst.max(d) })
}

/// Norm of the difference over the norm of `want`. NaN when either holds one.
fn relative(have: &[f32], want: &[f32]) -> f64 {
    let square = |v: f32| f64::from(v) * f64::from(v);
    let off: f64 = have.iter().zip(want).map(|(h, w)| square(h - w)).sum();
    (off / want.iter().map(|w| square(*w)).sum::<f64>()).sqrt()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

fn open(device: &Device, options: &LoadOptions) -> Decoder {
    Decoder::open(&tiny(), device, options, &|_| {}).expect("comoe-tiny loads")
}

#[test]
#[ignore = "needs a CUDA device"]
fn bits_do_not_depend_on_how_experts_are_kept_and_are_near_the_cpus() {
    let prompts = prompts();
    // More tokens than the fused kernels take at once, and a short one.
    let long: Vec<u32> = prompts.iter().flatten().copied().take(70).collect();
    assert!(long.len() > 40, "{}", long.len());
    let cases = [(long, 6), (prompts[0].clone(), 24)];
    let mut runs = 0;
    for format in [None, Some(ExpertFormat::INT8), Some(ExpertFormat::INT4), Some(ExpertFormat::Mxfp4)] {
        let cpu_options = LoadOptions { format, cache_dir: Some(converted()), ..LoadOptions::default() };
        let cpu = open(&Device::Cpu, &cpu_options);
        for dtype in [DType::F32, DType::BF16] {
            for resident in [ResidentFormat::AsStored, ResidentFormat::Bf16] {
                if format.is_none() && resident == ResidentFormat::Bf16 {
                    continue; // The checkpoint is in BF16: nothing is expanded.
                }
                let mut cuda = CudaOptions::default();
                cuda.resident = resident;
                let options = LoadOptions { dtype, cuda, ..cpu_options.clone() };
                let all = open(&GPU, &options);
                let what = format!("{format:?}, {dtype:?}, {resident:?}");
                let want: Vec<_> = cases.iter().map(|(prompt, n)| greedy(&all, prompt, *n)).collect();
                for ((prompt, _), (tokens, _)) in cases.iter().zip(&want) {
                    let ids: Vec<u32> = prompt.iter().chain(tokens).copied().collect();
                    let (have, want) = (at_once(&all, &ids), at_once(&cpu, &ids));
                    let (off, part) = (worst(&have, &want), relative(&have, &want));
                    println!("{what}: {} tokens, {off:.1e} ({part:.1e} of the norm) from the CPU", ids.len());
                    // A weight that is expanded to BF16 is rounded once more.
                    let near = match (dtype, resident) {
                        (DType::F32, ResidentFormat::AsStored) => off < F32_TOLERANCE,
                        _ => part < BF16_TOLERANCE,
                    };
                    assert!(near, "{what}: {off} ({part} of the norm) from the CPU's logits");
                }
                // Top-k, below and at one token's worth, at and around a slot per expert of half the layers, all but one.
                for (i, slots) in [2, 3, 11, 12, 13, 24, 47, 48, 72, 95, 96].into_iter().enumerate() {
                    let cache = CacheOptions {
                        capacity: Capacity::Slots(slots),
                        policy: [PolicyKind::Lru, PolicyKind::Lfu, PolicyKind::Lfru][i % 3],
                        scope: [Scope::Layer, Scope::Global][i % 2],
                        prefetch: [Prefetch::Off, Prefetch::Correlation][i / 2 % 2],
                        ..CacheOptions::default()
                    };
                    let mut options = LoadOptions { cache, ..options.clone() };
                    // All, part and nothing in page-locked memory.
                    options.cuda.page_lock_limit = [None, Some(3 << 20), Some(0)][i / 3 % 3];
                    let few = open(&GPU, &options);
                    for ((prompt, n), (tokens, logits)) in cases.iter().zip(&want) {
                        let have = greedy(&few, prompt, *n);
                        assert_eq!(&have.0, tokens, "{what}, {slots} slots");
                        assert!(
                            bits(&have.1) == bits(logits),
                            "{what}, {slots} slots: logits differ in bits"
                        );
                    }
                    few.experts().check().expect("slots equal the store");
                    runs += 1;
                }
            }
        }
    }
    println!("{runs} ways to keep experts, each bit for bit as the resident run");
    std::fs::remove_dir_all(converted()).expect("the folder goes");
}

/// Every number of slots from top-k to all. Policies, scopes, prefetch, drivers and formats take turns, so that each meets
/// the others.
#[test]
#[ignore = "needs a CUDA device"]
fn every_pool_size_gives_the_resident_runs_bits() {
    let prompts = prompts();
    let (prompt, steps) = (&prompts[0], 16);
    let formats = [None, Some(ExpertFormat::INT8), Some(ExpertFormat::INT4)];
    let with =
        |format, cache| LoadOptions { format, cache, cache_dir: Some(converted()), ..LoadOptions::default() };
    let want =
        formats.map(|format| greedy(&open(&GPU, &with(format, CacheOptions::default())), prompt, steps));
    let (mut runs, mut by_device) = (0, 0);
    for slots in 2..=96 {
        for (i, (format, want)) in formats.iter().zip(&want).enumerate() {
            let turn = slots + 5 * i;
            let cache = CacheOptions {
                capacity: Capacity::Slots(slots),
                policy: [PolicyKind::Auto, PolicyKind::Lru, PolicyKind::Lfu, PolicyKind::Lfru][turn % 4],
                scope: [Scope::Layer, Scope::Global][turn / 4 % 2],
                prefetch: [Prefetch::Off, Prefetch::Correlation, Prefetch::Auto][turn % 3],
                ..CacheOptions::default()
            };
            let few = open(&GPU, &with(*format, cache));
            let have = greedy(&few, prompt, steps);
            assert_eq!(have.0, want.0, "{format:?}, {slots} slots");
            assert!(bits(&have.1) == bits(&want.1), "{format:?}, {slots} slots: logits differ in bits");
            few.experts().check().expect("slots equal the store");
            let stats = few.experts().stats();
            let (accesses, hits) = (stats.accesses(), stats.hits());
            let misses: u64 = stats.layers.iter().map(|l| l.misses).sum();
            assert_eq!(hits + misses, accesses, "{format:?}, {slots} slots");
            runs += 1;
            by_device += u32::from(stats.device_steps > 0);
        }
    }
    println!("{runs} pools, {by_device} of them driven by the device, each bit for bit as the resident run");
    assert!(by_device > 20, "{by_device}");
}

/// RAM for fewer experts than there are, from the least that works; page-locked and not.
#[test]
#[ignore = "needs a CUDA device"]
fn however_few_experts_ram_holds_the_bits_are_the_resident_runs() {
    let prompts = prompts();
    let (prompt, steps) = (&prompts[0], 16);
    let with = |format, cache, cuda| LoadOptions {
        format,
        cache,
        cuda,
        cache_dir: Some(converted()),
        ..LoadOptions::default()
    };
    for format in [None, Some(ExpertFormat::INT4)] {
        let all = open(&GPU, &with(format, CacheOptions::default(), CudaOptions::default()));
        let (want, record) = (greedy(&all, prompt, steps), all.experts().stats().slot_bytes as u64);
        drop(all);
        for (i, places) in [4u64, 5, 6, 8, 16, 24, 48, 95].into_iter().enumerate() {
            let cache = CacheOptions {
                capacity: Capacity::Slots([13, 24, 48, 96][i % 4]),
                prefetch: [Prefetch::Off, Prefetch::Auto, Prefetch::Correlation][i % 3],
                driver: [DriverKind::Auto, DriverKind::Auto, DriverKind::Auto, DriverKind::Device][i % 4],
                ram: Some(places * record),
                ..CacheOptions::default()
            };
            // The device drives nothing that is prefetched.
            let prefetch = if cache.driver == DriverKind::Device { Prefetch::Off } else { cache.prefetch };
            let cache = CacheOptions { prefetch, ..cache };
            let mut cuda = CudaOptions::default();
            cuda.page_lock_limit = [None, None, None, None, None, Some(0)][i % 6];
            cuda.resident = match format {
                Some(_) if i % 2 == 1 => ResidentFormat::Bf16,
                _ => ResidentFormat::AsStored,
            };
            let what = format!("{format:?}, RAM for {places}, {cache:?}");
            // Expanded to BF16 the arithmetic is another.
            let want = match cuda.resident {
                ResidentFormat::AsStored => want.clone(),
                _ => greedy(&open(&GPU, &with(format, CacheOptions::default(), cuda.clone())), prompt, steps),
            };
            let few = open(&GPU, &with(format, cache, cuda.clone()));
            let have = greedy(&few, prompt, steps);
            assert_eq!(have.0, want.0, "{what}");
            assert!(bits(&have.1) == bits(&want.1), "{what}: logits differ in bits");
            few.experts().check().expect("slots equal the store");
            let stats = few.experts().stats();
            let tier = stats.tier.expect("RAM is limited");
            assert_eq!(tier.places, places as usize, "{what}");
            assert!(tier.cold > 0 && tier.reads >= tier.cold, "{what}: {tier:?}");
            let locked = few.experts().backend_info().page_locked;
            let expected = if cuda.page_lock_limit == Some(0) { 0 } else { places * record_of(&few) };
            assert_eq!(locked, Some(expected), "{what}");
            println!("{what}: {} warm, {} cold, {} reads", tier.warm, tier.cold, tier.reads);
        }
        let cache = CacheOptions { ram: Some(3 * record), ..CacheOptions::default() };
        let refused = Decoder::open(&tiny(), &GPU, &with(format, cache, CudaOptions::default()), &|_| {});
        let text = refused.err().expect("less than the copies keep").to_string();
        assert!(text.contains("fewer than the 4 experts"), "{text}");
    }
    std::fs::remove_dir_all(converted()).expect("the folder goes");
}

/// Bytes of a stored record.
fn record_of(model: &Decoder) -> u64 {
    model.experts().directory().largest_record() as u64
}

#[test]
#[ignore = "needs a CUDA device"]
fn logits_equal_those_of_transformers_on_the_gpu() {
    // comoe-tiny: the last row, and every stride-th logit of all rows.
    let text = std::fs::read_to_string(checkout("assets/fixtures/comoe_tiny_logits.json")).expect("fixtures");
    let meta: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let stride = meta["stride"].as_u64().expect("a stride") as usize;
    let file = checkout("assets/fixtures/comoe_tiny_logits.safetensors");
    let golden = candle_core::safetensors::load(file, &Device::Cpu).expect("golden logits");
    let f32 = |name: &str| values(&golden[name].to_dtype(DType::F32).expect("F32"));
    let tiny = open(&GPU, &LoadOptions::default());
    let vocab = tiny.plan().vocab;
    for (i, ids) in prompts().iter().enumerate() {
        for step in [ids.len(), 1] {
            let mut kv = tiny.new_kv().expect("a KV cache");
            let steps = ids.chunks(step).map(|part| tiny.forward(part, &mut kv, Rows::All).expect("a step"));
            let logits: Vec<f32> = steps.flat_map(|t| values(&t)).collect();
            let strided: Vec<f32> =
                logits.chunks_exact(vocab).flat_map(|row| row.iter().step_by(stride).copied()).collect();
            let last = worst(&logits[logits.len() - vocab..], &f32(&format!("last_{i}")));
            let all = worst(&strided, &f32(&format!("all_{i}")));
            println!("comoe-tiny, prompt {i} by {step}: {last:.1e} and {all:.1e} from transformers");
            assert!(last < F32_TOLERANCE && all < F32_TOLERANCE, "prompt {i} by {step}: {last} and {all}");
        }
    }
}

/// Every family with golden logits: F32 near transformers', all prompt lengths; BF16 runs through every block, which
/// finds types that do not match.
#[test]
#[ignore = "needs a CUDA device"]
fn every_family_runs_on_the_gpu() {
    let mut wrong = Vec::new();
    for Family { name, folder, ids, logits } in families() {
        let want = logits.concat();
        for dtype in [DType::F32, DType::BF16] {
            let logits = |step: usize| -> comoe_models::Result<Vec<f32>> {
                let options = LoadOptions { dtype, ..LoadOptions::default() };
                let decoder = Decoder::open(&folder, &GPU, &options, &|_| {})?;
                let mut kv = decoder.new_kv()?;
                let steps =
                    ids.chunks(step).map(|part| Ok(values(&decoder.forward(part, &mut kv, Rows::All)?)));
                Ok(steps.collect::<comoe_models::Result<Vec<_>>>()?.concat())
            };
            for step in [ids.len(), 5, 1] {
                let what = format!("{name}, {dtype:?}, {step} at a time");
                match logits(step) {
                    Err(e) => wrong.push(format!("{what}: {e}")),
                    Ok(have) => {
                        let (off, part) = (worst(&have, &want), relative(&have, &want));
                        println!("{what}: {off:.1e} ({part:.1e} of the norm) from transformers");
                        let near = if dtype == DType::F32 { off < F32_TOLERANCE } else { part.is_finite() };
                        if !near {
                            wrong.push(format!("{what}: {off:.1e}"));
                        }
                    }
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
#[ignore = "needs a CUDA device"]
fn it_adds_on_the_gpu_as_on_the_cpu() {
    let ask = |device: &Device, dtype| {
        let options = LoadOptions { dtype, ..LoadOptions::default() };
        let model = Model::load(&tiny(), device, &options, &|_| {}).expect("comoe-tiny loads");
        let mut chat = model.conversation(None).expect("a template");
        let options = GenerateOptions { max_tokens: Some(60), check_every: 3, ..GenerateOptions::default() };
        ["What is 17 plus 25?", "What is 100 minus 1?"].map(|q| {
            chat.say(q, &options, &mut |_| ControlFlow::Continue(())).expect("an answer").generation.text
        })
    };
    let cpu = ask(&Device::Cpu, DType::F32);
    assert!(cpu[0].contains("42") && cpu[1].contains("99"), "{cpu:?}");
    assert_eq!(ask(&GPU, DType::F32), cpu);
    assert_eq!(ask(&GPU, DType::BF16), cpu);
}

#[test]
#[ignore = "needs a CUDA device"]
fn a_damaged_slot_stops_the_answer_on_the_gpu() {
    for resident in [ResidentFormat::AsStored, ResidentFormat::Bf16] {
        let mut cuda = CudaOptions::default();
        cuda.resident = resident;
        let options = LoadOptions { format: Some(ExpertFormat::INT4), cuda, ..LoadOptions::default() };
        let model = Model::load(&tiny(), &GPU, &options, &|_| {}).expect("comoe-tiny loads");
        let mut session = model.session().expect("a session");
        let answer = |session: &mut comoe_models::Session<'_>| {
            let checked =
                GenerateOptions { max_tokens: Some(12), check_every: 1, ..GenerateOptions::default() };
            session.generate(&prompts()[0], &checked, &mut |_| ControlFlow::Continue(()))
        };
        answer(&mut session).expect("nothing is damaged yet");
        model.experts().with_backend(|backend, pool| {
            backend.synchronize().expect("the GPU is idle");
            for (slot, state) in pool.states() {
                let SlotState::Resident(_) = state else { continue };
                let mut bytes = [0; 512];
                backend.read_slot(slot, &mut bytes).expect("a slot");
                bytes[500] ^= 1;
                backend.write_slot(slot, &bytes).expect("a slot");
            }
        });
        let e = answer(&mut session).expect_err("every slot is damaged");
        assert!(matches!(&e, Error::Core(comoe_core::Error::SlotDiffers { at: 500, .. })), "{e}");
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn a_pool_leaves_room_for_the_rest_of_the_model() {
    let fit = CacheOptions { capacity: Capacity::Fit, ..CacheOptions::default() };
    let model = open(&GPU, &LoadOptions { cache: fit.clone(), ..LoadOptions::default() });
    assert_eq!(model.experts().stats().slots, 96, "comoe-tiny fits any GPU");
    let memory = *model.memory_plan().expect("a plan");
    let held = model.plan().kv_bytes_per_token(4, KvFormat::Plain) * model.context();
    assert_eq!(memory.device.kv, held as u64);
    assert!(memory.device.dense > 1 << 20, "{memory:?}");
    assert!(memory.device.total() + memory.margin < memory.budget, "{memory:?}");
    drop(model);

    let (free, _) = cuda_memory(&GPU).expect("the GPU's memory");
    for capacity in [Capacity::Fit, Capacity::All, Capacity::Slots(12)] {
        let cache = CacheOptions { capacity, reserve: free, ..CacheOptions::default() };
        let refused = Decoder::open(&tiny(), &GPU, &LoadOptions { cache, ..LoadOptions::default() }, &|_| {});
        let e = refused.err().expect("nothing is left for experts");
        assert!(matches!(&e, Error::Core(comoe_core::Error::NoRoom { most: 0, .. })), "{e}");
    }
}
