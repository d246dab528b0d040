//! Stop strings over streamed text.

use crate::error::{Error, Result};

/// Watches streamed text for stop strings and holds back what may be the beginning of one.
#[derive(Debug, Clone)]
pub struct StopStrings {
    strings: Vec<String>,
    held: String,
}

impl StopStrings {
    /// Watches for any of `strings`.
    ///
    /// # Errors
    /// [`Error::BadOption`] for an empty string, which would stop at once.
    pub fn new(strings: &[String]) -> Result<Self> {
        if strings.iter().any(String::is_empty) {
            return Err(Error::BadOption {
                option: "stop",
                value: "\"\"".into(),
                expected: "expected at least one character",
            });
        }
        Ok(Self { strings: strings.to_vec(), held: String::new() })
    }

    /// Takes a piece of text. Returns the text that is safe to show, and whether a stop string was reached (it and
    /// what follows it are dropped; of several, the one that begins first counts).
    pub fn push(&mut self, piece: &str) -> (String, bool) {
        if self.strings.is_empty() {
            return (piece.to_owned(), false);
        }
        self.held.push_str(piece);
        if let Some(at) = self.strings.iter().filter_map(|s| self.held.find(s.as_str())).min() {
            self.held.truncate(at);
            return (std::mem::take(&mut self.held), true);
        }
        let held = self.held.as_bytes();
        // The longest tail that begins a stop string. It begins at a character, since stop strings do.
        let tail = (1..=held.len())
            .rev()
            .find(|n| self.strings.iter().any(|s| s.as_bytes().starts_with(&held[held.len() - n..])))
            .unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - tail);
        (std::mem::replace(&mut self.held, rest), false)
    }

    /// Returns what is held back, at the end of the text.
    pub fn flush(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn stops(strings: &[&str]) -> StopStrings {
        StopStrings::new(&strings.iter().map(|s| (*s).to_owned()).collect::<Vec<_>>()).unwrap()
    }

    #[test]
    fn a_beginning_is_held_back_until_it_is_decided() {
        let mut s = stops(&["\nUser:"]);
        assert_eq!(s.push("Hi\nUs"), ("Hi".into(), false));
        assert_eq!(s.push("ual\nUse"), ("\nUsual".into(), false));
        assert_eq!(s.push("r: more"), (String::new(), true));
        let mut s = stops(&["abc", "bd"]);
        assert_eq!(s.push("xab"), ("x".into(), false));
        assert_eq!(s.push("d"), ("a".into(), true));
        let mut s = stops(&["éé"]);
        assert_eq!(s.push("aé"), ("a".into(), false));
        assert_eq!(s.flush(), "é");
        assert!(StopStrings::new(&[String::new()]).is_err());
    }

    proptest! {
        /// Cut anywhere, the stream shows what lies before the first stop string, and stops if there is one.
        #[test]
        fn cuts_do_not_matter(
            pieces in prop::collection::vec("[abé]{0,3}", 0..12),
            strings in prop::collection::vec("[abé]{1,4}", 0..3),
        ) {
            let whole = pieces.concat();
            let end = strings.iter().filter_map(|s| whole.find(s.as_str())).min();
            let mut s = StopStrings::new(&strings).unwrap();
            let mut shown = String::new();
            let mut stopped = false;
            for p in &pieces {
                let (text, stop) = s.push(p);
                shown += &text;
                stopped = stop;
                if stop {
                    break;
                }
            }
            if !stopped {
                shown += &s.flush();
            }
            // Which of two overlapping stop strings completes first depends on the cuts; with one it cannot.
            if strings.len() < 2 {
                prop_assert_eq!(stopped, end.is_some());
                prop_assert_eq!(shown, &whole[..end.unwrap_or(whole.len())]);
            } else {
                prop_assert_eq!(stopped, end.is_some());
                prop_assert!(whole.starts_with(&shown));
            }
        }
    }
}
