//! How fast the kernels are, printed and not asserted: experts of Qwen3-30B-A3B (hidden 2048, intermediate 768, top-8),
//! every layer with records of its own, more than 1 GB walked in turn, so that no cache holds them. Launches are
//! captured in a graph, except where "eager" is said. The floor is what a device copy in the same run reads and writes.

use std::time::Instant;

use candle_core::DType;
use comoe_core::backend::cuda::kernels::{
    CombineArgs, DequantArgs, DeviceItem, DownArgs, GateUpArgs, GemmDownArgs, GemmGateUpArgs, GemmItems,
    GemmTile, Items, Kernels,
};
use comoe_core::expert::ExpertLayout;
use comoe_core::{Activation, ExpertFormat, ExpertSpec};
use cudarc::driver::{DevicePtr, result, sys};

use crate::case::{Buffer, Experts, Gpu, PageLocked, Rng, X, gpu};

const TOP_K: usize = 8;
const HIDDEN: usize = 2048;
const INTERMEDIATE: usize = 768;

/// Best of a few, in microseconds.
fn time(gpu: &Gpu, mut enqueue: impl FnMut()) -> f64 {
    let mut best = f64::INFINITY;
    for _ in 0..6 {
        gpu.stream.synchronize().expect("idle");
        let start = Instant::now();
        enqueue();
        gpu.stream.synchronize().expect("done");
        best = best.min(start.elapsed().as_secs_f64() * 1e6);
    }
    best
}

/// Captures what `enqueue` launches and times its replay, in microseconds.
fn time_graph(gpu: &Gpu, enqueue: impl Fn()) -> f64 {
    enqueue();
    gpu.stream.synchronize().expect("warm");
    gpu.stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).expect("capture");
    enqueue();
    let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    let graph = gpu.stream.end_capture(flags).expect("capture").expect("a graph");
    time(gpu, || graph.launch().expect("launch"))
}

/// What every step here reads and writes beside records.
struct Scratch {
    x: Buffer,
    weights: Buffer,
    h: Buffer,
    partial: Buffer,
    y: Buffer,
}

impl Scratch {
    fn new(gpu: &Gpu, tokens: usize, rng: &mut Rng) -> Self {
        Self {
            x: gpu.upload(&X::new(&rng.many(tokens * HIDDEN, 1.0), DType::BF16).bytes),
            weights: gpu.upload_f32(&rng.many(tokens * TOP_K, 1.0)),
            h: gpu.poisoned(4 * tokens * TOP_K * INTERMEDIATE),
            partial: gpu.poisoned(4 * tokens * TOP_K * HIDDEN),
            y: gpu.poisoned(4 * tokens * HIDDEN),
        }
    }

    fn gate_up<'a>(&self, items: Items<'a>) -> GateUpArgs<'a> {
        GateUpArgs {
            items,
            activation: Activation::Silu,
            x: self.x.at,
            x_dtype: DType::BF16,
            top_k: TOP_K,
            input_weights: 0,
            h: self.h.at,
        }
    }

    fn down<'a>(&self, items: Items<'a>) -> DownArgs<'a> {
        DownArgs { items, h: self.h.at, partial: self.partial.at }
    }

    fn combine(&self, tokens: usize) -> CombineArgs {
        CombineArgs {
            partial: self.partial.at,
            weights: self.weights.at,
            tokens,
            top_k: TOP_K,
            hidden: HIDDEN,
            y_dtype: DType::BF16,
            y: self.y.at,
        }
    }
}

