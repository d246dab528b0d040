//! JSON as Python's `json.dumps` spells it, since chat templates were trained on that.

use std::io;

use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};

/// `json.dumps(value, ensure_ascii=ascii, indent=indent)`: `", "` and `": "` between parts, or one part a line.
pub(super) fn python_json(
    value: &impl Serialize,
    indent: Option<usize>,
    ascii: bool,
) -> Result<String, String> {
    let mut out = Vec::new();
    let done = match indent {
        Some(n) => {
            let spaces = vec![b' '; n];
            value.serialize(&mut Serializer::with_formatter(&mut out, PrettyFormatter::with_indent(&spaces)))
        }
        None => value.serialize(&mut Serializer::with_formatter(&mut out, Spaced)),
    };
    done.map_err(|e| e.to_string())?;
    let text = String::from_utf8(out).map_err(|e| e.to_string())?;
    Ok(if ascii { escape_non_ascii(&text) } else { text })
}

struct Spaced;

impl Formatter for Spaced {
    fn begin_array_value<W: ?Sized + io::Write>(&mut self, w: &mut W, first: bool) -> io::Result<()> {
        w.write_all(if first { b"" } else { b", " })
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, w: &mut W, first: bool) -> io::Result<()> {
        w.write_all(if first { b"" } else { b", " })
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, w: &mut W) -> io::Result<()> {
        w.write_all(b": ")
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
        assert_eq!(
            python_json(&v, None, false).unwrap(),
            r#"{"a": {}, "b": [1, 2.5, null, true], "s": "é\n\"😀"}"#
        );
        assert_eq!(python_json(&v["s"], None, true).unwrap(), r#""\u00e9\n\"\ud83d\ude00""#);
        assert_eq!(python_json(&v["b"], Some(2), false).unwrap(), "[\n  1,\n  2.5,\n  null,\n  true\n]");
    }
}
