//! The model's tokenizer: `tokenizer.json`, and the names of its special tokens.

use std::collections::HashSet;
use std::path::Path;

use super::{thinking, tiktoken};
use crate::error::{Error, Result};
use crate::load::{GgufModel, TOKENIZER_BYTES, read_small};

/// A tokenizer read from `tokenizer.json`.
#[derive(Debug)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    /// Special tokens that give no text.
    silent: HashSet<u32>,
    channels: bool,
}

/// Files of other tokenizers, by how they end, and whose they are.
const FOREIGN: &[(&str, &str)] = &[
    (".tiktoken", "tiktoken"),
    ("tiktoken.model", "tiktoken"),
    ("tokenizer.model", "SentencePiece"),
    ("tekken.json", "Mistral's tekken"),
    ("vocab.json", "byte-pair tables"),
];

impl Tokenizer {
    /// Reads the tokenizer of the model in `folder`: `tokenizer.json`, else the `tiktoken.model` of Kimi's kind; or the
    /// one that a GGUF file describes.
    ///
    /// # Errors
    /// [`Error::ForeignTokenizer`] when there is one in another form, [`Error::BadFile`] when there is none, and as
    /// [`Self::read`].
    pub fn of_model(folder: &Path) -> Result<Self> {
        if let Some(gguf) = GgufModel::of(folder)? {
            return gguf.tokenizer();
        }
        Self::parse(&folder.join("tokenizer.json"), &Self::json_of_model(folder)?)
    }

    /// The same as the bytes of a `tokenizer.json`.
    ///
    /// # Errors
    /// As [`Self::of_model`].
    pub(crate) fn json_of_model(folder: &Path) -> Result<Vec<u8>> {
        let path = folder.join("tokenizer.json");
        if !path.exists() {
            if folder.join(tiktoken::FILE).exists()
                && let Some(converted) = tiktoken::converted(folder)?
            {
                return Ok(converted.to_string().into_bytes());
            }
            let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
            let names: Vec<String> = entries.filter_map(|e| e.file_name().into_string().ok()).collect();
            for (end, kind) in FOREIGN {
                if let Some(file) = names.iter().find(|name| name.ends_with(end)) {
                    return Err(Error::ForeignTokenizer {
                        folder: folder.to_owned(),
                        file: file.clone(),
                        kind,
                    });
                }
            }
            let reason = "has no tokenizer.json; put the model's own there, or fetch the model again";
            return Err(Error::bad_file(folder, reason));
        }
        read_small(&path, TOKENIZER_BYTES)
    }

    /// Reads `tokenizer.json`.
    ///
    /// # Errors
    /// [`Error::Io`], or [`Error::BadFile`] when it is no tokenizer.
    pub fn read(path: &Path) -> Result<Self> {
        Self::parse(path, &read_small(path, TOKENIZER_BYTES)?)
    }

    pub(crate) fn parse(path: &Path, bytes: &[u8]) -> Result<Self> {
        let inner = tokenizers::Tokenizer::from_bytes(bytes)
            .map_err(|e| Error::bad_file(path, format!("not a tokenizer: {e}")))?;
        Ok(Self::from_inner(inner))
    }

    /// Wraps a tokenizer that was made otherwise.
    pub fn from_inner(mut inner: tokenizers::Tokenizer) -> Self {
        // Files may carry the settings of a training pipeline; a prompt is never cut or filled up.
        inner.with_padding(None);
        // Removing a truncation cannot fail (only a stride that is too large can).
        let _ = inner.with_truncation(None);
        let channels = thinking::OF_CHANNELS.iter().all(|mark| inner.token_to_id(mark).is_some());
        let heard: HashSet<u32> =
            thinking::markers(channels).filter_map(|mark| inner.token_to_id(mark)).collect();
        let special = inner.get_added_tokens_decoder().into_iter().filter(|(_, token)| token.special);
        let silent = special.map(|(id, _)| id).filter(|id| !heard.contains(id)).collect();
        Self { inner, silent, channels }
    }

    /// Whether the model speaks in channels, as gpt-oss does, by its tokens.
    pub fn has_channels(&self) -> bool {
        self.channels
    }

