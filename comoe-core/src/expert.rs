//! What is an expert? Its identity, what it computes, and where its parts lie inside a record.

use crate::format::ExpertFormat;

/// Names one record: `expert` of `layer`.
///
/// `layer` is the model's own layer number (layers without experts simply have no ids). A cache of records that
/// are no experts uses the pair as any two-part key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ExpertId {
    /// The model's layer number.
    pub layer: usize,
    /// The expert's number within its layer.
    pub expert: usize,
}

impl std::fmt::Display for ExpertId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "layer {} expert {}", self.layer, self.expert)
    }
}

/// The gate's non-linearity.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum Activation {
    /// `silu(gate) * up` (SwiGLU; Shazeer 2020, arXiv 2002.05202).
    Silu,
    /// `gelu_tanh(gate) * up` (GeGLU with the tanh approximation).
    GeluTanh,
    /// gpt-oss: `g = min(gate, limit)`, `u = clamp(up, -limit, limit)`, `(u + 1) * g * sigmoid(alpha * g)`.
    SwigluClamped {
        /// Bound of gate and up.
        limit: f32,
        /// Slope inside the sigmoid.
        alpha: f32,
    },
}

/// Where a routing weight is multiplied in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightOn {
    /// On the expert's output (nearly every family).
    Output,
    /// On the expert's input (Llama 4).
    Input,
}

/// What a record computes: `down(act(gate x) * up x)`, with or without biases.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExpertSpec {
    /// Width of the expert's input and output.
    pub hidden: usize,
    /// Width between the two projections.
    pub intermediate: usize,
    /// The gate's non-linearity.
    pub activation: Activation,
    /// Whether gate, up and down have biases.
    pub bias: bool,
    /// Where the routing weight is multiplied in.
    pub weight_on: WeightOn,
}

impl ExpertSpec {
    /// A bias-free SwiGLU expert with the weight on its output: what most families have.
    pub fn swiglu(hidden: usize, intermediate: usize) -> Self {
        Self { hidden, intermediate, activation: Activation::Silu, bias: false, weight_on: WeightOn::Output }
    }
}

/// One weight matrix `[rows, cols]` inside a record: row `r`'s weights start at `weights + r * row_bytes`, its
/// scales (quantised formats) at `scales + r * scale_row_bytes`. Every offset and stride is a multiple of 16 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MatrixLayout {
    /// Output features.
    pub rows: usize,
    /// Input features.
    pub cols: usize,
    /// Byte offset of row 0's weights.
    pub weights: usize,
    /// Bytes from one row's weights to the next.
    pub row_bytes: usize,
    /// Byte offset of row 0's scales (unused when `scale_row_bytes` is 0).
    pub scales: usize,
    /// Bytes from one row's scales to the next; 0 for formats without scales.
    pub scale_row_bytes: usize,
}

/// Byte offsets of the three bias vectors, each F32.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BiasLayout {
    /// `[intermediate]`
    pub gate: usize,
    /// `[intermediate]`
    pub up: usize,
    /// `[hidden]`
    pub down: usize,
}

/// Alignment of a record in a store and of a slot in a pool, in bytes.
pub const RECORD_ALIGN: usize = 512;

const SECTION_ALIGN: usize = 16;

/// Where the parts of an expert lie inside its record.
///
/// Planar, in this order: gate rows, up rows, gate scales, up scales, down rows, down scales, biases. Rows and
/// sections are padded to 16 bytes so that every vector load is aligned; the record to [`RECORD_ALIGN`]. Padding is
/// zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertLayout {
    /// How the weights are encoded.
    pub format: ExpertFormat,
    /// `[intermediate, hidden]`
    pub gate: MatrixLayout,
    /// `[intermediate, hidden]`
    pub up: MatrixLayout,
    /// `[hidden, intermediate]`
    pub down: MatrixLayout,
    /// Present when the spec has biases.
    pub bias: Option<BiasLayout>,
    /// Size of the record, a multiple of [`RECORD_ALIGN`].
    pub record_bytes: usize,
}

impl ExpertLayout {
    /// Lays out one expert of `spec` in `format`.
    pub fn new(spec: &ExpertSpec, format: ExpertFormat) -> Self {
        let mut at = 0;
        let mut section = |bytes: usize| {
            let start = at;
            at = (at + bytes).next_multiple_of(SECTION_ALIGN);
            start
        };
        let (wide, narrow) = (format.row_bytes(spec.hidden), format.row_bytes(spec.intermediate));
        let (wide_s, narrow_s) =
            (format.scale_row_bytes(spec.hidden), format.scale_row_bytes(spec.intermediate));
        let gate_w = section(spec.intermediate * wide);
        let up_w = section(spec.intermediate * wide);
        let gate_s = section(spec.intermediate * wide_s);
        let up_s = section(spec.intermediate * wide_s);
        let down_w = section(spec.hidden * narrow);
        let down_s = section(spec.hidden * narrow_s);
        let bias = spec.bias.then(|| BiasLayout {
            gate: section(4 * spec.intermediate),
            up: section(4 * spec.intermediate),
            down: section(4 * spec.hidden),
        });
        let wide_matrix = |weights, scales| MatrixLayout {
            rows: spec.intermediate,
            cols: spec.hidden,
            weights,
            row_bytes: wide,
            scales,
            scale_row_bytes: wide_s,
        };
        let gate = wide_matrix(gate_w, gate_s);
        let up = wide_matrix(up_w, up_s);
        let down = MatrixLayout {
            rows: spec.hidden,
            cols: spec.intermediate,
            weights: down_w,
            row_bytes: narrow,
            scales: down_s,
            scale_row_bytes: narrow_s,
        };
        Self { format, gate, up, down, bias, record_bytes: at.next_multiple_of(RECORD_ALIGN) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn qwen3_30b_int4_record_is_what_the_model_table_says() {
        // 4.25 bits a weight at group 64 (f16 scales): 3 * 2048 * 768 * 4.25 / 8 = 2,506,752 bytes, and 8 bytes of
        // padding behind each of the 2,048 down scale rows (12 scales of 2 bytes, padded to 32).
        let layout = ExpertLayout::new(&ExpertSpec::swiglu(2048, 768), ExpertFormat::Int4 { group: 64 });
        assert_eq!(layout.record_bytes, 2_506_752 + 2048 * 8);
    }

    #[test]
    fn ragged_dimensions_keep_every_offset_aligned() {
        for format in ExpertFormat::all_for_tests() {
            for (hidden, intermediate) in [(2880, 2880), (704, 1408), (16, 48), (20, 12), (1, 1)] {
                let spec = ExpertSpec { bias: true, ..ExpertSpec::swiglu(hidden, intermediate) };
                let l = ExpertLayout::new(&spec, format);
                let b = l.bias.unwrap();
                for v in [l.gate, l.up, l.down]
                    .iter()
                    .flat_map(|m| [m.weights, m.row_bytes, m.scales, m.scale_row_bytes])
                {
                    assert_eq!(v % 16, 0, "{format} {hidden}x{intermediate}");
                }
                assert!(
                    b.gate.is_multiple_of(16)
                        && b.up.is_multiple_of(16)
                        && b.down + 4 * hidden <= l.record_bytes
                );
                assert_eq!(l.record_bytes % RECORD_ALIGN, 0);
            }
        }
    }
}
