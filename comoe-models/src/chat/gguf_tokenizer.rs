//! The tokenizer that a GGUF file describes: byte-level BPE (`gpt2`) with the pre-tokenizer that the file names, and
//! SentencePiece's BPE (`llama`) from its scores.

use std::collections::HashMap;

use comoe_core::store::{Gguf, GgufValue};
use serde_json::{Value, json};

use super::Tokenizer;
use super::merges::check_lengths;
use crate::error::{Error, Result};

/// GPT-2's contractions, which all patterns begin with.
macro_rules! contractions {
    () => {
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    };
}

const LLAMA3: &str = concat!(
    contractions!(),
    r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
const QWEN2: &str = concat!(
    contractions!(),
    r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
const GPT_4O: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    contractions!(),
    r"?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
    contractions!(),
    r"?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
const DEEPSEEK_V3: [&str; 3] = [
    r"\p{N}{1,3}",
    "[一-龥\u{3040}-ゟ゠-ヿ]+",
    concat!(
        r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"##,
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
];

/// How text is cut before merging, by the name in `tokenizer.ggml.pre`.
#[derive(Clone, Copy)]
enum Cut {
    /// GPT-2's pattern; digits one by one before it, where that is set.
    Gpt2 { digits: bool },
    /// Each of these patterns in turn.
    Patterns(&'static [&'static str]),
}

const CUTS: [(&str, Cut); 16] = [
    ("gpt-2", Cut::Gpt2 { digits: false }),
    ("olmo", Cut::Gpt2 { digits: false }),
    ("mpt", Cut::Gpt2 { digits: false }),
    ("smollm", Cut::Gpt2 { digits: true }),
    ("starcoder", Cut::Gpt2 { digits: true }),
    ("refact", Cut::Gpt2 { digits: true }),
    ("command-r", Cut::Gpt2 { digits: true }),
    ("qwen2", Cut::Patterns(&[QWEN2])),
    ("deepseek-r1-qwen", Cut::Patterns(&[QWEN2])),
    ("llama-bpe", Cut::Patterns(&[LLAMA3])),
    ("llama3", Cut::Patterns(&[LLAMA3])),
    ("dbrx", Cut::Patterns(&[LLAMA3])),
    ("glm4", Cut::Patterns(&[LLAMA3])),
    ("gpt-4o", Cut::Patterns(&[GPT_4O])),
    ("llama4", Cut::Patterns(&[GPT_4O])),
    ("deepseek-v3", Cut::Patterns(&DEEPSEEK_V3)),
];

/// Kinds of token in `tokenizer.ggml.token_type`.
const CONTROL: i64 = 3;
const USER_DEFINED: i64 = 4;

/// Most tokens of a vocabulary; ids are 32 bits, and published ones end at 2^18.
const MAX_TOKENS: usize = 1 << 22;

/// The tokenizer of a GGUF file.
///
/// # Errors
/// [`Error::BadFile`] for a kind of tokenizer or a pre-tokenizer that is not known, and for lists that do not fit each
/// other.
pub(crate) fn gguf_tokenizer(gguf: &Gguf) -> Result<Tokenizer> {
    let parts = Parts::read(gguf)?;
    let json = match gguf.text("tokenizer.ggml.model") {
        Some("gpt2") => parts.byte_level()?,
        Some("llama") => parts.sentence_piece()?,
        other => {
            let reason = format!(
                "has a tokenizer of the kind {}; gpt2 (byte-level BPE) and llama (SentencePiece BPE) are supported",
                other.unwrap_or("(none)")
            );
            return Err(Error::bad_file(gguf.path(), reason));
        }
    };
    let inner = tokenizers::Tokenizer::from_bytes(json.to_string())
        .map_err(|e| Error::bad_file(gguf.path(), format!("its tokenizer is damaged: {e}")))?;
    Ok(Tokenizer::from_inner(inner))
}

struct Parts<'a> {
    gguf: &'a Gguf,
    tokens: &'a [String],
    kinds: &'a [i64],
}

impl<'a> Parts<'a> {
    fn read(gguf: &'a Gguf) -> Result<Self> {
        let bad = |reason: &str| Error::bad_file(gguf.path(), reason);
        let Some(GgufValue::Texts(tokens)) = gguf.get("tokenizer.ggml.tokens") else {
            return Err(bad("has no tokenizer.ggml.tokens: a model without a tokenizer cannot read text"));
        };
        if tokens.len() > MAX_TOKENS {
            return Err(bad("has more tokens than any model"));
        }
        let kinds: &[i64] = match gguf.get("tokenizer.ggml.token_type") {
            Some(GgufValue::Integers(kinds)) if kinds.len() == tokens.len() => kinds,
            None => &[],
            Some(_) => return Err(bad("has tokenizer.ggml.token_type of another length than its tokens")),
        };
        Ok(Self { gguf, tokens, kinds })
    }

    fn flag(&self, key: &str, default: bool) -> bool {
        match self.gguf.get(key) {
            Some(GgufValue::Bool(flag)) => *flag,
            _ => default,
        }
    }

    fn kind(&self, id: usize) -> i64 {
        self.kinds.get(id).copied().unwrap_or(1)
    }

    fn vocab(&self) -> Value {
        self.tokens.iter().enumerate().map(|(id, t)| (t.clone(), Value::from(id))).collect()
    }

    /// Tokens that are found as they are, before everything else.
    fn added(&self) -> Vec<Value> {
        let added = |(id, content): (usize, &String)| {
            let kind = self.kind(id);
            matches!(kind, CONTROL | USER_DEFINED).then(|| {
                json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                    "normalized": false, "special": kind == CONTROL})
            })
        };
        self.tokens.iter().enumerate().filter_map(added).collect()
    }

    /// What is put around a plain text.
    fn post_processor(&self, add_by_default: bool) -> Value {
        let bos = self.gguf.number("tokenizer.ggml.bos_token_id");
        let token = bos.and_then(|id| Some((id, self.tokens.get(usize::try_from(id).ok()?)?)));
        let Some((id, token)) = token.filter(|_| self.flag("tokenizer.ggml.add_bos_token", add_by_default))
        else {
            return Value::Null;
        };
        let special = json!({"SpecialToken": {"id": token, "type_id": 0}});
        let text = |name: &str, type_id: u32| json!({"Sequence": {"id": name, "type_id": type_id}});
        json!({
            "type": "TemplateProcessing",
            "single": [special, text("A", 0)],
            "pair": [special, text("A", 0), text("B", 1)],
            "special_tokens": {token: {"id": token, "ids": [id], "tokens": [token]}},
        })
    }

    fn byte_level(&self) -> Result<Value> {
        let pre = self.gguf.text("tokenizer.ggml.pre").unwrap_or("gpt-2");
        let Some((_, cut)) = CUTS.iter().find(|(name, _)| *name == pre) else {
            let reason = format!(
                "has the pre-tokenizer {pre:?}, which is not known; known are {}: use the model's tokenizer.json with \
                 its safetensors files",
                CUTS.map(|c| c.0).join(", ")
            );
            return Err(Error::bad_file(self.gguf.path(), reason));
        };
        let byte_level = |regex: bool| json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": regex});
        let steps: Vec<Value> = match cut {
            Cut::Gpt2 { digits } => {
                let digits = digits.then(|| json!({"type": "Digits", "individual_digits": true}));
                digits.into_iter().chain([byte_level(true)]).collect()
            }
            Cut::Patterns(patterns) => {
                let split = |p: &&str| json!({"type": "Split", "pattern": {"Regex": p}, "behavior": "Isolated", "invert": false});
                patterns.iter().map(split).chain([byte_level(false)]).collect()
            }
        };
        let Some(GgufValue::Texts(merges)) = self.gguf.get("tokenizer.ggml.merges") else {
            return Err(Error::bad_file(self.gguf.path(), "has no tokenizer.ggml.merges"));
        };
        let pair = |merge: &String| -> Result<Value> {
            // The first half may begin with a space only in vocabularies that are not byte-level.
            match merge.split_once(' ') {
                Some((a, b)) if !a.is_empty() && !b.is_empty() => Ok(json!([a, b])),
                _ => Err(Error::bad_file(
                    self.gguf.path(),
                    format!("has the merge {merge:?}, expected two parts"),
                )),
            }
        };
        let merges = merges.iter().map(pair).collect::<Result<Vec<_>>>()?;
        // As these models' own tokenizer.json has it.
        let normalizer = if pre == "qwen2" { json!({"type": "NFC"}) } else { Value::Null };
        Ok(json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": self.added(),
            "normalizer": normalizer,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
            "post_processor": self.post_processor(false),
            "decoder": byte_level(true),
            "model": {"type": "BPE", "vocab": self.vocab(), "merges": merges,
                "ignore_merges": matches!(pre, "llama-bpe" | "llama3")},
        }))
    }

    fn sentence_piece(&self) -> Result<Value> {
        let Some(GgufValue::Floats(scores)) = self.gguf.get("tokenizer.ggml.scores") else {
            return Err(Error::bad_file(self.gguf.path(), "has no tokenizer.ggml.scores"));
        };
        if scores.len() != self.tokens.len() {
            let reason = "has tokenizer.ggml.scores of another length than its tokens";
            return Err(Error::bad_file(self.gguf.path(), reason));
        }
        check_lengths(self.tokens.iter().map(String::len))
            .map_err(|reason| Error::bad_file(self.gguf.path(), reason))?;
        let ids: HashMap<&str, usize> =
            self.tokens.iter().enumerate().map(|(id, t)| (t.as_str(), id)).collect();
        // Every way to make a token of two others, the best scores first (as transformers converts these tokenizers).
        let mut merges: Vec<(f32, usize, usize, usize)> = Vec::new();
        for (id, token) in self.tokens.iter().enumerate() {
            if self.kind(id) != 1 {
                continue;
            }
            let cuts = token.char_indices().skip(1).map(|(at, _)| token.split_at(at));
            merges.extend(cuts.filter_map(|(a, b)| Some((scores[id], id, *ids.get(a)?, *ids.get(b)?))));
        }
        merges.sort_by(|a, b| b.0.total_cmp(&a.0).then((a.1, a.2, a.3).cmp(&(b.1, b.2, b.3))));
        let merges: Vec<Value> =
            merges.iter().map(|(_, _, a, b)| json!([self.tokens[*a], self.tokens[*b]])).collect();
        let prefix = self.flag("tokenizer.ggml.add_space_prefix", true);
        let mut normalizers = vec![json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"})];
        let mut decoders = vec![
            json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "}),
            json!({"type": "ByteFallback"}),
            json!({"type": "Fuse"}),
        ];
        if prefix {
            normalizers.insert(0, json!({"type": "Prepend", "prepend": "▁"}));
            decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
        }
        let unknown = self.gguf.number("tokenizer.ggml.unknown_token_id").unwrap_or(0);
        let unknown = usize::try_from(unknown).ok().and_then(|id| self.tokens.get(id));
        Ok(json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": self.added(),
            "normalizer": {"type": "Sequence", "normalizers": normalizers},
            "pre_tokenizer": null,
            "post_processor": self.post_processor(true),
            "decoder": {"type": "Sequence", "decoders": decoders},
            "model": {"type": "BPE", "vocab": self.vocab(), "merges": merges, "unk_token": unknown,
                "fuse_unk": true, "byte_fallback": true},
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gguf_writer::Writer;

    fn open(writer: &Writer) -> Result<Tokenizer> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.gguf");
        writer.write(&path);
        gguf_tokenizer(&Gguf::open(&path)?)
    }

    fn texts(words: &[&str]) -> Vec<String> {
        words.iter().map(|w| (*w).to_owned()).collect()
    }

    #[test]
    fn every_pre_tokenizer_cuts_as_its_name_says() {
        let tokens = texts(&["1", "2", "12", "a", "b", "ab", "<|x|>"]);
        for (pre, cut) in CUTS {
            let writer = Writer::new("x")
                .text("tokenizer.ggml.model", "gpt2")
                .text("tokenizer.ggml.pre", pre)
                .texts("tokenizer.ggml.tokens", &tokens)
                .integers("tokenizer.ggml.token_type", &[1, 1, 1, 1, 1, 1, 3])
                .texts("tokenizer.ggml.merges", &texts(&["1 2", "a b"]));
            let tokenizer = open(&writer).unwrap();
            let whole = match cut {
                Cut::Gpt2 { digits } => !digits,
                Cut::Patterns(patterns) => patterns[0] != QWEN2,
            };
            let digits: &[u32] = if whole { &[2] } else { &[0, 1] };
            assert_eq!(tokenizer.encode("12", true).unwrap(), digits, "{pre}");
            assert_eq!(tokenizer.encode("ab<|x|>12", true).unwrap(), [&[5, 6], digits].concat(), "{pre}");
            assert_eq!(tokenizer.decode(&[5, 6, 2]).unwrap(), "ab12", "{pre}");
        }
    }

    #[test]
    fn sentence_piece_merges_by_score_and_falls_back_to_bytes() {
        let tokens = texts(&[
            "<unk>", "<s>", "</s>", "<0xE4>", "<0xB8>", "<0xAD>", "▁", "h", "e", "l", "o", "ll", "he", "▁he",
            "llo", "▁hello",
        ]);
        let scores = [0., 0., 0., 0., 0., 0., -9., -9., -9., -9., -9., -1., -2., -3., -4., -5.];
        let base = Writer::new("x")
            .text("tokenizer.ggml.model", "llama")
            .texts("tokenizer.ggml.tokens", &tokens)
            .integers("tokenizer.ggml.token_type", &[2, 3, 3, 6, 6, 6, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1])
            .number("tokenizer.ggml.bos_token_id", 1)
            .number("tokenizer.ggml.unknown_token_id", 0);
        let tokenizer = open(&base.clone().floats("tokenizer.ggml.scores", &scores)).unwrap();
        for (text, ids) in
            [("hello", &[15][..]), ("hell", &[13, 11]), ("中", &[6, 3, 4, 5]), ("hello hello", &[15, 15])]
        {
            assert_eq!(tokenizer.encode(text, true).unwrap(), [&[1], ids].concat(), "{text}");
            assert_eq!(tokenizer.encode(text, false).unwrap(), ids, "{text}");
            assert_eq!(tokenizer.decode(ids).unwrap(), text);
        }
        let few = open(&base.clone().floats("tokenizer.ggml.scores", &scores[1..])).unwrap_err().to_string();
        assert!(few.contains("another length"), "{few}");
        assert!(open(&base).unwrap_err().to_string().contains("tokenizer.ggml.scores"));
        // Finding the parts of such a token would take hours.
        let long = Writer::new("x")
            .text("tokenizer.ggml.model", "llama")
            .texts("tokenizer.ggml.tokens", &["a".repeat(1 << 20)])
            .floats("tokenizer.ggml.scores", &[0.0]);
        let said = open(&long).unwrap_err().to_string();
        assert!(said.contains("too long"), "{said}");
    }

    #[test]
    fn what_is_not_known_is_refused_by_name() {
        let base = |model: &str| Writer::new("x").text("tokenizer.ggml.model", model);
        let tokens = |w: Writer| w.texts("tokenizer.ggml.tokens", &texts(&["a"]));
        for (writer, part) in [
            (base("gpt2"), "tokenizer.ggml.tokens"),
            (tokens(base("t5")), "of the kind t5"),
            (tokens(base("gpt2")).text("tokenizer.ggml.pre", "tekken"), "\"tekken\""),
            (tokens(base("gpt2")), "tokenizer.ggml.merges"),
            (tokens(base("gpt2")).texts("tokenizer.ggml.merges", &texts(&["ab"])), "\"ab\""),
            (tokens(base("gpt2")).integers("tokenizer.ggml.token_type", &[1, 1]), "another length"),
        ] {
            let text = open(&writer).unwrap_err().to_string();
            assert!(text.contains(part), "{part}: {text}");
        }
    }
}
