//! `comoe verify`: whether a packed file is as it was written.

use std::time::Instant;

use comoe_core::stats::human_bytes;
use comoe_core::store::PackedFile;

use crate::args::VerifyArgs;
use crate::error::{Error, Result};
use crate::load::Bar;
use crate::output::Answers;

/// Reads the file and prints what was compared.
///
/// # Errors
/// For a file that is no packed one, or differs; what differs is named.
pub(crate) fn run(args: &VerifyArgs) -> Result<()> {
    let packed = PackedFile::open(&args.file).map_err(Error::Core)?;
    let bar = Bar::new();
    let started = Instant::now();
    let found = packed.verify(Some(&|done, total| bar.verifying(done, total)));
    bar.clear();
    let found = found?;
    if !found.differing.is_empty() {
        let parts = found.differing.iter().map(ToString::to_string).collect();
        return Err(Error::Differs { path: args.file.clone(), parts });
    }
    let mut out = Answers::new();
    out.piece(&format!(
        "{}: {} experts and {} other tensors and files as they were written, {} read in {:.1} s",
        args.file.display(),
        found.experts,
        found.others,
        human_bytes(found.bytes),
        started.elapsed().as_secs_f64()
    ));
    out.end()
}
