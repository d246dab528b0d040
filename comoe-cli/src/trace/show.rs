//! `comoe trace show`.

use comoe_core::stats::human_bytes;
use comoe_core::trace::csv::RouteRows;
use comoe_core::trace::{LayerSummary, Summary, Trace};
use serde::Serialize;

use super::args::ShowArgs;
use super::{json, open, print, table};
use crate::error::{Error, Result};

#[derive(Serialize)]
struct Shown<'a> {
    model: &'a str,
    top_k: usize,
    turns: usize,
    prompt_tokens: usize,
    decode_tokens: usize,
    weights: bool,
    layers: Vec<ShownLayer<'a>>,
}

#[derive(Serialize)]
struct ShownLayer<'a> {
    layer: usize,
    experts: usize,
    used: usize,
    record_bytes: usize,
    entropy_bits: f64,
    overlap_with_previous_token: Option<f64>,
    reuse_distance_median: Option<usize>,
    reuse_distance_p90: Option<usize>,
    counts: &'a [u64],
}

pub(crate) fn run(args: &ShowArgs) -> Result<()> {
    if let Some(budget) = args.check_residency {
        let rows = RouteRows::open(&args.file.trace).map_err(Error::core)?;
        let differ = rows.residency_mismatches(budget);
        let (all, budget) = (rows.rows.len(), human_bytes(budget));
        return print(&format!("{differ} of {all} rows tell otherwise than a global LRU of {budget}\n"));
    }
    let trace = open(&args.file)?;
    let summary = trace.summary();
    print(&if args.json { json(&shown(&trace, &summary)) } else { text(&trace, &summary) })
}

fn shown<'a>(trace: &'a Trace, summary: &'a Summary) -> Shown<'a> {
    let entries = trace.info().directory.layers();
    let layers = summary.layers.iter().zip(entries).map(|(l, entry)| ShownLayer {
        layer: l.layer,
        experts: l.experts,
        used: l.used,
        record_bytes: entry.record_bytes,
        entropy_bits: l.entropy,
        overlap_with_previous_token: l.overlap,
        reuse_distance_median: l.reuse_median,
        reuse_distance_p90: l.reuse_p90,
        counts: &l.counts,
    });
    Shown {
        model: &trace.info().model,
        top_k: trace.info().top_k,
        turns: summary.turns,
        prompt_tokens: summary.prompt_tokens,
        decode_tokens: summary.decode_tokens,
        weights: trace.has_weights(),
        layers: layers.collect(),
    }
}

fn text(trace: &Trace, summary: &Summary) -> String {
    let info = trace.info();
    let mut rows = vec![
        [
            "layer",
            "experts",
            "used",
            "entropy",
            "of at most",
            "overlap",
            "reuse median",
            "reuse p90",
            "most used",
        ]
        .map(String::from)
        .to_vec(),
    ];
    let number = |n: Option<usize>| n.map_or_else(|| "-".to_owned(), |n| n.to_string());
    let percent = |p: Option<f64>| p.map_or_else(|| "-".to_owned(), |p| format!("{:.1} %", 100.0 * p));
    for l in &summary.layers {
        let total: u64 = l.counts.iter().sum();
        let most = l.counts.iter().copied().enumerate().max_by_key(|&(e, c)| (c, std::cmp::Reverse(e)));
        let most = most.map_or_else(String::new, |(e, c)| {
            format!("{e} ({:.1} %)", 100.0 * c as f64 / total.max(1) as f64)
        });
        rows.push(vec![
            l.layer.to_string(),
            l.experts.to_string(),
            l.used.to_string(),
            format!("{:.2}", l.entropy),
            format!("{:.2}", (l.experts as f64).log2()),
            percent(l.overlap),
            number(l.reuse_median),
            number(l.reuse_p90),
            most,
        ]);
    }
    let mean = |field: &dyn Fn(&LayerSummary) -> Option<f64>| summary.mean(field).unwrap_or(0.0);
    format!(
        "{}: {} layers with experts, top-{}, {} turns, {} prompt tokens, {} generated, weights {}\n\n{}\n\
         mean over layers: {:.1} experts used, entropy {:.2} bits, overlap with the token before {:.1} %\n\
         entropy in bits; overlap: experts that the token before chose too; reuse: distinct experts of the layer used \
         since an expert's last use (an LRU of more slots hits)\n",
        info.model,
        trace.layers(),
        info.top_k,
        summary.turns,
        summary.prompt_tokens,
        summary.decode_tokens,
        if trace.has_weights() { "recorded" } else { "not recorded" },
        table(&rows),
        mean(&|l| Some(l.used as f64)),
        mean(&|l| Some(l.entropy)),
        100.0 * mean(&|l| l.overlap),
    )
}
