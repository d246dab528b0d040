//! Benchmarks of CoMoE, and synthetic models of real shapes.
//!
//! `benches/` holds the criterion benches; the binary measures what needs a big model or a GPU. Reading order: [`shape`]
//! (which models), [`synth`], [`dense`] and [`synth_model`] (their weights), [`decode`] and [`prefill`] (a model of a shape, run), [`steps`]
//! (on a GPU token by token), [`tiny`] (comoe-tiny,
//! run), [`formats`] (its formats at equal bytes), [`reading`] (a packed store from disk), `transfer` (the link; feature `cuda`), [`report`], [`plot`] and
//! [`timeline`] (how results are shown).

pub mod counting;
pub mod decode;
pub mod dense;
pub mod error;
pub mod formats;
#[cfg(feature = "cuda")]
pub mod gpu;
pub mod noise;
pub mod null;
pub mod plot;
pub mod prefill;
pub mod reading;
pub mod report;
pub mod shape;
pub mod steps;
pub mod synth;
pub mod synth_model;
pub mod timeline;
pub mod tiny;
#[cfg(feature = "cuda")]
pub mod transfer;

pub use error::{Error, Result};
