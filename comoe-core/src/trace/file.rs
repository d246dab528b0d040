//! Our own trace files.

use std::fs::File;
use std::io::{BufWriter, Seek, SeekFrom, Write};
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::limits::{self, Budget};
use super::{Choice, Phase, Routed, Token, Trace, TraceBuilder, TraceInfo};
use crate::error::{Error, Result, TracePlace};
use crate::framed::{Cursor, compress, decompress, fnv};
use crate::store::{Directory, LayerEntry};
use crate::whole_file::WholeFile;

/// First bytes of a trace file.
pub const MAGIC: [u8; 8] = *b"comoe-rt";
/// Newest version of the format. A file has the oldest that can hold it, so that older builds read what they can.
pub const VERSION: u32 = 2;
/// First version with guesses.
const WITH_GUESSES: u32 = 2;

/// Uncompressed bytes after which a block is written.
const BLOCK_BYTES: usize = 256 << 10;
/// Bytes ahead of a block's content.
const BLOCK_HEADER: usize = 16;
/// Largest block that a reader accepts, uncompressed: a prompt chunk is never split, so some room is left.
const MAX_BLOCK: usize = 1 << 28;

/// The file's header, as JSON.
#[derive(Debug, Serialize, Deserialize)]
struct Header {
    model: String,
    top_k: usize,
    /// `[layer, experts, record bytes]`
    layers: Vec<(usize, usize, usize)>,
    weights: bool,
}

/// What a trace holds besides the routing itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Contents {
    /// Routing weights.
    pub weights: bool,
    /// What the model guessed for each layer one layer earlier; see [`Trace::guesses`].
    pub guesses: bool,
}

/// Writes a trace while a model runs.
///
/// # The format, versions 1 and 2
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
/// 256 experts, otherwise 4), and their weights likewise, as F32, if the header says so. In version 2 there follow the
/// number of guesses for this layer that were made with the layer before, for the chunk's last token (2; 0 without a
/// guess), and these, likeliest first, as wide as ids.
pub struct TraceWriter<W: Write> {
    out: W,
    info: TraceInfo,
    contents: Contents,
    block: Vec<u8>,
    turn: u32,
    phase: Phase,
    /// Steps of the chunk that is being recorded, by layer.
    chunk: Vec<Option<ChunkLayer>>,
    tokens: u64,
    /// Bytes handed to `out`.
    written: u64,
    start: TurnStart,
}

/// What there was before the turn that is being recorded, so that it can be forgotten.
#[derive(Debug, Default)]
struct TurnStart {
    written: u64,
    tokens: u64,
    /// Bytes of the block that was being filled.
    block: usize,
    /// These bytes, once the block was written.
    before: Vec<u8>,
}

/// What one layer did with a chunk.
#[derive(Debug, Default)]
struct ChunkLayer {
    top_k: usize,
    choices: Vec<u32>,
    weights: Vec<f32>,
    /// For the next layer.
    guess: Vec<u32>,
}

/// Appends expert ids of a layer with so many experts, as wide as they need to be.
fn put_ids(out: &mut Vec<u8>, ids: &[u32], experts: usize) {
    match id_width(experts) {
        1 => out.extend(ids.iter().map(|&e| e as u8)),
        _ => out.extend(ids.iter().flat_map(|e| e.to_le_bytes())),
    }
}

/// Bytes of an id in a layer with so many experts.
fn id_width(experts: usize) -> usize {
    if experts <= 256 { 1 } else { 4 }
}

/// What [`put_ids`] wrote, `count` of them; the error says what is wrong with them.
fn take_ids(
    block: &mut Cursor<'_>,
    count: Option<usize>,
    entry: &LayerEntry,
) -> Option<std::result::Result<Vec<u32>, String>> {
    let width = id_width(entry.experts);
    let bytes = block.take(count?.checked_mul(width)?)?;
    let ids: Vec<u32> = match width {
        1 => bytes.iter().map(|&e| u32::from(e)).collect(),
        _ => bytes.as_chunks().0.iter().map(|&b| u32::from_le_bytes(b)).collect(),
    };
    Some(match ids.iter().find(|&&e| e as usize >= entry.experts) {
        Some(id) => Err(format!("expert {id} of layer {}, which has {}", entry.layer, entry.experts)),
        None => Ok(ids),
    })
}

impl ChunkLayer {
    fn tokens(&self) -> usize {
        self.choices.len() / self.top_k.max(1)
    }
}

