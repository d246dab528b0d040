//! GGUF files as models: comoe-tiny and the fixtures of every architecture that is read, written as llama.cpp's
//! conversion writes them and read back. Tokens, template and logits must be those of the safetensors folder, bit for
//! bit.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use candle_core::Device;
use comoe_core::ExpertFormat;
use comoe_core::store::{ARCHITECTURES, Checkpoint};
use comoe_models::{Decoder, GenerateOptions, LoadOptions, Message, Model, ModelPlan, Rows, Target};
use half::{bf16, f16};
use serde_json::Value;

#[path = "../../comoe-core/src/store/gguf/writer.rs"]
#[allow(dead_code, reason = "shared with comoe-core's tests, which use more of it")]
mod writer;
use writer::Writer;

fn crate_path(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn read_json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// A BF16 tensor of a safetensors model.
#[derive(Clone)]
struct Tensor {
    shape: Vec<usize>,
    values: Vec<bf16>,
}

fn tensors(folder: &Path) -> BTreeMap<String, Tensor> {
    let checkpoint = Checkpoint::open(&[folder]).unwrap();
    let read = |name: &str| {
        let view = checkpoint.tensor(name).unwrap();
        let values = view.bytes.as_chunks::<2>().0.iter().map(|b| bf16::from_le_bytes(*b)).collect();
        (name.to_owned(), Tensor { shape: view.shape.to_vec(), values })
    };
    checkpoint.names().map(read).collect()
}

/// How experts are written.
#[derive(Clone, Copy, PartialEq)]
enum Experts {
    Bf16,
    Q8_0,
}

fn f32_bytes(values: &[bf16]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_f32().to_le_bytes()).collect()
}

/// Blocks of 32 as llama.cpp's `quantize_row_q8_0` makes them, and what they decode to.
fn q8_0(values: &[bf16]) -> (Vec<u8>, Vec<f32>) {
    let (mut bytes, mut decoded) = (Vec::new(), Vec::new());
    for block in values.chunks(32) {
        let most = block.iter().fold(0f32, |m, v| m.max(v.to_f32().abs()));
        let d = f16::from_f32(most / 127.0);
        bytes.extend(d.to_le_bytes());
        for v in block {
            let q = if most == 0.0 { 0 } else { (v.to_f32() * (127.0 / most)).round() as i8 };
            bytes.push(q as u8);
            decoded.push(d.to_f32() * f32::from(q));
        }
    }
    (bytes, decoded)
}

/// The names of llama.cpp for dense tensors below a layer.
const NAMES: [(&str, &str); 26] = [
    ("input_layernorm.weight", "attn_norm.weight"),
    ("self_attn.q_proj.", "attn_q."),
    ("self_attn.k_proj.", "attn_k."),
    ("self_attn.v_proj.", "attn_v."),
    ("self_attn.o_proj.", "attn_output."),
    ("self_attn.q_norm.", "attn_q_norm."),
    ("self_attn.k_norm.", "attn_k_norm."),
    ("self_attn.q_a_proj.", "attn_q_a."),
    ("self_attn.q_a_layernorm.", "attn_q_a_norm."),
    ("self_attn.q_b_proj.", "attn_q_b."),
    ("self_attn.kv_a_proj_with_mqa.", "attn_kv_a_mqa."),
    ("self_attn.kv_a_layernorm.", "attn_kv_a_norm."),
    ("self_attn.kv_b_proj.", "attn_kv_b."),
    ("self_attn.sinks", "attn_sinks.weight"),
    ("mlp.gate.e_score_correction_bias", "exp_probs_b.bias"),
    ("block_sparse_moe.e_score_correction_bias", "exp_probs_b.bias"),
    ("mlp.gate.", "ffn_gate_inp."),
    ("mlp.router.", "ffn_gate_inp."),
    ("block_sparse_moe.gate.", "ffn_gate_inp."),
    ("mlp.shared_expert_gate.", "ffn_gate_inp_shexp."),
    ("mlp.shared_expert.", "shexp"),
    ("mlp.shared_experts.", "shexp"),
    ("mlp.gate_proj.", "ffn_gate."),
    ("mlp.up_proj.", "ffn_up."),
    ("mlp.down_proj.", "ffn_down."),
    ("post_attention_layernorm.weight", "ffn_norm.weight"),
];

