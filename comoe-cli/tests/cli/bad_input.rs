//! Every kind of bad input: one clear line, the right exit code, no panic, no hang.

use std::fs::{self, File, OpenOptions};
use std::path::{Path, PathBuf};
use std::process::Stdio;

use safetensors::Dtype;
use serde_json::json;
use tempfile::TempDir;

use crate::checkpoint::{Checkpoint, FIRST_SHARD, INDEX, SECOND_SHARD, Sizes, Stored};
use crate::program::{Running, comoe, generate, model, run, run_with};

/// A model that `change` spoils before it is written.
fn spoiled(change: impl FnOnce(&mut Checkpoint)) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let mut checkpoint = Checkpoint::new(Sizes::default());
    change(&mut checkpoint);
    checkpoint.write(folder.path());
    folder
}

/// A good model whose files `change` spoils.
fn damaged(change: impl FnOnce(&Path)) -> TempDir {
    let folder = spoiled(|_| {});
    change(folder.path());
    folder
}

#[track_caller]
fn refused(folder: &Path, names: &[&str]) {
    let run = generate(folder, &["--prompt", "hello"]);
    run.fails(1, names);
    assert!(run.stdout.is_empty());
    run_with(comoe().arg("chat").arg(folder), b"hello\n").fails(1, names);
}

#[test]
fn files_that_are_not_there() {
    refused(Path::new("/no/such/folder"), &["/no/such/folder", "give the folder"]);
    refused(&model().join(FIRST_SHARD), &[FIRST_SHARD, "is a file"]);
    let empty = tempfile::tempdir().unwrap();
    refused(empty.path(), &["without config.json", "give the folder"]);
    for (name, advice) in [
        ("config.json", "give the folder"),
        ("tokenizer.json", "put the model's own there"),
        (SECOND_SHARD, "download"),
    ] {
        let folder = damaged(|f| fs::remove_file(f.join(name)).unwrap());
        refused(folder.path(), &[name, advice]);
    }
    // An empty folder hides a model of the hub.
    fs::create_dir_all(empty.path().join("org/tiny")).unwrap();
    let mut command = comoe();
    command.current_dir(empty.path()).args(["generate", "org/tiny", "-p", "x"]);
    Running::start(&mut command).finish().fails(1, &["org/tiny", "without config.json", "the hub's model"]);
    let weightless = damaged(|f| {
        for name in [INDEX, FIRST_SHARD, SECOND_SHARD] {
            fs::remove_file(f.join(name)).unwrap();
        }
    });
    refused(weightless.path(), &[&weightless.path().display().to_string(), "safetensors"]);
}

#[test]
fn shards_that_are_cut() {
    let whole = fs::metadata(model().join(FIRST_SHARD)).unwrap().len();
    for length in [0, 5, 200, whole / 2, whole - 1] {
        let folder = damaged(|f| {
            OpenOptions::new().write(true).open(f.join(FIRST_SHARD)).unwrap().set_len(length).unwrap();
        });
        refused(folder.path(), &[FIRST_SHARD]);
    }
}

#[test]
fn an_index_that_disagrees_with_its_shards() {
    let index = |change: fn(&mut serde_json::Value)| {
        damaged(|f| {
            let path = f.join(INDEX);
            let mut index = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
            change(&mut index);
            fs::write(path, index.to_string()).unwrap();
        })
    };
    let name = "model.layers.1.mlp.experts.3.up_proj.weight";
    let elsewhere = index(|i| i["weight_map"]["lm_head.weight"] = "model-00003.safetensors".into());
    refused(elsewhere.path(), &["model-00003.safetensors", INDEX]);
    let wrong = index(|i| {
        i["weight_map"]["model.layers.1.mlp.experts.3.up_proj.weight"] = FIRST_SHARD.into();
    });
    refused(wrong.path(), &[name, FIRST_SHARD]);
    let garbage = damaged(|f| fs::write(f.join(INDEX), "{").unwrap());
    refused(garbage.path(), &[INDEX]);
}

