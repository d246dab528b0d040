//! The tests of this crate that need a GPU, in one executable. Where it runs without this checkout, COMOE_ASSETS names
//! the `assets` folder of another:
//!
//!     cargo test --release -p comoe-models --features cuda --test gpu -- --ignored --test-threads 1
#![cfg(feature = "cuda")]

#[path = "gpu/ahead.rs"]
mod ahead;
#[path = "distance/mod.rs"]
mod distance;
#[path = "gpu/elastic.rs"]
mod elastic;
#[path = "gpu/exactness.rs"]
mod exactness;
#[path = "gpu/failures.rs"]
mod failures;
#[path = "files/mod.rs"]
mod files;
#[path = "gpu/formats.rs"]
mod formats;
#[path = "gpu/graph.rs"]
mod graph;
#[path = "gpu/kernels/mod.rs"]
mod kernels;
#[path = "gpu/kv_format.rs"]
mod kv_format;
#[path = "gpu/memory.rs"]
mod memory;
#[path = "gpu/prefill.rs"]
mod prefill;
#[path = "gpu/several.rs"]
mod several;
#[path = "gpu/spans.rs"]
mod spans;
#[path = "gpu/synthetic.rs"]
mod synthetic;
#[path = "gpu/tiny.rs"]
mod tiny;
