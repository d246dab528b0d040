//! Checkpoints whose attention, shared and routed experts are FP8, as DeepSeek's are: logits are those of the same
//! folder with the decoded weights, bit for bit. (`comoe-core/tests/quantised.rs` has every encoding's exact values.)

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::{DType, Device};
use comoe_core::store::{Checkpoint, Naming, Quantisation};
use comoe_models::load::DenseWeights;
use comoe_models::{Decoder, LoadOptions, Rows};
use half::bf16;
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};

/// Type, shape and bytes.
type Tensor = (Dtype, Vec<usize>, Vec<u8>);
type Tensors = BTreeMap<String, Tensor>;

const FIXTURE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/deepseek_v3");
/// Neither the 24 rows of the latent's projection nor the experts' 16 columns are whole blocks.
const BLOCK: [usize; 2] = [16, 12];

fn write(folder: &Path, tensors: &Tensors, config: &Value) {
    std::fs::create_dir_all(folder).unwrap();
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let views = tensors
        .iter()
        .map(|(name, (dtype, shape, bytes))| (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap()));
    safetensors::serialize_to_file(views, None, &folder.join("model.safetensors")).unwrap();
}

fn config() -> Value {
    serde_json::from_slice(&std::fs::read(format!("{FIXTURE}/config.json")).unwrap()).unwrap()
}

/// E4M3 by its code.
fn e4m3(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let magnitude =
        if exponent == 0 { mantissa / 512.0 } else { (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 7) };
    if code > 127 { -magnitude } else { magnitude }
}

/// The fixture with its projections in FP8, and with what these decode to.
fn quantised() -> (Tensors, Tensors) {
    let checkpoint = Checkpoint::open(&[FIXTURE]).unwrap();
    let codes: Vec<u8> = (0..=255).filter(|c| c & 127 != 127).collect();
    let (mut fp8, mut decoded) = (Tensors::new(), Tensors::new());
    for name in checkpoint.names() {
        let view = checkpoint.tensor(name).unwrap();
        let [rows, cols] = match *view.shape {
            [rows, cols] if name.contains("_proj") => [rows, cols],
            _ => {
                let plain = (Dtype::BF16, view.shape.to_vec(), view.bytes.to_vec());
                fp8.insert(name.to_owned(), plain.clone());
                decoded.insert(name.to_owned(), plain);
                continue;
            }
        };
        let values: Vec<f32> =
            view.bytes.as_chunks::<2>().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32()).collect();
        let grid = [rows.div_ceil(BLOCK[0]), cols.div_ceil(BLOCK[1])];
        let mut scales = vec![0f32; grid[0] * grid[1]];
        let block = |i: usize| i / cols / BLOCK[0] * grid[1] + i % cols / BLOCK[1];
        for (i, v) in values.iter().enumerate() {
            scales[block(i)] = scales[block(i)].max(v.abs() / 448.0);
        }
        let nearest = |v: f32| {
            let distance = |code: &&u8| (e4m3(**code) - v).abs();
            *codes.iter().min_by(|a, b| distance(a).total_cmp(&distance(b))).unwrap()
        };
        let packed: Vec<u8> = values.iter().enumerate().map(|(i, v)| nearest(v / scales[block(i)])).collect();
        let back = packed.iter().enumerate().flat_map(|(i, c)| (e4m3(*c) * scales[block(i)]).to_le_bytes());
        decoded.insert(name.to_owned(), (Dtype::F32, vec![rows, cols], back.collect()));
        let scales = scales.iter().flat_map(|s| s.to_le_bytes()).collect();
        fp8.insert(format!("{name}_scale_inv"), (Dtype::F32, grid.to_vec(), scales));
        fp8.insert(name.to_owned(), (Dtype::F8_E4M3, vec![rows, cols], packed));
    }
    (fp8, decoded)
}

fn open(folder: &Path) -> comoe_models::Result<Decoder> {
    Decoder::open(folder, &Device::Cpu, &LoadOptions::default(), &|_| {})
}

