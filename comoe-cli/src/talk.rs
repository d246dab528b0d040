//! One answer after the other, from a conversation or from plain text.

use std::ops::ControlFlow;

use comoe_core::trace::Phase;
use comoe_models::{
    Conversation, Event, Finish, GenerateOptions, Generation, Model, Reply, SamplerOptions, Session,
};

use crate::args::{OutputArgs, Think};
use crate::error::{Error, Result};
use crate::load::Loaded;
use crate::output::{Answers, say};
use crate::report::{self, Report};
use crate::sys::{self, Answering, MemoryWatch};
use crate::trace::Recording;

/// Most tokens of an answer unless asked otherwise. Models that never stop exist.
const MAX_TOKENS: usize = 1024;

/// How answers are made and shown.
pub(crate) struct Settings<'m> {
    pub(crate) sampler: SamplerOptions,
    pub(crate) max_tokens: Option<usize>,
    pub(crate) output: &'m OutputArgs,
}

/// A talk with a model, and where its answers go.
pub(crate) struct Talk<'m> {
    loaded: &'m Loaded,
    partner: Partner<'m>,
    settings: Settings<'m>,
    memory: Option<&'m MemoryWatch>,
    answers: Answers,
    /// Where the routing goes.
    recording: Option<&'m Recording>,
    /// Turns said, so that the same words said again are sampled anew.
    turns: u64,
}

impl<'m> Talk<'m> {
    /// A conversation through the model's chat template.
    ///
    /// # Errors
    /// When the model has none, or there is no memory for its KV cache.
    pub(crate) fn new(
        loaded: &'m Loaded,
        system: Option<&str>,
        settings: Settings<'m>,
        memory: Option<&'m MemoryWatch>,
    ) -> Result<Self> {
        let partner = Partner::Chat(loaded.model.conversation(system)?);
        Ok(Self { loaded, partner, settings, memory, answers: Answers::new(), recording: None, turns: 0 })
    }

    /// A text that every turn continues.
    ///
    /// # Errors
    /// When there is no memory for the KV cache.
    pub(crate) fn without_template(
        loaded: &'m Loaded,
        settings: Settings<'m>,
        memory: Option<&'m MemoryWatch>,
    ) -> Result<Self> {
        let partner = Partner::Text(RawText { session: loaded.model.session()?, tokens: Vec::new() });
        Ok(Self { loaded, partner, settings, memory, answers: Answers::new(), recording: None, turns: 0 })
    }

    /// Tells `recording` where turns and answers begin.
    pub(crate) fn recorded(self, recording: Option<&'m Recording>) -> Self {
        Self { recording, ..self }
    }

    /// Forgets what was said.
    ///
    /// # Errors
    /// When the device fails.
    pub(crate) fn reset(&mut self) -> Result<()> {
        Ok(match &mut self.partner {
            Partner::Chat(conversation) => conversation.reset(),
            Partner::Text(text) => text.reset(),
        }?)
    }

    /// Says `text` and prints the answer as it comes, until Ctrl-C stops it. A turn that fails is not recorded.
    ///
    /// # Errors
    /// When the text does not fit the context, the model fails, standard output cannot be written, or the run is to end,
    /// which [`sys::go_on`] says.
    pub(crate) fn say(&mut self, text: &str) -> Result<()> {
        sys::go_on()?;
        let said = self.answer(text);
        if let (Err(_), Some(recording)) = (&said, self.recording) {
            recording.drop_turn();
        }
        said
    }