fn dense_name(rest: &str, architecture: &str) -> String {
    let (hub, gguf) = NAMES.iter().find(|(hub, _)| rest.starts_with(hub)).unwrap_or_else(|| panic!("{rest}"));
    match *gguf {
        "ffn_norm.weight" if matches!(architecture, "gpt-oss" | "glm4moe") => {
            "post_attention_norm.weight".to_owned()
        }
        "shexp" => {
            let part = rest[hub.len()..].split('_').next().unwrap();
            format!("ffn_{part}_shexp.weight")
        }
        gguf => format!("{gguf}{}", &rest[hub.len()..]),
    }
}

/// Adds a dense tensor: vectors and routers in F32, matrices in BF16.
fn dense(writer: Writer, name: &str, t: &Tensor) -> Writer {
    if t.shape.len() == 1 || name.contains("ffn_gate_inp") {
        let shape = if name.contains("inp_shexp") { &t.shape[1..] } else { &t.shape[..] };
        return writer.tensor(name, shape, 0, f32_bytes(&t.values));
    }
    writer.tensor(name, &t.shape, 30, t.values.iter().flat_map(|v| v.to_le_bytes()).collect())
}

/// Rows of q or k in the order of paired rotation, as `LlamaModel.permute` of llama.cpp's conversion has them.
fn paired(t: &Tensor, heads: usize) -> Tensor {
    let (cols, width) = (t.shape[1], t.shape[0] / heads);
    let row = |r: usize| &t.values[r * cols..][..cols];
    let order =
        (0..heads).flat_map(|h| (0..width / 2).flat_map(move |i| [h * width + i, h * width + width / 2 + i]));
    Tensor { shape: t.shape.clone(), values: order.flat_map(row).copied().collect() }
}

