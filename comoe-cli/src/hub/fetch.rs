//! Brings files into the cache: several at a time, each from where it was left, checked when it is whole.

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::cache::ModelCache;
use super::client::{Client, RemoteFile};
use super::error::{Error, Result};
use super::progress::{FileProgress, Progress};
use super::retry::{Failure, Patience};

/// Files on their way at once.
const PARALLEL: usize = 8;
/// Requests in a row for one file that may bring nothing: about half a minute with the pauses between them.
const TRIES: u32 = 8;
/// Bytes read at a time.
const CHUNK: usize = 256 << 10;
/// How soon a pause notices that another file has failed.
const TICK: Duration = Duration::from_millis(50);

/// A download of one commit's files.
pub(super) struct Fetch<'a> {
    pub(super) client: &'a Client,
    pub(super) cache: &'a ModelCache,
    pub(super) commit: &'a str,
    pub(super) progress: &'a Progress,
    /// Read what is here already, and fetch it again where it is damaged.
    pub(super) check: bool,
}

/// How a file's growth ended.
enum Grown {
    Whole,
    /// All bytes are there, and their hash is this one instead.
    Differs(String),
    /// Another file has failed.
    Stopped,
}

impl Fetch<'_> {
    /// Brings all of `files`, the first ones first.
    ///
    /// # Errors
    /// The first that occurs; the other files stop where they are, to go on from there another time.
    pub(super) fn all(&self, files: &[RemoteFile]) -> Result<()> {
        let (next, stop, error) = (AtomicUsize::new(0), AtomicBool::new(false), Mutex::new(None));
        let work = || {
            while !stop.load(Ordering::Relaxed)
                && let Some(file) = files.get(next.fetch_add(1, Ordering::Relaxed))
            {
                if let Err(e) = self.one(file, &stop) {
                    stop.store(true, Ordering::Relaxed);
                    error.lock().unwrap_or_else(|e| e.into_inner()).get_or_insert(e);
                }
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..PARALLEL.min(files.len()) {
                scope.spawn(work);
            }
            work();
        });
        error.into_inner().unwrap_or_else(|e| e.into_inner()).map_or(Ok(()), Err)
    }

    /// Bytes of `files` that are not here yet.
    pub(super) fn lacking(&self, files: &[RemoteFile]) -> u64 {
        let lacking = |file: &RemoteFile| match length(&self.cache.blob(&file.content)) {
            Some(have) if have == file.size => 0,
            _ => file.size - length(&self.cache.part(&file.content)).unwrap_or(0).min(file.size),
        };
        files.iter().map(lacking).fold(0, u64::saturating_add)
    }

    fn one(&self, file: &RemoteFile, stop: &AtomicBool) -> Result<()> {
        let bar = self.progress.file(&file.path, file.size);
        let blob = self.cache.blob(&file.content);
        let _lock = self.cache.lock(&file.content, || {
            self.progress.say(&format!("note: {}: another download of it is under way; waiting", file.path));
        })?;
        if length(&blob) == Some(file.size) && self.is_sound(file, &blob) {
            bar.had(file.size);
        } else {
            if let Some(folder) = blob.parent() {
                fs::create_dir_all(folder).map_err(|e| Error::io(folder, e))?;
            }
            let part = self.cache.part(&file.content);
            let mut grown = self.grow(file, &part, &bar, stop)?;
            if let Grown::Differs(_) = grown {
                // What was left by an earlier download may have been broken: once more from the start.
                fs::remove_file(&part).map_err(|e| Error::io(&part, e))?;
                bar.restart();
                grown = self.grow(file, &part, &bar, stop)?;
            }
            match grown {
                Grown::Whole => fs::rename(&part, &blob).map_err(|e| Error::io(&blob, e))?,
                Grown::Stopped => return Ok(()),
                Grown::Differs(found) => {
                    fs::remove_file(&part).map_err(|e| Error::io(&part, e))?;
                    let (repo, path) = (self.client.name().to_string(), file.path.clone());
                    return Err(Error::Differs {
                        repo,
                        file: path,
                        expected: file.content.to_string(),
                        found,
                    });
                }
            }
        }
        self.cache.link(self.commit, &file.path, &file.content)?;
        Ok(())
    }

    /// Whether the content in `blob` is believed.
    fn is_sound(&self, file: &RemoteFile, blob: &Path) -> bool {
        if !self.check {
            return true;
        }
        let mut hasher = file.content.hasher(file.size);
        let read = File::open(blob).and_then(|mut open| hasher.update_from(&mut open));
        let sound = read.map(|()| hasher.check(&file.content).is_ok()).unwrap_or_else(|e| {
            self.progress.say(&format!("note: {}: {e}", file.path));
            false
        });
        if !sound {
            self.progress.say(&format!("note: {} is damaged; fetching it again", file.path));
        }
        sound
    }

    /// Fetches what `part` lacks of the file.
    fn grow(
        &self,
        file: &RemoteFile,
        part: &Path,
        bar: &FileProgress<'_>,
        stop: &AtomicBool,
    ) -> Result<Grown> {
        let broken = |e| Error::io(part, e);
        let opened = File::options().read(true).write(true).create(true).truncate(false).open(part);
        let mut out = opened.map_err(broken)?;
        let mut have = out.metadata().map_err(broken)?.len();
        if have > file.size {
            out.set_len(0).map_err(broken)?;
            have = 0;
        }
        let mut hasher = file.content.hasher(file.size);
        hasher.update_from(&mut out).map_err(broken)?;
        bar.had(have);
        let mut patience = Patience::new(TRIES);
        let mut chunk = vec![0; CHUNK];
        while have < file.size {
            let mut opened = match self.client.open(file, self.commit, have) {
                Ok(opened) => opened,
                Err(failure) => match pause(patience.pause(failure)?, stop) {
                    true => continue,
                    false => return Ok(Grown::Stopped),
                },
            };
            if opened.from > have {
                let reason = format!("bytes from {} on instead of {have}", opened.from);
                return Err(Error::BadAnswer { url: opened.url, reason });
            }
            if opened.from < have {
                // Parts are not given, or not as asked: all over again.
                hasher = file.content.hasher(file.size);
                bar.restart();
                have = opened.from;
                out.set_len(have).map_err(broken)?;
                out.seek(SeekFrom::Start(0)).map_err(broken)?;
                hasher.update_from(&mut out).map_err(broken)?;
                bar.had(have);
            }
            out.seek(SeekFrom::Start(have)).map_err(broken)?;
            let mut reader = opened.body.as_reader();
            let failure = loop {
                if stop.load(Ordering::Relaxed) {
                    return Ok(Grown::Stopped);
                }
                let most = chunk.len().min(usize::try_from(file.size - have).unwrap_or(usize::MAX));
                match reader.read(&mut chunk[..most]) {
                    Ok(0) if have == file.size => break None,
                    Ok(0) => break Some("the answer ended early".to_owned()),
                    Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                    Err(e) => break Some(e.to_string()),
                    Ok(n) => {
                        out.write_all(&chunk[..n]).map_err(broken)?;
                        hasher.update(&chunk[..n]);
                        have += n as u64;
                        bar.fetched(n as u64);
                        patience.progress();
                        if have == file.size {
                            break None;
                        }
                    }
                }
            };
            if let Some(reason) = failure {
                let failure = Failure::Again { url: opened.url, reason, after: None };
                if !pause(patience.pause(failure)?, stop) {
                    return Ok(Grown::Stopped);
                }
            }
        }
        // Under its final name the file is believed, also after a power cut.
        out.sync_data().map_err(broken)?;
        Ok(match hasher.check(&file.content) {
            Ok(()) => Grown::Whole,
            Err(found) => Grown::Differs(found),
        })
    }
}

fn length(path: &Path) -> Option<u64> {
    fs::metadata(path).ok().filter(fs::Metadata::is_file).map(|m| m.len())
}

/// Waits, unless another file fails meanwhile; whether to go on.
fn pause(wait: Duration, stop: &AtomicBool) -> bool {
    let until = Instant::now() + wait;
    while !stop.load(Ordering::Relaxed) {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return true;
        }
        std::thread::sleep(left.min(TICK));
    }
    false
}
