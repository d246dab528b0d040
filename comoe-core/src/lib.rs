//! An expert cache for Mixture-of-Experts models on [candle](https://github.com/huggingface/candle).
//!
//! MoE models activate few experts per token, but all of them together do not fit in the memory of one consumer GPU.
//! This crate keeps every expert in host memory, a preallocated pool of slots on the device, and a scheduler that makes
//! the transfers few, early and overlapped. Output never depends on how many slots there are.
//!
//! It knows no model: a model keeps its router, and gives everything after top-k to the cache.
//!
//! ```
//! use candle_core::{DType, Device, Tensor};
//! use comoe_core::store::Naming;
//! use comoe_core::{Capacity, ExpertCache, ExpertFormat, ExpertStore, PolicyKind};
//!
//! # fn main() -> comoe_core::Result<()> {
//! # let folder = std::env::temp_dir().join(format!("comoe-core-doc-{}", std::process::id()));
//! # std::fs::create_dir_all(&folder).unwrap();
//! # let file = folder.join("model.safetensors");
//! # let mut tensors = std::collections::HashMap::new();
//! # for e in 0..8 {
//! #     for (part, rows, cols) in [("gate", 32, 64), ("up", 32, 64), ("down", 64, 32)] {
//! #         let w = Tensor::randn(0f32, 0.1, (rows, cols), &Device::Cpu)?.to_dtype(DType::BF16)?;
//! #         tensors.insert(format!("model.layers.0.mlp.experts.{e}.{part}_proj.weight"), w);
//! #     }
//! # }
//! # candle_core::safetensors::save(&tensors, &file)?;
//! let device = Device::Cpu;
//! let store = ExpertStore::open(&[&file], &Naming::qwen())?      // safetensors shards, or a packed file
//!     .into_format(ExpertFormat::INT8)?;
//! let cache = ExpertCache::builder(store, &device)
//!     .capacity(Capacity::Slots(4))                              // or All, Bytes(12 << 30), Fraction(0.5)
//!     .policy(PolicyKind::Lru)
//!     .build()?;
//!
//! // Inside a model's MoE block, after its own router:
//! let x = Tensor::randn(0f32, 1.0, (3, 64), &device)?;           // [tokens, hidden]
//! let ids = Tensor::new(&[[0u32, 5], [5, 2], [7, 0]], &device)?; // [tokens, top-k]
//! let weights = Tensor::new(&[[0.7f32, 0.3], [0.6, 0.4], [0.5, 0.5]], &device)?;
//! let y = cache.layer(0).forward(&x, &ids, &weights)?;           // [tokens, hidden]
//! assert_eq!(y.dims(), [3, 64]);
//! println!("{}", cache.stats());
//! # std::fs::remove_dir_all(&folder).ok();
//! # Ok(())
//! # }
//! ```
//!
//! Other entry points: [`RecordCache`] caches records that are no experts; [`backend::Backend`] is what a device must
//! do; [`policy`] and [`predict`] are pure and usable alone; [`backend::sim`] simulates a device for tests.

pub mod backend;
mod cache;
pub mod error;
pub mod expert;
pub mod format;
mod framed;
pub mod machine;
pub mod placement;
pub mod plan;
pub mod policy;
pub mod pool;
pub mod predict;
pub mod replay;
mod schedule;
#[cfg(test)]
mod schedule_tests;
mod simd;
pub mod size;
mod slab;
pub mod stats;
pub mod store;
mod sys;
pub mod trace;
mod whole_file;

pub use backend::cuda::{
    CudaOptions, ResidentFormat, cuda_device, cuda_device_count, cuda_give_back, cuda_memory, cuda_pool,
};
pub use backend::{DriverKind, PageLocking, PeerAccess};
pub use cache::{
    CacheBuilder, CacheLayer, CacheOptions, Capacity, Devices, ExpertCache, RecordCache, Scope, SlotsInForce,
    Token, TokenOutcome,
};
pub use error::{Error, Result, is_out_of_memory};
pub use expert::{Activation, ExpertId, ExpertLayout, ExpertSpec, WeightOn};
pub use format::ExpertFormat;
pub use policy::PolicyKind;
pub use predict::Prefetch;
pub use schedule::{PrefetchTrigger, Rules};
pub use stats::CacheStats;
pub use store::ExpertStore;
pub use whole_file::WholeFile;
