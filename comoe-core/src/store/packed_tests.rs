//! The packed store: round trips, what other readers see, and hostile files.

use std::fs::File;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use safetensors::SafeTensors;
use serde_json::{Map, Value, json};
use tempfile::TempDir;

use super::testing::{Shards, Style, TinyMoe, all_records};
use super::*;
use crate::expert::{Activation, ExpertSpec, RECORD_ALIGN, WeightOn};
use crate::format::ExpertFormat;

fn store() -> (TempDir, ExpertStore) {
    // Sizes whose records differ in length between formats.
    let model = TinyMoe { hidden: 40, ..TinyMoe::new(Style::Qwen) };
    let made = model.shards().write_indexed();
    let store = ExpertStore::open(&[made.path()], &Naming::qwen()).unwrap();
    (made, store)
}

fn info(store: &ExpertStore) -> PackedInfo {
    let layers = store.directory().layers().iter().zip(store.specs());
    PackedInfo {
        format: store.format(),
        layers: layers
            .map(|(l, spec)| PackedLayer { layer: l.layer, experts: l.experts, spec: *spec })
            .collect(),
        source: "a key".into(),
    }
}

fn pack(store: &ExpertStore, path: &Path) {
    let writer = PackedWriter::create(path, &info(store)).unwrap();
    // Backwards: the order of writing does not matter.
    for (index, record) in all_records(&*store.source()).into_iter().enumerate().rev() {
        writer.write(RecordIndex(index as u32), &record).unwrap();
    }
    writer.finish().unwrap();
}

/// A packed file of the tiny model.
fn packed() -> (TempDir, PathBuf, Vec<Vec<u8>>) {
    let (_made, store) = store();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("experts.safetensors");
    pack(&store, &path);
    (folder, path, all_records(&*store.source()))
}

/// Rewrites the header of a packed file, and appends `more` to its data.
fn edit(path: &Path, more: &[u8], change: impl FnOnce(&mut Map<String, Value>)) {
    let bytes = std::fs::read(path).unwrap();
    let length = u64::from_le_bytes(*bytes.first_chunk().unwrap()) as usize;
    let mut header: Map<String, Value> = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    change(&mut header);
    let mut text = serde_json::to_vec(&header).unwrap();
    text.resize((8 + text.len()).next_multiple_of(4096) - 8, b' ');
    let length_bytes = (text.len() as u64).to_le_bytes();
    std::fs::write(path, [&length_bytes[..], &text, &bytes[8 + length..], more].concat()).unwrap();
}

fn set(header: &mut Map<String, Value>, key: &str, value: &str) {
    header["__metadata__"][key] = json!(value);
}

#[test]
fn a_store_comes_back_byte_for_byte() {
    let (folder, path, records) = packed();
    let reopened = ExpertStore::open(&[&path], &Naming::mixtral()).unwrap();
    assert_eq!(all_records(&*reopened.source()), records);
    assert_eq!(reopened.specs(), [ExpertSpec::swiglu(40, 3); 2]);
    assert_eq!((reopened.format(), reopened.source_format()), (ExpertFormat::Bf16, ExpertFormat::Bf16));
    // A folder that holds nothing else will do.
    let by_folder = ExpertStore::open(&[folder.path()], &Naming::auto()).unwrap();
    assert_eq!(all_records(&*by_folder.source()), records);
    let file = PackedFile::open(&path).unwrap();
    assert_eq!((file.info().source.as_str(), file.path()), ("a key", path.as_path()));
}

