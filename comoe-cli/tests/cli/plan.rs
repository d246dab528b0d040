//! `comoe plan`: before loading, what a run then reports by owner.

use serde_json::Value;

use crate::checkpoint::{Checkpoint, Sizes};
use crate::program::{Running, assets, comoe, tiny};

/// Greedy, and short.
const PROMPT: &str = "--prompt hello --temperature 0 --max-tokens 4 --json --device cpu";

fn bytes(owners: &Value, owner: &str) -> f64 {
    owners[owner].as_u64().unwrap_or_else(|| panic!("{owner} in {owners}")) as f64
}

#[test]
fn a_plan_made_before_loading_is_what_a_run_reports_by_owner() {
    for options in [
        "",
        "--ctx 128",
        "--vram 24M --ctx 256",
        "--vram 12M --ctx 256 --format int4",
        "--vram 16M --format int8 --dense-format int8 --prefetch correlation --ring 500K",
        "--slots 20 --scope global",
        "--pool 3M --format int4-g32",
        "--resident --dense-format int8",
    ] {
        let plan = tiny("plan", &format!("--device cpu --json {options}")).json();
        let run = tiny("generate", &format!("{PROMPT} {options}")).json();
        let (planned, memory) = (&plan["memory"]["plan"], &run["memory"]);
        let own = |key: &str| memory["plan"][key].as_u64().unwrap();
        for key in
            ["dense", "kv", "slots", "staging", "ring", "workspace", "buffers", "arena", "margin", "total"]
        {
            // The memory of the machine that is free changes between the two.
            let share = options.is_empty() || options.starts_with("--ctx");
            if !(share && ["slots", "total"].contains(&key)) {
                assert_eq!(planned[key], own(key), "{options}: {key}");
            }
        }
        for key in ["dense", "kv", "slots", "staging", "ring", "arena", "total"] {
            let (want, got) = (bytes(planned, key), bytes(&memory["peak"], key));
            assert!(
                (got - want).abs() <= 0.02 * want,
                "{options}: {key} was planned as {want}, and is {got}"
            );
        }
        for key in ["dense", "kv", "slots", "arena"] {
            assert!(bytes(&memory["now"], key) > 0.0, "{options}: {key}");
        }
        assert_eq!(plan["experts"]["slots"], run["cache"]["slots"], "{options}");
        assert_eq!(plan["experts"]["record_bytes"], run["cache"]["record_bytes"], "{options}");
        assert_eq!((&plan["format"], &plan["fits"]), (&run["format"], &true.into()), "{options}");
        if let Some(budget) = options.strip_prefix("--vram ") {
            let budget: f64 = budget.split('M').next().unwrap().parse().unwrap();
            assert!(bytes(&memory["peak"], "total") <= budget * 1024.0 * 1024.0, "{options}");
            let slot = bytes(&run["cache"], "record_bytes");
            assert!(
                bytes(&memory["peak"], "total") + slot > budget * 1024.0 * 1024.0,
                "{options}: a slot more fits"
            );
        }
    }
}

