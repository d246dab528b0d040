//! `comoe-bench`: measures what needs a big model or a GPU. The criterion benches are under `benches/`.

mod args;
mod out;
mod show;

use std::io::{ErrorKind, IsTerminal, Write};
use std::path::Path;
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::time::Instant;

use candle_core::Device;
use clap::Parser;
use comoe_bench::decode::{self, Decode, Part};
use comoe_bench::dense::write_dense;
use comoe_bench::formats::Formats;
use comoe_bench::plot::{Plot, Point};
use comoe_bench::prefill::Prefill;
use comoe_bench::report::Table;
use comoe_bench::shape::Shape;
use comoe_bench::steps::{Routing, Steps};
use comoe_bench::synth_model::write_model;
use comoe_bench::timeline::{self, Timeline};
use comoe_bench::tiny::{self, RunMemory};
use comoe_bench::{Error, Result, formats, synth};
use comoe_core::{DriverKind, PeerAccess, Prefetch, PrefetchTrigger, WholeFile};

use crate::args::{
    Args, Ask, DecodeArgs, FormatsArgs, MemoryArgs, PrefillArgs, ReadingArgs, SynthArgs, TransferArgs,
};
use crate::out::{note, out};
use crate::show::{heading, show_decode, show_formats, show_prefill, show_steps};

fn main() -> ExitCode {
    let result = match Args::parse().ask {
        Ask::Synth(args) => synth_store(&args),
        Ask::Decode(args) => decode_shape(&args),
        Ask::Prefill(args) => prefill_shape(&args),
        Ask::Transfer(args) => transfer(&args),
        Ask::Memory(args) => memory(&args),
        Ask::Reading(args) => reading(&args),
        Ask::Formats(args) => formats_of_tiny(&args),
    };
    let result = result.and_then(|()| match out::failure() {
        Some(error) => {
            Err(Error::io("standard output", std::io::Error::new(error.kind(), error.to_string())))
        }
        None => Ok(()),
    });
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            note!("comoe-bench: {error}");
            ExitCode::FAILURE
        }
    }
}

fn print_json<T: serde::Serialize>(value: &T) -> Result<()> {
    let text = serde_json::to_string(value).map_err(|e| Error::io("stdout", e.into()))?;
    out!("{text}");
    Ok(())
}

/// The shape of this name, cut to so many layers with experts.
fn shape_of(name: &str, layers: Option<usize>) -> Result<Shape> {
    let shape = Shape::named(name)?;
    match layers {
        Some(layers) => shape.with_layers(layers),
        None => Ok(shape),
    }
}

