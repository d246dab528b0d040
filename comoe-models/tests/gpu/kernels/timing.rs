//! How long each kernel takes at the shapes of Qwen3-30B-A3B, in a graph over 48 layers' worth of weights, which no
//! cache holds. Prints one line each: us a launch (a pair of launches for attention), and GB/s of weights or keys and
//! values read.

use candle_core::DType;
use comoe_core::Activation;
use comoe_models::arch::{Mask, Pairing, RouterPlan};
use comoe_models::cuda::{
    AttendArgs, DecodeKernels, EmbedArgs, GateArgs, GemvArgs, GemvWeight, HeadNormArgs, HeadsArgs,
    Int8Layout, KvRows, NormArgs, RopeArgs, RouteArgs, SampleArgs, SampleSettings,
};
use comoe_models::{KvFormat, SamplerOptions};
use cudarc::driver::sys;

use super::{GPU, Memory, random};

const LAYERS: usize = 48;
const HIDDEN: usize = 2048;
const HEADS: usize = 32;
const KV_HEADS: usize = 4;
const HEAD_DIM: usize = 128;
const VOCAB: usize = 151_936;
const EXPERTS: usize = 128;
const QKV: usize = (HEADS + 2 * KV_HEADS) * HEAD_DIM;
const DTYPE: DType = DType::BF16;

/// Captures what `enqueue` does and prints how long one of its `launches` takes when the graph runs.
fn time(what: &str, launches: usize, bytes: usize, enqueue: impl Fn(&DecodeKernels)) {
    let stream = &GPU.stream;
    // What is loaded at first use cannot be loaded while capturing.
    enqueue(&GPU.kernels);
    stream.synchronize().expect("kernels ran");
    stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED).expect("capture");
    enqueue(&GPU.kernels);
    let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    let graph = stream.end_capture(flags).expect("a graph").expect("not empty");
    let event = || {
        let flags = Some(sys::CUevent_flags::CU_EVENT_DEFAULT);
        stream.record_event(flags).expect("an event")
    };
    for _ in 0..3 {
        graph.launch().expect("launch");
    }
    let rounds = 10;
    let before = event();
    for _ in 0..rounds {
        graph.launch().expect("launch");
    }
    let after = event();
    let us = f64::from(before.elapsed_ms(&after).expect("time")) * 1e3 / (rounds * launches) as f64;
    let rate = if bytes > 0 { format!("{:7.0} GB/s", bytes as f64 / us / 1e3) } else { String::new() };
    println!("{what:48} {us:8.2} us {rate}");
}

/// Memory whose bytes are small BF16 numbers, INT8 numbers alike.
fn filled(bytes: usize) -> Memory {
    let slice = GPU.stream.alloc_zeros::<u8>(bytes).expect("memory");
    let memory = Memory { slice, bytes: 0 };
    // SAFETY: the memory is `bytes` long.
    unsafe { sys::cuMemsetD8Async(memory.address(), 0x3c, bytes, GPU.stream.cu_stream()) }
        .result()
        .expect("memset");
    memory
}

/// The dense part of a layer: `[outputs, inputs]` in one of the formats.
fn weight(memory: &Memory, layer: usize, outputs: usize, inputs: usize, int8: bool) -> GemvWeight {
    if int8 {
        let layout = Int8Layout::new(outputs, inputs);
        let weights = memory.address() + (layer * layout.bytes) as u64;
        return GemvWeight::Int8 { weights, scales: weights + layout.scales as u64 };
    }
    GemvWeight::Dense { data: memory.address() + (layer * outputs * inputs * 2) as u64, dtype: DTYPE }
}

fn weight_bytes(outputs: usize, inputs: usize, int8: bool) -> usize {
    if int8 { Int8Layout::new(outputs, inputs).bytes } else { outputs * inputs * 2 }
}

