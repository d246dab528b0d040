//! JSON as Python's `json.dumps` spells it, since chat templates were trained on that.

use std::io;

use serde::Serialize;
use serde_json::ser::{Formatter, Serializer};

use super::python::{MOST_BYTES, MOST_DEPTH, TooLarge};

/// How `json.dumps` is asked to write.
#[derive(Debug, Clone, Default)]
pub(super) struct PythonJson {
    /// One part a line, so many spaces deep.
    pub(super) indent: Option<usize>,
    /// `ensure_ascii`
    pub(super) ascii: bool,
    /// Between parts, and between a key and its value. The usual ones are `", "`, which is `","` with an indent, and
    /// `": "`.
    pub(super) separators: Option<[String; 2]>,
    /// `sort_keys`
    pub(super) sorted: bool,
}

/// `json.dumps(value, ...)`.
pub(super) fn python_json(value: &impl Serialize, how: PythonJson) -> Result<String, String> {
    let failed = |e: serde_json::Error| e.to_string();
    let separators = how.separators.unwrap_or_else(|| {
        let between = if how.indent.is_some() { "," } else { ", " };
        [between.to_owned(), ": ".to_owned()]
    });
    let mut python = Python { separators, indent: how.indent, depth: 0, empty: true };
    let mut out = Limited(Vec::new());
    value.serialize(&mut Serializer::with_formatter(&mut out, &mut python)).map_err(failed)?;
    if how.sorted {
        // The map of serde_json sorts its keys. That the value is not endless was seen just now.
        out.0.clear();
        let sorted = serde_json::to_value(value).map_err(failed)?;
        sorted.serialize(&mut Serializer::with_formatter(&mut out, &mut python)).map_err(failed)?;
    }
    let text = String::from_utf8(out.0).map_err(|e| e.to_string())?;
    Ok(if how.ascii { escape_non_ascii(&text) } else { text })
}

/// Takes so many bytes and no more.
struct Limited(Vec<u8>);

impl io::Write for Limited {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > MOST_BYTES {
            return Err(io::Error::other(TooLarge.to_string()));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

struct Python {
    separators: [String; 2],
    indent: Option<usize>,
    depth: usize,
    /// Whether the list or object at hand has had no part yet.
    empty: bool,
}

impl Python {
    fn begin<W: ?Sized + io::Write>(&mut self, w: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth += 1;
        self.empty = true;
        if self.depth > MOST_DEPTH {
            return Err(io::Error::other(TooLarge.to_string()));
        }
        w.write_all(bracket)
    }

    fn part<W: ?Sized + io::Write>(&mut self, w: &mut W, first: bool) -> io::Result<()> {
        if !first {
            w.write_all(self.separators[0].as_bytes())?;
        }
        self.empty = false;
        self.line(w)
    }

    fn end<W: ?Sized + io::Write>(&mut self, w: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth -= 1;
        if !self.empty {
            self.line(w)?;
        }
        self.empty = false;
        w.write_all(bracket)
    }

    fn line<W: ?Sized + io::Write>(&self, w: &mut W) -> io::Result<()> {
        let Some(indent) = self.indent else { return Ok(()) };
        w.write_all(b"\n")?;
        let mut left = indent.saturating_mul(self.depth);
        while left > 0 {
            let spaces = &[b' '; 64][..left.min(64)];
            w.write_all(spaces)?;
            left -= spaces.len();
        }
        Ok(())
    }
}

impl Formatter for &mut Python {
    fn begin_array<W: ?Sized + io::Write>(&mut self, w: &mut W) -> io::Result<()> {
        self.begin(w, b"[")
    }

    fn end_array<W: ?Sized + io::Write>(&mut self, w: &mut W) -> io::Result<()> {
        self.end(w, b"]")
    }

    fn begin_array_value<W: ?Sized + io::Write>(&mut self, w: &mut W, first: bool) -> io::Result<()> {
        self.part(w, first)
    }

    fn begin_object<W: ?Sized + io::Write>(&mut self, w: &mut W) -> io::Result<()> {
        self.begin(w, b"{")
    }

    fn end_object<W: ?Sized + io::Write>(&mut self, w: &mut W) -> io::Result<()> {
        self.end(w, b"}")
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, w: &mut W, first: bool) -> io::Result<()> {
        self.part(w, first)
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, w: &mut W) -> io::Result<()> {
        w.write_all(self.separators[1].as_bytes())
    }
}

/// Non-ASCII characters occur only inside JSON strings, where they may be written as UTF-16 escapes.
fn escape_non_ascii(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_ascii() {
            out.push(c);
        } else {
            let mut units = [0; 2];
            for unit in c.encode_utf16(&mut units) {
                out.push_str(&format!("\\u{unit:04x}"));
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_python_prints_it() {
        let v = serde_json::json!({"a": {}, "b": [1, 2.5, null, true], "s": "é\n\"😀"});
        let plain = PythonJson::default;
        assert_eq!(
            python_json(&v, plain()).unwrap(),
            r#"{"a": {}, "b": [1, 2.5, null, true], "s": "é\n\"😀"}"#
        );
        let ascii = PythonJson { ascii: true, ..plain() };
        assert_eq!(python_json(&v["s"], ascii).unwrap(), r#""\u00e9\n\"\ud83d\ude00""#);
        let indented = || PythonJson { indent: Some(2), ..plain() };
        assert_eq!(python_json(&v["b"], indented()).unwrap(), "[\n  1,\n  2.5,\n  null,\n  true\n]");
        assert_eq!(
            python_json(&serde_json::json!([[], [{}]]), indented()).unwrap(),
            "[\n  [],\n  [\n    {}\n  ]\n]"
        );
        let tight = PythonJson { separators: Some([",".into(), ":".into()]), ..plain() };
        assert_eq!(python_json(&v["b"], tight).unwrap(), "[1,2.5,null,true]");
    }
}
