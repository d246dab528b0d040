//! What layers are made of. A block takes and gives plain candle tensors, one sequence at a time: `[tokens, width]`.
//!
//! Each fused operation has two paths with the same result up to rounding: a loop over slices for F32 on the CPU,
//! where decode would otherwise spend its time between many small candle operations, and candle operations for
//! everything else. Tests compare the two.

pub(crate) mod attend;
pub mod attention;
pub mod conv;
mod cpu;
pub mod ffn;
mod heads;
pub mod kv_cache;
pub mod latent;
pub mod linear;
pub mod moe;
pub mod norm;
pub mod rope;
pub mod router;
pub mod stale_gate;
