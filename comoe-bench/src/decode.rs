//! A synthetic model of a real shape, decoding: whole, or its experts alone.
//!
//! Whole: attention, norms, router and head as comoe-models builds them, random weights, random tokens (text that a
//! random model writes itself soon repeats). The experts alone: one layer after the other, routed uniformly at random.

mod measured;
mod tier;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Instant;

use candle_core::{DType, Device, Tensor};
use comoe_core::backend::Backend;
use comoe_core::backend::cpu::CpuBackend;
use comoe_core::backend::cuda::ResidentFormat;
use comoe_core::store::{Checkpoint, Naming, RecordSource, TieredSource};
use comoe_core::{
    CacheOptions, Capacity, CudaOptions, DriverKind, ExpertCache, ExpertFormat, ExpertStore, PeerAccess,
    PolicyKind, Prefetch, PrefetchTrigger,
};
use comoe_models::load::{ConfigFile, DenseWeights};
use comoe_models::{Decoder, KvFormat, Rows, arch};
use serde::Serialize;

use self::measured::{Digest, Watch, free_memory};
pub use self::measured::{Measured, Memory};
pub use self::tier::Tiers;
use crate::counting::{Counting, Evenness, Uses};
use crate::dense::write_dense;
use crate::error::{Error, Result};
use crate::noise::Noise;
use crate::report::rss_anon;
use crate::shape::Shape;
use crate::synth::{self, SynthSource};
use crate::timeline::{Row, Timeline};

/// What runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Part {
    /// The whole model.
    Model,
    /// The experts of every layer, nothing between them.
    Experts,
}

/// A run to be measured.
#[derive(Debug, Clone)]
pub struct Decode {
    /// Sizes.
    pub shape: Shape,
    /// What runs.
    pub part: Part,
    /// The experts' format.
    pub format: ExpertFormat,
    /// What slots hold, on a GPU.
    pub resident: ResidentFormat,
    /// Slots for each layer; `None`: every expert has one.
    pub slots_per_layer: Option<usize>,
    /// Who leaves.
    pub policy: PolicyKind,
    /// Who drives.
    pub driver: DriverKind,
    /// What is brought ahead of time.
    pub prefetch: Prefetch,
    /// When.
    pub trigger: PrefetchTrigger,
    /// Tokens before anything is measured: first so many at once, so that every expert is touched, then so many one
    /// by one.
    pub warm_up: [usize; 2],
    /// Tokens measured.
    pub steps: usize,
    /// Seed of weights, tokens and routing.
    pub seed: u64,
    /// A packed store of the shape's experts; `None` makes them.
    pub store: Option<PathBuf>,
    /// The dense part, as [`write_dense`] writes it; `None` makes it.
    pub dense: Option<PathBuf>,
    /// Bytes for the ring that a prompt's experts pass through; `None`: as the cache decides.
    pub ring: Option<u64>,
    /// Most RAM for the experts, on the CPU the slots included; `None`: no limit. Wants a packed store.
    pub ram: Option<u64>,
    /// Takes down what runs when. On one device.
    pub timeline: Option<Arc<Timeline>>,
    /// More devices that hold experts, each with as many slots.
    pub also: Vec<Device>,
    /// How GPUs hand things to each other.
    pub peer_access: PeerAccess,
}

impl Decode {
    /// A run of `shape`'s INT4 experts as the issues ask for it.
    pub fn new(shape: Shape) -> Self {
        Self {
            shape,
            part: Part::Model,
            format: ExpertFormat::INT4,
            resident: ResidentFormat::AsStored,
            slots_per_layer: None,
            policy: PolicyKind::Lru,
            driver: DriverKind::Auto,
            prefetch: Prefetch::Off,
            trigger: PrefetchTrigger::default(),
            warm_up: [256, 24],
            steps: 64,
            seed: 1,
            store: None,
            dense: None,
            ring: None,
            ram: None,
            timeline: None,
            also: Vec::new(),
            peer_access: PeerAccess::default(),
        }
    }
}

/// Loads kernels, libraries and their workspaces, so that a run's memory is its own.
///
/// # Errors
/// Those of a small run.
pub fn warm_up(device: &Device) -> Result<()> {
    let run = Decode { warm_up: [64, 2], steps: 2, ..Decode::new(Shape::small()) };
    run.run(device, &|_| {}).map(|_| ())
}

