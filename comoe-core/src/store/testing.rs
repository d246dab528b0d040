//! Small checkpoints for tests.

use std::collections::BTreeMap;
use std::path::Path;

use half::bf16;
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use tempfile::TempDir;

/// The BF16 bytes of `values`.
pub(super) fn bf16(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|&v| bf16::from_f32(v).to_le_bytes()).collect()
}

/// Tensors by file, to be written to a temporary folder.
#[derive(Default)]
pub(super) struct Shards {
    files: BTreeMap<String, BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>>,
}

impl Shards {
    pub(super) fn new() -> Self {
        Self::default()
    }

    /// Adds or replaces a tensor.
    pub(super) fn with(
        mut self,
        file: &str,
        name: &str,
        dtype: Dtype,
        shape: &[usize],
        bytes: &[u8],
    ) -> Self {
        let tensors = self.files.entry(file.into()).or_default();
        tensors.insert(name.into(), (dtype, shape.to_vec(), bytes.to_vec()));
        self
    }

    /// Removes a tensor.
    pub(super) fn without(mut self, name: &str) -> Self {
        let removed = self.files.values_mut().filter_map(|f| f.remove(name)).count();
        assert_eq!(removed, 1, "{name}");
        self
    }

    /// Writes the files.
    pub(super) fn write(&self) -> TempDir {
        let folder = tempfile::tempdir().unwrap();
        self.write_to(folder.path());
        folder
    }

    /// Writes the files and an index over them.
    pub(super) fn write_indexed(&self) -> TempDir {
        let folder = self.write();
        let map: BTreeMap<_, _> =
            self.files.iter().flat_map(|(file, tensors)| tensors.keys().map(move |t| (t, file))).collect();
        let index = serde_json::json!({"metadata": {"total_size": 1}, "weight_map": map});
        std::fs::write(folder.path().join("model.safetensors.index.json"), index.to_string()).unwrap();
        folder
    }

    fn write_to(&self, folder: &Path) {
        for (file, tensors) in &self.files {
            let views = tensors.iter().map(|(name, (dtype, shape, bytes))| {
                (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap())
            });
            std::fs::write(folder.join(file), safetensors::serialize(views, None).unwrap()).unwrap();
        }
    }
}
