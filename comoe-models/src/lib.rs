//! Models.
#![allow(missing_docs, dead_code)]
pub mod arch;
pub mod blocks;
pub mod chat;
pub mod error;
pub mod load;
pub mod sampler;
pub use error::{Error, Result};
