//! Requests to the hub: what a repository holds, and the bytes of its files.

use std::io::Read;
use std::ops::Range;
use std::time::Duration;

use hf_hub::api::sync::ApiBuilder;
use hf_hub::{Cache, Repo, RepoType};
use serde::Deserialize;
use ureq::config::RedirectAuthHeaders;
use ureq::http::{HeaderMap, Response, StatusCode};
use ureq::{Agent, Body};

use super::content::ContentId;
use super::error::{Error, Result};
use super::name::{RepoName, is_commit};
use super::retry::{Failure, Patience};
use crate::places::HubPlaces;

/// Longest silence of a server, in the middle of an answer or before it.
const SILENCE: Duration = Duration::from_secs(30);
const CONNECT: Duration = Duration::from_secs(15);
/// Requests in a row that may fail before a list of files is given up: a person waits.
const LIST_TRIES: u32 = 4;
/// A list of files longer than this is none.
const MAX_LIST: u64 = 64 << 20;

/// One file of a repository.
#[derive(Debug, Clone)]
pub(super) struct RemoteFile {
    /// Path in the repository.
    pub(super) path: String,
    pub(super) size: u64,
    pub(super) content: ContentId,
}

/// A file as the list has it: mirrors leave size and content out.
#[derive(Debug, Clone)]
pub(super) struct Listed {
    pub(super) path: String,
    size: Option<u64>,
    content: Option<ContentId>,
}

/// What a repository holds at a commit.
#[derive(Debug)]
pub(super) struct Listing {
    pub(super) commit: String,
    pub(super) files: Vec<Listed>,
}

#[derive(Deserialize)]
struct Info {
    sha: String,
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
    #[serde(rename = "blobId")]
    blob_id: Option<String>,
    lfs: Option<Lfs>,
}

#[derive(Deserialize)]
struct Lfs {
    sha256: Option<String>,
    size: Option<u64>,
}

/// Speaks to the hub about one repository.
#[derive(Debug)]
pub(super) struct Client {
    agent: Agent,
    name: RepoName,
    endpoint: String,
    token: Option<String>,
}

impl Client {
    pub(super) fn new(places: &HubPlaces, name: RepoName) -> Result<Self> {
        let endpoint = match &places.endpoint {
            Some(endpoint) => endpoint.trim_end_matches('/').to_owned(),
            None => default_endpoint(places)?,
        };
        let agent = Agent::config_builder()
            .user_agent(concat!("comoe/", env!("CARGO_PKG_VERSION")))
            .http_status_as_error(false)
            // The hub sends large files from other hosts, which are not told the token.
            .redirect_auth_headers(RedirectAuthHeaders::SameHost)
            .timeout_connect(Some(CONNECT))
            .timeout_recv_response(Some(SILENCE))
            .timeout_per_read(Some(SILENCE))
            .build();
        Ok(Self { agent: agent.into(), name, endpoint, token: places.token.clone() })
    }

    /// The repository.
    pub(super) fn name(&self) -> &RepoName {
        &self.name
    }

    /// What the repository holds at the revision.
    pub(super) fn list(&self) -> Result<Listing> {
        let repo = Repo::with_revision(self.name.id.clone(), RepoType::Model, self.name.revision.clone());
        let url = format!("{}/api/{}?blobs=true", self.endpoint, repo.api_url());
        let text = self.patiently(|| {
            let mut answer = self.get(&url, None)?;
            let body = answer.body_mut().with_config().limit(MAX_LIST).read_to_string();
            body.map_err(|e| failed(&url, e))
        })?;
        let bad = |reason: String| Error::BadAnswer { url: url.clone(), reason };
        let info: Info = serde_json::from_str(&text).map_err(|e| bad(e.to_string()))?;
        if !is_commit(&info.sha) {
            return Err(bad(format!("{:?} is no commit", info.sha)));
        }
        let files = info.siblings.into_iter().map(|s| {
            let large = s.lfs.as_ref().and_then(|lfs| lfs.sha256.clone());
            Listed {
                size: s.lfs.and_then(|lfs| lfs.size).or(s.size),
                content: large.or(s.blob_id).and_then(|id| ContentId::from_etag(&id)),
                path: s.rfilename,
            }
        });
        Ok(Listing { commit: info.sha, files: files.collect() })
    }

