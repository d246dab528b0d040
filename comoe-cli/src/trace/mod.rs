//! `comoe trace`: routing recorded, looked at, and played over.

mod args;
mod plot;
mod predict;
mod record;
mod replay;
mod show;

use std::path::Path;

use comoe_core::trace::Trace;

pub(crate) use args::TraceCommand;
pub(crate) use record::{Recording, experts_in, keep};

use crate::error::{Error, Result};

pub(crate) fn run(command: &TraceCommand) -> Result<()> {
    match command {
        TraceCommand::Record(args) => record::run(args),
        TraceCommand::Show(args) => show::run(args),
        TraceCommand::Replay(args) => replay::run(args),
        TraceCommand::Predict(args) => predict::run(args),
        TraceCommand::Plot(args) => plot::run(args),
    }
}

/// Reads a trace, and sees that it is of the model asked for.
fn open(args: &args::FileArgs) -> Result<Trace> {
    let trace = Trace::open(&args.trace).map_err(Error::core)?;
    if let Some(model) = &args.model {
        trace.info().check_model(&record::experts_of(model)?).map_err(Error::core)?;
    }
    Ok(trace)
}

/// Prints `text` on standard output.
fn print(text: &str) -> Result<()> {
    let mut answers = crate::output::Answers::new();
    answers.piece(text);
    answers.end()
}

/// Prints rows of cells in columns, the first row above; the first column to the left, the others to the right.
fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |c: usize| rows.iter().filter_map(|r| r.get(c)).map(|s| s.chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut text = String::new();
    for row in rows {
        let cells: Vec<String> = row
            .iter()
            .zip(&widths)
            .enumerate()
            .map(
                |(c, (cell, &width))| {
                    if c == 0 { format!("{cell:<width$}") } else { format!("{cell:>width$}") }
                },
            )
            .collect();
        text += cells.join("  ").trim_end();
        text.push('\n');
    }
    text
}

/// JSON on one line.
fn json(value: &impl serde::Serialize) -> String {
    // Numbers, strings and lists only: nothing in it can fail to be written.
    serde_json::to_string(value).unwrap_or_default() + "\n"
}

/// A name for messages.
fn name(path: &Path) -> String {
    path.display().to_string()
}
