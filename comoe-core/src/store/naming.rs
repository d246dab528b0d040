//! Which tensor is what? The naming table that splits a checkpoint into experts and the dense rest.
//!
//! Names are those of Hugging Face checkpoints. Only routed experts become records; shared experts, their gates,
//! routers and the routers' biases are dense.

use super::Quantisation;
use crate::error::{Error, Result};

/// One of an expert's matrices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Matrix {
    /// `[intermediate, hidden]`
    Gate,
    /// `[intermediate, hidden]`
    Up,
    /// `[hidden, intermediate]`
    Down,
    /// Gate and up in one tensor (stacked checkpoints).
    GateUp,
}

/// What a tensor holds of which expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertTensor {
    /// The model's layer number.
    pub layer: usize,
    /// The expert, or `None` when the tensor holds those of the whole layer.
    pub expert: Option<usize>,
    /// Which matrix.
    pub matrix: Matrix,
    /// What of the matrix.
    pub kind: TensorKind,
}

/// What of a matrix a tensor holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TensorKind {
    /// Its weights.
    Weight,
    /// Its bias.
    Bias,
    /// Its weights as MXFP4 blocks `[E, out, in / 32, 16]`, whatever the layout of unquantised tensors.
    Mxfp4Blocks,
    /// The exponents of those, `[E, out, in / 32]`.
    Mxfp4Scales,
    /// Its weights in four bits (GPTQ, AWQ, compressed-tensors).
    Code,
    /// What goes with its weights where it is quantised: scales, zero points, shapes.
    Companion,
}

/// Names of weights in four bits.
const CODES: [&str; 2] = ["qweight", "weight_packed"];
/// What lies beside quantised weights, whether it is read or not (scales of activations are not).
const COMPANIONS: [&str; 14] = [
    "weight_scale_inv",
    "weight_scale",
    "weight_scale_2",
    "weight_global_scale",
    "weight_shape",
    "weight_zero_point",
    "weight_g_idx",
    "qzeros",
    "scales",
    "g_idx",
    "input_scale",
    "input_global_scale",
    "input_zero_point",
    "activation_scale",
];

/// What a tensor is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TensorRole {
    /// Part of a routed expert.
    Expert(ExpertTensor),
    /// Anything that is always needed: attention, norms, routers, shared experts, embeddings.
    Dense,
    /// Not used: multi-token prediction layers.
    Ignored,
}

/// How tensors that hold all experts of a layer are laid out. `E` experts, hidden `H`, intermediate `I`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StackedLayout {
    /// `gate_up [E, 2I, H]` with the gate's rows first, `down [E, H, I]`.
    Normal,
    /// `gate_up [E, H, 2I]` with the gate's columns first, `down [E, I, H]` (Llama 4, Qwen3-VL).
    Transposed,
    /// `gate_up [E, 2I, H]` with gate and up rows in turn, `down [E, H, I]`.
    Interleaved,
    /// `gate_up [E, H, 2I]` with gate and up columns in turn, `down [E, I, H]` (gpt-oss in BF16).
    TransposedInterleaved,
}

impl StackedLayout {
    /// Whether tensors are `[E, in, out]`.
    pub fn is_transposed(self) -> bool {
        matches!(self, Self::Transposed | Self::TransposedInterleaved)
    }

    /// Whether gate and up alternate.
    pub fn is_interleaved(self) -> bool {
        matches!(self, Self::Interleaved | Self::TransposedInterleaved)
    }
}

/// Names of one way to store experts, below `layers.N.`.
#[derive(Debug, PartialEq, Eq)]
enum Template {
    /// `{folder}.E.{gate|up|down}.weight`, and `.bias`.
    PerExpert { folder: &'static str, gate: &'static str, up: &'static str, down: &'static str },
    /// `{folder}.{gate_up|down}{weight}`, and `{bias}`; with a bias also `_blocks` and `_scales` of MXFP4.
    Stacked {
        folder: &'static str,
        gate_up: &'static str,
        down: &'static str,
        weight: &'static str,
        bias: Option<&'static str>,
    },
}

const fn projections(folder: &'static str) -> Template {
    Template::PerExpert { folder, gate: "gate_proj", up: "up_proj", down: "down_proj" }
}

const fn numbered(folder: &'static str) -> Template {
    Template::PerExpert { folder, gate: "w1", up: "w3", down: "w2" }
}

