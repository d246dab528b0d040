//! Disks that fail under a running program: files that shrink, reads and writes that are refused. For each: one line that
//! names the file, the exit code, and what is left behind.

use std::fs::File;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::checkpoint::{Checkpoint, SECOND_SHARD, Sizes};
use crate::program::{Run, Running, comoe, model};

/// Has a system call fail in `command` with this error, where its third argument (a number of bytes) is at least `least`.
fn fails_with(command: &mut Command, call: libc::c_long, error: i32, least: u32) {
    let load = |offset: usize| libc::sock_filter { code: 0x20, jt: 0, jf: 0, k: offset as u32 };
    let jump = |code: u16, k: u32, jt: u8, jf: u8| libc::sock_filter { code, jt, jf, k };
    let answer = |k: u32| libc::sock_filter { code: 0x06, jt: 0, jf: 0, k };
    // Offsets in `struct seccomp_data`: the call's number, and the lower half of its third argument.
    let mut filter = [
        load(0),
        jump(0x15, call as u32, 0, 3),
        load(16 + 2 * 8),
        jump(0x35, least, 0, 1),
        answer(libc::SECCOMP_RET_ERRNO | error as u32),
        answer(libc::SECCOMP_RET_ALLOW),
    ];
    let install = move || {
        let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
        // SAFETY: plain system calls, as a child may make before it runs its program; `program` outlives them.
        let done = unsafe {
            libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
                && libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) == 0
        };
        if done { Ok(()) } else { Err(io::Error::last_os_error()) }
    };
    // SAFETY: the closure allocates nothing and takes no lock.
    unsafe { command.pre_exec(install) };
}

fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    let mut names: Vec<String> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// A checkpoint of 12 MB: no page cache holds back what a file has lost.
fn made() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    Checkpoint::new(Sizes { layers: 3, experts: 8, hidden: 256, intermediate: 256, context: 512 })
        .write(folder.path());
    let shard = folder.path().join(SECOND_SHARD);
    (folder, shard)
}

/// A chat that has answered once; then `harm` is done, and it is asked again.
fn asked_again(model: &Path, harm: impl FnOnce()) -> Run {
    let mut command = comoe();
    command.arg("chat").arg(model).args(["--temperature=0", "--max-tokens=8", "--slots=6", "--quiet"]);
    let mut running = Running::start(command.stdin(std::process::Stdio::piped()));
    running.write(b"hello\n");
    running.read_until(b'\n');
    harm();
    running.write(b"and what do you say to all of these other words?\n");
    running.finish()
}

#[test]
fn a_file_that_shrinks_in_use_is_named() {
    let (folder, shard) = made();
    let run = asked_again(folder.path(), || {
        File::options().write(true).open(&shard).unwrap().set_len(100).unwrap();
    });
    run.fails(1, &[shard.to_str().unwrap(), "it was shortened while it was open"]);
}

#[test]
fn a_file_that_is_replaced_in_use_goes_on_as_it_was() {
    let (folder, shard) = made();
    let calm = asked_again(folder.path(), || ());
    let run = asked_again(folder.path(), || {
        std::fs::remove_file(&shard).unwrap();
        std::fs::write(&shard, "nothing").unwrap();
    });
    assert_eq!(run.answer(), calm.answer());
}

#[test]
fn a_packed_file_that_shrinks_in_use_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("m.safetensors");
    let pack = Running::start(comoe().arg("pack").arg(model()).args(["--quiet", "-o"]).arg(&file)).finish();
    pack.answer();
    let run = asked_again(&file, || {
        File::options().write(true).open(&file).unwrap().set_len(100).unwrap();
    });
    run.fails(1, &[file.to_str().unwrap(), "it was shortened while it was open"]);
    // From the beginning, the header promises more than there is.
    Running::start(comoe().arg("verify").arg(&file)).finish().fails(1, &["m.safetensors", "truncated"]);
}

#[test]
fn a_full_disk_leaves_no_packed_file() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("m.safetensors");
    let pack = |error| {
        let mut command = comoe();
        command.arg("pack").arg(model()).args(["--format=int4", "--quiet", "-o"]).arg(&file);
        fails_with(&mut command, libc::SYS_pwrite64, error, 1);
        Running::start(&mut command).finish()
    };
    pack(libc::ENOSPC).fails(1, &["m.safetensors", "the disk is full", "make room"]);
    assert_eq!(names(folder.path()), [""; 0]);
    pack(libc::EDQUOT).fails(1, &["m.safetensors", "the disk is full"]);
    pack(libc::EIO).fails(1, &["m.safetensors", "os error 5"]);
    assert_eq!(names(folder.path()), [""; 0]);
}

#[test]
fn a_full_disk_leaves_no_converted_store() {
    let cache = tempfile::tempdir().unwrap();
    let mut command = comoe();
    command.env("COMOE_CACHE", cache.path());
    command.arg("generate").arg(model()).args(["--prompt=x", "--format=int8", "--quiet"]);
    fails_with(&mut command, libc::SYS_pwrite64, libc::ENOSPC, 1);
    Running::start(&mut command).finish().fails(1, &["experts-int8", "the disk is full"]);
    assert_eq!(names(cache.path()), [""; 0]);
}

#[test]
fn a_full_disk_is_said_by_everything_that_writes() {
    let folder = tempfile::tempdir().unwrap();
    let prompts = folder.path().join("prompts");
    std::fs::write(&prompts, "hello\n").unwrap();
    let mut record = comoe();
    record.args(["trace", "record"]).arg(model()).args([
        "--max-tokens=2",
        "--quiet",
        "-o",
        "/dev/full",
        "--prompts",
    ]);
    // What is written has another name first, and a device is never replaced.
    Running::start(record.arg(&prompts)).finish().fails(1, &["/dev/full", "is no regular file"]);
    let logits = |file: &Path, full: bool| {
        let mut command = comoe();
        command.arg("logits").arg(model()).args(["--tokens=1,2", "--quiet", "-o"]).arg(file);
        if full {
            fails_with(&mut command, libc::SYS_write, libc::ENOSPC, 1000);
        }
        Running::start(&mut command).finish()
    };
    let file = folder.path().join("logits.safetensors");
    logits(&file, true).fails(1, &["logits.safetensors", "os error 28"]);
    assert!(!file.exists());
    logits(&folder.path().join("."), false).fails(1, &["is no regular file"]);
    let full = File::options().write(true).open("/dev/full").unwrap();
    let mut command = comoe();
    command.arg("generate").arg(model()).args(["--prompt=hello", "--max-tokens=2", "--quiet"]).stdout(full);
    Running::start(&mut command).finish().fails(1, &["standard output", "os error 28"]);
}