fn gemv_args(
    x: &Memory,
    weight: GemvWeight,
    y: &Memory,
    tokens: usize,
    outputs: usize,
    inputs: usize,
) -> GemvArgs {
    GemvArgs {
        x: x.address(),
        x_dtype: DTYPE,
        weight,
        bias: 0,
        y: y.address(),
        y_dtype: DTYPE,
        tokens,
        inputs,
        outputs,
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn dense_kernels() {
    let (x, y) = (filled(32 * 4096 * 2), filled(32 * VOCAB * 2));
    for (name, outputs, inputs, layers) in [
        ("router", EXPERTS, HIDDEN, LAYERS),
        ("qkv", QKV, HIDDEN, LAYERS),
        ("out", HIDDEN, HEADS * HEAD_DIM, LAYERS),
        ("head", VOCAB, HIDDEN, 2),
    ] {
        for int8 in [false, true] {
            let bytes = weight_bytes(outputs, inputs, int8);
            let memory = filled(layers * bytes);
            for tokens in [1, 2, 4, 8, 16] {
                let what = format!("gemv {name} {outputs}x{inputs} int8 {int8}, {tokens} tokens");
                time(&what, layers, bytes, |k| {
                    for layer in 0..layers {
                        let w = weight(&memory, layer, outputs, inputs, int8);
                        let args = gemv_args(&x, w, &y, tokens, outputs, inputs);
                        // SAFETY: every buffer is long enough and lives until `time` has waited.
                        unsafe { k.gemv(&GPU.stream, &args) }.expect("gemv");
                    }
                });
            }
        }
    }
    let norm = |k: &DecodeKernels| {
        let args = NormArgs {
            x: x.address(),
            delta: y.address(),
            sum: x.address(),
            weight: x.address(),
            normed: y.address(),
            ..NormArgs::rms(1, HIDDEN, DTYPE, 1e-6)
        };
        // SAFETY: as above.
        unsafe { k.add_norm(&GPU.stream, &args) }.expect("add_norm");
    };
    time("add_norm 2048", LAYERS, 0, |k| (0..LAYERS).for_each(|_| norm(k)));
    time("gate 768", LAYERS, 0, |k| {
        for _ in 0..LAYERS {
            let (x, y, activation) = (x.address(), y.address(), Activation::Silu);
            let args = GateArgs { x, y, activation, tokens: 1, width: 768, dtype: DTYPE };
            // SAFETY: as above.
            unsafe { k.gate(&GPU.stream, &args) }.expect("gate");
        }
    });
    let (ids, error) = (Memory::words(&[7]), Memory::zeros(4));
    time("embed 2048", LAYERS, 0, |k| {
        for _ in 0..LAYERS {
            let args = EmbedArgs {
                ids: ids.address(),
                table: y.address(),
                scale: 1.0,
                out: x.address(),
                tokens: 1,
                vocab: 8,
                width: HIDDEN,
                dtype: DTYPE,
                error: error.address(),
            };
            // SAFETY: as above.
            unsafe { k.embed(&GPU.stream, &args) }.expect("embed");
        }
    });
    let (logits, weights) = (Memory::floats(&random(EXPERTS, 1, DTYPE), DTYPE), Memory::zeros(64));
    time("route 128 top-8", LAYERS, 0, |k| {
        for _ in 0..LAYERS {
            // SAFETY: as above.
            unsafe { k.route(&GPU.stream, &route_args(&logits, &y.address(), &weights, &error)) }
                .expect("route");
        }
    });
}

fn route_args(logits: &Memory, ids: &u64, weights: &Memory, error: &Memory) -> RouteArgs {
    RouteArgs {
        logits: logits.address(),
        logits_dtype: DTYPE,
        model_dtype: DTYPE,
        choice_bias: 0,
        expert_scale: 0,
        tokens: 1,
        experts: EXPERTS,
        plan: RouterPlan::softmax(8, true),
        ids: *ids,
        weights: weights.address(),
        given: None,
        error: error.address(),
    }
}

fn element_bytes(format: KvFormat) -> usize {
    if format == KvFormat::Int8 { 1 } else { DTYPE.size_in_bytes() }
}

/// A layer's cache in one allocation for all layers.
struct Caches {
    data: Memory,
    scales: Memory,
    capacity: usize,
    format: KvFormat,
}

impl Caches {
    fn new(layers: usize, capacity: usize, format: KvFormat) -> Self {
        let rows = layers * 2 * KV_HEADS * capacity;
        let data = filled(rows * HEAD_DIM * element_bytes(format));
        Self { data, scales: filled(rows * 2), capacity, format }
    }

    fn rows(&self, layer: usize, values: bool) -> KvRows {
        let which = (2 * layer + usize::from(values)) * KV_HEADS * self.capacity;
        let data = self.data.address() + (which * HEAD_DIM * element_bytes(self.format)) as u64;
        KvRows::dense(data, self.scales.address() + (2 * which) as u64, self.capacity, HEAD_DIM)
    }

    fn attend(
        &self,
        layer: usize,
        q: &Memory,
        position: &Memory,
        out: &Memory,
        workspace: &Memory,
    ) -> AttendArgs {
        AttendArgs {
            q: q.address(),
            dtype: DTYPE,
            k: self.rows(layer, false),
            v: self.rows(layer, true),
            cache: self.format,
            capacity: self.capacity,
            reach: self.capacity,
            tokens: 1,
            heads: HEADS,
            kv_heads: KV_HEADS,
            key_width: HEAD_DIM,
            value_width: HEAD_DIM,
            mask: Mask::Causal,
            sinks: 0,
            scale: 0.088,
            position: position.address(),
            out: out.address(),
            workspace: workspace.address(),
            error: out.address() + 65_536,
        }
    }

    fn split(&self, layer: usize, qkv: &Memory, position: &Memory, q: &Memory) -> HeadsArgs {
        HeadsArgs {
            qkv: qkv.address(),
            dtype: DTYPE,
            tokens: 1,
            heads: HEADS,
            kv_heads: KV_HEADS,
            head_dim: HEAD_DIM,
            norm: Some(HeadNormArgs {
                q_weight: qkv.address(),
                k_weight: qkv.address(),
                eps: 1e-6,
                after_rope: false,
            }),
            v_norm: None,
            clip: None,
            rope: Some(RopeArgs {
                cos: self.data.address(),
                sin: self.data.address(),
                rows: self.capacity,
                dim: HEAD_DIM,
                pairing: Pairing::Halves,
            }),
            temperature: None,
            values_are_keys: false,
            q: q.address(),
            k: self.rows(layer, false),
            v: self.rows(layer, true),
            cache: self.format,
            capacity: self.capacity,
            position: position.address(),
            error: q.address() + 65_536,
        }
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn attention() {
    let (qkv, q, out) = (filled(128 << 10), filled(128 << 10), filled(128 << 10));
    let workspace = filled(64 << 20);
    for (format, name) in [(KvFormat::Plain, "bf16"), (KvFormat::Int8, "int8")] {
        for (capacity, layers) in [(1024, LAYERS), (4096, LAYERS), (32_768, 8), (131_072, 4)] {
            let caches = Caches::new(layers, capacity, format);
            for length in [128, 1024, 4096, 32_768, 131_072] {
                if length > capacity || length < capacity / 32 && capacity > 4096 && length != 1024 {
                    continue;
                }
                let position = Memory::words(&[length as u32 - 1]);
                let bytes = 2 * KV_HEADS * length * HEAD_DIM * element_bytes(format);
                time(&format!("attend {name}, {length} of {capacity}"), layers, bytes, |k| {
                    for layer in 0..layers {
                        let args = caches.attend(layer, &q, &position, &out, &workspace);
                        // SAFETY: every buffer is long enough and lives until `time` has waited.
                        unsafe { k.attend(&GPU.stream, &args) }.expect("attend");
                    }
                });
            }
            if capacity == 4096 {
                let position = Memory::words(&[100]);
                time(&format!("split_norm_rope_append {name}"), layers, 0, |k| {
                    for layer in 0..layers {
                        let args = caches.split(layer, &qkv, &position, &q);
                        // SAFETY: as above.
                        unsafe { k.split_norm_rope_append(&GPU.stream, &args) }.expect("split");
                    }
                });
            }
        }
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn sampling() {
    let (uniforms, step, token) = (Memory::zeros(16), Memory::zeros(4), Memory::zeros(4));
    let (error, scratch) = (Memory::zeros(4), Memory::zeros(SampleArgs::SCRATCH_BYTES));
    let history = Memory::words(&[1; 8192]);
    let position = Memory::words(&[4000]);
    for dtype in [DType::BF16, DType::F32] {
        let logits: Vec<f32> = random(VOCAB, 1, DType::F32).iter().map(|l| l.powi(3) * 24.0).collect();
        let logits = Memory::floats(&logits, dtype);
        let o = || SamplerOptions { temperature: 0.7, ..SamplerOptions::default() };
        for (name, options) in [
            ("greedy", SamplerOptions::default()),
            ("temperature", o()),
            ("top-k 40", SamplerOptions { top_k: Some(40), ..o() }),
            ("top-p 0.9", SamplerOptions { top_p: 0.9, ..o() }),
            (
                "top-k 40, top-p 0.9, min-p 0.05",
                SamplerOptions { top_k: Some(40), top_p: 0.9, min_p: 0.05, ..o() },
            ),
            (
                "greedy, penalty over 4001",
                SamplerOptions { repetition_penalty: 1.1, ..SamplerOptions::default() },
            ),
        ] {
            let args = SampleArgs {
                logits: logits.address(),
                dtype,
                vocab: VOCAB,
                settings: SampleSettings { options, logit_scale: 1.0, logit_cap: None },
                history: history.address(),
                history_len: 8192,
                position: position.address(),
                ahead: 1,
                uniforms: uniforms.address(),
                uniforms_len: 1,
                step: step.address(),
                token: token.address(),
                scratch: scratch.address(),
                error: error.address(),
            };
            time(&format!("sample {dtype:?} {name}"), 16, 0, |k| {
                for _ in 0..16 {
                    // SAFETY: every buffer is long enough and lives until `time` has waited.
                    unsafe { k.sample(&GPU.stream, &args) }.expect("sample");
                }
            });
        }
    }
}

/// All that a layer has besides its experts, one kernel after the other as in a model.
#[test]
#[ignore = "needs a CUDA device"]
fn a_layer_without_its_experts() {
    for int8 in [false, true] {
        let inputs = [HIDDEN, HEADS * HEAD_DIM, HIDDEN];
        let outputs = [QKV, HIDDEN, EXPERTS];
        let weights: Vec<Memory> =
            (0..3).map(|i| filled(LAYERS * weight_bytes(outputs[i], inputs[i], int8))).collect();
        let bytes: usize = (0..3).map(|i| weight_bytes(outputs[i], inputs[i], int8)).sum();
        let [x, normed, qkv, q, attended, out, logits] = std::array::from_fn(|_| filled(128 << 10));
        let (ids, chosen, error, workspace) = (filled(64), filled(64), filled(64), filled(16 << 20));
        let format = if int8 { KvFormat::Int8 } else { KvFormat::Plain };
        let caches = Caches::new(LAYERS, 4096, format);
        let position = Memory::words(&[1000]);
        let norm = NormArgs {
            x: x.address(),
            delta: out.address(),
            sum: x.address(),
            weight: qkv.address(),
            normed: normed.address(),
            ..NormArgs::rms(1, HIDDEN, DTYPE, 1e-6)
        };
        time(&format!("a layer without experts, int8 {int8}"), LAYERS, bytes, |k| {
            for layer in 0..LAYERS {
                let w = |i: usize| weight(&weights[i], layer, outputs[i], inputs[i], int8);
                let gemv = |i: usize, from: &Memory, to: &Memory| {
                    let args = gemv_args(from, w(i), to, 1, outputs[i], inputs[i]);
                    // SAFETY: every buffer is long enough and lives until `time` has waited.
                    unsafe { k.gemv(&GPU.stream, &args) }.expect("gemv");
                };
                // SAFETY: as above.
                unsafe { k.add_norm(&GPU.stream, &norm) }.expect("add_norm");
                gemv(0, &normed, &qkv);
                let split = caches.split(layer, &qkv, &position, &q);
                let attend = caches.attend(layer, &q, &position, &attended, &workspace);
                // SAFETY: as above.
                unsafe {
                    k.split_norm_rope_append(&GPU.stream, &split).expect("split");
                    k.attend(&GPU.stream, &attend).expect("attend");
                }
                gemv(1, &attended, &out);
                // SAFETY: as above.
                unsafe { k.add_norm(&GPU.stream, &norm) }.expect("add_norm");
                gemv(2, &normed, &logits);
                let route = route_args(&logits, &ids.address(), &chosen, &error);
                // SAFETY: as above.
                unsafe { k.route(&GPU.stream, &route) }.expect("route");
            }
        });
    }
}
