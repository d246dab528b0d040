//! `comoe trace`: recorded, shown, replayed, predicted, drawn.

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::program::{Run, Running, comoe};

fn trace(args: &str) -> Run {
    let mut command = comoe();
    command.arg("trace").args(args.split_whitespace());
    Running::start(&mut command).finish()
}

/// What a run that failed as it should complained of.
#[track_caller]
fn failure(run: &Run) -> &str {
    assert_eq!(run.status.code(), Some(1), "{run:?}");
    assert!(run.stderr.contains("comoe: ") && !run.stderr.contains("panicked"), "{run:?}");
    &run.stderr
}

/// A trace recorded from comoe-tiny, all its skills.
fn recorded() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../assets/fixtures/comoe_tiny.trace")
}

#[test]
fn a_run_is_recorded_and_replayed() {
    let folder = tempfile::tempdir().unwrap();
    let (prompts, file) = (folder.path().join("prompts.txt"), folder.path().join("t.trace"));
    std::fs::write(&prompts, "What is 17 plus 25?\n\nPut these words in order: deer, ear, park.\n").unwrap();
    let (prompts, path) = (prompts.display(), file.display());
    let run = trace(&format!("record --prompts {prompts} -o {path} --temperature 0"));
    assert!(run.answer().contains("42"), "{run:?}");

    let shown: Value = trace(&format!("show {path} --json")).json();
    assert_eq!((&shown["turns"], &shown["model"]), (&2.into(), &"comoe-tiny".into()));
    let generated = shown["decode_tokens"].as_u64().unwrap();
    assert!(generated > 8 && shown["prompt_tokens"].as_u64().unwrap() > 8, "{shown}");
    let (layers, top_k) =
        (shown["layers"].as_array().unwrap().len() as u64, shown["top_k"].as_u64().unwrap());

    // comoe-tiny chooses distinct experts, in every layer, for every token.
    let slots = 4;
    let lines = trace(&format!("replay {path} --slots {slots} --policy lru,belady --json")).json();
    assert_eq!(lines[0]["accesses"], generated * layers * top_k, "{lines}");
    assert!(lines[1]["hits"].as_u64() >= lines[0]["hits"].as_u64(), "{lines}");
}

#[test]
fn any_run_can_record_and_answers_alike() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("t.trace");
    let ask = |more: &[&str]| {
        let mut command = comoe();
        command.args(["generate", "--prompt", "What is 17 plus 25?", "--temperature", "0"]).args(more);
        Running::start(&mut command).finish().answer().to_owned()
    };
    let path = file.display().to_string();
    assert_eq!(ask(&["--trace", &path]), ask(&[]));
    assert_eq!(trace(&format!("show {path} --json")).json()["turns"], 1);
    let e = trace(&format!("predict {path} --predictor stale-gate"));
    assert!(failure(&e).contains("comoe trace record --stale-gate"), "{e:?}");
    assert_eq!(ask(&["--trace", &path, "--trace-stale-gate"]), ask(&[]));
    let lines = trace(&format!("predict {path} --predictor stale-gate --slots 4 --k 2 --json")).json();
    assert!(lines[0]["recall_on_misses"].as_f64().unwrap() > 0.3, "{lines}");
    let missing = folder.path().join("none/t.trace").display().to_string();
    let mut command = comoe();
    command.args(["generate", "--prompt", "x", "--trace", &missing]);
    assert!(failure(&Running::start(&mut command).finish()).contains("none/t.trace"));
}

#[test]
fn what_is_played_by_default_can_be_played() {
    let path = recorded().display().to_string();
    for (options, policies) in [("", 7), ("--pin 0.5", 5), ("--batch 4", 5)] {
        let lines = trace(&format!("replay {path} --slots 4 {options} --json")).json();
        assert_eq!(lines.as_array().unwrap().len(), policies, "{options}");
    }
    let far = trace(&format!("replay {path} --slots 4 --pin 0.5 --policy lru,belady"));
    far.fails(2, &["--pin cannot play belady"]);
}

