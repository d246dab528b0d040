//! The gate's non-linearity, in F32. NaN stays NaN.

use crate::expert::Activation;

/// `act(gate) * up` as [`Activation`] defines it.
#[inline]
pub(super) fn apply(activation: Activation, gate: f32, up: f32) -> f32 {
    match activation {
        Activation::Silu => gate * sigmoid(gate) * up,
        Activation::GeluTanh => {
            // sqrt(2 / pi) and 0.044715: Hendrycks and Gimpel 2016, arXiv 1606.08415.
            const SQRT_2_OVER_PI: f32 = 0.797_884_6;
            0.5 * gate * (1.0 + (SQRT_2_OVER_PI * (gate + 0.044_715 * gate * gate * gate)).tanh()) * up
        }
        Activation::SwigluClamped { limit, alpha } => {
            // Comparisons rather than min and clamp, which would turn a NaN gate into `limit`.
            let g = if gate > limit { limit } else { gate };
            let u = if up > limit {
                limit
            } else if up < -limit {
                -limit
            } else {
                up
            };
            (u + 1.0) * g * sigmoid(alpha * g)
        }
    }
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}
