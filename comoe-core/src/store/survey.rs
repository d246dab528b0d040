//! Finds every expert of a checkpoint and checks that they are complete and of one shape and type.

use std::collections::BTreeMap;

use safetensors::Dtype;

use super::checkpoint::{Checkpoint, Encoding};
use super::gather::{ExpertParts, FloatType, Part, Strided};
use super::naming::{ExpertTensor, Matrix, Naming, StackedLayout, TensorKind, TensorRole};
use super::quant::{BLOCK_BYTES, Coded, Mxfp4, QuantisedMatrix};
use crate::error::{Error, Result};
use crate::expert::ExpertSpec;
use crate::format::ExpertFormat;
use crate::format::mxfp4::BLOCK;

/// Above every published model by three orders of magnitude; keeps size arithmetic away from overflow.
pub(super) const MAX_DIM: usize = 1 << 24;
/// Bounds what a hostile header can make us allocate.
pub(super) const MAX_EXPERTS: usize = 1 << 16;

/// The experts of one layer.
#[derive(Debug)]
pub(super) struct LayerSurvey {
    pub(super) layer: usize,
    pub(super) spec: ExpertSpec,
    pub(super) experts: Vec<ExpertParts>,
}

/// All experts of a checkpoint.
#[derive(Debug)]
pub(super) struct Survey {
    /// Of weights that are not quantised, where there are such.
    pub(super) float: Option<FloatType>,
    pub(super) layers: Vec<LayerSurvey>,
}

impl Survey {
    /// The format whose records hold the very numbers of every expert.
    pub(super) fn kept_by(&self) -> Option<ExpertFormat> {
        let matrices = self.layers.iter().flat_map(|l| &l.experts).flat_map(ExpertParts::matrices);
        let mut kept = matrices.map(Part::kept_by);
        let first = kept.next()??;
        kept.all(|other| other == Some(first)).then_some(first)
    }
}

/// Tensor names by matrix.
#[derive(Debug, Default)]
struct Named<'a> {
    weights: BTreeMap<Matrix, &'a str>,
    biases: BTreeMap<Matrix, &'a str>,
    /// MXFP4 weights and their exponents.
    blocks: BTreeMap<Matrix, &'a str>,
    scales: BTreeMap<Matrix, &'a str>,
    /// Weights in four bits.
    codes: BTreeMap<Matrix, &'a str>,
}

/// Tensor names of one layer.
#[derive(Debug, Default)]
struct Group<'a> {
    per_expert: BTreeMap<usize, Named<'a>>,
    stacked: Option<Named<'a>>,
}

/// Finds the experts of `checkpoint`.
///
/// # Errors
/// [`Error::NoExperts`], [`Error::UnknownExpertTensor`], and [`Error::BadTensor`] for a tensor that is missing or
/// differs in shape or type.
pub(super) fn survey(checkpoint: &Checkpoint, naming: &Naming) -> Result<Survey> {
    let mut groups = BTreeMap::<usize, Group<'_>>::new();
    for name in checkpoint.names() {
        let TensorRole::Expert(ExpertTensor { layer, expert, matrix, kind }) = naming.classify(name)? else {
            continue;
        };
        let group = groups.entry(layer).or_default();
        let named = match expert {
            Some(expert) => group.per_expert.entry(expert).or_default(),
            None => group.stacked.get_or_insert_default(),
        };
        let table = match kind {
            TensorKind::Weight => &mut named.weights,
            TensorKind::Bias => &mut named.biases,
            TensorKind::Mxfp4Blocks => &mut named.blocks,
            TensorKind::Mxfp4Scales => &mut named.scales,
            TensorKind::Code => &mut named.codes,
            TensorKind::Companion => continue,
        };
        if let Some(first) = table.insert(matrix, name) {
            return Err(Error::bad_tensor(
                name,
                format!("holds the same as {first:?}; only one may be there"),
            ));
        }
    }
    if groups.is_empty() {
        return Err(Error::NoExperts { what: checkpoint.describe().to_owned() });
    }
    let weights = groups.values().flat_map(Group::weights);
    let first =
        weights.filter_map(|name| Some((FloatType::of_encoding(checkpoint.encoding(name)?)?, name))).next();
    let reader = Reader { checkpoint, naming, first };
    let layers =
        groups.iter().map(|(layer, group)| reader.layer(*layer, group)).collect::<Result<Vec<_>>>()?;
    same_in_all_layers(&layers, &groups)?;
    Ok(Survey { float: first.map(|(float, _)| float), layers })
}