impl<W: Write> TraceWriter<W> {
    /// Writes the header.
    ///
    /// # Errors
    /// What the writer reports.
    pub fn new(mut out: W, info: TraceInfo, contents: Contents) -> std::io::Result<Self> {
        let layers = info.directory.layers();
        let header = Header {
            model: info.model.clone(),
            top_k: info.top_k,
            layers: layers.iter().map(|l| (l.layer, l.experts, l.record_bytes)).collect(),
            weights: contents.weights,
        };
        let header = serde_json::to_vec(&header)?;
        out.write_all(&MAGIC)?;
        let version = if contents.guesses { WITH_GUESSES } else { 1 };
        out.write_all(&version.to_le_bytes())?;
        out.write_all(&(header.len() as u32).to_le_bytes())?;
        out.write_all(&header)?;
        let chunk = layers.iter().map(|_| None).collect();
        let written = (MAGIC.len() + 8 + header.len()) as u64;
        let start = TurnStart { written, ..TurnStart::default() };
        let (block, turn, phase, tokens) = (Vec::new(), 0, Phase::Prompt, 0);
        Ok(Self { out, info, contents, block, turn, phase, chunk, tokens, written, start })
    }

    /// What follows belongs to this turn and phase.
    ///
    /// # Errors
    /// What the writer reports.
    pub fn begin(&mut self, turn: u32, phase: Phase) -> std::io::Result<()> {
        self.end_chunk()?;
        if self.turn != turn {
            let (written, tokens) = (self.written, self.tokens);
            self.start = TurnStart { written, tokens, block: self.block.len(), before: Vec::new() };
        }
        (self.turn, self.phase) = (turn, phase);
        Ok(())
    }

