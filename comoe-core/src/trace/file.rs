//! Our own trace files.

use std::io::Write;
use std::path::Path;

use ruzstd::decoding::FrameDecoder;
use ruzstd::encoding::{CompressionLevel, compress_to_vec};
use serde::{Deserialize, Serialize};

use super::{Phase, Routed, Token, Trace, TraceBuilder, TraceInfo};
use crate::error::{Error, Result, TracePlace};
use crate::store::Directory;

/// First bytes of a trace file.
pub const MAGIC: [u8; 8] = *b"comoe-rt";
/// Version of the format.
pub const VERSION: u32 = 1;

/// Uncompressed bytes after which a block is written.
const BLOCK_BYTES: usize = 256 << 10;
/// Bytes ahead of a block's content.
const BLOCK_HEADER: usize = 16;
/// Largest block that a reader accepts, uncompressed: a prompt chunk is never split, so some room is left.
const MAX_BLOCK: usize = 1 << 30;

/// The file's header, as JSON.
#[derive(Debug, Serialize, Deserialize)]
struct Header {
    model: String,
    top_k: usize,
    /// `[layer, experts, record bytes]`
    layers: Vec<(usize, usize, usize)>,
    weights: bool,
}

/// Writes a trace while a model runs.
///
/// # The format, version 1
/// All numbers are little-endian.
///
/// | bytes | what |
/// |---|---|
/// | 8 | `comoe-rt` |
/// | 4 | version |
/// | 4 | length of the header |
/// | .. | header, JSON: `model`, `top_k`, `layers` (`[layer, experts, record bytes]` each), `weights` |
/// | .. | blocks |
///
/// A block is its length as stored (4), its length uncompressed (4), the FNV-1a-64 hash of its uncompressed bytes (8),
/// and one Zstandard frame (RFC 8878). A block of two zero lengths ends the file, its hash field holds the number of
/// tokens; a file that ends otherwise is truncated, and everything before the damage was written whole.
///
/// Uncompressed, blocks hold whole chunks. A chunk is what went through the model at once: turn (4), phase (1; 0 prompt,
/// 1 generated), tokens (4), then for each layer in the header's order the number of tokens that it computed, the last ones of the
/// chunk (4), experts per token (2), their ids `[tokens, k]` in the order of choice (1 byte each in a layer of up to
/// 256 experts, otherwise 4), and their weights likewise, as F32, if the header says so.
pub struct TraceWriter<W: Write> {
    out: W,
    info: TraceInfo,
    weights: bool,
    block: Vec<u8>,
    turn: u32,
    phase: Phase,
    /// Steps of the chunk that is being recorded, by layer.
    chunk: Vec<Option<ChunkLayer>>,
    tokens: u64,
}

/// What one layer did with a chunk.
#[derive(Debug, Default)]
struct ChunkLayer {
    top_k: usize,
    choices: Vec<u32>,
    weights: Vec<f32>,
}

impl ChunkLayer {
    fn tokens(&self) -> usize {
        self.choices.len() / self.top_k.max(1)
    }
}

/// FNV-1a of 64 bits (Fowler, Noll, Vo): finds damage, is no proof against forgery.
fn fnv(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(*b)).wrapping_mul(0x100_0000_01b3))
}

impl<W: Write> TraceWriter<W> {
    /// Writes the header.
    ///
    /// # Errors
    /// What the writer reports.
    pub fn new(mut out: W, info: TraceInfo, weights: bool) -> std::io::Result<Self> {
        let layers = info.directory.layers();
        let header = Header {
            model: info.model.clone(),
            top_k: info.top_k,
            layers: layers.iter().map(|l| (l.layer, l.experts, l.record_bytes)).collect(),
            weights,
        };
        let header = serde_json::to_vec(&header)?;
        out.write_all(&MAGIC)?;
        out.write_all(&VERSION.to_le_bytes())?;
        out.write_all(&(header.len() as u32).to_le_bytes())?;
        out.write_all(&header)?;
        let chunk = layers.iter().map(|_| None).collect();
        Ok(Self { out, info, weights, block: Vec::new(), turn: 0, phase: Phase::Prompt, chunk, tokens: 0 })
    }

    /// What follows belongs to this turn and phase.
    ///
    /// # Errors
    /// What the writer reports.
    pub fn begin(&mut self, turn: u32, phase: Phase) -> std::io::Result<()> {
        self.end_chunk()?;
        (self.turn, self.phase) = (turn, phase);
        Ok(())
    }

