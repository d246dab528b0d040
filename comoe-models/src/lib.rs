//! Models.

#[cfg(feature = "cuda")]
pub mod cuda;