/// The model in `folder` as a GGUF file.
fn gguf(mut writer: Writer, architecture: &str, folder: &Path, config: &Value, experts: Experts) -> Writer {
    let mut stacks: BTreeMap<String, BTreeMap<usize, Tensor>> = BTreeMap::new();
    let number = |field: &str| config[field].as_u64().unwrap() as usize;
    for (name, t) in tensors(folder) {
        match name.as_str() {
            "model.embed_tokens.weight" => writer = dense(writer, "token_embd.weight", &t),
            "model.norm.weight" => writer = dense(writer, "output_norm.weight", &t),
            "lm_head.weight" => writer = dense(writer, "output.weight", &t),
            _ => {
                let (layer, rest) = name.strip_prefix("model.layers.").unwrap().split_once('.').unwrap();
                let prefix = format!("blk.{layer}.");
                if let Some((_, of)) = rest.split_once("experts.").filter(|(f, _)| !f.contains("shared")) {
                    if let Some(part) = of.strip_prefix("gate_up_proj") {
                        // [E, H, 2I] or [E, 2I], gate and up in turn.
                        let ([e, wide], hidden) = match *t.shape {
                            [e, h, wide] => ([e, wide], h),
                            [e, wide] => ([e, wide], 1),
                            _ => unreachable!(),
                        };
                        for (which, part_name) in ["gate", "up"].into_iter().enumerate() {
                            for x in 0..e {
                                let at =
                                    |r: usize, c: usize| t.values[(x * hidden + c) * wide + 2 * r + which];
                                let values = (0..wide / 2).flat_map(|r| (0..hidden).map(move |c| (r, c)));
                                let values: Vec<bf16> = values.map(|(r, c)| at(r, c)).collect();
                                let (kind, shape) = match part {
                                    "" => ("weight", vec![wide / 2, hidden]),
                                    _ => ("bias", vec![wide / 2]),
                                };
                                let key = format!("{prefix}ffn_{part_name}_exps.{kind}");
                                stacks.entry(key).or_default().insert(x, Tensor { shape, values });
                            }
                        }
                        continue;
                    }
                    if let Some(part) = of.strip_prefix("down_proj") {
                        for x in 0..t.shape[0] {
                            let size: usize = t.shape[1..].iter().product();
                            let all = &t.values[x * size..][..size];
                            let (kind, shape, values) = match *t.shape {
                                [_, i, h] => {
                                    let values = (0..h).flat_map(|r| (0..i).map(move |c| all[c * h + r]));
                                    ("weight", vec![h, i], values.collect())
                                }
                                _ => ("bias", vec![size], all.to_vec()),
                            };
                            let key = format!("{prefix}ffn_down_exps.{kind}");
                            stacks.entry(key).or_default().insert(x, Tensor { shape, values });
                        }
                        assert!(matches!(part, "" | "_bias"));
                        continue;
                    }
                    let mut parts = of.split('.');
                    let expert: usize = parts.next().unwrap().parse().unwrap();
                    let part = match parts.next().unwrap() {
                        "gate_proj" | "w1" => "gate",
                        "up_proj" | "w3" => "up",
                        _ => "down",
                    };
                    stacks.entry(format!("{prefix}ffn_{part}_exps.weight")).or_default().insert(expert, t);
                    continue;
                }
                let hub = dense_name(rest, architecture);
                let t = match (architecture, hub.as_str()) {
                    ("llama", "attn_q.weight") => paired(&t, number("num_attention_heads")),
                    ("llama", "attn_k.weight") => paired(&t, number("num_key_value_heads")),
                    _ => t,
                };
                if hub == "attn_kv_b.weight" && config["model_type"] == "deepseek_v3" {
                    // As newer conversions split it: keys transposed, per head.
                    let (nope, value, latent) =
                        (number("qk_nope_head_dim"), number("v_head_dim"), number("kv_lora_rank"));
                    let heads = number("num_attention_heads");
                    let at = |h: usize, r: usize, c: usize| t.values[(h * (nope + value) + r) * latent + c];
                    let (mut keys, mut values) = (Vec::new(), Vec::new());
                    for h in 0..heads {
                        (0..latent).for_each(|c| keys.extend((0..nope).map(|r| at(h, r, c))));
                        (nope..nope + value).for_each(|r| values.extend((0..latent).map(|c| at(h, r, c))));
                    }
                    let keys = Tensor { shape: vec![heads, latent, nope], values: keys };
                    let values = Tensor { shape: vec![heads, value, latent], values };
                    writer = dense(writer, &format!("{prefix}attn_k_b.weight"), &keys);
                    writer = dense(writer, &format!("{prefix}attn_v_b.weight"), &values);
                    continue;
                }
                writer = dense(writer, &format!("{prefix}{hub}"), &t);
            }
        }
    }
    for (name, stack) in stacks {
        let shape: Vec<usize> = [&[stack.len()], &stack[&0].shape[..]].concat();
        let values: Vec<bf16> = stack.into_values().flat_map(|t| t.values).collect();
        writer = match (name.ends_with("bias"), experts) {
            (true, _) => writer.tensor(&name, &shape, 0, f32_bytes(&values)),
            (false, Experts::Bf16) => {
                writer.tensor(&name, &shape, 30, values.iter().flat_map(|v| v.to_le_bytes()).collect())
            }
            (false, Experts::Q8_0) => writer.tensor(&name, &shape, 8, q8_0(&values).0),
        };
    }
    writer
}

