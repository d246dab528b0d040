//! The generation loop: one sequence, its KV cache, text as it comes.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use candle_core::Tensor;

use crate::blocks::kv_cache::KvCache;
use crate::chat::{Detokenizer, StopStrings};
use crate::decode_graph::DeviceSteps;
use crate::decoder::Rows;
use crate::error::{Error, Result};
use crate::model::Model;
use crate::sampler::{Sampler, SamplerOptions};

/// How an answer is generated.
#[derive(Debug, Clone)]
pub struct GenerateOptions {
    /// Tokens to generate at most; `None` goes on until the model stops or the context is full and cannot grow.
    pub max_tokens: Option<usize>,
    /// How tokens are chosen.
    pub sampler: SamplerOptions,
    /// Texts that end the answer, besides the model's own stop tokens. They are not shown.
    pub stop: Vec<String>,
    /// After every so many decode steps of a session, some slots of the expert cache are compared with the store; a
    /// difference ends the answer with an error that names the expert. 0: never.
    pub check_every: usize,
    /// On a GPU: replays the decode step as one CUDA graph where it can, with nothing of the host in a token's path. The
    /// tokens are the same without it. [`Generation::graph_note`] says why there was none.
    pub graph: bool,
}

impl Default for GenerateOptions {
    /// Greedy, until the model stops, with a graph where there can be one.
    fn default() -> Self {
        Self {
            max_tokens: None,
            sampler: SamplerOptions::default(),
            stop: Vec::new(),
            check_every: 0,
            graph: true,
        }
    }
}

/// Slots compared at a time; the next check goes on with the next ones.
const CHECKED_AT_ONCE: usize = 8;

/// What happens while an answer is generated. The listener can break off after each event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event<'a> {
    /// A chunk of the prompt went through the model.
    Prefill {
        /// Prompt tokens done (those whose keys and values were kept from before count as done).
        done: usize,
        /// Prompt tokens in all.
        total: usize,
    },
    /// A token was generated, and this text (often empty) became final. Also sent once at the end for text that was
    /// held back.
    Text(&'a str),
    /// The same for what the model thinks before it answers. Conversations tell the two apart, sessions do not.
    Thought(&'a str),
}

/// Why an answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Finish {
    /// The model said a stop token, or a stop string was reached.
    Stop,
    /// As many tokens as asked for, or as the context can hold.
    Length,
    /// The listener broke it off.
    Cancelled,
}

/// How long the parts of an answer took.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Timings {
    /// From the prompt to its logits.
    pub prefill: Duration,
    /// Everything after that.
    pub decode: Duration,
    /// Prompt tokens that went through the model (not those kept from before).
    pub prefill_tokens: usize,
    /// Steps of the decode phase: one token each. The first token of an answer comes from the prefill.
    pub decode_steps: usize,
    /// Those of them that were replayed as a graph.
    pub graph_steps: usize,
}

impl Timings {
    /// Tokens per second of the decode phase; 0 before its first step.
    pub fn decode_tokens_per_second(&self) -> f64 {
        let seconds = self.decode.as_secs_f64();
        if self.decode_steps == 0 || seconds == 0.0 { 0.0 } else { self.decode_steps as f64 / seconds }
    }
}

/// An answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Generation {
    /// Its text, without stop strings and special tokens.
    pub text: String,
    /// Its tokens, a stop token included.
    pub tokens: Vec<u32>,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Prompt tokens whose keys and values were kept from before.
    pub reused_tokens: usize,
    /// Why it ended.
    pub finish: Finish,
    /// How long it took.
    pub timings: Timings,
    /// Why no graph was replayed, where one was asked for on a GPU.
    pub graph_note: Option<String>,
    /// Whether replayed steps guess ahead now, where the clock has decided that: with
    /// [`Prefetch::Auto`](comoe_core::Prefetch::Auto), driven by a GPU.
    pub asks_ahead: Option<bool>,
    /// What became of the planned context, where the sequence is longer.
    pub context_note: Option<String>,
}

