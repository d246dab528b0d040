//! Decoding on a GPU token after token, as an answer is made: the step replayed as a graph, or run one by one; routed by
//! the model, by a recorded trace, or so that no expert is ever found in its slot.
//!
//! A trace's prompt runs first, token by token, through an empty cache; then its decoded tokens twice. The first pass
//! meets experts that the prompt did not use, the second what a long answer would meet. Where there is a graph, a third
//! pass enqueues all tokens at once: the difference to the second is what the host adds.

use std::path::Path;
use std::time::Instant;

use candle_core::{Device, Tensor};
use comoe_core::CacheStats;
use comoe_core::trace::{Phase, Trace};
use comoe_models::blocks::fused::GivenRouting;
use comoe_models::blocks::kv_cache::KvCache;
use comoe_models::{Decoder, DeviceSteps, PartTime, Rows, SamplerOptions};
use serde::Serialize;

use crate::decode::Decode;
use crate::error::{Error, Result};
use crate::noise::Noise;
use crate::timeline::{Row, Timeline};

/// Who chooses the experts.
#[derive(Debug, Clone)]
pub enum Routing {
    /// The model's routers, over random tokens.
    Model,
    /// Experts by token, `[tokens, layers, top_k]`.
    Given {
        /// What is said of it.
        name: String,
        /// All of them in a row.
        ids: Vec<u32>,
        /// What is guessed of each layer one layer before, as long as `ids`; of how many of 100 it is the layer's set.
        guesses: Option<(Vec<u32>, u32)>,
        /// Tokens that run before anything is measured.
        prompt: usize,
        /// Tokens measured at a time.
        pass: usize,
    },
}

/// Tokens of a profile, and of a timeline.
const PROFILED: usize = 16;
/// Tokens that run through an empty cache before the first that is measured, where no trace has a prompt.
const SETTLE: usize = 8;

impl Routing {
    /// The routing of a trace, and the run with its top-k.
    ///
    /// # Errors
    /// [`Error::BadOption`] for a trace of another shape, [`Error::Core`] for a file that is none.
    pub fn of_trace(path: &Path, mut decode: Decode) -> Result<(Decode, Self)> {
        let trace = Trace::open(path)?;
        decode.shape.top_k = trace.info().top_k;
        let (shape, layers, k) = (&decode.shape, trace.layers(), trace.info().top_k);
        let experts: Vec<usize> = trace.info().directory.layers().iter().map(|l| l.experts).collect();
        if shape.first > 0 || layers < shape.layers || experts.iter().any(|e| *e != shape.experts) {
            return Err(Error::BadOption {
                option: "--replay",
                value: path.display().to_string(),
                expected: format!(
                    "it holds {layers} layers of {} experts, the shape {} has {} of {}",
                    experts.first().copied().unwrap_or(0),
                    shape.name,
                    shape.layers,
                    shape.experts
                ),
            });
        }
        let all = 0..trace.tokens().len();
        let (prompt, decoded): (Vec<_>, Vec<_>) =
            all.partition(|t| trace.tokens()[*t].phase == Phase::Prompt);
        let mut ids = Vec::new();
        // Those that are profiled go on as the passes do.
        let profiled = decoded.iter().cycle().take(PROFILED);
        for &token in prompt.iter().chain(&decoded).chain(&decoded).chain(&decoded).chain(profiled) {
            for layer in 0..shape.layers {
                // Of a prompt's last layer only the last token is recorded; the next one that is serves.
                let recorded = (token..trace.tokens().len()).find(|t| trace.chosen(*t, layer).len() == k);
                let Some(recorded) = recorded else {
                    let expected = format!("layer {layer} has no token of {k} experts from token {token} on");
                    return Err(Error::BadOption {
                        option: "--replay",
                        value: path.display().to_string(),
                        expected,
                    });
                };
                ids.extend_from_slice(trace.chosen(recorded, layer));
            }
        }
        let name = path.file_name().map_or_else(String::new, |n| n.to_string_lossy().into_owned());
        let (prompt, pass) = (prompt.len(), decoded.len());
        Ok((decode, Self::Given { name, ids, guesses: None, prompt, pass }))
    }

    /// Every token's experts are those that were used longest ago.
    pub fn without_reuse(decode: &Decode) -> Self {
        let shape = &decode.shape;
        let ids = (0..SETTLE + 3 * decode.steps + PROFILED).flat_map(|token| {
            let chosen = move |j| ((token * shape.top_k + j) % shape.experts) as u32;
            (0..shape.layers).flat_map(move |_| (0..shape.top_k).map(chosen))
        });
        let (name, ids) = ("no reuse".to_owned(), ids.collect());
        Self::Given { name, ids, guesses: None, prompt: SETTLE, pass: decode.steps }
    }

