//! Checkpoints that are quantised as published ones are: `fixtures/quantised`, made by its `make.py`, decoded bit for
//! bit; and what becomes of them as records.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use comoe_core::format::record::unpack_expert;
use comoe_core::store::{Checkpoint, ConvertOptions, Encoding, Naming, Quantisation, QuantisedMatrix};
use comoe_core::{ExpertFormat, ExpertId, ExpertStore};
use half::bf16;
use safetensors::SafeTensors;

const CASES: [&str; 9] = [
    "awq",
    "fp8_block",
    "fp8_channel",
    "fp8_tensor",
    "gptq",
    "gptq_shuffled",
    "gptq_v2",
    "packed",
    "packed_zero",
];

struct Case {
    name: &'static str,
    folder: PathBuf,
    naming: Naming,
    golden: Vec<u8>,
}

impl Case {
    fn all() -> impl Iterator<Item = Self> {
        CASES.into_iter().map(|name| {
            let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/quantised").join(name);
            let config: serde_json::Value =
                serde_json::from_slice(&std::fs::read(folder.join("config.json")).unwrap()).unwrap();
            let how = Quantisation::from_config(&config["quantization_config"]).unwrap();
            let golden = std::fs::read(folder.join("golden.safetensors")).unwrap();
            Self { name, folder, naming: Naming::qwen().with_quantisation(how), golden }
        })
    }

    fn checkpoint(&self) -> Arc<Checkpoint> {
        Arc::new(Checkpoint::open(&[self.folder.join("model.safetensors")]).unwrap())
    }

    fn store(&self) -> ExpertStore {
        ExpertStore::from_checkpoint(self.checkpoint(), &self.naming).unwrap()
    }

    fn values(&self, name: &str) -> (Vec<usize>, Vec<f32>) {
        let all = SafeTensors::deserialize(&self.golden).unwrap();
        let tensor = all.tensor(name).unwrap();
        let values = tensor.data().as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        (tensor.shape().to_vec(), values)
    }

    /// Golden gate, up and down of every expert.
    fn experts(&self) -> Vec<[Vec<f32>; 3]> {
        (0..2)
            .map(|e| {
                ["gate_proj", "up_proj", "down_proj"]
                    .map(|part| self.values(&format!("model.layers.0.mlp.experts.{e}.{part}.weight")).1)
            })
            .collect()
    }
}

fn decoded(store: &ExpertStore) -> Vec<[Vec<f32>; 3]> {
    let source = store.source();
    (0..2)
        .map(|expert| {
            let index = store.directory().record(ExpertId { layer: 0, expert }).unwrap();
            let mut record = vec![0xa5; store.directory().record_bytes(index)];
            source.read(index, &mut record).unwrap();
            let found = unpack_expert(store.layout(0), &record).unwrap();
            [found.gate, found.up, found.down]
        })
        .collect()
}

#[test]
fn every_matrix_decodes_to_the_golden_values() {
    for case in Case::all() {
        let checkpoint = case.checkpoint();
        let all = SafeTensors::deserialize(&case.golden).unwrap();
        let mut matrices = 0;
        for name in all.names() {
            let stem = name.strip_suffix(".weight").unwrap();
            let found = QuantisedMatrix::find(&checkpoint, stem, case.naming.quantisation()).unwrap();
            let found = found.unwrap_or_else(|| panic!("{}: {name} is plain", case.name));
            let (shape, expected) = case.values(name);
            assert_eq!(found.shape()[..], shape, "{} {name}", case.name);
            let mut values = vec![f32::NAN; 3];
            found.values(&checkpoint, &mut values).unwrap();
            assert_eq!(values, expected, "{} {name}", case.name);
            matrices += 1;
        }
        assert_eq!(matrices, 7);
        assert!(QuantisedMatrix::find(&checkpoint, "lm_head", case.naming.quantisation()).unwrap().is_none());
    }
}

#[test]
fn bf16_records_are_the_golden_values_rounded_once() {
    for case in Case::all() {
        let store = case.store();
        assert_eq!(store.format(), ExpertFormat::Bf16);
        assert!(store.notes()[0].contains("in the checkpoint"), "{:?}", store.notes());
        let round = |v: Vec<f32>| v.into_iter().map(|v| bf16::from_f32(v).to_f32()).collect();
        let expected: Vec<[Vec<f32>; 3]> = case.experts().into_iter().map(|e| e.map(round)).collect();
        assert_eq!(decoded(&store), expected, "{}", case.name);
    }
}

