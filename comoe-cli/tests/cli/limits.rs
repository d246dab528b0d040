//! What is asked for and cannot be had is refused before there is work to lose, by `comoe plan` as by a run.

use serde_json::Value;

use crate::program::{Running, assets, comoe, tiny};

#[test]
fn an_answer_ends_at_the_context_limit() {
    let ask = |options: &str| {
        let mut program = comoe();
        program.arg("generate").arg(assets().join("comoe-tiny")).args(["-p", "Tell me a story about a fox."]);
        let fixed = ["--temperature=0", "--device=cpu", "--json"];
        Running::start(program.args(fixed).args(options.split_whitespace())).finish()
    };
    let whole = ask("").json();
    let tokens = |answer: &Value| {
        let prompt = answer["prompt_tokens"].as_u64().unwrap() as usize;
        (prompt, answer["tokens"].as_array().unwrap().len())
    };
    let (prompt, all) = tokens(&whole);
    let limit = prompt + all / 2;
    let cut = ask(&format!("--context-limit {limit}")).json();
    assert_eq!(tokens(&cut), (prompt, all / 2), "{cut}");
    assert!(whole["tokens"].as_array().unwrap().starts_with(cut["tokens"].as_array().unwrap()));
    // Too short for the prompt, but the model's is longer.
    ask("--context-limit 4 -q").fails(1, &["the context holds 4", "raise the context", "1024"]);
    ask("--context 64 --context-limit 63 -q").fails(2, &["--context 64", "--context-limit 63"]);
    // The model's own context cannot be raised.
    let mut program = comoe();
    program.arg("generate").arg(assets().join("comoe-tiny")).args(["--device=cpu", "-q", "-p"]);
    let run = Running::start(program.arg("a b ".repeat(2000))).finish();
    run.fails(1, &["1024", "holds no more"]);
    assert!(!run.stderr.contains("raise"), "{run:?}");
}

#[test]
fn a_plan_without_options_is_for_the_first_gpu_and_else_for_the_cpu() {
    let json = tiny("plan", "--json").json();
    if cfg!(not(feature = "cuda")) {
        assert_eq!(json["device"], "cpu");
        let note = json["notes"][0].as_str().unwrap();
        assert!(note.contains("no GPU is used") && note.contains("--vram"), "{note}");
        tiny("plan", "--device cuda").fails(1, &["--vram", "--device cpu"]);
    }
    // What is wrong with the model comes before what is wrong with the device.
    Running::start(comoe().args(["plan", "/no/such", "--device=cuda"])).finish().fails(1, &["/no/such"]);
}

#[test]
fn a_plan_refuses_what_a_run_refuses_in_its_words() {
    for (options, names) in [
        ("--compute bf16", &["--compute", "bf16", "f32"][..]),
        ("--driver device", &["driver", "cpu has no driver of its own"]),
        ("--driver device --policy lfu", &["driver", "the policy is lfu"]),
        ("--device cpu,cpu --driver device", &["driver", "cpu has no driver of its own"]),
        ("--pin nosuch", &["nosuch", "No such file"]),
        ("--context 64 --context-limit 32", &["--context 64"]),
        ("--context 999999999", &["999999999", "1024 at most"]),
    ] {
        let device = if options.starts_with("--device") { "" } else { "--device cpu" };
        let (plan, run) = (
            tiny("plan", &format!("{device} {options}")),
            tiny("generate", &format!("-p hi -q {device} {options}")),
        );
        run.fails(run.status.code().unwrap(), names);
        assert_ne!(run.status.code(), Some(0));
        assert_eq!((plan.status.code(), &plan.stderr), (run.status.code(), &run.stderr), "{options}");
        assert!(plan.stdout.is_empty(), "{options}: {plan:?}");
    }
    let bad = tiny("plan", "--doctor nosuch");
    bad.fails(1, &["nosuch: No such file"]);
    assert_eq!(bad.stderr.matches("nosuch").count(), 1, "{bad:?}");
}

#[test]
fn more_sequences_than_fit_do_not_fit() {
    let absurd = tiny("plan", "--vram 12G --batch 4611686018427387904");
    assert_eq!(absurd.status.code(), Some(2), "{absurd:?}");
    assert!(absurd.stderr.contains("1 to 65536"), "{absurd:?}");
    tiny("plan", "--vram 12G --batch 65536").fails(1, &["does not fit"]);
}

/// The slots of a ring and of what is prefetched are named beside those of experts.
#[test]
fn what_does_not_fit_is_named_by_use() {
    for (options, names) in [
        ("--vram 15M --ring 4M", &["(2 for experts, 21 of the ring", "a smaller ring (--ring)"][..]),
        ("--vram 14600K --prefetch auto", &["(2 for experts, 4 for what is prefetched)", "--prefetch off"]),
        (
            "--ram 600K --prefetch auto",
            &["6 slots (2 for experts, 4 for what is prefetched)", "--prefetch off"],
        ),
    ] {
        tiny("generate", &format!("-p hi -q --device cpu {options}")).fails(1, names);
        tiny("plan", &format!("--device cpu {options}")).fails(1, &names[..1]);
    }
}

#[test]
fn a_shorter_context_is_advised_where_one_fits_and_never_the_one_there_is() {
    let plan = |options: &str| {
        let run = tiny("plan", &format!("--device cpu --json {options}"));
        let json: Value = serde_json::from_slice(&run.stdout).unwrap();
        let changes = json["changes"].as_array().unwrap().iter();
        let changes: Vec<(String, bool)> = changes
            .map(|c| (c["option"].as_str().unwrap().to_owned(), c["fits"].as_bool().unwrap()))
            .collect();
        assert!(changes.iter().all(|(option, _)| !option.contains("--ctx 1024")), "{options}: {changes:?}");
        changes
    };
    let short = plan("--vram 12M --format int4");
    assert!(short.iter().any(|(option, fits)| *fits && option.starts_with("--ctx ")), "{short:?}");
    // Nothing helps, which is said once.
    let hopeless = plan("--vram 1M");
    assert_eq!(hopeless, [("--format int4 --dense-format int8 --ctx 128".to_owned(), false)]);
    let bare = plan("--vram 1M --format int4 --dense-format int8 --ctx 128");
    assert!(bare.is_empty(), "{bare:?}");
}
