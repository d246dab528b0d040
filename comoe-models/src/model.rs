//! The door: a model folder becomes a model that answers.

use std::path::Path;

use candle_core::Device;
use comoe_core::ExpertCache;

use crate::arch;
use crate::chat::{ChatTemplate, Conversation, Tokenizer};
use crate::decoder::Decoder;
use crate::error::{Error, Result};
use crate::generate::Session;
use crate::load::{LoadOptions, ModelFiles, Progress, open_decoder};

/// A loaded model: the decoder with its expert cache, tokenizer, chat template and stop tokens.
pub struct Model {
    decoder: Decoder,
    tokenizer: Tokenizer,
    template: Option<ChatTemplate>,
    stop: Vec<u32>,
}

impl Model {
    /// Loads a folder in Hugging Face layout: `config.json`, `tokenizer.json`, safetensors shards and, where there
    /// are such, `generation_config.json`, `tokenizer_config.json` and `chat_template.jinja`; or a packed file or a
    /// GGUF file, which have all of these.
    ///
    /// # Errors
    /// Names the file, tensor or field that is missing or wrong, and what would work.
    pub fn load(
        path: &Path,
        device: &Device,
        options: &LoadOptions,
        progress: &(dyn Fn(Progress) + Sync),
    ) -> Result<Self> {
        let files = ModelFiles::open(path)?;
        let plan = arch::plan(files.config())?;
        let tokenizer = files.tokenizer()?;
        if tokenizer.vocab_size() > plan.vocab {
            let reason = format!(
                "has {} tokens, the model's vocabulary only {}: it belongs to another model",
                tokenizer.vocab_size(),
                plan.vocab
            );
            return Err(Error::bad_file(files.tokenizer_path(), reason));
        }
        let template = files.template()?;
        let stop = files.stop_tokens(&tokenizer)?;
        let decoder = open_decoder(plan, &files, device, options, progress)?;
        Ok(Self { decoder, tokenizer, template, stop })
    }

    /// Puts a model together from parts that were made otherwise. `stop` holds the ids that end an answer.
    pub fn from_parts(
        decoder: Decoder,
        tokenizer: Tokenizer,
        template: Option<ChatTemplate>,
        stop: Vec<u32>,
    ) -> Self {
        Self { decoder, tokenizer, template, stop }
    }

    /// The decoder.
    pub fn decoder(&self) -> &Decoder {
        &self.decoder
    }

    /// The cache that serves the experts.
    pub fn experts(&self) -> &ExpertCache {
        self.decoder.experts()
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// The chat template, where the model has one.
    pub fn template(&self) -> Option<&ChatTemplate> {
        self.template.as_ref()
    }

    /// The ids that end an answer.
    pub fn stop_tokens(&self) -> &[u32] {
        &self.stop
    }

    /// Whether `id` ends an answer.
    pub fn is_stop(&self, id: u32) -> bool {
        self.stop.contains(&id)
    }

    /// An empty sequence, for prompts without a chat template.
    ///
    /// # Errors
    /// When there is no memory for its KV cache.
    pub fn session(&self) -> Result<Session<'_>> {
        Session::new(self)
    }

    /// An empty conversation.
    ///
    /// # Errors
    /// [`Error::NoTemplate`] when the model has no chat template.
    pub fn conversation(&self, system: Option<&str>) -> Result<Conversation<'_>> {
        Conversation::new(self, system)
    }
}

impl AsRef<Decoder> for Model {
    fn as_ref(&self) -> &Decoder {
        &self.decoder
    }
}
