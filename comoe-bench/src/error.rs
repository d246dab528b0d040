//! What can go wrong while measuring.

use std::path::PathBuf;

/// Why there is no measurement.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The cache said no.
    #[error(transparent)]
    Core(#[from] comoe_core::Error),
    /// The model said no.
    #[error(transparent)]
    Models(#[from] comoe_models::Error),
    /// candle said no.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
    /// A file could not be written or read.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
    /// The weights of the dense part could not be written.
    #[error("{path}: {reason}")]
    Weights {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A plot could not be drawn.
    #[error("{path}: the plot cannot be drawn: {reason}")]
    Plot {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// No shape of this name.
    #[error("shape {asked:?} is unknown: use one of {known}")]
    UnknownShape {
        /// What was asked for.
        asked: String,
        /// What there is.
        known: String,
    },
    /// A shape whose dense part cannot be made.
    #[error(
        "the dense part of {shape} cannot be made yet: measure its experts alone, with `comoe-bench decode --part experts`"
    )]
    NoDensePart {
        /// The shape.
        shape: String,
    },
    /// An option that does not fit.
    #[error("{option} {value}: {expected}")]
    BadOption {
        /// The option.
        option: &'static str,
        /// What was asked for.
        value: String,
        /// What would work.
        expected: String,
    },
}

impl Error {
    /// Names the file that an I/O error is about.
    pub fn io(path: impl Into<PathBuf>, source: std::io::Error) -> Self {
        Self::Io { path: path.into(), source }
    }
}

/// What this crate's functions return.
pub type Result<T> = std::result::Result<T, Error>;