#[test]
fn the_stock_reader_sees_aligned_byte_tensors() {
    let (_folder, path, records) = packed();
    let bytes = std::fs::read(&path).unwrap();
    let (header, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
    assert_eq!((8 + header) % 4096, 0);
    assert_eq!(metadata.metadata().as_ref().unwrap()["comoe.version"], "1");
    let file = SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(file.len(), records.len());
    for (layer, first) in [(1, 0), (3, 4)] {
        for expert in 0..4 {
            let tensor = file.tensor(&format!("comoe.layers.{layer}.experts.{expert}")).unwrap();
            assert_eq!((tensor.dtype(), tensor.shape()), (Dtype::U8, &[records[0].len()][..]));
            assert_eq!(tensor.data(), records[first + expert]);
            let offset = tensor.data().as_ptr() as usize - bytes.as_ptr() as usize;
            assert_eq!(offset % RECORD_ALIGN, 0);
        }
    }
}

#[test]
fn every_spec_survives() {
    let (_made, store) = store();
    let folder = tempfile::tempdir().unwrap();
    for activation in
        [Activation::Silu, Activation::GeluTanh, Activation::SwigluClamped { limit: 7.0, alpha: 1.702 }]
    {
        for weight_on in [WeightOn::Output, WeightOn::Input] {
            let store = store.clone().with_activation(activation).with_weight_on(weight_on);
            let path = folder.path().join("p.safetensors");
            pack(&store, &path);
            assert_eq!(PackedFile::open(&path).unwrap().info(), &info(&store));
        }
    }
}

#[test]
fn later_additions_are_ignored_and_later_versions_refused() {
    let (_folder, path, records) = packed();
    let end = records.len() * records[0].len();
    edit(&path, &[1; 6], |header| {
        set(header, "comoe.checksums", "later");
        header.insert(
            "lm_head.weight".into(),
            json!({"dtype": "BF16", "shape": [3], "data_offsets": [end, end + 6]}),
        );
    });
    assert_eq!(all_records(&PackedFile::open(&path).unwrap()), records);
    edit(&path, &[], |header| set(header, "comoe.version", "2"));
    let error = ExpertStore::open(&[&path], &Naming::auto()).unwrap_err();
    assert!(matches!(&error, Error::PackedVersion { found, known: 1, .. } if found == "2"), "{error}");
    assert!(error.to_string().contains("update comoe"), "{error}");
}

#[test]
fn files_that_contradict_themselves_are_refused() {
    let layers = |layer: usize, experts: u64, hidden: u64| {
        json!([{"layer": layer, "experts": experts, "hidden": hidden, "intermediate": 3, "activation": "silu",
                "bias": false, "weight_on": "output"}])
        .to_string()
    };
    for (key, value) in [
        ("comoe.format", "fp3".to_owned()),
        ("comoe.format", "int4-g64".to_owned()),
        ("comoe.layers", "[".to_owned()),
        ("comoe.layers", "[]".to_owned()),
        ("comoe.layers", layers(1, 4, 40)),
        ("comoe.layers", layers(1, 8, 40)),
        ("comoe.layers", layers(1, u64::MAX, 40)),
        ("comoe.layers", layers(1, 8, u64::MAX)),
        ("comoe.layers", layers(1, 8, 0)),
    ] {
        let (_folder, path, _) = packed();
        edit(&path, &[], |header| set(header, key, &value));
        let error = PackedFile::open(&path).unwrap_err().to_string();
        assert!(
            error.contains("damaged packed store") && error.contains("convert the model again"),
            "{error}"
        );
    }
    for key in ["comoe.format", "comoe.layers", "comoe.source"] {
        let (_folder, path, _) = packed();
        edit(&path, &[], |header| drop(header["__metadata__"].as_object_mut().unwrap().remove(key)));
        assert!(PackedFile::open(&path).unwrap_err().to_string().contains(key));
    }
    // Written again by a tool that does not align.
    let (_folder, path, _) = packed();
    let bytes = std::fs::read(&path).unwrap();
    let (_, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap().tensors();
    std::fs::write(&path, safetensors::serialize(tensors, metadata.metadata().clone()).unwrap()).unwrap();
    assert!(PackedFile::open(&path).unwrap_err().to_string().contains("not aligned"));
    let made = Shards::new().with("m.safetensors", "x", Dtype::U8, &[1], &[0]).write();
    let error = PackedFile::open(made.path().join("m.safetensors")).unwrap_err().to_string();
    assert!(error.contains("no packed store"), "{error}");
    let (_folder, path, _) = packed();
    let error = ExpertStore::open(&[made.path().join("m.safetensors"), path], &Naming::auto())
        .unwrap_err()
        .to_string();
    assert!(error.contains("opened alone"), "{error}");
}

#[test]
fn truncation_at_every_length_is_an_error() {
    let (_folder, path, _) = packed();
    let file = File::options().write(true).open(&path).unwrap();
    for len in (0..file.metadata().unwrap().len()).rev() {
        file.set_len(len).unwrap();
        match PackedFile::open(&path).unwrap_err() {
            Error::TruncatedFile { found, .. } => assert_eq!(found, len),
            other => panic!("{len}: {other}"),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn damaged_bytes_never_panic(
        flips in prop::collection::vec((0usize..2200, 1u8..=255), 1..4),
        text in any::<bool>(),
    ) {
        let (_folder, path, records) = packed();
        let mut bytes = std::fs::read(&path).unwrap();
        for (at, mask) in flips {
            // Half of the runs keep the header ASCII, to get further into the parser.
            bytes[at] ^= if text && at > 8 { mask & 0x1f } else { mask };
        }
        std::fs::write(&path, &bytes).unwrap();
        // The flips hit the header only, so what still opens and is still laid out alike has the same records.
        if let Ok(file) = PackedFile::open(&path) {
            let read = all_records(&file);
            prop_assert_eq!(read.len(), records.len());
        }
        let _ = ExpertStore::open(&[&path], &Naming::auto());
    }
}

#[test]
fn a_writer_leaves_a_whole_file_or_none() {
    let (_made, store) = store();
    let records = all_records(&*store.source());
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("experts.safetensors");
    let count = || std::fs::read_dir(folder.path()).unwrap().count();

    let writer = PackedWriter::create(&path, &info(&store)).unwrap();
    assert!(writer.write(RecordIndex(0), &records[0][1..]).is_err());
    assert!(writer.write(RecordIndex(8), &records[0]).is_err());
    writer.write(RecordIndex(0), &records[0]).unwrap();
    assert!(!path.exists());
    let error = writer.finish().unwrap_err().to_string();
    assert!(error.contains("layer 1 expert 1 was written 0 times"), "{error}");
    assert_eq!(count(), 0);

    // A writer that was killed: its file is there and nobody holds its lock.
    let abandoned = folder.path().join(".experts.safetensors.99-0.tmp");
    std::fs::write(&abandoned, b"half").unwrap();
    let other = folder.path().join(".other.safetensors.99-0.tmp");
    std::fs::write(&other, b"half").unwrap();
    let living = PackedWriter::create(&path, &info(&store)).unwrap();
    assert!(!abandoned.exists() && other.exists());
    // A second writer of the same name leaves the living one alone; both succeed.
    pack(&store, &path);
    for (index, record) in records.iter().enumerate() {
        living.write(RecordIndex(index as u32), record).unwrap();
    }
    let mapped = PackedFile::open(&path).unwrap();
    living.finish().unwrap();
    assert_eq!(all_records(&mapped), records, "a mapping outlives the replacement of its file");
    assert_eq!(all_records(&PackedFile::open(&path).unwrap()), records);
    assert_eq!(count(), 2);
    let nowhere = PackedWriter::create(folder.path().join("no/x"), &info(&store)).unwrap_err();
    assert!(matches!(nowhere, Error::BadFile { .. }), "{nowhere}");
}

#[test]
fn tensors_and_files_lie_behind_the_records() {
    let (_made, store) = store();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.safetensors");
    let shape = [2, 3];
    let weight =
        TensorView { encoding: Encoding::Plain(Dtype::BF16), shape: &shape, bytes: &[7; 12], file: &path };
    let tensors = [
        PackedTensor::weight("model.norm.weight", &weight).unwrap(),
        PackedTensor::file("config.json", b"{}"),
        PackedTensor::file("empty", b""),
    ];
    let records = all_records(&*store.source());
    let writer = PackedWriter::create_with(&path, &info(&store), &tensors).unwrap();
    for (index, record) in records.iter().enumerate() {
        writer.write(RecordIndex(index as u32), record).unwrap();
    }
    writer.write_tensor(1, b"{}").unwrap();
    for (index, bytes) in [(0, &b"short"[..]), (3, b"")] {
        let error = writer.write_tensor(index, bytes).unwrap_err().to_string();
        assert!(error.contains(&format!("number {index}")), "{error}");
    }
    // A part that is missing is named, and there is no file.
    let error = writer.finish().unwrap_err().to_string();
    assert!(error.contains("model.norm.weight was written 0 times"), "{error}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);

    let files = vec![tensors[2].clone(), tensors[1].clone(), tensors[0].clone()];
    let report = store.pack(&path, store.format(), files, None).unwrap();
    assert_eq!((report.experts, report.other_bytes, report.errors.all), (8, 14, 0.0));
    assert_eq!(report.expert_bytes, store.bytes_in(store.format()).unwrap());
    let packed = PackedFile::open(&path).unwrap();
    assert_eq!(packed.file("config.json"), Some(&b"{}"[..]));
    assert_eq!((packed.file("empty"), packed.file("none"), packed.is_model()), (Some(&b""[..]), None, true));
    // A checkpoint of it has the weights and nothing else.
    let checkpoint = Checkpoint::open(&[&path]).unwrap();
    assert_eq!(checkpoint.names().collect::<Vec<_>>(), ["model.norm.weight"]);
    assert_eq!(checkpoint.tensor("model.norm.weight").unwrap().bytes, [7; 12]);
    let again = ExpertStore::open(&[&path], &Naming::auto()).unwrap();
    assert_eq!(all_records(&*again.source()), records);
}

#[test]
fn every_flipped_byte_is_found_in_its_part() {
    let (_folder, path, _) = packed();
    let whole = std::fs::read(&path).unwrap();
    let found = PackedFile::open(&path).unwrap().verify(None).unwrap();
    assert_eq!((found.experts, found.others, found.bytes), (8, 0, whole.len() as u64));
    assert!(found.differing.is_empty());
    let start = 8 + u64::from_le_bytes(*whole.first_chunk().unwrap()) as usize;
    for at in (start..whole.len()).step_by(61) {
        let mut bytes = whole.clone();
        bytes[at] ^= 0x80;
        std::fs::write(&path, bytes).unwrap();
        let file = PackedFile::open(&path).unwrap();
        let index = (at - start) / file.directory().record_bytes(RecordIndex(0));
        let expected = PackedPart::Expert(file.directory().id(RecordIndex(index as u32)));
        assert_eq!(file.verify(None).unwrap().differing, [expected], "{at}");
    }
    // Of the header, whatever can be read at all.
    for at in 0..start {
        let mut bytes = whole.clone();
        bytes[at] ^= 1;
        std::fs::write(&path, bytes).unwrap();
        let Ok(file) = PackedFile::open(&path) else { continue };
        assert!(file.verify(None).map_or(true, |found| !found.differing.is_empty()), "{at}");
    }
    edit_away_checksums(&path, &whole);
    let error = PackedFile::open(&path).unwrap().verify(None).unwrap_err().to_string();
    assert!(error.contains("no checksums"), "{error}");
}

fn edit_away_checksums(path: &Path, whole: &[u8]) {
    std::fs::write(path, whole).unwrap();
    edit(path, &[], |header| {
        header["__metadata__"].as_object_mut().unwrap().remove("comoe.crc32");
    });
}
