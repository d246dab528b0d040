//! An expert cache for Mixture-of-Experts models on candle.

pub mod backend;
mod cache;
pub mod error;
pub mod expert;
pub mod format;
pub mod machine;
pub mod policy;
pub mod pool;
pub mod predict;
mod schedule;
#[cfg(test)]
mod schedule_tests;
mod simd;
pub mod stats;
pub mod store;
mod sys;

pub use backend::cuda::{CudaOptions, cuda_device, cuda_device_count};
pub use cache::{CacheBuilder, CacheLayer, CacheOptions, Capacity, ExpertCache, RecordCache, Scope};
pub use error::{Error, Result};
pub use expert::{Activation, ExpertId, ExpertLayout, ExpertSpec, WeightOn};
pub use format::ExpertFormat;
pub use policy::PolicyKind;
pub use predict::Prefetch;
pub use schedule::{PrefetchTrigger, Rules};
pub use stats::CacheStats;
pub use store::ExpertStore;
