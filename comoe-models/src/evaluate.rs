//! How far what one model says is from what another one says: perplexity of a text under both, and the divergence between
//! them. For models that differ in how their experts are packed.

use std::path::Path;

use rayon::prelude::*;
use serde::Deserialize;

use crate::arch;
use crate::chat::{ChatTemplate, Message, Role, Tokenizer};
use crate::decoder::{Decoder, Rows};
use crate::error::{Error, Result};
use crate::load::{LoadOptions, ModelFiles, read_small};

/// Tokens whose logits are on the host at once, of either model.
const STEP: usize = 64;
/// Most bytes of a text: far more than anybody waits for.
const TEXT_BYTES: u64 = 64 << 20;

/// A text as sequences of tokens.
#[derive(Debug, Clone, PartialEq)]
pub struct EvaluationText {
    passages: Vec<Passage>,
}

/// A sequence, of which the tokens from `scored` (at least 1) on count; those before are what they follow.
#[derive(Debug, Clone, PartialEq)]
struct Passage {
    tokens: Vec<u32>,
    scored: usize,
}

impl EvaluationText {
    /// Reads a file of at most 64 MiB for the model at `model`, of which no weight is read. Of a `.jsonl` file each line is a conversation, as [`read_conversations`] has it: every answer in it
    /// counts, behind what was said before in the model's chat template. Any other file is plain text, cut into windows
    /// of the context that a model is planned for by default, each of which begins anew; all tokens but a window's first
    /// count.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::BadFile`] for a file that is no text or too long, has nothing to count, or a conversation
    /// that is longer than the context; [`Error::NoTemplate`]; what is wrong with the model's tokenizer or configuration.
    pub fn read(path: &Path, model: &Path) -> Result<Self> {
        let text = read_text(path)?;
        let files = ModelFiles::open(model)?;
        let plan = arch::plan(files.config())?;
        let context = LoadOptions::default().planned_context(plan.max_positions);
        let tokenizer = files.tokenizer()?;
        let passages = match path.extension().is_some_and(|e| e == "jsonl") {
            true => {
                let template = files.template()?.ok_or(Error::NoTemplate)?;
                answers(path, &text, &tokenizer, &template, context)?
            }
            false => windows(&text, &tokenizer, context)?,
        };
        let unknown = passages.iter().flat_map(|p| &p.tokens).find(|&&id| id as usize >= plan.vocab);
        if let Some(&id) = unknown {
            return Err(Error::UnknownToken { id, vocab: plan.vocab });
        }
        match passages.is_empty() {
            true => {
                Err(Error::bad_file(path, "has nothing to measure: fewer than two tokens, or no answers"))
            }
            false => Ok(Self { passages }),
        }
    }

    /// Tokens that count.
    pub fn tokens(&self) -> usize {
        self.passages.iter().map(|p| p.tokens.len() - p.scored).sum()
    }
}

fn windows(text: &str, tokenizer: &Tokenizer, context: usize) -> Result<Vec<Passage>> {
    let tokens = tokenizer.encode(text, true)?;
    let windows = tokens.chunks(context).filter(|window| window.len() > 1);
    Ok(windows.map(|window| Passage { tokens: window.to_vec(), scored: 1 }).collect())
}

fn answers(
    path: &Path,
    text: &str,
    tokenizer: &Tokenizer,
    template: &ChatTemplate,
    context: usize,
) -> Result<Vec<Passage>> {
    let mut passages = Vec::new();
    for (number, messages) in conversations(path, text)?.iter().enumerate() {
        let bad = |what: String| Error::bad_file(path, format!("conversation {}: {what}", number + 1));
        for at in (1..messages.len()).filter(|at| messages[*at].role == Role::Assistant) {
            let prompt = template.render(&messages[..at], true)?;
            let whole = template.render(&messages[..=at], false)?;
            let Some(answer) = whole.strip_prefix(&prompt) else {
                return Err(bad("the model's template writes another prompt before an answer".to_owned()));
            };
            let mut tokens = tokenizer.encode(&prompt, false)?;
            let scored = tokens.len();
            tokens.extend(tokenizer.encode(answer, false)?);
            if tokens.len() > context {
                return Err(bad(format!("{} tokens, and the context holds {context}", tokens.len())));
            }
            if scored > 0 && tokens.len() > scored {
                passages.push(Passage { tokens, scored });
            }
        }
    }
    Ok(passages)
}

