//! A hub on this machine: the paths, redirections and headers of the real one, and its bad days.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ring::digest::{Context, SHA1_FOR_LEGACY_USE_ONLY, SHA256};

/// Contents by their paths.
pub(crate) type Files = BTreeMap<String, Vec<u8>>;

/// The repository that the server has.
pub(crate) const REPO: &str = "comoe/tiny";
/// Its newest commit.
pub(crate) const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
/// Files of this length and longer are large ones, which come from another host.
const LARGE: usize = 1 << 20;
/// Bytes written at a time.
const PIECE: usize = 32 << 10;

/// What goes wrong with a request. The first fault that fits is used up.
#[derive(Clone, Debug)]
pub(crate) enum Fault {
    /// The connection ends after so many bytes of the body.
    Cut(usize),
    /// An answer with this status and these headers.
    Status(u16, &'static [(&'static str, &'static str)]),
    /// An answer that is whole, by its own account, after so many bytes.
    Short(usize),
    /// The whole file, whatever part was asked for.
    NoRanges,
    /// Other bytes.
    Garbled,
}

/// A request, and what came of it.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) method: String,
    /// With the query.
    pub(crate) path: String,
    pub(crate) authorization: Option<String>,
    /// Bytes of the body that were written.
    pub(crate) sent: u64,
    pub(crate) at: Instant,
}

/// A hub.
pub(crate) struct Hub {
    shared: Arc<Shared>,
    port: u16,
}

struct Shared {
    files: Files,
    /// What the list says of sizes, instead of the truth.
    claimed: Mutex<BTreeMap<String, u64>>,
    /// Whether the list has sizes and contents.
    described: AtomicBool,
    faults: Mutex<Vec<(String, Fault)>>,
    log: Mutex<Vec<Request>>,
    /// Bytes of large files written so far, and after how many the writing stops.
    large: AtomicU64,
    gate: AtomicU64,
    closed: AtomicBool,
    port: u16,
}

