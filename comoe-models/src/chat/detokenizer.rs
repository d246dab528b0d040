//! Turns a stream of tokens into a stream of text without ever cutting a character.

use super::Tokenizer;
use crate::error::Result;

/// Streaming detokeniser by prefix and read offset.
///
/// A token may hold part of a UTF-8 character, and a tokenizer may treat the first token of a text differently (strip
/// its space). So each step decodes a short window that begins with tokens already handed out, and hands out what the
/// window gained, once it ends in a whole character. The pieces put together equal the decoded whole.
#[derive(Debug, Clone, Default)]
pub struct Detokenizer {
    ids: Vec<u32>,
    /// Start of the window.
    prefix: usize,
    /// End of what has been handed out.
    read: usize,
}

impl Detokenizer {
    /// A detokeniser at the start of a text.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes one token and returns the text that is complete with it (often empty).
    ///
    /// # Errors
    /// [`Error::Tokenizer`](crate::Error::Tokenizer).
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> Result<String> {
        self.ids.push(id);
        let text = tokenizer.decode(&self.ids[self.prefix..])?;
        // U+FFFD at the end: bytes of a character whose rest may come with the next token.
        if text.ends_with(char::REPLACEMENT_CHARACTER) {
            return Ok(String::new());
        }
        self.hand_out(tokenizer, text)
    }

    /// Returns what is still held back (bytes of an unfinished character become U+FFFD) and starts anew.
    ///
    /// # Errors
    /// [`Error::Tokenizer`](crate::Error::Tokenizer).
    pub fn flush(&mut self, tokenizer: &Tokenizer) -> Result<String> {
        let text = tokenizer.decode(&self.ids[self.prefix..])?;
        let rest = self.hand_out(tokenizer, text)?;
        *self = Self::new();
        Ok(rest)
    }

    fn hand_out(&mut self, tokenizer: &Tokenizer, text: String) -> Result<String> {
        let known = tokenizer.decode(&self.ids[self.prefix..self.read])?;
        // `known` ended in a whole character when it was handed out, so it still begins the window's text.
        let new = text.strip_prefix(known.as_str()).unwrap_or_default().to_owned();
        if !new.is_empty() {
            self.prefix = self.read;
            self.read = self.ids.len();
        }
        Ok(new)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::testing::byte_level;

    fn stream(tokenizer: &Tokenizer, ids: &[u32]) -> (Vec<String>, String) {
        let mut d = Detokenizer::new();
        let pieces = ids.iter().map(|id| d.push(tokenizer, *id).unwrap()).collect();
        let rest = d.flush(tokenizer).unwrap();
        (pieces, rest)
    }

    #[test]
    fn a_character_comes_out_whole_with_its_last_byte() {
        let t = byte_level();
        let (pieces, rest) = stream(&t, &[0xe2, 0x82, 0xac, b'!'.into()]);
        assert_eq!(pieces, ["", "", "€", "!"]);
        assert_eq!(rest, "");
    }

    #[test]
    fn an_unfinished_character_is_flushed_as_a_replacement() {
        let t = byte_level();
        let (pieces, rest) = stream(&t, &[b'a'.into(), 0xe2, 0x82]);
        assert_eq!(pieces, ["a", "", ""]);
        assert_eq!(rest, t.decode(&[0xe2, 0x82]).unwrap());
        assert!(rest.contains('\u{fffd}'));
    }

    #[test]
    fn special_tokens_give_no_text() {
        let t = byte_level();
        let (pieces, rest) = stream(&t, &[b'a'.into(), 263, b'b'.into(), 264]);
        assert_eq!((pieces.concat() + &rest).as_str(), "ab");
    }

    proptest! {
        #[test]
        fn pieces_of_any_text_are_whole_and_add_up(
            text in prop::collection::vec(
                prop_oneof![Just("the ".to_owned()), "[a-z ]{1,4}", "[中丰央亭]{1,3}", "[😀😁🙂é€]{1,3}", "\\PC{1,3}"],
                0..12,
            ),
        ) {
            let text = text.concat();
            prop_assume!(!text.contains('\u{fffd}'));
            let t = byte_level();
            let ids = t.encode(&text, false).unwrap();
            let (pieces, rest) = stream(&t, &ids);
            prop_assert!(!pieces.concat().contains(char::REPLACEMENT_CHARACTER));
            prop_assert_eq!(rest, "");
            prop_assert_eq!(pieces.concat(), text);
        }

        #[test]
        fn any_token_sequence_adds_up_to_the_decoded_whole(ids in prop::collection::vec(0u32..265, 0..40)) {
            let t = byte_level();
            let (pieces, rest) = stream(&t, &ids);
            prop_assert_eq!(pieces.concat() + &rest, t.decode(&ids).unwrap());
        }
    }
}
