//! What each subcommand prints: tables, one function each.

use candle_core::Device;
use comoe_bench::decode::{Measured, Part};
use comoe_bench::report::{Table, machine, today};
use comoe_bench::steps::Stepped;
use comoe_bench::{formats, prefill};
use comoe_models::PartTime;

use crate::out::out;

/// A line of Markdown above each table.
pub(crate) fn heading(what: &str, device: &Device) {
    out!("{what} ({}, {})\n", machine(device), today());
}

/// What is brought ahead, how good guesses are where that is simulated, and what the clock says where it is asked.
fn prefetch_of(run: &Stepped) -> String {
    let right = run.guesses_right.map_or_else(String::new, |percent| format!(", {percent} % right"));
    let asks = match run.asks_ahead {
        Some(true) => ", on",
        Some(false) => ", off by the clock",
        None => "",
    };
    format!("{}{right}{asks}", run.prefetch)
}

pub(crate) fn show_steps(device: &Device, runs: &[Stepped]) {
    let Some(first) = runs.first() else { return };
    let what = format!(
        "Decode, {} shape, {} layers, top-{}, {}, routed by {}, context {}",
        first.shape, first.layers, first.top_k, first.format, first.routing, first.length
    );
    heading(&what, device);
    let heads = [
        "slots/layer",
        "prefetch",
        "pass",
        "graph nodes",
        "tok/s",
        "ms",
        "hits %",
        "MB/token",
        "ahead MB (used)",
        "guesses (right)",
        "link GB/s",
        "enqueue us",
        "load s",
    ];
    let mut table = Table::new(&heads);
    for run in runs {
        let [slots, all] = run.slots_per_layer;
        for pass in &run.passes {
            table.row([
                format!("{slots} of {all}"),
                prefetch_of(run),
                pass.what.clone(),
                run.graph_nodes.map_or("none".to_owned(), |n| n.to_string()),
                format!("{:.1}", pass.tokens_per_s),
                format!("{:.3}", pass.ms),
                format!("{:.1}", 100.0 * pass.hit_rate),
                format!("{:.1}", pass.mb_per_token),
                format!("{:.1} ({:.1})", pass.ahead_mb[0], pass.ahead_mb[1]),
                format!("{:.1} ({:.1})", pass.guessed[0], pass.guessed[1]),
                format!("{:.1}", pass.link_gb_per_s),
                format!("{:.1}", pass.enqueue_us),
                format!("{:.1}", run.load_s),
            ]);
        }
    }
    out!("{table}");
    for run in runs.iter().filter(|r| !r.parts.is_empty()) {
        let mut table = Table::new(&["part of a step", "times", "us", "us each", "MB", "GB/s"]);
        let each = |part: &PartTime| part.us / part.times.max(1) as f64;
        for part in &run.parts {
            let (mb, rate) = (part.bytes as f64 / 1e6, part.bytes as f64 / part.us / 1e3);
            let read = part.bytes > 0;
            table.row([
                part.what.clone(),
                part.times.to_string(),
                format!("{:.1}", part.us),
                format!("{:.2}", each(part)),
                if read { format!("{mb:.1}") } else { String::new() },
                if read { format!("{rate:.0}") } else { String::new() },
            ]);
        }
        let us: f64 = run.parts.iter().map(|p| p.us).sum();
        table.row([
            "all".into(),
            String::new(),
            format!("{us:.1}"),
            String::new(),
            String::new(),
            String::new(),
        ]);
        out!(
            "{} of {} slots, with a kernel behind each part that tells the time:\n\n{table}",
            run.slots_per_layer[0],
            run.slots_per_layer[1]
        );
    }
    let mut notes: Vec<_> = runs.iter().flat_map(|m| &m.notes).collect();
    notes.dedup();
    notes.iter().for_each(|note| out!("- {note}"));
}

/// Where experts were, for the runs whose RAM is limited.
fn show_tiers(measured: &[Measured]) {
    if measured.iter().all(|m| m.tier.is_none()) {
        return;
    }
    let heads = [
        "slots/layer",
        "experts in RAM beside",
        "hot/token",
        "warm/token",
        "cold/token",
        "read early",
        "disk GB/s",
        "waited ms/token",
        "RssAnon MiB",
        "digest of all logits",
    ];
    let mut table = Table::new(&heads);
    for m in measured {
        let Some(tier) = &m.tier else { continue };
        table.row([
            format!("{} of {}", m.slots_per_layer[0], m.slots_per_layer[1]),
            tier.ram_experts.to_string(),
            format!("{:.1}", tier.hot),
            format!("{:.1}", tier.warm),
            format!("{:.1}", tier.cold),
            format!("{:.1}", tier.early),
            format!("{:.2}", tier.disk_gb_per_s),
            format!("{:.1}", tier.waited_ms),
            format!("{:.0}", m.rss_anon as f64 / f64::from(1 << 20)),
            m.digest.clone(),
        ]);
    }
    out!("{table}");
}

