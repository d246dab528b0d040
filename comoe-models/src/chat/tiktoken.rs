//! Tokenizers that come as a table of byte strings and their ranks (`tiktoken.model`), turned into merges.

use std::collections::HashMap;
use std::path::Path;

use serde_json::{Value, json};

use super::merges::check_lengths;
use crate::error::{Error, Result};
use crate::load::{TOKENIZER_BYTES, read_small, read_text};

/// The file.
pub(super) const FILE: &str = "tiktoken.model";
/// The class in `tokenizer_config.json` whose rule for cutting texts is [`PIECES`]: Kimi-K2, Moonlight and their kin.
const CLASS: &str = "TikTokenTokenizer";
/// Special tokens behind the table, whether named or not.
const RESERVED: usize = 256;

/// How texts are cut before merging: runs of Han, words with their capitals and the `'s` behind them, up to three
/// digits, punctuation, line ends, other space.
const PIECES: &[&str] = &[
    r"[\p{Han}]+",
    concat!(
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    ),
    concat!(
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    ),
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
];

/// The tokenizer in `folder` as a `tokenizer.json`; `None` where the rule for cutting texts is not known.
///
/// # Errors
/// [`Error::BadFile`] when the table or `tokenizer_config.json` is not what it should be.
pub(super) fn converted(folder: &Path) -> Result<Option<Value>> {
    let config_path = folder.join("tokenizer_config.json");
    if !config_path.exists() {
        return Ok(None);
    }
    let config = read_text(&config_path)?;
    let config: Value = serde_json::from_str(&config)
        .map_err(|e| Error::bad_file(&config_path, format!("not valid JSON: {e}")))?;
    if config["tokenizer_class"] != CLASS {
        return Ok(None);
    }
    let path = folder.join(FILE);
    let text = String::from_utf8(read_small(&path, TOKENIZER_BYTES)?)
        .map_err(|e| Error::bad_file(&path, format!("not UTF-8: {}", e.utf8_error())))?;
    let tokens = table(&text).map_err(|reason| Error::bad_file(&path, reason))?;
    check_lengths(tokens.iter().map(Vec::len)).map_err(|reason| Error::bad_file(&path, reason))?;
    let ranks: HashMap<&[u8], usize> =
        tokens.iter().enumerate().map(|(rank, t)| (t.as_slice(), rank)).collect();
    if ranks.len() != tokens.len() {
        return Err(Error::bad_file(path, "has a token twice"));
    }
    let mut merges = Vec::new();
    for (rank, token) in tokens.iter().enumerate().filter(|(_, t)| t.len() > 1) {
        let Some((left, right)) = last_merge(token, rank, &ranks) else {
            let reason = format!("token {rank} is not made of two tokens of lower ranks");
            return Err(Error::bad_file(path, reason));
        };
        merges.push(json!([letters(left), letters(right)]));
    }
    let vocab: serde_json::Map<String, Value> =
        tokens.iter().enumerate().map(|(rank, token)| (letters(token), rank.into())).collect();
    let named = &config["added_tokens_decoder"];
    let added = (tokens.len()..tokens.len() + RESERVED).map(|id| {
        let token = &named[id.to_string()];
        let flag = |name: &str| token[name].as_bool().unwrap_or(false);
        json!({
            "id": id,
            "content": token["content"].as_str().map_or_else(|| format!("<|reserved_token_{id}|>"), str::to_owned),
            "single_word": flag("single_word"), "lstrip": flag("lstrip"), "rstrip": flag("rstrip"),
            "normalized": flag("normalized"), "special": token["special"].as_bool().unwrap_or(true),
        })
    });
    let bytes =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false});
    let cut = json!({
        "type": "Split", "pattern": {"Regex": PIECES.join("|")}, "behavior": "Isolated", "invert": false,
    });
    Ok(Some(json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added.collect::<Vec<_>>(),
        "normalizer": null, "pre_tokenizer": {"type": "Sequence", "pretokenizers": [cut, bytes]},
        "post_processor": null, "decoder": bytes,
        "model": {"type": "BPE", "ignore_merges": true, "vocab": vocab, "merges": merges},
    })))
}

/// The tokens of a table, by rank: lines of a token in base64 and its rank.
fn table(text: &str) -> std::result::Result<Vec<Vec<u8>>, String> {
    let mut tokens = Vec::new();
    for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.is_empty()) {
        let parsed = line
            .split_once(' ')
            .and_then(|(token, rank)| Some((base64(token)?, rank.parse::<usize>().ok()?)));
        match parsed {
            Some((token, rank)) if rank == tokens.len() && !token.is_empty() => tokens.push(token),
            Some((_, rank)) => {
                return Err(format!("line {}: rank {rank} instead of {}", number + 1, tokens.len()));
            }
            None => return Err(format!("line {}: expected a token in base64 and its rank", number + 1)),
        }
    }
    if tokens.is_empty() { Err("has no tokens".to_owned()) } else { Ok(tokens) }
}

