//! Runs that end early, by an error or by a signal: what was done until then is kept.

use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::Value;
use tempfile::TempDir;

use crate::checkpoint::{Checkpoint, Sizes};
use crate::program::{Running, comoe, model, run, run_with};

/// What `trace show --json` says of a trace, which has to be whole.
pub(crate) fn shown(trace: &Path) -> Value {
    run(["trace", "show", trace.to_str().unwrap(), "--json"]).json()
}

fn tokens(shown: &Value) -> u64 {
    shown["prompt_tokens"].as_u64().unwrap() + shown["decode_tokens"].as_u64().unwrap()
}

/// A model whose context holds many answers.
fn long() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    Checkpoint::new(Sizes { context: 65536, ..Sizes::default() }).write(folder.path());
    folder
}

/// `trace record` or `chat`, whose answers have `letters` letters.
fn command(kind: &[&str], model: &Path, trace: &Path, letters: usize) -> Command {
    let mut command = comoe();
    command.args(kind).arg(model).arg("--temperature=0").arg(format!("--max-tokens={letters}"));
    command.arg(if kind[0] == "chat" { "--trace" } else { "--output" }).arg(trace);
    command.stdin(Stdio::piped());
    command
}

const CHAT: &[&str] = &["chat"];
const RECORD: &[&str] = &["trace", "record", "--prompts=-"];

#[test]
fn an_error_in_a_later_turn_leaves_a_trace_of_the_turns_before() {
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("t.trace");
    let text = format!("hello\n{}\nnever said\n", "long ".repeat(200));
    for kind in [CHAT, RECORD] {
        let run = run_with(&mut command(kind, model(), &trace, 12), text.as_bytes());
        assert_eq!(run.status.code(), Some(1), "{run:?}");
        assert!(run.stderr.contains("comoe: ") && run.stderr.contains("written to"), "{run:?}");
        let shown = shown(&trace);
        assert_eq!(shown["turns"], 1, "{kind:?}: {shown}");
        std::fs::remove_file(&trace).unwrap();
        // Without any turn there is no file.
        let run = run_with(&mut command(kind, model(), &trace, 12), "long ".repeat(200).as_bytes());
        assert!(run.stderr.contains("no turn was complete"), "{run:?}");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}

#[test]
fn a_reader_that_leaves_leaves_a_trace_of_the_turns_before() {
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("t.trace");
    run_with(&mut command(RECORD, model(), &trace, 200), b"hello\n").answer();
    let of_one = tokens(&shown(&trace));
    let mut running = Running::start(&mut command(RECORD, model(), &trace, 200));
    running.write("hello\n".repeat(30).as_bytes());
    drop(running.child.stdin.take());
    running.read_until(b'\n');
    drop(running.child.stdout.take());
    let run = running.finish();
    assert!(run.status.code() == Some(1) && run.stderr.contains("standard output was closed"), "{run:?}");
    let shown = shown(&trace);
    let turns = shown["turns"].as_u64().unwrap();
    assert!((1..30).contains(&turns) && tokens(&shown) == turns * of_one, "{shown}");
}

/// Ctrl-C ends a run whose turns come from a pipe, even if it is pressed twice in haste; so does SIGTERM. The answer that is
/// cut is not in the trace.
#[test]
fn a_signal_ends_a_piped_run_after_its_files_are_finished() {
    let (model, folder) = (long(), tempfile::tempdir().unwrap());
    for (kind, signal) in [(CHAT, libc::SIGINT), (RECORD, libc::SIGINT), (RECORD, libc::SIGTERM)] {
        let trace = folder.path().join("t.trace");
        let mut running = Running::start(&mut command(kind, model.path(), &trace, 300));
        running.write("hello\n".repeat(100).as_bytes());
        drop(running.child.stdin.take());
        let mut answers = running.read_until(b'\n');
        answers.push(running.read_byte());
        running.signal(signal);
        std::thread::sleep(Duration::from_millis(20));
        // It may have ended; it was not waited for.
        running.signal(signal);
        let run = running.finish();
        assert_eq!(run.status.signal(), Some(signal), "{run:?}");
        assert!(run.stderr.ends_with("comoe: interrupted\n"), "{run:?}");
        answers.extend(&run.stdout);
        let whole = answers.split(|b| *b == b'\n').filter(|line| line.len() == 300).count();
        let shown = shown(&trace);
        assert!(shown["turns"] == whole && (1..100).contains(&whole), "{kind:?}: {whole} answers, {shown}");
    }
}

#[test]
fn a_signal_between_answers_of_a_piped_chat_ends_it_the_same_way() {
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("t.trace");
    for signal in [libc::SIGINT, libc::SIGTERM] {
        let mut running = Running::start(&mut command(CHAT, model(), &trace, 12));
        running.write(b"hello\n");
        running.read_until(b'\n');
        // It waits for the next line by then, or soon; either way the signal ends it.
        std::thread::sleep(Duration::from_millis(100));
        running.signal(signal);
        // The input stays open: nothing but the signal can end the run.
        let input = running.child.stdin.take();
        let run = running.finish();
        drop(input);
        assert_eq!(run.status.signal(), Some(signal), "{run:?}");
        assert_eq!(shown(&trace)["turns"], 1);
        std::fs::remove_file(&trace).unwrap();
    }
}

#[test]
fn ctrl_c_in_generate_leaves_no_half_trace() {
    let (model, folder) = (long(), tempfile::tempdir().unwrap());
    let trace = folder.path().join("t.trace");
    let mut command = comoe();
    command.arg("generate").arg(model.path()).args(["-p=hello", "--temperature=0", "--max-tokens=60000"]);
    let mut running = Running::start(command.args(["--context=65536", "--trace"]).arg(&trace));
    running.read_byte();
    running.signal(libc::SIGINT);
    let run = running.finish();
    assert_eq!(run.status.signal(), Some(libc::SIGINT), "{run:?}");
    assert!(run.stderr.contains("no turn was complete") && run.stdout.ends_with(b"\n"), "{run:?}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}
