//! Logits against Hugging Face transformers: the models under `fixtures/`, made by `fixtures/make.py`.

mod files;

use std::path::Path;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use comoe_core::store::{Checkpoint, Naming};
use comoe_core::{CacheOptions, Capacity, ExpertCache, ExpertFormat, ExpertStore, Scope};
use comoe_models::load::{ConfigFile, DenseWeights};
use comoe_models::{Decoder, LoadOptions, Rows, arch};
use serde_json::Value;

use files::fixtures;

/// Weights are BF16, arithmetic is F32 on both sides.
const TOLERANCE: f32 = 1e-4;

fn name(folder: &Path) -> String {
    folder.file_name().unwrap().to_string_lossy().into_owned()
}

fn open(folder: &Path, options: &LoadOptions) -> Decoder {
    Decoder::open(folder, &Device::Cpu, options, &|_| {}).unwrap_or_else(|e| panic!("{}: {e}", name(folder)))
}

/// Logits of `ids`, this many at a time.
fn run(decoder: &Decoder, ids: &[u32], step: usize) -> Tensor {
    let mut kv = decoder.new_kv().unwrap();
    let parts: Vec<Tensor> =
        ids.chunks(step).map(|part| decoder.forward(part, &mut kv, Rows::All).unwrap()).collect();
    Tensor::cat(&parts, 0).unwrap()
}

