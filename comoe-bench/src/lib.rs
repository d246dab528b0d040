//! Benchmarks of CoMoE, and synthetic models of real shapes.
//!
//! `benches/` holds the criterion benches; the binary measures what needs a big model or a GPU. Reading order: [`shape`]
//! (which models), [`synth`] and [`dense`] (their weights), [`decode`] (a model of a shape, run), [`steps`] (on a
//! GPU token by token), [`tiny`] (comoe-tiny,
//! run), `transfer` (the link; feature `cuda`), [`report`] (how results are shown).

pub mod counting;
pub mod decode;
pub mod dense;
pub mod error;
#[cfg(feature = "cuda")]
pub mod gpu;
pub mod noise;
pub mod null;
pub mod report;
pub mod shape;
pub mod steps;
pub mod synth;
pub mod tiny;
#[cfg(feature = "cuda")]
pub mod transfer;

pub use error::{Error, Result};
