//! From a model folder to blocks: the configuration, the dense part, the experts.

mod config;

pub use config::ConfigFile;