    /// Token ids of `text`. `add_special` adds what the tokenizer puts around a plain text (for example a
    /// beginning-of-text token); a chat template writes those itself.
    ///
    /// # Errors
    /// [`Error::Tokenizer`].
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>> {
        let encoding = self.inner.encode_fast(text, add_special).map_err(failed)?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Text of `ids`, without special tokens other than those that tell thoughts from answers.
    ///
    /// # Errors
    /// [`Error::Tokenizer`].
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        let heard: Vec<u32> = ids.iter().copied().filter(|id| !self.silent.contains(id)).collect();
        self.inner.decode(&heard, false).map_err(failed)
    }

    /// The id of a token given by its text.
    pub fn id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// The text of a token given by its id.
    pub fn token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// Tokens in all, added ones included.
    pub fn vocab_size(&self) -> usize {
        self.inner.get_vocab_size(true)
    }
}

fn failed(e: tokenizers::Error) -> Error {
    Error::Tokenizer { reason: e.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_round_trips_and_special_tokens_are_one() {
        let t = crate::testing::byte_level();
        let text = "over the 中央 😀 line";
        let ids = t.encode(text, true).unwrap();
        assert!(ids.len() < text.len());
        assert_eq!(t.decode(&ids).unwrap(), text);
        assert_eq!((t.id("<|im_end|>"), t.token(264).as_deref()), (Some(264), Some("<|im_end|>")));
        assert_eq!(t.encode("<|im_end|>", false).unwrap(), [264]);
        assert_eq!(t.decode(&[264]).unwrap(), "");
        assert_eq!(t.vocab_size(), 265);
    }

    #[test]
    fn marks_around_thoughts_are_text_even_where_they_are_special() {
        let special = |id: u32, content: &str| {
            serde_json::json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true})
        };
        let with = |tokens: &[&str]| {
            let mut json: serde_json::Value =
                serde_json::from_str(&crate::testing::byte_level_json()).unwrap();
            let added = json["added_tokens"].as_array_mut().unwrap();
            added.extend(tokens.iter().enumerate().map(|(i, t)| special(265 + i as u32, t)));
            Tokenizer::parse(Path::new("t"), json.to_string().as_bytes()).unwrap()
        };
        let thinker = with(&["<think>", "</think>", "<|start|>"]);
        let text = "<think>hm</think>yes<|start|><|im_end|>";
        let ids = thinker.encode(text, false).unwrap();
        assert_eq!(thinker.decode(&ids).unwrap(), "<think>hm</think>yes", "{ids:?}");
        assert!(!thinker.has_channels());
        let channels = with(&["<|channel|>", "<|message|>", "<|start|>", "<|end|>"]);
        let text = "<|channel|>final<|message|>yes<|end|><|start|>";
        assert_eq!(channels.decode(&channels.encode(text, false).unwrap()).unwrap(), text);
        assert!(channels.has_channels());
    }

    #[test]
    fn a_tokenizer_of_another_kind_is_refused_by_name_with_what_to_do() {
        for (file, kind) in [
            ("tokenizer.model", "SentencePiece"),
            ("tiktoken.model", "tiktoken"),
            ("hy.tiktoken", "tiktoken"),
            ("vocab.json", "byte-pair"),
        ] {
            let dir = tempfile::tempdir().unwrap();
            std::fs::write(dir.path().join(file), "x").unwrap();
            let e = Tokenizer::of_model(dir.path()).unwrap_err().to_string();
            for part in [file, kind, "save_pretrained", "tokenizer.json", dir.path().to_str().unwrap()] {
                assert!(e.contains(part), "{part}: {e}");
            }
        }
        let dir = tempfile::tempdir().unwrap();
        let e = Tokenizer::of_model(dir.path()).unwrap_err().to_string();
        assert!(e.contains("has no tokenizer.json; put") && e.contains(dir.path().to_str().unwrap()), "{e}");
    }

    #[test]
    fn a_missing_or_broken_file_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tokenizer.json");
        assert!(matches!(Tokenizer::read(&path), Err(Error::Io { .. })));
        std::fs::write(&path, "{}").unwrap();
        let e = Tokenizer::read(&path).unwrap_err().to_string();
        assert!(e.contains("tokenizer.json"), "{e}");
    }
}
