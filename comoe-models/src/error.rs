//! Every way this crate refuses or fails, with what was asked, what there is and what to do.

use std::path::PathBuf;

/// Shorthand for this crate's results.
pub type Result<T> = std::result::Result<T, Error>;

/// Every failure of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file of a model folder could not be read.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },

    /// A file of a model folder is not what its name promises.
    #[error("{}: {reason}", path.display())]
    BadFile {
        /// The file.
        path: PathBuf,
        /// What is wrong, as one sentence.
        reason: String,
    },

    /// A required field of `config.json` is missing, under every spelling that is known.
    #[error("{}: field {field:?} is missing (looked for {})", path.display(), spellings.join(", "))]
    MissingField {
        /// The configuration file.
        path: PathBuf,
        /// The field's usual name.
        field: String,
        /// Every spelling that was looked for.
        spellings: Vec<String>,
    },

    /// A field of `config.json` has a value that cannot be right, or that is not supported.
    #[error("{}: field {field:?}: {reason}", path.display())]
    BadField {
        /// The configuration file.
        path: PathBuf,
        /// The field as spelled in the file.
        field: String,
        /// What was found and what would work.
        reason: String,
    },

    /// A model family that is not implemented.
    #[error("{}: model_type {model_type:?} {reason}; supported: {}", path.display(), supported.join(", "))]
    UnsupportedFamily {
        /// The configuration file.
        path: PathBuf,
        /// The family asked for.
        model_type: String,
        /// Why not, as the rest of a sentence.
        reason: String,
        /// The families that work.
        supported: Vec<String>,
    },

    /// A model without routed experts.
    #[error("{}: this model has no experts ({reason}): CoMoE runs Mixture-of-Experts models only", path.display())]
    NoExperts {
        /// The configuration file.
        path: PathBuf,
        /// How that was seen.
        reason: String,
    },

    /// A dense weight was asked for under the name of an expert's weight.
    #[error(
        "tensor {name:?} belongs to an expert: experts are read through the cache, never as dense weights"
    )]
    ExpertAsDense {
        /// The tensor's name in the checkpoint.
        name: String,
    },

    /// Configuration and checkpoint disagree about a layer's experts.
    #[error("layer {layer}: config.json says {config}; the checkpoint holds {checkpoint}")]
    ExpertMismatch {
        /// The model's layer number.
        layer: usize,
        /// Experts by the configuration.
        config: String,
        /// Experts in the checkpoint.
        checkpoint: String,
    },

    /// An option is out of its range.
    #[error("{option} = {value}: {expected}")]
    BadOption {
        /// The option's name.
        option: &'static str,
        /// The value given.
        value: String,
        /// What would work.
        expected: &'static str,
    },

    /// A prompt without a single token.
    #[error("the prompt is empty: give at least one character")]
    EmptyPrompt,

    /// A prompt that leaves no room for an answer.
    #[error(
        "the prompt has {prompt} tokens and the context holds {context}: shorten the prompt{}",
        or_raise(*context, *most)
    )]
    PromptTooLong {
        /// Tokens of the prompt.
        prompt: usize,
        /// Tokens that the context holds, the answer included.
        context: usize,
        /// Tokens that the model's can hold.
        most: usize,
    },

    /// Prompt and answer together exceed the context.
    #[error(
        "{prompt} prompt tokens and {asked} to generate exceed the context of {context}: ask for at most {} tokens",
        context - prompt
    )]
    GenerationTooLong {
        /// Tokens of the prompt.
        prompt: usize,
        /// Tokens asked for.
        asked: usize,
        /// Tokens that the context holds.
        context: usize,
    },

    /// A forward step past the end of the KV cache.
    #[error("{tokens} tokens at position {position} exceed the context of {context}")]
    ContextExceeded {
        /// Tokens of the step.
        tokens: usize,
        /// Position of the first of them.
        position: usize,
        /// Tokens that the KV cache holds.
        context: usize,
    },

    /// A sequence needs more room than was planned, and there is no memory for it.
    #[error(
        "the context cannot grow from {context} to {tokens} tokens: {reason}; shorten the text, or give the experts fewer \
         slots"
    )]
    ContextCannotGrow {
        /// Tokens that it holds.
        context: usize,
        /// Tokens that are wanted.
        tokens: usize,
        /// What was in the way.
        reason: String,
    },

    /// A context longer than the model was trained for.
    #[error("a context of {asked} tokens is more than the model's {available}: ask for {available} at most")]
    ContextTooLarge {
        /// Tokens asked for.
        asked: usize,
        /// The model's `max_position_embeddings`.
        available: usize,
    },

    /// A token id outside the model's vocabulary.
    #[error(
        "token {id} is outside the model's vocabulary of {vocab}: the tokenizer does not belong to the model"
    )]
    UnknownToken {
        /// The id.
        id: u32,
        /// Size of the vocabulary.
        vocab: usize,
    },

    /// A router's output is not a number.
    #[error(
        "layer {layer}: the router's output of token {token} is not a number; the weights or the input are broken"
    )]
    BadRouter {
        /// The model's layer number.
        layer: usize,
        /// Row of the step's input.
        token: usize,
    },

    /// Logits that are not numbers.
    #[error("the logit of token {id} is {value}: the model's output is broken")]
    BadLogits {
        /// The token.
        id: usize,
        /// Its logit.
        value: f32,
    },

    /// The tokenizer failed.
    #[error("tokenizer: {reason}")]
    Tokenizer {
        /// What it said.
        reason: String,
    },

    /// A tokenizer in a form that is not read.
    #[error(
        "{}: there is no tokenizer.json, only {file} ({kind}): convert it once with Python, python -c \"from \
         transformers import AutoTokenizer as T; T.from_pretrained('{folder}').save_pretrained('{folder}')\", or put the \
         tokenizer.json of another copy of the model beside it",
        folder.display(), folder = folder.display()
    )]
    ForeignTokenizer {
        /// The model's folder.
        folder: PathBuf,
        /// The file that holds the tokenizer.
        file: String,
        /// Whose format that is.
        kind: &'static str,
    },

    /// The chat template failed, or refused the conversation.
    #[error("chat template: {reason}")]
    Template {
        /// What went wrong; for a refusal the template's own words.
        reason: String,
    },

    /// The model has no chat template.
    #[error(
        "the model has no chat template (neither chat_template.jinja nor tokenizer_config.json nor a GGUF file's \
         metadata has one): \
         use it without one (--raw)"
    )]
    NoTemplate,

    /// A message that does not fit the context even without any history.
    #[error(
        "the message alone takes {tokens} tokens and the context holds {context}: shorten it{}",
        or_raise(*context, *most)
    )]
    MessageTooLong {
        /// Tokens of the conversation reduced to that message.
        tokens: usize,
        /// Tokens that the context holds.
        context: usize,
        /// Tokens that the model's can hold.
        most: usize,
    },

    /// An error of the expert cache.
    #[error(transparent)]
    Core(#[from] comoe_core::Error),

    /// An error of candle.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

/// Advice to have a longer context, as the end of a list, where the model can have one.
fn or_raise(context: usize, most: usize) -> String {
    match context < most {
        true => format!(" or raise the context, which can hold {most}"),
        false => ", since the model's context holds no more".to_owned(),
    }
}

impl Error {
    /// Whether memory of a GPU ran out.
    pub(crate) fn is_out_of_memory(&self) -> bool {
        match self {
            Self::Core(error) => error.is_out_of_memory(),
            Self::Candle(error) => comoe_core::is_out_of_memory(error),
            _ => false,
        }
    }

    pub(crate) fn io(path: impl Into<PathBuf>, source: std::io::Error) -> Self {
        Self::Io { path: path.into(), source }
    }

    pub(crate) fn bad_file(path: impl Into<PathBuf>, reason: impl Into<String>) -> Self {
        Self::BadFile { path: path.into(), reason: reason.into() }
    }
}
