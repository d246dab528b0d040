//! comoe-tiny with the same bytes for its pool in every format of its experts, and with its KV cache in INT8: how many
//! slots they are, how often they hit, how fast it decodes, and how far what it says is from the BF16 model.
//!
//! Everybody reads the same conversations, which training never saw, and is given their answers token by token (teacher
//! forcing), so that all distributions are of the same text. The distance is the mean over those tokens of KL(P || Q) in
//! nats, P the next token's distribution by the resident BF16 run and Q by the one measured (Kullback and Leibler 1951).

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use candle_core::{DType, Device};
use comoe_core::backend::cuda::ResidentFormat;
use comoe_core::{CacheOptions, Capacity, ExpertFormat};
use comoe_models::evaluate::{divergence, likeliest, read_conversations};
use comoe_models::{Decoder, KvFormat, LoadOptions, Message, Model, Role, Rows};
use serde::Serialize;

use crate::error::{Error, Result};
use crate::tiny::Script;

/// Formats side by side.
#[derive(Debug, Clone)]
pub struct Formats {
    /// Folder of the model.
    pub model: PathBuf,
    /// Conversations, one `{"messages": [{"role": .., "content": ..}, ..]}` a line.
    pub text: PathBuf,
    /// Most of them that are read; those that end with no answer of the model do not count.
    pub conversations: usize,
    /// Bytes for the pool.
    pub pool: u64,
    /// How often all of it is measured; speeds are the rounds' best and median.
    pub rounds: usize,
}

/// How experts are held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Held {
    format: ExpertFormat,
    resident: ResidentFormat,
    kv: KvFormat,
}

impl Held {
    fn as_stored(format: ExpertFormat) -> Self {
        Self { format, resident: ResidentFormat::AsStored, kv: KvFormat::Plain }
    }
}

/// A format, measured.
#[derive(Debug, Clone, Serialize)]
pub struct Measured {
    /// The format, and what becomes of it in the slots.
    pub format: String,
    /// Slots in the pool, and experts in all.
    pub slots: [usize; 2],
    /// Bytes of a slot.
    pub slot_bytes: usize,
    /// Hits per access, decoding.
    pub hit_rate: f64,
    /// Bytes moved on demand for a token.
    pub bytes_per_token: f64,
    /// Tokens a second: of the best round, and of the median one.
    pub tokens_per_s: [f64; 2],
    /// Mean KL divergence of next tokens from the resident BF16 run's, nats.
    pub kl: f64,
    /// Tokens whose likeliest is the resident BF16 run's too, 0 to 1.
    pub same_choice: f64,
    /// Tokens measured in a round.
    pub tokens: usize,
}

/// Logits of one token after the other, `[vocab]` each.
type Logits = Vec<Vec<f32>>;

/// What a round gave.
struct Round {
    time: Duration,
    accesses: u64,
    hits: u64,
    bytes: u64,
}