fn flat(t: &Tensor) -> Vec<f32> {
    t.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// Largest difference of two tensors; NaN counts as infinite.
fn difference(a: &Tensor, b: &Tensor) -> f32 {
    assert_eq!(a.dims(), b.dims());
    let differences = flat(a).into_iter().zip(flat(b)).map(|(a, b)| (a - b).abs());
    differences.fold(0.0, |worst, d| if d.is_nan() { f32::INFINITY } else { worst.max(d) })
}

/// The golden tensors, and among them the token ids.
fn golden(folder: &Path) -> (std::collections::HashMap<String, Tensor>, Vec<u32>) {
    let tensors = candle_core::safetensors::load(folder.join("golden.safetensors"), &Device::Cpu).unwrap();
    let ids = tensors["ids"].to_dtype(DType::U32).unwrap().to_vec1().unwrap();
    (tensors, ids)
}

fn json(path: &Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

#[test]
fn logits_are_those_of_transformers_however_the_tokens_come() {
    let folders = fixtures();
    assert!(folders.len() >= 5, "{folders:?}");
    for folder in folders {
        let (golden, ids) = golden(&folder);
        let decoder = open(&folder, &LoadOptions::default());
        // The whole prompt at once, in chunks, and token by token.
        for step in [ids.len(), 14, 5, 1] {
            let worst = difference(&run(&decoder, &ids, step), &golden["logits"]);
            println!("{}, {step} tokens at a time: {worst:.1e}", name(&folder));
            assert!(worst < TOLERANCE, "{}, {step} at a time: logits differ by {worst}", name(&folder));
        }
    }
}

#[test]
fn a_flag_in_the_configuration_does_what_it_does_in_transformers() {
    for folder in fixtures() {
        let path = folder.join("mutations.json");
        if !path.exists() {
            continue;
        }
        let (golden, ids) = golden(&folder);
        for (i, change) in json(&path).as_array().unwrap().iter().enumerate() {
            let mut config = json(&folder.join("config.json"));
            for (field, value) in change.as_object().unwrap() {
                config[field] = value.clone();
            }
            let dir = tempfile::tempdir().unwrap();
            std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
            std::fs::copy(folder.join("model.safetensors"), dir.path().join("model.safetensors")).unwrap();
            let got = run(&open(dir.path(), &LoadOptions::default()), &ids, ids.len());
            let last = |t: &Tensor| t.get(ids.len() - 1).unwrap();
            let worst = difference(&last(&got), &golden[&format!("mutation.{i}")]);
            assert!(worst < TOLERANCE, "{} with {change}: logits differ by {worst}", name(&folder));
            let moved = difference(&last(&golden["logits"]), &golden[&format!("mutation.{i}")]);
            assert!(moved > 100.0 * TOLERANCE, "{} with {change}: it moves logits by {moved}", name(&folder));
        }
    }
}

#[test]
fn bits_do_not_depend_on_the_slots_in_any_format() {
    for folder in fixtures() {
        let (_, ids) = golden(&folder);
        for format in [None, Some(ExpertFormat::Int4 { group: 32 }), Some(ExpertFormat::Mxfp4)] {
            let bits = |capacity| {
                let cache = CacheOptions { capacity, scope: Scope::Global, ..CacheOptions::default() };
                let decoder = open(&folder, &LoadOptions { cache, format, ..LoadOptions::default() });
                let step = |step| flat(&run(&decoder, &ids, step)).into_iter().map(f32::to_bits);
                step(10).chain(step(1)).collect::<Vec<_>>()
            };
            let plan = plan(&folder.join("config.json"));
            let top_k = plan.moe_layers().map(|(_, moe)| moe.router.top_k).max().unwrap();
            assert!(bits(Capacity::Slots(top_k)) == bits(Capacity::All), "{}, {format:?}", name(&folder));
        }
    }
}

/// Also where a layer keeps no keys but what it has convolved.
#[test]
fn a_cache_that_is_cut_back_goes_on_as_a_fresh_one() {
    for folder in fixtures() {
        let (golden, ids) = golden(&folder);
        let decoder = open(&folder, &LoadOptions::default());
        let mut kv = decoder.new_kv().unwrap();
        decoder.forward(&[&ids[..11], &[1, 2, 3, 4]].concat(), &mut kv, Rows::Last).unwrap();
        kv.truncate(11);
        let got = decoder.forward(&ids[11..], &mut kv, Rows::All).unwrap();
        let want = golden["logits"].narrow(0, 11, ids.len() - 11).unwrap();
        let worst = difference(&got, &want);
        assert!(worst < TOLERANCE, "{}: logits differ by {worst}", name(&folder));
    }
}

/// A decoder in BF16, which [`Decoder::open`] offers on GPUs only.
fn open_bf16(folder: &Path) -> Decoder {
    let plan = plan(&folder.join("config.json"));
    let (_, moe) = plan.moe_layers().next().unwrap();
    let checkpoint = Arc::new(Checkpoint::open(&[folder]).unwrap());
    let mut naming = Naming::auto();
    if let Some(layout) = plan.stacked_experts {
        naming = naming.with_stacked_layout(layout);
    }
    let store = ExpertStore::from_checkpoint(checkpoint.clone(), &naming).unwrap();
    let store = store.with_activation(moe.expert.activation).with_weight_on(moe.expert.weight_on);
    let experts = ExpertCache::builder(store, &Device::Cpu).build().unwrap();
    let mut weights = DenseWeights::new(&checkpoint, &naming, DType::BF16, &Device::Cpu, &|_| {}).unwrap();
    let context = plan.max_positions;
    Decoder::load(plan, &mut weights, experts, context, DType::BF16, &Device::Cpu).unwrap()
}

/// In BF16, where routers may decide otherwise between near equals, most logits are near those in F32.
#[test]
fn bf16_takes_the_other_paths_and_stays_near() {
    for folder in fixtures() {
        let (golden, ids) = golden(&folder);
        let decoder = open_bf16(&folder);
        for step in [ids.len(), 1] {
            let (got, want) = (flat(&run(&decoder, &ids, step)), flat(&golden["logits"]));
            let mut apart: Vec<f32> = got.iter().zip(&want).map(|(g, w)| (g - w).abs()).collect();
            apart.sort_by(f32::total_cmp);
            let deviation = (want.iter().map(|w| w * w).sum::<f32>() / want.len() as f32).sqrt();
            let (half, most) = (apart[apart.len() / 2] / deviation, apart[apart.len() * 9 / 10] / deviation);
            println!(
                "{}, {step} at a time: half of the logits within {half:.3}, 9 of 10 within {most:.3}",
                name(&folder)
            );
            assert!(half < 0.05, "{}: half of the logits are more than {half} deviations off", name(&folder));
        }
    }
}

fn plan(path: &Path) -> arch::DecoderPlan {
    arch::plan(&ConfigFile::read(path).unwrap()).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Models of more modalities keep the language model under a longer name, beside tensors that are not for us.
#[test]
fn a_language_model_within_a_larger_one_is_the_same() {
    for folder in fixtures().into_iter().filter(|f| f.join("hub.json").exists()) {
        let (golden, ids) = golden(&folder);
        let tensors = candle_core::safetensors::load(folder.join("model.safetensors"), &Device::Cpu).unwrap();
        for (root, head) in [("language_model.model.", "language_model."), ("model.language_model.", "")] {
            let rename = |name: &String| match name.strip_prefix("model.") {
                Some(rest) => format!("{root}{rest}"),
                None => format!("{head}{name}"),
            };
            let mut renamed: std::collections::HashMap<_, _> =
                tensors.iter().map(|(name, t)| (rename(name), t.clone())).collect();
            let picture = Tensor::zeros((2, 2), DType::BF16, &Device::Cpu).unwrap();
            renamed.insert("vision_tower.layers.0.mlp.up_proj.weight".to_owned(), picture);
            let dir = tempfile::tempdir().unwrap();
            candle_core::safetensors::save(&renamed, dir.path().join("model.safetensors")).unwrap();
            let language = json(&folder.join("config.json"));
            let config = serde_json::json!({"model_type": "picture", "text_config": language});
            std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
            let got = run(&open(dir.path(), &LoadOptions::default()), &ids, ids.len());
            let worst = difference(&got, &golden["logits"]);
            assert!(worst < TOLERANCE, "{} under {root}: logits differ by {worst}", name(&folder));
        }
    }
}

#[test]
fn the_published_spelling_is_the_same_model() {
    for folder in fixtures() {
        let hub = folder.join("hub.json");
        if hub.exists() {
            assert_eq!(plan(&hub), plan(&folder.join("config.json")), "{}", name(&folder));
        }
    }
}

#[test]
fn every_family_has_a_golden_model() {
    let tested: Vec<String> = fixtures()
        .iter()
        .map(|f| json(&f.join("config.json"))["model_type"].as_str().unwrap().to_owned())
        .collect();
    for family in arch::FAMILIES {
        assert!(tested.iter().any(|t| family.model_types.contains(&t.as_str())), "{:?}", family.model_types);
    }
}