pub(crate) fn show_decode(device: &Device, measured: &[Measured]) {
    let Some(first) = measured.first() else { return };
    let part = match first.part {
        Part::Model => "whole model",
        Part::Experts => "experts' part",
    };
    let what = format!(
        "Decode, {} shape, {} layers, {}, {part}, {} tokens",
        first.shape, first.layers, first.format, first.steps
    );
    heading(&what, device);
    let mut table = Table::new(&[
        "slots/layer",
        "driver",
        "prefetch",
        "tok/s",
        "median ms",
        "slowest ms",
        "hits %",
        "MB/token",
        "GB/s",
        "stall ms",
        "prefetched",
        "used %",
        "load s",
    ]);
    for m in measured {
        let [slots, all] = m.slots_per_layer;
        table.row([
            format!("{slots} of {all}"),
            m.driver.clone(),
            m.prefetch.clone(),
            format!("{:.1}", m.tokens_per_s),
            format!("{:.2}", m.median_ms),
            format!("{:.2}", m.slowest_ms),
            format!("{:.1}", 100.0 * m.hit_rate),
            format!("{:.1}", m.bytes_per_token / 1e6),
            m.gb_per_s.map_or("-".to_owned(), |v| format!("{v:.1}")),
            format!("{:.2}", m.stalled_ms),
            format!("{:.1}", m.prefetched),
            format!("{:.0}", 100.0 * m.prefetch_used),
            format!("{:.1}", m.load_s),
        ]);
    }
    out!("{table}");
    show_tiers(measured);
    let mut table =
        Table::new(&["entropy of expert use, host's steps", "mean", "least even layer", "uniform draws"]);
    for m in measured {
        let e = m.evenness;
        table.row([
            format!("{} of {} slots, {}", m.slots_per_layer[0], m.slots_per_layer[1], m.prefetch),
            format!("{:.4}", e.mean),
            format!("{:.4}", e.least),
            format!("{:.4}", e.uniform),
        ]);
    }
    out!("{table}");
    if measured.iter().any(|m| m.memory.is_some()) {
        let heads = [
            "GPU memory, MiB",
            "slots",
            "workspace",
            "dense + KV",
            "expected",
            "measured",
            "off %",
            "pool min..max",
            "free min..max",
        ];
        let mut table = Table::new(&heads);
        let mib = |b: u64| format!("{:.1}", b as f64 / f64::from(1 << 20));
        for m in measured {
            let Some(memory) = m.memory else { continue };
            let range = |[least, most]: [u64; 2]| format!("{} +{}", mib(least), most - least);
            table.row([
                format!("{} of {} slots, {}", m.slots_per_layer[0], m.slots_per_layer[1], m.prefetch),
                mib(memory.slots),
                mib(memory.workspace),
                mib(memory.dense),
                mib(memory.expected()),
                mib(memory.measured),
                format!("{:+.2}", 100.0 * memory.off()),
                range(memory.pool_used),
                range(memory.free),
            ]);
        }
        out!("{table}");
        out!("min..max: over the tokens measured; `+n` is the most less the least, in bytes.\n");
    }
    let mut notes: Vec<_> = measured.iter().flat_map(|m| &m.notes).collect();
    notes.dedup();
    notes.iter().for_each(|note| out!("- {note}"));
}

pub(crate) fn show_prefill(device: &Device, measured: &[prefill::Measured], link: Option<f64>) {
    let Some(first) = measured.first() else { return };
    let what = format!("Prefill, {} shape, {} layers, {}", first.shape, first.layers, first.format);
    heading(&what, device);
    let heads = [
        "slots", "ring", "prompt", "tok/s", "ms", "GB moved", "wasted", "GB/s", "link %", "stall ms",
        "hits %",
    ];
    let mut table = Table::new(&heads);
    for m in measured {
        let gb = |bytes: f64| format!("{:.2}", bytes / 1e9);
        table.row([
            format!("{} of {}", m.slots[0], m.slots[1]),
            m.ring.to_string(),
            m.prompt.to_string(),
            format!("{:.0}", m.tokens_per_s),
            format!("{:.1}", m.prompt as f64 / m.tokens_per_s * 1e3),
            gb(m.bytes),
            gb(m.wasted),
            format!("{:.1}", m.gb_per_s),
            m.link_share.map_or("-".to_owned(), |share| format!("{:.0}", 100.0 * share)),
            format!("{:.1}", m.stalled_ms),
            format!("{:.0}", 100.0 * m.hit_rate),
        ]);
    }
    out!("{table}");
    if let Some(link) = link {
        out!("link %: the time that the bytes take at {link:.1} GB/s, of the prompt's time.\n");
    }
}

pub(crate) fn show_formats(device: &Device, pool: u64, measured: &[formats::Measured]) {
    let Some(first) = measured.first() else { return };
    let what = format!(
        "comoe-tiny, a pool of {:.2} MiB in every format, {} tokens",
        pool as f64 / f64::from(1 << 20),
        first.tokens
    );
    heading(&what, device);
    let mut table = Table::new(&[
        "format",
        "slots",
        "KiB a slot",
        "hits %",
        "KiB/token",
        "tok/s",
        "best tok/s",
        "KL, nats",
        "same choice %",
    ]);
    let kib = |bytes: f64| format!("{:.1}", bytes / 1024.0);
    for m in measured {
        table.row([
            m.format.clone(),
            format!("{} of {}", m.slots[0], m.slots[1]),
            kib(m.slot_bytes as f64),
            format!("{:.1}", 100.0 * m.hit_rate),
            kib(m.bytes_per_token),
            format!("{:.1}", m.tokens_per_s[1]),
            format!("{:.1}", m.tokens_per_s[0]),
            format!("{:.5}", m.kl),
            format!("{:.1}", 100.0 * m.same_choice),
        ]);
    }
    out!("{table}");
}
