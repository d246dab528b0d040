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
    let sizes = Sizes { layers: 4, experts: 24, hidden: 256, intermediate: 512, context: 512 };
    let folder = tempfile::tempdir().unwrap();
    Checkpoint::new(sizes).write(folder.path());
    let (all, record) = ((sizes.layers * sizes.experts) as u64, sizes.expert_bytes() as u64);
    assert!(all * record >= 64 << 20);
    // Letters of all kinds, so that every expert has something to do.
    let prompt: String = (0..400).map(|i| char::from(b' ' + (i * 37 % 95) as u8)).collect();

    // What it takes once everything was used, seen from outside, and the peak that it tells itself.
    let measure = |slots: u64| {
        let mut command = comoe();
        command.arg("chat").arg(folder.path()).args([
            "--json",
            "--max-tokens=8",
            "--slots",
            &slots.to_string(),
        ]);
        let mut running = Running::start(command.stdin(Stdio::piped()));
        running.write(format!(" {prompt}\n").as_bytes());
        let json: serde_json::Value = serde_json::from_slice(&running.read_until(b'\n')).unwrap();
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
