//! `comoe trace replay`.

use comoe_core::Scope;
use comoe_core::replay::{
    BatchOptions, Eviction, Grouping, Score, replay_batches, replay_pinned, replay_span,
};
use comoe_core::stats::human_bytes;
use comoe_core::trace::Trace;
use serde::Serialize;

use super::args::ReplayArgs;
use super::{json, open, print, table};
use crate::error::{Error, Result};

#[derive(Serialize)]
struct Line {
    policy: String,
    scope: String,
    /// Slots of a layer; with global scope all layers together have that times the layers.
    slots: usize,
    hits: u64,
    accesses: u64,
    hit_rate: f64,
    bytes_missed: u64,
    /// Part of the slots in which experts are pinned.
    #[serde(skip_serializing_if = "Option::is_none")]
    pinned: Option<f64>,
    #[serde(flatten)]
    batch: Option<BatchLine>,
}

impl Line {
    fn of(policy: String, scope: Scope, slots: usize, score: Score) -> Self {
        Self {
            policy,
            scope: scope.to_string(),
            slots,
            hits: score.hits,
            accesses: score.accesses,
            hit_rate: score.hit_rate(),
            bytes_missed: score.bytes_missed,
            pinned: None,
            batch: None,
        }
    }
}

#[derive(Serialize)]
struct BatchLine {
    batch: usize,
    group: &'static str,
    evict: &'static str,
    sequences: usize,
    tokens: u64,
    /// Mean experts of a layer's union over the batch.
    union: f64,
    bytes_missed_per_token: f64,
}

pub(crate) fn run(args: &ReplayArgs) -> Result<()> {
    let trace = open(&args.file)?;
    match (args.batch.is_empty(), args.pin.is_empty()) {
        (true, true) => single(args, &trace),
        (true, false) => pinned(args, &trace),
        (false, _) => batched(args, &trace),
    }
}

fn pinned(args: &ReplayArgs, trace: &Trace) -> Result<()> {
    let policies = args.online().map_err(|policy| Error::FarSighted { option: "--pin", policy })?;
    let (mut lines, mut text) = (Vec::new(), String::new());
    for &scope in &args.scope {
        let mut rows = vec![vec![format!("scope {scope}, % hits"), "pinned".to_owned()]];
        rows[0].extend(args.slots_per_layer.iter().map(|s| format!("{s} slots")));
        for &policy in &policies {
            for &part in &args.pin {
                let mut row = vec![policy.to_string(), part.to_string()];
                for &slots in &args.slots_per_layer {
                    let score = replay_pinned(trace, policy, scope, slots, part);
                    row.push(format!("{:.2}", 100.0 * score.hit_rate()));
                    let pinned = Some(part);
                    lines.push(Line { pinned, ..Line::of(policy.to_string(), scope, slots, score) });
                }
                rows.push(row);
            }
        }
        text += &format!("{}\n", table(&rows));
    }
    if args.json {
        return print(&json(&lines));
    }
    let accesses = lines.first().map_or(0, |l| l.accesses);
    print(&format!(
        "{text}{accesses} accesses of the second half; pinned are the hottest experts of the first\n"
    ))
}

fn single(args: &ReplayArgs, trace: &Trace) -> Result<()> {
    let mut lines = Vec::new();
    let mut text = String::new();
    for &scope in &args.scope {
        let mut rows = vec![vec![format!("scope {scope}, % hits")]];
        rows[0].extend(args.slots_per_layer.iter().map(|s| format!("{s} slots")));
        for policy in args.policies() {
            let mut row = vec![policy.to_string()];
            for &slots in &args.slots_per_layer {
                let score = replay_span(trace, policy, scope, slots, args.count);
                row.push(format!("{:.2}", 100.0 * score.hit_rate()));
                lines.push(Line::of(policy.to_string(), scope, slots, score));
            }
            rows.push(row);
        }
        text += &format!("{}\n", table(&rows));
    }
    if args.json {
        return print(&json(&lines));
    }
    let accesses = lines.first().map_or(0, |l| l.accesses);
    print(&format!("{text}{accesses} accesses of generated tokens; the prompt warms the cache\n"))
}

fn batched(args: &ReplayArgs, trace: &Trace) -> Result<()> {
    let policies = args.online().map_err(|policy| Error::FarSighted { option: "--batch", policy })?;
    // All batches play the same sequences: twice as many as the largest batch, so that there is a choice to group by.
    let sequences = args.batch.iter().copied().fold(1, lcm) * 2;
    let mut lines = Vec::new();
    let mut rows = vec![
        ["policy", "scope", "slots", "batch", "union", "% hits", "missed per token"]
            .map(String::from)
            .to_vec(),
    ];
    for &scope in &args.scope {
        for &policy in &policies {
            for &slots_per_layer in &args.slots_per_layer {
                for &batch in &args.batch {
                    let options = BatchOptions {
                        policy,
                        scope,
                        slots_per_layer,
                        sequences,
                        batch,
                        grouping: args.group,
                        eviction: args.evict,
                    };
                    let played = replay_batches(trace, &options).map_err(Error::core)?;
                    let score = played.score;
                    let per_token = score.bytes_missed as f64 / played.tokens.max(1) as f64;
                    rows.push(vec![
                        policy.to_string(),
                        scope.to_string(),
                        slots_per_layer.to_string(),
                        batch.to_string(),
                        format!("{:.2}", played.union),
                        format!("{:.2}", 100.0 * score.hit_rate()),
                        human_bytes(per_token as u64),
                    ]);
                    lines.push(Line {
                        batch: Some(BatchLine {
                            batch,
                            group: match args.group {
                                Grouping::None => "none",
                                Grouping::Similar => "similar",
                            },
                            evict: match args.evict {
                                Eviction::Expert => "expert",
                                Eviction::Group => "group",
                            },
                            sequences,
                            tokens: played.tokens,
                            union: played.union,
                            bytes_missed_per_token: per_token,
                        }),
                        ..Line::of(policy.to_string(), scope, slots_per_layer, score)
                    });
                }
            }
        }
    }
    if args.json {
        return print(&json(&lines));
    }
    print(&format!(
        "{}\n{sequences} sequences from a cold cache; union: experts of a layer that a batch needs; an access is a member \
         of a union\n",
        table(&rows)
    ))
}

fn lcm(a: usize, b: usize) -> usize {
    let (mut x, mut y) = (a, b);
    while y > 0 {
        (x, y) = (y, x % y);
    }
    (a / x.max(1)).saturating_mul(b)
}
