//! `comoe pack` and `comoe verify`: a model as one file, read by others and by `comoe` itself, and what damages do.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use safetensors::{Dtype, SafeTensors};
use tempfile::TempDir;

use crate::checkpoint::{Checkpoint, Sizes};
use crate::program::{Run, Running, comoe, generate, model};

/// comoe-tiny in the build's own checkout.
fn tiny() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../assets/comoe-tiny")
}

fn pack(model: &Path, file: &Path, options: &[&str]) -> Run {
    Running::start(comoe().arg("pack").arg(model).arg("--output").arg(file).args(options)).finish()
}

fn verify(file: &Path) -> Run {
    Running::start(comoe().arg("verify").arg(file)).finish()
}

/// A small model packed in INT4, in a folder of its own.
fn packed() -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("m.safetensors");
    let run = pack(model(), &file, &["--format=int4"]);
    assert_eq!(run.answer(), format!("{}\n", file.display()));
    (folder, file)
}

/// What is in a folder, hidden files included.
fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    let mut names: Vec<String> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn a_packed_model_answers_as_its_folder_does() {
    let folder = tempfile::tempdir().unwrap();
    let ask = |model: &Path, options: &[&str]| {
        let fixed = ["--prompt", "What is 17 plus 25?", "--temperature=0", "--json"];
        let run = generate(model, &[&fixed[..], options].concat());
        (run.json(), run.stderr)
    };
    for (format, also) in [("int4", "--slots=40"), ("bf16", "--resident")] {
        let file = folder.path().join(format!("{format}.safetensors"));
        assert!(pack(&tiny(), &file, &["--format", format]).status.success());
        let (of_folder, _) = ask(&tiny(), &["--format", format, also]);
        let (of_file, said) = ask(&file, &[also]);
        assert_eq!(of_file["text"], of_folder["text"]);
        assert_eq!(of_file["tokens"], of_folder["tokens"]);
        assert!(of_file["text"].as_str().unwrap().contains("42"), "{of_file}");
        assert_eq!(of_file["cache"]["record_bytes"], of_folder["cache"]["record_bytes"]);
        assert!(!said.contains("records were"), "nothing is converted: {said}");
        assert!(verify(&file).status.success());
    }
    // Packed again from a packed file, exactly: the records are copied.
    let (int4, again) = (folder.path().join("int4.safetensors"), folder.path().join("again.safetensors"));
    assert!(pack(&int4, &again, &[]).status.success());
    assert_eq!(std::fs::read(int4).unwrap(), std::fs::read(again).unwrap());
}

#[test]
fn other_readers_see_tensors_and_files() {
    let (_folder, file) = packed();
    let bytes = std::fs::read(&file).unwrap();
    let found = SafeTensors::deserialize(&bytes).unwrap();
    let records = found.names().into_iter().filter(|n| n.starts_with("comoe.layers.")).count();
    assert_eq!(records, 24);
    for name in ["config.json", "tokenizer.json", "generation_config.json"] {
        let tensor = found.tensor(&format!("comoe.files.{name}")).unwrap();
        assert_eq!(tensor.dtype(), Dtype::U8);
        assert_eq!(tensor.data(), std::fs::read(model().join(name)).unwrap(), "{name}");
    }
    // Every weight that is no expert's, as it was, and no expert's.
    let mut dense = 0;
    for (name, stored) in &Checkpoint::new(Sizes::default()).tensors {
        if name.contains(".experts.") {
            assert!(found.tensor(name).is_err(), "{name}");
            continue;
        }
        let tensor = found.tensor(name).unwrap();
        assert_eq!((tensor.dtype(), tensor.shape()), (stored.dtype, &stored.shape[..]), "{name}");
        assert!(tensor.data() == stored.bytes, "{name}");
        dense += 1;
    }
    let files = found.names().into_iter().filter(|n| n.starts_with("comoe.files.")).count();
    assert_eq!(records + dense + files, found.len());
    // Records begin at multiples of 512, of the file too.
    let start = bytes.as_ptr() as usize;
    for (name, tensor) in found.tensors().iter().filter(|(name, _)| name.starts_with("comoe.layers.")) {
        assert_eq!((tensor.data().as_ptr() as usize - start) % 512, 0, "{name}");
    }
}