fn read_text(path: &Path) -> Result<String> {
    let text = String::from_utf8(read_small(path, TEXT_BYTES)?);
    text.map_err(|e| Error::bad_file(path, format!("is no UTF-8 text: {}", e.utf8_error())))
}

/// Conversations of a file, one `{"messages": [{"role": "user", "content": ..}, ..]}` a line; empty lines are passed over.
///
/// # Errors
/// [`Error::Io`]; [`Error::BadFile`], which names the line.
pub fn read_conversations(path: &Path) -> Result<Vec<Vec<Message>>> {
    conversations(path, &read_text(path)?)
}

fn conversations(path: &Path, text: &str) -> Result<Vec<Vec<Message>>> {
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let parsed = lines.map(|(number, line)| {
        let conversation: Conversation = serde_json::from_str(line)
            .map_err(|e| Error::bad_file(path, format!("line {} is no conversation: {e}", number + 1)))?;
        let message = |m: Said| Message { role: m.role, content: m.content, reasoning: None };
        Ok(conversation.messages.into_iter().map(message).collect())
    });
    parsed.collect()
}

#[derive(Deserialize)]
struct Conversation {
    messages: Vec<Said>,
}

#[derive(Deserialize)]
struct Said {
    role: Role,
    content: String,
}

/// Two models over one text.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Evaluation {
    /// Tokens that counted.
    pub tokens: usize,
    /// Perplexity of the reference: `exp` of the mean negative log probability that it gives the text's tokens.
    pub reference_perplexity: f64,
    /// That of the other model.
    pub perplexity: f64,
    /// Mean over the tokens of `KL(P || Q)` in nats, P the reference's distribution of the token and Q the other's.
    pub kl: f64,
    /// The greatest of them.
    pub worst_kl: f64,
    /// Part of the tokens for which both find the same one likeliest, 0 to 1.
    pub same_choice: f64,
}

/// Runs both models over the text, side by side. Beside the models, their KV caches and the logits of 64 tokens each are in
/// memory. `progress` hears of the tokens read and the tokens in all.
///
/// # Errors
/// [`Error::BadOption`] for models of other vocabularies or other contexts than the text was cut for; [`Error::BadLogits`];
/// what the models report.
pub fn evaluate(
    reference: &Decoder,
    other: &Decoder,
    text: &EvaluationText,
    progress: &dyn Fn(u64, u64),
) -> Result<Evaluation> {
    let (vocab, others) = (reference.plan().vocab, other.plan().vocab);
    if vocab != others {
        return Err(Error::BadOption {
            option: "models to compare",
            value: format!("vocabularies of {vocab} and {others} tokens"),
            expected: "expected two forms of one model",
        });
    }
    let total = text.passages.iter().map(|p| p.tokens.len() as u64).sum();
    let (mut kv, mut other_kv) = (reference.new_kv()?, other.new_kv()?);
    let (mut sum, mut done) = (Sum::default(), 0);
    for Passage { tokens, scored } in &text.passages {
        kv.truncate(0);
        other_kv.truncate(0);
        // The last token's logits are about what comes behind the text.
        let (before, rest) = tokens[..tokens.len() - 1].split_at(scored - 1);
        if !before.is_empty() {
            reference.forward(before, &mut kv, Rows::Last)?;
            other.forward(before, &mut other_kv, Rows::Last)?;
        }
        for (step, next) in rest.chunks(STEP).zip(tokens[*scored..].chunks(STEP)) {
            let p = reference.forward(step, &mut kv, Rows::All)?.to_vec2::<f32>()?;
            let q = other.forward(step, &mut other_kv, Rows::All)?.to_vec2::<f32>()?;
            let terms = p.par_iter().zip(&q).zip(next).map(|((p, q), next)| Sum::of(p, q, *next as usize));
            // In the order of the text, so that a result can be had again.
            for term in terms.collect::<Result<Vec<_>>>()? {
                sum.add(&term);
            }
        }
        done += tokens.len() as u64;
        progress(done, total);
    }
    Ok(sum.mean())
}

/// What is summed over tokens.
#[derive(Default)]
struct Sum {
    tokens: usize,
    /// Negative log probabilities of the text's tokens, by the reference and the other model.
    nll: [f64; 2],
    kl: f64,
    worst_kl: f64,
    same: usize,
}

