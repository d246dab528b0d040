//! `comoe`: chat with big Mixture-of-Experts models.

mod args;
mod chat;
mod device;
mod doctor;
#[cfg(all(feature = "cuda", target_os = "linux", target_arch = "x86_64"))]
mod driver;
mod error;
mod generate;
mod hub;
mod input;
mod load;
mod logits;
mod memory;
mod model_path;
mod models;
mod output;
mod output_file;
mod pack;
mod pins;
mod places;
mod plan;
mod predictor;
mod pull;
mod quality;
mod report;
mod sampling;
mod sys;
mod talk;
mod trace;
mod verify;

use std::process::ExitCode;

use clap::Parser;
use tracing_subscriber::EnvFilter;

use crate::args::{Cli, Command};
use crate::output::say;

fn main() -> ExitCode {
    #[cfg(all(feature = "cuda", target_os = "linux", target_arch = "x86_64"))]
    driver::load();
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(e) => {
            // Help, version or a complaint, each to its stream; a stream that is closed changes nothing.
            let _ = e.print();
            return ExitCode::from(u8::try_from(e.exit_code()).unwrap_or(1));
        }
    };
    log();
    comoe_core::store::exit_on_lost_pages("comoe", error::FAILED);
    let done = match &cli.command {
        Command::Chat(args) => chat::run(args),
        Command::Generate(args) => generate::run(args),
        Command::Pull(args) => pull::run(args),
        Command::Pack(args) => pack::run(args),
        Command::Verify(args) => verify::run(args),
        Command::Models(args) => models::run(args),
        Command::Logits(args) => logits::run(args),
        Command::Doctor(args) => doctor::run(args),
        Command::Plan(args) => plan::run(args),
        Command::Trace(command) => trace::run(command),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            say!("comoe: {}", e.line());
            if let error::Error::Interrupted { signal } = e {
                sys::end_by(signal);
            }
            e.exit_code()
        }
    }
}

/// Sends what the libraries log to standard error. Their warnings are said by the program itself, so errors alone
/// are logged unless asked otherwise.
fn log() {
    let filter = EnvFilter::builder()
        .with_env_var("COMOE_LOG")
        .with_default_directive(tracing::level_filters::LevelFilter::ERROR.into())
        .from_env_lossy();
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).without_time().init();
}