impl Decode {
    /// Runs on `device` and hands out what was measured. `say` hears of what takes long.
    ///
    /// # Errors
    /// For slots that do not fit, devices that cannot be used, and whatever the cache and the model report.
    pub fn run(&self, device: &Device, say: &dyn Fn(&str)) -> Result<Measured> {
        self.check()?;
        let before = free_memory(device)?;
        let start = Instant::now();
        say("making the experts");
        let (cache, uses, tier) = self.tiered(device)?;
        let directory = cache.directory().clone();
        let model = match self.part {
            Part::Experts => Running::Experts(Box::new(self.experts(cache, device)?)),
            Part::Model => {
                say("making the dense part");
                self.model(cache, device)?
            }
        };
        let load_s = start.elapsed().as_secs_f64();
        say("running");
        let mut noise = Noise::of(self.seed, 3);
        let mut model = model;
        model.prompt(self.warm_up[0], &mut noise)?;
        for _ in 0..self.warm_up[1] {
            model.token(&mut noise)?;
        }
        model.cache().reset_stats();
        if let Some(tier) = &tier {
            tier.reset_stats();
        }
        let mut digest = Digest::default();
        let mut times = Vec::with_capacity(self.steps);
        let mut watch = Watch::default();
        if let Some(timeline) = &self.timeline {
            timeline.begin(model.cache())?;
        }
        for step in 0..self.steps {
            let start = Instant::now();
            let numbers = model.token(&mut noise)?;
            times.push(start.elapsed());
            digest.add(&numbers);
            if let Some(timeline) = &self.timeline {
                timeline.add(Row::Forward, || format!("token {step}"), start);
            }
            watch.look(device)?;
        }
        if let Some(timeline) = &self.timeline {
            timeline.end(model.cache())?;
        }
        let stats = model.cache().stats();
        let memory = match (before, free_memory(device)?) {
            (Some(before), Some(after)) => Some(Memory {
                slots: ((stats.slots + stats.staging_slots + stats.ring_slots) * stats.slot_bytes) as u64,
                workspace: self.workspace(),
                dense: model.dense_bytes(),
                measured: before.saturating_sub(after),
                pool_used: watch.pool_used,
                free: watch.free,
            }),
            _ => None,
        };
        let evenness = Evenness::of(&directory, &uses);
        let measured = self.measured(&times, model.cache(), load_s, evenness, memory);
        let tier = tier.map(|tier| Tiers::of(&tier.stats(), model.cache().stats().hits(), times.len()));
        Ok(Measured { digest: digest.to_string(), tier, rss_anon: rss_anon().unwrap_or(0), ..measured })
    }

    /// Whether sizes fit.
    pub(crate) fn check(&self) -> Result<()> {
        let Self { shape, slots_per_layer, .. } = self;
        if let Some(n) = slots_per_layer.filter(|n| !(shape.top_k..=shape.experts).contains(n)) {
            let (least, most) = (shape.top_k, shape.experts);
            return Err(Error::BadOption {
                option: "--slots-per-layer",
                value: n.to_string(),
                expected: format!("a layer of {} uses {least} to {most}", shape.name),
            });
        }
        if self.steps == 0 {
            let expected = "at least 1 token is needed".to_owned();
            return Err(Error::BadOption { option: "--steps", value: "0".to_owned(), expected });
        }
        Ok(())
    }

    pub(crate) fn cache(&self, device: &Device) -> Result<(ExpertCache, Uses)> {
        let (cache, uses, _) = self.tiered(device)?;
        Ok((cache, uses))
    }

