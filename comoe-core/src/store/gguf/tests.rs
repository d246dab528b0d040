use std::borrow::Cow;
use std::path::Path;

use candle_core::Device;
use candle_core::quantized::{GgmlDType, QStorage, QTensor};

use super::writer::Writer;
use super::*;
use crate::error::Error;
use crate::expert::{ExpertId, ExpertLayout};
use crate::format::ExpertFormat;
use crate::format::record::unpack_expert;
use crate::store::testing::all_records;
use crate::store::{Checkpoint, Encoding, ExpertStore, Naming, Quantisation, QuantisedMatrix};

/// Bytes that depend on the seed alone.
fn noise(n: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    (0..n)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as u8
        })
        .collect()
}

const KINDS: [(GgmlType, u32, GgmlDType, &[usize]); 11] = [
    (GgmlType::Q4_0, 2, GgmlDType::Q4_0, &[0]),
    (GgmlType::Q4_1, 3, GgmlDType::Q4_1, &[0, 2]),
    (GgmlType::Q5_0, 6, GgmlDType::Q5_0, &[0]),
    (GgmlType::Q5_1, 7, GgmlDType::Q5_1, &[0, 2]),
    (GgmlType::Q8_0, 8, GgmlDType::Q8_0, &[0]),
    (GgmlType::Q2_K, 10, GgmlDType::Q2K, &[80, 82]),
    (GgmlType::Q3_K, 11, GgmlDType::Q3K, &[108]),
    (GgmlType::Q4_K, 12, GgmlDType::Q4K, &[0, 2]),
    (GgmlType::Q5_K, 13, GgmlDType::Q5K, &[0, 2]),
    (GgmlType::Q6_K, 14, GgmlDType::Q6K, &[208]),
    (GgmlType::F16, 1, GgmlDType::F16, &[0]),
];

/// Random blocks whose f16 numbers (at `halves`) are between 2^-7 and 2^-6, and whose integers are ggml's (no -128).
fn blocks(kind: GgmlType, halves: &[usize], weights: usize, seed: u64) -> Vec<u8> {
    let mut bytes = noise(weights / kind.block_weights() * kind.block_bytes(), seed);
    for block in bytes.chunks_mut(kind.block_bytes()) {
        halves.iter().for_each(|at| block[at + 1] = 0x20 | block[at + 1] & 3);
        if kind == GgmlType::Q8_0 {
            block[2..].iter_mut().filter(|q| **q == 0x80).for_each(|q| *q = 0x81);
        }
    }
    bytes
}

#[test]
fn blocks_decode_as_candle_decodes_them() {
    for (kind, number, candle, halves) in KINDS {
        assert_eq!(GgmlType::of(number), Ok(kind));
        let bytes = blocks(kind, halves, 2048, number.into());
        let storage = QStorage::from_data(Cow::Borrowed(&bytes), &Device::Cpu, candle).unwrap();
        let expected = QTensor::new(storage, (8, 256)).unwrap().dequantize(&Device::Cpu).unwrap();
        let expected = expected.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let mut found = vec![f32::NAN; 2048];
        kind.decode(&bytes, &mut found);
        for (i, (a, b)) in found.iter().zip(&expected).enumerate() {
            // The same products; candle may add in another order.
            assert!((a - b).abs() <= 1e-6 * b.abs().max(1.0), "{} weight {i}: {a} {b}", kind.name());
        }
        assert!(found.iter().any(|v| *v > 0.0) && found.iter().all(|v| v.is_finite()));
    }
    let mut mxfp4 = [f32::NAN; 32];
    let codes: Vec<u8> = (0..16).map(|i| i | (15 - i) << 4).collect();
    GgmlType::MXFP4.decode(&[&[128], &codes[..]].concat(), &mut mxfp4);
    assert_eq!(mxfp4[..8], [0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0]);
    assert_eq!(mxfp4[16..24], [-12.0, -8.0, -6.0, -4.0, -3.0, -2.0, -1.0, -0.0]);
    for bad in [9, 24, 31, 39 + 1, u32::MAX] {
        let reason = GgmlType::of(bad).unwrap_err();
        assert!(reason.contains("Q4_K") && reason.contains("not supported"), "{reason}");
    }
}

