//! Logits against Hugging Face transformers: the models under `fixtures/`, made by `fixtures/make.py`.

use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use comoe_models::{Decoder, LoadOptions, Rows};

/// Weights are BF16, arithmetic is F32 on both sides.
const TOLERANCE: f32 = 1e-4;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// Largest difference of two tensors; NaN counts as infinite.
fn difference(a: &Tensor, b: &Tensor) -> f32 {
    assert_eq!(a.dims(), b.dims());
    let flat = |t: &Tensor| t.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
    let differences = flat(a).into_iter().zip(flat(b)).map(|(a, b)| (a - b).abs());
    differences.fold(0.0, |worst, d| if d.is_nan() { f32::INFINITY } else { worst.max(d) })
}

/// Token ids `[tokens]` and logits `[tokens, vocab]`.
fn golden(name: &str) -> (Vec<u32>, Tensor) {
    let file = fixture(name).join("golden.safetensors");
    let mut golden = candle_core::safetensors::load(file, &Device::Cpu).unwrap();
    let ids = golden["ids"].to_dtype(DType::U32).unwrap().to_vec1().unwrap();
    (ids, golden.remove("logits").unwrap())
}

fn check(name: &str) {
    let folder = fixture(name);
    let (ids, want) = golden(name);
    let decoder = Decoder::open(&folder, &Device::Cpu, &LoadOptions::default(), &|_| {}).unwrap();
    // The whole prompt at once, in two parts, and token by token.
    for step in [ids.len(), 14, 1] {
        let mut kv = decoder.new_kv().unwrap();
        let parts: Vec<Tensor> =
            ids.chunks(step).map(|part| decoder.forward(part, &mut kv, Rows::All).unwrap()).collect();
        let got = Tensor::cat(&parts, 0).unwrap();
        let worst = difference(&got, &want);
        assert!(worst < TOLERANCE, "{name}, {step} tokens at a time: logits differ by {worst}");
    }
}

#[test]
fn qwen3_moe() {
    check("qwen3_moe");
}

#[test]
fn qwen3_moe_with_biases_tied_head_and_unnormalised_weights() {
    check("qwen3_moe_biased");
}

/// The golden files are worth something: each of these fields, misread, would be seen.
#[test]
fn a_wrong_field_shows_in_the_logits() {
    for (name, field, value) in [
        ("qwen3_moe", "norm_topk_prob", "false".into()),
        ("qwen3_moe", "num_experts_per_tok", "2".into()),
        ("qwen3_moe_biased", "norm_topk_prob", "true".into()),
        ("qwen3_moe_biased", "rope_parameters", r#"{"rope_theta": 10000.0, "rope_type": "default"}"#.into()),
        ("qwen3_moe_biased", "attention_bias", "false".into()),
        ("qwen3_moe", "rms_norm_eps", "0.01".to_owned()),
    ] {
        let text = std::fs::read_to_string(fixture(name).join("config.json")).unwrap();
        let mut config: serde_json::Value = serde_json::from_str(&text).unwrap();
        config[field] = serde_json::from_str(&value).unwrap();
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
        std::fs::copy(fixture(name).join("model.safetensors"), dir.path().join("model.safetensors")).unwrap();
        let decoder = Decoder::open(dir.path(), &Device::Cpu, &LoadOptions::default(), &|_| {}).unwrap();
        let (ids, want) = golden(name);
        let got = decoder.forward(&ids, &mut decoder.new_kv().unwrap(), Rows::All).unwrap();
        let moved = difference(&got, &want);
        assert!(moved > 100.0 * TOLERANCE, "{name}: {field} = {value} moves the logits by {moved} only");
    }
}
