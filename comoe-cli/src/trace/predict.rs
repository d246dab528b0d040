//! `comoe trace predict`.

use comoe_core::replay::{PredictOptions, PredictorKind, evaluate};
use serde::Serialize;

use super::args::PredictArgs;
use super::{json, open, print, table};
use crate::error::{Error, Result};

#[derive(Serialize)]
struct Line {
    predictor: String,
    depth: usize,
    k: usize,
    /// Slots of each layer's LRU.
    slots: usize,
    recall: f64,
    recall_on_misses: f64,
    accesses: u64,
    misses: u64,
    useful_bytes: u64,
    wasted_bytes: u64,
    /// Absent when nothing was useful.
    wasted_per_useful: Option<f64>,
}

pub(crate) fn run(args: &PredictArgs) -> Result<()> {
    let trace = open(&args.file)?;
    let top_k = trace.info().top_k.max(1);
    let ks = if args.k.is_empty() { vec![top_k, 2 * top_k] } else { args.k.clone() };
    let mut lines = Vec::new();
    // What was asked for by name is tried or refused; of all, those that can be.
    let all = args.predictor.is_empty();
    let predictors = if all { PredictorKind::ALL.to_vec() } else { args.predictor.clone() };
    for predictor in predictors {
        for &depth in &args.depth {
            if all && predictor.check(&trace, depth).is_err() {
                continue;
            }
            for &k in &ks {
                for &slots in &args.slots {
                    let score = evaluate(&trace, &PredictOptions { predictor, depth, k, slots })
                        .map_err(Error::core)?;
                    lines.push(Line {
                        predictor: predictor.to_string(),
                        depth,
                        k,
                        slots,
                        recall: score.recall(),
                        recall_on_misses: score.recall_on_misses(),
                        accesses: score.accesses,
                        misses: score.misses,
                        useful_bytes: score.useful_bytes,
                        wasted_bytes: score.wasted_bytes,
                        wasted_per_useful: score.wasted_per_useful(),
                    });
                }
            }
        }
    }
    if args.json {
        return print(&json(&lines));
    }
    let head =
        ["predictor", "depth", "k", "recall %", "slots", "of misses %", "misses", "wasted per useful byte"];
    let mut rows = vec![head.map(String::from).to_vec()];
    rows.extend(lines.iter().map(|l| {
        vec![
            l.predictor.clone(),
            l.depth.to_string(),
            l.k.to_string(),
            format!("{:.1}", 100.0 * l.recall),
            l.slots.to_string(),
            format!("{:.1}", 100.0 * l.recall_on_misses),
            l.misses.to_string(),
            l.wasted_per_useful.map_or_else(|| "nothing useful".to_owned(), |w| format!("{w:.2}")),
        ]
    }));
    let accesses = lines.first().map_or(0, |l| l.accesses);
    print(&format!(
        "{}\n{accesses} accesses of generated tokens; misses are those of an LRU of so many slots a layer\n",
        table(&rows)
    ))
}