    fn answer(&mut self, text: &str) -> Result<()> {
        let (turn, recording) = (self.turns, self.recording);
        let seed = self.settings.sampler.seed.wrapping_add(turn);
        self.turns += 1;
        if let Some(recording) = recording {
            recording.begin(turn, Phase::Prompt);
        }
        let options = GenerateOptions {
            max_tokens: self.settings.max_tokens,
            sampler: SamplerOptions { seed, ..self.settings.sampler.clone() },
            check_every: self.loaded.check,
            graph: self.loaded.graph,
            ..GenerateOptions::default()
        };
        let (answers, output) = (&mut self.answers, self.settings.output);
        let (json, shown) = (output.json, output.think == Think::Show);

        let answering = Answering::begin();
        let mut listen = |event: Event<'_>| {
            if let (Some(recording), Event::Prefill { done, total }) = (recording, event)
                && done == total
            {
                recording.begin(turn, Phase::Decode);
            }
            let written = match event {
                Event::Text(piece) if !json => answers.piece(piece),
                Event::Thought(piece) if !json && shown => answers.thought(piece),
                Event::Thought(_) if !json => answers.hidden_thought(),
                _ => true,
            };
            let on = written && !answering.interrupted();
            if on { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        };
        let reply = self.partner.say(text, options, &mut listen);
        drop(answering);
        if let Ok(reply) = &reply {
            self.loaded.answered(reply.generation.timings.decode);
        }
        let reply = match reply {
            Ok(reply) => reply,
            Err(e) => {
                // The line that was shown already ends before the complaint begins.
                let _ = self.answers.end();
                return Err(e.into());
            }
        };
        if json {
            let shown = Reply { thought: reply.thought.clone().filter(|_| shown), ..reply.clone() };
            self.answers.piece(&Report::new(self.loaded, &shown, seed, self.memory).line());
        }
        self.answers.end()?;
        if matches!(reply.generation.finish, Finish::Cancelled) {
            sys::go_on()?;
        }
        self.remark(&reply.generation, reply.dropped_turns);
        Ok(())
    }

    fn remark(&self, generation: &Generation, dropped_turns: usize) {
        let output = self.settings.output;
        if !output.quiet {
            match dropped_turns {
                0 => {}
                1 => say!("note: the context is full, the oldest turn was dropped"),
                n => say!("note: the context is full, the oldest {n} turns were dropped"),
            }
            match generation.finish {
                Finish::Stop => {}
                Finish::Length => say!(
                    "note: the answer was cut at {} tokens; --max-tokens and --context-limit set the limits",
                    generation.tokens.len()
                ),
                Finish::Cancelled => say!("note: the answer was stopped"),
            }
            if let Some(note) = &generation.context_note {
                say!("note: {note}");
            }
            if let Some(note) = self.loaded.partly_locked() {
                say!("note: {note}");
            }
            if let Some(reason) = &generation.graph_note {
                say!("note: decoded without a CUDA graph: {reason}");
            }
        }
        if output.stats {
            report::say_speed(generation);
        }
    }
}

/// Who is talked with.
enum Partner<'m> {
    /// Through the chat template.
    Chat(Conversation<'m>),
    /// Without.
    Text(RawText<'m>),
}

impl Partner<'_> {
    fn say(
        &mut self,
        text: &str,
        options: GenerateOptions,
        listen: &mut dyn FnMut(Event<'_>) -> ControlFlow<()>,
    ) -> comoe_models::Result<Reply> {
        match self {
            // The conversation makes room, and cuts the limit to what is left of the context.
            Self::Chat(conversation) => {
                let max_tokens = options.max_tokens.or(Some(MAX_TOKENS));
                conversation.say(text, &GenerateOptions { max_tokens, ..options }, listen)
            }
            Self::Text(raw) => {
                let generation = raw.continue_with(text, options, listen)?;
                Ok(Reply { answer: generation.text.clone(), thought: None, generation, dropped_turns: 0 })
            }
        }
    }
}

/// A text without a chat template.
struct RawText<'m> {
    session: Session<'m>,
    /// All of it, answers included.
    tokens: Vec<u32>,
}

impl RawText<'_> {
    fn reset(&mut self) -> comoe_models::Result<()> {
        self.tokens.clear();
        self.session.reset()
    }

    fn continue_with(
        &mut self,
        text: &str,
        options: GenerateOptions,
        listen: &mut dyn FnMut(Event<'_>) -> ControlFlow<()>,
    ) -> comoe_models::Result<Generation> {
        let model: &Model = self.session.model();
        let mut tokens = self.tokens.clone();
        tokens.extend(model.tokenizer().encode(text, tokens.is_empty())?);
        let room = model.decoder().most_context().saturating_sub(tokens.len());
        // A limit that was asked for is kept to the token, or refused; ours gives way to the context.
        let max_tokens = options.max_tokens.or(Some(MAX_TOKENS.min(room.max(1))));
        let generation =
            self.session.generate(&tokens, &GenerateOptions { max_tokens, ..options }, listen)?;
        tokens.extend(generation.tokens.iter().filter(|&&id| !model.is_stop(id)));
        self.tokens = tokens;
        Ok(generation)
    }
}

/// Refuses a prompt without text. A chat template would make tokens of it all the same.
pub(crate) fn check_prompt(text: &str, raw: bool) -> Result<()> {
    let empty = if raw { text.is_empty() } else { text.trim().is_empty() };
    if empty { Err(Error::EmptyPrompt) } else { Ok(()) }
}