    /// The same with guesses for every layer: its set with a chance of `percent` in 100, else as many experts at random.
    #[must_use]
    pub fn with_guesses(mut self, decode: &Decode, percent: u32) -> Self {
        if let Self::Given { ids, guesses, .. } = &mut self {
            let (experts, mut noise) = (decode.shape.experts, Noise::of(decode.seed, 4));
            let guess = |set: &[u32]| match noise.below(100) < percent as usize {
                true => set.to_vec(),
                false => noise.distinct(experts, set.len()),
            };
            *guesses = Some((ids.chunks(decode.shape.top_k).flat_map(guess).collect(), percent));
        }
        self
    }

    fn name(&self) -> &str {
        match self {
            Self::Model => "the model's routers",
            Self::Given { name, .. } => name,
        }
    }
}

/// A run of steps.
#[derive(Debug, Clone)]
pub struct Steps {
    /// The model and its cache.
    pub decode: Decode,
    /// Who chooses the experts.
    pub routing: Routing,
    /// Whether the step is replayed as a graph.
    pub graph: bool,
    /// Length of the sequence where what is measured begins, in tokens.
    pub length: usize,
    /// Whether to say where a replayed step's time goes.
    pub profile: bool,
}

/// What a run gave.
#[derive(Debug, Clone, Serialize)]
pub struct Stepped {
    /// Name of the shape.
    pub shape: String,
    /// Layers with experts.
    pub layers: usize,
    /// The experts' format.
    pub format: String,
    /// Experts that a token uses in a layer.
    pub top_k: usize,
    /// As the backend names it.
    pub device: String,
    /// What is in force.
    pub notes: Vec<String>,
    /// Slots for each layer, and experts of each.
    pub slots_per_layer: [usize; 2],
    /// Who chose the experts.
    pub routing: String,
    /// What was brought ahead.
    pub prefetch: String,
    /// How many of 100 guesses were made to be right; `None`: they were the routers' own.
    pub guesses_right: Option<u32>,
    /// Whether steps guessed after two passes; `None`: the clock did not decide that.
    pub asks_ahead: Option<bool>,
    /// Length of the sequence where what was measured began.
    pub length: usize,
    /// Nodes of the graph; `None`: the step was not replayed.
    pub graph_nodes: Option<usize>,
    /// Seconds to make the experts (and page-lock them) and the dense part.
    pub load_s: f64,
    /// One after the other.
    pub passes: Vec<Pass>,
    /// Where a step's time goes, where that was asked for: parts of the same name summed up, in the order of their first.
    pub parts: Vec<PartTime>,
}

/// Tokens one after the other.
#[derive(Debug, Clone, Serialize)]
pub struct Pass {
    /// Which.
    pub what: String,
    /// Its tokens were enqueued at once: nobody saw one before the last.
    pub blind: bool,
    /// Tokens.
    pub steps: usize,
    /// Tokens a second.
    pub tokens_per_s: f64,
    /// Time of a token, ms.
    pub ms: f64,
    /// Hits per access.
    pub hit_rate: f64,
    /// MB read from the host for a token.
    pub mb_per_token: f64,
    /// MB brought ahead for a token; of them, those that were used.
    pub ahead_mb: [f64; 2],
    /// Records guessed for a token; of them, those that their layer missed.
    pub guessed: [f64; 2],
    /// GB/s of all that was read, over the whole time.
    pub link_gb_per_s: f64,
    /// Host time to enqueue a token, us.
    pub enqueue_us: f64,
}