impl Formats {
    /// Measures on `device`. `say` hears of what takes long.
    ///
    /// # Errors
    /// [`Error::BadOption`] for text with no conversation in it, nothing to read or no rounds; for a pool that holds no
    /// token's experts, and whatever the model reports.
    pub fn run(&self, device: &Device, say: &dyn Fn(&str)) -> Result<Vec<Measured>> {
        if self.rounds == 0 {
            let expected = "at least 1 round is needed".to_owned();
            return Err(Error::BadOption { option: "--rounds", value: "0".to_owned(), expected });
        }
        let scripts = self.scripts()?;
        say("BF16, resident");
        let reference = self.open(device, Held::as_stored(ExpertFormat::Bf16), Capacity::All)?;
        let mut want = Logits::new();
        forced(&reference, &scripts, Some(&mut want))?;
        drop(reference);

        let mut decoders = Vec::new();
        for held in all_held(device) {
            decoders.push((held, self.open(device, held, Capacity::Bytes(self.pool))?));
        }
        let mut rounds: Vec<Vec<Round>> = decoders.iter().map(|_| Vec::new()).collect();
        let mut measured = Vec::new();
        for (held, decoder) in &decoders {
            say(&held.to_string());
            let mut got = Logits::new();
            forced(decoder, &scripts, Some(&mut got))?;
            let stats = decoder.experts().stats();
            measured.push(Measured {
                format: held.to_string(),
                slots: [stats.slots, stats.records],
                slot_bytes: stats.slot_bytes,
                hit_rate: 0.0,
                bytes_per_token: 0.0,
                tokens_per_s: [0.0; 2],
                kl: mean(want.iter().zip(&got).map(|(p, q)| divergence(p, q))),
                same_choice: mean(
                    want.iter().zip(&got).map(|(p, q)| f64::from(likeliest(p) == likeliest(q))),
                ),
                tokens: scripts.iter().map(|s| s.answer.len()).sum(),
            });
        }
        // In turn, so that whatever else the machine does disturbs all alike.
        for round in 1..=self.rounds {
            say(&format!("round {round} of {}", self.rounds));
            for ((_, decoder), rounds) in decoders.iter().zip(&mut rounds) {
                rounds.push(forced(decoder, &scripts, None)?);
            }
        }
        for (measured, rounds) in measured.iter_mut().zip(&mut rounds) {
            rounds.sort_by_key(|r| r.time);
            let tokens = measured.tokens as f64;
            let speed = |r: &Round| tokens / r.time.as_secs_f64();
            measured.tokens_per_s = [speed(&rounds[0]), speed(&rounds[rounds.len() / 2])];
            let sum = |of: fn(&Round) -> u64| rounds.iter().map(of).sum::<u64>() as f64;
            measured.hit_rate = sum(|r| r.hits) / sum(|r| r.accesses).max(1.0);
            measured.bytes_per_token = sum(|r| r.bytes) / tokens / rounds.len() as f64;
        }
        Ok(measured)
    }

    fn open(&self, device: &Device, held: Held, capacity: Capacity) -> Result<Decoder> {
        let mut options = LoadOptions {
            cache: CacheOptions { capacity, ..CacheOptions::default() },
            format: Some(held.format),
            kv: held.kv,
            dtype: if device.is_cpu() { DType::F32 } else { DType::BF16 },
            ..LoadOptions::default()
        };
        options.cuda.resident = held.resident;
        Ok(Decoder::open(&self.model, device, &options, &|_| {})?)
    }

    /// The conversations, up to the last answer and from there.
    fn scripts(&self) -> Result<Vec<Script>> {
        let bad = |expected: String| Error::BadOption {
            option: "--text",
            value: self.text.display().to_string(),
            expected,
        };
        let model = Model::load(&self.model, &Device::Cpu, &LoadOptions::default(), &|_| {})?;
        let template = model.template().ok_or_else(|| bad("the model has no chat template".to_owned()))?;
        let mut scripts = Vec::new();
        for (number, messages) in read_conversations(&self.text)?.into_iter().enumerate() {
            if scripts.len() == self.conversations {
                break;
            }
            let Some((Message { role: Role::Assistant, .. }, before)) = messages.split_last() else {
                continue;
            };
            let prompt = template.render(before, true)?;
            let whole = template.render(&messages, false)?;
            let answer = whole.strip_prefix(&prompt).ok_or_else(|| {
                bad(format!(
                    "conversation {}: the template writes another prompt before an answer",
                    number + 1
                ))
            })?;
            let encode = |text| model.tokenizer().encode(text, false);
            scripts.push(Script { prompt: encode(&prompt)?, answer: encode(answer)? });
        }
        if scripts.is_empty() {
            return Err(bad("no conversation is in it that ends with an answer".to_owned()));
        }
        Ok(scripts)
    }
}

impl std::fmt::Display for Held {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.format)?;
        if self.resident == ResidentFormat::Bf16 {
            f.write_str(", BF16 on load")?;
        }
        if self.kv == KvFormat::Int8 { f.write_str(", INT8 KV cache") } else { Ok(()) }
    }
}

/// What a device can hold.
fn all_held(device: &Device) -> Vec<Held> {
    use ExpertFormat as F;
    let as_stored = [F::Bf16, F::INT8, F::INT4, F::Mxfp4];
    let mut all: Vec<_> = as_stored.map(Held::as_stored).into();
    if !device.is_cpu() {
        let on_load = |format| Held { resident: ResidentFormat::Bf16, ..Held::as_stored(format) };
        all.extend([F::INT8, F::INT4].map(on_load));
    }
    all.push(Held { kv: KvFormat::Int8, ..Held::as_stored(F::Bf16) });
    all
}

