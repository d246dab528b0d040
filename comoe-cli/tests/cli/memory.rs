//! Memory grows with the slots and not with the model.

use std::process::Stdio;

use crate::checkpoint::{Checkpoint, Sizes, TOP_K};
use crate::program::{Running, comoe};

/// A field of `/proc/PID/status` in bytes.
fn status(pid: u32, field: &str) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = text.lines().find_map(|l| l.strip_prefix(field)).unwrap();
    line.trim_start_matches(':').trim().trim_end_matches("kB").trim().parse::<u64>().unwrap() * 1024
}

#[test]
fn anonymous_memory_grows_with_the_slots_and_not_with_the_model() {
    let folder = tempfile::tempdir().unwrap();
    let (sizes, prompt) = model_and_prompt(folder.path());
    let (all, record) = ((sizes.layers * sizes.experts) as u64, sizes.expert_bytes() as u64);
    assert!(all * record >= 64 << 20);

    // What it takes once everything was used, seen from outside, and the peak that it tells itself.
    let measure = |slots: u64| {
        let (running, json) = answered(folder.path(), &prompt, &["--slots", &slots.to_string()]);
        let pid = running.child.id();
        let (anonymous, resident) = (status(pid, "RssAnon"), status(pid, "VmHWM"));
        assert!(running.finish().status.success());
        let told = json["peak_rss_anon_bytes"].as_u64().unwrap();
        assert!(
            told + (1 << 20) >= anonymous && told <= resident + (1 << 20),
            "{told} {anonymous} {resident}"
        );
        (told, json)
    };
    let few = TOP_K as u64 * sizes.layers as u64;
    let ((small, _), (large, json)) = (measure(few), measure(all));
    let used = json["cache"]["records_moved"].as_u64().unwrap();
    assert!(used > all * 9 / 10, "only {used} of {all} experts were used");
    let (saved, expected) = (large - small, (used - few) * record);
    assert!(saved > expected * 9 / 10, "{small} bytes with {few} slots, {large} with {all}: saves {saved}");
    // A third of the slots: in between, so that it is the slots that count.
    let (middle, _) = measure(all / 3);
    let (slope, expected) = (middle - small, (all / 3 - few) * record);
    assert!(slope > expected / 2 && slope < expected * 3 / 2, "{slope} bytes for {expected} of slots");
}

/// A model of 72 MiB of experts, and a prompt that uses all of them: letters of all kinds, so that each has something to do.
fn model_and_prompt(folder: &std::path::Path) -> (Sizes, String) {
    let sizes = Sizes { layers: 4, experts: 24, hidden: 256, intermediate: 512, context: 512 };
    Checkpoint::new(sizes).write(folder);
    (sizes, (0..400).map(|i| char::from(b' ' + (i * 37 % 95) as u8)).collect())
}

/// A conversation that has answered once and goes on.
fn answered(folder: &std::path::Path, prompt: &str, options: &[&str]) -> (Running, serde_json::Value) {
    let mut command = comoe();
    command.arg("chat").arg(folder).args(["--json", "--max-tokens=8", "--device=cpu"]).args(options);
    let mut running = Running::start(command.stdin(Stdio::piped()));
    running.write(format!(" {prompt}\n").as_bytes());
    let json = serde_json::from_slice(&running.read_until(b'\n')).unwrap();
    (running, json)
}

#[test]
fn memory_with_little_ram_is_that_of_the_records_it_holds() {
    let folder = tempfile::tempdir().unwrap();
    let (sizes, prompt) = model_and_prompt(folder.path());
    let record = sizes.expert_bytes() as u64;
    let measure = |records: u64| {
        let ram = format!("--ram={}K", records * record / 1024);
        let (running, json) = answered(folder.path(), &prompt, &[&ram]);
        assert_eq!(
            json["cache"]["slots"].as_u64().unwrap()
                + json["cache"]["tiers"]["ram_experts"].as_u64().unwrap(),
            records
        );
        let anonymous = status(running.child.id(), "RssAnon");
        assert!(running.finish().status.success());
        anonymous
    };
    let ((few, small), (many, large)) = ((16, measure(16)), (64, measure(64)));
    let (grown, held) = (large - small, (many - few) * record);
    // Buffers grow with the experts that a step has at a time.
    let buffers = 4 << 20;
    assert!(
        grown <= held * 21 / 20 + buffers && grown >= held * 9 / 10,
        "{grown} bytes for {held} of records"
    );
}

#[test]
fn processes_share_the_files_that_experts_are_read_from() {
    let folder = tempfile::tempdir().unwrap();
    let (sizes, prompt) = model_and_prompt(folder.path());
    let experts = (sizes.layers * sizes.experts * sizes.expert_bytes()) as u64;
    let of_files = |running: &Running| {
        let text = std::fs::read_to_string(format!("/proc/{}/smaps_rollup", running.child.id())).unwrap();
        let field = |name: &str| {
            let line = text.lines().find_map(|l| l.strip_prefix(name)).unwrap();
            line.trim().trim_end_matches("kB").trim().parse::<u64>().unwrap() * 1024
        };
        field("Pss_File:")
    };
    let slots = ["--slots=8"];
    let (one, _) = answered(folder.path(), &prompt, &slots);
    let alone = of_files(&one);
    assert!(alone > experts * 9 / 10, "{alone} of {experts} bytes are mapped");
    let (two, _) = answered(folder.path(), &prompt, &slots);
    for running in [&one, &two] {
        let shared = of_files(running);
        // The program itself, run by other tests as well, is part of it.
        assert!(shared < alone * 6 / 10, "{shared} bytes each, {alone} alone");
    }
    assert!(one.finish().status.success() && two.finish().status.success());
}
