//! The dense part of a checkpoint: everything that every token needs. Experts are refused here.

use std::collections::{BTreeMap, HashSet};

use candle_core::{DType, Device, Tensor};
use comoe_core::store::{Checkpoint, Encoding, Naming, QuantisedMatrix, TensorRole, TensorView};
use half::f16;
use safetensors::Dtype;

use super::{DenseFormat, Progress};
use crate::arch::{DecoderPlan, RouterPrecision, TensorNames};
use crate::blocks::int8::Int8Layout;
use crate::blocks::int8_matrix::{Expand, Int8Matrix};
use crate::blocks::linear::Linear;
use crate::error::{Error, Result};

/// Loads dense weights from a checkpoint to a device, in the dtype that the model computes in.
pub struct DenseWeights<'a> {
    checkpoint: &'a Checkpoint,
    naming: &'a Naming,
    dtype: DType,
    device: &'a Device,
    format: DenseFormat,
    /// Ends of the names, less `.weight`, of matrices that [`Self::linear`] is not asked for.
    kept: Vec<String>,
    expand: Option<Expand>,
    /// Of a router that computes in F32: the end of its name, less `.weight`.
    wide: Option<&'static str>,
    /// Bytes of what was handed out.
    held: u64,
    done: u64,
    total: u64,
    /// Shapes of the tensors that become floating-point numbers.
    shapes: Vec<(&'a str, Vec<usize>)>,
    progress: &'a (dyn Fn(Progress) + Sync),
    /// Without `.weight` and the like.
    used: HashSet<String>,
}

/// Where a dense weight is.
enum Stored<'a> {
    Plain(TensorView<'a>),
    Quantised(QuantisedMatrix, u64),
}

impl Stored<'_> {
    /// Bytes in the checkpoint.
    fn bytes(&self) -> u64 {
        match self {
            Self::Plain(view) => view.bytes.len() as u64,
            Self::Quantised(_, bytes) => *bytes,
        }
    }

    /// The type that its elements have one by one.
    fn dtype(&self) -> Option<DType> {
        match self {
            Self::Plain(TensorView { encoding: Encoding::Plain(dtype), .. }) => candle_dtype(*dtype),
            _ => None,
        }
    }
}

/// Tensors of a matrix's weights, after its stem.
const WEIGHTS: [&str; 3] = ["weight", "qweight", "weight_packed"];

/// Latent attention's projection from latents to keys and values, less `.weight`: heads are multiplied with their parts of
/// it, so it stays in the model's dtype.
pub(super) const LATENT_EXPAND: &str = "self_attn.kv_b_proj";

/// Whether a model of `plan` has a place for a dense tensor: not for those of other modalities, of layers that predict
/// further tokens, or of a head that is the embedding.
fn has_place(name: &str, (root, head): (&str, &str), plan: &DecoderPlan) -> bool {
    let is_head = || name.strip_prefix(head).is_some_and(|rest| rest.starts_with("lm_head."));
    let Some(rest) = name.strip_prefix(root) else { return !plan.tied_head && is_head() };
    match rest.strip_prefix("layers.").and_then(|rest| rest.split('.').next()) {
        Some(layer) => layer.parse().is_ok_and(|l: usize| l < plan.layers.len()),
        None => [plan.names.embedding, plan.names.final_norm].contains(&stem(rest)),
    }
}

/// A name without its last part.
fn stem(name: &str) -> &str {
    name.rsplit_once('.').map_or(name, |(stem, _)| stem)
}

impl<'a> DenseWeights<'a> {
    /// A loader over `checkpoint`, whose expert tensors `naming` knows. `progress` hears of every tensor.
    ///
    /// # Errors
    /// [`Error::Core`] for a tensor name that looks like an expert's but is none that `naming` knows.
    pub fn new(
        checkpoint: &'a Checkpoint,
        naming: &'a Naming,
        dtype: DType,
        device: &'a Device,
        progress: &'a (dyn Fn(Progress) + Sync),
    ) -> Result<Self> {
        let (mut total, mut shapes) = (0, Vec::new());
        for name in checkpoint.names() {
            if naming.classify(name)? == TensorRole::Dense {
                let view = checkpoint.tensor(name)?;
                total += view.bytes.len() as u64;
                let quantised = match WEIGHTS.contains(&name.rsplit('.').next().unwrap_or_default()) {
                    // What cannot be read is complained of when it is needed.
                    true => {
                        QuantisedMatrix::find(checkpoint, stem(name), naming.quantisation()).ok().flatten()
                    }
                    false => None,
                };
                let shape = match (quantised, view.encoding) {
                    (Some(matrix), _) => matrix.shape().to_vec(),
                    (None, Encoding::Plain(dtype)) if candle_dtype(dtype).is_some() => view.shape.to_vec(),
                    _ => continue,
                };
                shapes.push((name, shape));
            }
        }
        let (format, kept, expand, done) = (DenseFormat::default(), Vec::new(), None, 0);
        let (wide, held) = (None, 0);
        let used = HashSet::new();
        Ok(Self {
            checkpoint,
            naming,
            dtype,
            device,
            format,
            kept,
            expand,
            wide,
            held,
            done,
            total,
            shapes,
            progress,
            used,
        })
    }