#[test]
fn the_format_in_force_is_what_the_checkpoint_has() {
    let int4 = ExpertFormat::Int4 { group: 32 };
    for case in Case::all() {
        let store = case.store();
        let format = store.source_format();
        assert_eq!(
            format,
            if case.name.starts_with("fp8") { ExpertFormat::Bf16 } else { int4 },
            "{}",
            case.name
        );
        let folder = tempfile::tempdir().unwrap();
        let options = ConvertOptions { cache_dir: Some(folder.path().to_owned()), progress: None };
        let converted = store.into_format_with(format, &options).unwrap();
        let (found, expected) = (decoded(&converted), case.experts());
        let requantised = converted.notes().iter().any(|n| n.contains("relative error"));
        match case.name {
            // No zero points, one scale a row: nothing is lost, and nothing is said.
            "gptq" | "packed" => {
                assert_eq!(found, expected, "{}", case.name);
                assert!(!requantised, "{:?}", converted.notes());
            }
            "fp8_block" | "fp8_channel" | "fp8_tensor" => assert!(!requantised),
            _ => {
                let flat = |all: &[[Vec<f32>; 3]]| all.concat().concat();
                let (found, expected) = (flat(&found), flat(&expected));
                let sum = |f: &dyn Fn(f64, f64) -> f64| -> f64 {
                    found.iter().zip(&expected).map(|(a, b)| f(f64::from(*a), f64::from(*b))).sum()
                };
                let error = (sum(&|a, b| (a - b).powi(2)) / sum(&|_, b| b * b)).sqrt();
                assert!(error > 1e-3 && error < 0.2, "{}: {error}", case.name);
                let said = format!("the weights' relative error is {error:.1e}");
                assert!(
                    converted.notes().iter().any(|n| n.contains(&said)),
                    "{said}: {:?}",
                    converted.notes()
                );
            }
        }
    }
}

#[test]
fn parts_that_do_not_fit_are_named() {
    for case in Case::all() {
        let bytes = std::fs::read(case.folder.join("model.safetensors")).unwrap();
        let all = SafeTensors::deserialize(&bytes).unwrap();
        let stem = "model.layers.0.mlp.experts.1.up_proj.";
        let parts: Vec<&str> = all.names().into_iter().filter_map(|n| n.strip_prefix(stem)).collect();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        for changed in &parts {
            // Missing, of another shape, of another type.
            for change in 0..3 {
                let tensors = all.iter().filter_map(|(name, view)| {
                    if name.strip_prefix(stem) != Some(changed) {
                        return Some((name.to_owned(), view));
                    }
                    let (dtype, data) = (view.dtype(), view.data());
                    let view = match change {
                        0 => return None,
                        1 => safetensors::tensor::TensorView::new(
                            dtype,
                            vec![1, 1, view.shape().iter().product()],
                            data,
                        ),
                        _ => safetensors::tensor::TensorView::new(
                            safetensors::Dtype::U8,
                            vec![data.len()],
                            data,
                        ),
                    };
                    Some((name.to_owned(), view.unwrap()))
                });
                safetensors::serialize_to_file(tensors, None, &path).unwrap();
                let checkpoint = Arc::new(Checkpoint::open(&[&path]).unwrap());
                let opened = ExpertStore::from_checkpoint(checkpoint, &case.naming);
                // Without it, the groups of GPTQ follow each other; without zero points, all are in the middle.
                let optional = matches!(*changed, "g_idx" | "weight_zero_point") && change == 0;
                match opened {
                    Ok(_) => assert!(optional, "{} {changed} {change}", case.name),
                    Err(error) => {
                        let text = error.to_string();
                        assert!(
                            text.contains("up_proj") && !optional,
                            "{} {changed} {change}: {text}",
                            case.name
                        );
                    }
                }
            }
        }
        assert!(parts.len() >= 2);
    }
}

#[test]
fn a_group_that_is_not_there_is_found_when_it_is_read() {
    let case = Case::all().find(|c| c.name == "gptq_shuffled").unwrap();
    let bytes = std::fs::read(case.folder.join("model.safetensors")).unwrap();
    let all = SafeTensors::deserialize(&bytes).unwrap();
    let name = "model.layers.0.mlp.experts.1.up_proj.g_idx";
    for bad in [4i32, -1, i32::MAX] {
        let data = all.tensor(name).unwrap().data().to_vec();
        let data = [&bad.to_le_bytes(), &data[4..]].concat();
        let tensors = all.iter().map(|(n, view)| {
            let view = if n == name {
                safetensors::tensor::TensorView::new(view.dtype(), view.shape().to_vec(), &data).unwrap()
            } else {
                view
            };
            (n.to_owned(), view)
        });
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        safetensors::serialize_to_file(tensors, None, &path).unwrap();
        let checkpoint = Arc::new(Checkpoint::open(&[&path]).unwrap());
        assert!(matches!(checkpoint.encoding(name), Some(Encoding::Plain(_))));
        let store = ExpertStore::from_checkpoint(checkpoint, &case.naming).unwrap();
        let error = store.into_format(ExpertFormat::INT8).unwrap_err().to_string();
        assert!(error.contains(name) && error.contains("there are 4"), "{error}");
    }
}
