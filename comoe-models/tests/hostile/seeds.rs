//! What the fuzz targets begin with: one small file for each thing that readers tell apart.

use std::path::Path;

use comoe_core::store::{Checkpoint, Dtype, ExpertStore, Naming, PackedTensor};
use comoe_core::trace::{Choice, Phase, Token, TraceBuilder, TraceInfo};
use comoe_core::{Activation, ExpertFormat, WeightOn};
use half::bf16;
use safetensors::tensor::TensorView;

#[path = "../../../comoe-core/src/store/gguf/writer.rs"]
#[allow(dead_code, reason = "shared with comoe-core's tests, which use more of it")]
mod writer;
use writer::Writer;

/// Target, name, bytes.
pub(crate) type Seed = (&'static str, String, Vec<u8>);

/// Sizes of the made-up experts.
const HIDDEN: usize = 4;
const WIDTH: usize = 2;
const EXPERTS: usize = 2;

pub(crate) fn all() -> Vec<Seed> {
    [checkpoints(), packed(), traces(), ggufs(), templates(), configs()].concat()
}

fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

fn read(path: &str) -> Vec<u8> {
    std::fs::read(root().join(path)).unwrap()
}

/// Numbers that every format holds.
fn bytes(dtype: Dtype, count: usize) -> Vec<u8> {
    let values = (0..count).map(|i| (i % 7) as f32 - 3.0);
    match dtype {
        Dtype::F32 => values.flat_map(f32::to_le_bytes).collect(),
        Dtype::F16 => values.flat_map(|v| half::f16::from_f32(v).to_le_bytes()).collect(),
        _ => values.flat_map(|v| bf16::from_f32(v).to_le_bytes()).collect(),
    }
}

fn shard(dtype: Dtype, tensors: &[(String, Vec<usize>)]) -> Vec<u8> {
    let data: Vec<Vec<u8>> = tensors.iter().map(|(_, shape)| bytes(dtype, shape.iter().product())).collect();
    let views = tensors
        .iter()
        .zip(&data)
        .map(|((name, shape), data)| (name, TensorView::new(dtype, shape.clone(), data).unwrap()));
    safetensors::serialize(views, None).unwrap()
}

/// One tensor an expert and matrix.
fn per_expert(prefix: &str, names: [&str; 3], biases: bool) -> Vec<(String, Vec<usize>)> {
    let mut tensors = vec![("model.norm.weight".to_owned(), vec![HIDDEN])];
    for expert in 0..EXPERTS {
        for (name, shape) in names.into_iter().zip([[WIDTH, HIDDEN], [WIDTH, HIDDEN], [HIDDEN, WIDTH]]) {
            let name = format!("model.layers.0.{prefix}.{expert}.{name}");
            tensors.push((format!("{name}.weight"), shape.to_vec()));
            if biases {
                tensors.push((format!("{name}.bias"), vec![shape[0]]));
            }
        }
    }
    tensors
}

fn stacked(names: [&str; 2], transposed: bool) -> Vec<(String, Vec<usize>)> {
    let shapes = match transposed {
        false => [[EXPERTS, 2 * WIDTH, HIDDEN], [EXPERTS, HIDDEN, WIDTH]],
        true => [[EXPERTS, HIDDEN, 2 * WIDTH], [EXPERTS, WIDTH, HIDDEN]],
    };
    let named = names.iter().zip(shapes);
    named.map(|(name, shape)| (format!("model.layers.0.{name}"), shape.to_vec())).collect()
}

const QWEN: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];

