//! What the fuzz targets do with their bytes: all that `comoe` does with such a file before it computes.
//!
//! Each function says whether the bytes were accepted, and must neither panic nor hang nor take memory that the file
//! does not account for. comoe-models/tests/hostile.rs runs them over the corpus.

use std::path::Path;
use std::sync::Arc;

use comoe_core::replay::{self, ReplayPolicy};
use comoe_core::store::{Checkpoint, Naming, PackedFile, Quantisation, RecordIndex};
use comoe_core::trace::Trace;
use comoe_core::{ExpertStore, PolicyKind, Scope};
use comoe_models::arch;
use comoe_models::chat::{ChatTemplate, Tokenizer};
use comoe_models::load::ConfigFile;
use comoe_models::{Message, Role};
use tempfile::TempDir;

/// Records that are read: more would only be slow.
const RECORD_BYTES: u64 = 16 << 20;

/// A folder that holds one file.
fn folder_of(name: &str, bytes: &[u8]) -> TempDir {
    let folder = tempfile::tempdir().expect("a folder for the input");
    put(folder.path(), name, bytes);
    folder
}

fn put(folder: &Path, name: &str, bytes: &[u8]) {
    std::fs::write(folder.join(name), bytes).expect("room for the input");
}

/// The parts between zero bytes: at most `n`, the last one as it is.
fn parts(data: &[u8], n: usize) -> impl Iterator<Item = &[u8]> {
    data.splitn(n, |b| *b == 0)
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn read_records(store: &ExpertStore) {
    let source = store.source();
    let directory = source.directory();
    if directory.total_bytes() > RECORD_BYTES {
        return;
    }
    for index in (0..directory.len() as u32).map(RecordIndex) {
        let mut record = vec![0; directory.record_bytes(index)];
        // Weights that are no numbers, for example, are refused here.
        let _ = source.read(index, &mut record);
    }
}

fn read_checkpoint(path: &Path) -> bool {
    let Ok(checkpoint) = Checkpoint::open(&[path]) else { return false };
    for name in checkpoint.names() {
        let view = checkpoint.tensor(name).expect("a tensor of that name");
        std::hint::black_box((view.bytes.first(), view.bytes.last()));
    }
    if let Ok(store) = ExpertStore::from_checkpoint(Arc::new(checkpoint), &Naming::auto()) {
        read_records(&store);
    }
    true
}

/// A folder with a shard, and where the bytes begin with `{` an index before it, which ends with a zero byte.
pub fn checkpoint(data: &[u8]) -> bool {
    let mut parts = parts(data, if data.starts_with(b"{") { 2 } else { 1 });
    match (parts.next(), parts.next()) {
        (Some(index), Some(shard)) => {
            let folder = folder_of("model.safetensors.index.json", index);
            put(folder.path(), "a.safetensors", shard);
            read_checkpoint(folder.path())
        }
        _ => read_checkpoint(folder_of("model.safetensors", data).path()),
    }
}

/// A packed file.
pub fn packed(data: &[u8]) -> bool {
    let folder = folder_of("m.safetensors", data);
    let path = folder.path().join("m.safetensors");
    read_checkpoint(&path);
    let Ok(file) = PackedFile::open(&path) else { return false };
    let _ = file.verify(None);
    std::hint::black_box(file.file("config.json"));
    read_records(&ExpertStore::from_packed(file));
    true
}

/// A routing trace, binary or text; or, where the bytes begin with `{`, a header, a zero byte, a version, the number of
/// tokens and the content of a block, to which the rest of a file is added: a fuzzer finds no checksums.
pub fn trace(data: &[u8]) -> bool {
    let file = match data.starts_with(b"{") {
        true => framed_trace(data),
        false => data.to_vec(),
    };
    let folder = folder_of("m.trace", &file);
    let Ok(trace) = Trace::open(&folder.path().join("m.trace")) else { return false };
    std::hint::black_box(trace.summary());
    let lru = ReplayPolicy::Online(PolicyKind::Lru);
    std::hint::black_box(replay::replay(&trace, lru, Scope::Layer, 2));
    true
}

/// See `comoe_core::trace::TraceWriter`.
fn framed_trace(data: &[u8]) -> Vec<u8> {
    let mut parts = parts(data, 2);
    let header = parts.next().unwrap_or_default();
    let (version, tokens, content) = match parts.next() {
        Some([version, tokens, content @ ..]) => (*version, *tokens, content),
        _ => (1, 0, &[][..]),
    };
    let length = (content.len() as u32).to_le_bytes();
    // A Zstandard frame of one segment, whose blocks are raw (RFC 8878, sections 3.1.1.1 and 3.1.1.2).
    let mut frame = vec![0x28, 0xb5, 0x2f, 0xfd, 0b1010_0000];
    frame.extend(length);
    let mut blocks = content.chunks(1 << 17).peekable();
    while let Some(block) = blocks.next() {
        let last = u32::from(blocks.peek().is_none());
        frame.extend(&((block.len() as u32) << 3 | last).to_le_bytes()[..3]);
        frame.extend(block);
    }
    let fnv =
        content.iter().fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(*b)).wrapping_mul(0x100_0000_01b3));
    let mut file = b"comoe-rt".to_vec();
    file.extend(u32::from(version).to_le_bytes());
    file.extend((header.len() as u32).to_le_bytes());
    file.extend(header);
    file.extend((frame.len() as u32).to_le_bytes());
    file.extend(length);
    file.extend(fnv.to_le_bytes());
    file.extend(frame);
    file.extend([0; 8]);
    file.extend(u64::from(tokens).to_le_bytes());
    file
}

