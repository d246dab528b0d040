//! Tells what a model thinks from what it answers, while it streams.

/// Texts around a thought with which an answer may begin: of DeepSeek, ERNIE, GLM, Hunyuan, Kimi, LFM2, MiniMax and
/// Qwen; of Mistral; of Gemma.
const BLOCKS: &[(&str, &str)] =
    &[("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<|channel>thought", "<channel|>")];
/// Tokens of these.
const OF_BLOCKS: &[&str] = &["<think>", "</think>", "[THINK]", "[/THINK]", "<|channel>", "<channel|>"];

/// What messages of gpt-oss are made of: `<|channel|>NAME<|message|>TEXT<|end|><|start|>ROLE`, where the channel `final`
/// is the answer.
const CHANNEL: &str = "<|channel|>";
const MESSAGE: &str = "<|message|>";
const START: &str = "<|start|>";
const END: &str = "<|end|>";
const FINAL: &str = "final";

/// Texts that tell thoughts from answers, and must be seen even where a tokenizer has them as special tokens.
pub(super) fn markers(channels: bool) -> impl Iterator<Item = &'static str> {
    let channels = if channels { &[CHANNEL, MESSAGE, START, END][..] } else { &[] };
    OF_BLOCKS.iter().chain(channels).copied()
}

/// The markers without which a model has no channels.
pub(super) const OF_CHANNELS: [&str; 2] = [CHANNEL, MESSAGE];

/// What a piece of text is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// The model thinks.
    Thought,
    /// The model answers.
    Answer,
}

/// Splits one streamed answer.
///
/// A thought is a block at the very start of the answer, or one that the prompt has opened already; a text that shows
/// such a block later on is an answer. Marks around thoughts, and white space along them, are left out.
#[derive(Debug)]
pub struct Thinking {
    state: State,
    /// Text that may be the beginning of a mark, or white space at the end of a thought.
    held: String,
}