impl Sum {
    /// One token, `next`, by the logits of both models.
    fn of(p: &[f32], q: &[f32], next: usize) -> Result<Self> {
        for logits in [p, q] {
            if let Some(id) = logits.iter().position(|l| l.is_nan() || *l == f32::INFINITY) {
                return Err(Error::BadLogits { id, value: logits[id] });
            }
        }
        let kl = divergence(p, q);
        let nll = [p, q].map(|logits| log_sum(logits) - f64::from(logits[next]));
        Ok(Self { tokens: 1, nll, kl, worst_kl: kl, same: usize::from(likeliest(p) == likeliest(q)) })
    }

    fn add(&mut self, other: &Self) {
        self.tokens += other.tokens;
        self.nll = [self.nll[0] + other.nll[0], self.nll[1] + other.nll[1]];
        self.kl += other.kl;
        self.worst_kl = self.worst_kl.max(other.worst_kl);
        self.same += other.same;
    }

    fn mean(&self) -> Evaluation {
        let n = self.tokens.max(1) as f64;
        Evaluation {
            tokens: self.tokens,
            reference_perplexity: (self.nll[0] / n).exp(),
            perplexity: (self.nll[1] / n).exp(),
            kl: self.kl / n,
            worst_kl: self.worst_kl,
            same_choice: self.same as f64 / n,
        }
    }
}

/// Log of the sum of the exponentials, in F64.
fn log_sum(logits: &[f32]) -> f64 {
    let most = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    most + logits.iter().map(|l| (f64::from(*l) - most).exp()).sum::<f64>().ln()
}

/// `KL(P || Q)` in nats (Kullback and Leibler 1951), of the distributions that two rows of logits stand for.
pub fn divergence(p: &[f32], q: &[f32]) -> f64 {
    let (p_sum, q_sum) = (log_sum(p), log_sum(q));
    let term = |(p, q): (&f32, &f32)| {
        let (p, q) = (f64::from(*p) - p_sum, f64::from(*q) - q_sum);
        // What P never says adds nothing, whatever Q says.
        if p == f64::NEG_INFINITY { 0.0 } else { p.exp() * (p - q) }
    };
    p.iter().zip(q).map(term).sum()
}

/// The token with the greatest logit, the first of those.
pub fn likeliest(logits: &[f32]) -> usize {
    let by_logit = |a: &usize, b: &usize| logits[*a].total_cmp(&logits[*b]).then(b.cmp(a));
    (0..logits.len()).max_by(by_logit).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn logits(p: &[f32]) -> Vec<f32> {
        p.iter().map(|p| p.ln() + 3.0).collect()
    }

    #[test]
    fn divergence_and_perplexity_are_those_of_the_distributions() {
        let (p, q) = (logits(&[0.5, 0.5, 0.0]), logits(&[0.25, 0.5, 0.25]));
        let want = 0.5 * (0.5f64 / 0.25).ln();
        assert!((divergence(&p, &q) - want).abs() < 1e-6, "{} {want}", divergence(&p, &q));
        assert!(divergence(&q, &p).is_infinite() && divergence(&p, &p).abs() < 1e-12);
        assert_eq!((likeliest(&p), likeliest(&q)), (0, 1));

        let mut sum = Sum::default();
        sum.add(&Sum::of(&p, &q, 0).unwrap());
        sum.add(&Sum::of(&p, &p, 1).unwrap());
        let mean = sum.mean();
        assert_eq!((mean.tokens, mean.same_choice), (2, 0.5));
        assert!((mean.reference_perplexity - 2.0).abs() < 1e-6, "{mean:?}");
        assert!((mean.perplexity - 8f64.sqrt()).abs() < 1e-6, "{mean:?}");
        assert!((mean.kl - want / 2.0).abs() < 1e-6 && (mean.worst_kl - want).abs() < 1e-6, "{mean:?}");
        for bad in [f32::NAN, f32::INFINITY] {
            let error = Sum::of(&p, &[0.0, bad, 0.0], 0).err().unwrap().to_string();
            assert!(error.contains("token 1"), "{error}");
        }
    }

    #[test]
    fn a_line_that_is_no_conversation_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("text.jsonl");
        let good = r#"{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]}"#;
        std::fs::write(&path, format!("{good}\n\n{good}\n")).unwrap();
        let found = read_conversations(&path).unwrap();
        assert_eq!(found, vec![vec![Message::user("Hi"), Message::assistant("Hello.")]; 2]);
        std::fs::write(&path, format!("{good}\n{{\"text\": 1}}\n")).unwrap();
        let error = read_conversations(&path).unwrap_err().to_string();
        assert!(error.contains("line 2 is no conversation"), "{error}");
    }
}
