//! Which files of a repository a model needs: the rest is the same in other formats, or for people.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use serde::Deserialize;

/// What says which family a model is of.
pub(super) const CONFIG: &str = "config.json";
/// Which shard holds which tensor.
pub(super) const INDEX: &str = "model.safetensors.index.json";
/// Most bytes of it: published ones end at 20 MB.
const MAX_INDEX_BYTES: u64 = 64 << 20;
/// All weights in one file.
const SINGLE: &str = "model.safetensors";
/// Small files that are taken where they are.
const SMALL: &[&str] = &[
    CONFIG,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "quantize_config.json",
];
/// The tokenizer, and what others than `tokenizer.json` are made of.
const TOKENIZER: &str = "tokenizer.json";
const OTHER_TOKENIZERS: &[&str] =
    &["tokenizer.model", "tiktoken.model", "vocab.json", "merges.txt", "tekken.json"];

/// The small files to take of those that a repository has. The index is among them.
pub(super) fn small<'a>(files: impl Iterator<Item = &'a str> + Clone) -> Vec<&'a str> {
    let has_tokenizer = files.clone().any(|f| f == TOKENIZER);
    let wanted = |f: &&str| {
        let other = OTHER_TOKENIZERS.contains(f) || f.ends_with(".tiktoken") && !f.contains('/');
        SMALL.contains(f) || *f == INDEX || other && !has_tokenizer
    };
    files.filter(wanted).collect()
}

/// The files with weights to take of those that a repository has, given its index where it has one; or why there are
/// none, as the rest of a sentence.
pub(super) fn weights<'a>(
    files: impl Iterator<Item = &'a str> + Clone,
    index: Option<&str>,
) -> Result<Vec<&'a str>, String> {
    if let Some(index) = index {
        let wanted = shards(index)?;
        let found: Vec<&str> = files.filter(|f| wanted.contains(*f)).collect();
        return match wanted.iter().find(|w| !found.contains(&w.as_str())) {
            Some(lost) => Err(format!("{INDEX} names {lost}, which is not there")),
            None => Ok(found),
        };
    }
    let mut root = files.clone().filter(|f| !f.contains('/'));
    if let Some(single) = root.clone().find(|f| *f == SINGLE) {
        return Ok(vec![single]);
    }
    // Files of that name hold the same weights under names of another library.
    let own = |f: &&str| f.ends_with(".safetensors") && !f.starts_with("consolidated");
    let found: Vec<&str> = root.clone().filter(own).collect();
    if !found.is_empty() {
        return Ok(found);
    }
    let ends = |endings: &[&str]| files.clone().find(|f| endings.iter().any(|e| f.ends_with(e)));
    Err(if let Some(gguf) = ends(&[".gguf"]) {
        format!("its weights are GGUF files ({gguf}); pull the repository that they were made from")
    } else if let Some(pickle) = ends(&[".bin", ".pth", ".pt"]) {
        format!(
            "its weights are PyTorch files ({pickle}), which can run code when they are read; convert them to safetensors"
        )
    } else if let Some(other) = root.find(|f| f.ends_with(".safetensors")) {
        format!("{other} is in a layout of its own; pull a repository in Hugging Face's layout")
    } else {
        "it has no .safetensors files".to_owned()
    })
}

#[derive(Deserialize)]
struct Index {
    weight_map: std::collections::HashMap<String, String>,
}

/// The text of an index: whoever publishes a model decides how long it is.
pub(super) fn read_index(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    File::open(path)?.take(MAX_INDEX_BYTES + 1).read_to_string(&mut text)?;
    match text.len() as u64 > MAX_INDEX_BYTES {
        true => Err(io::Error::other(format!("has more than {MAX_INDEX_BYTES} bytes, and is no index"))),
        false => Ok(text),
    }
}

/// The shards that an index names.
fn shards(index: &str) -> Result<BTreeSet<String>, String> {
    let index: Index = serde_json::from_str(index).map_err(|e| format!("{INDEX} is no index: {e}"))?;
    let shards: BTreeSet<String> = index.weight_map.into_values().collect();
    match shards.iter().find(|s| !safe(s)) {
        Some(bad) => Err(format!("{INDEX} names {bad:?}, which is no file of a repository")),
        None if shards.is_empty() => Err(format!("{INDEX} names no shards")),
        None => Ok(shards),
    }
}

/// Whether a path of a repository stays in its folder, and in the path of a URL.
pub(super) fn safe(path: &str) -> bool {
    let letters = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | '/' | '+' | '=');
    path.chars().all(letters) && path.split('/').all(|part| !matches!(part, "" | "." | ".."))
}

