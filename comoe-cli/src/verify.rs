//! `comoe verify`: whether a packed file is as it was written, and how far it is from what it was made of.

use std::path::Path;
use std::time::Instant;

use comoe_core::stats::human_bytes;
use comoe_core::store::PackedFile;
use comoe_models::load::Packer;
use serde::Serialize;

use crate::args::VerifyArgs;
use crate::error::{Error, Result};
use crate::load::Bar;
use crate::model_path;
use crate::output::Answers;
use crate::quality::{Measure, Quality};

/// Reads the file, and the model that it is to be compared with, and prints what was found.
///
/// # Errors
/// For a file that is no packed one, or differs; what differs is named.
pub(crate) fn run(args: &VerifyArgs) -> Result<()> {
    if args.quality.evaluate.is_some() && args.against.is_none() {
        return Err(Error::EvaluateAlone { path: args.file.clone() });
    }
    let packed = PackedFile::open(&args.file).map_err(Error::Core)?;
    let source = args.against.as_deref().map(|source| model_path::find(Some(source), false)).transpose()?;
    // Before minutes of reading.
    let measure = source.as_deref().map(|source| Measure::open(&args.quality, source)).transpose()?.flatten();
    let packer = source.as_deref().map(|source| Packer::open(source, None)).transpose()?;
    let bar = Bar::new();
    let started = Instant::now();
    let found = packed.verify(Some(&|done, total| bar.verifying(done, total)));
    bar.clear();
    let (found, took) = (found?, started.elapsed().as_secs_f64());
    if !found.differing.is_empty() {
        let parts: Vec<String> = found.differing.iter().map(ToString::to_string).collect();
        if args.quality.json {
            let mut out = Answers::new();
            out.piece(&verified(args, &found, None));
            out.end()?;
        }
        return Err(Error::Differs { path: args.file.clone(), parts });
    }
    // What was found is told, however the rest goes.
    let (mut quality, mut measured) = (None, Ok(()));
    if let (Some(source), Some(packer)) = (&source, &packer) {
        let errors = packer.errors_of(packed, &|done, total| bar.comparing(done, total));
        bar.clear();
        match errors {
            Err(e) => measured = Err(Error::from(e)),
            Ok(errors) => {
                let compared = quality.insert(Quality::new(&errors));
                if let Some(measure) = measure {
                    measured = compared.measure((source, packer.source_format()), &args.file, measure);
                }
            }
        }
    }
    let mut out = Answers::new();
    if args.quality.json {
        out.piece(&verified(args, &found, quality));
        out.end()?;
        return measured;
    }
    out.piece(&format!(
        "{}: {} experts and {} other tensors and files as they were written, {} read in {took:.1} s",
        args.file.display(),
        found.experts,
        found.others,
        human_bytes(found.bytes),
    ));
    if let Some(quality) = quality {
        out.piece(&format!("\n{}", quality.table()));
    }
    out.end()?;
    measured
}

/// The object that `--json` prints.
fn verified(args: &VerifyArgs, found: &comoe_core::store::Verified, quality: Option<Quality>) -> String {
    let verified = Verified {
        file: &args.file,
        experts: found.experts,
        others: found.others,
        bytes: found.bytes,
        differing: found.differing.iter().map(ToString::to_string).collect(),
        quality,
    };
    serde_json::to_string(&verified).unwrap_or_default()
}

#[derive(Serialize)]
struct Verified<'a> {
    file: &'a Path,
    experts: usize,
    others: usize,
    bytes: u64,
    /// Names of all parts that are not as they were written.
    differing: Vec<String>,
    #[serde(flatten)]
    quality: Option<Quality>,
}
