//! LFM2's short convolution: each channel of a gated input is convolved with its last few positions.
//!
//! The gated inputs of all positions are kept in place of keys, so a sequence can be cut back to any length, as with
//! attention.

use candle_core::{Result, Tensor};

use super::kv_cache::LayerKv;
use super::linear::Linear;
use super::step::Step;

/// `out(c * conv(b * x))` with `b, c, x = in(input)`.
#[derive(Debug, Clone)]
pub struct ShortConv {
    input: Linear,
    /// `[width, taps]`, oldest tap first.
    kernel: Tensor,
    /// The same for each tap: `[width]`.
    taps: Vec<Tensor>,
    bias: Option<Tensor>,
    out: Linear,
}

impl ShortConv {
    /// From the input projection `[3 width, width]`, the kernel `[width, 1, taps]`, its bias `[width]`, and the output
    /// projection.
    ///
    /// # Errors
    /// Those of candle.
    pub fn new(input: Linear, kernel: &Tensor, bias: Option<Tensor>, out: Linear) -> Result<Self> {
        let kernel = kernel.squeeze(1)?.contiguous()?;
        let taps = (0..kernel.dim(1)?).map(|i| kernel.narrow(1, i, 1)?.flatten_all()?.contiguous());
        Ok(Self { input, kernel: kernel.clone(), taps: taps.collect::<Result<_>>()?, bias, out })
    }

    /// Mixes `x [tokens, width]` with the positions before it. Appends to `kv`.
    ///
    /// # Errors
    /// Those of candle. The caller has checked that the cache has room.
    pub fn forward(&self, x: &Tensor, kv: &LayerKv, step: Step<'_>) -> Result<Tensor> {
        let (tokens, width) = x.dims2()?;
        let parts = self.input.forward(x, step)?;
        let position = match step {
            Step::At(position) => position,
            Step::Fused(fused) => {
                let mixed = fused.short_conv(&parts, &self.kernel, self.bias.as_ref(), kv)?;
                return self.out.forward(&mixed, step);
            }
        };
        let part = |i: usize| parts.narrow(1, i * width, width)?.contiguous();
        let (b, c, x) = (part(0)?, part(1)?, part(2)?);
        let all = kv.append_row(position, &(b * x)?.unsqueeze(0)?)?.squeeze(0)?;
        let mut sum: Option<Tensor> = None;
        for (i, tap) in self.taps.iter().rev().enumerate() {
            // The inputs `i` positions back; before the beginning they are zero.
            let missing = i.saturating_sub(position).min(tokens);
            let mut shifted = all.narrow(0, (position + missing).saturating_sub(i), tokens - missing)?;
            if missing > 0 {
                shifted = shifted.pad_with_zeros(0, missing, 0)?;
            }
            let term = shifted.broadcast_mul(tap)?;
            sum = Some(match sum {
                Some(sum) => (sum + term)?,
                None => term,
            });
        }
        let Some(mut mixed) = sum else { candle_core::bail!("a convolution without taps") };
        if let Some(bias) = &self.bias {
            mixed = mixed.broadcast_add(bias)?;
        }
        self.out.forward(&(c * mixed)?, step)
    }
}
