//! What goes wrong on the way, and what is said of it.

use super::server::{Fault, Files, Hub, REPO};
use super::{Machine, tiny, weights};
use crate::program::Running;

const FIRST: &str = "model-00001-of-00003.safetensors";

#[test]
fn connections_that_break_and_answers_that_are_short_are_gone_on_with() {
    let files = tiny();
    let hub = Hub::new(files.clone());
    for fault in
        [Fault::Cut(3 << 20), Fault::Short(1 << 20), Fault::Cut(0), Fault::Cut(100_000), Fault::Short(0)]
    {
        hub.fault("/cdn/model-00001", fault);
    }
    hub.fault("/cdn/model-00002", Fault::Status(503, &[]));
    hub.fault("revision/main", Fault::Status(502, &[]));
    hub.fault("tokenizer.json", Fault::Cut(1000));
    let machine = Machine::new(&hub);
    machine.pull().answer();
    machine.has_whole(&files);
    let twice = hub.sent_of_large() - weights(&files);
    assert!(twice * 20 < weights(&files), "{twice} bytes came twice");
}

#[test]
fn a_server_that_gives_no_parts_gives_the_whole() {
    let files = tiny();
    let hub = Hub::new(files.clone());
    hub.fault("/cdn/model-00001", Fault::Cut(3 << 20));
    hub.fault("/cdn/model-00001", Fault::NoRanges);
    let machine = Machine::new(&hub);
    machine.pull().answer();
    machine.has_whole(&files);
}

#[test]
fn a_mirror_that_describes_nothing_is_asked_file_by_file() {
    let files = tiny();
    let hub = Hub::new(files.clone());
    hub.describe_nothing();
    let machine = Machine::new(&hub);
    machine.pull().answer();
    machine.has_whole(&files);
    let heads = hub.log().iter().filter(|r| r.method == "HEAD").count();
    assert!(heads >= super::NEEDED.len(), "{heads}");
}

#[test]
fn too_many_requests_wait_as_long_as_asked() {
    let files = tiny();
    let hub = Hub::new(files.clone());
    hub.fault("revision/main", Fault::Status(429, &[("retry-after", "2")]));
    let machine = Machine::new(&hub);
    machine.pull().answer();
    let lists: Vec<_> = hub.log().into_iter().filter(|r| r.path.contains("revision/main")).collect();
    assert!(lists[1].at - lists[0].at >= std::time::Duration::from_secs(2));

    hub.fault("revision/main", Fault::Status(429, &[("retry-after", "86400")]));
    machine.pull().fails(1, &["86400 s", "again later"]);
}

#[test]
fn whoever_may_not_read_is_told_what_to_do() {
    let hub = Hub::new(tiny());
    let machine = Machine::new(&hub);
    let with_token = || Running::start(machine.command(&["pull", REPO]).env("HF_TOKEN", "secret")).finish();
    let list = "revision/main";

    hub.fault(list, Fault::Status(401, &[("x-error-code", "GatedRepo")]));
    machine.pull().fails(1, &[REPO, "gated", "accept its terms", &hub.endpoint(), "HF_TOKEN"]);
    hub.fault(list, Fault::Status(403, &[("x-error-code", "GatedRepo")]));
    with_token().fails(1, &[REPO, "gated", "access", "pending"]);
    hub.fault(list, Fault::Status(401, &[]));
    machine.pull().fails(1, &[REPO, "401", "does not exist, or it is private", "HF_TOKEN"]);
    hub.fault(list, Fault::Status(401, &[]));
    with_token().fails(1, &[REPO, "401", "the token is not valid"]);
    hub.fault(list, Fault::Status(404, &[("x-error-code", "RepoNotFound")]));
    with_token().fails(1, &[REPO, "not found", "spelling"]);
    machine.run(&["pull", &format!("{REPO}@v9")]).fails(1, &[REPO, "no revision", "v9"]);
    machine.run(&["chat", "comoe/tinny", "--quiet"]).fails(1, &["comoe/tinny", "not found", "folder"]);
    hub.fault(list, Fault::Status(418, &[]));
    machine.pull().fails(1, &["418"]);
    // Gated repositories have a list that everybody may read.
    hub.fault("config.json", Fault::Status(401, &[("x-error-code", "GatedRepo")]));
    machine.pull().fails(1, &[REPO, "gated"]);
}

#[test]
fn the_token_goes_to_the_hub_and_nowhere_else() {
    let hub = Hub::new(tiny());
    let machine = Machine::new(&hub);
    Running::start(machine.command(&["pull", REPO]).env("HF_TOKEN", "secret")).finish().answer();
    for request in hub.log() {
        let expected = if request.path.starts_with("/cdn/") { None } else { Some("Bearer secret") };
        assert_eq!(request.authorization.as_deref(), expected, "{}", request.path);
    }
    // A token in the file of the Python tools does as well.
    let machine = Machine::new(&hub);
    std::fs::write(machine.home.path().join("token"), "filed\n").unwrap();
    let asked = hub.log().len();
    machine.pull().answer();
    assert_eq!(hub.log()[asked].authorization.as_deref(), Some("Bearer filed"));
}