/// One sequence on a model: its KV cache, and the tokens in it.
pub struct Session<'m> {
    model: &'m Model,
    kv: KvCache,
    tokens: Vec<u32>,
    /// Decode steps of all answers.
    steps: usize,
    /// On a GPU: chooses tokens there, and holds the graph of a decode step on `kv`.
    device: Option<DeviceSteps<'m>>,
}

/// Who chooses the tokens of an answer.
enum Chooser<'s, 'm> {
    Host { sampler: Sampler, history: Vec<u32> },
    Device { steps: &'s mut DeviceSteps<'m>, graph: bool },
}

impl Chooser<'_, '_> {
    /// The token behind those in `kv`, from logits `[1, vocab]`.
    fn choose(&mut self, logits: &Tensor, kv: &mut KvCache) -> Result<u32> {
        match self {
            Self::Host { sampler, history } => {
                let id = sampler.sample(&logits.squeeze(0)?.to_vec1::<f32>()?, history)?;
                history.push(id);
                Ok(id)
            }
            Self::Device { steps, .. } => steps.choose(logits, kv),
        }
    }
}

impl<'m> Session<'m> {
    /// An empty sequence.
    ///
    /// # Errors
    /// When there is no memory for the KV cache.
    pub fn new(model: &'m Model) -> Result<Self> {
        let decoder = model.decoder();
        let device = DeviceSteps::of(decoder)?;
        Ok(Self { model, kv: decoder.new_kv()?, tokens: Vec::new(), steps: 0, device })
    }

