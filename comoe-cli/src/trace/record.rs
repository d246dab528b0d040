//! `comoe trace record`, and `--trace` of any run.

use std::io::{BufReader, Read};
use std::path::Path;

use comoe_core::store::Directory;
use comoe_core::trace::{Contents, Phase, Recorder, TraceInfo};
use comoe_models::ModelPlan;

use super::args::RecordArgs;
use super::name;
use crate::args::{OutputArgs, Think};
use crate::error::{Error, Result};
use crate::input::{Lines, STDIN};
use crate::load::{self, Loaded};
use crate::output::say;
use crate::output_file::{self, Kind};
use crate::sys::catch_interrupts;
use crate::talk::{Settings, Talk, check_prompt};
use crate::{model_path, sampling};

/// A file of prompts of this name stands for standard input.
const STDIN_NAME: &str = "-";

/// A trace that is being written while a model answers.
pub(crate) struct Recording {
    recorder: Recorder,
    path: std::path::PathBuf,
}

impl Recording {
    /// From now on the model's routing and `contents` are recorded, for the file at `path`.
    ///
    /// # Errors
    /// When the file cannot be made.
    pub(crate) fn start(path: &Path, loaded: &Loaded, contents: Contents) -> Result<Self> {
        let experts = loaded.model.experts();
        let info = TraceInfo {
            model: loaded.name(),
            top_k: loaded.model.decoder().plan().moe_layers().map(|l| l.1.router.top_k).max().unwrap_or(0),
            directory: experts.directory().clone(),
        };
        let recorder = Recorder::create(path, info, contents).map_err(Error::core)?;
        experts.observe(Some(Box::new(recorder.clone())));
        Ok(Self { recorder, path: path.to_owned() })
    }

    /// What follows belongs to this turn and phase.
    pub(crate) fn begin(&self, turn: u64, phase: Phase) {
        self.recorder.begin(u32::try_from(turn).unwrap_or(u32::MAX), phase);
    }

    /// Forgets the turn that was begun last.
    pub(crate) fn drop_turn(&self) {
        self.recorder.drop_turn();
    }

    /// Ends the file, and says how much is in it.
    ///
    /// # Errors
    /// With the first write that failed.
    fn finish(self, loaded: &Loaded, quiet: bool) -> Result<()> {
        loaded.model.experts().observe(None);
        let tokens = self.recorder.finish().map_err(Error::core)?;
        match tokens {
            _ if quiet => {}
            0 => say!("note: no turn was complete: {} is not written", name(&self.path)),
            _ => say!("routing of {tokens} tokens written to {}", name(&self.path)),
        }
        Ok(())
    }
}

/// Ends a run that went as `done` says: either way what was recorded and learned until then is kept.
///
/// # Errors
/// That of `done`, or else the first write of the recording that failed.
pub(crate) fn keep(
    loaded: &Loaded,
    recording: Option<Recording>,
    quiet: bool,
    done: Result<()>,
) -> Result<()> {
    let recorded = recording.map_or(Ok(()), |recording| recording.finish(loaded, quiet));
    loaded.keep_learned();
    if let (Err(_), Err(e)) = (&done, &recorded) {
        say!("warning: the routing is not recorded: {}", e.line());
    }
    done.and(recorded)
}

/// The experts of the model in `folder`, by its config alone; record sizes are not known from that, and are 1.
pub(super) fn experts_of(folder: &Path) -> Result<Directory> {
    experts_in(&model_path::find(Some(folder), false)?)
}

/// The same of the model at `path`.
pub(crate) fn experts_in(path: &Path) -> Result<Directory> {
    let plan = ModelPlan::decoder_of(path)?;
    Directory::new(plan.moe_layers().map(|(layer, moe)| (layer, moe.experts, 1))).map_err(Error::core)
}

pub(crate) fn run(args: &RecordArgs) -> Result<()> {
    sampling::check(&args.sampler)?;
    let mut others = args.model.files();
    if args.prompts != Path::new(STDIN_NAME) {
        others.push(("--prompts", &args.prompts));
    }
    output_file::check(Kind::Trace, ("--output", &args.output), &others)?;
    let prompts = prompts(&args.prompts, args.sampler.raw)?;
    let folder = model_path::find(args.model.model.as_deref(), args.quiet)?;
    let sampler = sampling::options(&args.sampler, &folder)?;
    let loaded = load::load(folder, &args.model, args.quiet)?;
    let contents = Contents { weights: !args.no_weights, guesses: args.stale_gate };
    let recording = Recording::start(&args.output, &loaded, contents)?;
    let output = OutputArgs {
        stats: false,
        json: false,
        quiet: args.quiet,
        think: Think::Show,
        trace: None,
        trace_stale_gate: false,
    };
    let settings = Settings { sampler, max_tokens: args.sampler.max_tokens, output: &output };
    let mut talk = match args.sampler.raw {
        true => Talk::without_template(&loaded, settings, None),
        false => Talk::new(&loaded, None, settings, None),
    }?
    .recorded(Some(&recording));
    catch_interrupts(false);
    let done = prompts.iter().try_for_each(|prompt| {
        talk.reset()?;
        talk.say(prompt)
    });
    // It borrows the recording to its very end.
    drop(talk);
    keep(&loaded, Some(recording), args.quiet, done)
}

/// The prompts of a file: its lines that are not blank.
fn prompts(path: &Path, raw: bool) -> Result<Vec<String>> {
    let mut prompts = Vec::new();
    let (reader, from): (Box<dyn Read>, _) = if path == Path::new(STDIN_NAME) {
        (Box::new(std::io::stdin()), STDIN.to_owned())
    } else {
        let file = std::fs::File::open(path).map_err(|e| Error::core(comoe_core::Error::io(path, e)))?;
        (Box::new(file), name(path))
    };
    let mut lines = Lines::new(BufReader::new(reader), from);
    while let Some(line) = lines.next_line()? {
        if check_prompt(&line, raw).is_ok() {
            prompts.push(line);
        }
    }
    if prompts.is_empty() { Err(Error::NoPrompts { path: path.to_owned() }) } else { Ok(prompts) }
}
