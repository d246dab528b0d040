//! What layers are made of. A block takes and gives plain candle tensors, one sequence at a time: `[tokens, width]`.
//!
//! Each fused operation has three paths with the same result up to rounding: a loop over slices for F32 on the CPU,
//! where decode would otherwise spend its time between many small candle operations; kernels of this crate for few
//! tokens on a GPU, for the same reason ([`fused`]); and candle operations for everything else. Tests compare them.

#[cfg(any(test, feature = "cuda"))]
mod arena;
pub(crate) mod attend;
pub mod attention;
pub mod conv;
mod cpu;
pub mod ffn;
#[cfg(feature = "cuda")]
pub mod fused;
#[cfg(not(feature = "cuda"))]
#[path = "fused_none.rs"]
pub mod fused;
mod heads;
pub mod int8;
pub mod int8_matrix;
pub mod int8_rows;
pub mod kv_cache;
pub mod latent;
pub mod linear;
pub mod moe;
pub mod norm;
pub mod prefill_attention;
pub mod rope;
pub mod router;
pub mod stale_gate;
pub mod step;
