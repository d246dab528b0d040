//! RAM that holds fewer experts than there are: the same answers, counts of where experts were, refusals that say what works.

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::program::{Run, Running, comoe, generate};

/// KiB of an expert of comoe-tiny in BF16, and how many there are.
const RECORD: u64 = 192;
const EXPERTS: u64 = 96;

fn tiny() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../assets/comoe-tiny")
}

fn ask(model: &Path, options: &[&str]) -> Run {
    let fixed = ["--prompt", "What is 17 plus 25?", "--temperature=0", "--device=cpu", "--json"];
    generate(model, &[&fixed[..], options].concat())
}

/// `--ram` for so many experts.
fn ram(experts: u64) -> String {
    format!("--ram={}K", experts * RECORD)
}

#[track_caller]
fn tiers(json: &Value) -> &Value {
    let (tiers, cache) = (&json["cache"]["tiers"], &json["cache"]);
    let of = |v: &Value, name: &str| v[name].as_u64().unwrap_or_else(|| panic!("{name} of {json}"));
    // Every record that moved to a slot came from RAM or from disk; the last guesses may still be on their way.
    let (demanded, came) = (of(cache, "records_moved"), of(tiers, "warm") + of(tiers, "cold"));
    assert!((demanded..=demanded + of(cache, "prefetched")).contains(&came), "{json}");
    assert_eq!(of(tiers, "hot"), of(cache, "hits"));
    assert!(of(tiers, "disk_reads") >= of(tiers, "cold") && of(tiers, "cold") > 0, "{tiers}");
    assert_eq!(of(tiers, "disk_bytes"), of(tiers, "disk_reads") * of(cache, "record_bytes"));
    tiers
}

#[test]
fn answers_do_not_depend_on_how_many_experts_ram_holds() {
    let resident = ask(&tiny(), &["--resident"]).json();
    assert!(resident["cache"]["tiers"].is_null());
    let folder = tempfile::tempdir().unwrap();
    let packed = folder.path().join("tiny.safetensors");
    let pack =
        Running::start(comoe().arg("pack").arg(tiny()).args(["--format=bf16", "-o"]).arg(&packed)).finish();
    assert!(pack.status.success(), "{pack:?}");
    for (i, experts) in [3, 4, 5, 8, 13, 24, 47, 95].into_iter().enumerate() {
        let model = if i % 2 == 0 { tiny() } else { packed.clone() };
        let prefetch = ["off", "correlation", "auto"][i % 3];
        // Guesses have slots of their own.
        let (experts, prefetch) = if experts < 8 { (experts, "off") } else { (experts, prefetch) };
        let run = ask(&model, &[&ram(experts), "--prefetch", prefetch]).json();
        assert_eq!(run["tokens"], resident["tokens"], "RAM for {experts}");
        let tiers = tiers(&run);
        let staged = run["cache"]["staging_slots"].as_u64().unwrap();
        let slots = run["cache"]["slots"].as_u64().unwrap() + staged;
        assert_eq!(slots + tiers["ram_experts"].as_u64().unwrap(), experts, "all of it is used: {run}");
    }
    // A quarter in slots, a quarter beside them: what leaves a slot may still be warm.
    for policy in ["auto", "lru", "lfu", "lfru"] {
        let run = ask(&packed, &["--slots=24", &ram(EXPERTS / 2), "--policy", policy]).json();
        assert_eq!(run["tokens"], resident["tokens"], "{policy}");
        let tiers = tiers(&run);
        assert_eq!(tiers["ram_experts"], 24);
        assert!(tiers["warm"].as_u64().unwrap() > 0 && tiers["hot"].as_u64().unwrap() > 0, "{tiers}");
    }
    // With room for every expert there are no tiers.
    for options in [&["--ram=96M"][..], &["--ram=18M"], &["--ram=30M", "--slots=12"]] {
        let run = ask(&packed, options).json();
        assert_eq!(run["tokens"], resident["tokens"]);
        assert!(run["cache"]["tiers"].is_null(), "{options:?}");
    }
    for format in ["int8", "int4"] {
        let all = ask(&tiny(), &["--resident", "--format", format]).json();
        let few = ask(&tiny(), &["--ram=1M", "--format", format, "--prefetch=auto"]).json();
        assert_eq!(few["tokens"], all["tokens"], "{format}");
        tiers(&few);
    }
}

#[test]
fn too_little_ram_is_refused_with_what_would_do() {
    for (options, names) in [
        (vec!["--ram=575K"], vec!["575.0 KiB are too little", "2 slots take 384.0 KiB", "give 576K or more"]),
        (vec!["--ram=0"], vec!["give 576K or more"]),
        (vec!["--ram=4M", "--slots=24"], vec!["24 slots take 4.5 MiB", "give 4800K or more, or fewer slots"]),
        (
            vec!["--ram=1M", "--prefetch=correlation"],
            vec!["4 for what is prefetched) take 1.1 MiB", "give 1344K or more"],
        ),
        (vec!["--ram=4M", "--resident"], vec!["96 slots take 18.0 MiB", "or fewer slots"]),
    ] {
        let fixed = ["--prompt=x", "--device=cpu", "--quiet"];
        generate(&tiny(), &[&fixed[..], &options].concat()).fails(1, &names);
    }
    let run = generate(&tiny(), &["--prompt=x", "--ram=some"]);
    assert!(run.status.code() == Some(2) && run.stderr.contains("'--ram <SIZE>'"), "{run:?}");
}

#[test]
fn what_is_in_force_and_what_happened_is_said() {
    let fixed = ["--prompt", "What is 17 plus 25?", "--temperature=0", "--device=cpu", "--stats"];
    let run = generate(&tiny(), &[&fixed[..], &[&ram(20)]].concat());
    assert!(run.answer().contains("42"), "{run:?}");
    assert!(run.stderr.contains("RAM holds 4 of 96 experts (768.0 KiB) beside the slots"), "{}", run.stderr);
    let line = run.stderr.lines().find(|l| l.starts_with("tiers")).unwrap();
    assert!(line.contains("hot ") && line.contains("warm ") && line.contains("from disk"), "{line}");
}
