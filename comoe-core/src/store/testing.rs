//! Small checkpoints for tests.

use std::collections::BTreeMap;
use std::path::Path;

use half::bf16;
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use tempfile::TempDir;

use super::{RecordIndex, RecordSource, StackedLayout};

/// The BF16 bytes of `values`.
pub(super) fn bf16(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|&v| bf16::from_f32(v).to_le_bytes()).collect()
}

/// Type, shape and bytes.
type Tensor = (Dtype, Vec<usize>, Vec<u8>);

/// Tensors by file, to be written to a temporary folder.
#[derive(Default)]
pub(super) struct Shards {
    files: BTreeMap<String, BTreeMap<String, Tensor>>,
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

/// How a made-up model stores its experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Style {
    /// `mlp.experts.E.gate_proj.weight`
    Qwen,
    /// `block_sparse_moe.experts.E.w1.weight`
    Mixtral,
    /// `block_sparse_moe.input_linear.weight`
    Granite,
    /// `mlp.experts.gate_up_proj`
    Stacked(StackedLayout),
}

/// A made-up model: two layers with experts, 1 and 3, among dense tensors, over two files.
#[derive(Debug, Clone, Copy)]
pub(super) struct TinyMoe {
    pub(super) style: Style,
    pub(super) dtype: Dtype,
    pub(super) hidden: usize,
    pub(super) intermediate: usize,
    pub(super) experts: usize,
    pub(super) bias: bool,
}

pub(super) const LAYERS: [usize; 2] = [1, 3];

impl TinyMoe {
    /// Odd sizes, so that rows need padding.
    pub(super) fn new(style: Style) -> Self {
        Self { style, dtype: Dtype::BF16, hidden: 5, intermediate: 3, experts: 4, bias: false }
    }

    /// `matrix` (0 gate, 1 up, 2 down) of an expert at `[r, c]`: a value that BF16, F16 and F32 hold exactly.
    pub(super) fn weight(&self, layer: usize, expert: usize, matrix: usize, r: usize, c: usize) -> f32 {
        let mixed = [layer, expert, matrix, r, c]
            .iter()
            .fold(17u32, |h, v| (h ^ *v as u32).wrapping_mul(0x9e37_79b1).rotate_left(13));
        (mixed % 255) as f32 / 64.0 - 2.0
    }

    /// Bias of `matrix` at row `r`.
    pub(super) fn bias_of(&self, layer: usize, expert: usize, matrix: usize, r: usize) -> f32 {
        self.weight(layer, expert, matrix + 3, r, 0)
    }

    fn encode(&self, values: impl Iterator<Item = f32>) -> Vec<u8> {
        match self.dtype {
            Dtype::BF16 => values.flat_map(|v| bf16::from_f32(v).to_le_bytes()).collect(),
            Dtype::F16 => values.flat_map(|v| half::f16::from_f32(v).to_le_bytes()).collect(),
            Dtype::F32 => values.flat_map(f32::to_le_bytes).collect(),
            other => panic!("{other}"),
        }
    }

    /// The tensor of `shape` with the values of `at(index)`.
    fn tensor(&self, shape: &[usize], at: impl Fn(&[usize]) -> f32) -> Vec<u8> {
        let count: usize = shape.iter().product();
        self.encode((0..count).map(|flat| {
            let (mut rest, mut index) = (flat, vec![0; shape.len()]);
            for (i, dim) in index.iter_mut().zip(shape).rev() {
                (*i, rest) = (rest % dim, rest / dim);
            }
            at(&index)
        }))
    }