fn checkpoints() -> Vec<Seed> {
    let qwen = per_expert("mlp.experts", QWEN, false);
    let map: serde_json::Map<_, _> =
        qwen.iter().map(|(name, _)| (name.clone(), "a.safetensors".into())).collect();
    let index = serde_json::json!({"metadata": {"total_size": 1}, "weight_map": map}).to_string();
    let mut seeds = vec![
        ("indexed".to_owned(), [index.as_bytes(), &[0], &shard(Dtype::BF16, &qwen)].concat()),
        ("qwen".to_owned(), shard(Dtype::F16, &qwen)),
        ("biased".to_owned(), shard(Dtype::F32, &per_expert("mlp.experts", QWEN, true))),
        (
            "mixtral".to_owned(),
            shard(Dtype::F32, &per_expert("block_sparse_moe.experts", ["w1", "w3", "w2"], false)),
        ),
        (
            "granite".to_owned(),
            shard(
                Dtype::BF16,
                &stacked(
                    ["block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"],
                    false,
                ),
            ),
        ),
        (
            "stacked".to_owned(),
            shard(Dtype::BF16, &stacked(["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], true)),
        ),
    ];
    for kind in
        ["awq", "fp8_block", "fp8_channel", "fp8_tensor", "gptq", "gptq_shuffled", "packed", "packed_zero"]
    {
        let file = read(&format!("comoe-core/tests/fixtures/quantised/{kind}/model.safetensors"));
        seeds.push((kind.replace('_', "-"), file));
    }
    seeds.into_iter().map(|(name, bytes)| ("checkpoint", name, bytes)).collect()
}

fn packed() -> Vec<Seed> {
    let folder = tempfile::tempdir().unwrap();
    let made = folder.path().join("made.safetensors");
    std::fs::write(&made, shard(Dtype::BF16, &per_expert("mlp.experts", QWEN, true))).unwrap();
    let checkpoint = Checkpoint::open(&[&made]).unwrap();
    let mut seeds = Vec::new();
    for format in [ExpertFormat::Bf16, ExpertFormat::INT8, ExpertFormat::Int4 { group: 32 }] {
        let store = ExpertStore::open(&[&made], &Naming::auto()).unwrap();
        let store = store.with_activation(Activation::SwigluClamped { limit: 7.0, alpha: 1.7 });
        let norm =
            PackedTensor::weight("model.norm.weight", &checkpoint.tensor("model.norm.weight").unwrap());
        let tensors =
            vec![norm.unwrap(), PackedTensor::file("config.json", b"{\"model_type\": \"mixtral\"}")];
        let file = folder.path().join(format!("packed-{format}.safetensors"));
        store.with_weight_on(WeightOn::Input).pack(&file, format, tensors, None).unwrap();
        seeds.push(("packed", format.to_string(), std::fs::read(&file).unwrap()));
    }
    seeds
}

fn traces() -> Vec<Seed> {
    // Its directory cannot be made from here; that of a trace can.
    let text = "# route_trace v1\n# model=m arch=a n_layer=2 n_expert=4 n_expert_used=2\n\
                # layer=0 expert_bytes=512 dense_bytes=1\n# layer=1 expert_bytes=512 dense_bytes=1\n\
                turn,phase,step,layer,slot,expert,weight,residency,expert_bytes\n\
                0,0,0,0,0,1,0.5,0,512\n0,0,0,0,1,2,0.5,0,512\n0,0,0,1,0,3,0.75,0,512\n0,0,0,1,1,0,0.25,0,512\n\
                0,1,1,0,0,1,0.5,1,0\n0,1,1,0,1,3,0.5,0,512\n0,1,1,1,0,3,0.5,1,0\n0,1,1,1,1,2,0.5,0,512\n";
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("t");
    std::fs::write(&path, text).unwrap();
    let info = comoe_core::trace::Trace::open(&path).unwrap().info().clone();
    let made = |weights: bool, guesses: bool| {
        let mut builder = TraceBuilder::new(TraceInfo { ..info.clone() });
        for turn in 0..2 {
            for step in 0..3u32 {
                let phase = if step == 0 { Phase::Prompt } else { Phase::Decode };
                let experts = [[step % 4, (step + 1) % 4], [(step + 2) % 4, turn]];
                builder.token(Token { turn, phase }, |l| Choice {
                    experts: &experts[l],
                    weights: weights.then_some(&[0.75, 0.25]),
                    guesses: if guesses && l > 0 && step > 0 { &[3, 1] } else { &[] },
                });
            }
        }
        builder.finish().save(&path).unwrap();
        std::fs::read(&path).unwrap()
    };
    let header = r#"{"model":"m","top_k":2,"layers":[[0,4,512],[3,300,1024]],"weights":WEIGHTS}"#;
    let framed = |version: u8, weights: bool, layers: [&[u8]; 2]| {
        // Turn 1, generated, one token.
        let chunk = [&[1, 0, 0, 0, 1, 1, 0, 0, 0], layers[0], layers[1]].concat();
        [header.replace("WEIGHTS", &weights.to_string()).as_bytes(), &[0, version, 2], &chunk, &chunk]
            .concat()
    };
    let wide: &[u8] = &[1, 0, 0, 0, 1, 0, 43, 1, 0, 0];
    let with_guesses: [&[u8]; 2] = [&[1, 0, 0, 0, 2, 0, 3, 1, 0, 0], &[wide, &[1, 0, 7, 0, 0, 0]].concat()];
    let with_weights: [&[u8]; 2] =
        [&[1, 0, 0, 0, 1, 0, 3, 0, 0, 0x80, 0x3f], &[wide, &[0, 0, 0x80, 0x3f]].concat()];
    vec![
        ("trace", "text".to_owned(), text.into()),
        ("trace", "plain".to_owned(), made(false, false)),
        ("trace", "weights".to_owned(), made(true, false)),
        ("trace", "guesses".to_owned(), made(true, true)),
        ("trace", "framed".to_owned(), framed(1, false, [&[1, 0, 0, 0, 2, 0, 3, 1], wide])),
        ("trace", "framed-weights".to_owned(), framed(1, true, with_weights)),
        ("trace", "framed-guesses".to_owned(), framed(2, false, with_guesses)),
    ]
}

fn texts(words: &[&str]) -> Vec<String> {
    words.iter().map(|w| (*w).to_owned()).collect()
}

/// The metadata of a model of this architecture, and its stacked experts in the type of this number.
fn gguf(architecture: &str, kind: u32, block: (usize, usize)) -> Writer {
    let key = |name: &str| format!("{architecture}.{name}");
    let mut w =
        Writer::new(architecture).text("tokenizer.chat_template", "{{ bos_token }}{{ messages[0].content }}");
    for (name, n) in [
        ("block_count", 1),
        ("embedding_length", 32),
        ("context_length", 64),
        ("feed_forward_length", 32),
        ("attention.head_count", 4),
        ("attention.head_count_kv", 2),
        ("expert_count", 2),
        ("expert_used_count", 1),
        ("attention.key_length", 8),
        ("attention.value_length", 8),
        ("attention.kv_lora_rank", 8),
        ("rope.dimension_count", 4),
    ] {
        w = w.number(&key(name), n);
    }
    w = w.float(&key("rope.freq_base"), 1e4).float(&key("attention.layer_norm_rms_epsilon"), 1e-6);
    let size = |elements: usize| elements / block.0 * block.1;
    for part in ["gate", "up", "down"] {
        let name = format!("blk.0.ffn_{part}_exps.weight");
        w = w.tensor(&name, &[2, block.0, block.0], kind, vec![1; size(2 * block.0 * block.0)]);
    }
    w = w.tensor("blk.0.ffn_gate_inp.weight", &[2, 32], 0, bytes(Dtype::F32, 64));
    w.tensor("token_embd.weight", &[4, 32], 30, bytes(Dtype::BF16, 128))
}

fn ggufs() -> Vec<Seed> {
    let byte_level = |w: Writer, pre: &str| {
        w.text("tokenizer.ggml.model", "gpt2")
            .text("tokenizer.ggml.pre", pre)
            .texts("tokenizer.ggml.tokens", &texts(&["H", "e", "l", "o", "ll", "<|x|>"]))
            .integers("tokenizer.ggml.token_type", &[1, 1, 1, 1, 1, 3])
            .texts("tokenizer.ggml.merges", &texts(&["l l"]))
            .number("tokenizer.ggml.bos_token_id", 5)
            .truth("tokenizer.ggml.add_bos_token", true)
    };
    let tokens = texts(&["<unk>", "<s>", "<0xE4>", "▁", "H", "e", "l", "o", "ll", "▁H"]);
    let sentence_piece = gguf("llama", 8, (32, 34))
        .text("tokenizer.ggml.model", "llama")
        .texts("tokenizer.ggml.tokens", &tokens)
        .integers("tokenizer.ggml.token_type", &[2, 3, 6, 1, 1, 1, 1, 1, 1, 1])
        .floats("tokenizer.ggml.scores", &[0., 0., 0., -9., -9., -9., -9., -9., -1., -2.])
        .number("tokenizer.ggml.bos_token_id", 1)
        .number("tokenizer.ggml.unknown_token_id", 0);
    let seed = |name: &str, w: &Writer| ("gguf", name.to_owned(), w.bytes());
    vec![
        seed("qwen3moe", &byte_level(gguf("qwen3moe", 2, (32, 18)), "qwen2")),
        seed("llama", &sentence_piece),
        seed("deepseek2", &byte_level(gguf("deepseek2", 0, (8, 32)), "deepseek-v3")),
        seed("gpt-oss", &byte_level(gguf("gpt-oss", 39, (32, 17)), "gpt-4o")),
        seed("glm4moe", &byte_level(gguf("glm4moe", 30, (8, 16)), "glm4")),
        seed("k-quants", &gguf("olmoe", 12, (256, 144)).tensor("output.weight", &[1, 256], 14, vec![3; 210])),
    ]
}

fn templates() -> Vec<Seed> {
    let talk = "\0sBe brief.\0uHi\0a<think>\nhm\n</think>\n\nHello\0uBye";
    let folder = root().join("assets/fixtures/chat_templates");
    let files = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path());
    let mut seeds: Vec<Seed> = files
        .filter(|file| file.extension().is_some_and(|e| e == "jinja"))
        .map(|file| {
            let name = file.file_stem().unwrap().to_str().unwrap().to_owned();
            ("template", name, (std::fs::read_to_string(file).unwrap() + talk).into_bytes())
        })
        // Those need variables of their own, or refuse.
        .filter(|(_, _, bytes)| super::targets::template(bytes))
        .collect();
    let json = "{{ messages|tojson(indent=2, sort_keys=true) }}{{ [1.5, 'a'] }}{{ strftime_now('%d %B') }}\
                {% generation %}{% endgeneration %}{% for m in messages[::-1] %}{{ m.content.split('<')[-1] }}{% endfor %}";
    seeds.push(("template", "json".to_owned(), (json.to_owned() + talk).into_bytes()));
    seeds
}

fn configs() -> Vec<Seed> {
    let fixtures = std::fs::read_dir(root().join("comoe-models/tests/fixtures")).unwrap();
    let files = fixtures.map(|e| e.unwrap().path().join("config.json")).filter(|file| file.exists());
    let mut seeds: Vec<Seed> = files
        .map(|file| {
            let name = file.parent().unwrap().file_name().unwrap().to_str().unwrap().replace('_', "-");
            let config: serde_json::Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
            ("config", name, config.to_string().into_bytes())
        })
        .collect();
    // Quantised ones: of any family.
    for kind in ["gptq", "fp8_block", "packed"] {
        let config = read(&format!("comoe-core/tests/fixtures/quantised/{kind}/config.json"));
        let config: serde_json::Value = serde_json::from_slice(&config).unwrap();
        let mut whole: serde_json::Value =
            serde_json::from_slice(&read("comoe-models/tests/fixtures/mixtral/config.json")).unwrap();
        whole["quantization_config"] = match config.get("quantization_config") {
            Some(inner) => inner.clone(),
            None => config,
        };
        seeds.push(("config", kind.replace('_', "-"), whole.to_string().into_bytes()));
    }
    seeds
}
