//! `comoe logits`.

use std::path::{Path, PathBuf};

use safetensors::SafeTensors;

use crate::program::{Run, Running, comoe, run};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

fn tensor(file: &Path, name: &str) -> (Vec<usize>, Vec<[u8; 4]>) {
    let bytes = std::fs::read(file).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let view = tensors.tensor(name).unwrap();
    (view.shape().to_vec(), view.data().as_chunks().0.to_vec())
}

fn floats(file: &Path, name: &str) -> (Vec<usize>, Vec<f32>) {
    let (shape, words) = tensor(file, name);
    (shape, words.into_iter().map(f32::from_le_bytes).collect())
}

fn apart(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// The logits of `tokens`, in a file of `folder`.
fn logits(folder: &Path, model: &Path, tokens: &[u32], extra: &[&str]) -> (Run, PathBuf) {
    let file = folder.join("out.safetensors");
    let tokens = tokens.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
    let mut command = comoe();
    command.arg("logits").arg(model).args(["--tokens", &tokens, "--device=cpu", "-o"]).arg(&file).args(extra);
    let run = Running::start(&mut command).finish();
    (run, file)
}

#[test]
fn they_are_those_of_transformers_however_tokens_come_and_experts_are_kept() {
    let golden = root().join("assets/fixtures/comoe_tiny_logits.safetensors");
    let folder = tempfile::tempdir().unwrap();
    let model = root().join("assets/comoe-tiny");
    let ids: Vec<u32> = tensor(&golden, "ids_2").1.into_iter().map(u32::from_le_bytes).collect();
    let (_, all) = floats(&golden, "all_2");
    let mut bits = Vec::new();
    for (decode, extra) in [
        ("0", &["--resident"][..]),
        ("5", &["--slots=24"]),
        (&ids.len().to_string(), &["--slots=12", "--prefetch=correlation"]),
        ("0", &["--slots=12", "--scope=global"]),
    ] {
        let (run, file) = logits(folder.path(), &model, &ids, &[&["--decode", decode], extra].concat());
        assert_eq!(run.answer(), "");
        let ways = format!(
            "{} tokens at once and {decode} one by one",
            ids.len() - decode.parse::<usize>().unwrap()
        );
        assert!(run.stderr.contains(&ways), "{}", run.stderr);
        let (shape, got) = floats(&file, "logits");
        assert_eq!(shape, [ids.len(), 4096]);
        let every: Vec<f32> = got.iter().copied().step_by(64).collect();
        let worst = apart(&every, &all);
        assert!(worst < 1e-3, "--decode {decode} {extra:?}: {worst}");
        bits.push(got.into_iter().map(f32::to_bits).collect::<Vec<_>>());
    }
    assert!(bits[0] == bits[3], "the number of slots changes nothing, not a bit");
}

#[test]
fn a_model_without_a_tokenizer_has_logits() {
    let model = root().join("comoe-models/tests/fixtures/gpt_oss");
    assert!(!model.join("tokenizer.json").exists());
    let golden = model.join("golden.safetensors");
    let ids: Vec<u32> = tensor(&golden, "ids").1.into_iter().map(u32::from_le_bytes).collect();
    let folder = tempfile::tempdir().unwrap();
    let (run, file) = logits(folder.path(), &model, &ids, &["--decode=3", "--quiet"]);
    assert_eq!((run.answer(), run.stderr.as_str()), ("", ""));
    let worst = apart(&floats(&file, "logits").1, &floats(&golden, "logits").1);
    assert!(worst < 1e-3, "{worst}");
    let (coarse, file) = logits(folder.path(), &model, &ids, &["--format=int4-g32"]);
    assert!(coarse.status.success() && coarse.stderr.contains("int4"), "{coarse:?}");
    assert!(apart(&floats(&file, "logits").1, &floats(&golden, "logits").1) > worst);
}

#[test]
fn what_cannot_be_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let model = root().join("assets/comoe-tiny");
    let fails = |tokens: &[u32], extra: &[&str], code: i32, names: &[&str]| {
        let (run, file) = logits(folder.path(), &model, tokens, extra);
        run.fails(code, names);
        assert!(!file.exists());
    };
    fails(&[5, 4096], &[], 1, &["4096", "4095"]);
    fails(&[5, 6], &["--decode=3"], 2, &["3 of 2"]);
    fails(&[5; 9], &["--context=8", "-q"], 1, &["context of 8"]);
    let nowhere = run(["logits", model.to_str().unwrap(), "--tokens=1", "-q", "-o", "/no/such/folder/x"]);
    nowhere.fails(1, &["/no/such/folder/x"]);
    for args in
        [&["logits", "-o", "x"][..], &["logits", "--tokens", "1,x", "-o", "x"], &["logits", "--tokens", "1"]]
    {
        assert_eq!(run(args.iter().copied()).status.code(), Some(2), "{args:?}");
    }
}