#[test]
fn another_content_is_never_taken() {
    let files = tiny();
    let hub = Hub::new(files.clone());
    let machine = Machine::new(&hub);
    hub.fault("/cdn/model-00001", Fault::Garbled);
    machine.pull().answer();
    machine.has_whole(&files);

    let machine = Machine::new(&hub);
    for _ in 0..2 {
        hub.fault("/cdn/model-00001", Fault::Garbled);
    }
    machine.run(&["pull", REPO, "--quiet"]).fails(1, &[FIRST, REPO, "another content"]);
    assert!(!machine.snapshot().join(FIRST).exists());
    assert!(!machine.model().join("refs").exists(), "the name does not stand for it");
    machine.pull().answer();
    machine.has_whole(&files);
}

#[test]
fn a_file_that_was_damaged_later_is_found_and_fetched_again_when_asked() {
    let files = tiny();
    let hub = Hub::new(files.clone());
    let machine = Machine::new(&hub);
    machine.pull().answer();
    // One with a SHA-256, and one with git's hash.
    for name in [FIRST, "config.json"] {
        let blob = std::fs::canonicalize(machine.snapshot().join(name)).unwrap();
        let mut bytes = std::fs::read(&blob).unwrap();
        bytes[..10].fill(b'x');
        std::fs::write(&blob, bytes).unwrap();
    }
    let again = machine.run(&["pull", REPO, "--check"]);
    again.answer();
    assert!(again.stderr.contains(&format!("{FIRST} is damaged")), "{}", again.stderr);
    machine.has_whole(&files);
    let fetched = hub.fetched().len();
    let whole = machine.run(&["pull", REPO, "--check"]);
    assert!(whole.stderr.contains("and whole"), "{}", whole.stderr);
    assert_eq!(hub.fetched().len(), fetched, "nothing was fetched");
}

#[test]
fn what_a_broken_disk_left_is_not_believed() {
    let files = tiny();
    let hub = Hub::new(files.clone());
    let machine = Machine::new(&hub);
    machine.pull().answer();
    let blob = std::fs::canonicalize(machine.snapshot().join(FIRST)).unwrap();
    let part = blob.with_file_name(format!("{}.incomplete", blob.file_name().unwrap().to_str().unwrap()));
    std::fs::remove_file(&blob).unwrap();
    std::fs::write(&part, vec![7; 5 << 20]).unwrap();
    machine.pull().answer();
    machine.has_whole(&files);
}

#[test]
fn a_disk_that_is_too_small_is_seen_before_anything_is_fetched() {
    let hub = Hub::new(tiny());
    hub.claim(FIRST, 1 << 60);
    let machine = Machine::new(&hub);
    machine.pull().fails(1, &[REPO, "to fetch", "free in", "HF_HOME"]);
    assert_eq!(hub.sent_of_large(), 0);
}

#[test]
fn a_model_that_cannot_run_is_refused_before_its_weights_are_fetched() {
    let refused = |change: &dyn Fn(&mut Files), names: &[&str]| {
        let mut files = tiny();
        change(&mut files);
        let hub = Hub::new(files);
        Machine::new(&hub).pull().fails(1, names);
        assert_eq!(hub.sent_of_large(), 0, "{names:?}");
    };
    refused(
        &|f| drop(f.insert("config.json".into(), br#"{"model_type": "llama"}"#.to_vec())),
        &["llama", "qwen3_moe"],
    );
    refused(&|f| drop(f.remove("config.json")), &["config.json", REPO]);
    refused(&|f| f.retain(|name, _| !name.contains("safetensors")), &["pytorch_model.bin", "safetensors"]);
    refused(
        &|f| {
            f.retain(|name, _| name == "README.md");
            f.insert("model-q4.gguf".into(), vec![0; 8]);
        },
        &["model-q4.gguf", "GGUF"],
    );
    refused(&|f| drop(f.remove(FIRST)), &[FIRST, "not there"]);
}

#[test]
fn a_hub_that_does_not_answer_or_is_none() {
    let hub = Hub::new(tiny());
    let machine = Machine::new(&hub);
    hub.close();
    machine.pull().fails(1, &["4 times", "connection", &hub.endpoint()]);

    let hub = Hub::new(tiny());
    let machine = Machine::new(&hub);
    let other = |endpoint: &str| {
        Running::start(machine.command(&["pull", REPO]).env("HF_ENDPOINT", endpoint)).finish()
    };
    other("no address").fails(1, &["HF_ENDPOINT"]);
    for bad in ["", "a", "a/b/c", "../b", "a/b@", "a b/c"] {
        let run = machine.run(&["pull", bad]);
        run.fails(2, &["ORG/NAME"]);
    }
    assert!(hub.log().is_empty());
}
