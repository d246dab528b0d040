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

/// A byte-level BPE tokenizer for tests: every byte is a token, and a few merges cut through UTF-8 characters.
#[cfg(test)]
pub(crate) mod testing {
    use super::*;

    /// Letters that stand for bytes in byte-level BPE (GPT-2's table).
    fn byte_letters() -> Vec<char> {
        let printable = |b: &u32| (33..=126).contains(b) || (161..=172).contains(b) || (174..=255).contains(b);
        let mut extra = 256;
        (0..256u32)
            .map(|b| {
                let code = if printable(&b) {
                    b
                } else {
                    extra += 1;
                    extra - 1
                };
                char::from_u32(code).unwrap()
            })
            .collect()
    }

    /// 256 byte tokens in byte order, then merges, then the special tokens `<|im_start|>`, `<|im_end|>`.
    pub(crate) fn byte_level() -> Tokenizer {
        let letters = byte_letters();
        let spell = |bytes: &[u8]| bytes.iter().map(|b| letters[*b as usize]).collect::<String>();
        let mut vocab = serde_json::Map::new();
        for (b, letter) in letters.iter().enumerate() {
            vocab.insert(letter.to_string(), b.into());
        }
        // Merges of ASCII, of the head of CJK and emoji characters, and of a tail with the next head.
        let merges: [(&[u8], &[u8]); 7] = [
            (b"t", b"h"),
            (b"th", b"e"),
            (b" ", b"the"),
            (&[0xf0], &[0x9f]),
            (&[0xf0, 0x9f], &[0x98]),
            (&[0xe4], &[0xb8]),
            (&[0xad], &[0xe5]),
        ];
        for (a, b) in merges {
            vocab.insert(spell(a) + &spell(b), vocab.len().into());
        }
        let merges: Vec<_> = merges.iter().map(|(a, b)| [spell(a), spell(b)]).collect();
        let special = |id: usize, content: &str| {
            serde_json::json!({"id": id, "content": content, "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false, "special": true})
        };
        let n = vocab.len();
        let byte_level = serde_json::json!({"type": "ByteLevel", "add_prefix_space": false,
            "trim_offsets": false, "use_regex": false});
        let json = serde_json::json!({
            "version": "1.0", "truncation": null, "padding": null,
            "added_tokens": [special(n, "<|im_start|>"), special(n + 1, "<|im_end|>")],
            "normalizer": null, "pre_tokenizer": byte_level, "post_processor": null, "decoder": byte_level,
            "model": {"type": "BPE", "vocab": vocab, "merges": merges},
        });
        Tokenizer::from_inner(tokenizers::Tokenizer::from_bytes(json.to_string()).unwrap())
    }

    #[test]
    fn the_test_tokenizer_round_trips() {
        let t = byte_level();
        let text = "over the 中央 😀 line";
        let ids = t.encode(text, true).unwrap();
        assert!(ids.len() < text.len());
        assert_eq!(t.decode(&ids).unwrap(), text);
        assert_eq!(t.id("<|im_end|>"), Some(264));
        assert_eq!(t.encode("<|im_end|>", false).unwrap(), [264]);
        assert_eq!(t.decode(&[264]).unwrap(), "");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
