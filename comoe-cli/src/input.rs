//! Text from standard input, or a file of prompts.

use std::io::{BufRead, Read};

use crate::error::{Error, Result};

/// Longest turn on one line, in bytes: more than any context holds.
const LINE_LIMIT: usize = 4 << 20;
/// Longest prompt from a file or pipe, in bytes.
const PROMPT_LIMIT: usize = 64 << 20;
/// What messages call it.
pub(crate) const STDIN: &str = "standard input";

/// Turns of a chat, one a line.
#[derive(Debug)]
pub(crate) struct Lines<R> {
    reader: R,
    /// What it reads, for messages.
    from: String,
    number: usize,
}

impl<R: BufRead> Lines<R> {
    pub(crate) fn new(reader: R, from: impl Into<String>) -> Self {
        Self { reader, from: from.into(), number: 0 }
    }

    /// The next line without its end; `None` after the last.
    pub(crate) fn next_line(&mut self) -> Result<Option<String>> {
        self.number += 1;
        let (line, from) = (self.number, || self.from.clone());
        let mut bytes = Vec::new();
        let mut limited = (&mut self.reader).take(LINE_LIMIT as u64 + 1);
        let read = limited.read_until(b'\n', &mut bytes);
        if read.map_err(|source| Error::Input { from: from(), source })? == 0 {
            return Ok(None);
        }
        if bytes.last() == Some(&b'\n') {
            bytes.pop();
            if bytes.last() == Some(&b'\r') {
                bytes.pop();
            }
        } else if bytes.len() > LINE_LIMIT {
            return Err(Error::LineTooLong { from: from(), line, limit: LINE_LIMIT });
        }
        match String::from_utf8(bytes) {
            Ok(text) => Ok(Some(text)),
            Err(e) => Err(Error::NotUtf8 { from: from(), line, byte: e.utf8_error().valid_up_to() + 1 }),
        }
    }
}

/// All of standard input as one prompt, without the newline at its end that most tools add.
pub(crate) fn read_prompt(reader: impl Read) -> Result<String> {
    let mut bytes = Vec::new();
    let from = || STDIN.to_owned();
    let read = reader.take(PROMPT_LIMIT as u64 + 1).read_to_end(&mut bytes);
    read.map_err(|source| Error::Input { from: from(), source })?;
    if bytes.len() > PROMPT_LIMIT {
        return Err(Error::InputTooLong { from: from(), limit: PROMPT_LIMIT });
    }
    let mut text = String::from_utf8(bytes).map_err(|e| {
        let valid = &e.as_bytes()[..e.utf8_error().valid_up_to()];
        let line_start = valid.iter().rposition(|b| *b == b'\n').map_or(0, |at| at + 1);
        let line = valid.iter().filter(|b| **b == b'\n').count() + 1;
        Error::NotUtf8 { from: from(), line, byte: valid.len() - line_start + 1 }
    })?;
    if text.ends_with('\n') {
        text.pop();
        if text.ends_with('\r') {
            text.pop();
        }
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_end_as_on_any_system_and_the_last_may_end_without() {
        let mut lines = Lines::new(&b"one\r\n\n  three \nfour"[..], STDIN);
        for expected in [Some("one"), Some(""), Some("  three "), Some("four"), None, None] {
            assert_eq!(lines.next_line().unwrap().as_deref(), expected);
        }
    }

    #[test]
    fn what_is_not_utf8_is_named_by_line_and_byte() {
        let mut lines = Lines::new(&b"fine\nbad \xff byte\n"[..], "p.txt");
        lines.next_line().unwrap();
        let e = lines.next_line().unwrap_err();
        assert!(e.to_string().starts_with("p.txt, line 2: not UTF-8 at byte 5 "), "{e}");
        let e = read_prompt(&b"fine\nbad \xff byte\n"[..]).unwrap_err();
        assert!(matches!(e, Error::NotUtf8 { line: 2, byte: 5, .. }), "{e}");
        let e = read_prompt(&b"\xffx"[..]).unwrap_err();
        assert!(matches!(e, Error::NotUtf8 { line: 1, byte: 1, .. }), "{e}");
    }

    #[test]
    fn endless_input_is_refused_and_not_swallowed() {
        let endless = || std::io::BufReader::new(std::io::repeat(b'x'));
        let e = Lines::new(endless(), STDIN).next_line().unwrap_err();
        assert!(matches!(e, Error::LineTooLong { line: 1, .. }), "{e}");
        assert!(matches!(read_prompt(endless()).unwrap_err(), Error::InputTooLong { .. }));
        let exact = [&vec![b'x'; LINE_LIMIT][..], b"\nnext"].concat();
        let mut lines = Lines::new(&exact[..], STDIN);
        assert_eq!(lines.next_line().unwrap().map(|l| l.len()), Some(LINE_LIMIT));
        assert_eq!(lines.next_line().unwrap().as_deref(), Some("next"));
    }

    #[test]
    fn a_prompt_keeps_its_inner_lines() {
        assert_eq!(read_prompt(&b"a\n\nb\n"[..]).unwrap(), "a\n\nb");
        assert_eq!(read_prompt(&b"a\r\n"[..]).unwrap(), "a");
        assert_eq!(read_prompt(&b""[..]).unwrap(), "");
    }
}