/// A model of two experts, hidden 64 and intermediate 32 (256 of both for types with such blocks).
fn model(kind: GgmlType, number: u32, halves: &[usize]) -> Writer {
    let (hidden, inner) = if kind.block_weights() == 256 { (256, 256) } else { (64, 32) };
    let mut writer = Writer::new("qwen3moe");
    for (seed, (name, rows, cols)) in
        [("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)].into_iter().enumerate()
    {
        let bytes = match kind {
            GgmlType::MXFP4 => {
                let mut bytes = noise(2 * rows * cols / 32 * 17, seed as u64);
                bytes.chunks_mut(17).for_each(|block| block[0] = 120 + block[0] % 9);
                bytes
            }
            _ => blocks(kind, halves, 2 * rows * cols, seed as u64),
        };
        writer = writer.tensor(&format!("blk.1.ffn_{name}_exps.weight"), &[2, rows, cols], number, bytes);
    }
    writer.tensor("output_norm.weight", &[2], 0, [1f32, 2.0].map(f32::to_le_bytes).concat())
}

fn write(folder: &Path, writer: &Writer) -> std::path::PathBuf {
    let path = folder.join("m.gguf");
    writer.write(&path);
    path
}

#[test]
fn experts_are_kept_where_a_format_holds_them_and_requantised_elsewhere() {
    let kept = [
        (GgmlType::Q4_0, ExpertFormat::Int4 { group: 32 }),
        (GgmlType::Q8_0, ExpertFormat::Int8 { group: 32 }),
        (GgmlType::MXFP4, ExpertFormat::Mxfp4),
    ];
    let folder = tempfile::tempdir().unwrap();
    let mxfp4 = (GgmlType::MXFP4, 39, GgmlDType::F16, &[][..]);
    for (kind, number, _, halves) in KINDS.into_iter().chain([mxfp4]) {
        let path = write(folder.path(), &model(kind, number, halves));
        let store = ExpertStore::open(&[&path], &Naming::auto()).unwrap();
        let kept = kept.iter().find(|k| k.0 == kind).map(|k| k.1);
        assert_eq!(store.format(), kept.unwrap_or(ExpertFormat::Bf16), "{}", kind.name());
        let few = matches!(kind, GgmlType::Q2_K | GgmlType::Q3_K | GgmlType::Q4_K | GgmlType::Q4_1);
        let expected = match kept {
            Some(format) => format,
            None if kind == GgmlType::F16 => ExpertFormat::Bf16,
            None if few => ExpertFormat::Int4 { group: 32 },
            None => ExpertFormat::Int8 { group: 32 },
        };
        assert_eq!(store.source_format(), expected, "{}", kind.name());
        let checkpoint = Checkpoint::open(&[&path]).unwrap();
        assert_eq!(checkpoint.encoding("model.norm.weight"), Some(Encoding::Plain(safetensors::Dtype::F32)));
        let converted = store.clone().into_format(expected).unwrap();
        let said = converted.notes().iter().any(|n| n.contains("relative error"));
        // INT8 holds five bits with a scale and no least value, too.
        let exact = kept.is_some() || matches!(kind, GgmlType::F16 | GgmlType::Q5_0);
        assert_eq!(said, !exact, "{}: {:?}", kind.name(), converted.notes());
        let layout = ExpertLayout::new(store.spec(0), converted.format());
        for (e, record) in all_records(&*converted.source()).iter().enumerate() {
            assert_eq!(store.directory().record(ExpertId { layer: 1, expert: e }).unwrap().0, e as u32);
            let found = unpack_expert(&layout, record).unwrap();
            for (part, found) in [("gate", found.gate), ("up", found.up), ("down", found.down)] {
                let stem = format!("model.layers.1.mlp.experts.{e}.{part}_proj");
                let how = Quantisation::default();
                let mut values = Vec::new();
                match QuantisedMatrix::find(&checkpoint, &stem, &how).unwrap() {
                    Some(matrix) => matrix.values(&checkpoint, &mut values).unwrap(),
                    None => {
                        let bytes = checkpoint.tensor(&format!("{stem}.weight")).unwrap().bytes;
                        let halves = bytes.as_chunks::<2>().0.iter();
                        values.extend(
                            halves.map(|b| {
                                half::bf16::from_f32(half::f16::from_le_bytes(*b).to_f32()).to_f32()
                            }),
                        );
                    }
                }
                if !said {
                    assert_eq!(values, found, "{} {stem}", kind.name());
                    continue;
                }
                let sum = |f: &dyn Fn(f32, f32) -> f32| -> f64 {
                    values.iter().zip(&found).map(|(a, b)| f64::from(f(*a, *b))).sum()
                };
                let error = (sum(&|a, b| (a - b) * (a - b)) / sum(&|a, _| a * a)).sqrt();
                assert!(error < if few { 0.12 } else { 0.01 }, "{} {stem}: {error}", kind.name());
            }
        }
    }
}

#[test]
fn q8_0_with_a_weight_that_int8_does_not_have_is_packed() {
    let folder = tempfile::tempdir().unwrap();
    let mut bytes = blocks(GgmlType::Q8_0, &[0], 2 * 32 * 64, 0);
    bytes[2] = 0x80;
    let mut writer = Writer::new("qwen3moe").tensor("blk.0.ffn_gate_exps.weight", &[2, 32, 64], 8, bytes);
    writer =
        writer.tensor("blk.0.ffn_up_exps.weight", &[2, 32, 64], 8, blocks(GgmlType::Q8_0, &[0], 4096, 1));
    writer =
        writer.tensor("blk.0.ffn_down_exps.weight", &[2, 64, 32], 8, blocks(GgmlType::Q8_0, &[0], 4096, 2));
    let path = write(folder.path(), &writer);
    let store = ExpertStore::open(&[&path], &Naming::auto()).unwrap();
    let found = unpack_expert(store.layout(0), &all_records(&*store.source())[0]).unwrap();
    let scale = half::f16::from_le_bytes([writer.bytes_of(0)[0], writer.bytes_of(0)[1]]);
    let expected = -128.0 * scale.to_f32();
    assert!((found.gate[0] - expected).abs() <= scale.to_f32(), "{} {expected}", found.gate[0]);
}

#[test]
fn a_split_file_is_one_model() {
    let folder = tempfile::tempdir().unwrap();
    let whole = write(folder.path(), &model(GgmlType::Q8_0, 8, &[0]));
    let expected = all_records(&*ExpertStore::open(&[&whole], &Naming::auto()).unwrap().source());
    std::fs::remove_file(whole).unwrap();
    let parts = model(GgmlType::Q8_0, 8, &[0]).split(3);
    let path = |n: usize| folder.path().join(format!("m-{n:05}-of-00003.gguf"));
    for (n, part) in parts.iter().enumerate() {
        part.write(&path(n + 1));
    }
    for given in [&path(1), &path(2), folder.path()] {
        let store = ExpertStore::open(&[given], &Naming::auto()).unwrap();
        assert_eq!(all_records(&*store.source()), expected, "{}", given.display());
    }
    std::fs::rename(path(2), folder.path().join("elsewhere")).unwrap();
    let error = Gguf::open(&path(1)).unwrap_err();
    assert!(matches!(&error, Error::MissingShard { shard, .. } if *shard == path(2)), "{error}");
    std::fs::copy(path(3), path(2)).unwrap();
    let error = Gguf::open(&path(1)).unwrap_err().to_string();
    assert!(error.contains("by its name it is 1"), "{error}");
    let renamed = folder.path().join("one.gguf");
    std::fs::copy(path(1), &renamed).unwrap();
    assert!(Gguf::open(&renamed).unwrap_err().to_string().contains("-of-00003.gguf"));
}

#[test]
fn truncation_at_every_length_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.gguf");
    let whole = model(GgmlType::Q4_0, 2, &[0])
        .text("a.text", "words")
        .texts("a.list", &["one".into(), "two".into()])
        .integers("numbers", &[1, -2])
        .floats("scores", &[0.5, -1.0])
        .float("f", 0.5)
        .truth("t", true)
        .bytes();
    for len in 0..whole.len() {
        std::fs::write(&path, &whole[..len]).unwrap();
        match Gguf::open(&path).unwrap_err() {
            Error::TruncatedFile { promised, found, .. } => {
                assert!(promised > found && found == len as u64, "{len}")
            }
            other => panic!("{len}: {other}"),
        }
    }
    std::fs::write(&path, &whole).unwrap();
    let gguf = Gguf::open(&path).unwrap();
    assert_eq!(gguf.get("a.list"), Some(&GgufValue::Texts(vec!["one".into(), "two".into()])));
    assert_eq!(gguf.get("numbers"), Some(&GgufValue::Integers(vec![1, -2])));
    assert_eq!(gguf.get("scores"), Some(&GgufValue::Floats(vec![0.5, -1.0])));
    assert_eq!(
        (gguf.text("a.text"), gguf.float("f"), gguf.get("t")),
        (Some("words"), Some(0.5), Some(&GgufValue::Bool(true)))
    );
}

/// Every byte of a header flipped, and every number of it made absurd: an error or another model, never a panic.
#[test]
fn damaged_headers_are_never_believed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.gguf");
    let whole = model(GgmlType::Q4_0, 2, &[0]).texts("a.list", &["one".into()]).number("n", 3).bytes();
    let header = whole.windows(4).rposition(|w| w == b"norm").unwrap() + 40;
    let mut refused = 0;
    for at in 0..header {
        for value in [0, 0xff, whole[at] ^ 0x80, whole[at].wrapping_add(1)] {
            let mut bytes = whole.clone();
            bytes[at] = value;
            std::fs::write(&path, &bytes).unwrap();
            refused += usize::from(ExpertStore::open(&[&path], &Naming::auto()).is_err());
        }
        if at + 8 <= header {
            let mut bytes = whole.clone();
            bytes[at..at + 8].fill(0xff);
            std::fs::write(&path, &bytes).unwrap();
            refused += usize::from(ExpertStore::open(&[&path], &Naming::auto()).is_err());
        }
    }
    assert!(refused > 3 * header, "{refused} of {}", 5 * header);
}