    /// Adds one layer's step. Layers of a chunk come in ascending order; a layer that is not above the one before
    /// begins the next chunk. A layer that computed fewer tokens than the first did so for the last ones.
    ///
    /// # Errors
    /// What the writer reports.
    pub fn step(&mut self, step: &Routed<'_>) -> std::io::Result<()> {
        let Some(later) = self.chunk.get(step.layer..) else { return Ok(()) };
        if later.iter().any(Option::is_some) {
            self.end_chunk()?;
        }
        let weights = step.weights.filter(|w| self.weights && w.len() == step.choices.len());
        self.chunk[step.layer] = Some(ChunkLayer {
            top_k: step.top_k,
            choices: step.choices.to_vec(),
            weights: weights.map_or_else(Vec::new, <[f32]>::to_vec),
        });
        Ok(())
    }

    fn end_chunk(&mut self) -> std::io::Result<()> {
        let tokens = self.chunk.iter().flatten().map(ChunkLayer::tokens).max().unwrap_or(0);
        if tokens == 0 {
            self.chunk.fill_with(|| None);
            return Ok(());
        }
        let out = &mut self.block;
        out.extend(self.turn.to_le_bytes());
        out.push((self.phase == Phase::Decode).into());
        out.extend((tokens as u32).to_le_bytes());
        for (slot, entry) in self.chunk.iter_mut().zip(self.info.directory.layers()) {
            let layer = slot.take().unwrap_or_default();
            out.extend((layer.tokens() as u32).to_le_bytes());
            out.extend((layer.top_k as u16).to_le_bytes());
            if entry.experts <= 256 {
                out.extend(layer.choices.iter().map(|&e| e as u8));
            } else {
                out.extend(layer.choices.iter().flat_map(|e| e.to_le_bytes()));
            }
            if self.weights {
                // A step without weights in a trace with weights: zeroes, which no router gives.
                let weights = layer.choices.iter().enumerate();
                let weights = weights.map(|(i, _)| layer.weights.get(i).copied().unwrap_or(0.0));
                out.extend(weights.flat_map(f32::to_le_bytes));
            }
        }
        self.tokens += tokens as u64;
        if self.block.len() >= BLOCK_BYTES { self.end_block() } else { Ok(()) }
    }

    fn end_block(&mut self) -> std::io::Result<()> {
        if self.block.is_empty() {
            return Ok(());
        }
        let stored = compress_to_vec(self.block.as_slice(), CompressionLevel::Fastest);
        self.out.write_all(&(stored.len() as u32).to_le_bytes())?;
        self.out.write_all(&(self.block.len() as u32).to_le_bytes())?;
        self.out.write_all(&fnv(&self.block).to_le_bytes())?;
        self.out.write_all(&stored)?;
        self.block.clear();
        Ok(())
    }

    /// Ends the file and returns the number of tokens in it.
    ///
    /// # Errors
    /// What the writer reports.
    pub fn finish(mut self) -> std::io::Result<u64> {
        self.end_chunk()?;
        self.end_block()?;
        self.out.write_all(&[0; 8])?;
        self.out.write_all(&self.tokens.to_le_bytes())?;
        self.out.flush()?;
        Ok(self.tokens)
    }
}

impl Trace {
    /// Writes the trace in our own format, with its weights if it has any.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn save(&self, path: &Path) -> Result<()> {
        let write = || -> std::io::Result<()> {
            let file = std::io::BufWriter::new(std::fs::File::create(path)?);
            let mut writer = TraceWriter::new(file, self.info.clone(), self.has_weights())?;
            let mut last = None;
            for (t, &token) in self.tokens.iter().enumerate() {
                if last.replace(token) != Some(token) {
                    writer.begin(token.turn, token.phase)?;
                }
                for layer in 0..self.layers() {
                    let choices = self.chosen(t, layer);
                    if !choices.is_empty() {
                        let weights = self.weights(t, layer);
                        writer.step(&Routed { layer, top_k: choices.len(), choices, weights })?;
                    }
                }
            }
            writer.finish().map(drop)
        };
        write().map_err(|e| Error::io(path, e))
    }
}