    /// For the model of `plan`, with its projections in this format: tensors that it has no place for do not count.
    ///
    /// # Errors
    /// [`Error::Core`] when this build has no kernels for the GPU.
    pub fn with_format(self, format: DenseFormat, plan: &DecoderPlan) -> Result<Self> {
        let expand = match format {
            DenseFormat::Int8 => Some(Expand::load(self.device)?),
            DenseFormat::Plain => None,
        };
        Ok(Self { expand, ..self.counting(format, plan) })
    }

    /// The same for counting alone: nothing is loaded.
    pub(super) fn counting(self, format: DenseFormat, plan: &DecoderPlan) -> Self {
        let kept = [plan.names.embedding, plan.names.router, LATENT_EXPAND].map(str::to_owned).to_vec();
        let is_wide = |p| matches!(p, RouterPrecision::F32 | RouterPrecision::F32Logits);
        let wide = plan.moe_layers().any(|(_, moe)| is_wide(moe.router.precision));
        let wide = wide.then_some(plan.names.router);
        let roots = self.roots(plan);
        let shapes = self.shapes.into_iter().filter(|(name, _)| has_place(name, roots, plan)).collect();
        Self { format, kept, wide, shapes, ..self }
    }

    /// Where the language model's tensors are, and its head: of [`TensorNames::ROOTS`] those whose embedding is there.
    pub fn roots(&self, plan: &DecoderPlan) -> (&'static str, &'static str) {
        let embedded = |root: &str| self.contains(&format!("{root}{}.weight", plan.names.embedding));
        let found = TensorNames::ROOTS.into_iter().find(|(root, _)| embedded(root));
        found.unwrap_or(TensorNames::ROOTS[0])
    }

    /// Bytes of all tensors and matrices handed out so far, on whatever device they are.
    pub fn held_bytes(&self) -> u64 {
        self.held
    }

    /// The tensors that are not experts' and were not asked for, as patterns with their counts: numbers in names are
    /// `*`. Scales of activations and the like, beside weights that were used, are not among them.
    pub fn ignored(&self) -> BTreeMap<String, usize> {
        let mut patterns = BTreeMap::new();
        for name in self.checkpoint.names() {
            let expert = matches!(self.naming.classify(name), Ok(TensorRole::Expert(_)));
            if expert || self.used.contains(stem(name)) || self.used.contains(name) {
                continue;
            }
            let star = |part: &str| match part.bytes().all(|b| b.is_ascii_digit()) {
                true => "*".to_owned(),
                false => part.to_owned(),
            };
            let pattern = name.split('.').map(star).collect::<Vec<_>>().join(".");
            *patterns.entry(pattern).or_insert(0) += 1;
        }
        patterns
    }

    /// Bytes that the model's dense weights take on the device.
    pub fn device_bytes(&self) -> u64 {
        self.shapes.iter().map(|(name, shape)| self.bytes_of(name, shape) as u64).sum()
    }

    fn bytes_of(&self, name: &str, shape: &[usize]) -> usize {
        match *shape {
            [rows, columns] if self.packs(rows) && !self.kept.iter().any(|k| stem(name).ends_with(k)) => {
                Int8Layout::new(rows, columns).bytes
            }
            _ => {
                let wide = self.wide.is_some_and(|router| stem(name).ends_with(router));
                let dtype = if wide { DType::F32 } else { self.dtype };
                shape.iter().product::<usize>() * dtype.size_in_bytes()
            }
        }
    }

    /// Whether a projection with so many outputs is held in INT8: that of a single one is not worth it.
    fn packs(&self, rows: usize) -> bool {
        self.format == DenseFormat::Int8 && rows > 1
    }

    /// Whether the checkpoint holds `name`.
    pub fn contains(&self, name: &str) -> bool {
        self.checkpoint.contains(name)
    }

