//! What prefetching learns is kept from one run to the next.

use std::path::Path;

use crate::program::{Run, Running, comoe, generate, model};

/// comoe-tiny with a few slots.
fn tiny(cache: &Path, more: &[&str]) -> Run {
    let mut command = comoe();
    command.args([
        "generate",
        "--prompt",
        "What is 17 plus 25?",
        "--temperature",
        "0",
        "--slots",
        "24",
        "--stats",
    ]);
    Running::start(command.args(more).env("COMOE_CACHE", cache)).finish()
}

fn learned(run: &Run) -> Option<&str> {
    run.answer();
    run.stderr.lines().find(|l| l.starts_with("learned "))
}

#[test]
fn a_table_is_kept_without_asking_and_found_again() {
    let cache = tempfile::tempdir().unwrap();
    let files = || std::fs::read_dir(cache.path()).unwrap().count();
    assert_eq!(learned(&tiny(cache.path(), &[])), None);
    // The model guesses by itself: no table.
    assert_eq!(learned(&tiny(cache.path(), &["--prefetch", "auto"])), None);
    assert_eq!(files(), 0);
    let first = tiny(cache.path(), &["--prefetch", "correlation"]);
    let line = learned(&first).unwrap();
    assert!(line.contains(", 0 of them in earlier runs") && line.contains("predictor-comoe-tiny-"), "{line}");
    assert_eq!(files(), 1);
    let second = tiny(cache.path(), &["--prefetch", "correlation"]);
    let line = learned(&second).unwrap();
    assert!(!line.contains(", 0 of them"), "{line}");
    assert_eq!((first.answer(), files()), (second.answer(), 1));

    // One of our own that is damaged is learned anew, and said aloud.
    let path = std::fs::read_dir(cache.path()).unwrap().next().unwrap().unwrap().path();
    std::fs::write(&path, "comoe-pt").unwrap();
    let third = tiny(cache.path(), &["--prefetch", "correlation"]);
    assert!(third.stderr.contains("learns anew") && third.stderr.contains("truncated"), "{third:?}");
    assert!(learned(&third).unwrap().contains(", 0 of them"), "{third:?}");
}

#[test]
fn a_table_asked_for_is_used_or_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.table").display().to_string();
    let asked = ["--prefetch", "correlation", "--predictor-table", &path];
    let first = tiny(folder.path(), &asked);
    assert!(learned(&first).unwrap().ends_with(&path), "{first:?}");
    let more = ["--prompt", "hello", "--max-tokens", "2", "--slots", "9"];
    let other = generate(model(), &[&more[..], &asked].concat());
    other.fails(1, &["comoe-tiny", "not this model"]);
    let bytes = std::fs::read(&path).unwrap();
    std::fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
    let e = tiny(folder.path(), &[&asked[..], &["--quiet"]].concat());
    e.fails(1, &["a.table", "truncated"]);
    let e = tiny(folder.path(), &["--predictor-table", &path]);
    assert!(e.stderr.contains("--predictor-table changes nothing"), "{e:?}");
}
