//! `comoe pack`: a model as one file.

use std::path::{Path, PathBuf};
use std::time::Instant;

use comoe_core::stats::human_bytes;
use comoe_models::Progress;
use comoe_models::load::Packer;

use crate::args::{Format, PackArgs};
use crate::error::{Error, Result};
use crate::load::{Bar, name_of_model};
use crate::output::{Answers, say};
use crate::{model_path, sys};

/// Writes the file, and prints its name.
///
/// # Errors
/// When the model cannot be read, the file is there already, or the disk has no room for it.
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
    let started = Instant::now();
    let bar = Bar::new();
    let report = packer.write(&file, &|done, total| bar.show(Progress::Convert { done, total }));
    bar.clear();
    let report = report?;
    if !args.quiet {
        let lost = report.requantisation_error.map_or_else(String::new, |e| {
            format!("; weights that were quantised already lost {e:.1e} more (relative, root mean square)")
        });
        say!(
            "{} experts in {} ({}) and {} of other weights and files, packed in {:.1} s{lost}",
            report.experts,
            packer.format(),
            human_bytes(report.expert_bytes),
            human_bytes(report.other_bytes),
            started.elapsed().as_secs_f64()
        );
    }
    let mut out = Answers::new();
    out.piece(&file.display().to_string());
    out.end()
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
    let folder = file.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    match sys::free_space(folder) {
        Some(free) if free < bytes => {
            Err(comoe_core::Error::DiskFull { path: file.to_owned(), bytes }.into())
        }
        _ => Ok(()),
    }
}