/// The launches of one layer.
fn layer(gpu: &Gpu, kernels: &Kernels, s: &Scratch, items: Items<'_>, tokens: usize, which: &str) {
    // SAFETY: records, items and scratch outlive the synchronisation in `time`, and are as long as documented.
    unsafe {
        if which != "down" {
            kernels.gate_up(&gpu.stream, &s.gate_up(items)).expect("gate_up");
        }
        if which != "gate_up" {
            kernels.down_combine(&gpu.stream, &s.down(items), &s.combine(tokens)).expect("down and combine");
        }
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn time_one_layer_of_qwen3_30b() {
    let gpu = gpu();
    let mut rng = Rng::new(42);
    println!("\n{} ({:?})", gpu.ctx.name().expect("name"), gpu.ctx.compute_capability().expect("capability"));

    // The floor: a copy of 2 GB reads and writes 4 GB.
    let bytes = 2usize << 30;
    // SAFETY: written before it is read, by the copy below.
    let (a, b) = unsafe {
        (gpu.stream.alloc::<u8>(bytes).expect("2 GB"), gpu.stream.alloc::<u8>(bytes).expect("2 GB"))
    };
    let (a_at, b_at) = (a.device_ptr(&gpu.stream).0, b.device_ptr(&gpu.stream).0);
    let copy = time(&gpu, || {
        // SAFETY: both are `bytes` long and do not overlap.
        unsafe { result::memcpy_dtod_async(b_at, a_at, bytes, gpu.stream.cu_stream()) }.expect("copy");
    });
    drop((a, b));
    let floor = 2.0 * bytes as f64 / copy / 1e3;
    println!(
        "device copy: {floor:.0} GB/s read and written; the floor below is a layer's bytes at that rate"
    );

    println!("\none token, 8 experts a layer; us a layer");
    println!("format     |  floor | gate_up   down    all   eager |  GB/s  all/floor");
    let spec = ExpertSpec::swiglu(HIDDEN, INTERMEDIATE);
    let scratch = Scratch::new(&gpu, 32, &mut rng);
    for format in [
        ExpertFormat::Int4 { group: 32 },
        ExpertFormat::INT4,
        ExpertFormat::Int4 { group: 128 },
        ExpertFormat::Mxfp4,
        ExpertFormat::Int8 { group: 32 },
        ExpertFormat::INT8,
        ExpertFormat::Bf16,
    ] {
        let layout = ExpertLayout::new(&spec, format);
        let experts = Experts::random(spec, format, 1, &mut rng);
        let layers = (1_200_000_000 / (TOP_K * layout.record_bytes)).max(48);
        let pool = gpu.upload(&experts.records.concat().repeat(layers * TOP_K));
        let items: Vec<_> = (0..layers * TOP_K)
            .map(|n| DeviceItem {
                src: pool.at + (n * layout.record_bytes) as u64,
                first: (n % TOP_K) as u32,
                count: 1,
                ..DeviceItem::default()
            })
            .collect();
        let items_on = gpu.upload_items(&items);
        let list = gpu.upload_u32(&(0..TOP_K as u32).collect::<Vec<_>>());
        let of_layer = |l: usize, most: usize, items: &Buffer, list: &Buffer| Items {
            layout: &layout,
            items: items.at + (l * TOP_K * size_of::<DeviceItem>()) as u64,
            len: TOP_K,
            assignments: list.at,
            most,
            tokens: most,
        };
        let layer_bytes = (TOP_K * layout.record_bytes) as f64;
        let floor_us = layer_bytes / floor / 1e3;
        let gpu = &*gpu;
        let walk = |which: &str| {
            for l in 0..layers {
                layer(gpu, &gpu.kernels, &scratch, of_layer(l, 1, &items_on, &list), 1, which);
            }
        };
        let [gate_up, down, all] =
            ["gate_up", "down", "all"].map(|which| time_graph(gpu, || walk(which)) / layers as f64);
        let eager = time(gpu, || walk("all")) / layers as f64;
        println!(
            "{:<10} | {floor_us:>6.2} | {gate_up:>7.2} {down:>6.2} {all:>6.2} {eager:>7.2} | {:>5.0} {:>9.2}",
            format.to_string(),
            layer_bytes / all / 1e3,
            all / floor_us
        );
        // Several tokens that all chose the same 8 experts: what a further token costs.
        for tokens in [2, 4, 8, 32] {
            let shared: Vec<_> = items
                .iter()
                .enumerate()
                .map(|(n, i)| DeviceItem { first: (n % TOP_K * tokens) as u32, count: tokens as u32, ..*i })
                .collect();
            let shared_on = gpu.upload_items(&shared);
            let list: Vec<u32> =
                (0..TOP_K).flat_map(|j| (0..tokens).map(move |t| (t * TOP_K + j) as u32)).collect();
            let list = gpu.upload_u32(&list);
            let all = time_graph(gpu, || {
                for l in 0..layers {
                    layer(gpu, &gpu.kernels, &scratch, of_layer(l, tokens, &shared_on, &list), tokens, "all");
                }
            }) / layers as f64;
            println!(
                "{:<10} {tokens:>2} tokens share the experts: {all:.2} us, {:.2} of the floor",
                format.to_string(),
                all / floor_us
            );
        }
        // Misses: the same layer read through from page-locked memory, 8 records, into slots.
        let host = PageLocked::new(&experts.records.concat().repeat(TOP_K));
        let through: Vec<_> = items[..TOP_K]
            .iter()
            .enumerate()
            .map(|(n, i)| DeviceItem { src: host.at + (n * layout.record_bytes) as u64, dst: i.src, ..*i })
            .collect();
        let through_on = gpu.upload_items(&through);
        let all = time_graph(gpu, || {
            layer(gpu, &gpu.kernels, &scratch, of_layer(0, 1, &through_on, &list), 1, "all")
        });
        println!(
            "{:<10} 8 misses read through: {all:.1} us, {:.1} GB/s",
            format.to_string(),
            layer_bytes / all / 1e3
        );
        // Dequant on load, 8 records.
        if format != ExpertFormat::Bf16 {
            let to = ExpertLayout::new(&spec, ExpertFormat::Bf16);
            let out = gpu.poisoned(TOP_K * to.record_bytes);
            let items: Vec<_> = items[..TOP_K]
                .iter()
                .enumerate()
                .map(|(n, i)| DeviceItem { dst: out.at + (n * to.record_bytes) as u64, ..*i })
                .collect();
            let items_on = gpu.upload_items(&items);
            let args = DequantArgs { from: &layout, to: &to, items: items_on.at, len: TOP_K };
            // SAFETY: sources and destinations are whole records and outlive the synchronisation in `time`.
            let us = time_graph(gpu, || unsafe { gpu.kernels.dequant(&gpu.stream, &args) }.expect("dequant"));
            let written = (TOP_K * to.record_bytes) as f64;
            println!(
                "{:<10} 8 records to BF16: {us:.1} us, {:.0} GB/s read and written",
                format.to_string(),
                (written + layer_bytes) / us / 1e3
            );
        }
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn time_prefill_of_one_layer() {
    const EXPERTS: usize = 128;
    let gpu = gpu();
    let mut rng = Rng::new(43);
    let spec = ExpertSpec::swiglu(HIDDEN, INTERMEDIATE);
    println!(
        "\nprefill, one layer of 128 experts, top-8, uniform routing; us, and tokens/s of 48 such layers"
    );
    for tokens in [64, 512, 2048, 4096] {
        let scratch = Scratch::new(&gpu, tokens, &mut rng);
        let mut chosen = vec![Vec::new(); EXPERTS];
        for t in 0..tokens {
            let mut left: Vec<usize> = (0..EXPERTS).collect();
            for j in 0..TOP_K {
                chosen[left.swap_remove(rng.below(left.len()))].push((t * TOP_K + j) as u32);
            }
        }
        let most = chosen.iter().map(Vec::len).max().unwrap_or(0);
        let list = gpu.upload_u32(&chosen.concat());
        for format in [ExpertFormat::INT4, ExpertFormat::INT8, ExpertFormat::Bf16] {
            let layout = ExpertLayout::new(&spec, format);
            let pool =
                gpu.upload(&Experts::random(spec, format, 1, &mut rng).records.concat().repeat(EXPERTS));
            let mut first = 0;
            let items: Vec<_> = (0..EXPERTS)
                .map(|e| {
                    let count = chosen[e].len() as u32;
                    first += count;
                    DeviceItem {
                        src: pool.at + (e * layout.record_bytes) as u64,
                        first: first - count,
                        count,
                        ..DeviceItem::default()
                    }
                })
                .collect();
            let items_on = gpu.upload_items(&items);
            let items = Items {
                layout: &layout,
                items: items_on.at,
                len: EXPERTS,
                assignments: list.at,
                most,
                tokens,
            };
            let report = |how: &str, us: f64| {
                println!(
                    "{tokens:>5} tokens {:<9} {how}: {us:>8.0} us, {:>7.0} tok/s",
                    format.to_string(),
                    tokens as f64 / us / 48.0 * 1e6
                );
            };
            if tokens <= 512 {
                report(
                    "gemv",
                    time_graph(&gpu, || layer(&gpu, &gpu.kernels, &scratch, items, tokens, "all")),
                );
            }
            let tiles = GemmTile::of(chosen.iter().map(|c| c.len() as u32));
            let tiles_on = gpu.upload_tiles(&tiles);
            let items = GemmItems {
                layout: &layout,
                items: items_on.at,
                assignments: list.at,
                tiles: tiles_on.at,
                len: tiles.len(),
            };
            let gate_up = GemmGateUpArgs {
                items,
                activation: Activation::Silu,
                x: scratch.x.at,
                per_row: TOP_K,
                h: scratch.h.at,
            };
            let down = GemmDownArgs { items, h: scratch.h.at, partial: scratch.partial.at };
            for (which, how) in [(0, "gemm"), (1, "  gate_up"), (2, "  down"), (3, "  combine")] {
                let us = time_graph(&gpu, || {
                    // SAFETY: as in `layer`.
                    unsafe {
                        if which < 2 {
                            gpu.kernels.gemm_gate_up(&gpu.stream, &gate_up).expect("gemm_gate_up");
                        }
                        if which % 2 == 0 {
                            gpu.kernels.gemm_down(&gpu.stream, &down).expect("gemm_down");
                        }
                        if which % 3 == 0 {
                            gpu.kernels.combine(&gpu.stream, &scratch.combine(tokens)).expect("combine");
                        }
                    }
                });
                report(how, us);
            }
        }
    }
}
