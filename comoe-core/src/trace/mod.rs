//! Routing of real runs: which experts every token chose in every layer, recorded, stored, read back and summed up.
//!
//! A [`Trace`] holds tokens in the order in which they ran, whatever the order in the file it came from. [`replay`](crate::replay)
//! plays policies and predictors over it. [`TraceWriter`] and [`Recorder`] make our own files (the format is described
//! at [`TraceWriter`]); [`csv`] reads the text form of other tools.

mod builder;
pub mod csv;
mod file;
mod limits;
mod recorder;
mod summary;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
mod uses;

use std::path::Path;

pub use builder::{Choice, TraceBuilder};
pub use file::{Contents, MAGIC, TraceWriter, VERSION};
pub use recorder::{Recorder, Routed, RoutingObserver};
pub use summary::{LayerSummary, Summary};
pub use uses::ExpertUses;

use crate::error::{Error, Result, TracePlace};
use crate::store::{Directory, read_small};

/// Whether a token was given or generated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Phase {
    /// A token of the prompt.
    Prompt,
    /// A token that the model generated.
    Decode,
}

/// Which token of which conversation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Token {
    /// Number of the conversation turn (or prompt), from 0. Tokens of different turns may share nothing.
    pub turn: u32,
    /// Given or generated.
    pub phase: Phase,
}

/// What a trace was recorded from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TraceInfo {
    /// The model's name, for people.
    pub model: String,
    /// Experts that a token chooses in a layer.
    pub top_k: usize,
    /// Layers with experts, and the bytes of their records.
    pub directory: Directory,
}

impl TraceInfo {
    /// Sees that a model with the experts of `directory` could have routed like this. Record sizes may differ: the same
    /// model in another format routes alike.
    ///
    /// # Errors
    /// [`Error::TraceOfAnotherModel`], naming the first difference.
    pub fn check_model(&self, directory: &Directory) -> Result<()> {
        let (mine, other) = (self.directory.layers(), directory.layers());
        let differs = |reason| Err(Error::TraceOfAnotherModel { recorded: self.model.clone(), reason });
        if mine.len() != other.len() {
            return differs(format!(
                "it has {} layers with experts, the trace has {}",
                other.len(),
                mine.len()
            ));
        }
        for (a, b) in mine.iter().zip(other) {
            if (a.layer, a.experts) != (b.layer, b.experts) {
                return differs(format!(
                    "its layer {} has {} experts where the trace has layer {} with {}",
                    b.layer, b.experts, a.layer, a.experts
                ));
            }
        }
        Ok(())
    }
}

/// The routing of a run, token by token.
#[derive(Debug, Clone, PartialEq)]
pub struct Trace {
    info: TraceInfo,
    tokens: Vec<Token>,
    /// Where the choices of (token, layer) end in `experts`: `[tokens * layers]`.
    ends: Vec<usize>,
    experts: Vec<u32>,
    /// As long as `experts`, or empty.
    weights: Vec<f32>,
    /// Where the guesses for (token, layer) end in `guesses`: `[tokens * layers]`, or empty.
    guess_ends: Vec<usize>,
    guesses: Vec<u32>,
}

impl Trace {
    /// Reads a trace: our own format, or the CSV of [`csv`], told apart by their first bytes.
    ///
    /// # Errors
    /// [`Error::BadTrace`] with the line or offset, [`Error::TraceVersion`], [`Error::Io`].
    pub fn open(path: &Path) -> Result<Self> {
        let bytes = read_small(path, limits::FILE_BYTES)?;
        if bytes.is_empty() {
            let reason = "the file is empty; record a trace with `comoe trace record`".to_owned();
            return Err(Error::BadTrace { path: path.to_owned(), at: TracePlace::Byte(0), reason });
        }
        let own = bytes.len().min(MAGIC.len());
        if bytes[..own] == MAGIC[..own] {
            return file::read(path, &bytes);
        }
        csv::RouteRows::parse(path, &bytes)?.into_trace(path)
    }

    /// What it was recorded from.
    pub fn info(&self) -> &TraceInfo {
        &self.info
    }

    /// Tokens, in the order in which they ran.
    pub fn tokens(&self) -> &[Token] {
        &self.tokens
    }

    /// Layers with experts.
    pub fn layers(&self) -> usize {
        self.info.directory.layers().len()
    }

    fn range(&self, ends: &[usize], token: usize, layer: usize) -> std::ops::Range<usize> {
        let at = token * self.layers() + layer;
        let start = if at == 0 { 0 } else { ends[at - 1] };
        start..ends[at]
    }

    /// Experts that token number `token` chose in layer ordinal `layer`, in the order of choice, each once. Empty where
    /// the run computed nothing (a prompt's last layer is needed for its last token alone).
    pub fn chosen(&self, token: usize, layer: usize) -> &[u32] {
        &self.experts[self.range(&self.ends, token, layer)]
    }

    /// The routing weights of [`Self::chosen`]; `None` when they were not recorded.
    pub fn weights(&self, token: usize, layer: usize) -> Option<&[f32]> {
        (!self.weights.is_empty()).then(|| &self.weights[self.range(&self.ends, token, layer)])
    }

    /// Whether weights were recorded.
    pub fn has_weights(&self) -> bool {
        !self.weights.is_empty()
    }

    /// What the model itself guessed for (token, layer) one layer earlier, likeliest first: the stale gate. Empty where it
    /// made no guess: in the first layer, and for tokens of a prompt that went through together.
    pub fn guesses(&self, token: usize, layer: usize) -> &[u32] {
        if self.has_guesses() { &self.guesses[self.range(&self.guess_ends, token, layer)] } else { &[] }
    }

    /// Whether guesses were recorded.
    pub fn has_guesses(&self) -> bool {
        !self.guesses.is_empty()
    }

    /// What a token did in a layer.
    pub fn choice(&self, token: usize, layer: usize) -> Choice<'_> {
        Choice {
            experts: self.chosen(token, layer),
            weights: self.weights(token, layer),
            guesses: self.guesses(token, layer),
        }
    }

    /// The tokens numbered in `range`, as a trace of their own.
    pub fn part(&self, range: std::ops::Range<usize>) -> Self {
        let mut part = TraceBuilder::new(self.info.clone());
        for token in range {
            part.token(self.tokens[token], |layer| self.choice(token, layer));
        }
        part.finish()
    }

    /// Token numbers of the two halves of the decode steps: fitted on the first, reported on the second. Prompts go with
    /// the half that follows them.
    pub fn halves(&self) -> (std::ops::Range<usize>, std::ops::Range<usize>) {
        let decode = self.tokens.iter().filter(|t| t.phase == Phase::Decode).count();
        let mut seen = 0;
        let middle = self.tokens.iter().position(|t| {
            seen += usize::from(t.phase == Phase::Decode);
            seen > decode / 2
        });
        let middle = middle.unwrap_or(self.tokens.len());
        (0..middle, middle..self.tokens.len())
    }

    /// What it looks like.
    pub fn summary(&self) -> Summary {
        Summary::of(self)
    }
}
