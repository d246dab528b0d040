//! `comoe logits`: what the model says of every token, for comparing engines.

use std::fs::File;
use std::io::{BufWriter, Write};

use comoe_core::WholeFile;
use comoe_models::load::ConfigFile;
use comoe_models::{Decoder, Rows, arch};

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
    let whole = WholeFile::create(&args.output).map_err(Error::core)?;
    let written = write(&logits, vocab, whole.file());
    written.map_err(|e| Error::core(comoe_core::Error::io(&args.output, e)))?;
    whole.replace().map_err(Error::core)?;
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

/// Writes them as a safetensors file of one tensor.
fn write(logits: &[f32], vocab: usize, file: &File) -> std::io::Result<()> {
    let (shape, end) = ([logits.len() / vocab.max(1), vocab], size_of_val(logits));
    let mut header =
        serde_json::json!({ LOGITS: { "dtype": "F32", "shape": shape, "data_offsets": [0, end] } })
            .to_string();
    // The data begins at a multiple of eight, as the format wants.
    header += &" ".repeat(header.len().next_multiple_of(8) - header.len());
    let mut out = BufWriter::new(file);
    out.write_all(&(header.len() as u64).to_le_bytes())?;
    out.write_all(header.as_bytes())?;
    for x in logits {
        out.write_all(&x.to_le_bytes())?;
    }
    out.flush()
}
