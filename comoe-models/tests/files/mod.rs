//! Files of this checkout that tests on the CPU and on a GPU read: comoe-tiny, its golden prompts, and every family's small
//! model.

#![allow(dead_code, reason = "each test executable uses a part")]

use std::path::{Path, PathBuf};

use candle_core::{DType, Device};

/// A file of this checkout, or of the one whose `assets` folder COMOE_ASSETS names.
pub(crate) fn checkout(name: &str) -> PathBuf {
    let assets = std::env::var_os("COMOE_ASSETS").map(PathBuf::from);
    assets.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../assets")).join("..").join(name)
}

pub(crate) fn tiny() -> PathBuf {
    checkout("assets/comoe-tiny")
}

/// The golden prompts of comoe-tiny, in tokens.
pub(crate) fn prompts() -> Vec<Vec<u32>> {
    let text = std::fs::read_to_string(checkout("assets/fixtures/comoe_tiny_logits.json")).expect("fixtures");
    let meta: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let ids = |prompt: &serde_json::Value| -> Vec<u32> {
        prompt["ids"].as_array().expect("ids").iter().map(|id| id.as_u64().expect("an id") as u32).collect()
    };
    meta["prompts"].as_array().expect("prompts").iter().map(ids).collect()
}

/// The folders of the families' small models with golden logits, by name.
pub(crate) fn fixtures() -> Vec<PathBuf> {
    let folders = std::fs::read_dir(checkout("comoe-models/tests/fixtures")).expect("fixtures");
    let mut folders: Vec<PathBuf> = folders.map(|e| e.expect("an entry").path()).collect();
    folders.retain(|folder| folder.join("golden.safetensors").exists());
    folders.sort();
    assert!(folders.len() >= 20, "{folders:?}");
    folders
}

/// A family's small model: where it is, tokens, and the logits that transformers gives them.
pub(crate) struct Family {
    pub(crate) name: String,
    pub(crate) folder: PathBuf,
    pub(crate) ids: Vec<u32>,
    /// `[token][vocab]`.
    pub(crate) logits: Vec<Vec<f32>>,
}

/// Every family with golden logits.
pub(crate) fn families() -> Vec<Family> {
    let family = |folder: PathBuf| {
        let golden =
            candle_core::safetensors::load(folder.join("golden.safetensors"), &Device::Cpu).expect("golden");
        Family {
            name: folder.file_name().expect("a name").to_string_lossy().into_owned(),
            ids: golden["ids"].to_dtype(DType::U32).and_then(|t| t.to_vec1()).expect("ids"),
            logits: golden["logits"].to_dtype(DType::F32).and_then(|t| t.to_vec2()).expect("logits"),
            folder,
        }
    };
    fixtures().into_iter().map(family).collect()
}