    /// The cache, and the RAM in front of its store where that is limited.
    fn tiered(&self, device: &Device) -> Result<(ExpertCache, Uses, Option<Arc<TieredSource>>)> {
        let Self { shape, format, .. } = self;
        let store = match &self.store {
            Some(path) => {
                let store = ExpertStore::open(&[path], &Naming::auto())?;
                let layers: Vec<usize> = store.directory().layers().iter().map(|l| l.experts).collect();
                if layers != vec![shape.experts; shape.layers]
                    || store.specs() != vec![shape.spec; shape.layers]
                {
                    return Err(Error::BadOption {
                        option: "--store",
                        value: path.display().to_string(),
                        expected: format!(
                            "it holds other experts than {} layers of {}: write it with `comoe-bench synth {}`",
                            shape.layers, shape.name, shape.name
                        ),
                    });
                }
                store
            }
            None => {
                let source = SynthSource::new(shape, *format, self.seed)?;
                // A GPU's backend copies all of them to page-locked memory; the CPU's reads them again and again.
                let source: Arc<dyn RecordSource> = match device {
                    Device::Cpu => Arc::new(source.into_memory()?),
                    _ => Arc::new(source),
                };
                synth::store(shape, *format, source)?
            }
        };
        let experts = (0..shape.layers).map(|o| (*store.spec(o), *store.layout(o)));
        let mut cuda = CudaOptions::default();
        cuda.resident = self.resident;
        let cuda = cuda.with_experts(experts);
        let options = CacheOptions {
            capacity: self.slots_per_layer.map_or(Capacity::All, |n| {
                // No fewer than one token uses in a layer.
                Capacity::Slots((n * shape.layers).max(shape.top_k))
            }),
            ring: self.ring,
            policy: self.policy,
            driver: self.driver,
            prefetch: self.prefetch,
            prefetch_trigger: self.trigger,
            top_k: shape.top_k,
            ..CacheOptions::default()
        };
        if !self.also.is_empty() {
            let devices: Vec<Device> = std::iter::once(device).chain(&self.also).cloned().collect();
            let records = store.directory().len();
            let cache = ExpertCache::builder(store, devices)
                .cuda(cuda)
                .options(options)
                .peer_access(self.peer_access)
                .build()?;
            // Not counted: each device's backend sees its own experts alone.
            return Ok((cache, (0..records).map(|_| AtomicU64::new(0)).collect(), None));
        }
        let tier = self.tier(&store, device)?;
        let (source, cuda) = match &tier {
            Some(tier) => (tier.clone() as Arc<dyn RecordSource>, cuda.with_tier(tier.clone())),
            None => (store.source(), cuda),
        };
        let backend = match self.timeline.as_ref().filter(|_| device.is_cpu()) {
            Some(timeline) => timeline.backend(backend(device, timeline.source(source), cuda.clone())?),
            None => backend(device, source, cuda.clone())?,
        };
        let (backend, uses) = Counting::new(backend, store.directory().len());
        let cache = ExpertCache::builder(store, device)
            .backend(Box::new(backend))
            .cuda(cuda)
            .options(options)
            .build()?;
        Ok((cache, uses, tier))
    }

    fn experts(&self, cache: ExpertCache, device: &Device) -> Result<ExpertsAlone> {
        let mut noise = Noise::of(self.seed, 2);
        let hidden = self.shape.spec.hidden;
        // As large as what a norm hands out: deviation 1.
        let x: Vec<f32> = noise.floats(hidden).into_iter().map(|v| v * 3f32.sqrt()).collect();
        let x = Tensor::from_vec(x, (1, hidden), &Device::Cpu)?.to_dtype(dtype(device))?.to_device(device)?;
        Ok(ExpertsAlone { cache, shape: self.shape.clone(), x, device: device.clone() })
    }

    pub(crate) fn model(&self, cache: ExpertCache, device: &Device) -> Result<Running> {
        let context = (self.warm_up[0] + self.warm_up[1] + self.steps).next_multiple_of(512);
        let (decoder, bytes) = self.decoder(cache, device, context)?;
        let kv = decoder.new_kv()?;
        Ok(Running::Model { decoder: Box::new(decoder), kv, bytes })
    }

    /// The model around its experts, for sequences of `context` tokens, and the bytes of its weights and KV cache.
    pub(crate) fn decoder(
        &self,
        cache: ExpertCache,
        device: &Device,
        context: usize,
    ) -> Result<(Decoder, u64)> {
        let config = ConfigFile::parse(Path::new("config.json"), &self.shape.config()?.to_string())?;
        let folder = tempfile::tempdir().map_err(|e| Error::io(std::env::temp_dir(), e))?;
        let made = folder.path().join("dense.safetensors");
        let path = match &self.dense {
            Some(path) => path,
            None => {
                write_dense(&made, &self.shape, self.seed)?;
                &made
            }
        };
        let plan = arch::plan(&config)?;
        let kv = plan.kv_bytes_per_token(dtype(device).size_in_bytes(), KvFormat::Plain) * context;
        let checkpoint = Checkpoint::open(&[path])?;
        let naming = Naming::auto();
        let elements: usize = checkpoint
            .names()
            .map(|name| Ok(checkpoint.tensor(name)?.shape.iter().product::<usize>()))
            .sum::<comoe_core::Result<_>>()?;
        let bytes = elements * dtype(device).size_in_bytes();
        let mut weights = DenseWeights::new(&checkpoint, &naming, dtype(device), device, &|_| {})?;
        let decoder = Decoder::load(plan, &mut weights, cache, context, dtype(device), device)?;
        Ok((decoder, (bytes + kv) as u64))
    }