impl Steps {
    /// Runs on a GPU. `say` hears of what takes long.
    ///
    /// # Errors
    /// [`Error::BadOption`] on the CPU; for slots that do not fit, and whatever the cache and the model report.
    pub fn run(&self, device: &Device, say: &dyn Fn(&str)) -> Result<Stepped> {
        let Self { decode, routing, graph, length, profile } = self;
        decode.check()?;
        let start = Instant::now();
        say("making the experts");
        let (cache, _) = decode.cache(device)?;
        let info = cache.backend_info().clone();
        let (prompt, pass) = match routing {
            Routing::Model => (SETTLE, decode.steps),
            Routing::Given { prompt, pass, .. } => (*prompt, *pass),
        };
        let guesses_right = match routing {
            Routing::Given { guesses, .. } => guesses.as_ref().map(|(_, percent)| *percent),
            Routing::Model => None,
        };
        // Two passes, and for the time without the host a third.
        let first = length.saturating_sub(prompt);
        let context = (first + prompt + 3 * pass + PROFILED + 2).next_multiple_of(512);
        say("making the dense part");
        let (decoder, _) = decode.decoder(cache, device, context)?;
        if let Routing::Given { ids, guesses, .. } = routing {
            let (layers, k) = (decode.shape.layers, decode.shape.top_k);
            let there = |ids: &[u32]| Tensor::from_slice(ids, (ids.len() / (layers * k), layers, k), device);
            let (ids, guesses) = (there(ids)?, guesses.as_ref().map(|(ids, _)| there(ids)).transpose()?);
            if !decoder.give_routing(Some(GivenRouting { ids, guesses, first })) {
                return Err(on_a_gpu("--replay"));
            }
        }
        let load_s = start.elapsed().as_secs_f64();
        say("running");
        let mut run = Run::begin(&decoder, *graph, decode.seed)?;
        if let Routing::Model = routing {
            // Touches every expert.
            run.prompt(decode.warm_up[0])?;
        }
        run.kv.pretend(first.saturating_sub(run.kv.len()))?;
        run.tokens(prompt)?;
        let mut passes = Vec::new();
        for what in ["first pass", "second pass"] {
            passes.push(run.pass(what, pass)?);
        }
        let asks_ahead = run.steps.asks();
        let graph_nodes = run.steps.nodes().filter(|_| run.steps.replayed() > 0);
        if graph_nodes.is_some() {
            passes.push(run.blind(pass)?);
        }
        let parts = run.look_closely(graph_nodes.is_some(), *profile, decode.timeline.as_deref())?;
        let mut notes = info.notes;
        notes.extend(decoder.notes().iter().cloned());
        notes.extend(run.steps.note().map(|n| format!("no graph: {n}")));
        let stats = decoder.experts().stats();
        Ok(Stepped {
            shape: decode.shape.name.to_owned(),
            layers: decode.shape.layers,
            format: decode.format.to_string(),
            top_k: decode.shape.top_k,
            device: info.device,
            notes,
            slots_per_layer: [stats.slots / decode.shape.layers, decode.shape.experts],
            routing: routing.name().to_owned(),
            prefetch: decode.prefetch.to_string(),
            guesses_right,
            asks_ahead,
            length: *length,
            graph_nodes,
            load_s,
            passes,
            parts: summed(parts),
        })
    }
}

/// Parts of the same name as one, in the order of their first.
fn summed(parts: Vec<PartTime>) -> Vec<PartTime> {
    let mut sums: Vec<PartTime> = Vec::new();
    for part in parts {
        match sums.iter_mut().find(|s| s.what == part.what) {
            Some(sum) => {
                sum.times += part.times;
                sum.us += part.us;
                sum.bytes += part.bytes;
            }
            None => sums.push(part),
        }
    }
    sums
}

fn on_a_gpu(option: &'static str) -> Error {
    Error::BadOption { option, value: "on this device".to_owned(), expected: "a GPU is needed".to_owned() }
}

struct Run<'d> {
    decoder: &'d Decoder,
    kv: KvCache,
    steps: DeviceSteps<'d>,
    graph: bool,
    last: u32,
    noise: Noise,
}

impl<'d> Run<'d> {
    fn begin(decoder: &'d Decoder, graph: bool, seed: u64) -> Result<Self> {
        let mut steps = DeviceSteps::of(decoder)?.ok_or_else(|| on_a_gpu("--device"))?;
        // Hot, so that the tokens of a random model are nearly random.
        steps.begin(&SamplerOptions { temperature: 50.0, seed, ..SamplerOptions::default() }, &[])?;
        Ok(Self { decoder, kv: decoder.new_kv()?, steps, graph, last: 0, noise: Noise::of(seed, 3) })
    }

    /// Random tokens at once.
    fn prompt(&mut self, tokens: usize) -> Result<()> {
        if tokens > 0 {
            let vocab = self.decoder.plan().vocab;
            let ids: Vec<u32> = (0..tokens).map(|_| self.noise.below(vocab) as u32).collect();
            self.decoder.forward(&ids, &mut self.kv, Rows::Last)?.to_vec2::<f32>()?;
        }
        Ok(())
    }

    /// Tokens one by one, each on the host before the next but one is enqueued.
    fn tokens(&mut self, n: usize) -> Result<()> {
        for done in 0..n {
            let next = if self.graph { self.steps.next(&mut self.kv, n - done)? } else { None };
            self.last = match next {
                Some(token) => token,
                None => {
                    let logits = self.decoder.forward(&[self.last], &mut self.kv, Rows::Last)?;
                    self.steps.choose(&logits, &mut self.kv)?
                }
            };
        }
        Ok(())
    }

