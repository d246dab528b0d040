//! A synthetic model of a real shape, reading prompts: tokens a second by length and by slots, and how much of that time
//! the link to the GPU would have needed alone.

use std::time::Instant;

use candle_core::Device;
use comoe_core::CacheStats;
use comoe_core::machine::gb_per_s;
use comoe_models::Rows;
use serde::Serialize;

use crate::decode::{Decode, Running};
use crate::error::{Error, Result};
use crate::noise::Noise;
use crate::timeline::Row;

/// Prompts to be measured, one length after the other, on one model.
#[derive(Debug, Clone)]
pub struct Prefill {
    /// The model; its prompt, steps and warm-up do not matter. Slots 0: the fewest that a cache takes, of which nothing is
    /// left when a layer's turn comes again.
    pub model: Decode,
    /// Tokens of each prompt.
    pub prompts: Vec<usize>,
    /// Prompts of each length that are measured, behind one that is not.
    pub repeats: usize,
    /// GB/s of plain copies from page-locked memory, where the experts are behind a link.
    pub link: Option<f64>,
}

/// What the prompts of one length gave; the median of its prompts.
#[derive(Debug, Clone, Serialize)]
pub struct Measured {
    /// Name of the shape.
    pub shape: String,
    /// Layers with experts.
    pub layers: usize,
    /// The experts' format.
    pub format: String,
    /// As the backend names it.
    pub device: String,
    /// Slots, and records in all.
    pub slots: [usize; 2],
    /// Slots of the ring, on top.
    pub ring: usize,
    /// Tokens of the prompt.
    pub prompt: usize,
    /// Seconds of each prompt, in order.
    pub seconds: Vec<f64>,
    /// Tokens a second.
    pub tokens_per_s: f64,
    /// Bytes that came to the device for one prompt, on demand and ahead.
    pub bytes: f64,
    /// Of them, sent for ahead and not used.
    pub wasted: f64,
    /// GB/s of the copies while they ran.
    pub gb_per_s: f64,
    /// Time that the bytes take at the link's speed, over the time of the prompt; `None` without a link.
    pub link_share: Option<f64>,
    /// Compute waiting for copies, ms per prompt.
    pub stalled_ms: f64,
    /// Accesses that found their record in a slot or in the ring.
    pub hit_rate: f64,
}

impl Prefill {
    /// Measures on `device`. `say` hears of what takes long.
    ///
    /// # Errors
    /// For options that cannot be run, and whatever the cache and the model report.
    pub fn run(&self, device: &Device, say: &dyn Fn(&str)) -> Result<Vec<Measured>> {
        let bad = |option, expected: &str| {
            let (value, expected) = ("0".to_owned(), expected.to_owned());
            Err(Error::BadOption { option, value, expected })
        };
        let Some(longest) = self.prompts.iter().copied().max().filter(|_| !self.prompts.contains(&0)) else {
            return bad("--prompt", "at least 1 token is needed");
        };
        if self.repeats == 0 {
            return bad("--repeats", "at least 1 prompt is needed");
        }
        say("making the experts");
        let model = Decode { warm_up: [longest, 0], steps: 1, ..self.model.clone() };
        let (cache, _) = model.cache(device)?;
        let info = cache.backend_info().clone();
        say("making the dense part");
        let Running::Model { decoder, mut kv, .. } = model.model(cache, device)? else {
            let expected = "a prompt needs the whole model".to_owned();
            return Err(Error::BadOption { option: "--part", value: "experts".to_owned(), expected });
        };
        say("running");
        let vocab = decoder.plan().vocab;
        let mut noise = Noise::of(model.seed, 4);
        let mut all = Vec::new();
        for &prompt in &self.prompts {
            let mut runs = Vec::new();
            for run in 0..=self.repeats {
                let ids: Vec<u32> = (0..prompt).map(|_| noise.below(vocab) as u32).collect();
                kv.truncate(0);
                decoder.experts().reset_stats();
                let timeline = model.timeline.as_ref().filter(|_| run == self.repeats);
                if let Some(timeline) = timeline {
                    timeline.begin(decoder.experts())?;
                }
                let start = Instant::now();
                decoder.forward(&ids, &mut kv, Rows::Last)?.flatten_all()?.to_vec1::<f32>()?;
                let seconds = start.elapsed().as_secs_f64();
                if let Some(timeline) = timeline {
                    timeline.add(Row::Forward, || format!("prompt of {prompt} tokens"), start);
                    timeline.end(decoder.experts())?;
                }
                if run > 0 {
                    runs.push((seconds, decoder.experts().stats()));
                }
            }
            let seconds = runs.iter().map(|r| r.0).collect();
            runs.sort_by(|a, b| a.0.total_cmp(&b.0));
            let (median, stats) = &runs[runs.len() / 2];
            all.push(self.measured(prompt, seconds, *median, stats, &info.device));
        }
        Ok(all)
    }

    fn measured(
        &self,
        prompt: usize,
        seconds: Vec<f64>,
        median: f64,
        stats: &CacheStats,
        device: &str,
    ) -> Measured {
        let bytes = stats.bytes_moved + stats.prefetched_bytes;
        Measured {
            shape: self.model.shape.name.to_owned(),
            layers: self.model.shape.layers,
            format: self.model.format.to_string(),
            device: device.to_owned(),
            slots: [stats.slots, stats.records],
            ring: stats.ring_slots,
            prompt,
            seconds,
            tokens_per_s: prompt as f64 / median,
            bytes: bytes as f64,
            wasted: stats.prefetch_wasted_bytes as f64,
            gb_per_s: gb_per_s(bytes, stats.time.demand + stats.time.prefetch),
            link_share: self.link.map(|link| bytes as f64 / (link * 1e9) / median),
            stalled_ms: stats.time.stalled.as_secs_f64() * 1e3,
            hit_rate: stats.hit_rate(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shape::Shape;

    fn run(slots: Option<usize>, change: impl FnOnce(&mut Prefill)) -> Result<Vec<Measured>> {
        let model = Decode { slots_per_layer: slots, ..Decode::new(Shape::small()) };
        let mut prefill = Prefill { model, prompts: vec![40, 130], repeats: 2, link: Some(10.0) };
        change(&mut prefill);
        prefill.run(&Device::Cpu, &|_| {})
    }

    #[test]
    fn prompts_are_measured_with_all_slots_with_few_and_with_none() {
        let all = run(None, |_| {}).unwrap();
        assert_eq!(all.iter().map(|m| m.prompt).collect::<Vec<_>>(), [40, 130]);
        assert!(all[0].bytes == 0.0 && all[0].hit_rate == 1.0 && all[0].ring == 0, "{:?}", all[0]);
        for slots in [0, 3] {
            // Room for four records: without it a CPU has no ring.
            let few = run(Some(slots), |p| p.model.ring = Some(1 << 20)).unwrap();
            assert!(few.iter().all(|m| m.seconds.len() == 2 && m.tokens_per_s > 0.0), "{few:?}");
            assert!(few[1].bytes > 0.0 && few[1].ring > 0 && few[1].link_share.unwrap() > 0.0, "{few:?}");
        }
    }

    #[test]
    fn what_cannot_run_says_what_would() {
        assert!(run(None, |p| p.prompts = vec![]).unwrap_err().to_string().contains("--prompt"));
        assert!(run(None, |p| p.prompts = vec![4, 0]).unwrap_err().to_string().contains("--prompt"));
        assert!(run(None, |p| p.repeats = 0).unwrap_err().to_string().contains("--repeats"));
    }
}