    /// Adds one layer's step. Layers of a chunk come in ascending order; a layer that is not above the one before
    /// begins the next chunk. A layer that computed fewer tokens than the first did so for the last ones.
    ///
    /// # Errors
    /// What the writer reports.
    pub fn step(&mut self, step: &Routed<'_>) -> std::io::Result<()> {
        if step.layer >= self.chunk.len() {
            return Ok(());
        }
        if self.chunk[step.layer..].iter().any(Option::is_some) {
            self.end_chunk()?;
        }
        let weights = step.weights.filter(|w| self.contents.weights && w.len() == step.choices.len());
        self.chunk[step.layer] = Some(ChunkLayer {
            top_k: step.top_k,
            choices: step.choices.to_vec(),
            weights: weights.map_or_else(Vec::new, <[f32]>::to_vec),
            guess: if self.contents.guesses { step.guess.to_vec() } else { Vec::new() },
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
        let mut guess = Vec::new();
        for (slot, entry) in self.chunk.iter_mut().zip(self.info.directory.layers()) {
            let layer = slot.take().unwrap_or_default();
            out.extend((layer.tokens() as u32).to_le_bytes());
            out.extend((layer.top_k as u16).to_le_bytes());
            put_ids(out, &layer.choices, entry.experts);
            if self.contents.weights {
                // A step without weights in a trace with weights: zeroes, which no router gives.
                let weights = layer.choices.iter().enumerate();
                let weights = weights.map(|(i, _)| layer.weights.get(i).copied().unwrap_or(0.0));
                out.extend(weights.flat_map(f32::to_le_bytes));
            }
            if self.contents.guesses {
                guess.truncate(u16::MAX.into());
                out.extend((guess.len() as u16).to_le_bytes());
                put_ids(out, &guess, entry.experts);
            }
            guess = layer.guess;
        }
        self.tokens += tokens as u64;
        if self.block.len() >= BLOCK_BYTES { self.end_block() } else { Ok(()) }
    }

    fn end_block(&mut self) -> std::io::Result<()> {
        if self.block.is_empty() {
            return Ok(());
        }
        if self.written == self.start.written {
            self.start.before = self.block[..self.start.block].to_vec();
        }
        let stored = compress(&self.block);
        self.out.write_all(&(stored.len() as u32).to_le_bytes())?;
        self.out.write_all(&(self.block.len() as u32).to_le_bytes())?;
        self.out.write_all(&fnv(&self.block).to_le_bytes())?;
        self.out.write_all(&stored)?;
        self.written += (BLOCK_HEADER + stored.len()) as u64;
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

impl TraceWriter<BufWriter<File>> {
    /// Forgets all of the turn that was begun last: an answer that failed is not in the trace.
    ///
    /// # Errors
    /// What the file reports.
    pub fn drop_turn(&mut self) -> std::io::Result<()> {
        self.chunk.fill_with(|| None);
        if self.written == self.start.written {
            self.block.truncate(self.start.block);
        } else {
            self.out.flush()?;
            self.out.get_ref().set_len(self.start.written)?;
            self.out.seek(SeekFrom::Start(self.start.written))?;
            self.written = self.start.written;
            self.block = std::mem::take(&mut self.start.before);
        }
        self.tokens = self.start.tokens;
        Ok(())
    }
}

impl Trace {
    /// Writes the trace in our own format, with its weights and guesses if it has any.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn save(&self, path: &Path) -> Result<()> {
        let whole = WholeFile::create(path)?;
        let write = || -> std::io::Result<()> {
            let contents = Contents { weights: self.has_weights(), guesses: self.has_guesses() };
            let file = BufWriter::new(whole.file());
            let mut writer = TraceWriter::new(file, self.info.clone(), contents)?;
            let mut last = None;
            for (t, &token) in self.tokens.iter().enumerate() {
                if last.replace(token) != Some(token) {
                    writer.begin(token.turn, token.phase)?;
                }
                for layer in 0..self.layers() {
                    let choices = self.chosen(t, layer);
                    if !choices.is_empty() {
                        let weights = self.weights(t, layer);
                        let next = layer + 1;
                        let guess = if next < self.layers() { self.guesses(t, next) } else { &[] };
                        writer.step(&Routed { layer, top_k: choices.len(), choices, weights, guess })?;
                    }
                }
            }
            writer.finish().map(drop)
        };
        write().map_err(|e| Error::io(path, e))?;
        whole.replace()
    }
}

/// Reads the bytes of the file at `path`.
pub(super) fn read(path: &Path, bytes: &[u8]) -> Result<Trace> {
    read_within(path, bytes, limits::CHOICES)
}

/// The same, of a trace of at most so many choices.
fn read_within(path: &Path, bytes: &[u8], choices: usize) -> Result<Trace> {
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
    if !(1..=VERSION).contains(&version) {
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
    limits::check(&info).map_err(|reason| bad(start, reason))?;
    let mut builder = TraceBuilder::new(info.clone());
    let mut budget = Budget::new(choices);
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
        let content =
            decompress(stored, length as usize, MAX_BLOCK).filter(|c| fnv(c) == hash).ok_or_else(|| {
                bad(
                    at + BLOCK_HEADER,
                    "a block is damaged (its checksum differs); record the trace again".into(),
                )
            })?;
        let contents = Contents { weights: header.weights, guesses: version >= WITH_GUESSES };
        tokens += read_chunks(&content, &info, contents, &mut budget, &mut builder)
            .map_err(|reason| bad(at + BLOCK_HEADER, reason))?;
    }
    if tokens == 0 {
        return Err(bad(file.at, "the trace has no tokens".into()));
    }
    Ok(builder.finish())
}

/// Adds a block's chunks, and says how many tokens they had.
fn read_chunks(
    content: &[u8],
    info: &TraceInfo,
    contents: Contents,
    budget: &mut Budget,
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
            if n > rows || n > 0 && k == 0 {
                return Err(format!(
                    "layer {} has {n} tokens of {k} experts in a chunk of {rows}",
                    entry.layer
                ));
            }
            let ids = take_ids(&mut block, n.checked_mul(k), entry).ok_or_else(short)??;
            let weights: Vec<f32> = match contents.weights {
                false => Vec::new(),
                true => {
                    let bytes = ids.len().checked_mul(4).and_then(|b| block.take(b)).ok_or_else(short)?;
                    bytes.as_chunks().0.iter().map(|&b| f32::from_le_bytes(b)).collect()
                }
            };
            let guesses = match contents.guesses {
                false => Vec::new(),
                true => {
                    let count = block.u16().map(usize::from);
                    take_ids(&mut block, count, entry).ok_or_else(short)??
                }
            };
            layers.push((n, k, ids, weights, guesses));
        }
        // A layer that computed a token chose experts for it, so there are no more tokens than there are bytes.
        let most = layers.iter().map(|layer| layer.0).max().unwrap_or(0);
        if most < rows {
            return Err(format!("a chunk of {rows} tokens, of which no layer has more than {most}"));
        }
        let ids: usize = layers.iter().map(|(_, _, ids, _, guesses)| ids.len() + guesses.len()).sum();
        budget.take(rows, layers.len(), ids)?;
        for row in 0..rows {
            builder.token(Token { turn, phase }, |l| {
                let (n, k, ids, weights, guesses) = &layers[l];
                let guesses: &[u32] = if row + 1 == rows { guesses } else { &[] };
                // The layer computed the chunk's last `n` tokens.
                let Some(row) = (row + n).checked_sub(rows) else { return Choice::default() };
                let range = row * k..(row + 1) * k;
                let weights = (!weights.is_empty()).then(|| &weights[range.clone()]);
                Choice { experts: &ids[range], weights, guesses }
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