/// Unequal devices: what each one owns and holds is planned as a run then has it, and the answer is one device's.
#[test]
fn several_devices_are_planned_as_they_run() {
    const SHORT: &str = "--prompt hello --temperature 0 --max-tokens 4 --json";
    let alone = tiny("generate", PROMPT).json();
    for (options, devices) in [
        ("--device cpu,cpu --vram 16M,6M --ctx 256", 2),
        ("--device cpu,cpu --vram 14M --ctx 256", 2),
        (
            "--device cpu,cpu,cpu --vram 14M,2M,3M --ctx 256 --format int4 --prefetch correlation --ring 100K",
            3,
        ),
        ("--device cpu,cpu --slots 30,50 --resident-format quantized", 2),
        ("--device cpu,cpu --pool 3M,2M --scope global", 2),
    ] {
        let plan = tiny("plan", &format!("--json {options}")).json();
        let run = tiny("generate", &format!("{SHORT} {options}")).json();
        let (planned, made) = (&plan["devices"], &run["cache"]["devices"]);
        assert_eq!(made.as_array().unwrap().len(), devices, "{options}: {made}");
        for d in 0..devices {
            for key in ["slots", "experts"] {
                assert_eq!(planned[d][key], made[d][key], "{options}: {key} of device {d}: {planned}");
            }
            let budget = planned[d]["budget"].as_u64().unwrap();
            let total = planned[d]["memory"]["plan"]["total"].as_u64().unwrap();
            assert!(total <= budget, "{options}: {total} of {budget}");
        }
        assert_eq!(plan["experts"]["slots"], run["cache"]["slots"], "{options}");
        let first = |report: &serde_json::Value| {
            let mut first = report["memory"]["plan"].clone();
            if !options.contains("--vram") {
                // What is free, which is not the same a moment later.
                first.as_object_mut().unwrap().remove("budget");
            }
            first
        };
        assert_eq!(first(&plan), first(&run), "{options}: the first device's");
        if !options.contains("int4") {
            assert_eq!(run["tokens"], alone["tokens"], "{options}");
        }
    }
    let plan = tiny("plan", "--json --device cpu,cpu --vram 16M,1K --ctx 256").json();
    assert_eq!(plan["devices"][1]["experts"], 0, "{plan}");
    assert!(plan["notes"][0].as_str().unwrap().contains("device 1 (pool 1) is not used"), "{plan}");
    let run = tiny("generate", "-p hello --max-tokens 1 --device cpu,cpu --vram 16M,1K --ctx 256");
    assert!(run.stderr.contains("device 1 (cpu) is not used"), "{}", run.stderr);
    let planned = tiny("plan", "--device cpu,cpu --vram 16M,6M --ctx 256");
    let table = planned.answer();
    for words in ["pool 0             16.0 MiB (--vram)", "pool 1             6.0 MiB (--vram)", "all slots"]
    {
        assert!(table.contains(words), "{words:?}: {table}");
    }
}

/// GPUs that are not here: as many as have a limit, or are named.
#[test]
fn gpus_with_unequal_memory_are_planned_without_being_here() {
    let of = |options: &str| tiny("plan", &format!("--json --ctx 256 {options}")).json();
    let (uneven, even) = (of("--vram 560M,530M"), of("--device cuda:0,2 --vram 560M"));
    for (plan, second) in [(&uneven, "cuda:1"), (&even, "cuda:2")] {
        let (devices, experts) = (&plan["devices"], plan["experts"]["experts"].as_u64().unwrap());
        assert_eq!(
            (&devices[0]["device"], &devices[1]["device"]),
            (&"cuda:0".into(), &second.into()),
            "{plan}"
        );
        let owned = |d: usize| devices[d]["experts"].as_u64().unwrap();
        assert_eq!(owned(0) + owned(1), experts, "{plan}");
        assert!(owned(0) > 0 && owned(1) > 0, "{plan}");
        // The dense part is the first's.
        assert!(bytes(&devices[0]["needs"], "dense") > 0.0 && bytes(&devices[1]["needs"], "dense") == 0.0);
        assert_eq!(plan["expected"]["links"], 2, "{plan}");
    }
    assert!(bytes(&uneven["devices"][1], "slots") < bytes(&even["devices"][1], "slots"), "{uneven}");
    let refused = tiny("plan", "--vram 520M,700M");
    assert_eq!(refused.status.code(), Some(1), "{refused:?}");
    assert!(refused.stderr.contains("cuda:0"), "the first holds the dense part: {}", refused.stderr);
}