    #[cfg(feature = "cuda")]
    fn workspace(&self) -> u64 {
        let Shape { spec, top_k, .. } = &self.shape;
        comoe_core::backend::cuda::workspace_bytes(spec, DType::BF16, self.warm_up[0].max(1), *top_k)
    }

    #[cfg(not(feature = "cuda"))]
    fn workspace(&self) -> u64 {
        0
    }
}

/// The name by which a trigger is asked for.
pub fn trigger_name(trigger: PrefetchTrigger) -> &'static str {
    match trigger {
        PrefetchTrigger::MidLayer => "mid-layer",
        PrefetchTrigger::EndOfLayer => "end-of-layer",
        _ => "after-routing",
    }
}

/// BF16 on a GPU, F32 on the CPU.
fn dtype(device: &Device) -> DType {
    if device.is_cpu() { DType::F32 } else { DType::BF16 }
}

/// The backend of a device, as the cache's builder would make it.
///
/// # Errors
/// Those of the backend; [`Error::BadOption`] for a device that has none.
#[cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "only GPUs have options"))]
pub fn backend(
    device: &Device,
    source: Arc<dyn RecordSource>,
    cuda: CudaOptions,
) -> Result<Box<dyn Backend>> {
    match device {
        Device::Cpu => Ok(Box::new(CpuBackend::new(source))),
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => Ok(Box::new(comoe_core::backend::cuda::CudaBackend::new(gpu, source, cuda)?)),
        other => Err(Error::BadOption {
            option: "--device",
            value: format!("{:?}", other.location()),
            expected: "use cpu, or cuda in a build with feature cuda".to_owned(),
        }),
    }
}

/// What decodes.
pub(crate) enum Running {
    Experts(Box<ExpertsAlone>),
    Model { decoder: Box<Decoder>, kv: comoe_models::blocks::kv_cache::KvCache, bytes: u64 },
}

pub(crate) struct ExpertsAlone {
    cache: ExpertCache,
    shape: Shape,
    /// `[1, hidden]`
    x: Tensor,
    device: Device,
}

impl Running {
    fn cache(&self) -> &ExpertCache {
        match self {
            Self::Experts(e) => &e.cache,
            Self::Model { decoder, .. } => decoder.experts(),
        }
    }

    fn dense_bytes(&self) -> u64 {
        match self {
            Self::Experts(_) => 0,
            Self::Model { bytes, .. } => *bytes,
        }
    }

    /// Many tokens at once; hands out the last one's logits, or what the last layer's experts gave.
    fn prompt(&mut self, tokens: usize, noise: &mut Noise) -> Result<Vec<f32>> {
        if tokens == 0 {
            return Ok(Vec::new());
        }
        match self {
            Self::Experts(e) => e.step(tokens, noise),
            Self::Model { decoder, kv, .. } => {
                let vocab = decoder.plan().vocab;
                let ids: Vec<u32> = (0..tokens).map(|_| noise.below(vocab) as u32).collect();
                let logits = decoder.forward(&ids, kv, Rows::Last)?;
                Ok(logits.flatten_all()?.to_vec1::<f32>()?)
            }
        }
    }

    /// One token, until its result is on the host.
    fn token(&mut self, noise: &mut Noise) -> Result<Vec<f32>> {
        match self {
            Self::Experts(e) => e.step(1, noise),
            Self::Model { .. } => self.prompt(1, noise),
        }
    }
}

