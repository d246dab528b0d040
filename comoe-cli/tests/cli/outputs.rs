//! Files that commands write never take the place of something else, and are named as they were asked for.

use std::path::Path;

use crate::program::{Run, Running, assets, comoe, model};

/// A trace that comes with the sources.
fn fixture() -> Vec<u8> {
    std::fs::read(assets().join("fixtures/comoe_tiny.trace")).unwrap()
}

fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    let mut names: Vec<String> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Runs in `folder`.
fn within(folder: &Path, args: &str) -> Run {
    let mut command = comoe();
    let tiny = assets().join("comoe-tiny");
    let args = args.replace("TINY", tiny.to_str().unwrap()).replace("MODEL", model().to_str().unwrap());
    Running::start(command.args(args.split_whitespace()).current_dir(folder)).finish()
}

#[test]
fn inputs_and_files_of_another_kind_are_not_overwritten() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| std::fs::write(folder.path().join(name), bytes).unwrap();
    write("t1", &fixture());
    write("p.txt", b"hello\n");
    write("notes.txt", b"do not lose\n");
    let files = || {
        names(folder.path())
            .into_iter()
            .map(|n| std::fs::read(folder.path().join(n)).unwrap())
            .collect::<Vec<_>>()
    };
    let before = files();
    for (args, message) in [
        ("trace plot t1 -o t1", "t1: is the file of TRACE too; give --output another name"),
        ("trace plot t1 -o notes.txt", "notes.txt: is there already and is no SVG picture"),
        ("trace record MODEL --prompts p.txt -o ./p.txt", "./p.txt: is the file of --prompts too"),
        ("trace record MODEL --prompts p.txt -o notes.txt", "notes.txt: is there already and is no trace"),
        ("generate MODEL -p x --trace notes.txt", "give --trace another name"),
        ("chat MODEL --trace notes.txt", "give --trace another name"),
        ("generate TINY -p x --pin t1 --trace t1", "t1: is the file of --pin too"),
        (
            "generate MODEL -p x --predictor-table new --trace new",
            "new: is the file of --predictor-table too",
        ),
        ("logits MODEL --tokens 1 -o t1", "t1: is there already and is no file of logits"),
        ("trace plot t1 -o .", "is no regular file"),
    ] {
        within(folder.path(), args).fails(1, &[message]);
        assert!(files() == before, "{args}");
    }
}

#[test]
fn an_older_output_is_replaced_by_a_whole_one_and_kept_by_a_run_that_fails() {
    let folder = tempfile::tempdir().unwrap();
    let read = |name: &str| std::fs::read(folder.path().join(name)).unwrap();
    let ok = |args: &str| drop(within(folder.path(), args).answer().to_owned());
    std::fs::write(folder.path().join("t1"), fixture()).unwrap();
    let long = "x".repeat(600);
    assert_eq!(within(folder.path(), &format!("generate MODEL -p {long} --trace t1")).status.code(), Some(1));
    assert!(read("t1") == fixture());
    ok("generate MODEL -p x --max-tokens 3 --trace t1");
    assert!(read("t1") != fixture());
    for _ in 0..2 {
        ok("trace plot t1 -o t.svg");
        ok("logits MODEL --tokens 1,2 -o l");
    }
    assert_eq!(names(folder.path()), ["l", "t.svg", "t1"]);
}

#[test]
fn a_folder_that_is_not_there_is_said_before_the_work() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("t1"), fixture()).unwrap();
    // Nothing is said of a model that was loaded.
    for args in [
        "pack MODEL -o none/x.safetensors",
        "logits MODEL --tokens 1 -o none/x.safetensors",
        "generate MODEL -p x --trace none/x.safetensors",
        "trace plot t1 -o none/x.safetensors",
    ] {
        within(folder.path(), args)
            .fails(1, &["comoe: none/x.safetensors: there is no folder none; make it first"]);
    }
}

#[test]
fn of_two_that_pack_to_one_name_at_once_one_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("race.safetensors");
    for _ in 0..5 {
        let start = || Running::start(comoe().arg("pack").arg(model()).arg("-o").arg(&file));
        let runs = [start(), start()].map(Running::finish);
        let refused: Vec<&Run> = runs.iter().filter(|run| !run.status.success()).collect();
        assert_eq!(refused.len(), 1, "{runs:?}");
        refused[0].fails(1, &["race.safetensors", "there"]);
        assert_eq!(names(folder.path()), ["race.safetensors"]);
        std::fs::remove_file(&file).unwrap();
    }
}

#[test]
fn a_file_of_prompts_is_named() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("bad.txt"), b"fine\nbad \xff byte\n").unwrap();
    let record =
        |prompts: &str| within(folder.path(), &format!("trace record MODEL --prompts {prompts} -o t"));
    record("bad.txt").fails(1, &["comoe: bad.txt, line 2: not UTF-8 at byte 5"]);
    record(".").fails(1, &["comoe: .: Is a directory"]);
}

#[test]
fn quiet_runs_say_no_notes() {
    for extra in [&["--pin=auto"][..], &["--predictor-table=/no/such/table"], &["--format=int8"]] {
        let cache = tempfile::tempdir().unwrap();
        let answer = |quiet: &[&str]| {
            let mut command = comoe();
            command.env("COMOE_CACHE", cache.path()).arg("generate").arg(model());
            command.args(["-p=hello", "--max-tokens=2", "--temperature=0"]).args(extra).args(quiet);
            Running::start(&mut command).finish()
        };
        let quiet = answer(&["-q"]);
        assert_eq!((quiet.answer().len(), quiet.stderr.as_str()), (3, ""), "{extra:?}");
        std::fs::remove_dir_all(cache.path()).unwrap();
        std::fs::create_dir(cache.path()).unwrap();
        assert!(answer(&[]).stderr.contains("note: "), "{extra:?}");
    }
}
