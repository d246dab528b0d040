//! `comoe chat` at a terminal: a pseudo-terminal plays the person.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Stdio};

use crate::checkpoint::{Checkpoint, Sizes};
use crate::program::comoe;

struct Person {
    terminal: File,
    child: Child,
    seen: String,
}

impl Person {
    fn sits_down(args: &[&str], home: &std::path::Path) -> Self {
        let (mut master, mut slave) = (-1, -1);
        let (name, mode, size) = (std::ptr::null_mut(), std::ptr::null(), std::ptr::null());
        // SAFETY: both out pointers are valid; the optional ones are null, as the function allows.
        assert_eq!(unsafe { libc::openpty(&mut master, &mut slave, name, mode, size) }, 0);
        // SAFETY: openpty gave two descriptors that are open and nobody else's.
        let (master, slave) = unsafe { (File::from_raw_fd(master), OwnedFd::from_raw_fd(slave)) };
        let mut command = comoe();
        command.arg("chat").args(args).env("COMOE_CACHE", home).env("TERM", "xterm");
        let again = || Stdio::from(slave.try_clone().unwrap());
        command.stdin(again()).stdout(again()).stderr(again());
        // SAFETY: between fork and exec only two system calls are made, both async-signal-safe.
        unsafe {
            command.pre_exec(|| {
                if libc::setsid() < 0 || libc::ioctl(0, libc::TIOCSCTTY, 0) < 0 {
                    return Err(std::io::Error::last_os_error());
                }
                Ok(())
            })
        };
        let child = command.spawn().unwrap();
        // The command keeps copies of the slave: with them open the end would never be seen.
        drop(command);
        Self { terminal: master, child, seen: String::new() }
    }

    fn types(&mut self, text: &str) {
        self.terminal.write_all(text.as_bytes()).unwrap();
    }

    /// Reads until `text` appears and forgets everything up to it.
    #[track_caller]
    fn sees(&mut self, text: &str) {
        let mut buffer = [0; 4096];
        loop {
            if let Some(at) = self.seen.find(text) {
                self.seen.drain(..at + text.len());
                return;
            }
            match self.terminal.read(&mut buffer) {
                Ok(n) if n > 0 => self.seen.push_str(&String::from_utf8_lossy(&buffer[..n])),
                end => panic!("no {text:?} in {:?} ({end:?})", self.seen),
            }
        }
    }
}

#[test]
fn thoughts_are_faint_on_a_terminal_or_a_sign_of_life() {
    let thinker = crate::chat::thinker();
    let home = tempfile::tempdir().unwrap();
    let model = thinker.path().display().to_string();
    let mut person = Person::sits_down(&[&model, "--temperature=0", "--max-tokens=12"], home.path());
    person.sees("> ");
    person.types("hello\r");
    person.sees("\x1b[2m");
    person.sees("\x1b[22m");
    person.sees("> ");
    person.types("\x04");
    assert!(person.child.wait().unwrap().success());
    let hide = [&model, "--temperature=0", "--max-tokens=400", "--think=hide"];
    let mut person = Person::sits_down(&hide, home.path());
    person.sees("> ");
    person.types("hello\r");
    person.sees("thinking");
    person.sees("> ");
    assert!(!person.seen.contains("\x1b[2m"));
    person.types("\x04");
    assert!(person.child.wait().unwrap().success());
}

/// Asked to end from outside while it waits for a person, it ends as if the person had left.
#[test]
fn a_signal_that_ends_the_program_finds_it_at_the_prompt() {
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("t.trace");
    let model = crate::program::model().display().to_string();
    let trace = file.display().to_string();
    let args = [&model, "--temperature=0", "--max-tokens=12", "--trace", &trace];
    let mut person = Person::sits_down(&args, home.path());
    person.sees("> ");
    person.types("hello\r");
    person.sees("cut at 12");
    person.sees("> ");
    // The prompt is there a little before the line editor waits, and what comes in between waits with it.
    std::thread::sleep(std::time::Duration::from_secs(1));
    // SAFETY: a signal to a child of ours that was not waited for yet, so its id is still its own.
    assert_eq!(unsafe { libc::kill(person.child.id() as libc::pid_t, libc::SIGTERM) }, 0);
    person.sees("written to");
    assert_eq!(person.child.wait().unwrap().signal(), Some(libc::SIGTERM));
    assert_eq!(crate::interrupted::shown(&file)["turns"], 1);
}

#[test]
fn a_person_talks_stops_an_answer_and_leaves() {
    let folder = tempfile::tempdir().unwrap();
    Checkpoint::new(Sizes { context: 65536, ..Sizes::default() }).write(folder.path());
    let home = tempfile::tempdir().unwrap();
    let model = folder.path().display().to_string();
    let args = [model.as_str(), "--temperature=0", "--context=65536", "--max-tokens=60000"];

    let mut person = Person::sits_down(&args, home.path());
    person.sees("/help lists the commands");
    person.sees("> ");
    person.types("/help\r");
    person.sees("/reset");
    person.sees("> ");
    person.types("hello\r");
    // Twenty letters in a row are the answer, not an echo of what was typed.
    let letters = |s: &str| s.split(|c: char| !c.is_ascii_lowercase()).any(|w| w.len() >= 20);
    let mut buffer = [0; 4096];
    while !letters(&person.seen) {
        let n = person.terminal.read(&mut buffer).unwrap();
        person.seen.push_str(&String::from_utf8_lossy(&buffer[..n]));
    }
    person.types("\x03");
    person.sees("the answer was stopped");
    person.sees("> ");
    person.types("\x03");
    person.sees("Ctrl-C once more");
    person.sees("> ");
    person.types("/stats\r");
    person.sees("hits");
    person.sees("> ");
    person.types("\x04");
    assert!(person.child.wait().unwrap().success());

    // What was typed is there the next time: the last line with one key.
    let mut person = Person::sits_down(&args, home.path());
    person.sees("> ");
    person.types("\x1b[A");
    person.sees("/stats");
    person.types("\r");
    person.sees("% of 0 accesses");
    person.sees("> ");
    person.types("\x03");
    person.sees("Ctrl-C once more");
    person.sees("> ");
    person.types("\x03");
    assert!(person.child.wait().unwrap().success());
}
