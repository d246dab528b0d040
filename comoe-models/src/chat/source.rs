//! What is changed in a template before it is compiled.
//!
//! - `{% generation %}` and `{% endgeneration %}`, marks for training that minijinja does not know, become a block that always
//!   runs.
//! - What is assigned to a namespace's attribute goes through the filter [`HELD`]. Such an attribute is all that lives on
//!   from one turn of a loop to the next, so that only there can values become ever deeper, or hold themselves, which
//!   overflows the stack of whoever prints or drops them.
//!
//! Tags are found as minijinja's lexer finds them, strings, comments and raw blocks included; line numbers stay.

use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind, State};

use super::python::{MOST_DEPTH, TooLarge};

/// Name of the filter that [`held`] is.
pub(super) const HELD: &str = "comoe_held";

/// The source as it is compiled.
pub(super) fn prepared(source: &str) -> String {
    let bytes = source.as_bytes();
    let mut out = String::with_capacity(source.len());
    let mut copied = 0;
    let mut at = 0;
    while let Some(start) = next_start(bytes, at) {
        let inside = start + 2;
        at = match bytes[start + 1] {
            b'#' => find(bytes, inside, b"#}").map_or(bytes.len(), |end| end + 2),
            b'{' => end_of(bytes, inside, b"}}").map_or(bytes.len(), |(_, after)| after),
            _ if basic_tag(bytes, inside, b"raw").is_some() => end_of_raw(bytes, inside),
            _ => {
                let Some((end, after)) = end_of(bytes, inside, b"%}") else { break };
                if let Some((from, to, text)) = changed(source, inside, end) {
                    out.push_str(&source[copied..from]);
                    out.push_str(&text);
                    copied = to;
                }
                after
            }
        };
    }
    out + &source[copied..]
}

/// What a tag's inside becomes, if it is changed: which part of it, and by what.
fn changed(source: &str, inside: usize, end: usize) -> Option<(usize, usize, String)> {
    let tag = source[inside..end].trim_start_matches(['-', '+']).trim();
    let from = tag.as_ptr() as usize - source.as_ptr() as usize;
    let to = from + tag.len();
    match tag {
        "generation" => return Some((from, to, "if true".to_owned())),
        "endgeneration" => return Some((from, to, "endif".to_owned())),
        _ => {}
    }
    let rest = tag
        .strip_prefix("set")
        .filter(|rest| !rest.starts_with(|c: char| c.is_alphanumeric() || c == '_'))?;
    // A target has names, dots, commas and parentheses; without a `=` behind it, it is a block's.
    let target = rest.find(|c: char| !(c.is_alphanumeric() || c.is_whitespace() || "_.,()".contains(c)))?;
    let value = rest[target..].strip_prefix('=')?;
    rest[..target].contains('.').then(|| (to - value.len(), to, format!(" ({})|{HELD}", value.trim())))
}

/// The next `{{`, `{%` or `{#`.
fn next_start(bytes: &[u8], at: usize) -> Option<usize> {
    (at..bytes.len().saturating_sub(1))
        .find(|i| bytes[*i] == b'{' && matches!(bytes[i + 1], b'{' | b'%' | b'#'))
}

fn find(bytes: &[u8], at: usize, what: &[u8]) -> Option<usize> {
    bytes.get(at..)?.windows(what.len()).position(|w| w == what).map(|i| at + i)
}

/// Where the inside of a tag or expression ends, and what follows begins: not within strings or parentheses.
fn end_of(bytes: &[u8], mut at: usize, close: &[u8]) -> Option<(usize, usize)> {
    let mut open = 0i64;
    while at < bytes.len() {
        let sign = usize::from(matches!(bytes[at], b'-' | b'+'));
        if open == 0 && bytes[at + sign..].starts_with(close) {
            return Some((at, at + sign + close.len()));
        }
        match bytes[at] {
            quote @ (b'"' | b'\'') => {
                at += 1;
                while *bytes.get(at)? != quote {
                    at += if bytes[at] == b'\\' { 2 } else { 1 };
                }
            }
            b'(' | b'[' | b'{' => open += 1,
            b')' | b']' | b'}' => open -= 1,
            _ => {}
        }
        at += 1;
    }
    None
}

