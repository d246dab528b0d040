//! The dense feed-forward part: a gated linear unit (Shazeer 2020, arXiv 2002.05202).

use candle_core::{CpuStorage, CustomOp1, D, Layout, Result, Shape, Tensor};
use comoe_core::Activation;

use super::cpu;
use super::linear::Linear;
use super::step::Step;

/// `down(act(gate x) * up x)`.
#[derive(Debug, Clone)]
pub struct DenseFfn {
    gate_up: Linear,
    down: Linear,
    activation: Activation,
}

impl DenseFfn {
    /// From the gate's rows above the up projection's, `[2 intermediate, hidden]`, and the down projection.
    pub fn new(gate_up: Linear, down: Linear, activation: Activation) -> Self {
        Self { gate_up, down, activation }
    }

    /// `x [tokens, hidden]` to the same shape.
    ///
    /// # Errors
    /// Those of candle.
    pub fn forward(&self, x: &Tensor, step: Step<'_>) -> Result<Tensor> {
        let both = self.gate_up.forward(x, step)?;
        let inner = match step {
            Step::Fused(fused) => fused.gated(&both, self.activation)?,
            Step::At(_) => gated(self.activation, &both)?,
        };
        self.down.forward(&inner, step)
    }
}

/// `act(x[.., ..width]) * x[.., width..]`: `[tokens, 2 width]` to `[tokens, width]`.
fn gated(activation: Activation, x: &Tensor) -> Result<Tensor> {
    if activation == Activation::Silu && cpu::applies(x) {
        return x.apply_op1_no_bwd(&SwiGlu);
    }
    let width = x.dim(D::Minus1)? / 2;
    let (gate, up) = (x.narrow(D::Minus1, 0, width)?, x.narrow(D::Minus1, width, width)?);
    match activation {
        Activation::Silu => gate.silu()? * up,
        Activation::GeluTanh => gate.gelu()? * up,
        other => candle_core::bail!("{other:?} is an activation of routed experts only"),
    }
}

struct SwiGlu;

impl CustomOp1 for SwiGlu {
    fn name(&self) -> &'static str {
        "swiglu"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let x = cpu::slice(x, layout)?;
        let (tokens, both) = layout.shape().dims2()?;
        let width = both / 2;
        let mut out = vec![0f32; tokens * width];
        cpu::for_chunks(&mut out, width, x.len(), |t, out| {
            let (gate, up) = x[t * both..][..both].split_at(width);
            for ((o, g), u) in out.iter_mut().zip(gate).zip(up) {
                *o = g / (1.0 + (-g).exp()) * u;
            }
        });
        Ok((CpuStorage::F32(out), (tokens, width).into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{close, random};

    #[test]
    fn swiglu_agrees_with_candle() {
        for tokens in [1, 5, 600] {
            let x = random(&[tokens, 2 * 96], 1);
            let want = (x.narrow(1, 0, 96).unwrap().silu().unwrap() * x.narrow(1, 96, 96).unwrap()).unwrap();
            close(&gated(Activation::Silu, &x).unwrap(), &want, 1e-6);
        }
    }
}