#[test]
fn tensors_of_the_wrong_shape_or_type() {
    let expert = "model.layers.1.mlp.experts.3.up_proj.weight";
    let dense = "model.layers.2.self_attn.o_proj.weight";
    for name in
        [expert, dense, "model.embed_tokens.weight", "model.layers.0.mlp.gate.weight", "model.norm.weight"]
    {
        let missing = spoiled(|c| drop(c.tensors.remove(name)));
        refused(missing.path(), &[name.trim_end_matches("up_proj.weight")]);
        let small = spoiled(|c| {
            *c.tensor(name) = Stored { dtype: Dtype::BF16, shape: vec![3, 5], bytes: vec![0; 30] };
        });
        refused(small.path(), &[name, "[3, 5]"]);
        let typed = spoiled(|c| {
            let t = c.tensor(name);
            t.dtype = Dtype::I16;
        });
        refused(typed.path(), &[name, "I16"]);
    }
}

#[test]
fn configurations_that_do_not_fit() {
    for (field, value, names) in [
        ("num_experts", json!(0), &["config.json", "experts"][..]),
        ("num_experts", json!(null), &["config.json", "experts"]),
        ("num_experts", json!(9), &["9", "8", "layer 0"]),
        ("mlp_only_layers", json!([0, 1, 2]), &["config.json", "mlp_only_layers"]),
        ("model_type", json!("llama"), &["config.json", "llama", "qwen3_moe"]),
        ("num_experts_per_tok", json!(99), &["config.json", "99"]),
        ("hidden_size", json!("wide"), &["config.json", "hidden_size"]),
        ("vocab_size", json!(100), &["tokenizer.json", "100"]),
    ] {
        let folder = spoiled(|c| c.config[field] = value);
        refused(folder.path(), names);
    }
    for name in ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"] {
        let folder = damaged(|f| fs::write(f.join(name), "{ not json").unwrap());
        refused(folder.path(), &[name]);
    }
    let folder = spoiled(|c| c.generation_config["temperature"] = json!(-1));
    refused(folder.path(), &["generation_config.json", "temperature", "--temperature"]);
    let folder = damaged(|f| fs::write(f.join("tokenizer_config.json"), "{}").unwrap());
    generate(folder.path(), &["-q", "--prompt", "hello"]).fails(1, &["chat template", "--raw"]);
    assert!(!generate(folder.path(), &["-q", "--prompt", "hello", "--raw"]).answer().is_empty());
}

#[test]
fn pools_that_are_too_small() {
    for (args, names) in [
        (["--slots", "1"], &["1 slots", "--slots 2"][..]),
        (["--slots", "0"], &["0 slots", "--slots 2"]),
        (["--pool", "1K"], &["1024 bytes", "6144 bytes", "12288"]),
        (["--pool", "6K"], &["6144 bytes", "12288"]),
        (["--context", "100000"], &["100000", "512"]),
    ] {
        let run = generate(model(), &["--prompt", "hello", args[0], args[1]]);
        run.fails(1, names);
    }
}

#[test]
fn prompts_that_are_empty_or_too_long() {
    for prompt in ["", " ", "\n\t "] {
        generate(model(), &["--prompt", prompt]).fails(1, &["empty", "--prompt"]);
    }
    generate(model(), &["--raw", "--prompt", ""]).fails(1, &["empty"]);
    run_with(comoe().arg("generate").arg(model()).args(["--prompt", "-"]), b"\n").fails(1, &["empty"]);

    let long = "long ".repeat(200);
    let raw = generate(model(), &["--quiet", "--raw", "--prompt", &long]);
    raw.fails(1, &["1000 tokens", "512"]);
    generate(model(), &["--quiet", "--prompt", &long]).fails(1, &["tokens", "512"]);
    let turns = format!("{long}\nhello\n");
    let chat = run_with(comoe().arg("chat").arg(model()).arg("--quiet"), turns.as_bytes());
    chat.fails(1, &["tokens", "512"]);
    assert!(chat.stdout.is_empty());
    let asked = ["--quiet", "--raw", "--prompt", "hello", "--max-tokens", "508"];
    generate(model(), &asked).fails(1, &["508", "512", "507"]);
}

