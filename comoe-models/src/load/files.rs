//! Where the parts of a model are: a folder in Hugging Face layout, or a packed or GGUF file that holds them all.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use comoe_core::store::{Checkpoint, PackedFile, Quantisation};
use serde_json::Value;

use super::gguf::GgufModel;
use super::{ConfigFile, SideFiles, TOKENIZER_BYTES};
use crate::chat::{ChatTemplate, Tokenizer};
use crate::error::{Error, Result};

/// A model's files, its configuration read.
pub(crate) struct ModelFiles {
    path: PathBuf,
    config: ConfigFile,
    gguf: Option<GgufModel>,
    packed: Option<Arc<PackedFile>>,
}

impl ModelFiles {
    /// Opens a folder with `config.json`, a folder with nothing but a GGUF file, a GGUF file, or a packed file.
    ///
    /// # Errors
    /// [`Error::Io`] and [`Error::BadFile`] for what is not there or is no configuration.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        if let Some(file) = gguf_of(path) {
            let gguf = GgufModel::open(&file)?;
            return Ok(Self { path: file, config: gguf.config()?, gguf: Some(gguf), packed: None });
        }
        let (path, packed) = (path.to_owned(), packed_of(path)?.map(Arc::new));
        let config = match &packed {
            Some(file) => ConfigFile::of_packed(file)?,
            None => ConfigFile::of_model(&path)?,
        };
        Ok(Self { path, config, gguf: None, packed })
    }

    /// The configuration, as `config.json` spells it.
    pub(crate) fn config(&self) -> &ConfigFile {
        &self.config
    }

    /// The small files; `None` for a GGUF file, which has none.
    pub(crate) fn side(&self) -> Option<SideFiles<'_>> {
        match (&self.gguf, &self.packed) {
            (Some(_), _) => None,
            (None, Some(file)) => Some(SideFiles::Packed(file)),
            (None, None) => Some(SideFiles::Folder(&self.path)),
        }
    }

    /// The packed file, if it is one.
    pub(crate) fn packed(&self) -> Option<&Arc<PackedFile>> {
        self.packed.as_ref()
    }

    /// The weights; of a packed file those that are no expert's.
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
        self.side().map_or_else(|| self.path.clone(), |side| side.path("tokenizer.json"))
    }

    /// The tokenizer.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::BadFile`].
    pub(crate) fn tokenizer(&self) -> Result<Tokenizer> {
        match &self.gguf {
            Some(gguf) => gguf.tokenizer(),
            None => Tokenizer::parse(&self.tokenizer_path(), &self.tokenizer_json()?),
        }
    }

    /// The tokenizer of a model that is no GGUF file, as a `tokenizer.json`.
    ///
    /// # Errors
    /// As [`Self::tokenizer`].
    pub(crate) fn tokenizer_json(&self) -> Result<Vec<u8>> {
        match self.packed.as_ref().map(|file| file.file("tokenizer.json")) {
            Some(Some(bytes)) if bytes.len() as u64 > TOKENIZER_BYTES => {
                let reason =
                    format!("holds a tokenizer of {} bytes; {TOKENIZER_BYTES} are the limit", bytes.len());
                Err(Error::bad_file(&self.path, reason))
            }
            Some(Some(bytes)) => Ok(bytes.to_vec()),
            Some(None) => Err(Error::bad_file(&self.path, "holds no tokenizer; pack the model again")),
            None => Tokenizer::json_of_model(&self.path),
        }
    }

    /// The chat template, where there is one.
    ///
    /// # Errors
    /// As [`ChatTemplate::find`].
    pub(crate) fn template(&self) -> Result<Option<ChatTemplate>> {
        match (&self.gguf, self.side()) {
            (Some(gguf), _) => gguf.template(),
            (None, Some(side)) => ChatTemplate::find_in(side),
            (None, None) => Ok(None),
        }
    }

    /// The ids under `eos_token_id` of the configuration and of `generation_config.json` (where there is one), and the
    /// token under `eos_token` of `tokenizer_config.json`: each of them is the only right one for some models.
    ///
    /// # Errors
    /// [`Error::BadField`] when they are no ids.
    pub(crate) fn stop_tokens(&self, tokenizer: &Tokenizer) -> Result<Vec<u32>> {
        let mut ids = self.config.token_ids("eos_token_id")?;
        let file = |name: &str| self.side().map_or(Ok(None), |side| ConfigFile::beside(side, name));
        if let Some(generation) = file("generation_config.json")? {
            ids.extend(generation.token_ids("eos_token_id")?);
        }
        if let Some(config) = file("tokenizer_config.json")? {
            // As text, or as an object with the text in it.
            let end: Option<String> = config.first(&["eos_token.content", "eos_token"])?;
            ids.extend(end.and_then(|token| tokenizer.id(&token)));
        }
        ids.sort_unstable();
        ids.dedup();
        Ok(ids)
    }
}

/// The packed model that a path stands for; `None` for what is no `.safetensors` file.
///
/// # Errors
/// [`Error::Core`] for a file that is no packed one, or is damaged; [`Error::BadFile`] for one with experts only.
pub(super) fn packed_of(path: &Path) -> Result<Option<PackedFile>> {
    if path.extension().is_none_or(|e| e != "safetensors") || path.is_dir() {
        return Ok(None);
    }
    let file = PackedFile::open(path)?;
    if !file.is_model() {
        let reason =
            "holds experts only, and no model; give a file that `comoe pack` wrote, or the model's folder";
        return Err(Error::bad_file(path, reason));
    }
    Ok(Some(file))
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
