//! `comoe pack`: a model as one file.

use std::path::{Path, PathBuf};
use std::time::Instant;

use comoe_core::WholeFile;
use comoe_core::stats::human_bytes;
use comoe_models::Progress;
use comoe_models::load::Packer;
use serde::Serialize;

use crate::args::{Format, PackArgs};
use crate::error::{Error, Result};
use crate::load::{Bar, name_of_model};
use crate::output::{Answers, say};
use crate::quality::{Measure, Quality};
use crate::{model_path, sys};

/// Writes the file, says what that cost, and prints its name.
///
/// # Errors
/// When the model or the text to measure by cannot be read, the file is there already, or the disk has no room for it.
pub(crate) fn run(args: &PackArgs) -> Result<()> {
    let model = model_path::find(args.model.as_deref(), args.quiet)?;
    let format = match args.format {
        Format::Source => None,
        Format::Converted(format) => Some(format),
    };
    let packer = Packer::open(&model, format)?;
    let file = match &args.output {
        Some(file) => file.clone(),
        None => PathBuf::from(format!("{}-{}.safetensors", plain_name(&model), packer.format())),
    };
    check_target(&file, packer.bytes()?)?;
    // Before minutes of work.
    let measure = Measure::open(&args.quality, &model)?;
    let started = Instant::now();
    let bar = Bar::new();
    let report = packer.write(&file, &|done, total| bar.show(Progress::Convert { done, total }));
    bar.clear();
    let report = report?;
    if !args.quiet && !args.quality.json {
        say!(
            "{} experts in {} ({}) and {} of other weights and files, packed in {:.1} s",
            report.experts,
            packer.format(),
            human_bytes(report.expert_bytes),
            human_bytes(report.other_bytes),
            started.elapsed().as_secs_f64()
        );
    }
    let mut quality = Quality::new(&report.errors);
    // The file is there, however this goes, so its name is printed.
    let measured = match measure {
        Some(measure) => quality.measure((&model, packer.source_format()), &file, measure),
        None => Ok(()),
    };
    let mut out = Answers::new();
    if args.quality.json {
        let packed = Packed {
            file: &file,
            format: packer.format().to_string(),
            experts: report.experts,
            expert_bytes: report.expert_bytes,
            other_bytes: report.other_bytes,
            quality,
        };
        out.piece(&serde_json::to_string(&packed).unwrap_or_default());
    } else {
        if !args.quiet {
            say!("{}", quality.table());
        }
        out.piece(&file.display().to_string());
    }
    out.end()?;
    measured
}

/// What `--json` prints.
#[derive(Serialize)]
struct Packed<'a> {
    file: &'a Path,
    format: String,
    experts: usize,
    expert_bytes: u64,
    other_bytes: u64,
    #[serde(flatten)]
    quality: Quality,
}

/// The model's name without its organisation and what follows the name.
fn plain_name(model: &Path) -> String {
    let name = name_of_model(model);
    let name = name.rsplit('/').next().unwrap_or(&name);
    let name = name.split('@').next().unwrap_or(name);
    name.strip_suffix(".safetensors").unwrap_or(name).to_owned()
}

/// Refuses what would fail after minutes of work.
fn check_target(file: &Path, bytes: u64) -> Result<()> {
    if file.extension().is_none_or(|e| e != "safetensors") {
        return Err(Error::PackName { path: file.to_owned() });
    }
    if file.symlink_metadata().is_ok() {
        return Err(Error::PackExists { path: file.to_owned() });
    }
    WholeFile::create(file).map(drop)?;
    match sys::free_space(WholeFile::folder_of(file)) {
        Some(free) if free < bytes => {
            Err(comoe_core::Error::DiskFull { path: file.to_owned(), bytes }.into())
        }
        _ => Ok(()),
    }
}
