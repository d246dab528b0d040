//! The CPU backend.

mod activation;
#[allow(dead_code)]
mod decode;
#[allow(dead_code)]
mod kernels;
