//! A conversation: messages, and the sequence that keeps their keys and values between turns.

use std::ops::ControlFlow;

use super::{ChatTemplate, Message, Part, Role, Thinking};
use crate::error::{Error, Result};
use crate::generate::{Event, GenerateOptions, Generation, Session};
use crate::model::Model;

/// A conversation with a model.
///
/// Keys and values of the longest prefix that a turn has in common with the last one are kept. When the history
/// outgrows the planned context, that grows; where it cannot, the oldest turns are dropped, and the system message stays.
pub struct Conversation<'m> {
    session: Session<'m>,
    template: &'m ChatTemplate,
    messages: Vec<Message>,
}

/// An answer within a conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reply {
    /// What was generated: its text is all of it, thoughts and the marks around them included.
    pub generation: Generation,
    /// The answer alone.
    pub answer: String,
    /// What the model thought before it answered, where it did.
    pub thought: Option<String>,
    /// Turns (a message of the person with what the model answered) that were dropped to make room, this time.
    pub dropped_turns: usize,
}

impl<'m> Conversation<'m> {
    /// An empty conversation, with instructions or without.
    ///
    /// # Errors
    /// [`Error::NoTemplate`] when the model has no chat template.
    pub fn new(model: &'m Model, system: Option<&str>) -> Result<Self> {
        let template = model.template().ok_or(Error::NoTemplate)?;
        let messages = system.map(Message::system).into_iter().collect();
        Ok(Self { session: Session::new(model)?, template, messages })
    }

    /// The messages so far, without those that were dropped.
    pub fn messages(&self) -> &[Message] {
        &self.messages
    }

    /// Starts anew; the system message stays.
    ///
    /// # Errors
    /// As [`Session::reset`].
    pub fn reset(&mut self) -> Result<()> {
        self.messages.retain(|m| m.role == Role::System);
        self.session.reset()
    }

    /// Says something and generates the answer.
    ///
    /// At least a quarter of the planned context, or `max_tokens` if that is less, is kept free for the answer: by growing,
    /// else by dropping old turns. An answer ends at the end of what the context can grow to in any case.
    ///
    /// # Errors
    /// [`Error::MessageTooLong`] when the message does not fit even alone, [`Error::Template`], and those of
    /// [`Session::generate`]. After an error the conversation is as it was before.
    pub fn say(
        &mut self,
        text: &str,
        options: &GenerateOptions,
        listener: &mut dyn FnMut(Event<'_>) -> ControlFlow<()>,
    ) -> Result<Reply> {
        let model = self.session.model();
        let mut context = model.decoder().most_context();
        let wanted = options.max_tokens.unwrap_or(usize::MAX);
        let reserve = wanted.clamp(1, (model.decoder().context() / 4).max(1));

        let mut messages = self.messages.clone();
        messages.push(Message::user(text));
        let mut dropped_turns = 0;
        let (rendered, prompt) = loop {
            let rendered = self.template.render(&messages, true)?;
            let ids = model.tokenizer().encode(&rendered, false)?;
            if ids.len() + reserve <= context {
                match self.session.make_room(ids.len() + reserve) {
                    Ok(()) => break (rendered, ids),
                    // From here on it is as if the model could have no more.
                    Err(Error::ContextCannotGrow { context: now, .. }) => context = now,
                    Err(e) => return Err(e),
                }
                continue;
            }
            if !drop_oldest_turn(&mut messages) {
                if ids.len() < context {
                    break (rendered, ids);
                }
                let most = model.decoder().plan().max_positions;
                return Err(Error::MessageTooLong { tokens: ids.len(), context, most });
            }
            dropped_turns += 1;
        };
        let room = context.saturating_sub(prompt.len());
        let options =
            GenerateOptions { max_tokens: options.max_tokens.map(|n| n.min(room)), ..options.clone() };
        let mut heard = Heard::default();
        let mut thinking = Thinking::new(&rendered, model.tokenizer().has_channels());
        let generation = self.session.generate(&prompt, &options, &mut |event| match event {
            Event::Text(text) => {
                let mut parts = 0;
                let mut flow = ControlFlow::Continue(());
                thinking.push(text, &mut |part, text| {
                    parts += 1;
                    if heard.pass(part, text, listener).is_break() {
                        flow = ControlFlow::Break(());
                    }
                });
                // Every token is told, so that every token can be the last.
                if parts == 0 { listener(Event::Text("")) } else { flow }
            }
            other => listener(other),
        })?;
        thinking.finish(&mut |part, text| {
            // The answer has ended: there is nothing left to break off.
            let _ = heard.pass(part, text, listener);
        });
        let Heard { answer, thought } = heard;
        let thought = Some(thought).filter(|t| !t.is_empty());
        messages.push(Message { reasoning: thought.clone(), ..Message::assistant(answer.clone()) });
        self.messages = messages;
        Ok(Reply { generation, answer, thought, dropped_turns })
    }
}

/// What came of an answer so far.
#[derive(Default)]
struct Heard {
    answer: String,
    thought: String,
}

impl Heard {
    fn pass(
        &mut self,
        part: Part,
        text: &str,
        listener: &mut dyn FnMut(Event<'_>) -> ControlFlow<()>,
    ) -> ControlFlow<()> {
        match part {
            Part::Answer => {
                self.answer.push_str(text);
                listener(Event::Text(text))
            }
            Part::Thought => {
                self.thought.push_str(text);
                listener(Event::Thought(text))
            }
        }
    }
}

/// Removes the oldest turn unless it holds the last message.
fn drop_oldest_turn(messages: &mut Vec<Message>) -> bool {
    let Some(first) = messages.iter().position(|m| m.role != Role::System) else { return false };
    let next = messages.iter().skip(first + 1).position(|m| m.role == Role::User);
    match next {
        Some(next) => {
            messages.drain(first..first + 1 + next);
            true
        }
        None => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_turn_leaves_and_the_system_message_and_the_last_stay() {
        let mut m = vec![
            Message::system("s"),
            Message::user("1"),
            Message::assistant("a"),
            Message::user("2"),
            Message::assistant("b"),
            Message::user("3"),
        ];
        let texts = |m: &[Message]| m.iter().map(|m| m.content.clone()).collect::<Vec<_>>().concat();
        assert!(drop_oldest_turn(&mut m));
        assert_eq!(texts(&m), "s2b3");
        assert!(drop_oldest_turn(&mut m));
        assert_eq!(texts(&m), "s3");
        assert!(!drop_oldest_turn(&mut m));
        assert_eq!(texts(&m), "s3");
        assert!(!drop_oldest_turn(&mut Vec::new()));
    }
}