const fn stacked(folder: &'static str) -> Template {
    Template::Stacked { folder, gate_up: "gate_up_proj", down: "down_proj", weight: "", bias: Some("_bias") }
}

/// Qwen, OLMoE, DeepSeek, GLM, dots, ERNIE, Hunyuan.
static MLP_PROJECTIONS: Template = projections("mlp.experts");
/// Qwen3.5, Qwen3-VL, gpt-oss in BF16.
static MLP_STACKED: Template = stacked("mlp.experts");
/// Mixtral, Phi-3.5-MoE, MiniMax.
static BLOCK_SPARSE: Template = numbered("block_sparse_moe.experts");
/// LFM2.
static FEED_FORWARD: Template = numbered("feed_forward.experts");
/// Jamba.
static FEED_FORWARD_PROJECTIONS: Template = projections("feed_forward.experts");
/// Llama 4.
static FEED_FORWARD_STACKED: Template = stacked("feed_forward.experts");
/// Gemma 4.
static LAYER_STACKED: Template = stacked("experts");
/// Granite.
static GRANITE: Template = Template::Stacked {
    folder: "block_sparse_moe",
    gate_up: "input_linear",
    down: "output_linear",
    weight: ".weight",
    bias: None,
};

/// Tells experts from the dense rest by tensor name.
///
/// Any prefix before `layers.N.` is accepted (`model.`, `language_model.model.`, `model.language_model.`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Naming {
    templates: Vec<&'static Template>,
    stacked: Option<StackedLayout>,
    layers: Option<usize>,
    quantisation: Quantisation,
}

impl Naming {
    fn of(templates: impl IntoIterator<Item = &'static Template>) -> Self {
        Self {
            templates: templates.into_iter().collect(),
            stacked: None,
            layers: None,
            quantisation: Quantisation::default(),
        }
    }

    /// Every naming that is known. Stacked tensors are taken as [`StackedLayout::Normal`] or
    /// [`StackedLayout::Transposed`], whichever their shapes say (never both); for interleaved ones use
    /// [`Self::with_stacked_layout`].
    pub fn auto() -> Self {
        Self::of([
            &MLP_PROJECTIONS,
            &MLP_STACKED,
            &BLOCK_SPARSE,
            &FEED_FORWARD,
            &FEED_FORWARD_PROJECTIONS,
            &FEED_FORWARD_STACKED,
            &LAYER_STACKED,
            &GRANITE,
        ])
    }

    /// `mlp.experts.E.{gate,up,down}_proj.weight` or `mlp.experts.{gate_up,down}_proj`: Qwen, OLMoE, DeepSeek, GLM.
    pub fn qwen() -> Self {
        Self::of([&MLP_PROJECTIONS, &MLP_STACKED])
    }

    /// `block_sparse_moe.experts.E.{w1,w3,w2}.weight`: Mixtral, Phi-3.5-MoE, MiniMax.
    pub fn mixtral() -> Self {
        Self::of([&BLOCK_SPARSE])
    }

    /// `mlp.experts.{gate_up,down}_proj` with interleaved columns and biases: gpt-oss in BF16.
    pub fn gpt_oss() -> Self {
        Self::of([&MLP_STACKED]).with_stacked_layout(StackedLayout::TransposedInterleaved)
    }

    /// Declares how stacked tensors are laid out, instead of telling by their shapes.
    #[must_use]
    pub fn with_stacked_layout(mut self, layout: StackedLayout) -> Self {
        self.stacked = Some(layout);
        self
    }

    /// Ignores layers numbered `num_hidden_layers` and up: multi-token prediction blocks.
    #[must_use]
    pub fn with_layers(mut self, num_hidden_layers: usize) -> Self {
        self.layers = Some(num_hidden_layers);
        self
    }

    /// Declares how quantised tensors are to be read.
    #[must_use]
    pub fn with_quantisation(mut self, quantisation: Quantisation) -> Self {
        self.quantisation = quantisation;
        self
    }

    /// How quantised tensors are to be read.
    pub fn quantisation(&self) -> &Quantisation {
        &self.quantisation
    }

    /// The declared layout of stacked tensors.
    pub fn stacked_layout(&self) -> Option<StackedLayout> {
        self.stacked
    }

