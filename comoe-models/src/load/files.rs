//! Where the parts of a model are: a folder in Hugging Face layout, or a GGUF file that holds them all.

use std::path::{Path, PathBuf};

use comoe_core::store::{Checkpoint, Quantisation};
use serde_json::Value;

use super::ConfigFile;
use super::gguf::GgufModel;
use crate::chat::{ChatTemplate, Tokenizer};
#[cfg(doc)]
use crate::error::Error;
use crate::error::Result;

/// A model's files, its configuration read.
pub(crate) struct ModelFiles {
    path: PathBuf,
    config: ConfigFile,
    gguf: Option<GgufModel>,
}

impl ModelFiles {
    /// Opens a folder with `config.json`, a folder with nothing but a GGUF file, or a GGUF file.
    ///
    /// # Errors
    /// [`Error::Io`] and [`Error::BadFile`] for what is not there or is no configuration.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        if let Some(file) = gguf_of(path) {
            let gguf = GgufModel::open(&file)?;
            return Ok(Self { path: file, config: gguf.config()?, gguf: Some(gguf) });
        }
        Ok(Self { path: path.to_owned(), config: ConfigFile::of_model(path)?, gguf: None })
    }

    /// The configuration, as `config.json` spells it.
    pub(crate) fn config(&self) -> &ConfigFile {
        &self.config
    }

    /// The weights.
    ///
    /// # Errors
    /// As [`Checkpoint::open`].
    pub(crate) fn checkpoint(&self) -> Result<Checkpoint> {
        Ok(Checkpoint::open(&[&self.path])?)
    }

    /// How quantised weights are to be read.
    ///
    /// # Errors
    /// [`comoe_core::Error::UnsupportedQuantisation`].
    pub(crate) fn quantisation(&self) -> Result<Quantisation> {
        let fields = ["quantization_config", "compression_config"];
        let inner = self.config.language_model();
        let found = match inner.first::<Value>(&fields)? {
            Some(found) => Some(found),
            None => self.config.first(&fields)?,
        };
        match found {
            Some(value) => Ok(Quantisation::from_config(&value)?),
            None => Ok(Quantisation::default()),
        }
    }

    /// Where the tokenizer is.
    pub(crate) fn tokenizer_path(&self) -> PathBuf {
        if self.gguf.is_some() { self.path.clone() } else { self.path.join("tokenizer.json") }
    }

    /// The tokenizer.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::BadFile`].
    pub(crate) fn tokenizer(&self) -> Result<Tokenizer> {
        match &self.gguf {
            Some(gguf) => gguf.tokenizer(),
            None => Tokenizer::of_model(&self.path),
        }
    }

    /// The chat template, where there is one.
    ///
    /// # Errors
    /// As [`ChatTemplate::find`].
    pub(crate) fn template(&self) -> Result<Option<ChatTemplate>> {
        match &self.gguf {
            Some(gguf) => gguf.template(),
            None => ChatTemplate::find(&self.path),
        }
    }

    /// The ids under `eos_token_id` of the configuration and of `generation_config.json` (where there is one), and the
    /// token under `eos_token` of `tokenizer_config.json`: each of them is the only right one for some models.
    ///
    /// # Errors
    /// [`Error::BadField`] when they are no ids.
    pub(crate) fn stop_tokens(&self, tokenizer: &Tokenizer) -> Result<Vec<u32>> {
        let mut ids = self.config.token_ids("eos_token_id")?;
        let file = |name: &str| Some(self.path.join(name)).filter(|p| self.gguf.is_none() && p.exists());
        if let Some(path) = file("generation_config.json") {
            ids.extend(ConfigFile::read(&path)?.token_ids("eos_token_id")?);
        }
        if let Some(path) = file("tokenizer_config.json") {
            // As text, or as an object with the text in it.
            let end: Option<String> = ConfigFile::read(&path)?.first(&["eos_token.content", "eos_token"])?;
            ids.extend(end.and_then(|token| tokenizer.id(&token)));
        }
        ids.sort_unstable();
        ids.dedup();
        Ok(ids)
    }
}

/// The GGUF file that a path stands for: itself, or the only model in a folder without a configuration.
pub(super) fn gguf_of(path: &Path) -> Option<PathBuf> {
    let is_gguf = |p: &Path| p.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf"));
    if !path.is_dir() {
        return is_gguf(path).then(|| path.to_owned());
    }
    if path.join("config.json").exists() {
        return None;
    }
    let entries = std::fs::read_dir(path).ok()?.filter_map(|e| e.ok().map(|e| e.path()));
    let mut files: Vec<PathBuf> = entries.filter(|p| is_gguf(p)).collect();
    files.sort();
    match files.as_slice() {
        [one] => Some(one.clone()),
        // Of a split model, the first stands for all.
        [first, ..] if first.to_string_lossy().contains("-00001-of-") => Some(first.clone()),
        _ => None,
    }
}
