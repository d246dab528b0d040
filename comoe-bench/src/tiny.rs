//! comoe-tiny, decoding: the same tokens for everybody, so that only speed differs.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use candle_core::{DType, Device};
use comoe_core::{CacheOptions, Capacity, ExpertFormat, Prefetch, PrefetchTrigger};
use comoe_models::blocks::kv_cache::KvCache;
use comoe_models::{Decoder, GenerateOptions, LoadOptions, Model, Rows};
use serde::{Deserialize, Serialize};

use crate::error::Result;
use crate::report::rss_anon;

/// Where the model lies in this checkout.
pub fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../assets/comoe-tiny")
}

/// How comoe-tiny's experts are held.
#[derive(Debug, Clone, Copy)]
pub struct Hold {
    /// Slots.
    pub capacity: Capacity,
    /// What is brought ahead of time.
    pub prefetch: Prefetch,
    /// When.
    pub trigger: PrefetchTrigger,
    /// The experts' format.
    pub format: ExpertFormat,
}

impl Hold {
    /// Every expert in its slot, as the checkpoint has it.
    pub const RESIDENT: Self = Self {
        capacity: Capacity::All,
        prefetch: Prefetch::Off,
        trigger: PrefetchTrigger::EndOfLayer,
        format: ExpertFormat::Bf16,
    };

    fn options(&self) -> LoadOptions {
        let cache = CacheOptions {
            capacity: self.capacity,
            prefetch: self.prefetch,
            prefetch_trigger: self.trigger,
            ..CacheOptions::default()
        };
        LoadOptions { cache, format: Some(self.format), dtype: DType::F32, ..LoadOptions::default() }
    }
}

/// A prompt, and the answer that the model itself gives: what everybody decodes.
#[derive(Debug, Clone)]
pub struct Script {
    /// Tokens of the prompt.
    pub prompt: Vec<u32>,
    /// Tokens of the answer.
    pub answer: Vec<u32>,
}

/// Lets comoe-tiny tell a story.
///
/// # Errors
/// When the model is not where it belongs.
pub fn script(folder: &Path) -> Result<Script> {
    let model = Model::load(folder, &Device::Cpu, &Hold::RESIDENT.options(), &|_| {})?;
    let message = [comoe_models::Message::user("Tell me a story about a fox and a lighthouse.")];
    let text = match model.template() {
        Some(template) => template.render(&message, true)?,
        None => message[0].content.clone(),
    };
    let prompt = model.tokenizer().encode(&text, false)?;
    let options = GenerateOptions { max_tokens: Some(160), ..GenerateOptions::default() };
    let answer = model.session()?.generate(&prompt, &options, &mut |_| ControlFlow::Continue(()))?;
    Ok(Script { prompt, answer: answer.tokens })
}

/// comoe-tiny on this crate's decoder.
pub struct Tiny {
    decoder: Decoder,
    kv: KvCache,
}

impl Tiny {
    /// Loads it.
    ///
    /// # Errors
    /// When the model is not where it belongs, or the slots do not fit.
    pub fn load(folder: &Path, device: &Device, hold: &Hold) -> Result<Self> {
        let decoder = Decoder::open(folder, device, &hold.options(), &|_| {})?;
        let kv = decoder.new_kv()?;
        Ok(Self { decoder, kv })
    }

    /// The decoder.
    pub fn decoder(&self) -> &Decoder {
        &self.decoder
    }

    /// Begins anew with the prompt.
    ///
    /// # Errors
    /// Those of the decoder.
    pub fn begin(&mut self, script: &Script) -> Result<()> {
        self.kv.truncate(0);
        self.decoder.forward(&script.prompt, &mut self.kv, Rows::Last)?;
        Ok(())
    }

    /// Decodes the answer, one token after the other, each until its logits are on the host. Returns the last ones.
    ///
    /// # Errors
    /// Those of the decoder.
    pub fn decode(&mut self, script: &Script) -> Result<Vec<f32>> {
        let mut logits = Vec::new();
        for id in &script.answer {
            let row = self.decoder.forward(&[*id], &mut self.kv, Rows::Last)?;
            logits = row.squeeze(0)?.to_vec1::<f32>()?;
        }
        Ok(logits)
    }
}

/// Memory of a whole run with so many slots.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct RunMemory {
    /// Slots in all.
    pub slots: usize,
    /// Bytes of all slots.
    pub pool_bytes: u64,
    /// Slots that were filled at least once.
    pub used: usize,
    /// Most memory at any time that no file backs, in bytes.
    pub peak_rss_anon: u64,
}

/// Loads comoe-tiny with `slots` slots, tells the story, and watches this process's memory meanwhile. Meaningful in a
/// process of its own.
///
/// # Errors
/// When the model is not where it belongs, or the slots do not fit.
pub fn run_memory(folder: &Path, slots: usize) -> Result<RunMemory> {
    let peak = Arc::new(AtomicU64::new(0));
    let done = Arc::new(AtomicBool::new(false));
    let watcher = std::thread::spawn({
        let (peak, done) = (peak.clone(), done.clone());
        move || {
            while !done.load(Ordering::Relaxed) {
                peak.fetch_max(rss_anon().unwrap_or(0), Ordering::Relaxed);
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    });
    let run = || -> Result<_> {
        let model = Model::load(folder, &Device::Cpu, &options(slots), &|_| {})?;
        for prompt in
            ["Tell me a story about a fox.", "What is 17 plus 25?", "Define the word river.", "Who are you?"]
        {
            let prompt = model.tokenizer().encode(prompt, false)?;
            let options = GenerateOptions { max_tokens: Some(100), ..GenerateOptions::default() };
            model.session()?.generate(&prompt, &options, &mut |_| ControlFlow::Continue(()))?;
        }
        peak.fetch_max(rss_anon().unwrap_or(0), Ordering::Relaxed);
        let stats = model.experts().stats();
        Ok((stats.slots, stats.pool_bytes(), stats.slots.min(stats.records_moved as usize)))
    };
    let result = run();
    done.store(true, Ordering::Relaxed);
    // The watcher does nothing that panics; without it the peak is what the end of the run saw.
    let _ = watcher.join();
    let (slots, pool_bytes, used) = result?;
    Ok(RunMemory { slots, pool_bytes, used, peak_rss_anon: peak.load(Ordering::Relaxed) })
}

fn options(slots: usize) -> LoadOptions {
    Hold { capacity: Capacity::Slots(slots), ..Hold::RESIDENT }.options()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_story_is_the_same_with_half_of_the_slots() {
        let script = script(&folder()).unwrap();
        assert!(script.answer.len() > 40, "{}", script.answer.len());
        let run = |hold: &Hold| {
            let mut tiny = Tiny::load(&folder(), &Device::Cpu, hold).unwrap();
            tiny.begin(&script).unwrap();
            tiny.decode(&script).unwrap()
        };
        let all = run(&Hold::RESIDENT);
        assert_eq!(all.len(), 4096);
        let half =
            Hold { capacity: Capacity::Fraction(0.5), prefetch: Prefetch::Correlation, ..Hold::RESIDENT };
        assert!(all.iter().zip(run(&half)).all(|(a, b)| a.to_bits() == b.to_bits()));
    }
}