/// Reads every prompt and is given its answer, token by token, each until its logits are on the host; only those steps are
/// timed and counted. `logits` gets what was said behind each token before one of the answer.
fn forced(decoder: &Decoder, scripts: &[Script], mut logits: Option<&mut Logits>) -> Result<Round> {
    let mut kv = decoder.new_kv()?;
    let mut round = Round { time: Duration::ZERO, accesses: 0, hits: 0, bytes: 0 };
    for script in scripts {
        kv.truncate(0);
        let row = decoder.forward(&script.prompt, &mut kv, Rows::Last)?;
        let mut row = row.squeeze(0)?.to_vec1::<f32>()?;
        decoder.experts().reset_stats();
        for id in &script.answer {
            if let Some(logits) = &mut logits {
                logits.push(row);
            }
            let start = Instant::now();
            row = decoder.forward(&[*id], &mut kv, Rows::Last)?.squeeze(0)?.to_vec1::<f32>()?;
            round.time += start.elapsed();
        }
        let stats = decoder.experts().stats();
        round.accesses += stats.accesses();
        round.hits += stats.hits();
        round.bytes += stats.bytes_moved;
    }
    Ok(round)
}

fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let (n, sum) = values.fold((0, 0.0), |(n, sum), v| (n + 1, sum + v));
    sum / f64::from(n.max(1))
}

/// Conversations of this checkout that training never saw.
pub fn held_out() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../assets/heldout.jsonl")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tiny;

    fn formats() -> Formats {
        // A quarter of the experts in BF16.
        let (pool, model, text) = (24 * 196_608, tiny::folder(), held_out());
        Formats { model, text, conversations: 2, pool, rounds: 1 }
    }

    /// The fewer bits, the more slots and hits, and the further from BF16, which a small pool does not change.
    #[test]
    fn at_equal_bytes_fewer_bits_hit_more_and_say_something_else() {
        let measured = formats().run(&Device::Cpu, &|_| {}).unwrap();
        let names: Vec<_> = measured.iter().map(|m| m.format.as_str()).collect();
        assert_eq!(names, ["bf16", "int8-g64", "int4-g64", "mxfp4", "bf16, INT8 KV cache"]);
        let [bf16, int8, int4, mxfp4, kv] = &measured[..] else { panic!("{measured:?}") };
        assert_eq!((bf16.slots, bf16.slot_bytes), ([24, 96], 196_608));
        assert_eq!((bf16.kl, bf16.same_choice), (0.0, 1.0), "the pool changed the output");
        assert!(
            measured.iter().all(|m| (m.slots[0] * m.slot_bytes) as u64 <= formats().pool),
            "{measured:?}"
        );
        assert!(bf16.slots[0] < int8.slots[0] && int8.slots[0] < int4.slots[0], "{measured:?}");
        assert!(bf16.hit_rate < int8.hit_rate && int8.hit_rate < int4.hit_rate, "{measured:?}");
        assert!(0.0 < int8.kl && int8.kl < int4.kl && int8.kl < mxfp4.kl && mxfp4.kl < 1.0, "{measured:?}");
        assert!(
            (kv.slots, kv.slot_bytes) == (bf16.slots, bf16.slot_bytes) && 0.0 < kv.kl && kv.kl < int4.kl,
            "{kv:?}"
        );
        assert!(int8.same_choice > int4.same_choice - 0.02 && int4.same_choice > 0.5, "{measured:?}");
        assert!(measured.iter().all(|m| m.tokens_per_s[0] >= m.tokens_per_s[1] && m.tokens > 20));
    }

    #[test]
    fn what_cannot_be_measured_says_so() {
        let said = |change: fn(&mut Formats)| {
            let mut formats = formats();
            change(&mut formats);
            formats.run(&Device::Cpu, &|_| {}).unwrap_err().to_string()
        };
        assert!(said(|f| f.rounds = 0).contains("--rounds"));
        assert!(said(|f| f.conversations = 0).contains("no conversation"));
        assert!(said(|f| f.pool = 1000).contains("1000"));
        assert!(said(|f| f.text = tiny::folder().join("config.json")).contains("line 1 is no conversation"));
        assert!(said(|f| f.text = PathBuf::from("/nowhere")).contains("/nowhere"));
    }
}