impl Hub {
    /// A hub that has these files.
    pub(crate) fn new(files: Files) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let shared = Arc::new(Shared {
            files,
            claimed: Mutex::default(),
            described: true.into(),
            faults: Mutex::default(),
            log: Mutex::default(),
            large: 0.into(),
            gate: u64::MAX.into(),
            closed: false.into(),
            port,
        });
        let accepting = shared.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                if accepting.closed.load(Ordering::SeqCst) {
                    return;
                }
                let serving = accepting.clone();
                std::thread::spawn(move || serving.serve(stream.unwrap()));
            }
        });
        Self { shared, port }
    }

    pub(crate) fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// The next request whose path has `part` in it goes wrong.
    pub(crate) fn fault(&self, part: &str, fault: Fault) {
        self.shared.faults.lock().unwrap().push((part.to_owned(), fault));
    }

    /// Lets the list say another size.
    pub(crate) fn claim(&self, file: &str, size: u64) {
        self.shared.claimed.lock().unwrap().insert(file.to_owned(), size);
    }

    /// Leaves sizes and contents out of the list, as some mirrors do.
    pub(crate) fn describe_nothing(&self) {
        self.shared.described.store(false, Ordering::SeqCst);
    }

    /// Writes no more than `bytes` of large files from now on, all requests together.
    pub(crate) fn hold_at(&self, bytes: u64) {
        self.shared.gate.store(bytes, Ordering::SeqCst);
    }

    /// Waits until as many have been written.
    pub(crate) fn wait_for(&self, bytes: u64) {
        let started = Instant::now();
        while self.sent_of_large() < bytes {
            assert!(
                started.elapsed() < Duration::from_secs(60),
                "only {} bytes were sent",
                self.sent_of_large()
            );
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Bytes of large files written in all.
    pub(crate) fn sent_of_large(&self) -> u64 {
        self.shared.large.load(Ordering::SeqCst)
    }

    /// Everything that was asked.
    pub(crate) fn log(&self) -> Vec<Request> {
        self.shared.log.lock().unwrap().clone()
    }

    /// Paths that bodies were asked for, without the commit and in order.
    pub(crate) fn fetched(&self) -> Vec<String> {
        let prefix = format!("/{REPO}/resolve/{COMMIT}/");
        let gets = self.log().into_iter().filter(|r| r.method == "GET");
        gets.filter_map(|r| r.path.strip_prefix(&prefix).map(str::to_owned)).collect()
    }

    /// Answers nobody any more.
    pub(crate) fn close(&self) {
        self.shared.closed.store(true, Ordering::SeqCst);
        // Wakes the thread that accepts.
        drop(TcpStream::connect(("127.0.0.1", self.port)));
    }
}

impl Drop for Hub {
    fn drop(&mut self) {
        self.hold_at(u64::MAX);
        self.close();
    }
}

/// What a request says.
struct Asked {
    method: String,
    path: String,
    headers: BTreeMap<String, String>,
}

impl Shared {
    /// Requests of one connection, one after the other.
    fn serve(&self, stream: TcpStream) {
        let mut reader = BufReader::new(stream.try_clone().unwrap());
        while let Some(asked) = read_request(&mut reader) {
            if self.closed.load(Ordering::SeqCst) {
                return;
            }
            let mut sent = 0;
            let at = Instant::now();
            let authorization = asked.headers.get("authorization").cloned();
            let entry = {
                let mut log = self.log.lock().unwrap();
                log.push(Request {
                    method: asked.method.clone(),
                    path: asked.path.clone(),
                    authorization,
                    sent,
                    at,
                });
                log.len() - 1
            };
            let goes_on = self.answer(&stream, &asked, &mut sent).unwrap_or(false);
            self.log.lock().unwrap()[entry].sent = sent;
            if !goes_on {
                return;
            }
        }
    }

    fn answer(&self, stream: &TcpStream, asked: &Asked, sent: &mut u64) -> std::io::Result<bool> {
        let path = asked.path.split('?').next().unwrap();
        let fault = {
            let mut faults = self.faults.lock().unwrap();
            let first = faults.iter().position(|(part, _)| asked.path.contains(part.as_str()));
            first.map(|i| faults.remove(i).1)
        };
        if let Some(Fault::Status(code, headers)) = fault {
            return reply(stream, asked, code, headers.iter().map(|(k, v)| (*k, (*v).to_owned())), b"no");
        }
        if let Some(rest) = path.strip_prefix(&format!("/api/models/{REPO}/revision/")) {
            return match rest {
                "main" | COMMIT => reply(stream, asked, 200, [], self.list(&asked.path).as_bytes()),
                _ => reply(stream, asked, 404, [("x-error-code", "RevisionNotFound".into())], b""),
            };
        }
        if let Some(name) = path.strip_prefix(&format!("/{REPO}/resolve/{COMMIT}/")) {
            let Some(bytes) = self.files.get(name) else {
                return reply(stream, asked, 404, [("x-error-code", "EntryNotFound".into())], b"");
            };
            let commit = ("x-repo-commit", COMMIT.to_owned());
            if bytes.len() < LARGE {
                let headers = [commit, ("etag", format!("\"{}\"", git(bytes)))];
                return self.part(stream, asked, fault, &headers, bytes, sent);
            }
            let headers = [
                commit,
                ("x-linked-size", bytes.len().to_string()),
                ("x-linked-etag", format!("\"{}\"", sha256(bytes))),
                // Another name of this machine, and so another host.
                ("location", format!("http://localhost:{}/cdn/{name}", self.port)),
            ];
            return reply(stream, asked, 302, headers, b"");
        }
        match path.strip_prefix("/cdn/").and_then(|name| self.files.get(name)) {
            Some(bytes) => {
                self.part(stream, asked, fault, &[("etag", "\"of-the-other-host\"".into())], bytes, sent)
            }
            None => reply(stream, asked, 404, [], b""),
        }
    }

    /// The model's description.
    fn list(&self, asked: &str) -> String {
        let described = self.described.load(Ordering::SeqCst) && asked.contains("blobs=true");
        let claimed = self.claimed.lock().unwrap();
        let siblings = self.files.iter().map(|(name, bytes)| {
            let size = claimed.get(name).copied().unwrap_or(bytes.len() as u64);
            match described {
                false => serde_json::json!({"rfilename": name}),
                true if bytes.len() < LARGE => {
                    serde_json::json!({"rfilename": name, "size": size, "blobId": git(bytes)})
                }
                true => serde_json::json!({"rfilename": name, "size": size, "blobId": git(b"pointer"),
                    "lfs": {"sha256": sha256(bytes), "size": size, "pointerSize": 134}}),
            }
        });
        let siblings: Vec<_> = siblings.collect();
        serde_json::json!({"id": REPO, "modelId": REPO, "sha": COMMIT, "private": false, "siblings": siblings}).to_string()
    }

    /// A file, or the part of it that was asked for, with what goes wrong.
    fn part(
        &self,
        mut stream: &TcpStream,
        asked: &Asked,
        fault: Option<Fault>,
        headers: &[(&str, String)],
        bytes: &[u8],
        sent: &mut u64,
    ) -> std::io::Result<bool> {
        let range = asked.headers.get("range").filter(|_| !matches!(fault, Some(Fault::NoRanges)));
        let range = range.map(|r| r.strip_prefix("bytes=").unwrap().split_once('-').unwrap());
        let from: Option<usize> = range.map(|(from, _)| from.parse().unwrap());
        let end =
            range.filter(|(_, last)| !last.is_empty()).map(|(_, last)| last.parse::<usize>().unwrap() + 1);
        let end = end.unwrap_or(bytes.len()).min(bytes.len());
        let garbled: Vec<u8>;
        let mut body = &bytes[from.unwrap_or(0).min(end)..end];
        if matches!(fault, Some(Fault::Garbled)) {
            garbled = body.iter().map(|b| !b).collect();
            body = &garbled;
        }
        if let Some(Fault::Short(length)) = fault {
            body = &body[..length.min(body.len())];
        }
        let mut head = format!(
            "HTTP/1.1 {}\r\naccept-ranges: bytes\r\ncontent-length: {}\r\n",
            if from.is_some() { "206 Partial Content" } else { "200 OK" },
            body.len()
        );
        for (name, value) in headers {
            head += &format!("{name}: {value}\r\n");
        }
        if let Some(from) = from {
            head += &format!("content-range: bytes {from}-{}/{}\r\n", end - 1, bytes.len());
        }
        stream.write_all((head + "\r\n").as_bytes())?;
        if asked.method == "HEAD" {
            return Ok(true);
        }
        let whole = body.len();
        if let Some(Fault::Cut(after)) = fault {
            body = &body[..after.min(body.len())];
        }
        let large = bytes.len() >= LARGE;
        for piece in body.chunks(PIECE) {
            if large {
                // Counted before it is written: no thread goes beyond the gate.
                self.pass_gate(piece.len() as u64);
            }
            stream.write_all(piece)?;
            *sent += piece.len() as u64;
        }
        Ok(body.len() == whole)
    }

    fn pass_gate(&self, bytes: u64) {
        loop {
            let (before, gate) = (self.large.load(Ordering::SeqCst), self.gate.load(Ordering::SeqCst));
            let next = before + bytes;
            if before < gate
                && self.large.compare_exchange(before, next, Ordering::SeqCst, Ordering::SeqCst).is_ok()
            {
                return;
            }
            std::thread::sleep(Duration::from_micros(50));
        }
    }
}

fn read_request(reader: &mut BufReader<TcpStream>) -> Option<Asked> {
    let mut line = String::new();
    if reader.read_line(&mut line).ok()? == 0 {
        return None;
    }
    let mut words = line.split_whitespace().map(str::to_owned);
    let (method, path) = (words.next()?, words.next()?);
    let mut headers = BTreeMap::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        match line.trim_end().split_once(':') {
            Some((name, value)) => headers.insert(name.to_ascii_lowercase(), value.trim().to_owned()),
            None => return Some(Asked { method, path, headers }),
        };
    }
}

