//! The command line.

use std::path::PathBuf;

use candle_core::Device;
use clap::{Args as ClapArgs, Parser, Subcommand, ValueEnum};
use comoe_bench::decode::Part;
use comoe_bench::{Error, Result};
use comoe_core::backend::cuda::ResidentFormat;
use comoe_core::size::parse_size;
use comoe_core::{DriverKind, ExpertFormat, PolicyKind, Prefetch, PrefetchTrigger};

use crate::out::note;

/// Measures CoMoE with synthetic models of real shapes: qwen3-30b-a3b, mixtral-8x7b, deepseek-v2-lite, olmoe-1b-7b,
/// gpt-oss-20b.
#[derive(Debug, Parser)]
#[command(version)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) ask: Ask,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Ask {
    /// Write the experts of a shape, random, as a packed store.
    Synth(SynthArgs),
    /// Decode with a synthetic model of a shape.
    Decode(DecodeArgs),
    /// Read prompts with a synthetic model of a shape.
    Prefill(PrefillArgs),
    /// Measure how fast slots of a GPU are filled (feature cuda).
    Transfer(TransferArgs),
    /// Measure memory of comoe-tiny on the CPU by number of slots.
    Memory(MemoryArgs),
    /// Measure how fast the experts of a packed store are read from disk and from the system's page cache.
    Reading(ReadingArgs),
    /// Compare the formats of comoe-tiny's experts at equal bytes of the pool: slots, hits, speed, distance from BF16.
    Formats(FormatsArgs),
}

#[derive(Debug, ClapArgs)]
pub(crate) struct SynthArgs {
    /// Name of a shape.
    pub(crate) shape: String,
    /// Format of the experts: bf16, int8, int4, mxfp4, or with a group size as int4-g32.
    #[arg(long, default_value = "int4")]
    pub(crate) format: ExpertFormat,
    /// File to write.
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: PathBuf,
    /// Only so many layers with experts.
    #[arg(long)]
    pub(crate) layers: Option<usize>,
    /// Write a whole model, which `comoe` takes, with this `tokenizer.json`, such as comoe-tiny's.
    #[arg(long, value_name = "FILE")]
    pub(crate) tokenizer: Option<PathBuf>,
    /// Seed of the weights.
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
}

