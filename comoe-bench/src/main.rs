//! `comoe-bench`: measures what needs a big model or a GPU. The criterion benches are under `benches/`.

mod args;

use std::io::{IsTerminal, Write};
use std::process::{Command, ExitCode};
use std::time::Instant;

use candle_core::Device;
use clap::Parser;
use comoe_bench::decode::{self, Decode, Measured, Part};
use comoe_bench::dense::write_dense;
use comoe_bench::report::{Table, machine, today};
use comoe_bench::shape::Shape;
use comoe_bench::steps::{Routing, Stepped, Steps};
use comoe_bench::tiny::{self, RunMemory};
use comoe_bench::{Error, Result, synth};
use comoe_core::Prefetch;
use comoe_models::PartTime;

use crate::args::{Args, Ask, DecodeArgs, MemoryArgs, SynthArgs, TransferArgs};

fn main() -> ExitCode {
    let result = match Args::parse().ask {
        Ask::Synth(args) => synth_store(&args),
        Ask::Decode(args) => decode_shape(&args),
        Ask::Transfer(args) => transfer(&args),
        Ask::Memory(args) => memory(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("comoe-bench: {error}");
            ExitCode::FAILURE
        }
    }
}

/// A line of Markdown above each table.
fn heading(what: &str, device: &Device) {
    println!("{what} ({}, {})\n", machine(device), today());
}

fn print_json<T: serde::Serialize>(value: &T) -> Result<()> {
    let text = serde_json::to_string(value).map_err(|e| Error::io("stdout", e.into()))?;
    println!("{text}");
    Ok(())
}

fn synth_store(args: &SynthArgs) -> Result<()> {
    let mut shape = Shape::named(&args.shape)?;
    if let Some(layers) = args.layers {
        shape = shape.with_layers(layers)?;
    }
    let show = std::io::stderr().is_terminal();
    let progress = |done: usize, all: usize| {
        if show && (done.is_multiple_of(64) || done == all) {
            // A line that cannot be shown is no reason to stop.
            let _ = write!(std::io::stderr(), "\r{done} of {all} experts");
        }
    };
    let start = Instant::now();
    let bytes = synth::write_store(&args.output, &shape, args.format, args.seed, &progress)?;
    let seconds = start.elapsed().as_secs_f64();
    if show {
        eprintln!();
    }
    println!(
        "{}: {} experts in {} layers of {}, {}, {:.2} GB in {seconds:.1} s ({:.2} GB/s, on the disk when done)",
        args.output.display(),
        shape.layers * shape.experts,
        shape.layers,
        shape.name,
        args.format,
        bytes as f64 / 1e9,
        bytes as f64 / 1e9 / seconds
    );
    Ok(())
}

fn decode_shape(args: &DecodeArgs) -> Result<()> {
    let device = args.device.open()?;
    let mut shape = Shape::named(&args.shape)?;
    if let Some(layers) = args.layers {
        shape = shape.with_layers(layers)?;
    }
    let say = |what: &str| eprintln!("{what}");
    if !device.is_cpu() {
        decode::warm_up(&device)?;
    }
    // The resident run is the reference, and has nothing to prefetch.
    let mut runs = Vec::new();
    if args.resident || args.slots_per_layer.is_empty() {
        runs.push((None, None));
    }
    for &slots in &args.slots_per_layer {
        match args.prefetch {
            Prefetch::Off => runs.push((Some(slots), None)),
            _ => runs.extend(args.triggers().map(|t| (Some(slots), Some(t)))),
        }
    }
    // The same dense part for every run, on the disk only while they last.
    let folder = tempfile::tempdir().map_err(|e| Error::io(std::env::temp_dir(), e))?;
    let dense = folder.path().join("dense.safetensors");
    if Part::from(args.part) == Part::Model {
        say("making the dense part");
        write_dense(&dense, &shape, args.seed)?;
    }
    // On a GPU a whole model decodes as an answer is made; prefetching is measured token by token.
    let stepped = !device.is_cpu() && Part::from(args.part) == Part::Model && args.prefetch == Prefetch::Off;
    if !stepped && (args.replay.is_some() || args.no_reuse || args.no_graph) {
        return Err(Error::BadOption {
            option: "--replay, --no-reuse and --no-graph",
            value: String::new(),
            expected: "they want a whole model on a GPU, without prefetching".to_owned(),
        });
    }
    let (mut measured, mut stepped_runs) = (Vec::new(), Vec::new());
    for (slots, trigger) in runs {
        let run = Decode {
            part: args.part.into(),
            format: args.format,
            resident: args.resident_format,
            slots_per_layer: slots,
            policy: args.policy,
            driver: args.driver,
            prefetch: if trigger.is_some() { args.prefetch } else { Prefetch::Off },
            trigger: trigger.unwrap_or_default(),
            warm_up: [args.prompt, args.warm_up],
            steps: args.steps,
            seed: args.seed,
            store: args.store.clone(),
            dense: Some(dense.clone()),
            ..Decode::new(shape.clone())
        };
        if stepped {
            let (graph, length) = (!args.no_graph, args.length);
            let (decode, routing) = match (&args.replay, args.no_reuse) {
                (Some(trace), _) => Routing::of_trace(trace, run)?,
                (None, true) => {
                    let routing = Routing::without_reuse(&run);
                    (run, routing)
                }
                (None, false) => (run, Routing::Model),
            };
            let profile = args.profile;
            let result = Steps { decode, routing, graph, length, profile }.run(&device, &say)?;
            if args.json {
                print_json(&result)?;
            }
            stepped_runs.push(result);
            continue;
        }
        let result = run.run(&device, &say)?;
        if args.json {
            print_json(&result)?;
        }
        measured.push(result);
    }
    if !args.json {
        show(&device, &measured);
        show_steps(&device, &stepped_runs);
    }
    Ok(())
}

