//! `comoe pull`: a model from the hub.

use crate::args::PullArgs;
use crate::error::Result;
use crate::hub;
use crate::output::Answers;

/// Fetches the model, and prints the folder that it is in.
///
/// # Errors
/// Those of [`hub::pull`].
pub(crate) fn run(args: &PullArgs) -> Result<()> {
    let folder = hub::pull(&args.model.parse()?, args.quiet, args.check)?;
    let mut out = Answers::new();
    out.piece(&folder.display().to_string());
    out.end()
}
