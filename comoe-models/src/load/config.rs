//! Reads `config.json` as the hub spells it and as transformers 5 spells it.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use comoe_core::store::PackedFile;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::files::packed_of;
use super::gguf::GgufModel;
use super::side_files::{SideFiles, read_text};
use crate::error::{Error, Result};

/// A field's usual name, and the spellings to look for, in order. A dot enters an object.
const SPELLINGS: &[(&str, &[&str])] = &[
    ("num_experts", &["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"]),
    ("num_experts_per_tok", &["num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts"]),
    ("rope_theta", &["rope_theta", "rope_parameters.rope_theta"]),
    ("rope_type", &["rope_parameters.rope_type", "rope_scaling.rope_type", "rope_scaling.type"]),
    ("dtype", &["dtype", "torch_dtype"]),
    ("head_dim", &["head_dim", "attention_head_dim"]),
    ("rms_norm_eps", &["rms_norm_eps", "norm_eps"]),
    ("tie_word_embeddings", &["tie_word_embeddings", "tie_embedding"]),
];

/// Largest size or count of a configuration: above every published model, and far enough from overflow that three of
/// them can be multiplied with a few bytes.
pub(crate) const MAX_SIZE: usize = 1 << 24;

/// A parsed `config.json` (or `generation_config.json`) that remembers where it came from.
#[derive(Debug, Clone)]
pub struct ConfigFile {
    path: PathBuf,
    root: Map<String, Value>,
}

impl ConfigFile {
    /// Reads and parses a file.
    ///
    /// # Errors
    /// [`Error::Io`], or [`Error::BadFile`] when it is not a JSON object.
    pub fn read(path: &Path) -> Result<Self> {
        Self::parse(path, &read_text(path)?)
    }

    /// Reads `config.json` of a model folder or a packed file, or makes one of a GGUF file's metadata.
    ///
    /// # Errors
    /// As [`Self::read`]; says so when the folder itself is not there.
    pub fn of_model(folder: &Path) -> Result<Self> {
        if let Some(gguf) = GgufModel::of(folder)? {
            return gguf.config();
        }
        if let Some(file) = packed_of(folder)? {
            return Self::of_packed(&file);
        }
        if !folder.is_dir() {
            let reason = "no such folder; give the folder of a model, with config.json, tokenizer.json and \
                          .safetensors files";
            return Err(Error::bad_file(folder, reason));
        }
        let path = folder.join("config.json");
        match Self::read(&path) {
            Err(Error::Io { source, .. }) if source.kind() == ErrorKind::NotFound => {
                let reason = "has no config.json; give the folder of a model, with config.json, tokenizer.json and \
                              .safetensors files";
                Err(Error::bad_file(folder, reason))
            }
            read => read,
        }
    }

    /// The file `name` beside a model's weights, in a folder or a packed file; `None` when there is none.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn of_model_file(model: &Path, name: &str) -> Result<Option<Self>> {
        match packed_of(model)? {
            Some(file) => Self::beside(SideFiles::Packed(&file), name),
            None => Self::beside(SideFiles::Folder(model), name),
        }
    }

    pub(super) fn beside(files: SideFiles<'_>, name: &str) -> Result<Option<Self>> {
        files.text(name)?.map(|text| Self::parse(&files.path(name), &text)).transpose()
    }

    pub(super) fn of_packed(file: &PackedFile) -> Result<Self> {
        let found = Self::beside(SideFiles::Packed(file), "config.json")?;
        found.ok_or_else(|| Error::bad_file(file.path(), "holds no config.json; pack the model again"))
    }

    /// Parses text; `path` is for messages only.
    ///
    /// # Errors
    /// [`Error::BadFile`] when it is not a JSON object.
    pub fn parse(path: &Path, text: &str) -> Result<Self> {
        match serde_json::from_str(text) {
            Ok(Value::Object(root)) => Ok(Self { path: path.to_owned(), root }),
            Ok(_) => Err(Error::bad_file(path, "expected a JSON object")),
            Err(e) => Err(Error::bad_file(path, format!("not valid JSON: {e}"))),
        }
    }

    /// A configuration that was made otherwise; `path` is for messages only.
    pub(crate) fn of_values(path: &Path, root: Map<String, Value>) -> Self {
        Self { path: path.to_owned(), root }
    }

    /// The part that describes the language model: the whole, or `text_config` of a model of more modalities.
    pub fn language_model(&self) -> Self {
        match self.root.get("text_config") {
            Some(Value::Object(text)) => Self { path: self.path.clone(), root: text.clone() },
            _ => self.clone(),
        }
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A field under any of its spellings; `null` counts as absent.
    ///
    /// # Errors
    /// [`Error::BadField`] when the value has another type.
    pub fn get<T: DeserializeOwned>(&self, field: &str) -> Result<Option<T>> {
        self.first(&spellings(field))
    }

    /// The first of these spellings that is there; a dot enters an object, `null` counts as absent.
    ///
    /// # Errors
    /// [`Error::BadField`] when the value has another type.
    pub fn first<T: DeserializeOwned>(&self, spellings: &[&str]) -> Result<Option<T>> {
        let found = spellings.iter().find_map(|s| Some((*s, self.lookup(s)?)));
        let Some((spelling, value)) = found else { return Ok(None) };
        serde_json::from_value(value.clone())
            .map(Some)
            .map_err(|e| self.bad(spelling, format!("{value} is not what is expected here: {e}")))
    }

    /// A field that must be there.
    ///
    /// # Errors
    /// [`Error::MissingField`] with every spelling that was looked for, and as [`Self::get`].
    pub fn require<T: DeserializeOwned>(&self, field: &str) -> Result<T> {
        self.get(field)?.ok_or_else(|| Error::MissingField {
            path: self.path.clone(),
            field: field.to_owned(),
            spellings: spellings(field).iter().map(|s| (*s).to_owned()).collect(),
        })
    }

    /// A field, or the default of the family's configuration class.
    ///
    /// # Errors
    /// As [`Self::get`].
    pub fn or<T: DeserializeOwned>(&self, field: &str, default: T) -> Result<T> {
        Ok(self.get(field)?.unwrap_or(default))
    }

    /// A size that must be there and be at least 1.
    ///
    /// # Errors
    /// [`Error::BadField`] for 0 and for more than any model has, and as [`Self::require`].
    pub fn size(&self, field: &str) -> Result<usize> {
        match self.bounded(field, self.require(field)?)? {
            0 => Err(self.bad(field, "0 is no size")),
            n => Ok(n),
        }
    }

    /// A size or count that may be 0, or the default of the family's configuration class.
    ///
    /// # Errors
    /// [`Error::BadField`] for more than any model has, and as [`Self::get`].
    pub fn count_or(&self, field: &str, default: usize) -> Result<usize> {
        self.bounded(field, self.or(field, default)?)
    }

    fn bounded(&self, field: &str, n: usize) -> Result<usize> {
        if n > MAX_SIZE {
            return Err(self.bad(field, format!("{n} is more than any model has; the limit is {MAX_SIZE}")));
        }
        Ok(n)
    }

    /// A complaint about a field of this file.
    pub fn bad(&self, field: &str, reason: impl Into<String>) -> Error {
        Error::BadField { path: self.path.clone(), field: field.to_owned(), reason: reason.into() }
    }

    /// Token ids of a field that may be one id, a list of ids, or absent (as `eos_token_id` is).
    ///
    /// # Errors
    /// [`Error::BadField`] when it is something else.
    pub fn token_ids(&self, field: &str) -> Result<Vec<u32>> {
        #[derive(serde::Deserialize)]
        #[serde(untagged)]
        enum OneOrMany {
            One(u32),
            Many(Vec<u32>),
        }
        Ok(match self.get(field)? {
            None => Vec::new(),
            Some(OneOrMany::One(id)) => vec![id],
            Some(OneOrMany::Many(ids)) => ids,
        })
    }

    fn lookup(&self, spelling: &str) -> Option<&Value> {
        let mut keys = spelling.split('.');
        let mut value = self.root.get(keys.next()?)?;
        for key in keys {
            value = value.get(key)?;
        }
        (!value.is_null()).then_some(value)
    }
}