    /// What the tensor `name` is for.
    ///
    /// # Errors
    /// [`Error::UnknownExpertTensor`] for a name that looks like part of a routed expert but is none that this
    /// naming knows, such as parts of an encoding that is not supported.
    pub fn classify(&self, name: &str) -> Result<TensorRole> {
        let parts: Vec<&str> = name.split('.').collect();
        let layer_at = parts.windows(2).position(|w| w[0] == "layers" && number(w[1]).is_some());
        let layer = layer_at.and_then(|at| number(parts[at + 1]));
        let beyond = matches!((layer, self.layers), (Some(layer), Some(layers)) if layer >= layers);
        if beyond || parts[0] == "mtp" {
            return Ok(TensorRole::Ignored);
        }
        if let (Some(layer), Some(at)) = (layer, layer_at) {
            let below = &parts[at + 2..];
            if let Some(found) = self.templates.iter().find_map(|t| t.matches(layer, below)) {
                return Ok(TensorRole::Expert(found));
            }
        }
        if parts.iter().any(|part| looks_like_experts(part)) || is_stacked_granite(&parts) {
            return Err(Error::UnknownExpertTensor { name: name.to_owned(), known: self.known() });
        }
        Ok(TensorRole::Dense)
    }

    /// The name that `matrix` of `expert` would have beside `name`, a tensor of the same layer's experts.
    pub(super) fn sibling(
        &self,
        name: &str,
        expert: Option<usize>,
        matrix: Matrix,
        kind: TensorKind,
    ) -> Option<String> {
        let TensorRole::Expert(seen) = self.classify(name).ok()? else { return None };
        let layer = format!("layers.{}.", seen.layer);
        let (prefix, below) = name.split_at(name.find(&layer)? + layer.len());
        let below: Vec<&str> = below.split('.').collect();
        let template = self.templates.iter().find(|t| t.matches(seen.layer, &below).is_some())?;
        Some(format!("{prefix}{}", template.name(expert, matrix, kind)?))
    }

    /// The known names, for messages.
    fn known(&self) -> String {
        let list: Vec<String> = self.templates.iter().map(|t| t.pattern()).collect();
        format!(
            "layers.N. followed by {}, in BF16, F16 or F32, or quantised: {}",
            list.join(" or "),
            Quantisation::KNOWN
        )
    }
}

impl Template {
    fn matches(&self, layer: usize, below: &[&str]) -> Option<ExpertTensor> {
        match *self {
            Self::PerExpert { folder, gate, up, down } => {
                let [expert, projection, kind] = *strip_folder(below, folder)? else { return None };
                let matrix = [(gate, Matrix::Gate), (up, Matrix::Up), (down, Matrix::Down)]
                    .into_iter()
                    .find_map(|(name, matrix)| (name == projection).then_some(matrix))?;
                let kind = match kind {
                    "weight" => TensorKind::Weight,
                    "bias" => TensorKind::Bias,
                    code if CODES.contains(&code) => TensorKind::Code,
                    companion if COMPANIONS.contains(&companion) => TensorKind::Companion,
                    _ => return None,
                };
                Some(ExpertTensor { layer, expert: Some(number(expert)?), matrix, kind })
            }
            Self::Stacked { folder, gate_up, down, weight, bias } => {
                let name = strip_folder(below, folder)?.join(".");
                [(gate_up, Matrix::GateUp), (down, Matrix::Down)].into_iter().find_map(|(stem, matrix)| {
                    let kind = name.strip_prefix(stem)?;
                    let kind = match kind {
                        kind if kind == weight => TensorKind::Weight,
                        kind if Some(kind) == bias => TensorKind::Bias,
                        "_blocks" if bias.is_some() => TensorKind::Mxfp4Blocks,
                        "_scales" if bias.is_some() => TensorKind::Mxfp4Scales,
                        _ => return None,
                    };
                    Some(ExpertTensor { layer, expert: None, matrix, kind })
                })
            }
        }
    }

