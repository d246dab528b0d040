//! The program as a whole, run over small checkpoints with random weights, and over comoe-tiny.

mod bad_input;
mod chat;
mod checkpoint;
mod comoe_tiny;
#[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
mod faults;
mod generate;
mod hub;
#[cfg(unix)]
mod interrupted;
mod limits;
mod logits;
#[cfg(target_os = "linux")]
mod memory;
mod models;
mod outputs;
mod pack;
mod pins;
mod plan;
mod predictor;
mod program;
#[cfg(target_os = "linux")]
mod terminal;
mod tiers;
mod trace;