fn spellings(field: &str) -> Vec<&str> {
    SPELLINGS.iter().find(|(name, _)| *name == field).map_or_else(|| vec![field], |(_, s)| s.to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> ConfigFile {
        ConfigFile::parse(Path::new("m/config.json"), text).unwrap()
    }

    #[test]
    fn both_spellings_are_read() {
        let hub = parse(
            r#"{"num_experts": 8, "rope_theta": 1e6, "torch_dtype": "bfloat16", "rope_scaling": null}"#,
        );
        let v5 = parse(
            r#"{"num_local_experts": 8, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
                "dtype": "bfloat16"}"#,
        );
        for c in [&hub, &v5] {
            assert_eq!(c.size("num_experts").unwrap(), 8);
            assert_eq!(c.require::<f64>("rope_theta").unwrap(), 1e6);
            assert_eq!(c.require::<String>("dtype").unwrap(), "bfloat16");
        }
        assert_eq!(hub.get::<String>("rope_type").unwrap(), None);
        assert_eq!(v5.get::<String>("rope_type").unwrap().as_deref(), Some("default"));
        let old = parse(r#"{"rope_scaling": {"type": "yarn"}}"#);
        assert_eq!(old.get::<String>("rope_type").unwrap().as_deref(), Some("yarn"));
    }

    #[test]
    fn complaints_name_the_file_and_the_field() {
        let c = parse(r#"{"hidden_size": 0, "num_hidden_layers": "six", "head_dim": null}"#);
        let missing = c.size("num_experts").unwrap_err().to_string();
        assert!(missing.contains("config.json") && missing.contains("num_local_experts"), "{missing}");
        assert!(c.size("hidden_size").unwrap_err().to_string().contains("hidden_size"));
        let typed = c.size("num_hidden_layers").unwrap_err().to_string();
        assert!(typed.contains("num_hidden_layers") && typed.contains("six"), "{typed}");
        assert_eq!(c.get::<usize>("head_dim").unwrap(), None);
        assert!(ConfigFile::parse(Path::new("c"), "[1]").is_err());
        assert!(ConfigFile::parse(Path::new("c"), "{").is_err());
        assert!(ConfigFile::read(Path::new("/nowhere/config.json")).is_err());
    }

    #[test]
    fn token_ids_are_one_or_many_or_none() {
        assert_eq!(parse(r#"{"eos_token_id": 3}"#).token_ids("eos_token_id").unwrap(), [3]);
        assert_eq!(parse(r#"{"eos_token_id": [3, 4]}"#).token_ids("eos_token_id").unwrap(), [3, 4]);
        assert!(parse(r#"{"eos_token_id": null}"#).token_ids("eos_token_id").unwrap().is_empty());
        assert!(parse(r#"{"eos_token_id": "x"}"#).token_ids("eos_token_id").is_err());
        assert!(parse(r#"{"eos_token_id": -1}"#).token_ids("eos_token_id").is_err());
    }
}