    /// Tokens whose time is taken part by part, where steps are replayed and that is asked for; hands out what a step's
    /// took. With a timeline all that they do goes there, also where they are not replayed.
    fn look_closely(
        &mut self,
        replayed: bool,
        profile: bool,
        timeline: Option<&Timeline>,
    ) -> Result<Vec<PartTime>> {
        let experts = self.decoder.experts();
        timeline.map_or(Ok(()), |timeline| timeline.begin(experts))?;
        let found = match replayed && (profile || timeline.is_some()) {
            true => self.steps.profile(&mut self.kv, PROFILED)?,
            false => None,
        };
        let Some(timeline) = timeline else { return Ok(found.map_or_else(Vec::new, |p| p.parts)) };
        match &found {
            Some(found) => timeline.add_steps(found),
            None => {
                self.graph = false;
                for n in 0..PROFILED {
                    let start = Instant::now();
                    self.tokens(1)?;
                    timeline.add(Row::Forward, || format!("token {n}"), start);
                }
            }
        }
        timeline.end(experts)?;
        Ok(found.filter(|_| profile).map_or_else(Vec::new, |p| p.parts))
    }

    fn pass(&mut self, what: &str, n: usize) -> Result<Pass> {
        self.decoder.experts().reset_stats();
        let (before, start) = (self.steps.launching(), Instant::now());
        self.tokens(n)?;
        self.steps.settle();
        let (seconds, launching) = (start.elapsed().as_secs_f64(), self.steps.launching() - before);
        Ok(Pass::new(what, n, seconds, launching.as_secs_f64(), &self.decoder.experts().stats()))
    }

    /// All enqueued at once: what a token takes without the host.
    fn blind(&mut self, n: usize) -> Result<Pass> {
        self.decoder.experts().reset_stats();
        let (before, start) = (self.steps.launching(), Instant::now());
        self.steps.run_blind(&mut self.kv, n)?;
        let (seconds, launching) = (start.elapsed().as_secs_f64(), self.steps.launching() - before);
        let stats = self.decoder.experts().stats();
        let pass = Pass::new("all enqueued at once", n, seconds, launching.as_secs_f64(), &stats);
        Ok(Pass { blind: true, ..pass })
    }
}

impl Pass {
    fn new(what: &str, steps: usize, seconds: f64, launching: f64, stats: &CacheStats) -> Self {
        let n = steps as f64;
        Self {
            what: what.to_owned(),
            blind: false,
            steps,
            tokens_per_s: n / seconds,
            ms: 1e3 * seconds / n,
            hit_rate: stats.hit_rate(),
            mb_per_token: stats.bytes_moved as f64 / n / 1e6,
            ahead_mb: [
                stats.prefetched_bytes as f64 / n / 1e6,
                (stats.prefetched_bytes - stats.prefetch_wasted_bytes) as f64 / n / 1e6,
            ],
            guessed: [stats.guessed as f64 / n, stats.guessed_right as f64 / n],
            link_gb_per_s: (stats.bytes_moved + stats.prefetched_bytes) as f64 / seconds / 1e9,
            enqueue_us: 1e6 * launching / n,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shape::Shape;

    #[test]
    fn without_reuse_no_token_finds_what_the_last_ones_used() {
        let decode = Decode { steps: 5, ..Decode::new(Shape::small()) };
        let (layers, k, experts) = (decode.shape.layers, decode.shape.top_k, decode.shape.experts);
        let Routing::Given { ids, prompt, pass, .. } = Routing::without_reuse(&decode) else {
            unreachable!("it is given")
        };
        let tokens: Vec<_> = ids.chunks(layers * k).collect();
        assert_eq!((prompt, pass, tokens.len()), (SETTLE, 5, SETTLE + 3 * 5 + PROFILED));
        for (n, token) in tokens.iter().enumerate() {
            let before = &tokens[n.saturating_sub(experts / k - 1)..n];
            assert!(before.iter().all(|b| b[..k].iter().all(|id| !token[..k].contains(id))), "token {n}");
        }
    }

    #[test]
    fn parts_of_a_name_are_one_in_the_order_of_their_first() {
        let part = |what: &str, us, bytes| PartTime { what: what.to_owned(), times: 1, us, bytes };
        let parts =
            vec![part("norm", 1.0, 0), part("experts", 20.0, 0), part("norm", 2.0, 0), part("head", 5.0, 8)];
        let sums: Vec<_> = summed(parts).into_iter().map(|p| (p.what, p.times, p.us, p.bytes)).collect();
        let want = [("norm", 2, 3.0, 0), ("experts", 1, 20.0, 0), ("head", 1, 5.0, 8)];
        assert_eq!(sums, want.map(|(what, times, us, bytes)| (what.to_owned(), times, us, bytes)));
    }
}
