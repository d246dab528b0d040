//! Text in, text out: tokenizer, chat template, stop rules, conversation.

mod conversation;
mod detokenizer;
mod gguf_tokenizer;
mod json;
mod merges;
mod python;
mod source;
mod stop;
mod template;
mod thinking;
mod tiktoken;
mod tokenizer;

pub use conversation::{Conversation, Reply};
pub use detokenizer::Detokenizer;
pub(crate) use gguf_tokenizer::gguf_tokenizer;
pub use stop::StopStrings;
pub use template::{ChatTemplate, Message, Role};
pub use thinking::{Part, Thinking};
pub use tokenizer::Tokenizer;