#[test]
fn standard_input_that_is_no_text() {
    let chat = || {
        let mut command = comoe();
        command.arg("chat").arg(model()).args(["--quiet", "--max-tokens", "3"]);
        command
    };
    let run = run_with(&mut chat(), b"fine\nbad \xff byte\n");
    run.fails(1, &["standard input", "line 2", "byte 5", "UTF-8"]);
    assert_eq!(run.stdout.iter().filter(|b| **b == b'\n').count(), 1, "the first turn was answered");
    run_with(comoe().arg("generate").arg(model()).args(["--prompt", "-"]), b"a\n\xc3(").fails(1, &["line 2"]);
    // A folder instead of a pipe.
    let folder = File::open(model()).unwrap();
    Running::start(chat().stdin(Stdio::from(folder))).finish().fails(1, &["standard input"]);
}

#[test]
fn standard_output_that_is_closed_or_full() {
    let long = || {
        let mut command = comoe();
        command.arg("generate").arg(long_context()).args([
            "--quiet",
            "--temperature",
            "0",
            "--prompt",
            "hello",
        ]);
        command.args(["--max-tokens", "20000"]);
        command
    };
    // A pipe that nobody reads any more, from before the program starts.
    let closed = || std::io::pipe().unwrap().1;
    let mut begun = Running::start(&mut long());
    begun.read_byte();
    drop(begun.child.stdout.take());
    begun.finish().fails(1, &["standard output was closed"]);

    for extra in ["--quiet", "--json"] {
        let mut never_read = comoe();
        never_read.arg("generate").arg(model()).args(["-q", "-p", "hello", "--max-tokens=4"]);
        never_read.arg(if extra == "--json" { extra } else { "--stats" });
        let run = Running::start(never_read.stdout(closed())).finish();
        assert_eq!(run.status.code(), Some(1), "{run:?}");
        assert!(run.stderr.lines().any(|l| l.contains("standard output was closed")), "{run:?}");
        assert!(!run.stderr.contains("panicked"), "{run:?}");
    }
    let help = Running::start(comoe().arg("--help").stdout(closed()));
    assert!(!help.finish().stderr.contains("panicked"));

    if let Ok(full) = OpenOptions::new().write(true).open("/dev/full") {
        Running::start(long().stdout(full)).finish().fails(1, &["standard output", "space"]);
    }
}

/// A model with a context long enough that an answer goes on until it is stopped.
fn long_context() -> PathBuf {
    static MODEL: std::sync::LazyLock<TempDir> = std::sync::LazyLock::new(|| {
        let folder = tempfile::tempdir().unwrap();
        Checkpoint::new(Sizes { context: 32768, ..Sizes::default() }).write(folder.path());
        folder
    });
    MODEL.path().to_owned()
}

#[test]
fn standard_error_that_is_closed_changes_nothing() {
    let mut child =
        comoe().arg("generate").arg(model()).args(["-p", "hi", "--max-tokens=4", "--stats"]).spawn();
    let child = child.as_mut().unwrap();
    drop(child.stderr.take());
    let status = child.wait().unwrap();
    assert!(status.success(), "{status}");
}

#[test]
fn usage() {
    let with = |extra: &[&str]| {
        let all = ["generate", "-p", "x", "/no/such/folder"].into_iter().chain(extra.iter().copied());
        let run = run(all);
        assert_eq!(run.status.code(), Some(2), "{extra:?}: {run:?}");
        assert!(run.stdout.is_empty() && !run.stderr.contains("panicked"), "{run:?}");
        run.stderr
    };
    assert!(with(&["--slots", "4", "--resident"]).contains("--resident"));
    assert!(with(&["--pool", "1G", "--resident"]).contains("--resident"));
    assert!(with(&["--pool", "plenty"]).contains("900K"));
    assert!(with(&["--format", "fp4"]).contains("int4"));
    assert!(with(&["--policy", "fifo"]).contains("lfru"));
    assert!(with(&["--driver", "gpu"]).contains("[possible values: auto, host, device]"));
    assert!(with(&["--temperature", "-1"]).contains("temperature"));
    assert!(with(&["--top-p", "2"]).contains("top_p"));
    assert!(with(&["--max-tokens", "0"]).contains("at least 1"));
    assert!(with(&["--no-such-option"]).contains("--no-such-option"));
    for args in [&["generate"][..], &["dance"], &[]] {
        assert_eq!(run(args.iter().copied()).status.code(), Some(2), "{args:?}");
    }
    for args in [["--help"], ["--version"]] {
        let run = run(args);
        assert!(run.answer().contains("comoe") && run.stderr.is_empty(), "{run:?}");
    }
}
