//! GGUF files (llama.cpp's format) as checkpoints: a reader of their headers that believes nothing it has not checked,
//! their block types, and their tensors under the names of the hub.

mod file;
mod matrix;
mod names;
#[cfg(test)]
mod tests;
mod types;
#[cfg(test)]
pub(super) mod writer;

pub use file::{Gguf, GgufValue};
pub use matrix::Ggml;
pub use names::ARCHITECTURES;
pub use types::GgmlType;
