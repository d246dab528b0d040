//! Every way the program ends badly, and its exit code.

use std::io;
use std::path::PathBuf;
use std::process::ExitCode;

pub(crate) type Result<T> = std::result::Result<T, Error>;

/// Exit code of a run that failed.
pub(crate) const FAILED: u8 = 1;
/// Exit code of a command line that cannot be meant; clap uses the same.
const USAGE: u8 = 2;

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error(
        "{}: {source}; give the folder of a model, with config.json in it, or its name on the hub, ORG/NAME",
        path.display()
    )]
    NoModelFolder { path: PathBuf, source: io::Error },

    #[error(
        "{} is a file; give the folder of a model, with config.json in it, a .safetensors file that `comoe pack` wrote, or \
         a .gguf file",
        path.display()
    )]
    ModelIsAFile { path: PathBuf },

    #[error(
        "{} is a folder without config.json; give the folder of a model, with config.json, tokenizer.json and .safetensors \
         files, or a packed or .gguf file{}",
        path.display(),
        if *hides { ", or remove the folder to have the hub's model of that name" } else { "" }
    )]
    NoConfig { path: PathBuf, hides: bool },

    #[error(
        "comoe-tiny was not found (looked for {}); give the folder of a model",
        places.iter().map(|p| p.display().to_string()).collect::<Vec<_>>().join(", ")
    )]
    NoBundledModel { places: Vec<PathBuf> },

    #[error("{}: a packed file is a safetensors file: give it a name that ends in .safetensors", path.display())]
    PackName { path: PathBuf },

    #[error("{}: is there already; remove it, or give another name with --output", path.display())]
    PackExists { path: PathBuf },

    #[error("{}: {source}; give --evaluate a file of text", path.display())]
    EvaluateText { path: PathBuf, source: io::Error },

    #[error("--evaluate compares two models: give the one that {} was made of with --against", path.display())]
    EvaluateAlone { path: PathBuf },

    #[error(
        "{}: {} from what was written: {}; pack the model again, and have the disk checked",
        path.display(),
        match parts.len() { 1 => "one part differs".to_owned(), n => format!("{n} parts differ") },
        first_of(parts)
    )]
    Differs { path: PathBuf, parts: Vec<String> },

    #[error(
        "--context {context} is more than --context-limit {limit}: ask for a smaller context, or allow more"
    )]
    ContextOverLimit { context: usize, limit: usize },

    /// An option whose value no model could make right.
    #[error("{0}")]
    Usage(comoe_models::Error),

    #[error("{}: {reason}; correct it or give {option}", path.display())]
    BadDefault { path: PathBuf, option: String, reason: String },

    #[error("the prompt is empty: give --prompt some text")]
    EmptyPrompt,

    #[error("{}: no prompts in it; give one a line", path.display())]
    NoPrompts { path: PathBuf },

    #[error("--tokens: {id} is no token of this model, whose ids end at {}", vocab.saturating_sub(1))]
    NoSuchToken { id: u32, vocab: usize },

    /// A file that must not be written.
    #[error("{}: {reason}; give {option} another name", path.display())]
    OutputFile { path: PathBuf, reason: String, option: String },

    #[error("--decode {decode} of {tokens} tokens: give at most {tokens}")]
    DecodeTooMany { decode: usize, tokens: usize },

    #[error(
        "{option} cannot play {policy}: give --policy lru, lfu, lfru, aged or blend, which need no foresight"
    )]
    FarSighted { option: &'static str, policy: String },

    #[error("{}: drawing failed: {reason}", path.display())]
    Plot { path: PathBuf, reason: String },

    #[error("{from}, line {line}: not UTF-8 at byte {byte} of the line; convert it to UTF-8 first")]
    NotUtf8 { from: String, line: usize, byte: usize },

    #[error("{from}, line {line}: longer than {limit} bytes; split it into shorter turns")]
    LineTooLong { from: String, line: usize, limit: usize },

    #[error("{from}: more than {limit} bytes; give a shorter prompt")]
    InputTooLong { from: String, limit: usize },

    #[error("{from}: {source}")]
    Input { from: String, source: io::Error },

    /// The user, or the system, asked for the end.
    #[error("interrupted")]
    Interrupted { signal: i32 },

    #[error("standard output was closed before the answer ended; let its reader read to the end")]
    OutputClosed,

    #[error("standard output: {0}")]
    Output(io::Error),

    #[error("terminal: {0}")]
    Terminal(#[from] rustyline::error::ReadlineError),

    #[error("it does not fit: {reason}")]
    DoesNotFit { reason: String },

    #[error("{reason}; give --vram SIZE to plan for a GPU that is not here, or --device cpu")]
    NoGpuToPlanFor { reason: String },

    #[error("{}: {reason}", path.display())]
    BadDoctor { path: PathBuf, reason: String },

    #[error("{failed} of {tests} kernel tests failed: do not use this GPU, and report it")]
    SelfTest { failed: usize, tests: usize },

    #[error(transparent)]
    Hub(#[from] crate::hub::Error),

    #[error(transparent)]
    Core(#[from] comoe_core::Error),

    #[error(transparent)]
    Models(#[from] comoe_models::Error),
}

impl Error {
    pub(crate) fn exit_code(&self) -> ExitCode {
        match self {
            Self::Usage(_)
            | Self::ContextOverLimit { .. }
            | Self::FarSighted { .. }
            | Self::DecodeTooMany { .. }
            | Self::PackName { .. }
            | Self::EvaluateAlone { .. }
            | Self::Hub(crate::hub::Error::BadName { .. }) => ExitCode::from(USAGE),
            // Where a signal cannot end it, as shells tell of one that did.
            Self::Interrupted { signal } => ExitCode::from(128u8.saturating_add(*signal as u8)),
            _ => ExitCode::from(FAILED),
        }
    }

    /// The message on one line, whatever a library put into it.
    pub(crate) fn line(&self) -> String {
        let text = self.to_string();
        text.lines().map(str::trim).filter(|l| !l.is_empty()).collect::<Vec<_>>().join("; ")
    }

    /// An error of the expert cache's library.
    pub(crate) fn core(source: comoe_core::Error) -> Self {
        Self::Models(source.into())
    }

    /// Wraps a failed write to standard output.
    pub(crate) fn output(source: io::Error) -> Self {
        match source.kind() {
            io::ErrorKind::BrokenPipe => Self::OutputClosed,
            _ => Self::Output(source),
        }
    }
}

/// The first of a list that may be long, and how many more there are.
fn first_of(parts: &[String]) -> String {
    const SHOWN: usize = 8;
    let shown = parts.iter().take(SHOWN).cloned().collect::<Vec<_>>().join(", ");
    match parts.len().saturating_sub(SHOWN) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_one_line() {
        let source = io::Error::other("first\n  second\n\nthird\n");
        let e = Error::Input { from: "standard input".to_owned(), source };
        assert_eq!(e.line(), "standard input: first; second; third");
    }
}
