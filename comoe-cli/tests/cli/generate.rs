//! `comoe generate`.

use std::path::Path;

use serde_json::Value;

use crate::checkpoint::{Checkpoint, STOP, Sizes};
use crate::program::{Running, comoe, generate, model, run_with};

fn greedy(model: &Path, extra: &[&str]) -> Value {
    let base = ["--prompt", "hello there", "--temperature", "0", "--max-tokens", "40", "--json"];
    generate(model, &[&base, extra].concat()).json()
}

#[test]
fn the_answer_goes_to_standard_output_and_nothing_else_does() {
    let json = greedy(model(), &[]);
    let text = json["text"].as_str().unwrap();
    assert!(text.len() == 40 && text.bytes().all(|b| b.is_ascii_lowercase()), "{text}");
    let args = ["--prompt", "hello there", "--temperature", "0", "--max-tokens", "40"];
    let plain = generate(model(), &args);
    assert_eq!(plain.answer(), format!("{text}\n"));
    assert!(plain.stderr.contains("24 resident") && plain.stderr.contains("context 512"), "{}", plain.stderr);
    let stats = generate(model(), &[&args[..], &["--stats"]].concat());
    assert_eq!(stats.stdout, plain.stdout);
    for word in ["tokens/s", "hits", "peak RssAnon"] {
        assert!(stats.stderr.contains(word) || !cfg!(target_os = "linux"), "{word}: {}", stats.stderr);
    }
    let quiet = generate(model(), &[&args[..], &["--quiet"]].concat());
    assert_eq!((quiet.stdout.as_slice(), quiet.stderr.as_str()), (plain.stdout.as_slice(), ""));
}

#[test]
fn the_formats_of_what_is_no_expert_are_said() {
    let args = ["--prompt", "hello there", "--temperature", "0", "--max-tokens", "5"];
    for (option, words) in [("--dense-format", "int8 dense weights"), ("--kv-format", "int8 KV cache")] {
        let said = |format: &str| generate(model(), &[&args[..], &[option, format]].concat()).stderr;
        assert!(said("int8").contains(words), "{}", said("int8"));
        assert!(!said("bf16").contains("int8"), "{}", said("bf16"));
    }
}

#[test]
fn the_json_object_has_every_field() {
    let json = greedy(model(), &["--slots", "6", "--prefetch", "correlation"]);
    let object = |v: &Value| v.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    for field in ["text", "tokens", "prompt_tokens", "finish", "timings", "cache", "seed", "model", "format"]
    {
        assert!(object(&json).iter().any(|k| k == field), "{field}");
    }
    assert_eq!((&json["finish"], &json["format"]), (&"length".into(), &"bf16".into()));
    assert_eq!(json["tokens"].as_array().unwrap().len(), 40);
    let ids = json["tokens"].as_array().unwrap().iter().map(|t| t.as_u64().unwrap() as u8).collect();
    assert_eq!(json["text"], String::from_utf8(ids).unwrap(), "byte tokens are the text");
    for field in ["load_s", "prefill_s", "decode_s", "decode_tok_s"] {
        assert!(json["timings"][field].as_f64().unwrap() > 0.0, "{field}");
    }
    let cache = &json["cache"];
    let n = |field: &str| cache[field].as_u64().unwrap_or_else(|| panic!("{field}"));
    assert_eq!((n("slots"), n("experts"), n("record_bytes")), (6, 24, 6144));
    assert_eq!(n("hits") + n("misses"), n("accesses"));
    assert!(n("misses") > 0 && n("hits") > 0 && n("bytes_moved") > 0);
    assert!(n("prefetch_used") + n("prefetch_wasted") <= n("prefetched"));
    let rate = cache["hit_rate"].as_f64().unwrap();
    assert!((rate - n("hits") as f64 / n("accesses") as f64).abs() < 1e-12);
    // Every prompt token is a byte or a special token: 4 lines of template around "hello there".
    assert_eq!(json["prompt_tokens"], 3 + "user\n".len() + 11 + "\n".len() + "assistant\n".len());
}

#[test]
fn tokens_do_not_depend_on_how_experts_are_kept() {
    let resident = greedy(model(), &["--resident"]);
    for options in [
        "--slots 2 --scope global",
        "--slots 2",
        "--slots 6 --policy lfu",
        "--slots 6 --policy lfru --prefetch correlation",
        "--slots 13 --scope global --prefetch correlation",
        "--slots 23",
        "--slots 1000",
        "--pool 60K --policy lfru --scope global",
        "--format bf16 --slots 7",
    ] {
        let other = greedy(model(), &options.split(' ').collect::<Vec<_>>());
        assert_eq!(other["tokens"], resident["tokens"], "{options}");
    }
    assert_eq!(greedy(model(), &["--slots", "1000"])["cache"]["slots"], 24);
    assert_eq!(greedy(model(), &["--pool", "60K"])["cache"]["slots"], 10);
}

