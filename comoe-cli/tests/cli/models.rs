//! `comoe models`.

use std::path::Path;

use serde_json::Value;

use crate::program::{Running, comoe, model};

fn list(home: &Path, cache: &Path, extra: &[&str]) -> String {
    let mut command = comoe();
    command
        .arg("models")
        .args(extra)
        .env("COMOE_CACHE", cache)
        .env("HF_HOME", home)
        .env_remove("HF_HUB_CACHE");
    Running::start(&mut command).finish().answer().to_owned()
}

#[test]
fn families_models_and_converted_experts() {
    let (home, cache) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let empty = list(home.path(), cache.path(), &[]);
    for text in ["qwen3_moe", "gpt_oss", "comoe pull", "--format int4"] {
        assert!(empty.contains(text), "{text}: {empty}");
    }

    // A model that is whole, one of a family that does not work, and one that was never finished.
    let put = |name: &str, revision: &str, files: &[(&str, &[u8])]| {
        let folder = home.path().join("hub").join(format!("models--{}", name.replace('/', "--")));
        let commit = "c".repeat(40);
        for sub in ["refs", "blobs", &format!("snapshots/{commit}")] {
            std::fs::create_dir_all(folder.join(sub)).unwrap();
        }
        std::fs::write(folder.join("refs").join(revision), &commit).unwrap();
        for (file, bytes) in files {
            // Some tools make no links, and the content is here.
            std::fs::write(folder.join("snapshots").join(&commit).join(file), bytes).unwrap();
        }
        folder
    };
    let config = std::fs::read(model().join("config.json")).unwrap();
    let files = [("config.json", &config[..]), ("tokenizer.json", b"{}"), ("model.safetensors", &[0; 2048])];
    put("org/whole", "main", &files);
    put("org/dense", "main", &[("config.json", br#"{"model_type": "llama"}"#), files[1], files[2]]);
    let partial = put("org/partial", "v1", &files[..2]);
    std::fs::write(partial.join("blobs/abc.incomplete"), [0; 4096]).unwrap();

    let mut command = comoe();
    command.env("COMOE_CACHE", cache.path()).arg("generate").arg(model());
    Running::start(command.args(["-p=x", "--max-tokens=1", "--format=int8", "--device=cpu"]))
        .finish()
        .answer();

    let text = list(home.path(), cache.path(), &[]);
    let line =
        |name: &str| text.lines().find(|l| l.contains(name)).unwrap_or_else(|| panic!("{name}: {text}"));
    assert!(line("org/whole").contains("qwen3_moe"));
    assert!(line("org/dense").contains("cannot run") && line("org/dense").contains("llama"));
    assert!(line("org/partial@v1").contains("model.safetensors") && line("org/partial").contains("4.0 KiB"));
    assert!(line("experts-int8").contains("24 experts in 3 layers"));

    let json: Value = serde_json::from_str(&list(home.path(), cache.path(), &["--json"])).unwrap();
    let names: Vec<&str> =
        json["hub"].as_array().unwrap().iter().map(|m| m["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["org/dense", "org/partial@v1", "org/whole"]);
    let whole = &json["hub"][2];
    assert_eq!((&whole["family"], &whole["problem"]), (&"qwen3_moe".into(), &Value::Null));
    assert_eq!(whole["bytes"].as_u64(), Some(config.len() as u64 + 2 + 2048));
    assert!(Path::new(whole["folder"].as_str().unwrap()).join("config.json").is_file());
    assert_eq!((&json["converted"][0]["experts"], &json["converted"][0]["layers"]), (&24.into(), &3.into()));
    assert!(json["families"].as_array().unwrap().iter().any(|f| f == "mixtral"));
}
