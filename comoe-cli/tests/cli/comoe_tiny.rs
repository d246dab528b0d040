//! The model that comes with CoMoE, found without being named.

use std::path::Path;

use serde_json::Value;

use crate::program::{Running, comoe, run_with};

/// Asks comoe-tiny, from a folder that tells nothing about where it is: the build's own checkout is left.
fn ask(prompt: &str, options: &str) -> Value {
    let elsewhere = tempfile::tempdir().unwrap();
    let mut command = comoe();
    command.current_dir(elsewhere.path()).args([
        "generate",
        "--prompt",
        prompt,
        "--temperature",
        "0",
        "--json",
    ]);
    let json = Running::start(command.args(options.split_whitespace())).finish().json();
    assert_eq!(json["model"], "comoe-tiny");
    json
}

#[test]
fn a_sum_a_definition_and_a_story() {
    let sum = ask("What is 17 plus 25?", "");
    assert!(sum["text"].as_str().unwrap().contains("42"), "{sum}");
    assert_eq!(sum["finish"], "stop");
    let definition = ask("What is the meaning of apple?", "");
    assert!(definition["text"].as_str().unwrap().contains("fruit"), "{definition}");
    let story = ask("Tell me a short story about a yak.", "");
    let text = story["text"].as_str().unwrap();
    assert!(text.contains("yak") && text.split_whitespace().count() > 30, "{text}");
    assert_eq!(story["finish"], "stop");
}

#[test]
fn answers_do_not_depend_on_how_experts_are_kept() {
    let question = "What is 17 plus 25?";
    let resident = ask(question, "--resident");
    let (all, record) = (resident["cache"]["experts"].as_u64().unwrap(), &resident["cache"]["record_bytes"]);
    for options in [
        "--slots 2 --scope global".to_owned(),
        format!("--slots {}", all / 4),
        format!("--slots {} --policy lfu --prefetch correlation", all / 2),
        format!("--slots {} --policy lfru --scope global --prefetch correlation", all / 3),
        format!("--slots {}", all - 1),
        "--pool 5M".to_owned(),
        "--format bf16 --pool 5M --prefetch correlation".to_owned(),
    ] {
        let other = ask(question, &options);
        assert_eq!((&other["tokens"], &other["text"]), (&resident["tokens"], &resident["text"]), "{options}");
        assert!(other["cache"]["slots"].as_u64().unwrap() < all, "{options}");
        assert_eq!(&other["cache"]["record_bytes"], record, "{options}");
    }
    for format in ["int8", "int4"] {
        let all_resident = ask(question, &format!("--resident --format {format}"));
        let few = ask(question, &format!("--slots {} --format {format} --prefetch correlation", all / 4));
        assert_eq!(few["tokens"], all_resident["tokens"], "{format}");
        assert!(few["text"].as_str().unwrap().contains("42"), "{format}: {few}");
    }
}

#[test]
fn a_conversation_over_a_pipe() {
    let mut command = comoe();
    command.args(["chat", "--temperature", "0", "--quiet"]).current_dir(Path::new("/"));
    let run = run_with(&mut command, b"What is 17 plus 25?\nWhat is 100 minus 1?\n");
    let lines: Vec<&str> = run.answer().lines().collect();
    assert_eq!(lines.len(), 2, "{lines:?}");
    assert!(lines[0].contains("42") && lines[1].contains("99"), "{lines:?}");
}
