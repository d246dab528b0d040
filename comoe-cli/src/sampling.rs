//! How tokens are chosen: the command line over the model's own defaults.

use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use comoe_models::load::ConfigFile;
use comoe_models::{Result as ModelResult, SamplerOptions};

use crate::args::SamplerArgs;
use crate::error::{Error, Result};

/// Where a model says how it likes to be sampled.
const DEFAULTS: &str = "generation_config.json";

/// Refuses options that no model could make right, before anything is loaded.
pub(crate) fn check(args: &SamplerArgs) -> Result<()> {
    over(args, SamplerOptions::default()).check().map_err(Error::Usage)
}

/// The options in force for the model in `folder`. Without `--seed` every call has another.
pub(crate) fn options(args: &SamplerArgs, folder: &Path) -> Result<SamplerOptions> {
    let path = folder.join(DEFAULTS);
    let file = ConfigFile::of_model_file(folder, DEFAULTS)?;
    let defaults = file.map_or_else(|| Ok(SamplerOptions::default()), |file| defaults(&file))?;
    let options = over(args, defaults);
    options.check().map_err(|e| match e {
        comoe_models::Error::BadOption { option, value, expected } => Error::BadDefault {
            path,
            option: format!("--{}", option.replace('_', "-")),
            reason: format!("{option} = {value}: {expected}"),
        },
        other => other.into(),
    })?;
    Ok(options)
}

/// What `generation_config.json` asks for, read as `transformers` does: greedy unless `do_sample` is true.
fn defaults(file: &ConfigFile) -> ModelResult<SamplerOptions> {
    let base = SamplerOptions::default();
    let sampled = file.or("do_sample", false)?;
    Ok(SamplerOptions {
        temperature: if sampled { file.or("temperature", 1.0)? } else { 0.0 },
        top_k: file.get("top_k")?.filter(|k| *k > 0),
        top_p: file.or("top_p", base.top_p)?,
        min_p: file.or("min_p", base.min_p)?,
        repetition_penalty: file.or("repetition_penalty", base.repetition_penalty)?,
        ..base
    })
}

fn over(args: &SamplerArgs, defaults: SamplerOptions) -> SamplerOptions {
    // 0 stands for "all", which the library says with `None`.
    let count = |asked: Option<usize>, default| asked.map_or(default, |n| (n > 0).then_some(n));
    SamplerOptions {
        temperature: args.temperature.unwrap_or(defaults.temperature),
        top_k: count(args.top_k, defaults.top_k),
        top_p: args.top_p.unwrap_or(defaults.top_p),
        min_p: args.min_p.unwrap_or(defaults.min_p),
        repetition_penalty: args.repetition_penalty.unwrap_or(defaults.repetition_penalty),
        repetition_window: count(args.repetition_window, defaults.repetition_window),
        seed: args.seed.unwrap_or_else(seed_of_now),
    }
}

/// Differs from run to run; below 2^53, so that every JSON reader can give it back.
fn seed_of_now() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    (now.as_micros() as u64) & ((1 << 53) - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args() -> SamplerArgs {
        SamplerArgs {
            max_tokens: None,
            temperature: None,
            top_k: None,
            top_p: None,
            min_p: None,
            repetition_penalty: None,
            repetition_window: None,
            seed: Some(7),
            raw: false,
        }
    }

    fn in_force(args: &SamplerArgs, file: &str) -> Result<SamplerOptions> {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(DEFAULTS), file).unwrap();
        options(args, dir.path())
    }

    #[test]
    fn the_command_line_goes_over_the_models_defaults() {
        let file = r#"{"do_sample": true, "temperature": 0.7, "top_k": 20, "top_p": 0.8}"#;
        let own = in_force(&args(), file).unwrap();
        assert_eq!((own.temperature, own.top_k, own.top_p, own.seed), (0.7, Some(20), 0.8, 7));
        let asked = SamplerArgs { temperature: Some(0.0), top_k: Some(0), ..args() };
        let both = in_force(&asked, file).unwrap();
        assert_eq!((both.temperature, both.top_k, both.top_p), (0.0, None, 0.8));
    }

    #[test]
    fn a_model_is_greedy_unless_it_asks_to_be_sampled() {
        assert_eq!(in_force(&args(), r#"{"temperature": 0.7}"#).unwrap().temperature, 0.0);
        assert_eq!(in_force(&args(), r#"{"do_sample": true}"#).unwrap().temperature, 1.0);
        let none = tempfile::tempdir().unwrap();
        assert_eq!(options(&args(), none.path()).unwrap().temperature, 0.0);
    }

    #[test]
    fn complaints_go_to_whoever_gave_the_value() {
        let e = check(&SamplerArgs { top_p: Some(1.5), ..args() }).unwrap_err();
        assert!(matches!(e, Error::Usage(_)) && e.to_string().contains("1.5"), "{e}");
        let e = in_force(&args(), r#"{"do_sample": true, "top_p": 0}"#).unwrap_err().to_string();
        assert!(e.contains(DEFAULTS) && e.contains("--top-p"), "{e}");
        let e = in_force(&args(), r#"{"do_sample": "yes"}"#).unwrap_err().to_string();
        assert!(e.contains(DEFAULTS) && e.contains("do_sample"), "{e}");
    }
}
