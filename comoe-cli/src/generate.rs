//! `comoe generate`: one prompt, one answer.

use crate::args::GenerateArgs;
use crate::error::Result;
use crate::load;
use crate::sys::MemoryWatch;
use crate::talk::{Talk, check_prompt};
use crate::{input, report, sampling};

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

    let memory = (args.output.stats || args.output.json).then(MemoryWatch::start);
    let loaded = load::load(&args.model, args.output.quiet)?;
    Talk::new(&loaded, &args.sampler, None, &args.output, memory.as_ref())?.say(prompt)?;
    if args.output.stats
        && let Some(memory) = &memory
    {
        report::say_cache(&loaded, memory);
    }
    report::say_warnings(&loaded);
    Ok(())
}