/// Where a tag that is nothing but `name` ends, of which what is behind `{%` begins at `at`.
fn basic_tag(bytes: &[u8], at: usize, name: &[u8]) -> Option<usize> {
    let sign = |at: usize| at + usize::from(matches!(bytes.get(at), Some(b'-' | b'+')));
    let space =
        |at: usize| at + bytes[at.min(bytes.len())..].iter().take_while(|b| b.is_ascii_whitespace()).count();
    let at = space(sign(at));
    let at = sign(space(bytes.get(at..)?.starts_with(name).then_some(at + name.len())?));
    bytes.get(at..)?.starts_with(b"%}").then_some(at + 2)
}

fn end_of_raw(bytes: &[u8], mut at: usize) -> usize {
    while let Some(start) = find(bytes, at, b"{%") {
        at = start + 2;
        if let Some(end) = basic_tag(bytes, at, b"endraw") {
            return end;
        }
    }
    bytes.len()
}

/// A value that a namespace may hold: not too deep, and no namespace.
pub(super) fn held(state: &State<'_, '_>, value: Value) -> Result<Value, Error> {
    look_into(state, &value, 0)?;
    Ok(value)
}

fn look_into(state: &State<'_, '_>, value: &Value, depth: usize) -> Result<(), Error> {
    let refuse = |reason: String| Err(Error::new(ErrorKind::InvalidOperation, reason));
    let Some(object) = value.as_object() else { return Ok(()) };
    // Its type is minijinja's own.
    if object.type_name().ends_with("::Namespace") {
        return refuse("a namespace is put into a namespace".to_owned());
    }
    if depth > MOST_DEPTH {
        return refuse(TooLarge.to_string());
    }
    state.consume_fuel(1)?;
    if matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable | ValueKind::Map) {
        for item in value.try_iter()? {
            if value.kind() == ValueKind::Map {
                look_into(state, &value.get_item(&item)?, depth + 1)?;
            }
            look_into(state, &item, depth + 1)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_assignments_to_attributes_and_marks_change() {
        for (source, expected) in [
            ("a {% set ns.b = 1, 2 -%} c", "a {% set ns.b = (1, 2)|comoe_held-%} c"),
            (
                "{%- set ns.b=x == 'a %}' %}{% set d = 2 %}",
                "{%- set ns.b= (x == 'a %}')|comoe_held%}{% set d = 2 %}",
            ),
            ("{% set (a.b, c) = [1, {'k': '%}'}] %}", "{% set (a.b, c) = ([1, {'k': '%}'}])|comoe_held%}"),
            ("{% generation -%}x{%- endgeneration %}", "{% if true-%}x{%- endif %}"),
        ] {
            // Spaces before the end of a tag mean nothing.
            let found = prepared(source).replace(" -%}", "-%}");
            assert_eq!(found.replace("held %}", "held%}"), expected.replace(" -%}", "-%}"), "{source}");
        }
        for same in [
            "{% set settings.x %}{% endset %}{% set a | replace('.', '=') %}{% endset %}",
            "{# {% set a.b = 1 %} #}{% raw %}{% set a.b = 1 %}{% endraw %}{{ '{% set a.b = 1 %}' }}",
            "{%- raw -%} {% set a.b = 1 %} {%- endraw +%}{{ {'a': {'b': 1}} }}",
            "{% setting a.b = 1 %}{% if a.b == 1 %}{% endif %}",
            "{% set a.b = 'open",
            "{{ ( }} {% set a.b = 1",
            "{",
            "{%",
            "{% raw %}",
        ] {
            assert_eq!(prepared(same), same);
        }
    }
}