#[test]
fn threads_do_not_change_a_byte() {
    let folder = tempfile::tempdir().unwrap();
    let made = ["1", "2", "7"].map(|threads| {
        let file = folder.path().join(format!("{threads}.safetensors"));
        let mut command = comoe();
        command.env("RAYON_NUM_THREADS", threads).args(["pack", "--format=int8", "--quiet", "-o"]);
        let run = Running::start(command.arg(&file).arg(model())).finish();
        assert_eq!((run.answer().trim_end(), run.stderr.as_str()), (file.to_str().unwrap(), ""));
        std::fs::read(file).unwrap()
    });
    assert!(made[0] == made[1] && made[1] == made[2]);
}

#[test]
fn a_flipped_bit_is_found_and_named() {
    let (_folder, file) = packed();
    let whole = std::fs::read(&file).unwrap();
    let run = verify(&file);
    assert!(run.answer().contains("24 experts"), "{run:?}");
    let at = |name: &str| {
        let found = SafeTensors::deserialize(&whole).unwrap();
        found.tensor(name).unwrap().data().as_ptr() as usize - whole.as_ptr() as usize
    };
    let flipped = |places: &[usize]| {
        let mut bytes = whole.clone();
        places.iter().for_each(|at| bytes[*at] ^= 4);
        std::fs::write(&file, bytes).unwrap();
        verify(&file)
    };
    let name = file.to_str().unwrap();
    flipped(&[at("comoe.layers.1.experts.5") + 700])
        .fails(1, &[name, "one part differs", "layer 1 expert 5"]);
    flipped(&[whole.len() - 1]).fails(1, &["file tokenizer"]);
    flipped(&[at("model.norm.weight"), at("comoe.layers.2.experts.7")])
        .fails(1, &["2 parts", "layer 2 expert 7", "tensor model.norm.weight"]);
    // A name in the header, which nothing else would miss.
    let unused = String::from_utf8_lossy(&whole[..4096]).find("comoe.source").unwrap();
    assert_eq!(flipped(&[unused + 14]).status.code(), Some(1));
    // More than a line names: all are in the object.
    let all = (0..24).map(|e| at(&format!("comoe.layers.{}.experts.{}", e / 8, e % 8)));
    flipped(&all.collect::<Vec<_>>()).fails(1, &["24 parts", "and 16 more"]);
    let run = Running::start(comoe().arg("verify").arg(&file).arg("--json")).finish();
    run.fails(1, &["24 parts"]);
    let found: serde_json::Value = serde_json::from_slice(&run.stdout).unwrap();
    let differing = found["differing"].as_array().unwrap();
    assert!(differing.len() == 24 && differing[23] == "layer 2 expert 7", "{found}");
    flipped(&[]);
    let run = Running::start(comoe().arg("verify").arg(&file).arg("--json")).finish();
    assert_eq!(run.json()["differing"], serde_json::json!([]));
    // Files without checksums, or of other programs.
    verify(&model().join("model-00001-of-00002.safetensors")).fails(1, &["no packed store"]);
    verify(Path::new("/no/such/file")).fails(1, &["/no/such/file"]);
}

#[test]
fn a_truncated_file_is_refused() {
    let (_folder, file) = packed();
    let whole = std::fs::read(&file).unwrap();
    for length in [whole.len() - 1, whole.len() / 2, 4096, 7] {
        std::fs::write(&file, &whole[..length]).unwrap();
        verify(&file).fails(1, &["truncated"]);
        generate(&file, &["--prompt=x"]).fails(1, &["truncated", "pack it again", file.to_str().unwrap()]);
    }
    // A whole one under another name is told what to be called.
    let renamed = file.with_extension("bin");
    std::fs::write(&renamed, &whole).unwrap();
    generate(&renamed, &["--prompt=x"]).fails(2, &["m.bin", "ends in .safetensors"]);
    // Experts alone are no model.
    let cache = tempfile::tempdir().unwrap();
    let mut command = comoe();
    command
        .env("COMOE_CACHE", cache.path())
        .arg("generate")
        .arg(model())
        .args(["--prompt=x", "--format=int8"]);
    assert!(Running::start(&mut command).finish().status.success());
    let experts = names(cache.path()).into_iter().find(|n| n.starts_with("experts-")).unwrap();
    let experts = cache.path().join(experts);
    generate(&experts, &["--prompt=x"]).fails(1, &["experts only"]);
    assert!(verify(&experts).answer().contains("24 experts and 0 other"));
}

