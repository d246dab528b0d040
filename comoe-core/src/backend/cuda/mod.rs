//! CUDA: the kernels and what launches them.

pub mod kernels;