#[derive(Debug, Clone, Copy)]
enum State {
    /// White space at most so far.
    Start,
    /// Behind the opening mark, in front of the first letter.
    Opened(&'static str),
    /// Within a thought that ends with this mark.
    Thought(&'static str),
    /// Between a thought and what follows.
    Gap,
    Answer,
    /// In front of a message's text.
    Header,
    /// In an answer that ends with [`END`].
    Final,
}

impl Thinking {
    /// For an answer to `prompt`. `channels`: the model speaks in channels, as gpt-oss does.
    pub fn new(prompt: &str, channels: bool) -> Self {
        let opened = BLOCKS.iter().find(|(open, _)| prompt.trim_end().ends_with(open));
        let state = match opened {
            Some((_, close)) => State::Opened(close),
            None if channels => State::Header,
            None => State::Start,
        };
        Self { state, held: String::new() }
    }

    /// Takes a piece of the answer and hands on what is certain.
    pub fn push(&mut self, text: &str, emit: &mut dyn FnMut(Part, &str)) {
        self.held.push_str(text);
        while self.step(emit) {}
    }

    /// Hands on the rest, at the end of the answer.
    pub fn finish(&mut self, emit: &mut dyn FnMut(Part, &str)) {
        let held = std::mem::take(&mut self.held);
        match self.state {
            State::Start | State::Answer | State::Final => given(Part::Answer, &held, emit),
            State::Thought(_) => given(Part::Thought, held.trim_end(), emit),
            // A message that has no text yet.
            State::Opened(_) | State::Gap | State::Header => {}
        }
    }

    /// Takes one decision; `false` when more text is needed for the next.
    fn step(&mut self, emit: &mut dyn FnMut(Part, &str)) -> bool {
        match self.state {
            State::Start => {
                let text = self.held.trim_start();
                if let Some((open, close)) = BLOCKS.iter().find(|(open, _)| text.starts_with(open)) {
                    let rest = text[open.len()..].to_owned();
                    return self.go(State::Opened(close), rest);
                }
                let undecided = BLOCKS.iter().any(|(open, _)| open.starts_with(text));
                !undecided && self.go(State::Answer, self.held.clone())
            }
            State::Opened(close) => {
                let rest = self.held.trim_start().to_owned();
                !rest.is_empty() && self.go(State::Thought(close), rest)
            }
            State::Thought(close) => {
                let (safe, after) = cut(&self.held, close);
                let safe = self.held[..safe].trim_end().len();
                given(Part::Thought, &self.held[..safe], emit);
                match after {
                    Some(after) => {
                        let next = if close == END { State::Header } else { State::Gap };
                        self.go(next, self.held[after..].to_owned())
                    }
                    None => {
                        self.held.drain(..safe);
                        false
                    }
                }
            }
            State::Gap => {
                let rest = self.held.trim_start().to_owned();
                !rest.is_empty() && self.go(State::Answer, rest)
            }
            State::Answer => {
                given(Part::Answer, &std::mem::take(&mut self.held), emit);
                false
            }
            State::Header => {
                let begins = |mark: &str| self.held.starts_with(mark) || mark.starts_with(self.held.as_str());
                if !begins(CHANNEL) && !begins(START) && !begins(MESSAGE) {
                    // Not what such models say: shown as it is.
                    return self.go(State::Answer, self.held.clone());
                }
                let Some(at) = self.held.find(MESSAGE) else { return false };
                let channel = self.held[..at].rsplit_once(CHANNEL).map_or(FINAL, |(_, name)| name);
                let answer = channel.split_whitespace().next() == Some(FINAL);
                let next = if answer { State::Final } else { State::Opened(END) };
                self.go(next, self.held[at + MESSAGE.len()..].to_owned())
            }
            State::Final => {
                let (safe, after) = cut(&self.held, END);
                given(Part::Answer, &self.held[..safe], emit);
                match after {
                    Some(after) => self.go(State::Header, self.held[after..].to_owned()),
                    None => {
                        self.held.drain(..safe);
                        false
                    }
                }
            }
        }
    }

    fn go(&mut self, state: State, held: String) -> bool {
        (self.state, self.held) = (state, held);
        true
    }
}

fn given(part: Part, text: &str, emit: &mut dyn FnMut(Part, &str)) {
    if !text.is_empty() {
        emit(part, text);
    }
}

/// How much of `text` comes before `mark` for certain, and where the text behind it begins if it is there.
fn cut(text: &str, mark: &str) -> (usize, Option<usize>) {
    if let Some(at) = text.find(mark) {
        return (at, Some(at + mark.len()));
    }
    let bytes = text.as_bytes();
    let tail = (1..mark.len().min(bytes.len() + 1)).rev().find(|n| bytes.ends_with(&mark.as_bytes()[..*n]));
    (bytes.len() - tail.unwrap_or(0), None)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Thought and answer of a text that comes in pieces.
    fn split(prompt: &str, channels: bool, pieces: &[&str]) -> (String, String) {
        let (mut thought, mut answer) = (String::new(), String::new());
        let mut thinking = Thinking::new(prompt, channels);
        let mut emit = |part, text: &str| match part {
            Part::Thought => thought.push_str(text),
            Part::Answer => answer.push_str(text),
        };
        for piece in pieces {
            thinking.push(piece, &mut emit);
        }
        thinking.finish(&mut emit);
        (thought, answer)
    }

    fn whole(text: &str) -> (String, String) {
        split("", false, &[text])
    }

    fn pair(thought: &str, answer: &str) -> (String, String) {
        (thought.to_owned(), answer.to_owned())
    }

    #[test]
    fn a_block_at_the_start_is_a_thought() {
        assert_eq!(whole("<think>\nSo:\n\nyes.\n</think>\n\nYes."), pair("So:\n\nyes.", "Yes."));
        assert_eq!(whole("\n<think></think>\nYes."), pair("", "Yes."));
        assert_eq!(whole("[THINK]hm[/THINK]Yes."), pair("hm", "Yes."));
        assert_eq!(whole("<|channel>thought\nhm\n<channel|>Yes."), pair("hm", "Yes."));
        assert_eq!(whole("<think>never ended "), pair("never ended", ""));
    }

    #[test]
    fn a_block_elsewhere_is_not() {
        for text in ["Write <think>x</think>.", "  plain  ", "", " ", "<thin", "<thinking>", "</think>"] {
            assert_eq!(whole(text), pair("", text));
        }
        assert_eq!(whole("<think>a</think>b <think>c</think>"), pair("a", "b <think>c</think>"));
    }

    #[test]
    fn the_prompt_may_have_opened_it() {
        let prompt = "<|im_start|>assistant\n<think>\n";
        assert_eq!(split(prompt, false, &["Hm.\n", "</think>\n\n", "Yes."]), pair("Hm.", "Yes."));
        // And closed it, which is how such models are asked not to think.
        assert_eq!(split("<think>\n\n</think>\n\n", false, &["Yes."]), pair("", "Yes."));
    }

    #[test]
    fn channels() {
        let text = "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant<|channel|>commentary to=f \
                    <|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>Yes, I do.";
        assert_eq!(split("<|start|>assistant", true, &[text]), pair("Let me see.{}", "Yes, I do."));
        assert_eq!(split("", true, &["<|message|>Yes."]), pair("", "Yes."));
        assert_eq!(split("", true, &["Yes."]), pair("", "Yes."));
        assert_eq!(split("", true, &["<|channel|>analysis"]), pair("", ""));
        // A model without channels may use these words.
        assert_eq!(split("", false, &["<|channel|>x"]), pair("", "<|channel|>x"));
    }

    proptest! {
        #[test]
        fn cuts_do_not_matter(
            parts in prop::collection::vec(
                prop_oneof![
                    Just("<think>".to_owned()), Just("</think>".into()), Just("<|channel|>".into()), Just("final".into()),
                    Just("<|message|>".into()), Just("<|end|>".into()), Just("\n".into()), "[a<é>/]{0,3}",
                ],
                0..10,
            ),
            cuts in prop::collection::vec(0usize..100, 0..10),
            channels: bool,
        ) {
            let text = parts.concat();
            let mut cuts: Vec<usize> = cuts.into_iter().filter(|c| *c <= text.len() && text.is_char_boundary(*c)).collect();
            cuts.extend([0, text.len()]);
            cuts.sort_unstable();
            let pieces: Vec<&str> = cuts.windows(2).map(|w| &text[w[0]..w[1]]).collect();
            prop_assert_eq!(split("", channels, &pieces), split("", channels, &[&text]));
        }
    }
}