fn synth_store(args: &SynthArgs) -> Result<()> {
    let shape = shape_of(&args.shape, args.layers)?;
    let show = std::io::stderr().is_terminal();
    let progress = |done: usize, all: usize| {
        if show && (done.is_multiple_of(64) || done == all) {
            // A line that cannot be shown is no reason to stop.
            let _ = write!(std::io::stderr(), "\r{done} of {all} experts");
        }
    };
    let start = Instant::now();
    let bytes = match &args.tokenizer {
        None => synth::write_store(&args.output, &shape, args.format, args.seed, &progress)?,
        Some(file) => write_model(&args.output, &shape, args.format, args.seed, file, &progress)?,
    };
    let seconds = start.elapsed().as_secs_f64();
    if show {
        note!();
    }
    out!(
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
    let device = args.model.device.open()?;
    let also =
        args.also.iter().map(|&n| comoe_core::cuda_device(n)).collect::<comoe_core::Result<Vec<_>>>()?;
    let shape = shape_of(&args.shape, args.model.layers)?;
    let say = |what: &str| note!("{what}");
    if !device.is_cpu() {
        decode::warm_up(&device)?;
    }
    // The resident run is the reference, and has nothing to prefetch.
    let mut runs = Vec::new();
    if args.resident || args.slots_per_layer.is_empty() {
        runs.push((None, None, None));
    }
    let whole_on_gpu = !device.is_cpu() && Part::from(args.part) == Part::Model;
    // On a GPU a whole model decodes as an answer is made. What the host driver brings by a table is measured token by
    // token, by when it is brought.
    let stepped = whole_on_gpu && (args.prefetch != Prefetch::Correlation || args.driver != DriverKind::Host);
    let hinted = matches!(args.prefetch, Prefetch::StaleGate | Prefetch::Auto);
    if !args.guess_right.is_empty() && (!stepped || !hinted) {
        return Err(Error::BadOption {
            option: "--guess-right",
            value: format!("with --prefetch {}", args.prefetch),
            expected: "it wants a whole model on a GPU, with --prefetch stale-gate or auto".to_owned(),
        });
    }
    if args.trigger.is_some() && (stepped || args.prefetch == Prefetch::Off) {
        return Err(Error::BadOption {
            option: "--trigger",
            value: format!("with --prefetch {}", args.prefetch),
            expected:
                "it is for what is brought token by token: on the CPU, with --part experts, or on a GPU with \
                       --prefetch correlation --driver host"
                    .to_owned(),
        });
    }
    for &slots in &args.slots_per_layer {
        match args.prefetch {
            Prefetch::Off => runs.push((Some(slots), None, None)),
            _ if !stepped => runs.extend(args.triggers().map(|t| (Some(slots), Some(t), None))),
            _ if args.guess_right.is_empty() => {
                runs.push((Some(slots), Some(PrefetchTrigger::default()), None));
            }
            _ => runs.extend(
                args.guess_right.iter().map(|&p| (Some(slots), Some(PrefetchTrigger::default()), Some(p))),
            ),
        }
    }
    let wants_stepped = [
        ("--replay", args.replay.is_some()),
        ("--no-reuse", args.no_reuse),
        ("--no-graph", args.no_graph),
        ("--profile", args.profile),
    ];
    if let Some((option, _)) = wants_stepped.into_iter().find(|&(_, asked)| asked && !stepped) {
        let with = format!("with --prefetch {} --driver {}", args.prefetch, args.driver);
        let (value, expected) = match whole_on_gpu {
            true => (with, "what the host driver brings by a table is measured otherwise"),
            false => ("without a whole model on a GPU".to_owned(), "leave it out, or measure there"),
        };
        return Err(Error::BadOption { option, value, expected: expected.to_owned() });
    }
    for path in [&args.plot, &args.timeline].into_iter().flatten() {
        writable(path)?;
    }
    if args.timeline.is_some() && !also.is_empty() {
        let (value, expected) = ("with --also".to_owned(), "it is taken on one GPU".to_owned());
        return Err(Error::BadOption { option: "--timeline", value, expected });
    }
    // The same dense part for every run, on the disk only while they last.
    let folder = tempfile::tempdir().map_err(|e| Error::io(std::env::temp_dir(), e))?;
    let dense = folder.path().join("dense.safetensors");
    if Part::from(args.part) == Part::Model {
        say("making the dense part");
        write_dense(&dense, &shape, args.model.seed)?;
    }
    let (mut measured, mut stepped_runs) = (Vec::new(), Vec::new());
    let mut spans = Vec::new();
    let what = format!("Decode, {} shape, {} layers, {}", shape.name, shape.layers, args.model.format);
    let mut plot = Plot::new(what, "slots a layer");
    for (slots, trigger, right) in runs {
        let timeline = args.timeline.as_ref().map(|_| Arc::new(Timeline::default()));
        let run = Decode {
            part: args.part.into(),
            format: args.model.format,
            resident: args.model.resident_format,
            slots_per_layer: slots,
            policy: args.policy,
            driver: args.driver,
            prefetch: if trigger.is_some() { args.prefetch } else { Prefetch::Off },
            trigger: trigger.unwrap_or_default(),
            warm_up: [args.prompt, args.warm_up],
            steps: args.steps,
            seed: args.model.seed,
            store: args.model.store.clone(),
            dense: Some(dense.clone()),
            ram: args.ram,
            timeline: timeline.clone(),
            also: also.clone(),
            peer_access: if args.no_peer_access { PeerAccess::Off } else { PeerAccess::Auto },
            ..Decode::new(shape.clone())
        };
        if stepped {
            let (graph, length) = (!args.no_graph, args.length);
            let (decode, routing) = match (&args.replay, args.no_reuse) {
                (Some(trace), _) => {
                    let (run, routing) = Routing::of_trace(trace, run)?;
                    let routing = match right {
                        Some(percent) => routing.with_guesses(&run, percent),
                        None => routing,
                    };
                    (run, routing)
                }
                (None, true) => {
                    let routing = Routing::without_reuse(&run);
                    (run, routing)
                }
                (None, false) => (run, Routing::Model),
            };
            let profile = args.profile;
            let result = Steps { decode, routing, graph, length, profile }.run(&device, &say)?;
            let [slots, all] = result.slots_per_layer;
            if let Some(timeline) = timeline {
                let prefetch = match result.guesses_right {
                    Some(percent) => format!("{}, {percent} % of guesses right", result.prefetch),
                    None => result.prefetch.clone(),
                };
                spans.push(drawn(&timeline, format!("{slots} of {all} slots a layer, prefetch {prefetch}")));
            }
            for pass in result.passes.iter().filter(|p| !p.blind) {
                let (tokens_per_s, hit_rate) = (pass.tokens_per_s, pass.hit_rate);
                plot.add(&pass.what, Point { slots, tokens_per_s, hit_rate });
            }
            if args.json {
                print_json(&result)?;
            }
            stepped_runs.push(result);
            continue;
        }
        let result = run.run(&device, &say)?;
        let ([slots, all], prefetch) = (result.slots_per_layer, result.prefetch.clone());
        if let Some(timeline) = timeline {
            spans.push(drawn(&timeline, format!("{slots} of {all} slots a layer, prefetch {prefetch}")));
        }
        let (tokens_per_s, hit_rate) = (result.tokens_per_s, result.hit_rate);
        plot.add(&format!("prefetch {prefetch}"), Point { slots, tokens_per_s, hit_rate });
        if args.json {
            print_json(&result)?;
        }
        measured.push(result);
    }
    if !args.json {
        show_decode(&device, &measured);
        show_steps(&device, &stepped_runs);
    }
    write_pictures(args.plot.as_deref(), &plot, args.timeline.as_deref(), &spans)
}

/// Whether a file can be written there, known before anything is measured.
fn writable(path: &Path) -> Result<()> {
    match WholeFile::folder_of(path).is_dir() && !path.is_dir() {
        true => Ok(()),
        false => Err(Error::io(path, std::io::Error::new(ErrorKind::NotFound, "no file can be made there"))),
    }
}

/// What a run has taken down, under its name.
fn drawn(timeline: &Timeline, name: String) -> (String, Vec<timeline::Span>) {
    let name = timeline.note().map_or(name.clone(), |note| format!("{name}; {note}"));
    (name, timeline.spans())
}

/// Writes the plot and the timeline that were asked for.
fn write_pictures(
    plot_to: Option<&Path>,
    plot: &Plot,
    timeline_to: Option<&Path>,
    spans: &[(String, Vec<timeline::Span>)],
) -> Result<()> {
    if let Some(path) = plot_to {
        plot.write(path)?;
        note!("drawn to {}", path.display());
    }
    if let Some(path) = timeline_to {
        timeline::write(path, spans)?;
        note!("{}: for chrome://tracing or ui.perfetto.dev", path.display());
    }
    Ok(())
}

fn prefill_shape(args: &PrefillArgs) -> Result<()> {
    for path in [&args.plot, &args.timeline].into_iter().flatten() {
        writable(path)?;
    }
    let device = args.model.device.open()?;
    let shape = shape_of(&args.shape, args.model.layers)?;
    let say = |what: &str| note!("{what}");
    if !device.is_cpu() {
        decode::warm_up(&device)?;
    }
    let link = link(&device)?;
    let folder = tempfile::tempdir().map_err(|e| Error::io(std::env::temp_dir(), e))?;
    let dense = folder.path().join("dense.safetensors");
    say("making the dense part");
    write_dense(&dense, &shape, args.model.seed)?;
    let few = args.slots_per_layer.iter().map(|n| Some(*n));
    let mut measured = Vec::new();
    let mut spans = Vec::new();
    let what = format!("Prefill, {} shape, {} layers, {}", shape.name, shape.layers, args.model.format);
    let mut plot = Plot::new(what, "slots, all layers together");
    for slots in few.chain(args.resident.then_some(None)) {
        let timeline = args.timeline.as_ref().map(|_| Arc::new(Timeline::default()));
        let model = Decode {
            format: args.model.format,
            resident: args.model.resident_format,
            slots_per_layer: slots,
            seed: args.model.seed,
            store: args.model.store.clone(),
            dense: Some(dense.clone()),
            ring: args.ring.map(|mib| mib.saturating_mul(1 << 20)),
            timeline: timeline.clone(),
            ..Decode::new(shape.clone())
        };
        let run = Prefill { model, prompts: args.prompt.clone(), repeats: args.repeats, link };
        for result in run.run(&device, &say)? {
            if args.json {
                print_json(&result)?;
            }
            let (slots, tokens_per_s, hit_rate) = (result.slots[0], result.tokens_per_s, result.hit_rate);
            plot.add(&format!("{} tokens", result.prompt), Point { slots, tokens_per_s, hit_rate });
            measured.push(result);
        }
        if let (Some(timeline), Some(last)) = (timeline, measured.last()) {
            let [slots, all] = last.slots;
            spans.push(drawn(&timeline, format!("{slots} of {all} slots, each length once")));
        }
    }
    if !args.json {
        show_prefill(&device, &measured, link);
    }
    write_pictures(args.plot.as_deref(), &plot, args.timeline.as_deref(), &spans)
}

fn formats_of_tiny(args: &FormatsArgs) -> Result<()> {
    let device = args.device.open()?;
    let formats = Formats {
        model: args.model.clone().unwrap_or_else(tiny::folder),
        text: args.text.clone().unwrap_or_else(formats::held_out),
        conversations: args.conversations,
        pool: args.pool,
        rounds: args.rounds,
    };
    let measured = formats.run(&device, &|what| note!("{what}"))?;
    if args.json {
        return measured.iter().try_for_each(print_json);
    }
    show_formats(&device, args.pool, &measured);
    Ok(())
}

/// GB/s of plain copies from page-locked memory.
#[cfg(feature = "cuda")]
fn link(device: &Device) -> Result<Option<f64>> {
    use candle_core::DeviceLocation;
    match device.location() {
        DeviceLocation::Cuda { gpu_id } => {
            Ok(Some(comoe_core::backend::cuda::measure::gpu_report(gpu_id)?.best_locked()))
        }
        _ => Ok(None),
    }
}

#[cfg(not(feature = "cuda"))]
fn link(_: &Device) -> Result<Option<f64>> {
    Ok(None)
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
    out!("{table}");
    let mut table = Table::new(&["plain copies, MiB", "page-locked GB/s", "pageable GB/s"]);
    for t in &result.report.transfers {
        table.row([mib(t.bytes), format!("{:.1}", t.locked), format!("{:.1}", t.pageable)]);
    }
    out!("{table}");
    result.notes.iter().for_each(|note| out!("- {note}"));
    Ok(())
}

#[cfg(not(feature = "cuda"))]
fn transfer(args: &TransferArgs) -> Result<()> {
    comoe_core::cuda_device(args.ordinal)?;
    Ok(())
}

fn reading(args: &ReadingArgs) -> Result<()> {
    if args.arenas > 0 {
        comoe_core::cuda_device(0)?;
    }
    let rows = comoe_bench::reading::measure(&args.store, &args.threads, args.most)?;
    heading(&format!("Reading the experts of {}", args.store.display()), &Device::Cpu);
    let mut table =
        Table::new(&["how", "threads", "cold GB/s", "ms an expert", "cached GB/s", "ms an expert"]);
    for row in rows {
        let [cold, cached] =
            [row.cold, row.cached].map(|r| [format!("{:.2}", r.gb_per_s), format!("{:.2}", r.ms_per_record)]);
        let [[cold, cold_ms], [cached, cached_ms]] = [cold, cached];
        table.row([row.how.to_owned(), row.threads.to_string(), cold, cold_ms, cached, cached_ms]);
    }
    out!("{table}");
    arenas(args)
}

#[cfg(feature = "cuda")]
fn arenas(args: &ReadingArgs) -> Result<()> {
    if args.arenas == 0 {
        return Ok(());
    }
    let device = comoe_core::cuda_device(0)?;
    heading("All of them to page-locked memory, from the page cache", &device);
    let mut table = Table::new(&["how", "GB/s", "memory a byte of records"]);
    for arena in comoe_bench::reading::measure_arena(&args.store, &device, args.arenas)? {
        let how = if arena.later { "beside the steps" } else { "at once" };
        let memory = arena.memory_per_record.map_or("?".to_owned(), |m| format!("{m:.3}"));
        table.row([how.to_owned(), format!("{:.2}", arena.gb_per_s), memory]);
    }
    out!("{table}");
    Ok(())
}

#[cfg(not(feature = "cuda"))]
fn arenas(args: &ReadingArgs) -> Result<()> {
    match args.arenas {
        0 => Ok(()),
        n => Err(Error::BadOption {
            option: "--arenas",
            value: n.to_string(),
            expected: "a build with feature cuda".to_owned(),
        }),
    }
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
    out!("{table}");
    Ok(())
}