fn show_steps(device: &Device, runs: &[Stepped]) {
    let Some(first) = runs.first() else { return };
    let what = format!(
        "Decode, {} shape, {} layers, top-{}, {}, routed by {}, context {}",
        first.shape, first.layers, first.top_k, first.format, first.routing, first.length
    );
    heading(&what, device);
    let heads = [
        "slots/layer",
        "pass",
        "graph nodes",
        "tok/s",
        "ms",
        "hits %",
        "MB/token",
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
                pass.what.clone(),
                run.graph_nodes.map_or("none".to_owned(), |n| n.to_string()),
                format!("{:.1}", pass.tokens_per_s),
                format!("{:.3}", pass.ms),
                format!("{:.1}", 100.0 * pass.hit_rate),
                format!("{:.1}", pass.mb_per_token),
                format!("{:.1}", pass.link_gb_per_s),
                format!("{:.1}", pass.enqueue_us),
                format!("{:.1}", run.load_s),
            ]);
        }
    }
    println!("{table}");
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
        println!(
            "{} of {} slots, with an event behind each part:\n\n{table}",
            run.slots_per_layer[0], run.slots_per_layer[1]
        );
    }
    let mut notes: Vec<_> = runs.iter().flat_map(|m| &m.notes).collect();
    notes.dedup();
    notes.iter().for_each(|note| println!("- {note}"));
}

fn show(device: &Device, measured: &[Measured]) {
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
    println!("{table}");
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
    println!("{table}");
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
        println!("{table}");
        println!("min..max: over the tokens measured; `+n` is the most less the least, in bytes.\n");
    }
    let mut notes: Vec<_> = measured.iter().flat_map(|m| &m.notes).collect();
    notes.dedup();
    notes.iter().for_each(|note| println!("- {note}"));
}

#[cfg(feature = "cuda")]
fn transfer(args: &TransferArgs) -> Result<()> {
    let shape = Shape::named(&args.shape)?;
    let ordinal = args.ordinal;
    let result = comoe_bench::transfer::transfers(ordinal, &shape, args.format)?;
    if args.json {
        return print_json(&result);
    }
    let device = comoe_core::cuda_device(ordinal)?;
    heading(&format!("Host to GPU, records of {} in {}", result.shape, result.format), &device);
    let mut table = Table::new(&["batch", "records", "MiB of a record", "MiB", "GB/s", "% of plain copies"]);
    let mib = |b: usize| format!("{:.2}", b as f64 / f64::from(1 << 20));
    for row in &result.rows {
        table.row([
            row.what.clone(),
            row.records.to_string(),
            mib(row.record_bytes),
            mib(row.records * row.record_bytes),
            format!("{:.1}", row.gb_per_s),
            format!("{:.0}", 100.0 * row.of_best),
        ]);
    }
    println!("{table}");
    let mut table = Table::new(&["plain copies, MiB", "page-locked GB/s", "pageable GB/s"]);
    for t in &result.report.transfers {
        table.row([mib(t.bytes), format!("{:.1}", t.locked), format!("{:.1}", t.pageable)]);
    }
    println!("{table}");
    result.notes.iter().for_each(|note| println!("- {note}"));
    Ok(())
}

#[cfg(not(feature = "cuda"))]
fn transfer(args: &TransferArgs) -> Result<()> {
    comoe_core::cuda_device(args.ordinal)?;
    Ok(())
}

fn memory(args: &MemoryArgs) -> Result<()> {
    let folder = args.model.clone().unwrap_or_else(tiny::folder);
    if args.here {
        let [slots] = args.slots[..] else {
            let value = format!("{:?}", args.slots);
            return Err(Error::BadOption {
                option: "--slots",
                value,
                expected: "one number with --here".into(),
            });
        };
        return print_json(&tiny::run_memory(&folder, slots)?);
    }
    let program = std::env::current_exe().map_err(|e| Error::io("comoe-bench", e))?;
    heading("comoe-tiny on the CPU, four prompts of up to 100 tokens, a process for each row", &Device::Cpu);
    let mut table = Table::new(&["slots", "slots used", "slots MiB", "peak RssAnon MiB", "less the slots"]);
    let mib = |b: i64| format!("{:.1}", b as f64 / f64::from(1 << 20));
    for slots in &args.slots {
        let mut command = Command::new(&program);
        command.args(["memory", "--here", "--slots", &slots.to_string(), "--model"]).arg(&folder);
        let output = command.output().map_err(|e| Error::io(&program, e))?;
        if !output.status.success() {
            let text = String::from_utf8_lossy(&output.stderr).trim().to_owned();
            return Err(Error::io(&program, std::io::Error::other(text)));
        }
        let m: RunMemory =
            serde_json::from_slice(&output.stdout).map_err(|e| Error::io(&program, e.into()))?;
        let used = m.pool_bytes as f64 * m.used as f64 / m.slots as f64;
        table.row([
            m.slots.to_string(),
            m.used.to_string(),
            mib(m.pool_bytes as i64),
            mib(m.peak_rss_anon as i64),
            mib(m.peak_rss_anon as i64 - used as i64),
        ]);
    }
    println!("{table}");
    Ok(())
}
