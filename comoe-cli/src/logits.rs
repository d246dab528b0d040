//! `comoe logits`: what the model says of every token, for comparing engines.

use comoe_core::WholeFile;
use comoe_models::load::ConfigFile;
use comoe_models::{Decoder, Rows, arch};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensorError};

use crate::args::LogitsArgs;
use crate::error::{Error, Result};
use crate::output::say;
use crate::output_file::{self, Kind};
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
    output_file::check(Kind::Logits, ("--output", &args.output), &args.model.files())?;
    let folder = model_path::find(args.model.model.as_deref(), args.quiet)?;
    // Before the weights are read.
    let vocab = arch::plan(&ConfigFile::of_model(&folder)?)?.vocab;
    if let Some(&id) = args.tokens.iter().find(|id| **id as usize >= vocab) {
        return Err(Error::NoSuchToken { id, vocab });
    }
    let loaded = load::load_decoder(folder, &args.model, args.quiet)?;
    let logits = logits(&loaded.model, &args.tokens, prefill)?;
    let bytes = file_of(&logits, vocab)
        .map_err(|e| Error::core(comoe_core::Error::io(&args.output, std::io::Error::other(e))))?;
    WholeFile::write(&args.output, &bytes).map_err(Error::core)?;
    if !args.quiet {
        let path = args.output.display();
        say!(
            "logits [{tokens}, {vocab}] written to {path}, {prefill} tokens at once and {decode} one by one"
        );
    }
    Ok(())
}

/// Logits `[tokens, vocab]`, row-major, the first `prefill` tokens at once.
fn logits(decoder: &Decoder, tokens: &[u32], prefill: usize) -> Result<Vec<f32>> {
    let mut kv = decoder.new_kv()?;
    let (first, rest) = tokens.split_at(prefill);
    let steps = Some(first).filter(|f| !f.is_empty()).into_iter().chain(rest.chunks(1));
    let rows = steps
        .map(|step| Ok(decoder.forward(step, &mut kv, Rows::All)?.flatten_all()?.to_vec1::<f32>()?))
        .collect::<comoe_models::Result<Vec<_>>>()?;
    Ok(rows.concat())
}

/// A safetensors file of one tensor.
fn file_of(logits: &[f32], vocab: usize) -> std::result::Result<Vec<u8>, SafeTensorError> {
    let bytes: Vec<u8> = logits.iter().flat_map(|x| x.to_le_bytes()).collect();
    let shape = vec![logits.len() / vocab.max(1), vocab];
    safetensors::serialize([(LOGITS, TensorView::new(Dtype::F32, shape, &bytes)?)], None)
}