#[test]
fn what_cannot_be_packed_is_refused_at_once() {
    let (folder, file) = packed();
    let before = std::fs::read(&file).unwrap();
    pack(model(), &file, &[]).fails(1, &["m.safetensors", "is there already", "--output"]);
    assert!(std::fs::read(&file).unwrap() == before);
    pack(model(), &folder.path().join("m.bin"), &[]).fails(2, &["m.bin", ".safetensors"]);
    pack(model(), &folder.path().join("none/m.safetensors"), &["--quiet"]).fails(1, &["none/"]);
    assert_eq!(names(folder.path()), ["m.safetensors"]);
}

/// The first conversations of comoe-tiny's held-out text.
fn held_out(folder: &Path, conversations: usize) -> PathBuf {
    let all = std::fs::read_to_string(tiny().join("../heldout.jsonl")).unwrap();
    let some: String = all.split_inclusive('\n').take(conversations).collect();
    let file = folder.join("text.jsonl");
    std::fs::write(&file, some).unwrap();
    file
}

#[test]
fn what_packing_costs_is_measured() {
    let folder = tempfile::tempdir().unwrap();
    let text = held_out(folder.path(), 16);
    let evaluate = ["--device=cpu", "--evaluate", text.to_str().unwrap(), "--json"];
    let measured = |format: &str| {
        let file = folder.path().join(format!("{format}.safetensors"));
        let found = pack(&tiny(), &file, &[&["--format", format][..], &evaluate].concat()).json();
        assert_eq!((&found["file"], &found["experts"]), (&file.to_str().unwrap().into(), &96.into()));
        assert_eq!(found["layers"].as_array().unwrap().len(), 6);
        let layers = found["layers"].as_array().unwrap().iter();
        assert!(layers.clone().all(|l| l["worst_error"].as_f64() >= l["error"].as_f64()), "{found}");
        // The file by itself, beside its source, says the same.
        let mut command = comoe();
        command.arg("verify").arg(&file).arg("--against").arg(tiny()).args(evaluate);
        let again = Running::start(&mut command).finish().json();
        assert_eq!(again["evaluation"], found["evaluation"]);
        let (a, b) = (again["error"].as_f64().unwrap(), found["error"].as_f64().unwrap());
        assert!((a - b).abs() <= 1e-4 * b, "{a} {b}");
        let number = |name: &str| found["evaluation"][name].as_f64().unwrap();
        assert!(number("tokens") > 300.0);
        assert_eq!(found["evaluation"]["reference_format"], "bf16");
        let more = number("perplexity") / number("reference_perplexity") - 1.0;
        println!("{format}: error {b:.2e}, KL {:.2e}, perplexity {more:+.2e} of BF16's", number("kl"));
        (b, number("kl"), more, number("same_choice"))
    };
    assert_eq!(measured("bf16"), (0.0, 0.0, 0.0, 1.0));
    let (error, kl, more, _) = measured("int8");
    assert!(error < 0.01 && 0.0 < kl && kl < 1e-3 && more.abs() < 1e-3, "{error} {kl} {more}");
    let (error, kl, more, same) = measured("int4");
    assert!(0.05 < error && error < 0.1 && 1e-4 < kl && kl < 1e-2, "{error} {kl}");
    assert!(more.abs() < 0.02 && same > 0.98, "{more} {same}");
}

#[test]
fn plain_text_is_measured_and_nothing_to_measure_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("m.safetensors");
    // Longer than the context of the model.
    let text = folder.path().join("text.txt");
    std::fs::write(&text, "Once upon a time there was a cat. ".repeat(200)).unwrap();
    let run = pack(&tiny(), &file, &["--format=int4", "--device=cpu", "--evaluate", text.to_str().unwrap()]);
    assert_eq!(run.answer(), format!("{}\n", file.display()));
    for said in ["int4-g64", "weights of experts", "perplexity", "KL divergence"] {
        assert!(run.stderr.contains(said), "{said}: {}", run.stderr);
    }
    let against = |options: &[&str]| Running::start(comoe().arg("verify").arg(&file).args(options)).finish();
    let (tiny, text, small) = (tiny(), text.to_str().unwrap(), model().to_str().unwrap());
    let tiny = tiny.to_str().unwrap();
    let run = against(&["--against", tiny]);
    assert!(run.answer().contains("96 experts") && run.answer().contains("weights of experts"), "{run:?}");
    against(&["--evaluate", text]).fails(2, &["--against", "m.safetensors"]);
    against(&["--against", small]).fails(1, &["not the same model"]);
    std::fs::write(text, "").unwrap();
    against(&["--against", tiny, "--evaluate", text]).fails(1, &["text.txt", "nothing to measure"]);
    std::fs::remove_file(text).unwrap();
    against(&["--against", tiny, "--evaluate", text]).fails(1, &["text.txt"]);
    let other = folder.path().join("other.safetensors");
    pack(model(), &other, &["--evaluate", text]).fails(1, &["text.txt"]);
    assert!(!other.exists(), "refused before it was packed");
}

