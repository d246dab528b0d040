//! Hostile files: every input of the fuzz targets' corpus goes through what the targets run, so that what fuzzing once
//! found is looked for at every run of the tests, without a fuzzer.
//!
//! Names say what is expected: `ok-...` is accepted, everything else refused; neither panics nor hangs.

#[path = "hostile/seeds.rs"]
mod seeds;
#[path = "../../fuzz/src/lib.rs"]
#[allow(unreachable_pub, reason = "a library to the fuzzer")]
mod targets;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Far more than any takes, on a busy machine too.
const HANGS: Duration = Duration::from_secs(30);

fn corpus(target: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus").join(target)
}

/// Runs the corpus of a target, and sees that what should be accepted is.
fn run(target: &str, accepts: fn(&[u8]) -> bool) {
    let entries = std::fs::read_dir(corpus(target)).unwrap();
    let mut files: Vec<PathBuf> = entries.map(|e| e.unwrap().path()).collect();
    files.sort();
    let name = |file: &Path| file.file_name().unwrap().to_str().unwrap().to_owned();
    // What a fuzzer left there is named by its hash, and may be either.
    files.retain(|file| name(file).len() < 40);
    for file in &files {
        let data = std::fs::read(file).unwrap();
        let started = Instant::now();
        let accepted = accepts(&data);
        assert!(started.elapsed() < HANGS, "{} took {:?}", file.display(), started.elapsed());
        assert_eq!(accepted, name(file).starts_with("ok-"), "{}", file.display());
        // Cut anywhere, it is still no reason to panic.
        for cut in (0..data.len()).step_by(1 + data.len() / 16) {
            accepts(&data[..cut]);
        }
    }
    let accepted = files.iter().filter(|file| name(file).starts_with("ok-")).count();
    assert!(accepted >= 3 && files.len() > accepted, "{accepted} of {}", files.len());
}

#[test]
fn checkpoints() {
    run("checkpoint", targets::checkpoint);
}

#[test]
fn packed_files() {
    run("packed", targets::packed);
}

#[test]
fn traces() {
    run("trace", targets::trace);
}

#[test]
fn gguf_files() {
    run("gguf", targets::gguf);
}

#[test]
fn templates() {
    run("template", targets::template);
}

#[test]
fn configurations() {
    run("config", targets::config);
}

/// Makes the `ok-` files anew, from our fixtures and writers.
#[test]
#[ignore = "writes fuzz/corpus"]
fn write_seeds() {
    for (target, name, bytes) in seeds::all() {
        std::fs::create_dir_all(corpus(target)).unwrap();
        std::fs::write(corpus(target).join(format!("ok-{name}")), bytes).unwrap();
    }
}
