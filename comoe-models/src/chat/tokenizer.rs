//! The model's tokenizer: `tokenizer.json`, and the names of its special tokens.

use std::path::Path;

use crate::error::{Error, Result};

/// A tokenizer read from `tokenizer.json`.
#[derive(Debug)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
}

impl Tokenizer {
    /// Reads `tokenizer.json`.
    ///
    /// # Errors
    /// [`Error::Io`], or [`Error::BadFile`] when it is no tokenizer.
    pub fn read(path: &Path) -> Result<Self> {
        let bytes = std::fs::read(path).map_err(|e| Error::io(path, e))?;
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
        Self { inner }
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

    /// Text of `ids`, without special tokens.
    ///
    /// # Errors
    /// [`Error::Tokenizer`].
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        self.inner.decode(ids, true).map_err(failed)
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
    fn a_missing_or_broken_file_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tokenizer.json");
        assert!(matches!(Tokenizer::read(&path), Err(Error::Io { .. })));
        std::fs::write(&path, "{}").unwrap();
        let e = Tokenizer::read(&path).unwrap_err().to_string();
        assert!(e.contains("tokenizer.json"), "{e}");
    }
}
