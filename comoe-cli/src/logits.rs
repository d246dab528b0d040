//! `comoe logits`: what the model says of every token, for comparing engines.

use candle_core::{Device, Tensor};
use comoe_models::load::ConfigFile;
use comoe_models::{Decoder, Rows, arch};

use crate::args::LogitsArgs;
use crate::error::{Error, Result};
use crate::output::say;
use crate::{load, model_path};

/// Name of the tensor that is written.
const LOGITS: &str = "logits";

/// Runs the tokens, all but the last `--decode` at once, and writes their logits.
///
/// # Errors
/// When a token is none of the model's, and what loading and running report.
pub(crate) fn run(args: &LogitsArgs) -> Result<()> {
    let (decode, tokens) = (args.decode, args.tokens.len());
    let Some(prefill) = tokens.checked_sub(decode) else {
        return Err(Error::DecodeTooMany { decode, tokens });
    };
    let folder = model_path::find(args.model.model.as_deref(), args.quiet)?;
    if args.output.metadata().is_ok_and(|found| !found.is_file()) {
        // Giving a finished file this name would replace what is there, such as a device.
        let reason = "is no regular file; give the name of one".to_owned();
        return Err(Error::Logits { path: args.output.clone(), reason });
    }
    // Before the weights are read.
    let vocab = arch::plan(&ConfigFile::of_model(&folder)?)?.vocab;
    if let Some(&id) = args.tokens.iter().find(|id| **id as usize >= vocab) {
        return Err(Error::NoSuchToken { id, vocab });
    }
    let loaded = load::load_decoder(folder, &args.model, args.quiet)?;
    let logits = logits(&loaded.model, &args.tokens, prefill)?;
    logits
        .save_safetensors(LOGITS, &args.output)
        .map_err(|source| Error::Logits { path: args.output.clone(), reason: source.to_string() })?;
    if !args.quiet {
        let path = args.output.display();
        say!(
            "logits [{tokens}, {vocab}] written to {path}, {prefill} tokens at once and {decode} one by one"
        );
    }
    Ok(())
}

/// Logits `[tokens, vocab]` on the CPU, the first `prefill` tokens at once.
fn logits(decoder: &Decoder, tokens: &[u32], prefill: usize) -> Result<Tensor> {
    let mut kv = decoder.new_kv()?;
    let (first, rest) = tokens.split_at(prefill);
    let steps = Some(first).filter(|f| !f.is_empty()).into_iter().chain(rest.chunks(1));
    let rows = steps
        .map(|step| Ok(decoder.forward(step, &mut kv, Rows::All)?.to_device(&Device::Cpu)?))
        .collect::<comoe_models::Result<Vec<_>>>()?;
    Ok(Tensor::cat(&rows, 0).map_err(comoe_models::Error::from)?)
}