#[test]
fn a_packed_file_is_planned_as_it_runs() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("tiny.safetensors");
    let packed = tiny("pack", &format!("--format int8 -q -o {}", file.display()));
    packed.answer();
    let of = |command: &str, args: &str| {
        let mut program = comoe();
        program.arg(command).arg(&file).args(args.split_whitespace());
        Running::start(program.args(["--vram", "18M"])).finish().json()
    };
    let (plan, run) = (of("plan", "--device cpu --json"), of("generate", PROMPT));
    assert_eq!((&plan["format"], &plan["experts"]["slots"]), (&run["format"], &run["cache"]["slots"]));
    assert_eq!(plan["memory"]["plan"], run["memory"]["plan"]);
    assert!(plan["experts"]["share"].as_f64().unwrap() < 1.0, "{plan}");
}

#[test]
fn the_statistics_have_a_table_by_owner() {
    let run = tiny("generate", "-p hello --temperature 0 --max-tokens 4 --stats --vram 24M --device cpu");
    run.answer();
    for words in
        ["planned", "peak", "dense weights", "KV cache", "slots", "experts in RAM", "24.0 MiB may be taken"]
    {
        assert!(run.stderr.contains(words), "{words:?}: {}", run.stderr);
    }
}

#[test]
fn what_is_asked_for_beside_a_limit_must_fit_it() {
    for command in ["plan", "generate"] {
        let args = |more: &str| match command {
            "plan" => format!("--device cpu {more}"),
            _ => format!("-p hello --max-tokens 1 -q --device cpu {more}"),
        };
        for options in ["--vram 20M --pool 18M", "--vram 20M --resident", "--vram 20M --slots 60"] {
            let run = tiny(command, &args(options));
            assert_eq!(run.status.code(), Some(1), "{options}: {run:?}");
            let said = run.stderr.lines().last().unwrap();
            for words in ["20.0 MiB that may be taken", "slots fit", "rest of the model"] {
                assert!(said.contains(words), "{options}: {words:?} is not in: {said}");
            }
        }
        let fits = tiny(command, &args("--vram 20M --slots 12"));
        assert!(fits.status.success(), "{fits:?}");
    }
}

#[test]
fn what_does_not_fit_says_what_to_change() {
    let plan = |args: &str| tiny("plan", &format!("--device cpu {args}"));
    let text = plan("--vram 20M").answer().to_owned();
    for words in ["dense weights", "KV cache", "slots", "tokens/s", "assumed", "--format int4", "RAM"] {
        assert!(text.contains(words), "{words:?}: {text}");
    }
    // Dense weights and KV cache alone are more.
    let none = plan("--vram 12M --json");
    none.fails(1, &["does not fit", "12.0 MiB that may be taken"]);
    let json: Value = serde_json::from_slice(&none.stdout).unwrap();
    assert_eq!((&json["fits"], &json["memory"]), (&false.into(), &Value::Null));
    let changes = json["changes"].as_array().unwrap();
    assert!(
        changes.iter().any(|c| c["fits"] == true && c["option"].as_str().unwrap().contains("int8")),
        "{json}"
    );
    // A change that is said to fit does.
    for change in changes.iter().filter(|c| c["fits"] == true) {
        let option = change["option"].as_str().unwrap();
        let with = plan(&format!("--vram 12M --json {option}")).json();
        assert_eq!(with["experts"]["slots"], change["slots"], "{option}");
    }
    let hopeless = plan("--vram 1M --json");
    let json: Value = serde_json::from_slice(&hopeless.stdout).unwrap();
    assert!(json["changes"].as_array().unwrap().iter().all(|c| c["fits"] == false), "{json}");
    let few = plan("--vram 24M --ram 8M --json").json();
    let (all, on_disk) = (few["ram"]["arena"].as_u64().unwrap(), few["ram"]["on_disk"].as_u64().unwrap());
    assert!(
        all - on_disk <= 8 << 20 && all - on_disk > 7 << 20,
        "what --ram has room for is not there: {few}"
    );
}