/// The metadata that llama.cpp's conversion writes, of fields of `config.json`.
fn metadata(architecture: &str, config: &Value) -> Writer {
    let mut w = Writer::new(architecture);
    let rope = if config["rope_parameters"].is_null() { config } else { &config["rope_parameters"] };
    let key = |name: &str| format!("{architecture}.{name}");
    let number = |field: &str| config[field].as_u64().map(|n| n as u32);
    for (name, fields) in [
        ("block_count", &["num_hidden_layers"][..]),
        ("embedding_length", &["hidden_size"]),
        ("context_length", &["max_position_embeddings"]),
        ("feed_forward_length", &["intermediate_size"]),
        ("attention.head_count", &["num_attention_heads"]),
        ("attention.head_count_kv", &["num_key_value_heads"]),
        ("expert_count", &["num_experts", "num_local_experts", "n_routed_experts"]),
        ("expert_used_count", &["num_experts_per_tok"]),
        ("expert_shared_count", &["n_shared_experts"]),
        ("leading_dense_block_count", &["first_k_dense_replace"]),
        ("expert_group_count", &["n_group"]),
        ("expert_group_used_count", &["topk_group"]),
        ("attention.sliding_window", &["sliding_window"]),
        ("attention.q_lora_rank", &["q_lora_rank"]),
        ("attention.kv_lora_rank", &["kv_lora_rank"]),
    ] {
        if let Some(n) = fields.iter().find_map(|f| number(f)) {
            w = w.number(&key(name), n);
        }
    }
    for (name, value) in [
        ("attention.layer_norm_rms_epsilon", &config["rms_norm_eps"]),
        ("rope.freq_base", &rope["rope_theta"]),
        ("expert_weights_scale", &config["routed_scaling_factor"]),
        ("attention.clamp_kqv", &config["clip_qkv"]),
    ] {
        if let Some(v) = value.as_f64() {
            w = w.float(&key(name), v as f32);
        }
    }
    if config["n_routed_experts"].is_u64() {
        w = w.truth(&key("expert_weights_norm"), config["norm_topk_prob"] == true);
    }
    if rope["rope_type"] == "yarn" {
        w = w.text(&key("rope.scaling.type"), "yarn");
        w = w.float(&key("rope.scaling.factor"), rope["factor"].as_f64().unwrap() as f32);
        let original = rope["original_max_position_embeddings"].as_u64().unwrap();
        w = w.number(&key("rope.scaling.original_context_length"), original as u32);
        if let Some(all) = rope["mscale_all_dim"].as_f64() {
            w = w.float(&key("rope.scaling.yarn_log_multiplier"), (0.1 * all) as f32);
        }
    }
    if let Some(rotated) = number("qk_rope_head_dim") {
        let nope = number("qk_nope_head_dim").unwrap();
        let value = number("v_head_dim").unwrap();
        w = w.number(&key("rope.dimension_count"), rotated);
        let v3 = config["model_type"] == "deepseek_v3";
        if v3 {
            // Newer files: one key head, the latent and its rotated part.
            let latent = number("kv_lora_rank").unwrap();
            w = w.number(&key("attention.key_length"), latent + rotated);
            w = w.number(&key("attention.value_length"), latent);
            w = w.number(&key("attention.key_length_mla"), nope + rotated);
            w = w.number(&key("attention.value_length_mla"), value);
            w = w.number(&key("expert_gating_func"), 2);
        } else {
            w = w.number(&key("attention.key_length"), nope + rotated);
            w = w.number(&key("attention.value_length"), value);
        }
    } else if let Some(head) = number("head_dim") {
        w = w.number(&key("attention.key_length"), head).number(&key("attention.value_length"), head);
        let partial = rope["partial_rotary_factor"].as_f64().unwrap_or(1.0);
        w = w.number(&key("rope.dimension_count"), (f64::from(head) * partial) as u32);
    }
    w
}

fn tokenizer(mut w: Writer, folder: &Path, pre: &str) -> Writer {
    let json = read_json(&folder.join("tokenizer.json"));
    let vocab = json["model"]["vocab"].as_object().unwrap();
    let mut tokens = vec![String::new(); vocab.len()];
    vocab.iter().for_each(|(t, id)| tokens[id.as_u64().unwrap() as usize] = t.clone());
    let mut kinds = vec![1; tokens.len()];
    json["added_tokens"]
        .as_array()
        .unwrap()
        .iter()
        .for_each(|t| kinds[t["id"].as_u64().unwrap() as usize] = 3);
    let join = |m: &Value| format!("{} {}", m[0].as_str().unwrap(), m[1].as_str().unwrap());
    let merges: Vec<String> = json["model"]["merges"].as_array().unwrap().iter().map(join).collect();
    w = w.text("tokenizer.ggml.model", "gpt2").text("tokenizer.ggml.pre", pre);
    w = w.texts("tokenizer.ggml.tokens", &tokens).integers("tokenizer.ggml.token_type", &kinds);
    w = w.texts("tokenizer.ggml.merges", &merges);
    w = w.number("tokenizer.ggml.eos_token_id", 2).number("tokenizer.ggml.eot_token_id", 0);
    let template =
        read_json(&folder.join("tokenizer_config.json"))["chat_template"].as_str().unwrap().to_owned();
    w.text("tokenizer.chat_template", &template)
}

fn tiny() -> PathBuf {
    crate_path("../assets/comoe-tiny")
}

fn tiny_gguf(experts: Experts) -> Writer {
    let config = read_json(&tiny().join("config.json"));
    let w = tokenizer(metadata("qwen3moe", &config), &tiny(), "smollm");
    gguf(w, "qwen3moe", &tiny(), &config, experts)
}

fn load(path: &Path, options: &LoadOptions) -> Model {
    Model::load(path, &Device::Cpu, options, &|_| {}).unwrap()
}

