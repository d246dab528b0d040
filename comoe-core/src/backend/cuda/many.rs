//! The experts' work of many tokens: grouped GEMMs over records as they are in their slots.

use candle_core::DType;

use super::backend::CudaBackend;
use super::ffn::Ffn;
use super::kernels::{
    DeviceItem, GemmDownArgs, GemmGateUpArgs, GemmItems, GemmRoundArgs, GemmTile, gemm_stride,
};
use super::upload::bytes_of;
use crate::error::Result;
use crate::expert::WeightOn;

/// x as the GEMM reads it.
#[derive(Debug, Clone, Copy)]
pub(super) struct GemmX {
    address: u64,
    /// Assignments per row.
    per_row: usize,
}

impl CudaBackend {
    /// Makes x readable for the GEMM: as it is where that goes, else rounded, and weighted where weights go onto the
    /// input.
    pub(super) fn prepare_x(&mut self, ffn: &Ffn) -> Result<GemmX> {
        let hidden = ffn.spec.hidden;
        let on_input = ffn.spec.weight_on == WeightOn::Input;
        let aligned = hidden == gemm_stride(hidden) && ffn.x_address.is_multiple_of(16);
        if ffn.x.dtype() == DType::BF16 && aligned && !on_input {
            return Ok(GemmX { address: ffn.x_address, per_row: ffn.top_k });
        }
        let (rows, weights) = match on_input {
            true => {
                let weights = bytes_of(&ffn.weights);
                let stream = self.compute.stream();
                let at = self.upload.upload(stream, weights.len(), |to| to.copy_from_slice(weights))?;
                (ffn.tokens * ffn.top_k, at)
            }
            false => (ffn.tokens, 0),
        };
        let out = self.rounded.reserve(&self.gpu, 2 * rows * gemm_stride(hidden))?;
        let args = GemmRoundArgs {
            x: ffn.x_address,
            dtype: ffn.x.dtype(),
            rows,
            cols: hidden,
            weights,
            top_k: ffn.top_k,
            out,
        };
        // SAFETY: x lives in the step; weights were just uploaded, one for each assignment; `out` has a row for each.
        unsafe { self.kernels.gemm_round(self.compute.stream(), &args) }?;
        Ok(GemmX { address: out, per_row: if on_input { 1 } else { ffn.top_k } })
    }

    /// Enqueues gate_up and down of `items`, whose assignments were checked.
    pub(super) fn multiply_many(
        &mut self,
        ffn: &Ffn,
        x: GemmX,
        items: &[DeviceItem],
        assignments: &[u32],
    ) -> Result<()> {
        let tiles = GemmTile::of(items.iter().map(|i| i.count));
        let [items_at, list_at, tiles_at] =
            self.upload_parts([bytes_of(items), bytes_of(assignments), bytes_of(&tiles)])?;
        let items = GemmItems {
            layout: &ffn.layout,
            items: items_at,
            assignments: list_at,
            tiles: tiles_at,
            len: tiles.len(),
        };
        let h = self.hidden.address();
        let gate_up =
            GemmGateUpArgs { items, activation: ffn.spec.activation, x: x.address, per_row: x.per_row, h };
        let down = GemmDownArgs { items, h, partial: self.partial.address() };
        let stream = self.compute.stream();
        // SAFETY: x lives in the step, or in a workspace that the next step rewrites behind these kernels; items,
        // assignments and tiles were just uploaded on this stream; h and partial have a row per assignment; records
        // are in slots that compute was made to wait for.
        unsafe {
            self.kernels.gemm_gate_up(stream, &gate_up)?;
            self.kernels.gemm_down(stream, &down)
        }
    }
}