/// A layer that differs from the first lacks tensors, or is of another model.
fn same_in_all_layers(layers: &[LayerSurvey], groups: &BTreeMap<usize, Group<'_>>) -> Result<()> {
    let Some(first) = layers.first() else { return Ok(()) };
    for layer in layers {
        let name = || groups[&layer.layer].names().next_back().unwrap_or_default();
        if layer.experts.len() != first.experts.len() {
            return Err(Error::bad_tensor(
                name(),
                format!(
                    "layer {} has {} experts and layer {} has {}; download the checkpoint again",
                    layer.layer,
                    layer.experts.len(),
                    first.layer,
                    first.experts.len()
                ),
            ));
        }
        if layer.spec.hidden != first.spec.hidden {
            return Err(Error::bad_tensor(
                name(),
                format!(
                    "layer {} has hidden size {} and layer {} has {}",
                    layer.layer, layer.spec.hidden, first.layer, first.spec.hidden
                ),
            ));
        }
    }
    Ok(())
}

impl<'a> Named<'a> {
    fn all(&self) -> impl DoubleEndedIterator<Item = &'a str> {
        let weights = self.weights.values().chain(self.biases.values());
        let quantised = self.codes.values().chain(self.blocks.values()).chain(self.scales.values());
        weights.chain(quantised).copied()
    }
}

impl<'a> Group<'a> {
    fn names(&self) -> impl DoubleEndedIterator<Item = &'a str> {
        self.per_expert.values().chain(&self.stacked).flat_map(Named::all)
    }

    fn weights(&self) -> impl Iterator<Item = &'a str> {
        self.per_expert.values().chain(&self.stacked).flat_map(|named| named.weights.values().copied())
    }
}

struct Reader<'a> {
    checkpoint: &'a Checkpoint,
    naming: &'a Naming,
    /// The tensor whose type every expert that is not quantised must have.
    first: Option<(FloatType, &'a str)>,
}