    /// Whether the checkpoint holds `name` in this shape.
    pub fn has_shape(&self, name: &str, shape: &[usize]) -> bool {
        self.checkpoint.tensor(name).is_ok_and(|view| view.shape == shape)
    }

    /// What tensors are loaded as, unless another dtype is asked for.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The tensor `name`, which must have this shape.
    ///
    /// # Errors
    /// [`Error::ExpertAsDense`] for an expert's tensor; [`Error::Core`] when it is missing, of another shape, or no
    /// floating-point tensor.
    pub fn tensor(&mut self, name: &str, shape: &[usize]) -> Result<Tensor> {
        self.tensor_as(name, shape, self.dtype)
    }

    /// The same, in another dtype than the model's.
    ///
    /// # Errors
    /// As [`Self::tensor`].
    pub fn tensor_as(&mut self, name: &str, shape: &[usize], dtype: DType) -> Result<Tensor> {
        self.stacked_as(&[(name.to_owned(), shape[0])], &shape[1..], dtype)
    }

    /// Tensors with equal trailing dimensions, one above the other as one tensor: `(name, rows)` each.
    ///
    /// # Errors
    /// As [`Self::tensor`].
    pub fn stacked(&mut self, parts: &[(String, usize)], trailing: &[usize]) -> Result<Tensor> {
        self.stacked_as(parts, trailing, self.dtype)
    }

    /// A projection from `inputs` columns, in the format asked for: `(name, rows)` one above the other, and a bias.
    ///
    /// # Errors
    /// As [`Self::tensor`]; [`Error::Core`] too for a weight that INT8 cannot hold, such as NaN.
    pub fn linear(
        &mut self,
        parts: &[(String, usize)],
        inputs: usize,
        bias: Option<Tensor>,
    ) -> Result<Linear> {
        let rows = parts.iter().map(|(_, rows)| rows).sum();
        let expand = match &self.expand {
            Some(expand) if self.packs(rows) => expand.clone(),
            _ => return Ok(Linear::new(&self.stacked(parts, &[inputs])?, bias)?),
        };
        let stored = self.all_stored(parts, &[inputs])?;
        let values = self.values(&stored, rows * inputs)?;
        let matrix = Int8Matrix::new(&values, rows, inputs, self.dtype, self.device, &expand);
        let matrix = matrix.map_err(|e| match e {
            Error::Core(e @ comoe_core::Error::BadArgument { .. }) => {
                let names: Vec<&str> = parts.iter().map(|(name, _)| name.as_str()).collect();
                comoe_core::Error::bad_tensor(names.join(" over "), e.to_string()).into()
            }
            other => other,
        })?;
        self.held += matrix.layout().bytes as u64;
        self.count(parts, stored.iter().map(|(_, s)| s.bytes()).sum());
        Ok(Linear::int8(matrix, bias))
    }

    fn all_stored(&self, parts: &[(String, usize)], trailing: &[usize]) -> Result<Vec<(String, Stored<'a>)>> {
        parts.iter().map(|(name, rows)| Ok((name.clone(), self.stored(name, *rows, trailing)?))).collect()
    }

