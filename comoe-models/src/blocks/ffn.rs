//! The dense feed-forward part: SwiGLU (Shazeer 2020, arXiv 2002.05202).

use candle_core::{CpuStorage, CustomOp1, D, Layout, Result, Shape, Tensor};

use super::cpu;
use super::linear::Linear;

/// `down(silu(gate x) * up x)`.
#[derive(Debug, Clone)]
pub struct DenseFfn {
    gate_up: Linear,
    down: Linear,
}

impl DenseFfn {
    /// From the gate's rows above the up projection's, `[2 intermediate, hidden]`, and the down projection.
    pub fn new(gate_up: Linear, down: Linear) -> Self {
        Self { gate_up, down }
    }

    /// `x [tokens, hidden]` to the same shape.
    ///
    /// # Errors
    /// Those of candle.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.down.forward(&swiglu(&self.gate_up.forward(x)?)?)
    }
}

/// `silu(x[.., ..width]) * x[.., width..]`: `[tokens, 2 width]` to `[tokens, width]`.
fn swiglu(x: &Tensor) -> Result<Tensor> {
    if cpu::applies(x) {
        return x.apply_op1_no_bwd(&SwiGlu);
    }
    let width = x.dim(D::Minus1)? / 2;
    x.narrow(D::Minus1, 0, width)?.silu()? * x.narrow(D::Minus1, width, width)?
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
            close(&swiglu(&x).unwrap(), &want, 1e-6);
        }
    }
}
