//! Runs the program as a person or a script would.

use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::LazyLock;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::checkpoint::{Checkpoint, Sizes};

/// A program that takes longer than this hangs.
const HANGS: Duration = Duration::from_secs(120);

/// An undamaged model of default sizes, made once for all tests.
pub(crate) fn model() -> &'static Path {
    static MODEL: LazyLock<TempDir> = LazyLock::new(|| {
        let folder = tempfile::tempdir().unwrap();
        Checkpoint::new(Sizes::default()).write(folder.path());
        folder
    });
    MODEL.path()
}

/// The program with nothing of the caller's environment that it reads.
pub(crate) fn comoe() -> Command {
    static CACHE: LazyLock<TempDir> = LazyLock::new(|| tempfile::tempdir().unwrap());
    let mut command = Command::new(env!("CARGO_BIN_EXE_comoe"));
    command.env("COMOE_CACHE", CACHE.path()).env_remove("COMOE_LOG");
    // No test asks a hub, unless it has one of its own.
    command.env("HF_HUB_OFFLINE", "1");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// What a finished program left.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) status: ExitStatus,
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: String,
}

impl Run {
    /// The answer of a run that went well.
    #[track_caller]
    pub(crate) fn answer(&self) -> &str {
        assert!(self.status.success(), "{self:?}");
        std::str::from_utf8(&self.stdout).unwrap()
    }

    /// The one object that `--json` prints.
    #[track_caller]
    pub(crate) fn json(&self) -> serde_json::Value {
        let text = self.answer();
        assert_eq!(text.matches('\n').count(), 1, "{text}");
        serde_json::from_str(text).unwrap()
    }

    /// Sees that the program failed as it should: one line that names what is wrong, no panic.
    #[track_caller]
    pub(crate) fn fails(&self, code: i32, names: &[&str]) {
        assert_eq!(self.status.code(), Some(code), "{self:?}");
        let line = self.stderr.strip_suffix('\n').unwrap_or(&self.stderr);
        assert!(line.starts_with("comoe: ") && !line.contains('\n'), "not one line: {}", self.stderr);
        assert!(!line.contains("panicked"), "{line}");
        for name in names {
            assert!(line.contains(name), "{name:?} is not in: {line}");
        }
    }
}

/// Runs to the end, with `stdin`.
pub(crate) fn run_with(command: &mut Command, stdin: &[u8]) -> Run {
    let mut child = Running::start(command.stdin(Stdio::piped()));
    child.write(stdin);
    child.finish()
}

/// Runs to the end.
pub(crate) fn run<'a>(args: impl IntoIterator<Item = &'a str>) -> Run {
    Running::start(comoe().args(args)).finish()
}

/// `generate` on `model`.
pub(crate) fn generate(model: &Path, args: &[&str]) -> Run {
    Running::start(comoe().arg("generate").arg(model).args(args)).finish()
}

/// A program that runs. Standard error is read in a thread, so that it never fills up.
pub(crate) struct Running {
    pub(crate) child: Child,
    stderr: Option<JoinHandle<String>>,
}

impl Running {
    pub(crate) fn start(command: &mut Command) -> Self {
        let mut child = command.spawn().unwrap();
        let mut pipe = child.stderr.take();
        let stderr = std::thread::spawn(move || {
            let mut text = String::new();
            if let Some(pipe) = &mut pipe {
                pipe.read_to_string(&mut text).unwrap();
            }
            text
        });
        Self { child, stderr: Some(stderr) }
    }

    /// Writes to its standard input; a program that ended already need not read it.
    pub(crate) fn write(&mut self, bytes: &[u8]) {
        let _ = self.child.stdin.as_mut().unwrap().write_all(bytes);
    }

    /// Reads standard output up to and with `end`.
    pub(crate) fn read_until(&mut self, end: u8) -> Vec<u8> {
        let mut read = Vec::new();
        let mut byte = [0];
        while read.last() != Some(&end) {
            match self.child.stdout.as_mut().unwrap().read(&mut byte).unwrap() {
                0 => panic!("the program ended after {:?}", String::from_utf8_lossy(&read)),
                _ => read.push(byte[0]),
            }
        }
        read
    }

    /// Reads one byte of standard output: the answer has begun.
    pub(crate) fn read_byte(&mut self) -> u8 {
        let mut byte = [0];
        self.child.stdout.as_mut().unwrap().read_exact(&mut byte).unwrap();
        byte[0]
    }

    /// Sends it a signal.
    #[cfg(unix)]
    pub(crate) fn signal(&self, signal: libc::c_int) {
        // SAFETY: a signal to a child of ours that was not waited for yet, so its id is still its own.
        assert_eq!(unsafe { libc::kill(self.child.id() as libc::pid_t, signal) }, 0);
    }

    /// Closes standard input and waits for the end.
    pub(crate) fn finish(mut self) -> Run {
        drop(self.child.stdin.take());
        let stdout = self.child.stdout.take().map(|mut pipe| {
            std::thread::spawn(move || {
                let mut bytes = Vec::new();
                pipe.read_to_end(&mut bytes).unwrap();
                bytes
            })
        });
        let started = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            if started.elapsed() > HANGS {
                self.child.kill().unwrap();
                panic!("the program hangs");
            }
            std::thread::sleep(Duration::from_millis(2));
        };
        Run {
            status,
            stdout: stdout.map(|t| t.join().unwrap()).unwrap_or_default(),
            stderr: self.stderr.take().unwrap().join().unwrap(),
        }
    }
}

/// The folder of what comes with the sources.
pub(crate) fn assets() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../assets")
}

/// `comoe COMMAND comoe-tiny ARGS`, words apart.
pub(crate) fn tiny(command: &str, args: &str) -> Run {
    let mut program = comoe();
    program.arg(command).arg(assets().join("comoe-tiny"));
    Running::start(program.args(args.split_whitespace())).finish()
}
