//! The text form of routing traces, `route_trace v1`: one row a chosen expert.
//!
//! ```text
//! # route_trace v1
//! # model=NAME arch=NAME n_layer=48 n_expert=128 n_expert_used=6
//! # layer=0 expert_bytes=3059712 dense_bytes=11953152        (one such line a layer)
//! turn,phase,step,layer,slot,expert,weight,residency,expert_bytes
//! ```
//! Phase 0 is a prompt token, 1 a generated one; slot is the order of choice. Rows may come in any order: they are
//! sorted into (turn, step, layer, slot). `residency` and `expert_bytes` say what the recording run's own cache held
//! and loaded: a check for readers and replayers, see [`RouteRows::residency_mismatches`].

use std::collections::BTreeMap;
use std::path::Path;

use super::{Choice, Phase, Token, Trace, TraceBuilder, TraceInfo, limits};
use crate::error::{Error, Result, TracePlace};
use crate::policy::{EvictionPolicy, Lru};
use crate::store::{Directory, RecordIndex, read_small};

const VERSION_LINE: &str = "# route_trace v1";
const COLUMNS: &str = "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes";

/// One row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RouteRow {
    /// Conversation turn.
    pub turn: u32,
    /// Prompt or generated.
    pub phase: Phase,
    /// Token number within the turn.
    pub step: u32,
    /// The model's layer number.
    pub layer: usize,
    /// Order of choice.
    pub slot: u32,
    /// Expert number within its layer.
    pub expert: u32,
    /// Routing weight.
    pub weight: f32,
    /// Whether the recording run's cache held the expert; written for generated tokens only.
    pub resident: bool,
    /// Bytes that the recording run loaded for this access; 0 on a hit.
    pub bytes_loaded: u64,
    line: u64,
}

/// A file's rows, in file order.
#[derive(Debug, Clone, PartialEq)]
pub struct RouteRows {
    /// What they were recorded from.
    pub info: TraceInfo,
    /// The rows.
    pub rows: Vec<RouteRow>,
}

/// `name=value` words of a comment line.
fn words(line: &str) -> impl Iterator<Item = (&str, &str)> {
    line.trim_start_matches('#').split_whitespace().filter_map(|w| w.split_once('='))
}

impl RouteRows {
    /// Reads the file at `path`.
    ///
    /// # Errors
    /// As [`Trace::open`].
    pub fn open(path: &Path) -> Result<Self> {
        let bytes = read_small(path, limits::FILE_BYTES)?;
        Self::parse(path, &bytes)
    }

    /// Reads the bytes of the file at `path`.
    pub(super) fn parse(path: &Path, bytes: &[u8]) -> Result<Self> {
        let bad = |line: usize, reason: String| Error::BadTrace {
            path: path.to_owned(),
            at: TracePlace::Line(line as u64),
            reason,
        };
        let text = std::str::from_utf8(bytes).map_err(|e| {
            let line = bytes[..e.valid_up_to()].iter().filter(|b| **b == b'\n').count() + 1;
            bad(line, "neither a trace of comoe nor text; give a file that `comoe trace record` wrote".into())
        })?;
        let mut lines = text.lines().enumerate().map(|(i, line)| (i + 1, line.trim_end()));
        match lines.next() {
            Some((_, VERSION_LINE)) => {}
            Some((_, other)) if other.starts_with("# route_trace ") => {
                let found = other.trim_start_matches("# route_trace ").to_owned();
                return Err(Error::TraceVersion { path: path.to_owned(), found, known: 1 });
            }
            _ => {
                let reason = format!(
                    "not a routing trace: expected {VERSION_LINE:?}, or a file that `comoe trace record` wrote"
                );
                return Err(bad(1, reason));
            }
        }

        let (mut model, mut counts) = (String::new(), None);
        let mut sizes = BTreeMap::new();
        let mut last = 1;
        for (number, line) in lines.by_ref() {
            last = number;
            let number_in = |name: &str| -> Result<Option<usize>> {
                let found = words(line).find(|w| w.0 == name);
                found
                    .map(|(_, v)| v.parse().map_err(|_| bad(number, format!("{name}={v} is no number"))))
                    .transpose()
            };
            if let Some((_, name)) = words(line).find(|w| w.0 == "model") {
                model = name.rsplit('/').next().unwrap_or(name).to_owned();
                counts = match (number_in("n_layer")?, number_in("n_expert")?, number_in("n_expert_used")?) {
                    (Some(layers), Some(experts), Some(top_k)) => Some((layers, experts, top_k)),
                    _ => {
                        return Err(bad(
                            number,
                            "expected n_layer=, n_expert= and n_expert_used= beside model=".into(),
                        ));
                    }
                };
            } else if let Some(layer) = number_in("layer")? {
                let bytes = number_in("expert_bytes")?
                    .ok_or_else(|| bad(number, format!("layer {layer} has no expert_bytes=")))?;
                sizes.insert(layer, bytes);
            } else if line == COLUMNS {
                break;
            } else if !line.starts_with('#') {
                return Err(bad(number, format!("expected the columns {COLUMNS}, found {line:?}")));
            }
        }
        let Some((layers, experts, top_k)) = counts else {
            return Err(bad(last, "no line with model=, n_layer=, n_expert= and n_expert_used=".into()));
        };
        if let Some(layer) = (0..layers).find(|l| !sizes.contains_key(l)) {
            return Err(bad(last, format!("{layers} layers are promised, but no line gives layer={layer}")));
        }
        let directory = Directory::new(sizes.range(..layers).map(|(&layer, &bytes)| (layer, experts, bytes)))
            .map_err(|e| bad(last, e.to_string()))?;
        let info = TraceInfo { model, top_k, directory };
        limits::check(&info).map_err(|reason| bad(last, reason))?;
        let mut rows = Vec::new();
        for (number, line) in lines {
            if !line.is_empty() && !line.starts_with('#') {
                rows.push(parse_row(line, number, &info).map_err(|reason| bad(number, reason))?);
                last = number;
            }
        }
        if rows.is_empty() {
            return Err(bad(last, "the trace has no rows".into()));
        }
        Ok(Self { info, rows })
    }

