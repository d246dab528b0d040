use super::args::PlotArgs;
use crate::error::Result;
pub(crate) fn run(_args: &PlotArgs) -> Result<()> { Ok(()) }