impl Reader<'_> {
    fn layer(&self, layer: usize, group: &Group<'_>) -> Result<LayerSurvey> {
        let (spec, experts) = match &group.stacked {
            Some(stacked) => {
                if let Some(name) = group.per_expert.values().flat_map(Named::all).next() {
                    let other = stacked.all().next().unwrap_or_default();
                    let reason = format!("is one expert's, but {other:?} holds those of the whole layer");
                    return Err(Error::bad_tensor(name, reason));
                }
                self.stacked(stacked)?
            }
            None => self.per_expert(&group.per_expert)?,
        };
        if experts.len() > MAX_EXPERTS {
            let name = group.names().next().unwrap_or_default();
            let reason = format!("layer {layer} has {} experts, the limit is {MAX_EXPERTS}", experts.len());
            return Err(Error::bad_tensor(name, reason));
        }
        Ok(LayerSurvey { layer, spec, experts })
    }

    fn per_expert(&self, experts: &BTreeMap<usize, Named<'_>>) -> Result<(ExpertSpec, Vec<ExpertParts>)> {
        let mut spec: Option<ExpertSpec> = None;
        let mut parts = Vec::with_capacity(experts.len());
        for (expected, (expert, named)) in experts.iter().enumerate() {
            if *expert != expected {
                let seen = named.all().next().unwrap_or_default();
                return Err(self.missing(seen, Some(expected), Matrix::Gate, TensorKind::Weight));
            }
            let weight = |m| match (named.weights.get(&m), named.codes.get(&m)) {
                (Some(name), Some(other)) => Err(Error::bad_tensor(
                    *name,
                    format!("holds the same as {other:?}; only one may be there"),
                )),
                (None, Some(name)) => Ok(*name),
                _ => self.need(named, &named.weights, Some(expected), m, TensorKind::Weight),
            };
            let (gate, up, down) = (weight(Matrix::Gate)?, weight(Matrix::Up)?, weight(Matrix::Down)?);
            let spec = match spec {
                Some(spec) => spec,
                None => {
                    let [intermediate, hidden] = match self.quantised(gate)? {
                        Some(matrix) => matrix.shape,
                        None => *self.dims(gate)?,
                    };
                    let bias = !named.biases.is_empty();
                    *spec.insert(ExpertSpec { bias, ..ExpertSpec::swiglu(hidden, intermediate) })
                }
            };
            let (h, i) = (spec.hidden, spec.intermediate);
            let bias = if spec.bias {
                let bias = |m| self.need(named, &named.biases, Some(expected), m, TensorKind::Bias);
                Some([
                    self.vector(bias(Matrix::Gate)?, &[i])?,
                    self.vector(bias(Matrix::Up)?, &[i])?,
                    self.vector(bias(Matrix::Down)?, &[h])?,
                ])
            } else if let Some(extra) = named.biases.values().next() {
                return Err(Error::bad_tensor(*extra, "is a bias, but expert 0 of the layer has none"));
            } else {
                None
            };
            parts.push(ExpertParts {
                gate: self.part(gate, [i, h])?,
                up: self.part(up, [i, h])?,
                down: self.part(down, [h, i])?,
                bias,
            });
        }
        match spec {
            Some(spec) => Ok((spec, parts)),
            None => Err(Error::NoExperts { what: self.checkpoint.describe().to_owned() }),
        }
    }

    fn stacked(&self, named: &Named<'_>) -> Result<(ExpertSpec, Vec<ExpertParts>)> {
        if !named.blocks.is_empty() {
            return self.mxfp4(named);
        }
        let weight = |m| self.need(named, &named.weights, None, m, TensorKind::Weight);
        let (gate_up, down) = (weight(Matrix::GateUp)?, weight(Matrix::Down)?);
        let gate_up_dims @ &[experts, a, b] = self.dims::<3>(gate_up)?;
        let &down_dims = self.dims::<3>(down)?;
        if experts > MAX_EXPERTS {
            let reason = format!("has shape {gate_up_dims:?}: the limit is {MAX_EXPERTS} experts");
            return Err(Error::bad_tensor(gate_up, reason));
        }
        let expected = |layout| match layout {
            StackedLayout::Normal | StackedLayout::Interleaved => [experts, b, a / 2],
            StackedLayout::Transposed | StackedLayout::TransposedInterleaved => [experts, b / 2, a],
        };
        let layout = match self.naming.stacked_layout() {
            Some(layout) => layout,
            None if !named.biases.is_empty() => {
                return Err(Error::bad_tensor(
                    gate_up,
                    "has biases beside it, so its layout cannot be told by its shape: declare it, with \
                     Naming::gpt_oss or Naming::with_stacked_layout",
                ));
            }
            None if down_dims == expected(StackedLayout::Transposed) => StackedLayout::Transposed,
            None => StackedLayout::Normal,
        };
        let [_, hidden, intermediate] = match expected(layout) {
            [_, i, h] if layout.is_transposed() => [experts, h, i],
            normal => normal,
        };
        let both = if layout.is_transposed() { b } else { a };
        if both % 2 != 0 {
            let reason = format!(
                "has shape {gate_up_dims:?}, but {layout:?} gate and up halve a dimension of even size, not {both}"
            );
            return Err(Error::bad_tensor(gate_up, reason));
        }
        if down_dims != expected(layout) {
            return Err(Error::bad_tensor(
                down,
                format!(
                    "expected shape {:?} to match {gate_up:?} of {gate_up_dims:?}, found {down_dims:?}",
                    expected(layout)
                ),
            ));
        }
        let float = self.check_type(gate_up)?;
        self.check_type(down)?;
        let bias = self.stacked_biases(named, experts, [hidden, intermediate], layout.is_interleaved())?;
        let spec = ExpertSpec { bias: bias.is_some(), ..ExpertSpec::swiglu(hidden, intermediate) };
        let (wide, narrow) = (self.checkpoint.region(gate_up)?, self.checkpoint.region(down)?);
        let parts = (0..experts).map(|e| {
            let gate_up = Strided::rows_of(float, wide, e * 2 * intermediate * hidden, hidden);
            let down = Strided::rows_of(float, narrow, e * hidden * intermediate, intermediate);
            let (gate, up) = match layout {
                StackedLayout::Normal => (gate_up, gate_up.skip(intermediate * hidden)),
                StackedLayout::Interleaved => {
                    let every_other = Strided { row_stride: 2 * hidden, ..gate_up };
                    (every_other, every_other.skip(hidden))
                }
                StackedLayout::Transposed => {
                    let column = Strided { row_stride: 1, col_stride: 2 * intermediate, ..gate_up };
                    (column, column.skip(intermediate))
                }
                StackedLayout::TransposedInterleaved => {
                    let every_other = Strided { row_stride: 2, col_stride: 2 * intermediate, ..gate_up };
                    (every_other, every_other.skip(1))
                }
            };
            let down = match layout.is_transposed() {
                true => Strided { row_stride: 1, col_stride: hidden, ..down },
                false => down,
            };
            let bias = bias.as_ref().map(|bias| bias[e]);
            ExpertParts { gate: Part::Plain(gate), up: Part::Plain(up), down: Part::Plain(down), bias }
        });
        Ok((spec, parts.collect()))
    }

    /// Gate, up and down biases of every expert of a layer, where it has such.
    fn stacked_biases(
        &self,
        named: &Named<'_>,
        experts: usize,
        [hidden, intermediate]: [usize; 2],
        interleaved: bool,
    ) -> Result<Option<Vec<[Strided; 3]>>> {
        if named.biases.is_empty() {
            return Ok(None);
        }
        let bias = |m| self.need(named, &named.biases, None, m, TensorKind::Bias);
        let gate_up = self.vector(bias(Matrix::GateUp)?, &[experts, 2 * intermediate])?;
        let down = self.vector(bias(Matrix::Down)?, &[experts, hidden])?;
        let of = |e: usize| {
            let gate_up = gate_up.skip(e * 2 * intermediate);
            let (gate, up) = match interleaved {
                true => {
                    let every_other = Strided { col_stride: 2, ..gate_up };
                    (every_other, every_other.skip(1))
                }
                false => (gate_up, gate_up.skip(intermediate)),
            };
            [gate, up, down.skip(e * hidden)]
        };
        Ok(Some((0..experts).map(of).collect()))
    }

    /// A layer whose experts are MXFP4 (gpt-oss): rows are output features, gate and up in turn if declared so.
    fn mxfp4(&self, named: &Named<'_>) -> Result<(ExpertSpec, Vec<ExpertParts>)> {
        let blocks = |m| self.need(named, &named.blocks, None, m, TensorKind::Mxfp4Blocks);
        let scales = |m| self.need(named, &named.scales, None, m, TensorKind::Mxfp4Scales);
        let gate_up = blocks(Matrix::GateUp)?;
        if let Some(other) = named.weights.values().next() {
            return Err(Error::bad_tensor(
                *other,
                format!("holds the same as {gate_up:?}; only one may be there"),
            ));
        }
        let Some(layout) = self.naming.stacked_layout() else {
            let reason = "is MXFP4, whose order of gate and up rows cannot be told by its shape: declare it, with \
                          Naming::gpt_oss or Naming::with_stacked_layout";
            return Err(Error::bad_tensor(gate_up, reason));
        };
        let &[experts, both, groups, _] = self.dims::<4>(gate_up)?;
        let (hidden, intermediate) = (groups.saturating_mul(BLOCK), both / 2);
        if both % 2 != 0 || intermediate % BLOCK != 0 || experts > MAX_EXPERTS || hidden > MAX_DIM {
            let reason = format!(
                "expected [experts up to {MAX_EXPERTS}, twice a multiple of {BLOCK}, hidden / {BLOCK}, \
                 {BLOCK_BYTES}], found {:?}",
                [experts, both, groups]
            );
            return Err(Error::bad_tensor(gate_up, reason));
        }
        for (matrix, rows, groups) in
            [(Matrix::GateUp, both, groups), (Matrix::Down, hidden, intermediate / BLOCK)]
        {
            for (name, shape) in [
                (blocks(matrix)?, &[experts, rows, groups, BLOCK_BYTES][..]),
                (scales(matrix)?, &[experts, rows, groups]),
            ] {
                self.check_shape(name, shape)?;
                let found = self.checkpoint.tensor(name)?.encoding;
                if found != Encoding::Plain(Dtype::U8) {
                    return Err(Error::bad_tensor(
                        name,
                        format!("expected dtype U8 of MXFP4, found {found}"),
                    ));
                }
            }
        }
        let interleaved = layout.is_interleaved();
        let bias = self.stacked_biases(named, experts, [hidden, intermediate], interleaved)?;
        let spec = ExpertSpec { bias: bias.is_some(), ..ExpertSpec::swiglu(hidden, intermediate) };
        let region =
            |m| Ok::<_, Error>((self.checkpoint.region(blocks(m)?)?, self.checkpoint.region(scales(m)?)?));
        let (wide, narrow) = (region(Matrix::GateUp)?, region(Matrix::Down)?);
        let rows = |(blocks, scales), first_row, row_step| {
            Part::Coded(Coded::Mxfp4(Mxfp4 { blocks, scales, first_row, row_step }))
        };
        let parts = (0..experts).map(|e| {
            let first = e * both;
            let (up_from, step) = if interleaved { (first + 1, 2) } else { (first + intermediate, 1) };
            ExpertParts {
                gate: rows(wide, first, step),
                up: rows(wide, up_from, step),
                down: rows(narrow, e * hidden, 1),
                bias: bias.as_ref().map(|bias| bias[e]),
            }
        });
        Ok((spec, parts.collect()))
    }

    /// The tensor of one matrix, or an error that names it.
    fn need<'n>(
        &self,
        named: &Named<'n>,
        table: &BTreeMap<Matrix, &'n str>,
        expert: Option<usize>,
        matrix: Matrix,
        kind: TensorKind,
    ) -> Result<&'n str> {
        table.get(&matrix).copied().ok_or_else(|| {
            let seen = named.all().next().unwrap_or_default();
            self.missing(seen, expert, matrix, kind)
        })
    }

    fn missing(&self, seen: &str, expert: Option<usize>, matrix: Matrix, kind: TensorKind) -> Error {
        let name = self.naming.sibling(seen, expert, matrix, kind).unwrap_or_else(|| seen.to_owned());
        let reason =
            format!("is missing from {} (it has {seen:?}); download it again", self.checkpoint.describe());
        Error::bad_tensor(name, reason)
    }

    /// The shape of a tensor of rank `N`, every dimension in `1..=MAX_DIM`.
    fn dims<const N: usize>(&self, name: &str) -> Result<&[usize; N]> {
        let shape = self.checkpoint.tensor(name)?.shape;
        match <&[usize; N]>::try_from(shape) {
            Ok(dims) if dims.iter().all(|d| (1..=MAX_DIM).contains(d)) => Ok(dims),
            Ok(_) => Err(Error::bad_tensor(
                name,
                format!("has shape {shape:?}; expected dimensions from 1 to {MAX_DIM}"),
            )),
            Err(_) => Err(Error::bad_tensor(name, format!("expected {N} dimensions, found shape {shape:?}"))),
        }
    }

    /// The matrix whose weights are in the tensor `name`, unless they are plain floats.
    fn quantised(&self, name: &str) -> Result<Option<QuantisedMatrix>> {
        let stem = name.rsplit_once('.').map_or(name, |(stem, _)| stem);
        QuantisedMatrix::find(self.checkpoint, stem, self.naming.quantisation())
    }

    fn part(&self, name: &str, expected: [usize; 2]) -> Result<Part> {
        let Some(matrix) = self.quantised(name)? else {
            self.check_shape(name, &expected)?;
            let float = self.check_type(name)?;
            return Ok(Part::Plain(Strided::rows_of(float, self.checkpoint.region(name)?, 0, expected[1])));
        };
        match matrix.shape == expected {
            true => Ok(Part::Coded(matrix.coded)),
            false => Err(self.wrong_shape(name, &expected, &matrix.shape)),
        }
    }

    /// A bias; its type may differ from the weights'.
    fn vector(&self, name: &str, expected: &[usize]) -> Result<Strided> {
        self.check_shape(name, expected)?;
        let found = self.checkpoint.tensor(name)?.encoding;
        let float = FloatType::of_encoding(found).ok_or_else(|| {
            Error::bad_tensor(name, format!("expected dtype BF16, F16 or F32, found {found}"))
        })?;
        Ok(Strided::rows_of(float, self.checkpoint.region(name)?, 0, expected[expected.len() - 1]))
    }

    fn check_shape(&self, name: &str, expected: &[usize]) -> Result<()> {
        let found = self.checkpoint.tensor(name)?.shape;
        if found == expected { Ok(()) } else { Err(self.wrong_shape(name, expected, found)) }
    }

    fn wrong_shape(&self, name: &str, expected: &[usize], found: &[usize]) -> Error {
        let reason =
            format!("expected shape {expected:?} as the other experts of its layer, found {found:?}");
        Error::bad_tensor(name, reason)
    }

    /// The type of a plain tensor, the same in all of them.
    fn check_type(&self, name: &str) -> Result<FloatType> {
        let found = self.checkpoint.tensor(name)?.encoding;
        match (FloatType::of_encoding(found), self.first) {
            (Some(float), Some((expected, _))) if float == expected => Ok(float),
            (_, Some((expected, first))) => {
                let reason = format!("expected dtype {expected} as {first:?} has it, found {found}");
                Err(Error::bad_tensor(name, reason))
            }
            (_, None) => {
                let reason =
                    format!("has dtype {found}; stacked experts are read from BF16, F16, F32 or MXFP4");
                Err(Error::bad_tensor(name, reason))
            }
        }
    }
}
