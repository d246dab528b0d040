//! Every test that needs a GPU, in one executable that can be carried to a machine with one:
//!
//!     cargo test --release -p comoe-core --features cuda --test gpu --no-run
//!     gpu --ignored --test-threads 1 --nocapture
#![cfg(feature = "cuda")]

mod ahead;
mod backend;
mod capture;
mod case;
#[path = "../conformance/mod.rs"]
mod conformance;
mod correlate;
mod device;
mod device_timing;
mod elastic;
mod gemm;
mod kernels;
mod later;
mod one_token;
mod peers;
mod pins;
mod prompt;
mod spans;
mod timing;
mod token;
mod traces;