fn bits(decoder: &Decoder, ids: &[u32]) -> Vec<u32> {
    let mut kv = decoder.new_kv().unwrap();
    let logits = decoder.forward(ids, &mut kv, Rows::All).unwrap().flatten_all().unwrap();
    logits.to_vec1::<f32>().unwrap().into_iter().map(f32::to_bits).collect()
}

#[test]
fn comoe_tiny_is_the_same_model_as_a_gguf_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    tiny_gguf(Experts::Bf16).write(&path);
    let options = LoadOptions { context: Some(128), ..LoadOptions::default() };
    let (ours, theirs) = (load(&path, &options), load(&tiny(), &options));
    assert_eq!(ours.experts().format(), ExpertFormat::Bf16);
    for text in [
        "What is 384 minus 127?",
        "  Tabs\tand\nlines, it's 12:05  ",
        "<|im_start|>user\nx<|im_end|>",
        "naïve 中央 😀",
    ] {
        let ids = theirs.tokenizer().encode(text, true).unwrap();
        assert_eq!(ours.tokenizer().encode(text, true).unwrap(), ids, "{text:?}");
        assert_eq!(ours.tokenizer().decode(&ids).unwrap(), theirs.tokenizer().decode(&ids).unwrap());
        assert!(bits(ours.decoder(), &ids) == bits(theirs.decoder(), &ids), "{text:?}");
    }
    assert_eq!(ours.stop_tokens(), theirs.stop_tokens());
    let messages = [Message::system("Be brief."), Message::user("Hello")];
    let render = |m: &Model| m.template().unwrap().render(&messages, true).unwrap();
    assert_eq!(render(&ours), render(&theirs));
    let ask = |model: &Model| {
        let options = GenerateOptions { max_tokens: Some(40), ..GenerateOptions::default() };
        let mut chat = model.conversation(None).unwrap();
        chat.say("What is 17 plus 25?", &options, &mut |_| ControlFlow::Continue(())).unwrap().generation
    };
    let (a, b) = (ask(&ours), ask(&theirs));
    assert!(a.text.contains("42"), "{}", a.text);
    assert_eq!((a.text, a.tokens), (b.text, b.tokens));
}

#[test]
fn q8_0_experts_are_int8_records_of_the_same_numbers() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    tiny_gguf(Experts::Q8_0).write(&path);
    // The same model as a folder whose experts are what the blocks decode to, converted by our own quantiser.
    let decoded = folder.path().join("decoded");
    std::fs::create_dir(&decoded).unwrap();
    for name in ["config.json", "tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(tiny().join(name), decoded.join(name)).unwrap();
    }
    let bytes: BTreeMap<String, (Vec<usize>, safetensors::Dtype, Vec<u8>)> = tensors(&tiny())
        .into_iter()
        .map(|(name, t)| match name.contains(".experts.") {
            true => {
                let values = q8_0(&t.values).1.into_iter().flat_map(f32::to_le_bytes).collect();
                (name, (t.shape, safetensors::Dtype::F32, values))
            }
            false => {
                let values = t.values.iter().flat_map(|v| v.to_le_bytes()).collect();
                (name, (t.shape, safetensors::Dtype::BF16, values))
            }
        })
        .collect();
    let views = bytes.iter().map(|(name, (shape, dtype, bytes))| {
        (name, safetensors::tensor::TensorView::new(*dtype, shape.clone(), bytes).unwrap())
    });
    safetensors::serialize_to_file(views, None, &decoded.join("model.safetensors")).unwrap();
    let int8 = ExpertFormat::Int8 { group: 32 };
    let options = LoadOptions { context: Some(64), ..LoadOptions::default() };
    let ours = load(&path, &options);
    let theirs = load(&decoded, &LoadOptions { format: Some(int8), ..options });
    assert_eq!((ours.experts().format(), theirs.experts().format()), (int8, int8));
    assert!(ours.decoder().notes().iter().any(|n| n.contains("Q8_0")), "{:?}", ours.decoder().notes());
    let ids = ours.tokenizer().encode("What is 384 minus 127?", false).unwrap();
    assert!(bits(ours.decoder(), &ids) == bits(theirs.decoder(), &ids));
}

