//! Mixture-of-Experts language models on candle whose experts live in a `comoe-core` cache.
//!
//! ```no_run
//! use std::io::Write;
//! use std::ops::ControlFlow;
//! use std::path::Path;
//!
//! use candle_core::Device;
//! use comoe_core::{CacheOptions, Capacity};
//! use comoe_models::{Event, GenerateOptions, LoadOptions, Model, Progress, SamplerOptions};
//!
//! # fn main() -> comoe_models::Result<()> {
//! let options = LoadOptions {
//!     cache: CacheOptions { capacity: Capacity::Slots(48), ..CacheOptions::default() },
//!     ..LoadOptions::default()
//! };
//! let model = Model::load(Path::new("assets/comoe-tiny"), &Device::Cpu, &options, &|p| {
//!     if let Progress::Dense { done, total } = p {
//!         eprint!("\rloading {done} of {total} bytes");
//!     }
//! })?;
//! let sampler = SamplerOptions { temperature: 0.7, top_p: 0.9, seed: 1, ..Default::default() };
//! let options = GenerateOptions { sampler, max_tokens: Some(200), ..Default::default() };
//! let mut show = |event: Event<'_>| {
//!     if let Event::Text(text) = event {
//!         print!("{text}");
//!         // A closed pipe, or Ctrl-C, breaks the answer off.
//!         if std::io::stdout().flush().is_err() {
//!             return ControlFlow::Break(());
//!         }
//!     }
//!     ControlFlow::Continue(())
//! };
//!
//! // Turns of a chat: keys and values of the common prefix are kept, old turns leave when the context is full.
//! let mut chat = model.conversation(None)?;
//! let reply = chat.say("What is 17 plus 25?", &options, &mut show)?;
//! eprintln!("{} turns dropped, {:?}", reply.dropped_turns, reply.generation.finish);
//!
//! // Without a template: plain text in, plain text on.
//! let prompt = model.tokenizer().encode("Once upon a time", true)?;
//! let answer = model.session()?.generate(&prompt, &options, &mut show)?;
//! eprintln!("{:.1} tokens/s", answer.timings.decode_tokens_per_second());
//! eprintln!("{}", model.experts().stats());
//! # Ok(())
//! # }
//! ```
//!
//! Reading order: [`arch`] turns a `config.json` into a plan of blocks, [`load`] brings the dense weights, [`blocks`]
//! are what layers are made of, [`Decoder`] runs them, [`generate`] is the loop around it, [`chat`] turns messages into
//! tokens and back, [`Model`] is the door to all of it; [`evaluate`] compares two.

pub mod arch;
pub mod blocks;
pub mod chat;
mod chunk;
#[cfg(feature = "cuda")]
pub mod cuda;
#[cfg(feature = "cuda")]
mod decode_graph;
#[cfg(not(feature = "cuda"))]
#[path = "decode_graph_none.rs"]
mod decode_graph;
mod decoder;
pub mod error;
pub mod evaluate;
pub mod generate;
#[cfg(test)]
#[path = "../../comoe-core/src/store/gguf/writer.rs"]
#[allow(dead_code, reason = "shared with comoe-core's tests, which use more of it")]
mod gguf_writer;
mod grow;
pub mod load;
mod memory;
mod model;
#[cfg(test)]
mod model_tests;
mod sampler;
mod step_profile;
#[cfg(test)]
mod testing;
#[cfg(any(test, feature = "cuda"))]
mod trial;

pub use chat::{Conversation, Message, Reply, Role};
pub use decode_graph::DeviceSteps;
pub use decoder::{Decoder, Rows};
pub use error::{Error, Result};
pub use generate::{Event, Finish, GenerateOptions, Generation, Session, Timings};
pub use load::{
    DEFAULT_CONTEXT, DEVICE_MARGIN, DenseFormat, KvFormat, KvPart, LoadOptions, ModelPlan, Progress, Target,
};
pub use memory::{MeasuredMemory, NowAndPeak};
pub use model::Model;
pub use sampler::{Sampler, SamplerOptions};
pub use step_profile::{PartTime, Profile};