/// A synthetic model, and where it runs.
#[derive(Debug, ClapArgs)]
pub(crate) struct ModelArgs {
    /// Format of the experts: bf16, int8, int4, mxfp4, or with a group size as int4-g32.
    #[arg(long, default_value = "int4")]
    pub(crate) format: ExpertFormat,
    /// What slots of a GPU hold: quantized (as stored) or bf16.
    #[arg(long, default_value = "quantized")]
    pub(crate) resident_format: ResidentFormat,
    /// Only so many layers with experts.
    #[arg(long)]
    pub(crate) layers: Option<usize>,
    /// Seed of weights, tokens and routing.
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// Where it runs: cpu, cuda, cuda:N, or auto.
    #[arg(long, default_value = "auto")]
    pub(crate) device: DeviceArg,
    /// A packed store of the shape's experts, as `synth` writes it, instead of experts made in memory.
    #[arg(long, value_name = "FILE")]
    pub(crate) store: Option<PathBuf>,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct DecodeArgs {
    /// Name of a shape.
    pub(crate) shape: String,
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// More GPUs that hold experts, N of cuda:N, separated by commas; each has as many slots as the first.
    #[arg(long, value_delimiter = ',')]
    pub(crate) also: Vec<usize>,
    /// Let the GPUs not use each other's memory.
    #[arg(long)]
    pub(crate) no_peer_access: bool,
    /// The whole model, or its experts alone with uniform routing.
    #[arg(long, value_enum, default_value = "model")]
    pub(crate) part: PartArg,
    /// Slots for each layer; several, separated by commas, are measured one after the other.
    #[arg(long, value_delimiter = ',')]
    pub(crate) slots_per_layer: Vec<usize>,
    /// Measure with every expert in its slot, too (also when no slots are given).
    #[arg(long)]
    pub(crate) resident: bool,
    /// Most RAM for the experts of --store, such as 2G, on the CPU the slots included; the others are read from disk.
    #[arg(long, value_name = "SIZE", value_parser = parse_size, requires = "store")]
    pub(crate) ram: Option<u64>,
    /// Who drives the steps: auto, host or device.
    #[arg(long, default_value = "auto")]
    pub(crate) driver: DriverKind,
    /// Who leaves a slot: auto, blend, lru, lfu, lfru or aged.
    #[arg(long, default_value = "lru")]
    pub(crate) policy: PolicyKind,
    /// What is brought ahead of time: off, correlation, stale-gate or auto.
    #[arg(long, default_value = "off")]
    pub(crate) prefetch: Prefetch,
    /// When it is brought, where the host does that and not a whole model's steps on a GPU; `all` measures each [default:
    /// after-routing]
    #[arg(long, value_enum)]
    pub(crate) trigger: Option<TriggerArg>,
    /// Tokens measured.
    #[arg(long, default_value_t = 64, value_parser = parse_count)]
    pub(crate) steps: usize,
    /// Tokens of the prompt, which touches every expert.
    #[arg(long, default_value_t = 256, value_parser = parse_count)]
    pub(crate) prompt: usize,
    /// Tokens one by one before the first that is measured.
    #[arg(long, default_value_t = 24, value_parser = parse_count_or_none)]
    pub(crate) warm_up: usize,
    /// One JSON object a run, instead of tables.
    #[arg(long)]
    pub(crate) json: bool,
    /// On a GPU, run steps one by one instead of replaying them as a graph.
    #[arg(long)]
    pub(crate) no_graph: bool,
    /// On a GPU, take the experts from a recorded trace (our format or CSV) in place of the routers' choice. Top-k is the
    /// trace's; its prompt runs first, then its decoded tokens twice.
    #[arg(long, value_name = "TRACE", conflicts_with = "no_reuse")]
    pub(crate) replay: Option<PathBuf>,
    /// On a GPU, take the experts that were used longest ago, so that none is found in its slot.
    #[arg(long)]
    pub(crate) no_reuse: bool,
    /// With --replay and --prefetch stale-gate or auto: how many of 100 guesses are to be right, in place of what the random
    /// model's routers would guess. A guess is a layer's whole set, or as many experts at random. Several, separated by
    /// commas, are measured one after the other.
    #[arg(long, value_name = "PERCENT", value_delimiter = ',', requires = "replay")]
    pub(crate) guess_right: Vec<u32>,
    /// On a GPU, say where the time of a step goes.
    #[arg(long)]
    pub(crate) profile: bool,
    /// On a GPU, length of the sequence where what is measured begins, in tokens.
    #[arg(long, default_value_t = 512, value_parser = parse_count_or_none)]
    pub(crate) length: usize,
    /// Draw tokens a second and hits against slots to this SVG.
    #[arg(long, value_name = "FILE")]
    pub(crate) plot: Option<PathBuf>,
    /// Write what ran when to this file, as a Chrome trace: every token measured; of a whole model on a GPU 16 tokens behind
    /// those, part by part where steps are replayed as a graph.
    #[arg(long, value_name = "FILE")]
    pub(crate) timeline: Option<PathBuf>,
}

impl DecodeArgs {
    pub(crate) fn triggers(&self) -> impl Iterator<Item = PrefetchTrigger> {
        use PrefetchTrigger as T;
        match self.trigger.unwrap_or(TriggerArg::AfterRouting) {
            TriggerArg::AfterRouting => vec![T::AfterRouting],
            TriggerArg::MidLayer => vec![T::MidLayer],
            TriggerArg::EndOfLayer => vec![T::EndOfLayer],
            TriggerArg::All => vec![T::AfterRouting, T::MidLayer, T::EndOfLayer],
        }
        .into_iter()
    }
}

#[derive(Debug, ClapArgs)]
pub(crate) struct PrefillArgs {
    /// Name of a shape.
    #[arg(default_value = "qwen3-30b-a3b")]
    pub(crate) shape: String,
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// Tokens of a prompt; several, separated by commas, are measured one after the other.
    #[arg(long, value_delimiter = ',', default_value = "512,2048,8192", value_parser = parse_count)]
    pub(crate) prompt: Vec<usize>,
    /// Slots for each layer; several, separated by commas. 0: the fewest that a cache takes, of which none is found again.
    #[arg(long, value_delimiter = ',', default_value = "0,16,64")]
    pub(crate) slots_per_layer: Vec<usize>,
    /// Measure with every expert in its slot, too.
    #[arg(long)]
    pub(crate) resident: bool,
    /// MiB for the ring that experts pass through; default: room for a layer's.
    #[arg(long)]
    pub(crate) ring: Option<u64>,
    /// Prompts of each length that are measured, behind one that is not.
    #[arg(long, default_value_t = 3, value_parser = parse_count)]
    pub(crate) repeats: usize,
    /// One JSON object for each length and number of slots, instead of a table.
    #[arg(long)]
    pub(crate) json: bool,
    /// Draw tokens a second and hits against slots to this SVG.
    #[arg(long, value_name = "FILE")]
    pub(crate) plot: Option<PathBuf>,
    /// Write what ran when to this file, as a Chrome trace: the last prompt of each length.
    #[arg(long, value_name = "FILE")]
    pub(crate) timeline: Option<PathBuf>,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct TransferArgs {
    /// Whose records are moved.
    #[arg(default_value = "qwen3-30b-a3b")]
    pub(crate) shape: String,
    /// Their format.
    #[arg(long, default_value = "int4")]
    pub(crate) format: ExpertFormat,
    /// N of cuda:N.
    #[arg(long, default_value_t = 0)]
    pub(crate) ordinal: usize,
    /// One JSON object instead of tables.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct MemoryArgs {
    /// Slots in all; several, separated by commas, are measured one after the other.
    #[arg(long, value_delimiter = ',', default_value = "12,24,48,72,96")]
    pub(crate) slots: Vec<usize>,
    /// Folder of the model; default: comoe-tiny of this checkout.
    #[arg(long)]
    pub(crate) model: Option<PathBuf>,
    /// Measure in this process, and print JSON.
    #[arg(long, hide = true)]
    pub(crate) here: bool,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct ReadingArgs {
    /// A packed store, as `synth` or `comoe pack` writes it.
    pub(crate) store: PathBuf,
    /// Threads that read; several, separated by commas, are measured one after the other.
    #[arg(long, value_delimiter = ',', default_value = "1,2,4,8,16", value_parser = parse_count)]
    pub(crate) threads: Vec<usize>,
    /// Most bytes that are read for each row, such as 1G.
    #[arg(long, value_name = "SIZE", value_parser = parse_size, default_value = "1G")]
    pub(crate) most: u64,
    /// Also fill page-locked arenas of all the experts, so often each way. Needs a GPU.
    #[arg(long, value_name = "ROUNDS", default_value_t = 0)]
    pub(crate) arenas: usize,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct FormatsArgs {
    /// Memory for the pool, such as 4608K or 4M.
    #[arg(long, value_name = "SIZE", value_parser = parse_size, default_value = "4608K")]
    pub(crate) pool: u64,
    /// Conversations, one {"messages": [..]} a line; default: those of this checkout that training never saw.
    #[arg(long, value_name = "FILE")]
    pub(crate) text: Option<PathBuf>,
    /// Most conversations that are read.
    #[arg(long, default_value_t = 100)]
    pub(crate) conversations: usize,
    /// How often all of it is measured.
    #[arg(long, default_value_t = 5)]
    pub(crate) rounds: usize,
    /// Folder of the model; default: comoe-tiny of this checkout.
    #[arg(long)]
    pub(crate) model: Option<PathBuf>,
    /// Where it runs: cpu, cuda, cuda:N, or auto.
    #[arg(long, default_value = "auto")]
    pub(crate) device: DeviceArg,
    /// One JSON object a format, instead of a table.
    #[arg(long)]
    pub(crate) json: bool,
}

/// Tokens, or whatever else is counted: more than anybody has time for are a mistake.
const MOST: usize = 1 << 20;

fn parse_count_or_none(text: &str) -> std::result::Result<usize, String> {
    let found = text.parse().ok().filter(|n| *n <= MOST);
    found.ok_or_else(|| format!("expected a number up to {MOST}"))
}

fn parse_count(text: &str) -> std::result::Result<usize, String> {
    let found = parse_count_or_none(text).ok().filter(|n| *n > 0);
    found.ok_or_else(|| format!("expected a number from 1 to {MOST}"))
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum PartArg {
    Model,
    Experts,
}

impl From<PartArg> for Part {
    fn from(part: PartArg) -> Self {
        match part {
            PartArg::Model => Self::Model,
            PartArg::Experts => Self::Experts,
        }
    }
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum TriggerArg {
    AfterRouting,
    MidLayer,
    EndOfLayer,
    All,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum DeviceArg {
    Auto,
    Cpu,
    Cuda(usize),
}

impl std::str::FromStr for DeviceArg {
    type Err = String;

    fn from_str(s: &str) -> std::result::Result<Self, String> {
        match (s, s.strip_prefix("cuda:").map(str::parse)) {
            ("auto", _) => Ok(Self::Auto),
            ("cpu", _) => Ok(Self::Cpu),
            ("cuda", _) => Ok(Self::Cuda(0)),
            (_, Some(Ok(n))) => Ok(Self::Cuda(n)),
            _ => Err("use cpu, cuda, cuda:N or auto".to_owned()),
        }
    }
}

impl DeviceArg {
    /// Opens it; `auto` says what it found.
    pub(crate) fn open(self) -> Result<Device> {
        match self {
            Self::Cpu => Ok(Device::Cpu),
            Self::Cuda(n) => comoe_core::cuda_device(n).map_err(Error::from),
            Self::Auto => Ok(comoe_core::cuda_device(0).unwrap_or_else(|e| {
                note!("running on the CPU: {e}");
                Device::Cpu
            })),
        }
    }
}