/// What a model's folder lacks of the files that every model needs.
pub(crate) fn missing(folder: &Path) -> Option<String> {
    if !folder.join(CONFIG).is_file() {
        return Some(CONFIG.to_owned());
    }
    let names: Vec<String> = std::fs::read_dir(folder).map_or(Vec::new(), |entries| {
        // A link whose file is gone is as good as none.
        let whole = entries.flatten().filter(|e| e.path().is_file());
        whole.filter_map(|e| e.file_name().into_string().ok()).collect()
    });
    let has = |name: &str| names.iter().any(|n| n == name);
    if !has(TOKENIZER)
        && !names.iter().any(|n| OTHER_TOKENIZERS.contains(&n.as_str()) || n.ends_with(".tiktoken"))
    {
        return Some(TOKENIZER.to_owned());
    }
    match read_index(&folder.join(INDEX)) {
        Ok(index) => match shards(&index) {
            Ok(wanted) => wanted.into_iter().find(|shard| !folder.join(shard).is_file()),
            Err(reason) => Some(format!("a right {INDEX} ({reason})")),
        },
        Err(_) if weights(names.iter().map(String::as_str), None).is_ok() => None,
        Err(_) => Some(SINGLE.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INDEX_TEXT: &str = r#"{"weight_map": {"a": "model-2.safetensors", "b": "model-1.safetensors", "c": "model-1.safetensors"}}"#;

    #[test]
    fn one_format_is_taken_and_nothing_for_people() {
        let files = [
            "README.md",
            "config.json",
            "consolidated.safetensors",
            "model-1.safetensors",
            "model-2.safetensors",
            "model.safetensors.index.json",
            "original/model.safetensors",
            "pytorch_model.bin",
            "tokenizer.json",
            "tokenizer.model",
            "vocab.json",
            "chat_template.jinja",
            "figure.png",
            "onnx/config.json",
        ];
        let small: Vec<&str> = small(files.iter().copied());
        assert_eq!(
            small,
            ["config.json", "model.safetensors.index.json", "tokenizer.json", "chat_template.jinja"]
        );
        let shards = weights(files.iter().copied(), Some(INDEX_TEXT)).unwrap();
        assert_eq!(shards, ["model-1.safetensors", "model-2.safetensors"]);
        let without: Vec<&str> = super::small(files.iter().copied().filter(|f| *f != "tokenizer.json"));
        assert!(without.contains(&"tokenizer.model") && without.contains(&"vocab.json"));
    }

    #[test]
    fn a_model_in_one_file_or_in_files_of_other_names() {
        let of = |files: &[&'static str]| weights(files.iter().copied(), None);
        assert_eq!(of(&["model.safetensors", "model.fp16.safetensors"]).unwrap(), ["model.safetensors"]);
        let named = of(&["a.safetensors", "b.safetensors", "consolidated.safetensors", "x/c.safetensors"]);
        assert_eq!(named.unwrap(), ["a.safetensors", "b.safetensors"]);
        for (files, names) in [
            (&["q4.gguf"][..], "q4.gguf"),
            (&["pytorch_model.bin"], "pytorch_model.bin"),
            (&["consolidated.safetensors"], "consolidated.safetensors"),
            (&["README.md"], "no .safetensors"),
        ] {
            let reason = of(files).unwrap_err();
            assert!(reason.contains(names), "{reason}");
        }
    }

    #[test]
    fn an_index_cannot_lead_out_of_the_folder() {
        let index = |shard: &str| format!(r#"{{"weight_map": {{"a": "{shard}"}}}}"#);
        for bad in ["../x.safetensors", "/etc/passwd", "a//b", "./a", "a b", "", "a/", "x?y"] {
            assert!(weights(std::iter::empty(), Some(&index(bad))).unwrap_err().contains("no file"), "{bad}");
        }
        assert!(weights(["a"].into_iter(), Some(&index("b"))).unwrap_err().contains("not there"));
        for bad in ["{", "[]", r#"{"weight_map": {}}"#] {
            assert!(weights(["a"].into_iter(), Some(bad)).is_err(), "{bad}");
        }
    }

    #[test]
    fn what_a_folder_lacks_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let put = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
        let missing = || missing(dir.path());
        assert_eq!(missing().as_deref(), Some("config.json"));
        put("config.json", "{}");
        assert_eq!(missing().as_deref(), Some("tokenizer.json"));
        put("tokenizer.json", "{}");
        assert_eq!(missing().as_deref(), Some("model.safetensors"));
        put("model.safetensors.index.json", INDEX_TEXT);
        put("model-1.safetensors", "");
        assert_eq!(missing().as_deref(), Some("model-2.safetensors"));
        put("model-2.safetensors", "");
        assert_eq!(missing(), None);
    }
}