    /// Elements of all of them, one after the other.
    fn values(&self, stored: &[(String, Stored<'_>)], elements: usize) -> Result<Vec<f32>> {
        let mut values = Vec::with_capacity(elements);
        for (name, stored) in stored {
            match stored {
                Stored::Plain(view) => widen(name, view, &mut values)?,
                Stored::Quantised(matrix, _) => {
                    let mut matrix_values = Vec::new();
                    matrix.values(self.checkpoint, &mut matrix_values)?;
                    values.append(&mut matrix_values);
                }
            }
        }
        Ok(values)
    }

    /// Tensors are where they belong.
    fn count(&mut self, parts: &[(String, usize)], bytes: u64) {
        self.used.extend(parts.iter().map(|(name, _)| {
            match WEIGHTS[0] == name.rsplit('.').next().unwrap_or_default() {
                true => stem(name).to_owned(),
                false => name.clone(),
            }
        }));
        self.done += bytes;
        (self.progress)(Progress::Dense { done: self.done, total: self.total });
    }

    fn stacked_as(&mut self, parts: &[(String, usize)], trailing: &[usize], dtype: DType) -> Result<Tensor> {
        let stored = self.all_stored(parts, trailing)?;
        let mut shape = vec![parts.iter().map(|(_, rows)| rows).sum()];
        shape.extend_from_slice(trailing);
        let bytes: u64 = stored.iter().map(|(_, s)| s.bytes()).sum();

        let raw: Option<Vec<&[u8]>> = stored
            .iter()
            .map(|(_, s)| match s {
                Stored::Plain(view) if s.dtype() == Some(dtype) => Some(view.bytes),
                _ => None,
            })
            .collect();
        let tensor = match raw.as_deref() {
            Some([one]) => Tensor::from_raw_buffer(one, dtype, &shape, self.device)?,
            Some(many) => Tensor::from_raw_buffer(&many.concat(), dtype, &shape, self.device)?,
            None => {
                let values = self.values(&stored, shape.iter().product())?;
                Tensor::from_vec(values, shape, &Device::Cpu)?.to_dtype(dtype)?.to_device(self.device)?
            }
        };
        self.held += (tensor.elem_count() * dtype.size_in_bytes()) as u64;
        self.count(parts, bytes);
        Ok(tensor)
    }

    fn stored(&self, name: &str, rows: usize, trailing: &[usize]) -> Result<Stored<'a>> {
        if matches!(self.naming.classify(name)?, TensorRole::Expert(_)) {
            return Err(Error::ExpertAsDense { name: name.to_owned() });
        }
        let mut expected = vec![rows];
        expected.extend_from_slice(trailing);
        let wrong = |found: &[usize], file: String| {
            let reason =
                format!("expected shape {expected:?} by the configuration, found {found:?} in {file}");
            comoe_core::Error::bad_tensor(name, reason)
        };
        if let Some(stem) = name.strip_suffix(".weight") {
            let how = self.naming.quantisation();
            if let Some(matrix) = QuantisedMatrix::find(self.checkpoint, stem, how)? {
                if matrix.shape()[..] != expected {
                    return Err(wrong(&matrix.shape(), self.checkpoint.describe().to_owned()).into());
                }
                let tensors =
                    WEIGHTS.iter().filter_map(|w| self.checkpoint.tensor(&format!("{stem}.{w}")).ok());
                return Ok(Stored::Quantised(matrix, tensors.map(|t| t.bytes.len() as u64).sum()));
            }
        }
        let view = self.checkpoint.tensor(name)?;
        if view.shape != expected {
            return Err(wrong(view.shape, view.file.display().to_string()).into());
        }
        Ok(Stored::Plain(view))
    }
}

fn candle_dtype(dtype: Dtype) -> Option<DType> {
    match dtype {
        Dtype::F32 => Some(DType::F32),
        Dtype::BF16 => Some(DType::BF16),
        Dtype::F16 => Some(DType::F16),
        _ => None,
    }
}

/// Appends the elements of a tensor as F32: exact for BF16, F16 and F32.
fn widen(name: &str, view: &TensorView<'_>, out: &mut Vec<f32>) -> Result<()> {
    let pairs = view.bytes.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]]));
    match view.encoding {
        Encoding::Plain(Dtype::BF16) => out.extend(pairs.map(|b| f32::from_bits(u32::from(b) << 16))),
        Encoding::Plain(Dtype::F16) => out.extend(pairs.map(|b| f16::from_bits(b).to_f32())),
        Encoding::Plain(Dtype::F32) => {
            let words = view.bytes.chunks_exact(4);
            out.extend(words.map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])));
        }
        other => {
            let reason = format!("expected BF16, F16 or F32, found {other} in {}", view.file.display());
            return Err(comoe_core::Error::bad_tensor(name, reason).into());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::load::ConfigFile;
    use crate::testing::tiny_config;

    #[test]
    fn tensors_that_a_model_has_no_place_for_do_not_count() {
        let config = ConfigFile::parse(Path::new("config.json"), &tiny_config().to_string()).unwrap();
        let plan = crate::arch::plan(&config).unwrap();
        let tied = DecoderPlan { tied_head: true, ..plan.clone() };
        let roots = ("language_model.model.", "language_model.");
        for (name, with_head, without) in [
            ("language_model.model.embed_tokens.weight", true, true),
            ("language_model.model.norm.weight", true, true),
            ("language_model.model.layers.2.self_attn.q_proj.weight", true, true),
            ("language_model.lm_head.weight", true, false),
            // Layers that predict further tokens, and another modality's.
            ("language_model.model.layers.3.self_attn.q_proj.weight", false, false),
            ("language_model.model.pooler.weight", false, false),
            ("vision_tower.layers.0.mlp.up_proj.weight", false, false),
            ("lm_head.weight", false, false),
        ] {
            let has = [has_place(name, roots, &plan), has_place(name, roots, &tied)];
            assert_eq!(has, [with_head, without], "{name}");
        }
        assert!(has_place("lm_head.weight", ("model.", ""), &plan));
    }
}