    /// The model.
    pub fn model(&self) -> &'m Model {
        self.model
    }

    /// Tokens whose keys and values are held.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Forgets everything.
    ///
    /// # Errors
    /// When the device fails while the KV cache goes back to its planned size.
    pub fn reset(&mut self) -> Result<()> {
        self.kv.truncate(0);
        self.tokens.clear();
        self.cut_back()
    }

    /// Makes room for `tokens` tokens in all: see [`Decoder::make_room`](crate::Decoder::make_room).
    ///
    /// # Errors
    /// As that.
    pub fn make_room(&mut self, tokens: usize) -> Result<()> {
        let mut device = self.device.take();
        let made = self.make_room_with(tokens, device.as_mut());
        self.device = device;
        made
    }

    fn make_room_with(&mut self, tokens: usize, steps: Option<&mut DeviceSteps<'m>>) -> Result<()> {
        if tokens <= self.kv.capacity() {
            // Perhaps there was memory for the cache last time, and for nothing else.
            return steps.map_or(Ok(()), |steps| steps.reach_to(self.kv.capacity()));
        }
        let decoder = self.model.decoder();
        match steps {
            None => decoder.make_room(&mut self.kv, tokens),
            Some(steps) => {
                steps.let_go();
                decoder.make_room(&mut self.kv, tokens)?;
                steps.reach_to(self.kv.capacity())
            }
        }
    }

    /// Back to the planned context, as soon as what is held fits.
    fn cut_back(&mut self) -> Result<()> {
        let decoder = self.model.decoder();
        if self.kv.capacity() <= decoder.context() || self.kv.len() > decoder.context() {
            return Ok(());
        }
        if let Some(steps) = &mut self.device {
            steps.let_go();
        }
        decoder.cut_back(&mut self.kv)
    }

    /// What became of the planned context.
    fn context_note(&self) -> Option<String> {
        let (planned, now) = (self.model.decoder().context(), self.kv.capacity());
        (now > planned).then(|| {
            let force = self.model.experts().slots_in_force();
            let slots = match force.slots == force.most {
                true => "in memory that was free".to_owned(),
                false => format!("the experts have {} slots of {} left", force.slots, force.most),
            };
            format!("the context grew from {planned} to {now} tokens; {slots}")
        })
    }

    /// Answers `prompt`. Keys and values of the longest common prefix of it and of what went through before are kept.
    /// Where the sequence outgrows the planned context, it grows ([`Decoder::make_room`](crate::Decoder::make_room)); an
    /// answer that finds no room any more ends there. It is cut back when a prompt fits the plan again.
    ///
    /// # Errors
    /// [`Error::ContextCannotGrow`] for a prompt that there is no memory for, [`Error::EmptyPrompt`],
    /// [`Error::PromptTooLong`], [`Error::GenerationTooLong`], [`Error::BadOption`], and what the model reports. The session can
    /// go on afterwards.
    pub fn generate(
        &mut self,
        prompt: &[u32],
        options: &GenerateOptions,
        listener: &mut dyn FnMut(Event<'_>) -> ControlFlow<()>,
    ) -> Result<Generation> {
        let most = self.most_tokens(prompt.len(), options.max_tokens)?;
        options.sampler.check()?;
        let planned = self.model.decoder().context();
        self.keep_common_prefix(prompt);
        if prompt.len() + most.min(planned / 4) <= planned {
            self.cut_back()?;
        }
        self.make_room(prompt.len() + 1)?;
        if let Some(steps) = &mut self.device {
            steps.begin(&options.sampler, prompt)?;
        }
        let mut device = self.device.take();
        let chooser = match &mut device {
            Some(steps) => Chooser::Device { steps, graph: options.graph },
            None => {
                let sampler = Sampler::new(options.sampler.clone())?;
                Chooser::Host { sampler, history: prompt.to_vec() }
            }
        };
        let mut answer = self.answer(prompt, options, most, chooser, listener);
        if let Some(steps) = &mut device {
            steps.settle();
            if let (Ok(answer), true) = (&mut answer, options.graph) {
                answer.graph_note = steps.note().map(str::to_owned);
                answer.timings.graph_steps = steps.replayed();
                answer.asks_ahead = steps.asks();
            }
        }
        self.device = device;
        if let Ok(answer) = &mut answer {
            answer.context_note = self.context_note();
        }
        // A step that was enqueued ahead, behind the last token, does not count.
        self.kv.truncate(self.tokens.len());
        answer
    }

    fn answer(
        &mut self,
        prompt: &[u32],
        options: &GenerateOptions,
        most: usize,
        mut chooser: Chooser<'_, 'm>,
        listener: &mut dyn FnMut(Event<'_>) -> ControlFlow<()>,
    ) -> Result<Generation> {
        let mut stops = StopStrings::new(&options.stop)?;
        let mut detokenizer = Detokenizer::new();

        let started = Instant::now();
        let reused = self.keep_common_prefix(prompt);
        let mut answer = Generation {
            text: String::new(),
            tokens: Vec::new(),
            prompt_tokens: prompt.len(),
            reused_tokens: reused,
            finish: Finish::Cancelled,
            timings: Timings { prefill_tokens: prompt.len() - reused, ..Timings::default() },
            graph_note: None,
            asks_ahead: None,
            context_note: None,
        };
        let logits = self.prefill(prompt, listener)?;
        answer.timings.prefill = started.elapsed();
        let Some(logits) = logits else { return Ok(answer) };

        let started = Instant::now();
        let mut by_string = false;
        let mut id = chooser.choose(&logits, &mut self.kv)?;
        answer.finish = loop {
            answer.tokens.push(id);
            if self.model.is_stop(id) {
                break Finish::Stop;
            }
            let shown;
            (shown, by_string) = stops.push(&detokenizer.push(self.model.tokenizer(), id)?);
            answer.text.push_str(&shown);
            let flow = listener(Event::Text(&shown));
            if by_string {
                break Finish::Stop;
            }
            if flow.is_break() {
                break Finish::Cancelled;
            }
            if answer.tokens.len() == most {
                break Finish::Length;
            }
            let Some(next) = self.next(id, most - answer.tokens.len(), &mut chooser)? else {
                break Finish::Length;
            };
            id = next;
            answer.timings.decode_steps += 1;
            self.steps += 1;
            if options.check_every > 0 && self.steps.is_multiple_of(options.check_every) {
                self.model.experts().check_sample(CHECKED_AT_ONCE)?;
            }
        };
        if !by_string {
            let (mut rest, by_string) = stops.push(&detokenizer.flush(self.model.tokenizer())?);
            if by_string {
                answer.finish = Finish::Stop;
            } else {
                rest.push_str(&stops.flush());
            }
            if !rest.is_empty() {
                answer.text.push_str(&rest);
                // The answer has ended: there is nothing left to break off.
                let _ = listener(Event::Text(&rest));
            }
        }
        answer.timings.decode = started.elapsed();
        Ok(answer)
    }

    /// How many tokens may be generated behind a prompt.
    fn most_tokens(&self, prompt: usize, asked: Option<usize>) -> Result<usize> {
        let context = self.model.decoder().most_context();
        if prompt == 0 {
            return Err(Error::EmptyPrompt);
        }
        if prompt >= context {
            let most = self.model.decoder().plan().max_positions;
            return Err(Error::PromptTooLong { prompt, context, most });
        }
        match asked {
            Some(0) => Err(Error::BadOption {
                option: "max_tokens",
                value: "0".into(),
                expected: "expected at least 1, or nothing to go on until the model stops",
            }),
            Some(asked) if asked > context - prompt => {
                Err(Error::GenerationTooLong { prompt, asked, context })
            }
            Some(asked) => Ok(asked),
            None => Ok(context - prompt),
        }
    }

    /// Cuts the sequence to what it has in common with `prompt`, short of its last token, whose logits are needed.
    fn keep_common_prefix(&mut self, prompt: &[u32]) -> usize {
        let common = self.tokens.iter().zip(prompt).take_while(|(a, b)| a == b).count();
        let keep = common.min(prompt.len() - 1);
        self.kv.truncate(keep);
        self.tokens.truncate(keep);
        keep
    }

    /// Runs what is new of the prompt, chunk by chunk. `None` when the listener broke it off.
    fn prefill(
        &mut self,
        prompt: &[u32],
        listener: &mut dyn FnMut(Event<'_>) -> ControlFlow<()>,
    ) -> Result<Option<Tensor>> {
        loop {
            let done = self.tokens.len();
            let chunk = self.model.decoder().next_chunk(done, prompt.len() - done);
            let logits = self.advance(&prompt[done..done + chunk])?;
            let done = done + chunk;
            let flow = listener(Event::Prefill { done, total: prompt.len() });
            if flow.is_break() {
                return Ok(None);
            }
            if done == prompt.len() {
                return Ok(Some(logits));
            }
        }
    }

    fn advance(&mut self, ids: &[u32]) -> Result<Tensor> {
        let logits = self.model.decoder().forward(ids, &mut self.kv, Rows::Last)?;
        self.tokens.extend_from_slice(ids);
        Ok(logits)
    }

    /// Runs the token `id` and chooses the one behind it. `left` are the tokens still wanted, at least 1. `None` when there
    /// is no room for it.
    fn next(&mut self, id: u32, left: usize, chooser: &mut Chooser<'_, 'm>) -> Result<Option<u32>> {
        if let Chooser::Device { steps, graph: true } = chooser
            && let Some(next) = steps.next(&mut self.kv, left)?
        {
            self.tokens.push(id);
            return Ok(Some(next));
        }
        let steps = match chooser {
            Chooser::Device { steps, .. } => Some(&mut **steps),
            Chooser::Host { .. } => None,
        };
        match self.make_room_with(self.tokens.len() + 1, steps) {
            Ok(()) => {}
            Err(Error::ContextCannotGrow { .. } | Error::ContextTooLarge { .. }) => return Ok(None),
            Err(e) => return Err(e),
        }
        let logits = self.advance(&[id])?;
        chooser.choose(&logits, &mut self.kv).map(Some)
    }
}

impl Drop for Session<'_> {
    /// Slots that gave up memory for this sequence get it back.
    fn drop(&mut self) {
        self.kv.truncate(0);
        // A device that fails says so to whoever uses it next.
        let _ = self.cut_back();
    }
}