impl ExpertsAlone {
    /// `tokens` tokens through every layer, each with experts of its own. The ids are on the device, as a router leaves
    /// them.
    fn step(&self, tokens: usize, noise: &mut Noise) -> Result<Vec<f32>> {
        let Self { cache, shape, x, device } = self;
        let x = x.repeat((tokens, 1))?;
        let weights = Tensor::full(1.0 / shape.top_k as f32, (tokens, shape.top_k), &Device::Cpu)?;
        let mut y = None;
        for layer in shape.moe_layers() {
            let ids =
                (0..tokens).flat_map(|_| noise.distinct(shape.experts, shape.top_k)).collect::<Vec<_>>();
            let ids = Tensor::from_vec(ids, (tokens, shape.top_k), device)?;
            y = Some(cache.layer(layer).forward(&x, &ids, &weights)?);
        }
        match y {
            Some(y) => Ok(y.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?),
            None => Ok(Vec::new()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(change: impl FnOnce(&mut Decode)) -> Result<Measured> {
        let mut run = Decode { warm_up: [64, 4], steps: 16, ..Decode::new(Shape::small()) };
        change(&mut run);
        run.run(&Device::Cpu, &|_| {})
    }

    #[test]
    fn a_small_model_decodes_with_all_and_with_half_of_its_slots() {
        for part in [Part::Model, Part::Experts] {
            let all = run(|r| r.part = part).unwrap();
            assert_eq!((all.hit_rate, all.slots_per_layer, all.bytes_per_token), (1.0, [8, 8], 0.0));
            assert!(all.evenness.mean > 0.8 && all.evenness.least <= all.evenness.mean, "{:?}", all.evenness);
            let half = run(|r| (r.part, r.slots_per_layer) = (part, Some(4))).unwrap();
            assert!(half.hit_rate < 1.0 && half.bytes_per_token > 0.0, "{half:?}");
            assert!(half.tokens_per_s > 0.0 && half.prefetch == "off");
        }
    }

    #[test]
    fn a_model_without_norms_of_q_and_k_decodes() {
        let mixtral = |r: &mut Decode| {
            r.shape.dense = r.shape.dense.map(|d| crate::shape::DenseShape { qk_norm: false, ..d });
        };
        let plan = |qk_norm: bool| {
            let mut decode = Decode::new(Shape::small());
            if !qk_norm {
                mixtral(&mut decode);
            }
            let config = decode.shape.config().unwrap().to_string();
            arch::plan(&ConfigFile::parse(Path::new("config.json"), &config).unwrap()).unwrap()
        };
        assert!(plan(true) != plan(false));
        assert_eq!(run(mixtral).unwrap().hit_rate, 1.0);
    }

    #[test]
    fn prefetch_and_a_packed_store_are_in_force_when_asked_for() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("small.comoe");
        synth::write_store(&path, &Shape::small(), ExpertFormat::INT4, 1, &|_, _| {}).unwrap();
        let m = run(|r| {
            (r.prefetch, r.slots_per_layer) = (Prefetch::Correlation, Some(3));
            (r.trigger, r.store) = (PrefetchTrigger::MidLayer, Some(path.clone()));
        });
        let m = m.unwrap();
        assert!(m.prefetch == "mid-layer" && m.prefetched > 0.0, "{m:?}");
        let other = run(|r| (r.shape.layers, r.store) = (1, Some(path.clone())));
        assert!(other.unwrap_err().to_string().contains("other experts"));
    }

    #[test]
    fn numbers_are_the_same_however_little_ram_there_is() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("small.comoe");
        let bytes = synth::write_store(&path, &Shape::small(), ExpertFormat::INT4, 1, &|_, _| {}).unwrap();
        let with = |slots, ram: Option<u64>| {
            run(|r| (r.slots_per_layer, r.ram, r.store) = (Some(slots), ram, Some(path.clone())))
        };
        let all = with(8, None).unwrap();
        let record = bytes / 16;
        for (slots, records) in [(2, 5), (2, 9), (3, 12)] {
            let few = with(slots, Some(records * record)).unwrap();
            assert_eq!(few.digest, all.digest, "{slots} slots a layer, RAM for {records}");
            let tier = few.tier.unwrap();
            assert_eq!(tier.ram_experts, records as usize - 2 * slots);
            assert!(tier.cold > 0.0 && tier.hot > 0.0, "{tier:?}");
        }
        assert!(with(3, Some(2 * record)).unwrap_err().to_string().contains("--ram"));
        let made = run(|r| r.ram = Some(1 << 20)).unwrap_err().to_string();
        assert!(made.contains("--store"), "{made}");
    }

    #[test]
    fn what_cannot_run_says_what_would() {
        let text = run(|r| r.slots_per_layer = Some(1)).unwrap_err().to_string();
        assert!(text.contains("uses 2 to 8"), "{text}");
        assert!(run(|r| r.steps = 0).unwrap_err().to_string().contains("--steps"));
        let text = run(|r| r.driver = DriverKind::Device).unwrap_err().to_string();
        assert!(text.contains("use auto or host"), "{text}");
        let text = run(|r| r.shape.dense = None).unwrap_err().to_string();
        assert!(text.contains("--part experts"), "{text}");
    }
}