fn base64(text: &str) -> Option<Vec<u8>> {
    let digits = text.trim_end_matches('=');
    let (mut out, mut bits, mut held) = (Vec::with_capacity(digits.len()), 0, 0u32);
    for c in digits.bytes() {
        let value = match c {
            b'A'..=b'Z' => c - b'A',
            b'a'..=b'z' => c - b'a' + 26,
            b'0'..=b'9' => c - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return None,
        };
        held = held << 6 | u32::from(value);
        bits += 6;
        if bits >= 8 {
            bits -= 8;
            // The upper bits have gone out already.
            out.push((held >> bits) as u8);
        }
    }
    Some(out)
}

/// The two tokens of which the merge of `rank` makes `token`: what merging its bytes by the lower ranks leaves.
fn last_merge<'t>(
    token: &'t [u8],
    rank: usize,
    ranks: &HashMap<&[u8], usize>,
) -> Option<(&'t [u8], &'t [u8])> {
    // Where the parts begin, and the end.
    let mut cuts: Vec<usize> = (0..=token.len()).collect();
    while cuts.len() > 3 {
        let pairs = cuts.windows(3).enumerate();
        let mergeable = pairs.filter_map(|(i, w)| Some((*ranks.get(&token[w[0]..w[2]])?, i)));
        let (_, at) = mergeable.filter(|(r, _)| *r < rank).min()?;
        cuts.remove(at + 1);
    }
    Some(token.split_at(cuts[1]))
}

/// Bytes as the letters that byte-level tokenizers use for them: printable ones stand for themselves, the others for the
/// letters from U+0100 on.
fn letters(bytes: &[u8]) -> String {
    let printable = |b: u8| matches!(b, 33..=126 | 161..=172 | 174..=255);
    let letter = |b: u8| match printable(b) {
        true => char::from(b),
        false => {
            let before = (0..b).filter(|other| !printable(*other)).count() as u32;
            char::from_u32(0x100 + before).unwrap_or(char::REPLACEMENT_CHARACTER)
        }
    };
    bytes.iter().map(|b| letter(*b)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chat::Tokenizer;

    fn folder() -> std::path::PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../assets/fixtures/tiktoken")
    }

    #[test]
    fn texts_have_the_tokens_that_tiktoken_gives_them() {
        let tokenizer = Tokenizer::of_model(&folder()).unwrap();
        let cases = std::fs::read_to_string(folder().join("cases.json")).unwrap();
        let cases: Vec<(String, Vec<u32>)> = serde_json::from_str(&cases).unwrap();
        assert!(cases.len() > 10);
        for (text, ids) in &cases {
            assert_eq!(tokenizer.encode(text, false).unwrap(), *ids, "{text:?}");
        }
        let end = tokenizer.id("<|im_end|>").unwrap();
        assert_eq!(tokenizer.encode("<|im_end|>", false).unwrap(), [end]);
        assert_eq!(tokenizer.decode(&[end]).unwrap(), "");
        let reserved = tokenizer.id("<|reserved_token_600|>").unwrap();
        assert_eq!(reserved, 600);
    }

    #[test]
    fn a_table_that_is_none_is_refused() {
        for (text, names) in [
            ("", "no tokens"),
            ("YQ== 1\n", "rank 1"),
            ("a b\n", "line 1"),
            ("Y!== 0\n", "base64"),
            ("YQ==\n", "line 1"),
        ] {
            let e = table(text).unwrap_err();
            assert!(e.contains(names), "{e}");
        }
        assert_eq!(base64("aGVsbG8=").unwrap(), b"hello");
        assert_eq!(base64("//4A").unwrap(), [0xff, 0xfe, 0]);
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(FILE), "YQ== 0\nYg== 1\nYWJi 2\n").unwrap();
        std::fs::write(
            dir.path().join("tokenizer_config.json"),
            r#"{"tokenizer_class": "TikTokenTokenizer"}"#,
        )
        .unwrap();
        let error = || Tokenizer::of_model(dir.path()).unwrap_err().to_string();
        assert!(error().contains(FILE) && error().contains("token 2"), "{}", error());
        // Finding the parts of such a token would take hours.
        std::fs::write(dir.path().join(FILE), format!("YQ== 0\n{} 1\n", "YWFh".repeat(1 << 20))).unwrap();
        assert!(error().contains("too long"), "{}", error());
    }
}