    fn name(&self, expert: Option<usize>, matrix: Matrix, kind: TensorKind) -> Option<String> {
        Some(match self {
            Self::PerExpert { folder, gate, up, down } => {
                let projection = match matrix {
                    Matrix::Gate => gate,
                    Matrix::Up => up,
                    Matrix::Down => down,
                    Matrix::GateUp => return None,
                };
                let kind = match kind {
                    TensorKind::Weight => "weight",
                    TensorKind::Bias => "bias",
                    TensorKind::Mxfp4Blocks
                    | TensorKind::Mxfp4Scales
                    | TensorKind::Code
                    | TensorKind::Companion => return None,
                };
                format!("{folder}.{}.{projection}.{kind}", expert?)
            }
            Self::Stacked { folder, gate_up, down, weight, bias } => {
                let stem = match matrix {
                    Matrix::GateUp => gate_up,
                    Matrix::Down => down,
                    Matrix::Gate | Matrix::Up => return None,
                };
                let kind = match kind {
                    TensorKind::Weight => *weight,
                    TensorKind::Bias => (*bias)?,
                    TensorKind::Mxfp4Blocks => "_blocks",
                    TensorKind::Mxfp4Scales => "_scales",
                    TensorKind::Code | TensorKind::Companion => return None,
                };
                format!("{folder}.{stem}{kind}")
            }
        })
    }

    fn pattern(&self) -> String {
        match self {
            Self::PerExpert { folder, gate, up, down } => format!("{folder}.E.{{{gate},{up},{down}}}.weight"),
            Self::Stacked { folder, gate_up, down, weight, .. } => {
                format!("{folder}.{{{gate_up},{down}}}{weight}")
            }
        }
    }
}

fn strip_folder<'a, 'b>(below: &'a [&'b str], folder: &str) -> Option<&'a [&'b str]> {
    folder.split('.').try_fold(below, |rest, part| match rest {
        [first, rest @ ..] if *first == part => Some(rest),
        _ => None,
    })
}

/// Whether a component of a name speaks of routed experts. `shared_experts`, `expert_bias` and the like do not.
fn looks_like_experts(part: &str) -> bool {
    matches!(part, "experts" | "expert" | "switch_mlp" | "local_experts") || part.starts_with("experts_")
}

/// Granite's stacked tensors are told by their own names, under `block_sparse_moe` only (`shared_mlp` has the
/// same names for its dense part).
fn is_stacked_granite(parts: &[&str]) -> bool {
    parts.windows(2).any(|w| w[0] == "block_sparse_moe" && matches!(w[1], "input_linear" | "output_linear"))
}