    /// The model's tensors.
    pub(super) fn shards(&self) -> Shards {
        let (h, i) = (self.hidden, self.intermediate);
        let mut shards = Shards::new()
            .with("a.safetensors", "model.embed_tokens.weight", Dtype::F32, &[1], &[0; 4])
            .with("a.safetensors", "model.layers.1.mlp.gate.weight", Dtype::F32, &[1], &[0; 4])
            .with("b.safetensors", "model.layers.1.mlp.shared_expert.up_proj.weight", Dtype::U8, &[1], &[0])
            .with("b.safetensors", "lm_head.weight", Dtype::F32, &[1], &[0; 4]);
        for layer in LAYERS {
            let prefix = format!("model.layers.{layer}");
            let named = match self.style {
                Style::Qwen => self.per_expert(layer, "mlp.experts", ["gate_proj", "up_proj", "down_proj"]),
                Style::Mixtral => self.per_expert(layer, "block_sparse_moe.experts", ["w1", "w3", "w2"]),
                Style::Granite => {
                    let [gate_up, down] = self.stacked(layer, StackedLayout::Normal);
                    vec![
                        (
                            "block_sparse_moe.input_linear.weight".into(),
                            vec![self.experts, 2 * i, h],
                            gate_up,
                        ),
                        ("block_sparse_moe.output_linear.weight".into(), vec![self.experts, h, i], down),
                    ]
                }
                Style::Stacked(layout) => {
                    let [gate_up, down] = self.stacked(layer, layout);
                    let (wide, narrow) = match layout.is_transposed() {
                        true => (vec![self.experts, h, 2 * i], vec![self.experts, i, h]),
                        false => (vec![self.experts, 2 * i, h], vec![self.experts, h, i]),
                    };
                    let mut all = vec![
                        ("mlp.experts.gate_up_proj".into(), wide, gate_up),
                        ("mlp.experts.down_proj".into(), narrow, down),
                    ];
                    if self.bias {
                        let wide = self.tensor(&[self.experts, 2 * i], |at| {
                            let (matrix, row) = self.split(layout, at[1]);
                            self.bias_of(layer, at[0], matrix, row)
                        });
                        let down = self.tensor(&[self.experts, h], |at| self.bias_of(layer, at[0], 2, at[1]));
                        all.push(("mlp.experts.gate_up_proj_bias".into(), vec![self.experts, 2 * i], wide));
                        all.push(("mlp.experts.down_proj_bias".into(), vec![self.experts, h], down));
                    }
                    all
                }
            };
            let file = if layer == LAYERS[0] { "a.safetensors" } else { "b.safetensors" };
            for (name, shape, bytes) in named {
                shards = shards.with(file, &format!("{prefix}.{name}"), self.dtype, &shape, &bytes);
            }
        }
        shards
    }

    fn per_expert(&self, layer: usize, folder: &str, names: [&str; 3]) -> Vec<(String, Vec<usize>, Vec<u8>)> {
        let (h, i) = (self.hidden, self.intermediate);
        let mut all = Vec::new();
        for expert in 0..self.experts {
            for (matrix, (name, shape)) in names.into_iter().zip([[i, h], [i, h], [h, i]]).enumerate() {
                let bytes = self.tensor(&shape, |at| self.weight(layer, expert, matrix, at[0], at[1]));
                all.push((format!("{folder}.{expert}.{name}.weight"), shape.to_vec(), bytes));
                if self.bias {
                    let bytes = self.tensor(&shape[..1], |at| self.bias_of(layer, expert, matrix, at[0]));
                    all.push((format!("{folder}.{expert}.{name}.bias"), shape[..1].to_vec(), bytes));
                }
            }
        }
        all
    }

    /// Which of gate and up, and which row of it, row `r` of the two together is.
    fn split(&self, layout: StackedLayout, r: usize) -> (usize, usize) {
        if layout.is_interleaved() { (r % 2, r / 2) } else { (r / self.intermediate, r % self.intermediate) }
    }

    fn stacked(&self, layer: usize, layout: StackedLayout) -> [Vec<u8>; 2] {
        let (e, h, i) = (self.experts, self.hidden, self.intermediate);
        let gate_up = |expert, r, c| {
            let (matrix, row) = self.split(layout, r);
            self.weight(layer, expert, matrix, row, c)
        };
        let down = |expert, r, c| self.weight(layer, expert, 2, r, c);
        match layout.is_transposed() {
            true => [
                self.tensor(&[e, h, 2 * i], |at| gate_up(at[0], at[2], at[1])),
                self.tensor(&[e, i, h], |at| down(at[0], at[2], at[1])),
            ],
            false => [
                self.tensor(&[e, 2 * i, h], |at| gate_up(at[0], at[1], at[2])),
                self.tensor(&[e, h, i], |at| down(at[0], at[1], at[2])),
            ],
        }
    }
}

/// Every record of a source.
pub(super) fn all_records(source: &dyn RecordSource) -> Vec<Vec<u8>> {
    let directory = source.directory();
    (0..directory.len() as u32)
        .map(|index| {
            // Not zero, so that padding that is left unwritten shows.
            let mut out = vec![0xa5; directory.record_bytes(RecordIndex(index))];
            source.read(RecordIndex(index), &mut out).unwrap();
            out
        })
        .collect()
}
