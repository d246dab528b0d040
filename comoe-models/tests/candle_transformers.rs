//! Logits against candle-transformers, where it has the family and is right: a second reference that shares no code
//! with the first (`golden.rs`).
//!
//! Known faults, kept out of the way here: its Mixtral and Qwen2-MoE let a sliding window see one position more than
//! `transformers` does; its DeepSeek-V2 chooses groups of experts from the wrong scores, so only "greedy" is compared.

use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::{deepseek2, mixtral, qwen2_moe};
use comoe_models::{Decoder, LoadOptions, Rows};
use serde_json::{Value, json};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// A fixture's published configuration, with these fields set.
fn config(name: &str, fields: Value) -> Value {
    let text = std::fs::read_to_string(fixture(name).join("hub.json")).unwrap();
    let mut config: Value = serde_json::from_str(&text).unwrap();
    for (field, value) in fields.as_object().unwrap() {
        config[field] = value.clone();
    }
    config
}

fn weights(name: &str) -> VarBuilder<'static> {
    let tensors =
        candle_core::safetensors::load(fixture(name).join("model.safetensors"), &Device::Cpu).unwrap();
    let wide = tensors.into_iter().map(|(k, v)| (k, v.to_dtype(DType::F32).unwrap())).collect();
    VarBuilder::from_tensors(wide, DType::F32, &Device::Cpu)
}

/// Compares ours under `config` with the last row's logits of `theirs(ids)`, at every length.
fn compare(name: &str, config: &Value, mut theirs: impl FnMut(&Tensor) -> Tensor) {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    std::fs::copy(fixture(name).join("model.safetensors"), dir.path().join("model.safetensors")).unwrap();
    let decoder = Decoder::open(dir.path(), &Device::Cpu, &LoadOptions::default(), &|_| {}).unwrap();
    let ids: Vec<u32> = (0..40).map(|i| (i * 37 + i * i * 5) % 96).collect();
    let ours = decoder.forward(&ids, &mut decoder.new_kv().unwrap(), Rows::All).unwrap();
    for t in 0..ids.len() {
        let want = theirs(&Tensor::new(&ids[..=t], &Device::Cpu).unwrap().unsqueeze(0).unwrap());
        let want = want.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let got = ours.get(t).unwrap().to_vec1::<f32>().unwrap();
        assert_eq!(got.len(), want.len());
        let worst = got.iter().zip(&want).map(|(g, w)| (g - w).abs()).fold(0.0, f32::max);
        assert!(worst < 1e-4, "{name}: row {t} differs by {worst}");
    }
}

#[test]
fn mixtral() {
    let theirs = config("mixtral", json!({"sliding_window": 4096, "use_flash_attn": false}));
    let parsed: mixtral::Config = serde_json::from_value(theirs).unwrap();
    let ours = config("mixtral", json!({"sliding_window": null}));
    // Without a way to clear its cache, a model serves one prompt.
    compare("mixtral", &ours, |ids| {
        mixtral::Model::new(&parsed, weights("mixtral")).unwrap().forward(ids, 0).unwrap()
    });
}

#[test]
fn qwen2_moe() {
    let config = config("qwen2_moe", json!({"sliding_window": 4096}));
    let parsed: qwen2_moe::Config = serde_json::from_value(config.clone()).unwrap();
    let mut model = qwen2_moe::Model::new(&parsed, weights("qwen2_moe")).unwrap();
    compare("qwen2_moe", &config, |ids| {
        model.clear_kv_cache();
        model.forward(ids, 0).unwrap()
    });
}

#[test]
fn deepseek_v2() {
    let config = config("deepseek_v2_lite", json!({}));
    let parsed: deepseek2::DeepSeekV2Config = serde_json::from_value(config.clone()).unwrap();
    let mut model = deepseek2::DeepSeekV2::new(&parsed, weights("deepseek_v2_lite")).unwrap();
    compare("deepseek_v2_lite", &config, |ids| {
        model.clear_kv_cache();
        model.forward(ids, 0).unwrap()
    });
}