#[test]
fn what_cannot_be_evaluated_is_refused_before_it_is_packed() {
    let folder = tempfile::tempdir().unwrap();
    let texts = folder.path().join("texts");
    std::fs::create_dir(&texts).unwrap();
    let text = |name: &str, content: &[u8]| {
        let path = texts.join(name);
        std::fs::write(&path, content).unwrap();
        path.display().to_string()
    };
    let good = text("good.txt", b"Once upon a time.");
    let (empty, bad) = (text("empty.txt", b""), text("bad.jsonl", b"{\"text\": 1}\n"));
    let binary = text("binary.txt", b"a\xff");
    let mut refused = vec![
        (vec!["--evaluate", &empty], vec!["empty.txt", "nothing to measure"]),
        (vec!["--evaluate", &bad], vec!["bad.jsonl", "line 1 is no conversation"]),
        (vec!["--evaluate", &binary], vec!["binary.txt", "UTF-8"]),
        (vec!["--evaluate", "/no/such.txt"], vec!["/no/such.txt", "give --evaluate a file of text"]),
    ];
    if cfg!(unix) {
        refused.push((vec!["--evaluate", "/dev/urandom"], vec!["/dev/urandom", "no regular file"]));
    }
    if cfg!(not(feature = "cuda")) {
        refused.push((vec!["--evaluate", &good, "--device=cuda"], vec!["device cuda:0"]));
    }
    let file = folder.path().join("m.safetensors");
    for (options, names) in &refused {
        pack(&tiny(), &file, options).fails(1, names);
        assert!(!file.exists(), "{options:?}");
    }
    pack(&tiny(), &file, &["--format=int4"]).answer();
    for (options, names) in &refused {
        let mut command = comoe();
        command.arg("verify").arg(&file).arg("--against").arg(tiny()).args(options);
        Running::start(&mut command).finish().fails(1, names);
    }
}

/// A file system that is full is one whose files may not grow, but for the number of the error.
#[cfg(unix)]
#[test]
fn a_write_that_fails_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("m.safetensors");
    let mut command = std::process::Command::new("sh");
    command.env("PROGRAM", env!("CARGO_BIN_EXE_comoe")).env("MODEL", model()).env("FILE", &file);
    // In units of 512 or 1024 bytes: either way less than the file.
    command
        .args(["-c", "trap '' XFSZ; ulimit -f 50; exec \"$PROGRAM\" pack \"$MODEL\" --quiet -o \"$FILE\""]);
    command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
    Running::start(&mut command).finish().fails(1, &["m.safetensors", "File too large"]);
    assert_eq!(names(folder.path()), [""; 0]);
}

#[cfg(unix)]
#[test]
fn a_kill_leaves_no_file_of_that_name_and_the_next_run_cleans_up() {
    let made = tempfile::tempdir().unwrap();
    // So large that packing it takes a while.
    let sizes = Sizes { layers: 3, experts: 24, hidden: 512, intermediate: 512, context: 512 };
    Checkpoint::new(sizes).write(made.path());
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("m.safetensors");
    let mut command = comoe();
    command.env("RAYON_NUM_THREADS", "1").args(["pack", "--format=int4", "-o"]).arg(&file).arg(made.path());
    let mut running = Running::start(&mut command);
    let started = Instant::now();
    while names(folder.path()).is_empty() {
        assert!(started.elapsed() < Duration::from_secs(60), "nothing is written");
        std::thread::sleep(Duration::from_millis(1));
    }
    running.child.kill().unwrap();
    assert!(!running.finish().status.success());
    let left = names(folder.path());
    assert!(left.len() == 1 && left[0].ends_with(".tmp"), "{left:?}");
    assert!(pack(made.path(), &file, &["--format=int4"]).status.success());
    assert_eq!(names(folder.path()), ["m.safetensors"]);
    assert!(verify(&file).status.success());
}
