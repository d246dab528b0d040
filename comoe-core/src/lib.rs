//! An expert cache for Mixture-of-Experts models on candle.

pub mod backend;
pub mod error;
pub mod expert;
pub mod format;
mod simd;
pub mod store;

pub use error::{Error, Result};
pub use expert::{Activation, ExpertId, ExpertLayout, ExpertSpec, WeightOn};
pub use format::ExpertFormat;