#[test]
fn a_converted_model_is_found_again_and_answers_the_same() {
    let cache = tempfile::tempdir().unwrap();
    for format in ["int8", "int4-g32"] {
        let answer = |room: &[&str]| {
            let mut command = comoe();
            command.env("COMOE_CACHE", cache.path()).arg("generate").arg(model());
            command.args(["-p", "hello", "--temperature=0", "--max-tokens=20", "--json", "--format", format]);
            Running::start(command.args(room)).finish().json()
        };
        // What prefetching learned is kept beside them.
        let experts = |name: &std::ffi::OsStr| name.to_string_lossy().starts_with("experts-");
        let files = || {
            let all = std::fs::read_dir(cache.path()).unwrap();
            all.filter(|entry| experts(&entry.as_ref().unwrap().file_name())).count()
        };
        let before = files();
        let first = answer(&["--resident"]);
        let made = files();
        assert!(made > before, "{format}");
        let again = answer(&["--slots", "4", "--prefetch", "correlation"]);
        assert_eq!((&again["tokens"], files()), (&first["tokens"], made), "{format}");
        assert!(first["cache"]["record_bytes"].as_u64().unwrap() < 6144, "{format}");
    }
}

#[test]
fn a_cache_folder_that_cannot_be_written_is_said_aloud() {
    let temporary = tempfile::tempdir().unwrap();
    let mut command = comoe();
    command.env("COMOE_CACHE", "/dev/null/no").env("TMPDIR", temporary.path());
    command.arg("generate").arg(model()).args(["-p", "hello", "--format", "int8", "--max-tokens=2"]);
    let run = Running::start(command.args(["--temperature=0", "-q"])).finish();
    assert_eq!(run.answer().trim().len(), 2);
    assert!(run.stderr.contains("/dev/null/no") && run.stderr.contains("COMOE_CACHE"), "{}", run.stderr);
}

#[test]
fn a_seed_decides_and_another_differs() {
    let sampled = |seed: &str| {
        let args = ["-p", "hello", "--temperature", "1", "--top-k", "20", "--max-tokens", "30", "--json"];
        generate(model(), &[&args[..], &["--seed", seed]].concat()).json()
    };
    let (one, same, two) = (sampled("1"), sampled("1"), sampled("2"));
    assert_eq!((&one["tokens"], &one["seed"]), (&same["tokens"], &1.into()));
    assert_ne!(one["tokens"], two["tokens"]);
}

#[test]
fn the_model_itself_can_end_an_answer() {
    let folder = tempfile::tempdir().unwrap();
    Checkpoint::new(Sizes::default()).that_stops_at_once().write(folder.path());
    let json = greedy(folder.path(), &[]);
    assert_eq!((&json["finish"], &json["text"]), (&"stop".into(), &"".into()));
    assert_eq!(json["tokens"].as_array().unwrap().len(), 1);
    let plain = generate(folder.path(), &["-p", "hello", "--temperature=0", "-q"]);
    assert_eq!((plain.answer(), plain.stderr.as_str()), ("", ""));
}

#[test]
fn raw_text_has_no_template_around_it() {
    let raw = greedy(model(), &["--raw"]);
    assert_eq!(raw["prompt_tokens"], "hello there".len());
    assert!(raw["tokens"].as_array().unwrap().iter().all(|t| *t != STOP));
    // Without a limit the answer goes on to the end of the context.
    let whole = generate(model(), &["--raw", "-p", "hello", "--temperature=0", "--json"]).json();
    assert_eq!(whole["tokens"].as_array().unwrap().len(), 512 - "hello".len());
}

#[test]
fn a_prompt_may_come_from_standard_input() {
    let mut command = comoe();
    command.arg("generate").arg(model()).args(["-p", "-", "--temperature=0", "--max-tokens=40", "--json"]);
    let piped = run_with(&mut command, b"hello there\n").json();
    assert_eq!(piped["tokens"], greedy(model(), &[])["tokens"]);
}

#[test]
fn the_bundled_model_is_found_upward_from_the_working_directory() {
    let root = tempfile::tempdir().unwrap();
    let sizes = Sizes { layers: 1, ..Sizes::default() };
    Checkpoint::new(sizes).write(&root.path().join("assets/comoe-tiny"));
    let deep = root.path().join("a/b");
    std::fs::create_dir_all(&deep).unwrap();
    let mut command = comoe();
    command.current_dir(&deep).args(["generate", "-p", "x", "--max-tokens=2", "--json"]);
    let json = Running::start(&mut command).finish().json();
    assert_eq!((&json["model"], &json["cache"]["experts"]), (&"comoe-tiny".into(), &8.into()));
}
