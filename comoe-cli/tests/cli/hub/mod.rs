//! `comoe pull` and models by name, against a hub on this machine.

mod bad_days;
mod server;

use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use self::server::{COMMIT, Fault, Files, Hub, REPO, repository};
use crate::program::{Run, Running, comoe, run_with};

/// comoe-tiny in three shards.
fn tiny() -> Files {
    let assets = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("assets");
    repository(&assets.join("comoe-tiny"), 3)
}

/// A machine that knows `hub`, with an empty cache.
struct Machine {
    home: TempDir,
    endpoint: String,
}

impl Machine {
    fn new(hub: &Hub) -> Self {
        Self { home: tempfile::tempdir().unwrap(), endpoint: hub.endpoint() }
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = comoe();
        command.args(args).env("HF_HOME", self.home.path()).env("HF_ENDPOINT", &self.endpoint);
        for other in ["HF_TOKEN", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN_PATH"] {
            command.env_remove(other);
        }
        command
    }

    fn run(&self, args: &[&str]) -> Run {
        Running::start(&mut self.command(args)).finish()
    }

    fn pull(&self) -> Run {
        self.run(&["pull", REPO])
    }

    /// The model's folder in the cache.
    fn model(&self) -> PathBuf {
        self.home.path().join("hub").join(format!("models--{}", REPO.replace('/', "--")))
    }

    /// Bytes of contents on the disk.
    fn arrived(&self) -> u64 {
        let blobs = std::fs::read_dir(self.model().join("blobs")).into_iter().flatten();
        blobs.map(|e| e.unwrap().metadata().map_or(0, |m| m.len())).sum()
    }

    fn snapshot(&self) -> PathBuf {
        self.model().join("snapshots").join(COMMIT)
    }

    /// Sees that everything that was pulled is what the hub has.
    #[track_caller]
    fn has_whole(&self, files: &Files) {
        for (name, bytes) in files.iter().filter(|(name, _)| NEEDED.contains(&name.as_str())) {
            assert!(std::fs::read(self.snapshot().join(name)).unwrap() == *bytes, "{name}");
        }
        let left = std::fs::read_dir(self.model().join("blobs")).unwrap();
        let left: Vec<_> = left.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        assert!(!left.iter().any(|name| name.contains("incomplete")), "{left:?}");
        assert_eq!(left.len(), NEEDED.len());
    }
}

/// What a model needs of comoe-tiny's repository.
const NEEDED: &[&str] = &[
    "config.json",
    "generation_config.json",
    "model-00001-of-00003.safetensors",
    "model-00002-of-00003.safetensors",
    "model-00003-of-00003.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
];

fn weights(files: &Files) -> u64 {
    let shards = files.iter().filter(|(name, _)| name.starts_with("model-"));
    shards.map(|(_, bytes)| bytes.len() as u64).sum()
}

#[test]
fn a_model_is_pulled_once_talks_and_then_needs_nobody() {
    let files = tiny();
    let hub = Hub::new(files.clone());
    let machine = Machine::new(&hub);
    let pulled = machine.pull();
    assert_eq!(pulled.answer().trim_end(), machine.snapshot().to_str().unwrap());
    machine.has_whole(&files);
    let mut fetched = hub.fetched();
    fetched.sort();
    assert_eq!(fetched, NEEDED, "each needed file once, and no other");
    assert_eq!(hub.sent_of_large(), weights(&files));
    assert!(pulled.stderr.contains(REPO) && pulled.stderr.contains("8 files"), "{}", pulled.stderr);

    let chat = |extra: &[&str]| {
        let mut command = machine.command(&["chat", REPO, "--temperature=0", "--device=cpu"]);
        run_with(command.args(extra), b"What is 17 plus 25?\n")
    };
    let asked = hub.log().len();
    let online = chat(&[]);
    assert!(online.answer().contains("42"), "{online:?}");
    assert!(online.stderr.contains(&format!("{REPO} on ")), "its name is said: {}", online.stderr);
    assert_eq!(hub.log().len(), asked, "what is here is used without asking");

    // Nothing new: one request for the list.
    let again = machine.pull();
    assert!(again.stderr.contains("here already"), "{}", again.stderr);
    assert_eq!(hub.log().len(), asked + 1);

    hub.close();
    drop(hub);
    let offline = {
        let mut command = machine.command(&["chat", REPO, "--temperature=0", "--device=cpu"]);
        run_with(command.env("HF_HUB_OFFLINE", "1"), b"What is 17 plus 25?\n")
    };
    assert_eq!(offline.answer(), online.answer());
    assert_eq!(chat(&["--quiet"]).answer(), online.answer(), "without being told that there is no network");
    let mut command = machine.command(&["pull", REPO, "--quiet"]);
    let kept = Running::start(command.env("HF_HUB_OFFLINE", "1")).finish();
    assert_eq!(kept.answer(), pulled.answer());
}

#[test]
fn a_name_alone_is_enough() {
    let files = tiny();
    let hub = Hub::new(files.clone());
    let machine = Machine::new(&hub);
    let name = format!("{REPO}@{COMMIT}");
    let args = ["generate", &name, "--prompt", "What is 17 plus 25?", "--temperature=0", "--device=cpu"];
    let answered = machine.run(&args);
    assert!(answered.answer().contains("42"), "{answered:?}");
    assert!(answered.stderr.contains("pulling"), "{}", answered.stderr);
    machine.has_whole(&files);
    hub.close();
    assert_eq!(machine.run(&args).answer(), answered.answer(), "a commit is found without a ref");
}

