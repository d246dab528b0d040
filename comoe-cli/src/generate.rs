//! `comoe generate`: one prompt, one answer.

use crate::args::GenerateArgs;
use crate::error::Result;
use crate::load;
use crate::sys::{MemoryWatch, catch_interrupts};
use crate::talk::{Settings, Talk, check_prompt};
use crate::trace::{self, Recording};
use crate::{input, model_path, report, sampling};

/// A prompt of this text stands for standard input.
const STDIN: &str = "-";

pub(crate) fn run(args: &GenerateArgs) -> Result<()> {
    sampling::check(&args.sampler)?;
    let read;
    let prompt = match args.prompt.as_str() {
        STDIN => {
            read = input::read_prompt(std::io::stdin().lock())?;
            &read
        }
        text => text,
    };
    check_prompt(prompt, args.sampler.raw)?;

    args.output.check(&args.model)?;

    let memory = (args.output.stats || args.output.json).then(MemoryWatch::start);
    let folder = model_path::find(args.model.model.as_deref(), args.output.quiet)?;
    let sampler = sampling::options(&args.sampler, &folder)?;
    let loaded = load::load(folder, &args.model, args.output.quiet)?;
    let settings = Settings { sampler, max_tokens: args.sampler.max_tokens, output: &args.output };
    let talk = match args.sampler.raw {
        true => Talk::without_template(&loaded, settings, memory.as_ref()),
        false => Talk::new(&loaded, None, settings, memory.as_ref()),
    }?;
    let recording = args
        .output
        .trace
        .as_deref()
        .map(|path| Recording::start(path, &loaded, args.output.contents()))
        .transpose()?;
    catch_interrupts(false);
    let done = talk.recorded(recording.as_ref()).say(prompt);
    trace::keep(&loaded, recording, args.output.quiet, done)?;
    if args.output.stats
        && let Some(memory) = &memory
    {
        report::say_cache(&loaded, memory);
    }
    report::say_warnings(&loaded);
    Ok(())
}