    /// Sorts the rows into tokens.
    pub(super) fn into_trace(self, path: &Path) -> Result<Trace> {
        let Self { info, mut rows } = self;
        rows.sort_by_key(|r| (r.turn, r.step, r.layer, r.slot));
        let layers = info.directory.layers().len();
        let mut builder = TraceBuilder::new(info.clone());
        for token in rows.chunk_by(|a, b| (a.turn, a.step) == (b.turn, b.step)) {
            let mut chosen = vec![(Vec::new(), Vec::new()); layers];
            for row in token {
                // The parser saw that the layer exists.
                let Some(at) = info.directory.ordinal(row.layer) else { continue };
                chosen[at].0.push(row.expert);
                chosen[at].1.push(row.weight);
            }
            let first = token[0];
            builder.token(Token { turn: first.turn, phase: first.phase }, |l| Choice {
                experts: &chosen[l].0,
                weights: Some(&chosen[l].1),
                guesses: &[],
            });
            if let Some(layer) = builder.missing_layer() {
                let line = token.iter().map(|r| r.line).max().unwrap_or(0);
                return Err(Error::BadTrace {
                    path: path.to_owned(),
                    at: TracePlace::Line(line),
                    reason: format!(
                        "turn {} step {} has no row for layer {layer}: the file is truncated, or was not recorded whole",
                        first.turn, first.step
                    ),
                });
            }
        }
        Ok(builder.finish())
    }

    /// Plays one global LRU of `budget` bytes over the rows in file order and counts rows whose `residency` (generated
    /// tokens) or `expert_bytes` (all) tell otherwise. Residency is judged before the set of a (step, layer) is brought
    /// in, recency within a set follows the order of choice.
    pub fn residency_mismatches(&self, budget: u64) -> usize {
        let directory = &self.info.directory;
        let mut lru = Lru::new(directory.len());
        let mut resident = vec![false; directory.len()];
        let (mut used, mut mismatches) = (0u64, 0);
        for set in self.rows.chunk_by(|a, b| (a.turn, a.step, a.layer) == (b.turn, b.step, b.layer)) {
            let Some(entry) = directory.ordinal(set[0].layer).map(|o| &directory.layers()[o]) else {
                continue;
            };
            let record = |row: &RouteRow| RecordIndex(entry.first + row.expert);
            for row in set {
                let hit = resident[record(row).0 as usize];
                let told = row.bytes_loaded == 0;
                mismatches += usize::from(told != hit || row.phase == Phase::Decode && row.resident != hit);
            }
            for r in set.iter().map(record) {
                if std::mem::replace(&mut resident[r.0 as usize], true) {
                    lru.hit(r);
                    continue;
                }
                used += entry.record_bytes as u64;
                while used > budget
                    && let Some(victim) = lru.victim(&|v| !set.iter().any(|row| record(row) == v))
                {
                    lru.remove(victim);
                    resident[victim.0 as usize] = false;
                    used -= directory.record_bytes(victim) as u64;
                }
                lru.insert(r);
            }
        }
        mismatches
    }
}

fn parse_row(line: &str, number: usize, info: &TraceInfo) -> std::result::Result<RouteRow, String> {
    let fields: Vec<&str> = line.split(',').collect();
    let &[turn, phase, step, layer, slot, expert, weight, residency, bytes] = fields.as_slice() else {
        return Err(format!(
            "expected 9 fields, found {}: the line is cut off or of another format",
            fields.len()
        ));
    };
    fn field<T: std::str::FromStr>(name: &str, text: &str) -> std::result::Result<T, String> {
        text.parse().map_err(|_| format!("{name} is {text:?}, expected a number"))
    }
    let (layer, expert) = (field::<usize>("layer", layer)?, field::<u32>("expert", expert)?);
    let Some(ordinal) = info.directory.ordinal(layer) else {
        return Err(format!("layer {layer} of a model with {} layers", info.directory.layers().len()));
    };
    let experts = info.directory.layers()[ordinal].experts;
    if expert as usize >= experts {
        return Err(format!("expert {expert} of a layer with {experts}"));
    }
    Ok(RouteRow {
        turn: field("turn", turn)?,
        phase: match phase {
            "0" => Phase::Prompt,
            "1" => Phase::Decode,
            other => return Err(format!("phase is {other:?}, expected 0 or 1")),
        },
        step: field("step", step)?,
        layer,
        slot: field("slot", slot)?,
        expert,
        weight: field::<f32>("weight", weight)?,
        resident: field::<u8>("residency", residency)? != 0,
        bytes_loaded: field("expert_bytes", bytes)?,
        line: number as u64,
    })
}