/// Of a model that is not here, a plan needs the configuration and headers, and leaves nothing behind.
#[test]
fn a_plan_fetches_headers_alone() {
    let files = tiny();
    let hub = Hub::new(files.clone());
    let machine = Machine::new(&hub);
    let temporary = tempfile::tempdir().unwrap();
    let plan = |name: &str, more: &[&str]| {
        let mut command = machine.command(&["plan", name, "--vram", "40M", "--device", "cpu", "--json"]);
        Running::start(command.args(more).env("TMPDIR", temporary.path())).finish()
    };
    let here = format!("{}/../assets/comoe-tiny", env!("CARGO_MANIFEST_DIR"));
    let same = |run: &Run, more: &[&str]| {
        let (of_hub, own) = (run.json(), plan(&here, more).json());
        assert_eq!(of_hub["model"], REPO);
        for part in ["memory", "experts", "kv", "needs", "format"] {
            assert_eq!(of_hub[part], own[part], "{part}");
        }
    };
    let first = plan(REPO, &[]);
    same(&first, &[]);
    assert!(first.stderr.contains("of headers fetched, of 3 files"), "{}", first.stderr);
    let sent = hub.sent_of_large();
    assert!(sent < weights(&files) / 10, "{sent} of {} bytes", weights(&files));
    assert_eq!(std::fs::read_dir(temporary.path()).unwrap().count(), 0, "nothing is left");
    assert!(!machine.model().join("refs").exists(), "no name stands for what is not whole");
    let more = ["--format", "int4", "--ctx", "256"];
    same(&plan(REPO, &more), &more);

    // A server without parts, one that breaks off, and a header that is none.
    hub.fault("/cdn/model-00002", Fault::NoRanges);
    hub.fault("/cdn/model-00003", Fault::Cut(100));
    same(&plan(REPO, &[]), &[]);
    hub.fault("/cdn/model-00001", Fault::Garbled);
    plan(REPO, &["--quiet"]).fails(1, &["model-00001-of-00003.safetensors", "no safetensors file"]);

    let offline = {
        let mut command = machine.command(&["plan", REPO, "--vram", "40M"]);
        Running::start(command.env("HF_HUB_OFFLINE", "1")).finish()
    };
    offline.fails(1, &["HF_HUB_OFFLINE", REPO]);
    // A model that is here is planned without asking anybody.
    machine.pull().answer();
    hub.close();
    same(&plan(REPO, &[]), &[]);
}

#[test]
fn a_download_killed_at_half_goes_on_where_it_was() {
    let files = tiny();
    let whole = weights(&files);
    let hub = Hub::new(files.clone());
    let machine = Machine::new(&hub);
    // A network that is slower than the machine, however busy that is: a quarter of a megabyte is on its way.
    hub.hold_at(1 << 18);
    let mut first = Running::start(&mut machine.command(&["pull", REPO]));
    while machine.arrived() < whole / 2 {
        hub.hold_at(machine.arrived() + (1 << 18));
        assert!(first.child.try_wait().unwrap().is_none(), "it ends before half is there");
    }
    first.child.kill().unwrap();
    assert!(!first.finish().status.success());
    hub.hold_at(u64::MAX);
    let offline = Running::start(machine.command(&["pull", REPO]).env("HF_HUB_OFFLINE", "1")).finish();
    offline.fails(1, &["HF_HUB_OFFLINE", REPO]);

    let second = machine.pull();
    assert!(second.status.success(), "{second:?}");
    machine.has_whole(&files);
    let twice = hub.sent_of_large() - whole;
    println!("{twice} of {whole} bytes were fetched twice ({:.2} %)", 100.0 * twice as f64 / whole as f64);
    assert!(twice * 10 < whole, "{twice} of {whole} bytes were fetched twice");
}

#[test]
fn two_pulls_at_once_fetch_once() {
    let files = tiny();
    let hub = Hub::new(files.clone());
    let machine = Machine::new(&hub);
    hub.hold_at(weights(&files) / 4);
    let one = Running::start(&mut machine.command(&["pull", REPO]));
    hub.wait_for(weights(&files) / 4);
    let two = Running::start(&mut machine.command(&["pull", REPO]));
    std::thread::sleep(std::time::Duration::from_millis(300));
    hub.hold_at(u64::MAX);
    let (one, two) = (one.finish(), two.finish());
    assert_eq!(one.answer(), two.answer());
    machine.has_whole(&files);
    assert_eq!(hub.sent_of_large(), weights(&files));
}

#[test]
fn a_newer_commit_replaces_the_name_and_not_the_files() {
    let files = tiny();
    let hub = Hub::new(files.clone());
    let machine = Machine::new(&hub);
    machine.pull().answer();
    // As if pulled before the newest commit: the ref leads elsewhere, the contents are the same.
    let old = "1".repeat(40);
    std::fs::rename(machine.snapshot(), machine.model().join("snapshots").join(&old)).unwrap();
    std::fs::write(machine.model().join("refs/main"), &old).unwrap();
    let sent = hub.sent_of_large();
    machine.pull().answer();
    machine.has_whole(&files);
    assert_eq!(hub.sent_of_large(), sent);
    assert_eq!(std::fs::read_to_string(machine.model().join("refs/main")).unwrap(), COMMIT);
}