fn reply<'a>(
    mut stream: &TcpStream,
    asked: &Asked,
    code: u16,
    headers: impl IntoIterator<Item = (&'a str, String)>,
    body: &[u8],
) -> std::io::Result<bool> {
    let mut text = format!("HTTP/1.1 {code} -\r\ncontent-length: {}\r\n", body.len());
    for (name, value) in headers {
        text += &format!("{name}: {value}\r\n");
    }
    stream.write_all((text + "\r\n").as_bytes())?;
    if asked.method != "HEAD" {
        stream.write_all(body)?;
    }
    Ok(true)
}

fn sha256(bytes: &[u8]) -> String {
    let mut context = Context::new(&SHA256);
    context.update(bytes);
    hex(context)
}

fn git(bytes: &[u8]) -> String {
    let mut context = Context::new(&SHA1_FOR_LEGACY_USE_ONLY);
    context.update(format!("blob {}\0", bytes.len()).as_bytes());
    context.update(bytes);
    hex(context)
}

fn hex(context: Context) -> String {
    context.finish().as_ref().iter().map(|b| format!("{b:02x}")).collect()
}

/// The files of the model in `folder`, its weights split into `shards`, and beside it what repositories have besides.
pub(crate) fn repository(folder: &Path, shards: usize) -> Files {
    let mut files = Files::new();
    let mut tensors = Vec::new();
    let read = |path: &Path| std::fs::read(path).unwrap();
    let mut weights = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        if name.ends_with(".safetensors") {
            weights.push(read(&path));
        } else if !name.ends_with(".index.json") {
            files.insert(name, read(&path));
        }
    }
    for bytes in &weights {
        let shard = safetensors::SafeTensors::deserialize(bytes).unwrap();
        tensors.extend(shard.tensors());
    }
    tensors.sort_by(|a, b| a.0.cmp(&b.0));
    let all: usize = tensors.iter().map(|(_, t)| t.data().len()).sum();
    let (mut parts, mut before) = (vec![Vec::new(); shards], 0);
    let mut map = serde_json::Map::new();
    let shard_name = |i: usize| format!("model-{:05}-of-{shards:05}.safetensors", i + 1);
    for (name, tensor) in tensors {
        let shard = (before * shards / all).min(shards - 1);
        before += tensor.data().len();
        map.insert(name.clone(), shard_name(shard).into());
        parts[shard].push((name, tensor));
    }
    for (i, part) in parts.into_iter().enumerate() {
        files.insert(shard_name(i), safetensors::serialize(part, None).unwrap());
    }
    let index = serde_json::json!({"metadata": {"total_size": all}, "weight_map": map}).to_string();
    files.insert("model.safetensors.index.json".into(), index.into_bytes());
    for more in ["pytorch_model.bin", "consolidated.safetensors", "original/model.safetensors", "figure.png"]
    {
        files.insert(more.to_owned(), b"the same in another form".to_vec());
    }
    files
}