/// The fixture of each architecture, and what GGUF files do not say of its features.
const FAMILIES: [(&str, &str, &str); 10] = [
    ("qwen3moe", "qwen3_moe", "{}"),
    ("qwen2moe", "qwen2_moe", "{}"),
    ("llama", "mixtral", r#"{"sliding_window": null}"#),
    ("olmoe", "olmoe", "{}"),
    ("gpt-oss", "gpt_oss", r#"{"swiglu_limit": 7.0}"#),
    ("deepseek2", "deepseek_v2", r#"{"rope_parameters": {"mscale": 0.707}}"#),
    ("deepseek2", "deepseek_v3", "{}"),
    ("glm4moe", "glm4_moe", "{}"),
    ("dots1", "dots1", r#"{"layer_types": null, "sliding_window": null, "max_window_layers": 28}"#),
    ("minimax-m2", "minimax_m2", "{}"),
];

#[test]
fn every_architecture_gives_the_logits_of_its_safetensors_folder() {
    for architecture in ARCHITECTURES {
        assert!(FAMILIES.iter().any(|f| f.0 == architecture), "{architecture} is not tested");
    }
    for (architecture, fixture, changes) in FAMILIES {
        let source = crate_path("tests/fixtures").join(fixture);
        let mut config = read_json(&source.join("config.json"));
        let changes: Value = serde_json::from_str(changes).unwrap();
        for (field, value) in changes.as_object().unwrap() {
            match value {
                Value::Object(inner) => inner.iter().for_each(|(k, v)| config[field][k] = v.clone()),
                value => config[field] = value.clone(),
            }
        }
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("folder");
        std::fs::create_dir(&folder).unwrap();
        std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
        std::fs::copy(source.join("model.safetensors"), folder.join("model.safetensors")).unwrap();
        let path = dir.path().join("model.gguf");
        gguf(metadata(architecture, &config), architecture, &source, &config, Experts::Bf16).write(&path);
        let open = |path: &Path| {
            let decoder = Decoder::open(path, &Device::Cpu, &LoadOptions::default(), &|_| {});
            decoder.unwrap_or_else(|e| panic!("{fixture}: {e}"))
        };
        let (ours, theirs) = (open(&path), open(&folder));
        let ids: Vec<u32> = (0..24).map(|i| (i * 37 + 11) % 96).collect();
        assert!(bits(&ours, &ids) == bits(&theirs, &ids), "{fixture}");
        let (options, target) = (LoadOptions::default(), Target { on_gpu: false, batch: 1 });
        let planned = ModelPlan::open(&path, target, &options).unwrap();
        let loaded = ours.memory_plan().unwrap();
        let room = options.cache.room(&Device::Cpu).unwrap().unwrap();
        assert_eq!(planned.memory(&room, &options.cache).unwrap().device, loaded.device, "{fixture}");
    }
}

#[test]
fn what_a_file_lacks_is_said() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    let config = read_json(&tiny().join("config.json"));
    let refused = |w: Writer| {
        w.write(&path);
        Model::load(&path, &Device::Cpu, &LoadOptions::default(), &|_| {}).err().unwrap().to_string()
    };
    let base = || metadata("qwen3moe", &config);
    // The router makes layer 0 one with experts.
    let routed = || {
        let w = base().tensor("blk.0.ffn_gate_inp.weight", &[16, 1], 0, vec![0; 64]);
        w.tensor("blk.0.ffn_gate_exps.weight", &[16, 128, 1], 0, vec![0; 4 * 16 * 128])
    };
    for (w, parts) in [
        (Writer::new("gemma3"), &["gemma3", "block_count"][..]),
        (base(), &["moe_intermediate_size"]),
        (routed(), &["vocab_size"]),
        (routed().tensor("token_embd.weight", &[8, 1], 0, vec![0; 32]), &["tokenizer.ggml.tokens"]),
    ] {
        let text = refused(w);
        assert!(parts.iter().all(|p| text.contains(p)), "{parts:?}: {text}");
    }
    let unknown = tokenizer(base(), &tiny(), "mystery");
    let text = refused(gguf(unknown, "qwen3moe", &tiny(), &config, Experts::Bf16));
    assert!(text.contains("\"mystery\"") && text.contains("llama-bpe"), "{text}");
    let text = refused(tiny_gguf(Experts::Bf16).text("qwen3moe.rope.scaling.type", "longrope"));
    assert!(text.contains("longrope") && text.contains("yarn"), "{text}");
}