/// A number written in the only usual way: digits, no sign, no leading zero.
fn number(part: &str) -> Option<usize> {
    let plain = part.bytes().all(|b| b.is_ascii_digit()) && (part == "0" || !part.starts_with('0'));
    if plain { part.parse().ok() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expert(layer: usize, expert: Option<usize>, matrix: Matrix) -> TensorRole {
        TensorRole::Expert(ExpertTensor { layer, expert, matrix, kind: TensorKind::Weight })
    }

    #[test]
    fn names_of_the_published_families() {
        let auto = Naming::auto();
        for (name, role) in [
            ("model.layers.3.mlp.experts.17.gate_proj.weight", expert(3, Some(17), Matrix::Gate)),
            ("model.layers.3.mlp.experts.0.up_proj.weight", expert(3, Some(0), Matrix::Up)),
            (
                "language_model.model.layers.60.mlp.experts.383.down_proj.weight",
                expert(60, Some(383), Matrix::Down),
            ),
            ("model.layers.0.block_sparse_moe.experts.7.w1.weight", expert(0, Some(7), Matrix::Gate)),
            ("model.layers.0.block_sparse_moe.experts.7.w3.weight", expert(0, Some(7), Matrix::Up)),
            ("model.layers.0.block_sparse_moe.experts.7.w2.weight", expert(0, Some(7), Matrix::Down)),
            ("model.layers.2.feed_forward.experts.5.w1.weight", expert(2, Some(5), Matrix::Gate)),
            ("model.layers.2.feed_forward.experts.5.down_proj.weight", expert(2, Some(5), Matrix::Down)),
            ("model.language_model.layers.4.mlp.experts.gate_up_proj", expert(4, None, Matrix::GateUp)),
            ("model.language_model.layers.4.experts.down_proj", expert(4, None, Matrix::Down)),
            (
                "language_model.model.layers.1.feed_forward.experts.gate_up_proj",
                expert(1, None, Matrix::GateUp),
            ),
            ("model.layers.1.block_sparse_moe.input_linear.weight", expert(1, None, Matrix::GateUp)),
            ("model.layers.1.block_sparse_moe.output_linear.weight", expert(1, None, Matrix::Down)),
        ] {
            assert_eq!(auto.classify(name).unwrap(), role, "{name}");
        }
        for (part, expected) in [
            ("qweight", TensorKind::Code),
            ("weight_packed", TensorKind::Code),
            ("weight_scale_inv", TensorKind::Companion),
            ("g_idx", TensorKind::Companion),
        ] {
            let role = auto.classify(&format!("model.layers.3.mlp.experts.3.gate_proj.{part}")).unwrap();
            assert!(
                matches!(role, TensorRole::Expert(ExpertTensor { kind, matrix: Matrix::Gate, .. }) if kind == expected),
                "{part}: {role:?}"
            );
        }
        let bias = Naming::gpt_oss().classify("model.layers.1.mlp.experts.gate_up_proj_bias").unwrap();
        assert!(matches!(
            bias,
            TensorRole::Expert(ExpertTensor { kind: TensorKind::Bias, matrix: Matrix::GateUp, .. })
        ));
    }

    #[test]
    fn routers_shared_experts_and_their_biases_are_dense() {
        for name in [
            "model.embed_tokens.weight",
            "lm_head.weight",
            "model.layers.3.self_attn.q_proj.weight",
            "model.layers.3.mlp.gate.weight",
            "model.layers.3.mlp.gate.wg.weight",
            "model.layers.3.mlp.gate.e_score_correction_bias",
            "model.layers.3.mlp.moe_statics.e_score_correction_bias",
            "model.layers.3.mlp.router.weight",
            "model.layers.3.mlp.shared_expert.gate_proj.weight",
            "model.layers.3.mlp.shared_expert_gate.weight",
            "model.layers.3.mlp.shared_experts.down_proj.weight",
            "model.layers.3.mlp.shared_mlp.down_proj.weight",
            "model.layers.3.shared_mlp.input_linear.weight",
            "model.layers.3.block_sparse_moe.gate.weight",
            "model.layers.3.block_sparse_moe.e_score_correction_bias",
            "model.layers.3.block_sparse_moe.router.layer.weight",
            "model.layers.3.feed_forward.expert_bias",
            "model.layers.3.feed_forward.shared_expert.up_proj.weight",
            "model.layers.3.router.per_expert_scale",
            "model.layers.3.mlp.down_proj.weight",
            "",
            "layers",
            "layers.",
        ] {
            assert_eq!(Naming::auto().classify(name).unwrap(), TensorRole::Dense, "{name}");
        }
    }

    #[test]
    fn what_looks_like_an_expert_and_is_not_known_is_an_error_that_names_it() {
        for name in [
            "model.layers.3.mlp.experts.3.foo_proj.weight",
            "model.layers.3.mlp.experts.3.gate_proj.weight_codebook",
            "model.layers.3.mlp.experts.3.gate_proj.weight.absmax",
            "model.layers.3.mlp.experts.3.gate_proj",
            "model.layers.3.mlp.experts.03.gate_proj.weight",
            "model.layers.3.mlp.experts.+3.gate_proj.weight",
            "model.layers.3.mlp.experts.99999999999999999999999.gate_proj.weight",
            "model.layers.3.mlp.experts.gate_up_proj_codes",
            "model.layers.3.mlp.switch_mlp.gate_proj.weight",
            "model.layers.3.block_sparse_moe.input_linear.qweight",
            "model.layers.x.mlp.experts.3.gate_proj.weight",
            "transformer.blocks.0.ffn.experts.mlp.w1",
            "mlp.experts.3.gate_proj.weight",
        ] {
            let error = Naming::auto().classify(name).unwrap_err();
            assert!(matches!(&error, Error::UnknownExpertTensor { name: n, .. } if n == name), "{name}");
            assert!(error.to_string().contains("block_sparse_moe.experts.E.{w1,w3,w2}.weight"), "{error}");
        }
        // A family's naming refuses the other families' experts.
        assert!(Naming::qwen().classify("model.layers.0.block_sparse_moe.experts.0.w1.weight").is_err());
        assert!(Naming::mixtral().classify("model.layers.0.mlp.experts.0.up_proj.weight").is_err());
    }

    #[test]
    fn multi_token_prediction_is_ignored() {
        let naming = Naming::qwen().with_layers(4);
        let name = |layer| format!("model.layers.{layer}.mlp.experts.0.up_proj.weight");
        assert_eq!(naming.classify(&name(3)).unwrap(), expert(3, Some(0), Matrix::Up));
        for ignored in [&name(4), "model.layers.4.eh_proj.weight", "mtp.layers.0.mlp.experts.0.foo"] {
            assert_eq!(naming.classify(ignored).unwrap(), TensorRole::Ignored, "{ignored}");
        }
    }
}
