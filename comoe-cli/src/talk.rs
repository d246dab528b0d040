//! One answer after the other, from a conversation or from plain text.

use std::ops::ControlFlow;

use comoe_models::{
    Conversation, Event, Finish, GenerateOptions, Generation, Model, Reply, SamplerOptions, Session,
};

use crate::args::{OutputArgs, SamplerArgs};
use crate::error::{Error, Result};
use crate::load::Loaded;
use crate::output::{Answers, say};
use crate::report::{self, Report};
use crate::sampling;
use crate::sys::{Answering, MemoryWatch};

/// Most tokens of an answer unless asked otherwise. Models that never stop exist.
const MAX_TOKENS: usize = 1024;

/// Who is talked with.
enum Partner<'m> {
    /// Through the chat template.
    Chat(Conversation<'m>),
    /// Without: every turn continues the text so far.
    Text(Session<'m>),
}

/// A talk with a model, and where its answers go.
pub(crate) struct Talk<'m> {
    loaded: &'m Loaded,
    partner: Partner<'m>,
    sampler: SamplerOptions,
    max_tokens: Option<usize>,
    output: &'m OutputArgs,
    memory: Option<&'m MemoryWatch>,
    answers: Answers,
    /// Turns answered, so that the same words said again are sampled anew.
    turns: u64,
}

impl<'m> Talk<'m> {
    /// # Errors
    /// When the model has no chat template and `--raw` was not given, or its sampling defaults are wrong.
    pub(crate) fn new(
        loaded: &'m Loaded,
        sampler: &SamplerArgs,
        system: Option<&str>,
        output: &'m OutputArgs,
        memory: Option<&'m MemoryWatch>,
    ) -> Result<Self> {
        let model: &Model = &loaded.model;
        let partner = match sampler.raw {
            true => Partner::Text(model.session()?),
            false => Partner::Chat(model.conversation(system)?),
        };
        Ok(Self {
            loaded,
            partner,
            sampler: sampling::options(sampler, &loaded.folder)?,
            max_tokens: sampler.max_tokens,
            output,
            memory,
            answers: Answers::new(),
            turns: 0,
        })
    }

    /// Forgets what was said.
    pub(crate) fn reset(&mut self) {
        match &mut self.partner {
            Partner::Chat(conversation) => conversation.reset(),
            Partner::Text(session) => session.reset(),
        }
    }

    /// Says `text` and prints the answer as it comes. Ctrl-C stops the answer.
    ///
    /// # Errors
    /// When the text does not fit the context, the model fails, or standard output cannot be written.
    pub(crate) fn say(&mut self, text: &str) -> Result<Finish> {
        let seed = self.sampler.seed.wrapping_add(self.turns);
        self.turns += 1;
        let sampler = SamplerOptions { seed, ..self.sampler.clone() };
        let Self { answers, partner, max_tokens, output, .. } = self;

        let answering = Answering::begin();
        let mut listen = |event: Event<'_>| {
            let written = match event {
                Event::Text(piece) if !output.json => answers.piece(piece),
                _ => true,
            };
            if written && !answering.interrupted() {
                ControlFlow::Continue(())
            } else {
                ControlFlow::Break(())
            }
        };
        let reply = match partner {
            Partner::Chat(conversation) => {
                let max_tokens = Some(max_tokens.unwrap_or(MAX_TOKENS));
                let options = GenerateOptions { max_tokens, sampler, ..GenerateOptions::default() };
                conversation.say(text, &options, &mut listen)
            }
            Partner::Text(session) => continue_text(session, text, *max_tokens, sampler, &mut listen),
        };
        drop(answering);
        let Reply { generation, dropped_turns } = match reply {
            Ok(reply) => reply,
            Err(e) => {
                // What was shown already ends before the complaint begins.
                let _ = self.answers.end();
                return Err(e.into());
            }
        };
        if self.output.json {
            self.answers.piece(&Report::new(self.loaded, &generation, seed, self.memory).line());
        }
        self.answers.end()?;
        self.remark(&generation, dropped_turns);
        Ok(generation.finish)
    }

    fn remark(&self, generation: &Generation, dropped_turns: usize) {
        if !self.output.quiet {
            match dropped_turns {
                0 => {}
                1 => say!("note: the context is full, the oldest turn was dropped"),
                n => say!("note: the context is full, the oldest {n} turns were dropped"),
            }
            match generation.finish {
                Finish::Stop => {}
                Finish::Length => say!(
                    "note: the answer was cut at {} tokens; --max-tokens and --context set the limits",
                    generation.tokens.len()
                ),
                Finish::Cancelled => say!("note: the answer was stopped"),
            }
        }
        if self.output.stats {
            report::say_speed(generation);
        }
    }
}

/// Continues what is in `session` with `text` and an answer.
fn continue_text(
    session: &mut Session<'_>,
    text: &str,
    max_tokens: Option<usize>,
    sampler: SamplerOptions,
    listen: &mut dyn FnMut(Event<'_>) -> ControlFlow<()>,
) -> comoe_models::Result<Reply> {
    let model = session.model();
    let mut prompt = session.tokens().to_vec();
    let first = prompt.is_empty();
    prompt.extend(model.tokenizer().encode(text, first)?);
    let room = model.decoder().context().saturating_sub(prompt.len());
    // A limit that was asked for is kept to the token, or refused; ours gives way to the context.
    let max_tokens = max_tokens.or(Some(MAX_TOKENS.min(room.max(1))));
    let options = GenerateOptions { max_tokens, sampler, ..GenerateOptions::default() };
    let generation = session.generate(&prompt, &options, listen)?;
    Ok(Reply { generation, dropped_turns: 0 })
}

/// Refuses a prompt without text. A chat template would make tokens of it all the same.
pub(crate) fn check_prompt(text: &str, raw: bool) -> Result<()> {
    let empty = if raw { text.is_empty() } else { text.trim().is_empty() };
    if empty { Err(Error::EmptyPrompt) } else { Ok(()) }
}
