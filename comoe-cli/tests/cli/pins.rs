//! `--pin`: a trace's hottest experts, or those of earlier runs, stay in the pool.

use std::path::Path;

use serde_json::Value;

use crate::checkpoint::{Checkpoint, Sizes};
use crate::program::{Run, Running, comoe};

fn tiny(cache: &Path, args: &[&str]) -> Run {
    let mut program = comoe();
    program.args(["generate", "--prompt", "What is 17 plus 25?", "--temperature", "0", "--device", "cpu"]);
    Running::start(program.args(args).env("COMOE_CACHE", cache)).finish()
}

fn trace() -> String {
    format!("{}/../assets/fixtures/comoe_tiny.trace", env!("CARGO_MANIFEST_DIR"))
}

fn pinned(json: &Value) -> (u64, u64) {
    let n = |field: &str| json["cache"][field].as_u64().unwrap();
    assert!(n("pinned_hits") <= n("hits"), "{json}");
    (n("pinned_slots"), n("pinned_hits"))
}

#[test]
fn a_traces_hottest_experts_stay_and_are_counted_apart() {
    let cache = tempfile::tempdir().unwrap();
    let path = trace();
    let run = |args: &[&str]| tiny(cache.path(), &[args, &["--json"]].concat()).json();
    let without = run(&["--slots", "36"]);
    assert_eq!(pinned(&without), (0, 0));
    for more in [
        &["--slots", "36"][..],
        &["--slots", "36", "--policy", "lru"],
        &["--slots", "20", "--scope", "global"],
    ] {
        let with = run(&[more, &["--pin", &path]].concat());
        let (slots, hits) = pinned(&with);
        assert_eq!(slots, if more.contains(&"global") { 3 } else { 6 }, "an eighth of the slots: {more:?}");
        assert!(hits > 0, "{more:?}: {with}");
        assert_eq!(with["tokens"], without["tokens"], "{more:?}");
    }
    let stats = tiny(cache.path(), &["--slots", "36", "--pin", &path, "--stats"]);
    assert!(stats.stderr.contains("pinned   6 experts,"), "{}", stats.stderr);
    assert!(stats.stderr.contains("are pinned: up to an eighth"), "{}", stats.stderr);
    // Nothing is learned from it.
    assert_eq!(std::fs::read_dir(cache.path()).unwrap().count(), 0);
    let all = tiny(cache.path(), &["--resident", "--pin", &path]);
    assert!(all.stderr.contains("none is pinned"), "{}", all.stderr);
}

#[test]
fn auto_says_that_nothing_is_known_learns_and_pins_the_next_time() {
    let cache = tempfile::tempdir().unwrap();
    let run = |args: &[&str]| tiny(cache.path(), &[&["--slots", "36", "--pin", "auto"], args].concat());
    let first = run(&["--stats"]);
    assert!(first.stderr.contains("no run has been learned from yet"), "{}", first.stderr);
    assert!(!first.stderr.contains("pinned   "), "{}", first.stderr);
    let second = run(&["--json"]);
    assert!(!second.stderr.contains("learned from yet"), "{}", second.stderr);
    let json = second.json();
    let (slots, hits) = pinned(&json);
    assert_eq!(slots, 6);
    // One of sixteen experts a layer, of the same prompt.
    assert!(hits * 8 > json["cache"]["accesses"].as_u64().unwrap(), "{json}");
    let file = std::fs::read_dir(cache.path()).unwrap().next().unwrap().unwrap().path();
    let uses = |path: &Path| -> u64 {
        let json: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        let layers = json["layers"].as_array().unwrap().iter();
        layers.flat_map(|l| l["uses"].as_array().unwrap()).map(|n| n.as_u64().unwrap()).sum()
    };
    let before = uses(&file);
    run(&["--quiet"]).answer();
    assert_eq!(uses(&file), before / 2 * 3, "three runs alike");

    std::fs::write(&file, "{").unwrap();
    let anew = run(&["--stats"]);
    assert!(anew.stderr.contains("learned anew") && anew.stderr.contains("damaged"), "{}", anew.stderr);
    assert_eq!(uses(&file), before / 2);
}

#[test]
fn a_trace_of_another_model_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    Checkpoint::new(Sizes::default()).write(folder.path());
    let mut program = comoe();
    program.arg("generate").arg(folder.path()).args(["-p", "x", "-q", "--device", "cpu", "--pin", &trace()]);
    Running::start(&mut program).finish().fails(1, &["comoe-tiny", "layers with experts"]);
    let cache = tempfile::tempdir().unwrap();
    tiny(cache.path(), &["-q", "--pin", "/no/such/trace"]).fails(1, &["/no/such/trace"]);
}