/// Reads the bytes of the file at `path`.
pub(super) fn read(path: &Path, bytes: &[u8]) -> Result<Trace> {
    let bad = |at: usize, reason: String| Error::BadTrace {
        path: path.to_owned(),
        at: TracePlace::Byte(at as u64),
        reason,
    };
    let mut file = Cursor { bytes, at: 0 };
    let cut = |at: usize, what: &str| {
        bad(at, format!("the file ends inside {what}: it is truncated; record the trace again, to its end"))
    };
    file.take(MAGIC.len()).ok_or_else(|| cut(0, "its first bytes"))?;
    let version = file.u32().ok_or_else(|| cut(file.at, "its version"))?;
    if version != VERSION {
        let found = version.to_string();
        return Err(Error::TraceVersion { path: path.to_owned(), found, known: VERSION });
    }
    let length = file.u32().ok_or_else(|| cut(file.at, "its header"))? as usize;
    let start = file.at;
    let header = file.take(length).ok_or_else(|| cut(start, "its header"))?;
    let header: Header =
        serde_json::from_slice(header).map_err(|e| bad(start, format!("the header is damaged: {e}")))?;
    let directory = Directory::new(header.layers.iter().copied()).map_err(|e| bad(start, e.to_string()))?;
    if directory.is_empty() {
        return Err(bad(start, "the header lists no layers".into()));
    }
    let info = TraceInfo { model: header.model, top_k: header.top_k, directory };
    let mut builder = TraceBuilder::new(info.clone());
    let mut tokens = 0u64;
    loop {
        let at = file.at;
        let (Some(stored), Some(length), Some(hash)) = (file.u32(), file.u32(), file.u64()) else {
            return Err(cut(at, "a block's header"));
        };
        if (stored, length) == (0, 0) {
            if hash != tokens {
                return Err(bad(at, format!("the end promises {hash} tokens, there are {tokens}")));
            }
            break;
        }
        let stored = file.take(stored as usize).ok_or_else(|| cut(at, "a block"))?;
        let content = decompress(stored, length as usize).filter(|c| fnv(c) == hash).ok_or_else(|| {
            bad(at + BLOCK_HEADER, "a block is damaged (its checksum differs); record the trace again".into())
        })?;
        tokens += read_chunks(&content, &info, header.weights, &mut builder)
            .map_err(|reason| bad(at + BLOCK_HEADER, reason))?;
    }
    if tokens == 0 {
        return Err(bad(file.at, "the trace has no tokens".into()));
    }
    Ok(builder.finish())
}

fn decompress(stored: &[u8], length: usize) -> Option<Vec<u8>> {
    if length > MAX_BLOCK {
        return None;
    }
    let mut content = Vec::new();
    content.try_reserve_exact(length).ok()?;
    FrameDecoder::new().decode_all_to_vec(stored, &mut content).ok()?;
    (content.len() == length).then_some(content)
}

/// Adds a block's chunks, and says how many tokens they had.
fn read_chunks(
    content: &[u8],
    info: &TraceInfo,
    has_weights: bool,
    builder: &mut TraceBuilder,
) -> std::result::Result<u64, String> {
    let mut block = Cursor { bytes: content, at: 0 };
    let short = || "a block ends inside a chunk: it was not written by a working version of comoe".to_owned();
    let mut tokens = 0;
    while block.at < content.len() {
        let (Some(turn), Some(phase), Some(rows)) = (block.u32(), block.take(1), block.u32()) else {
            return Err(short());
        };
        let phase = match phase {
            [0] => Phase::Prompt,
            [1] => Phase::Decode,
            other => return Err(format!("phase {other:?} is unknown")),
        };
        let rows = rows as usize;
        let mut layers = Vec::with_capacity(info.directory.layers().len());
        for entry in info.directory.layers() {
            let (Some(n), Some(k)) = (block.u32(), block.u16()) else { return Err(short()) };
            let (n, k) = (n as usize, k as usize);
            if n > rows {
                return Err(format!("layer {} has {n} tokens of a chunk of {rows}", entry.layer));
            }
            let width = if entry.experts <= 256 { 1 } else { 4 };
            let ids = n.checked_mul(k * width).and_then(|b| block.take(b)).ok_or_else(short)?;
            let ids: Vec<u32> = match width {
                1 => ids.iter().map(|&e| u32::from(e)).collect(),
                _ => ids.as_chunks().0.iter().map(|&b| u32::from_le_bytes(b)).collect(),
            };
            if let Some(&id) = ids.iter().find(|&&e| e as usize >= entry.experts) {
                return Err(format!("expert {id} of layer {}, which has {}", entry.layer, entry.experts));
            }
            let weights: Vec<f32> = match has_weights {
                false => Vec::new(),
                true => {
                    let bytes = ids.len().checked_mul(4).and_then(|b| block.take(b)).ok_or_else(short)?;
                    bytes.as_chunks().0.iter().map(|&b| f32::from_le_bytes(b)).collect()
                }
            };
            layers.push((n, k, ids, weights));
        }
        for row in 0..rows {
            builder.token(Token { turn, phase }, |l| {
                let (n, k, ids, weights) = &layers[l];
                // The layer computed the chunk's last `n` tokens.
                let Some(row) = (row + n).checked_sub(rows) else { return (&[], None) };
                let range = row * k..(row + 1) * k;
                (&ids[range.clone()], (!weights.is_empty()).then(|| &weights[range]))
            });
            tokens += 1;
            if let Some(layer) = builder.missing_layer() {
                return Err(format!(
                    "a token of turn {turn} has no choice in layer {layer}: it was not recorded whole"
                ));
            }
        }
    }
    Ok(tokens)
}

struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn take(&mut self, n: usize) -> Option<&'a [u8]> {
        let part = self.bytes.get(self.at..self.at.checked_add(n)?)?;
        self.at += n;
        Some(part)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.take(N)?.try_into().ok()
    }

    fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }
}
