//! `comoe chat`: turns from a person at a terminal, or from a pipe.

use std::io::{BufRead, BufReader, IsTerminal};
use std::path::PathBuf;

use comoe_core::size::parse_size;
use comoe_core::stats::human_bytes;
use comoe_models::Decoder;
use rustyline::config::Behavior;
use rustyline::error::{ReadlineError, Signal};
use rustyline::history::FileHistory;
use rustyline::{Config, Editor};

use crate::args::ChatArgs;
use crate::error::{Error, Result};
use crate::input::{Lines, STDIN};
use crate::load::{self, Loaded};
use crate::output::say;
use crate::places::CacheFolder;
use crate::sys::{self, MemoryWatch, catch_interrupts};
use crate::talk::{Settings, Talk, check_prompt};
use crate::trace::{self, Recording};
use crate::{model_path, report, sampling};

const HELP: &str = "\
/help   this text
/stats  what the expert cache did so far, and the memory in use
/reset  forget the conversation
/vram SIZE  the most memory that the run may take from here on (such as 12G): experts' slots leave or come back
/quit   end (so does Ctrl-D, or Ctrl-C twice)
Ctrl-C stops an answer. A line that begins with a space is said even if a / follows.";

pub(crate) fn run(args: &ChatArgs) -> Result<()> {
    sampling::check(&args.sampler)?;
    args.output.check(&args.model)?;
    let memory = MemoryWatch::start();
    let folder = model_path::find(args.model.model.as_deref(), args.output.quiet)?;
    let sampler = sampling::options(&args.sampler, &folder)?;
    let loaded = load::load(folder, &args.model, args.output.quiet)?;
    let settings = Settings { sampler, max_tokens: args.sampler.max_tokens, output: &args.output };
    let recording = args
        .output
        .trace
        .as_deref()
        .map(|path| Recording::start(path, &loaded, args.output.contents()))
        .transpose()?;
    let mut talk = match args.sampler.raw {
        true => Talk::without_template(&loaded, settings, Some(&memory)),
        false => Talk::new(&loaded, args.system.as_deref(), settings, Some(&memory)),
    }?
    .recorded(recording.as_ref());
    let mut turns = Turns::open(args.output.quiet)?;
    catch_interrupts(turns.is_a_person());
    let done = answer_all(&mut turns, &mut talk, &loaded, &memory, args.sampler.raw);
    // It borrows the recording to its very end.
    drop(talk);
    trace::keep(&loaded, recording, args.output.quiet, done)?;
    if args.output.stats {
        report::say_cache(&loaded, &memory);
    }
    report::say_warnings(&loaded);
    Ok(())
}

/// Answers turns, and does what commands among them say, to the last.
fn answer_all(
    turns: &mut Turns,
    talk: &mut Talk<'_>,
    loaded: &Loaded,
    memory: &MemoryWatch,
    raw: bool,
) -> Result<()> {
    loop {
        let line = match turns.next_turn()? {
            Turn::Line(line) => line,
            Turn::End => return Ok(()),
        };
        if check_prompt(&line, raw).is_err() {
            continue;
        }
        if line.starts_with('/') {
            match line.trim_end() {
                "/quit" => return Ok(()),
                "/help" => say!("{HELP}"),
                "/stats" => say_stats(loaded, memory),
                "/reset" => {
                    talk.reset()?;
                    say!("the conversation is forgotten");
                }
                command if command.split_whitespace().next() == Some("/vram") => {
                    set_budget(loaded, command["/vram".len()..].trim());
                }
                other => say!("{other} is no command; /help lists them"),
            }
            continue;
        }
        match talk.say(&line) {
            Ok(_) => {}
            // A person can say something else; a pipe cannot.
            Err(Error::Models(e)) if turns.is_a_person() => say!("error: {}", Error::Models(e).line()),
            Err(e) => return Err(e),
        }
    }
}

fn say_stats(loaded: &Loaded, memory: &MemoryWatch) {
    report::say_cache(loaded, memory);
    report::say_warnings(loaded);
}

/// Says what came of it, or what is wrong with it.
fn set_budget(loaded: &Loaded, size: &str) {
    let decoder: &Decoder = loaded.model.as_ref();
    let set = parse_size(size).and_then(|bytes| {
        let planned = decoder.set_budget(bytes).map_err(|e| Error::from(e).line())?;
        Ok((bytes, planned))
    });
    match set {
        Ok((bytes, planned)) => {
            let force = decoder.experts().slots_in_force();
            let least = if planned > bytes { ", the fewest that work: more than asked" } else { "" };
            say!("{} slots of {}, {} in all{least}", force.slots, force.most, human_bytes(planned));
        }
        Err(reason) => say!("error: /vram {size}: {reason}"),
    }
}

enum Turn {
    Line(String),
    End,
}

/// Where turns come from.
enum Turns {
    Person(Box<Prompt>),
    Pipe(Lines<Box<dyn BufRead>>),
}

impl Turns {
    fn open(quiet: bool) -> Result<Self> {
        if !std::io::stdin().is_terminal() {
            let from = || STDIN.to_owned();
            let input = sys::input().map_err(|source| Error::Input { from: from(), source })?;
            return Ok(Self::Pipe(Lines::new(Box::new(BufReader::new(input)), from())));
        }
        if !quiet {
            say!("/help lists the commands, Ctrl-C stops an answer, Ctrl-D ends");
        }
        Ok(Self::Person(Box::new(Prompt::open()?)))
    }

    fn is_a_person(&self) -> bool {
        matches!(self, Self::Person(_))
    }

    fn next_turn(&mut self) -> Result<Turn> {
        sys::go_on()?;
        let turn = match self {
            Self::Person(prompt) => prompt.next_turn(),
            Self::Pipe(lines) => lines.next_line().map(|line| line.map_or(Turn::End, Turn::Line)),
        };
        // What came while it waited tells more than how that ended.
        sys::go_on()?;
        turn
    }
}

/// Line editing with a history that outlives the program.
struct Prompt {
    editor: Editor<(), FileHistory>,
    history: Option<PathBuf>,
}

impl Prompt {
    fn open() -> Result<Self> {
        // The terminal itself, so that a redirected standard output gets answers only.
        let config = Config::builder().auto_add_history(true).behavior(Behavior::PreferTerm).build();
        let mut editor = Editor::with_config(config)?;
        let history = CacheFolder::open().path.map(|folder| folder.join("history"));
        // There is none at first, and one that cannot be read is no reason not to talk.
        if let Some(history) = &history
            && let Err(e) = editor.load_history(history)
        {
            tracing::debug!("history {}: {e}", history.display());
        }
        Ok(Self { editor, history })
    }

    fn next_turn(&mut self) -> Result<Turn> {
        let mut interrupted = false;
        loop {
            return match self.editor.readline("> ") {
                Ok(line) => Ok(Turn::Line(line)),
                Err(ReadlineError::Eof) => Ok(Turn::End),
                Err(ReadlineError::Interrupted | ReadlineError::Signal(Signal::Interrupt)) => {
                    sys::go_on()?;
                    if interrupted {
                        return Ok(Turn::End);
                    }
                    interrupted = true;
                    say!("Ctrl-C once more, Ctrl-D or /quit ends");
                    continue;
                }
                // The window changed its size: the line is read anew.
                Err(ReadlineError::Signal(_)) => continue,
                Err(e) => Err(e.into()),
            };
        }
    }
}

impl Drop for Prompt {
    fn drop(&mut self) {
        if let Some(history) = &self.history
            && let Err(e) = self.editor.append_history(history)
        {
            tracing::warn!("history {}: {e}", history.display());
        }
    }
}