    /// A listed file with its size and content, which are asked for where the list has neither.
    pub(super) fn complete(&self, listed: &Listed, commit: &str) -> Result<RemoteFile> {
        let path = listed.path.clone();
        if let (Some(size), Some(content)) = (listed.size, listed.content.clone()) {
            return Ok(RemoteFile { path, size, content });
        }
        let url = self.url(&path, commit);
        // The hub describes a large file on its own answer, before the redirection.
        let answer = self.patiently(|| {
            let request = self.authorized(self.agent.head(&url)).config().max_redirects(0);
            let answer =
                request.max_redirects_will_error(false).build().call().map_err(|e| failed(&url, e))?;
            if answer.status().is_redirection() { Ok(answer) } else { self.judged(&url, answer) }
        })?;
        let header = |name: &str| answer.headers().get(name).and_then(|v| v.to_str().ok());
        let size = header("x-linked-size").or_else(|| header("content-length")).and_then(|v| v.parse().ok());
        let content = header("x-linked-etag").or_else(|| header("etag")).and_then(ContentId::from_etag);
        match (size, content) {
            (Some(size), Some(content)) => Ok(RemoteFile { path, size, content }),
            _ => Err(Error::BadAnswer { url, reason: "size or ETag of the file is missing".into() }),
        }
    }

    /// The bytes of a file from `from` on.
    pub(super) fn open(
        &self,
        file: &RemoteFile,
        commit: &str,
        from: u64,
    ) -> std::result::Result<Opened, Failure> {
        let url = self.url(&file.path, commit);
        let answer = self.get(&url, Some(format!("bytes={from}-")))?;
        let from = match answer.status() {
            StatusCode::PARTIAL_CONTENT => range_start(answer.headers()).ok_or_else(|| Error::BadAnswer {
                url: url.clone(),
                reason: "a part of the file without Content-Range".into(),
            })?,
            // The server does not give parts: this is the whole file.
            _ => 0,
        };
        Ok(Opened { from, body: answer.into_body(), url })
    }

    /// The bytes of a file in `range`, which lies in it.
    pub(super) fn part(&self, file: &RemoteFile, commit: &str, range: Range<u64>) -> Result<Vec<u8>> {
        if range.is_empty() {
            return Ok(Vec::new());
        }
        let url = self.url(&file.path, commit);
        let length = range.end - range.start;
        self.patiently(|| {
            let answer = self.get(&url, Some(format!("bytes={}-{}", range.start, range.end - 1)))?;
            let whole = answer.status() != StatusCode::PARTIAL_CONTENT;
            if !whole && range_start(answer.headers()) != Some(range.start) {
                let reason = format!("another part of the file than from byte {} on", range.start);
                return Err(Error::BadAnswer { url: url.clone(), reason }.into());
            }
            let again = |reason: String| Failure::Again { url: url.clone(), reason, after: None };
            let mut body = answer.into_body();
            let mut reader = body.as_reader();
            if whole {
                // The server does not give parts: what comes before is passed over.
                std::io::copy(&mut reader.by_ref().take(range.start), &mut std::io::sink())
                    .map_err(|e| again(e.to_string()))?;
            }
            let mut bytes = Vec::new();
            reader.take(length).read_to_end(&mut bytes).map_err(|e| again(e.to_string()))?;
            match bytes.len() as u64 == length {
                true => Ok(bytes),
                false => Err(again("the answer ended early".to_owned())),
            }
        })
    }

    fn url(&self, path: &str, commit: &str) -> String {
        format!("{}/{}/resolve/{commit}/{path}", self.endpoint, self.name.id)
    }

    fn authorized<B>(&self, request: ureq::RequestBuilder<B>) -> ureq::RequestBuilder<B> {
        match &self.token {
            Some(token) => request.header("authorization", format!("Bearer {token}")),
            None => request,
        }
    }