/// A GGUF file: weights, configuration, tokenizer and template.
pub fn gguf(data: &[u8]) -> bool {
    let folder = folder_of("m.gguf", data);
    let path = folder.path().join("m.gguf");
    let accepted = read_checkpoint(&path);
    if let Ok(config) = ConfigFile::of_model(&path) {
        read_config(&config);
    }
    if let Ok(tokenizer) = Tokenizer::of_model(&path)
        && let Ok(ids) = tokenizer.encode("Hello, 中央 12", true)
    {
        let _ = tokenizer.decode(&ids);
    }
    if let Ok(Some(template)) = ChatTemplate::find(&path) {
        let _ = template.render(&[Message::user("Hello")], true);
    }
    accepted
}

fn read_config(config: &ConfigFile) -> bool {
    let fields = ["quantization_config", "compression_config"];
    if let Ok(Some(value)) = config.first(&fields) {
        let _ = Quantisation::from_config(&value);
    }
    let Ok(plan) = arch::plan(config) else { return false };
    let _ = plan.check_context(4096);
    std::hint::black_box(plan.kv_bytes_per_token(2, comoe_models::KvFormat::Plain));
    true
}

/// A `config.json`.
pub fn config(data: &[u8]) -> bool {
    ConfigFile::parse(Path::new("config.json"), &text(data)).is_ok_and(|config| read_config(&config))
}

/// A chat template, and behind zero bytes messages, which begin with the first letter of who says them.
pub fn template(data: &[u8]) -> bool {
    let mut parts = parts(data, 8);
    let source = text(parts.next().unwrap_or_default());
    let message = |bytes: &[u8]| {
        let content = text(bytes.get(1..).unwrap_or_default());
        let role = match bytes.first() {
            Some(b's') => Role::System,
            Some(b'a') => Role::Assistant,
            _ => Role::User,
        };
        let reasoning = (role == Role::Assistant && content.len() % 2 == 1).then(|| "Hm.".to_owned());
        Message { role, content, reasoning }
    };
    let messages: Vec<Message> = parts.map(message).collect();
    let special =
        vec![("bos_token".to_owned(), "<s>".to_owned()), ("eos_token".to_owned(), "</s>".to_owned())];
    match ChatTemplate::new(&source, special) {
        Ok(template) => template.at(0).render(&messages, true).is_ok(),
        Err(_) => false,
    }
}