#[test]
fn what_is_wrong_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let refused = |writer: &Writer| {
        let path = write(folder.path(), writer);
        Checkpoint::open(&[&path]).unwrap_err().to_string()
    };
    let one = || [0u8; 4].to_vec();
    for (writer, parts) in [
        (Writer::default(), &["general.architecture"][..]),
        (Writer::new("mamba"), &["\"mamba\"", "qwen3moe, qwen2moe, llama"]),
        (Writer::new("qwen3moe").tensor("blk.0.ssm_in.weight", &[1], 0, one()), &["ssm_in", "not known"]),
        (Writer::new("qwen3moe").tensor("blk.x.attn_q.weight", &[1], 0, one()), &["blk.x", "not known"]),
        (
            Writer::new("qwen3moe").tensor("blk.0.attn_q.weight", &[1], 20, one()),
            &["IQ4_NL", "supported are"],
        ),
        (
            Writer::new("qwen3moe").tensor("blk.0.attn_q.weight", &[33], 8, one()),
            &["rows of 33", "multiples of 32"],
        ),
        (
            Writer::new("qwen3moe").tensor("blk.0.ffn_up_exps.weight", &[1, 1], 0, one()),
            &["[experts, out, in]"],
        ),
        (
            Writer::new("llama").tensor("blk.0.attn_q.weight", &[2, 1], 0, [one(), one()].concat()),
            &["llama.attention.head_count"],
        ),
        (Writer::new("deepseek2").tensor("blk.0.attn_k_b.weight", &[1, 1, 1], 0, one()), &["attn_v_b"]),
        (Writer::new("qwen3moe").number("general.alignment", 3), &["alignment"]),
        (Writer::new("qwen3moe").number("x", 1).number("x", 2), &["\"x\" twice"]),
    ] {
        let text = refused(&writer);
        assert!(parts.iter().all(|p| text.contains(p)), "{parts:?}: {text}");
    }
    let path = folder.path().join("m.gguf");
    for (bytes, part) in [
        (&b"GGML\0\0\0\0"[..], "no GGUF file"),
        (b"version https://git-lfs.github.com/spec/v1", "git lfs pull"),
        (b"GGUF\x01\0\0\0", "version 1"),
        (b"GGUF\0\0\0\x03", "big-endian"),
        (b"GGUF\x09\0\0\0", "version 9"),
    ] {
        std::fs::write(&path, bytes).unwrap();
        let text = Gguf::open(&path).unwrap_err().to_string();
        assert!(text.contains(part), "{text}");
    }
}