fn bits(decoder: &Decoder) -> Vec<u32> {
    let ids: Vec<u32> = (0..24).map(|i| (i * 37 + 11) % 96).collect();
    let mut kv = decoder.new_kv().unwrap();
    let logits = decoder.forward(&ids, &mut kv, Rows::All).unwrap().flatten_all().unwrap();
    logits.to_vec1::<f32>().unwrap().into_iter().map(f32::to_bits).collect()
}

#[test]
fn fp8_weights_are_decoded_when_they_are_loaded() {
    let dir = tempfile::tempdir().unwrap();
    let (fp8, decoded) = quantised();
    assert!(fp8.keys().filter(|n| n.contains("self_attn") && n.ends_with("scale_inv")).count() > 9);
    let mut with = config();
    with["quantization_config"] = json!({"quant_method": "fp8", "weight_block_size": BLOCK});
    write(&dir.path().join("fp8"), &fp8, &with);
    write(&dir.path().join("decoded"), &decoded, &config());
    let ours = open(&dir.path().join("fp8")).unwrap();
    assert!(ours.notes().iter().any(|n| n.contains("FP8")), "{:?}", ours.notes());
    assert!(bits(&ours) == bits(&open(&dir.path().join("decoded")).unwrap()));
    // With the blocks that published checkpoints have, the scales do not fit.
    with["quantization_config"] = json!({"quant_method": "fp8"});
    std::fs::write(dir.path().join("fp8/config.json"), with.to_string()).unwrap();
    let error = open(&dir.path().join("fp8")).err().unwrap().to_string();
    assert!(error.contains("weight_scale_inv") && error.contains("[128, 128]"), "{error}");
}

#[test]
fn quantisation_that_is_not_known_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let mut with = config();
    for (config, name) in [
        (json!({"quant_method": "bitsandbytes", "load_in_4bit": true}), "bitsandbytes"),
        (json!({"quant_method": "hqq"}), "hqq"),
        (json!({"quant_algo": "NVFP4"}), "NVFP4"),
    ] {
        with["quantization_config"] = config;
        write(dir.path(), &Tensors::new(), &with);
        let error = open(dir.path()).err().unwrap().to_string();
        assert!(error.contains(name) && error.contains("gptq and awq"), "{error}");
    }
}

#[test]
fn tensors_that_are_not_used_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let (mut tensors, _) = quantised();
    let plain = (Dtype::BF16, vec![1, 1], vec![0, 0]);
    for extra in ["model.visual.blocks.0.attn.qkv.weight", "model.visual.blocks.1.attn.qkv.weight"] {
        tensors.insert(extra.to_owned(), plain.clone());
    }
    tensors.insert("model.layers.3.eh_proj.weight".to_owned(), plain);
    write(dir.path(), &tensors, &config());
    let checkpoint = Checkpoint::open(&[dir.path()]).unwrap();
    let how = Quantisation::from_config(&json!({"quant_method": "fp8", "weight_block_size": BLOCK})).unwrap();
    let naming = Naming::qwen().with_layers(3).with_quantisation(how);
    let mut weights = DenseWeights::new(&checkpoint, &naming, DType::F32, &Device::Cpu, &|_| {}).unwrap();
    weights.tensor("model.layers.1.self_attn.q_a_proj.weight", &[12, 32]).unwrap();
    weights.tensor("model.norm.weight", &[32]).unwrap();
    let ignored = weights.ignored();
    assert_eq!(ignored["model.visual.blocks.*.attn.qkv.weight"], 2);
    assert_eq!(ignored["model.layers.*.eh_proj.weight"], 1);
    // Of the three layers, one's was used; and so were its scales.
    assert_eq!(ignored["model.layers.*.self_attn.q_a_proj.weight_scale_inv"], 2);
    assert!(!ignored.contains_key("model.norm.weight") && !ignored.keys().any(|k| k.contains("mlp.experts")));
    let wrong =
        weights.tensor("model.layers.1.self_attn.q_a_proj.weight", &[13, 32]).unwrap_err().to_string();
    assert!(
        wrong.contains("q_a_proj") && wrong.contains("[13, 32]") && wrong.contains("[12, 32]"),
        "{wrong}"
    );
}
