//! Where a step is in its sequence, and whose operations it goes through.

use super::fused;

/// Positions that a fused step sees at least: shorter sequences share it.
pub(crate) const LEAST_REACH: usize = 512;

/// What blocks know of a step besides their input.
///
/// Steps of few tokens on a GPU are fused: their kernels read the position from the device's memory, so nothing of the
/// host is in them and a graph may hold them. That a block cannot ask a fused step for its position keeps it so.
#[derive(Clone, Copy)]
pub enum Step<'a> {
    /// Candle's operations, on the CPU with shortcuts over slices; the first token is at this position.
    At(usize),
    /// Fused kernels on a GPU.
    Fused(&'a fused::Step<'a>),
}