#[test]
fn the_committed_trace_is_of_comoe_tiny_and_gives_sound_numbers() {
    let path = recorded().display().to_string();
    let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("../assets/comoe-tiny");
    let policies = "lru,lfu,lfru,aged,blend,belady,static,lfru-admit";
    let lines = trace(&format!(
        "replay {path} --model {} --slots-per-layer 2,4,8 --policy {policies} --scope layer,global --json",
        tiny.display()
    ))
    .json();
    let lines = lines.as_array().unwrap();
    assert_eq!(lines.len(), 8 * 3 * 2);
    let rate = |policy: &str, slots: u64, scope: &str| {
        let line = lines.iter().find(|l| l["policy"] == policy && l["slots"] == slots && l["scope"] == scope);
        line.unwrap()["hit_rate"].as_f64().unwrap()
    };
    for scope in ["layer", "global"] {
        for slots in [2, 4, 8] {
            for policy in ["lru", "lfu", "lfru", "aged", "blend"] {
                assert!(
                    rate(policy, slots, scope) <= rate("belady", slots, scope),
                    "{policy} {slots} {scope}"
                );
            }
        }
        assert!(rate("lru", 2, scope) < rate("lru", 8, scope));
    }
    let lines = trace(&format!("predict {path} --slots 4 --depth 1,2 --json")).json();
    let lines = lines.as_array().unwrap();
    // Four predictors at two depths, and the model's own guesses one layer ahead, at k and at 2k.
    assert_eq!(lines.len(), (4 * 2 + 1) * 2);
    let recall = |l: &Value| l["recall"].as_f64().unwrap();
    for line in lines {
        assert!((0.0..=1.0).contains(&recall(line)) && recall(line) > 0.0, "{line}");
        assert!(line["predictor"] == "stale-gate" || recall(line) < recall(lines.last().unwrap()), "{line}");
    }
    let e = trace(&format!("predict {path} --predictor stale-gate --depth 2"));
    assert!(failure(&e).contains("use depth 1"), "{e:?}");
    let lines =
        trace(&format!("replay {path} --slots 4 --policy lru --batch 1,2,4 --group similar --json")).json();
    let unions: Vec<f64> = lines.as_array().unwrap().iter().map(|l| l["union"].as_f64().unwrap()).collect();
    assert!(unions.windows(2).all(|w| w[0] < w[1]), "{unions:?}");
    for evict in ["expert", "group"] {
        let text = trace(&format!("replay {path} --slots 4 --policy lru --batch 2 --evict {evict}"));
        assert!(text.answer().contains("missed per token"));
    }
}

#[test]
fn a_picture_is_drawn() {
    let folder = tempfile::tempdir().unwrap();
    let svg = folder.path().join("out.svg");
    let run = trace(&format!("plot {} -o {}", recorded().display(), svg.display()));
    run.answer();
    let text = std::fs::read_to_string(svg).unwrap();
    for word in ["<svg", "belady (ceiling)", "blend", "stale-gate", "slots per layer", "comoe-tiny"] {
        assert!(text.contains(word), "{word}");
    }
}

#[test]
fn bad_traces_are_refused_with_their_place() {
    let folder = tempfile::tempdir().unwrap();
    let write = |bytes: &[u8]| {
        let path = folder.path().join("bad.trace");
        std::fs::write(&path, bytes).unwrap();
        path.display().to_string()
    };
    let good = std::fs::read(recorded()).unwrap();
    let message = |bytes: &[u8]| failure(&trace(&format!("replay {}", write(bytes)))).to_owned();
    assert!(message(b"").contains("empty"));
    assert!(message(&good[..good.len() / 2]).contains("truncated"));
    let mut version = good.clone();
    version[8] = 99;
    assert!(message(&version).contains("version 99"));
    assert!(message(b"# route_trace v1\nnonsense\n").contains("line 2"));

    let other = crate::program::model().display().to_string();
    let e = trace(&format!("replay {} --model {other}", recorded().display()));
    assert!(failure(&e).contains("not this model"), "{e:?}");
    let e = trace(&format!("replay {} --policy belady --batch 2", recorded().display()));
    assert_eq!(e.status.code(), Some(2), "{e:?}");
    let e = trace(&format!("replay {} --policy lru --batch 4096", recorded().display()));
    assert!(failure(&e).contains("sequences need"), "{e:?}");
    let empty = write(b"\n\n");
    let e = trace(&format!("record --prompts {empty} -o {}/t", folder.path().display()));
    assert!(failure(&e).contains("no prompts"), "{e:?}");
}