    fn get(&self, url: &str, range: Option<String>) -> std::result::Result<Response<Body>, Failure> {
        let mut request = self.authorized(self.agent.get(url));
        if let Some(range) = range {
            // Ranges count the bytes as stored: no compression on the way.
            request = request.header("range", range).header("accept-encoding", "identity");
        }
        self.judged(url, request.call().map_err(|e| failed(url, e))?)
    }

    /// What a status means.
    fn judged(&self, url: &str, answer: Response<Body>) -> std::result::Result<Response<Body>, Failure> {
        let status = answer.status();
        if status.is_success() {
            return Ok(answer);
        }
        let header = |name: &str| answer.headers().get(name).and_then(|v| v.to_str().ok());
        let (repo, endpoint) = (self.name.id.clone(), self.endpoint.clone());
        let (with_token, code) = (self.token.is_some(), status.as_u16());
        Err(Failure::Final(match (code, header("x-error-code")) {
            (401 | 403, Some("GatedRepo")) => Error::Gated { repo, endpoint, with_token },
            (_, Some("RevisionNotFound")) => Error::NoRevision { repo, revision: self.name.revision.clone() },
            (404, _) => Error::NotFound { repo, endpoint },
            (401 | 403, _) => Error::Refused { repo, status: code, with_token },
            (408 | 425 | 429 | 500..=599, _) => {
                let after =
                    header("retry-after").and_then(|v| v.trim().parse().ok()).map(Duration::from_secs);
                return Err(Failure::Again {
                    url: url.to_owned(),
                    reason: format!("HTTP status {status}"),
                    after,
                });
            }
            _ => Error::Status { url: url.to_owned(), status: code },
        }))
    }

    fn patiently<T>(&self, mut request: impl FnMut() -> std::result::Result<T, Failure>) -> Result<T> {
        let mut patience = Patience::new(LIST_TRIES);
        loop {
            match request() {
                Ok(given) => return Ok(given),
                Err(failure) => std::thread::sleep(patience.pause(failure)?),
            }
        }
    }
}

/// A file's bytes on their way.
pub(super) struct Opened {
    /// Position of the first of them.
    pub(super) from: u64,
    pub(super) body: Body,
    pub(super) url: String,
}

/// The endpoint that the hub's own crate has: what it puts before a file's path.
fn default_endpoint(places: &HubPlaces) -> Result<String> {
    let build = || {
        let api = ApiBuilder::from_cache(Cache::new(places.cache.clone())).build().ok()?;
        api.model("a/b".to_owned()).url("c").strip_suffix("/a/b/resolve/main/c").map(str::to_owned)
    };
    build().ok_or_else(|| Error::BadAnswer {
        url: "the hub's address".to_owned(),
        reason: "the hf-hub crate builds it in another way than expected".to_owned(),
    })
}

/// A request that brought no answer.
fn failed(url: &str, error: ureq::Error) -> Failure {
    use ureq::Error as E;
    let (url, reason) = (url.to_owned(), error.to_string());
    match error {
        E::BadUri(_) | E::Http(_) | E::RequireHttpsOnly(_) | E::InvalidProxyUrl | E::TooManyRedirects => {
            Failure::Final(Error::BadAnswer { url, reason })
        }
        _ => Failure::Again { url, reason, after: None },
    }
}

/// Where a `Content-Range: bytes 5-9/10` begins.
fn range_start(headers: &HeaderMap) -> Option<u64> {
    let range = headers.get("content-range")?.to_str().ok()?;
    range.trim().strip_prefix("bytes")?.trim_start().split('-').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_endpoint_is_the_crates_own() {
        let places = HubPlaces { cache: "/tmp/x".into(), endpoint: None, token: None, offline: false };
        let endpoint = default_endpoint(&places).unwrap();
        assert!(endpoint.starts_with("https://") && !endpoint.ends_with('/'), "{endpoint}");
        assert_eq!(endpoint.matches('/').count(), 2);
    }

    #[test]
    fn ranges_are_read() {
        let start = |value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert("content-range", value.parse().unwrap());
            range_start(&headers)
        };
        assert_eq!(start("bytes 5-9/10"), Some(5));
        assert_eq!(start("bytes 0-0/*"), Some(0));
        assert_eq!(start("bytes */10"), None);
        assert_eq!(start("items 1-2/3"), None);
    }
}
