//! Every way a model cannot be had by its name.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use comoe_core::stats::human_bytes;

pub(crate) type Result<T> = std::result::Result<T, Error>;

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("{text:?} is no model's name: {reason}; write ORG/NAME or ORG/NAME@REVISION")]
    BadName { text: String, reason: &'static str },

    #[error("no folder for downloads: neither HF_HOME nor HOME is set; set HF_HOME to a folder of yours")]
    NoCacheFolder,

    #[error(
        "{repo} was not found at {endpoint}: check its spelling (a folder of that name is not here either); if it is \
         private, set HF_TOKEN to a token that may read it"
    )]
    NotFound { repo: String, endpoint: String },

    #[error("{repo} has no revision {revision:?}: give a branch, a tag or a commit of it")]
    NoRevision { repo: String, revision: String },

    #[error(
        "{repo} is gated: accept its terms at {endpoint}/{repo}, then {}",
        if *with_token { "check that the token's owner was granted access (the request may be pending)" }
        else { "set HF_TOKEN to a token of that account" }
    )]
    Gated { repo: String, endpoint: String, with_token: bool },

    #[error(
        "{repo}: access was refused ({status}): {}",
        if *with_token { "the token is not valid, or may not read it: set HF_TOKEN to one that may" }
        else { "the repository does not exist, or it is private: check its spelling, or set HF_TOKEN" }
    )]
    Refused { repo: String, status: u16, with_token: bool },

    #[error("{url}: the hub asks for a pause of {} s, too long to wait: run the same command again later", wait.as_secs())]
    RateLimited { url: String, wait: Duration },

    #[error("{url}: HTTP status {status}; run the same command again later, what is here already is kept")]
    Status { url: String, status: u16 },

    #[error(
        "{url}: {reason}, {tries} times in a row; check the connection, then run the same command again: what is here \
         already is kept"
    )]
    Network { url: String, reason: String, tries: u32 },

    #[error("{url}: the answer is not what a hub gives: {reason}; check HF_ENDPOINT")]
    BadAnswer { url: String, reason: String },

    #[error(
        "{repo}: HF_HUB_OFFLINE is set and {missing} in {}: unset it, or pull the model first",
        cache.display()
    )]
    Offline { repo: String, missing: String, cache: PathBuf },

    #[error("{repo}: {} to fetch and {} free in {}: make room, or set HF_HOME to a folder on another disk",
        human_bytes(*needed), human_bytes(*free), folder.display())]
    NoSpace { repo: String, needed: u64, free: u64, folder: PathBuf },

    #[error("{repo} holds no model for CoMoE: {reason}")]
    NoModel { repo: String, reason: String },

    #[error(
        "{file} of {repo} came with another content than the hub announces ({found} instead of {expected}), twice: a \
         proxy or a mirror changes it, or the disk is faulty"
    )]
    Differs { repo: String, file: String, expected: String, found: String },

    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
}

impl Error {
    pub(super) fn io(path: impl Into<PathBuf>, source: io::Error) -> Self {
        Self::Io { path: path.into(), source }
    }
}
