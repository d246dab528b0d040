//! A whole synthetic model as one packed file, which `comoe` takes as a model: random experts and dense weights, the
//! shape's configuration, and a tokenizer of somebody else's.

use std::path::Path;
use std::sync::Arc;

use comoe_core::ExpertFormat;
use comoe_core::store::{Checkpoint, PackedTensor};

use crate::dense::write_dense;
use crate::error::{Error, Result};
use crate::shape::Shape;
use crate::synth::{SynthSource, store};

/// Writes the model of `shape` with the tokenizer in the file `tokenizer`, of at most as many tokens as the shape has;
/// returns its bytes, header left out. `progress` hears of experts written and in all, from several threads.
///
/// # Errors
/// [`Error::NoDensePart`] where a shape's is not known, [`Error::Io`], and those of writing a packed file.
pub fn write_model(
    path: &Path,
    shape: &Shape,
    format: ExpertFormat,
    seed: u64,
    tokenizer: &Path,
    progress: &(dyn Fn(usize, usize) + Sync),
) -> Result<u64> {
    let config = shape.config()?.to_string();
    let tokenizer = std::fs::read(tokenizer).map_err(|e| Error::io(tokenizer, e))?;
    // Beside the file: what does not fit there does not fit at all.
    let beside = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let folder = tempfile::tempdir_in(beside).map_err(|e| Error::io(beside, e))?;
    let dense = folder.path().join("dense.safetensors");
    write_dense(&dense, shape, seed)?;
    let checkpoint = Checkpoint::open(&[&dense])?;
    let mut tensors = vec![
        PackedTensor::file("config.json", config.as_bytes()),
        PackedTensor::file("tokenizer.json", &tokenizer),
    ];
    for name in checkpoint.names() {
        tensors.push(PackedTensor::weight(name, &checkpoint.tensor(name)?)?);
    }
    let experts = store(shape, format, Arc::new(SynthSource::new(shape, format, seed)?))?;
    let report = experts.pack(path, format, tensors, Some(progress))?;
    Ok(report.expert_bytes + report.other_bytes)
}

#[cfg(test)]
mod tests {
    use candle_core::Device;
    use comoe_models::{LoadOptions, Model};

    use super::*;

    #[test]
    fn a_model_of_a_shape_loads_and_computes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("small.safetensors");
        let tokenizer = Path::new(env!("CARGO_MANIFEST_DIR")).join("../assets/comoe-tiny/tokenizer.json");
        // Of as many tokens as that tokenizer has.
        let mut shape = Shape::small();
        if let Some(dense) = &mut shape.dense {
            dense.vocab = 4096;
        }
        let bytes = write_model(&path, &shape, ExpertFormat::INT4, 1, &tokenizer, &|_, _| {}).unwrap();
        assert!(std::fs::metadata(&path).unwrap().len() > bytes);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "nothing else is left");
        let model = Model::load(&path, &Device::Cpu, &LoadOptions::default(), &|_| {}).unwrap();
        assert_eq!(model.experts().format(), ExpertFormat::INT4);
        let decoder = model.decoder();
        let mut kv = decoder.new_kv().unwrap();
        let logits = decoder.forward(&[1, 2, 3], &mut kv, comoe_models::Rows::Last).unwrap();
        let logits: Vec<f32> = logits.flatten_all().unwrap().to_vec1().unwrap();
        assert!(logits.len() == 4096 && logits.iter().all(|l| l.is_finite()));
    }
}