#[test]
fn a_gpu_that_is_not_here_can_be_planned_for() {
    let json = tiny("plan", "--vram 24G --json --batch 4 --ram 64G").json();
    let plan = &json["memory"]["plan"];
    assert_eq!((&json["device"], &json["experts"]["share"]), (&"cuda".into(), &1.0.into()));
    for owner in ["workspace", "buffers", "margin"] {
        assert!(bytes(plan, owner) > 0.0, "{owner}");
    }
    let one = tiny("plan", "--vram 24G --json").json();
    assert_eq!(bytes(plan, "kv"), 4.0 * bytes(&one["memory"]["plan"], "kv"));
    assert_eq!(plan["dense"], one["memory"]["plan"]["dense"]);
    let total = ["dense", "kv", "workspace", "buffers", "slots", "staging", "ring"].map(|o| bytes(plan, o));
    assert_eq!(bytes(plan, "total"), total.iter().sum::<f64>());
    // Pools of one GPU have a link together, and its memory.
    let pools = tiny("plan", "--device cuda:0,0 --vram 600M --json").json();
    assert!(
        pools["notes"][0].as_str().unwrap().contains("cuda:0 has 2 pools, whose limits are 1.2 GiB"),
        "{pools}"
    );
    assert_eq!(pools["expected"]["links"], Value::Null, "{pools}");
}

#[test]
fn hits_of_a_trace_are_those_of_its_replay_and_bandwidths_are_doctors() {
    let trace = assets().join("fixtures/comoe_tiny.trace");
    let json = tiny("plan", &format!("--device cpu --slots 24 --trace {} --json", trace.display())).json();
    let replayed = {
        let mut program = comoe();
        program.args(["trace", "replay"]).arg(&trace).args(["--policy", "blend", "--scope", "layer"]);
        Running::start(program.args(["--slots-per-layer", "4", "--json"])).finish().json()
    };
    let (expected, rate) = (&json["expected"], replayed[0]["hit_rate"].as_f64().unwrap());
    assert_eq!((&expected["hits_from"], expected["hit_rate"]["low"].as_f64()), (&"trace".into(), Some(rate)));
    let per_token = expected["bytes_per_token"][0].as_f64().unwrap();
    let all = 6.0 * 2.0 * json["experts"]["record_bytes"].as_f64().unwrap();
    assert!((per_token - (1.0 - rate) * all).abs() <= 1.0, "{expected}");

    // A token uses twelve.
    let few = tiny("plan", "--device cpu --slots 11 --json").json();
    assert_eq!(
        (&few["expected"]["hits_from"], &few["expected"]["hit_rate"]["high"]),
        (&"too few".into(), &0.0.into())
    );
    assert_eq!(few["expected"]["bytes_per_token"][1].as_f64(), Some(all));

    let folder = tempfile::tempdir().unwrap();
    let doctor = folder.path().join("doctor.json");
    let measured = r#"{"host": {"read_all_threads": 50.0}, "gpus": [{"transfers": [{"locked": 12.5}]}]}"#;
    std::fs::write(&doctor, measured).unwrap();
    let with = |more: &str| tiny("plan", &format!("--json --doctor {} {more}", doctor.display())).json();
    let gpu = with("--vram 24G --slots 24");
    assert_eq!(
        (&gpu["expected"]["link_from"], &gpu["expected"]["bandwidths"]["link"]),
        (&"doctor".into(), &12.5.into())
    );
    let cpu = with("--device cpu --slots 24");
    assert_eq!(cpu["expected"]["bandwidths"]["memory"], 50.0);
    let given = with("--vram 24G --slots 24 --link 25 --bandwidth 1000");
    let speed = |json: &Value| json["expected"]["tokens_per_second"]["low"].as_f64().unwrap();
    assert!(speed(&given) > speed(&gpu), "{given} {gpu}");
    let other = folder.path().join("other");
    Checkpoint::new(Sizes::default()).write(&other);
    let mut program = comoe();
    program.arg("plan").arg(&other).args(["--device", "cpu", "--trace"]).arg(&trace);
    Running::start(&mut program).finish().fails(1, &["comoe-tiny", "layers with experts"]);
}
