//! The command line.

use std::path::{Path, PathBuf};

use candle_core::DType;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, Parser, Subcommand};
use comoe_core::size::parse_size;
use comoe_core::trace::Contents;
use comoe_core::{Capacity, DriverKind, ExpertFormat, PolicyKind, Prefetch, ResidentFormat, Scope};
use comoe_models::{DenseFormat, KvFormat};

use crate::device::DeviceChoice;
use crate::error::Error;
use crate::output_file::{self, Kind, Named};
use crate::pins::AUTO;
use crate::quality::QualityArgs;
use crate::trace::TraceCommand;

const AFTER_HELP: &str = "\
The answer goes to standard output, everything else to standard error.
Exit codes: 0 done, 1 failed (also when standard output is closed early), 2 wrong usage, 130 ended by Ctrl-C.

Environment:
  COMOE_CACHE  folder for converted experts and the chat history
               [default: $XDG_CACHE_HOME/comoe, or ~/.cache/comoe]
  COMOE_LOG    what is logged, such as info or comoe_core=debug [default: error]
  HF_HOME      folder whose hub/ holds the models of the hub, shared with the Python tools
               [default: $XDG_CACHE_HOME/huggingface, or ~/.cache/huggingface]; HF_HUB_CACHE names hub/ itself
  HF_TOKEN     who asks the hub [default: the file token in HF_HOME]
  HF_ENDPOINT  another hub
  HF_HUB_OFFLINE=1  fetch nothing";

/// Runs Mixture-of-Experts models whose experts do not all fit in fast memory.
#[derive(Debug, Parser)]
#[command(name = "comoe", version, after_help = AFTER_HELP)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Talk with a model; turns may also be piped in, one a line.
    Chat(ChatArgs),
    /// Answer one prompt.
    Generate(GenerateArgs),
    /// Fetch a model from the hub, or what is new of it; prints its folder.
    Pull(PullArgs),
    /// Write a model as one file, its experts in one format: it starts without conversion.
    Pack(PackArgs),
    /// Compare a packed file with its checksums, and with the model that it was made of.
    Verify(VerifyArgs),
    /// List the families that work, and the models that are here.
    Models(ModelsArgs),
    /// Write the logits of some tokens to a file, to compare engines.
    Logits(LogitsArgs),
    /// Measure what this machine has for running big models, and say what is slow.
    Doctor(DoctorArgs),
    /// Say what a model would take of memory and how fast it may be, from its configuration and headers alone.
    Plan(Box<PlanArgs>),
    /// Record routing, look at it, and play policies and predictors over it.
    #[command(subcommand)]
    Trace(TraceCommand),
}

#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// Print one JSON object instead of tables
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct PlanArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// Sequences side by side, each with a KV cache of its own
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = parse_batch, help_heading = "Plan")]
    pub(crate) batch: usize,
    /// A recorded trace of the model, played to know the hits [default: what is assumed is said]
    #[arg(long, value_name = "FILE", help_heading = "Plan")]
    pub(crate) trace: Option<PathBuf>,
    /// What `comoe doctor --json` printed on the machine to plan for
    #[arg(long, value_name = "FILE", help_heading = "Plan")]
    pub(crate) doctor: Option<PathBuf>,
    /// Bandwidth from host memory to the GPU, GB/s [default: --doctor's, else 25, as of PCIe 4 x16]
    #[arg(long, value_name = "GB/S", value_parser = parse_bandwidth, help_heading = "Plan")]
    pub(crate) link: Option<f64>,
    /// Bandwidth of the memory that computes: the GPU's, GB/s [default: 900, as of a card of 24 GB]; the CPU's [default:
    /// --doctor's, else 40]
    #[arg(long, value_name = "GB/S", value_parser = parse_bandwidth, help_heading = "Plan")]
    pub(crate) bandwidth: Option<f64>,
    /// Print one JSON object instead of a table
    #[arg(long, help_heading = "Plan")]
    pub(crate) json: bool,
    /// Print nothing but the plan, warnings and errors
    #[arg(long, short, help_heading = "Plan")]
    pub(crate) quiet: bool,
}

#[derive(Debug, Args)]
pub(crate) struct PullArgs {
    /// The model's name: ORG/NAME, or ORG/NAME@REVISION for a branch, tag or commit
    pub(crate) model: String,
    /// Also read what is here already, and fetch again what is damaged
    #[arg(long)]
    pub(crate) check: bool,
    /// Print nothing but the folder, and errors
    #[arg(long, short)]
    pub(crate) quiet: bool,
}

#[derive(Debug, Args)]
pub(crate) struct PackArgs {
    /// Folder of the model, its name on the hub, or a packed file [default: comoe-tiny, which comes with CoMoE]
    pub(crate) model: Option<PathBuf>,
    /// How experts are stored: source (what fits the checkpoint best), bf16, mxfp4, int8 or int4; int4-g32 chooses the
    /// group too
    #[arg(long, value_name = "FORMAT", default_value = "source", value_parser = parse_format)]
    pub(crate) format: Format,
    /// File to write, which must not be there yet [default: NAME-FORMAT.safetensors in this folder]
    #[arg(long, short, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) quality: QualityArgs,
    /// Print nothing but the file's name, and errors
    #[arg(long, short)]
    pub(crate) quiet: bool,
}

#[derive(Debug, Args)]
pub(crate) struct VerifyArgs {
    /// A file that `comoe pack` wrote, or one of converted experts
    pub(crate) file: PathBuf,
    /// The model that it was made of, to see what packing cost: its folder, its name on the hub, or a packed file
    #[arg(long, value_name = "MODEL")]
    pub(crate) against: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) quality: QualityArgs,
}

#[derive(Debug, Args)]
pub(crate) struct ModelsArgs {
    /// Print one JSON object instead of a list
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct LogitsArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// Ids of the tokens, separated by commas; no tokenizer is needed
    #[arg(long, value_name = "ID,..", value_delimiter = ',', required = true)]
    pub(crate) tokens: Vec<u32>,
    /// Feed so many of the last tokens one by one, through the KV cache
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) decode: usize,
    /// File to write: safetensors, with one tensor `logits` [tokens, vocabulary] in F32
    #[arg(long, short, value_name = "FILE")]
    pub(crate) output: PathBuf,
    /// Print nothing but warnings and errors
    #[arg(long, short)]
    pub(crate) quiet: bool,
}

#[derive(Debug, Args)]
pub(crate) struct ChatArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    #[command(flatten)]
    pub(crate) sampler: SamplerArgs,
    /// Instructions to the model ahead of the conversation
    #[arg(long, value_name = "TEXT", conflicts_with = "raw")]
    pub(crate) system: Option<String>,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

#[derive(Debug, Args)]
pub(crate) struct GenerateArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// What to answer; - reads standard input to its end
    #[arg(long, short, value_name = "TEXT", allow_hyphen_values = true)]
    pub(crate) prompt: String,
    #[command(flatten)]
    pub(crate) sampler: SamplerArgs,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

/// Which model, and how its experts are kept.
#[derive(Debug, Args)]
pub(crate) struct ModelArgs {
    /// Folder of the model, a packed or GGUF file, or a name on the hub, ORG/NAME or ORG/NAME@REVISION, which is fetched
    /// when it is not here yet [default: comoe-tiny, which comes with CoMoE]
    pub(crate) model: Option<PathBuf>,
    /// Where to compute: cpu, cuda, cuda:N, or auto, which takes the first GPU and else the CPU; cuda:N,M spreads the
    /// experts over several GPUs, of which the first has the rest of the model
    #[arg(long, value_name = "DEVICE", default_value = "auto", help_heading = "Device")]
    pub(crate) device: DeviceChoice,
    /// Numbers between the blocks of the model: f32 or bf16 [default: bf16 on a GPU, f32 on the CPU]
    #[arg(long, value_name = "TYPE", value_parser = parse_compute, help_heading = "Device")]
    pub(crate) compute: Option<DType>,
    /// How weights outside the experts are held: bf16 (as --compute says), or int8, half of that
    #[arg(
        long, value_name = "FORMAT", default_value = "bf16", help_heading = "Experts and memory",
        value_parser = PossibleValuesParser::new(DenseFormat::ALL.map(DenseFormat::name)).try_map(|s| s.parse::<DenseFormat>())
    )]
    pub(crate) dense_format: DenseFormat,
    /// How keys and values of the context are held: bf16 (as --compute says), or int8, half of that
    #[arg(
        long, value_name = "FORMAT", default_value = "bf16", help_heading = "Experts and memory",
        value_parser = PossibleValuesParser::new(KvFormat::ALL.map(KvFormat::name)).try_map(|s| s.parse::<KvFormat>())
    )]
    pub(crate) kv_format: KvFormat,
    /// What slots on a GPU hold: quantized (experts as stored) or bf16 (expanded when loaded)
    #[arg(long, value_name = "FORMAT", help_heading = "Device")]
    pub(crate) resident_format: Option<ResidentFormat>,
    /// Most host memory to page-lock for a GPU, such as 12G [default: as much as there is for experts]
    #[arg(long, value_name = "SIZE", value_parser = parse_size, help_heading = "Device")]
    page_lock_limit: Option<u64>,
    /// Page-lock no experts: copies are slower, and memory stays with others
    #[arg(long, conflicts_with = "page_lock_limit", help_heading = "Device")]
    no_page_lock: bool,
    /// Let several GPUs not use each other's memory: what they hand to each other goes through the host's
    #[arg(long, help_heading = "Device")]
    pub(crate) no_peer_access: bool,
    /// Decode on a GPU step by step, not as one CUDA graph: slower, with the same tokens, for looking at a problem
    #[arg(long, help_heading = "Device")]
    pub(crate) no_graph: bool,
    /// Tokens of context that memory is planned for, answer included; a longer one takes memory from the experts' slots
    /// [default: the model's, at most 4096]
    #[arg(long, visible_alias = "ctx", value_name = "N", value_parser = parse_positive, help_heading = "Experts and memory")]
    pub(crate) context: Option<usize>,
    /// Most tokens of context, which a talk may grow to; --context is no more than it [default: the model's]
    #[arg(long, value_name = "N", value_parser = parse_positive, help_heading = "Experts and memory")]
    pub(crate) context_limit: Option<usize>,
    /// Experts to keep in the pool, in all layers together; of several devices each has as many, or N,M,.. in their order
    #[arg(
        long,
        value_name = "N",
        value_delimiter = ',',
        group = "room",
        help_heading = "Experts and memory"
    )]
    slots: Vec<usize>,
    /// Memory for the pool, such as 900K or 12G; of several devices each has as much, or SIZE,SIZE,.. in their order
    #[arg(
        long, value_name = "SIZE", value_delimiter = ',', group = "room", value_parser = parse_size,
        help_heading = "Experts and memory"
    )]
    pool: Vec<u64>,
    /// Keep every expert in the pool [default of these: as many as fit --vram, the GPU's free memory, or half of the memory
    /// available to the CPU]
    #[arg(long, group = "room", help_heading = "Experts and memory")]
    resident: bool,
    /// The most of the GPU's memory that the run may take, such as 12G: what dense weights, KV cache and activations leave
    /// goes to the pool, and more is refused. Of several devices each has as much, or SIZE,SIZE,.. in their order. On the CPU
    /// it counts the pool, dense weights and KV cache
    #[arg(
        long, value_name = "SIZE", value_delimiter = ',', value_parser = parse_size, help_heading = "Experts and memory"
    )]
    pub(crate) vram: Vec<u64>,
    /// Experts that stay in the pool, hottest first, up to an eighth of it: those of a recorded trace, or auto, which learns them
    /// from run to run
    #[arg(long, value_name = "FILE|auto", help_heading = "Experts and memory")]
    pub(crate) pin: Option<PathBuf>,
    /// Most RAM for experts, such as 24G: those that are used most are kept in it, the others are read from disk; on the CPU
    /// the pool is part of it [default: no limit]
    #[arg(long, value_name = "SIZE", value_parser = parse_size, help_heading = "Experts and memory")]
    pub(crate) ram: Option<u64>,
    /// How experts are stored: source (what fits the checkpoint best), bf16, mxfp4, int8 or int4; int4-g32 chooses the
    /// group too
    #[arg(
        long, value_name = "FORMAT", default_value = "source", value_parser = parse_format,
        help_heading = "Experts and memory"
    )]
    pub(crate) format: Format,
    /// Which expert leaves when a slot is needed
    #[arg(
        long, default_value = "auto", help_heading = "Experts and memory",
        value_parser = PossibleValuesParser::new(PolicyKind::ALL.map(PolicyKind::name)).try_map(|s| s.parse::<PolicyKind>())
    )]
    pub(crate) policy: PolicyKind,
    /// Whether each layer has slots of its own or all layers share them
    #[arg(
        long, default_value = "layer", help_heading = "Experts and memory",
        value_parser = PossibleValuesParser::new(["layer", "global"]).try_map(|s| s.parse::<Scope>())
    )]
    pub(crate) scope: Scope,
    /// What is brought ahead of time: nothing, what the last choices make likely (correlation), what the next layer's router
    /// says one layer early (stale-gate), or one of them while it pays (auto)
    #[arg(
        long, default_value = "off", help_heading = "Experts and memory",
        value_parser = PossibleValuesParser::new(Prefetch::ALL.map(Prefetch::name)).try_map(|s| s.parse::<Prefetch>())
    )]
    pub(crate) prefetch: Prefetch,
    /// Who decides where experts go and moves them, in steps of few tokens: the GPU, or the host; auto takes the faster
    #[arg(
        long, default_value = "auto", help_heading = "Device",
        value_parser = PossibleValuesParser::new(DriverKind::ALL.map(DriverKind::name)).try_map(|s| s.parse::<DriverKind>())
    )]
    pub(crate) driver: DriverKind,
    /// Memory on top of the pool for the experts of a prompt that pass through, such as 256M; 0 is none [default: room
    /// for one layer's on a GPU]
    #[arg(long, value_name = "SIZE", value_parser = parse_size, help_heading = "Experts and memory")]
    pub(crate) ring: Option<u64>,
    /// File for what prefetching learns, kept from one run to the next [default: one for each model in the cache folder]
    #[arg(long, value_name = "FILE", help_heading = "Experts and memory")]
    pub(crate) predictor_table: Option<PathBuf>,
    /// Every N decode steps, compare some slots with the stored experts and stop if one differs
    #[arg(long, value_name = "N", value_parser = parse_positive, help_heading = "Experts and memory")]
    pub(crate) check: Option<usize>,
}

impl ModelArgs {
    /// Sees that the options do not contradict each other.
    ///
    /// # Errors
    /// Names those that do.
    pub(crate) fn check(&self) -> crate::error::Result<()> {
        match (self.context, self.context_limit) {
            (Some(context), Some(limit)) if limit < context => {
                Err(Error::ContextOverLimit { context, limit })
            }
            _ => Ok(()),
        }
    }

    /// The files that it names, by option; `MODEL` may be a folder, too.
    pub(crate) fn files(&self) -> Vec<Named<'_>> {
        let pin = self.pin.as_deref().filter(|pin| *pin != Path::new(AUTO));
        let all = [
            ("MODEL", self.model.as_deref()),
            ("--pin", pin),
            ("--predictor-table", self.predictor_table.as_deref()),
        ];
        all.into_iter().filter_map(|(option, path)| Some((option, path?))).collect()
    }

    /// The room asked for, by device where it is not the same on all; none leaves the choice to the program.
    pub(crate) fn capacities(&self) -> Vec<Capacity> {
        let slots = self.slots.iter().map(|&n| Capacity::Slots(n));
        let pools = self.pool.iter().map(|&bytes| Capacity::Bytes(bytes));
        slots.chain(pools).chain(self.resident.then_some(Capacity::All)).collect()
    }

    /// Most bytes to page-lock; `None` sets no limit.
    pub(crate) fn page_lock_limit(&self) -> Option<u64> {
        if self.no_page_lock { Some(0) } else { self.page_lock_limit }
    }
}

/// How experts are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    /// What fits the checkpoint best.
    Source,
    /// Converted.
    Converted(ExpertFormat),
}

pub(crate) fn parse_positive(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(n) if n > 0 => Ok(n),
        _ => Err("expected a whole number of at least 1".into()),
    }
}

/// Most sequences side by side that can be planned for.
const MOST_BATCH: usize = 1 << 16;

fn parse_batch(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(n @ 1..=MOST_BATCH) => Ok(n),
        _ => Err(format!("expected a whole number from 1 to {MOST_BATCH}")),
    }
}

fn parse_bandwidth(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(n) if n.is_finite() && n > 0.0 => Ok(n),
        _ => Err("expected GB/s above 0, such as 25".into()),
    }
}

fn parse_compute(text: &str) -> Result<DType, String> {
    match text {
        "f32" => Ok(DType::F32),
        "bf16" => Ok(DType::BF16),
        _ => Err("use f32 or bf16".into()),
    }
}

fn parse_format(text: &str) -> Result<Format, String> {
    match text {
        "source" => Ok(Format::Source),
        _ => match text.parse() {
            Ok(format) => Ok(Format::Converted(format)),
            Err(_) => Err("use source, bf16, mxfp4, int8 or int4, the last two with a group as in int4-g32 \
                           (32, 64, 128)"
                .into()),
        },
    }
}

/// How the next token is chosen. What is not given comes from the model's `generation_config.json`.
#[derive(Debug, Args)]
pub(crate) struct SamplerArgs {
    /// Most tokens of an answer [default: 1024, less when the context ends]
    #[arg(long, value_name = "N", value_parser = parse_positive, help_heading = "Answer")]
    pub(crate) max_tokens: Option<usize>,
    /// 0 takes the likeliest token always [default of these: the model's own]
    #[arg(long, value_name = "T", help_heading = "Answer", allow_negative_numbers = true)]
    pub(crate) temperature: Option<f64>,
    /// Keep the K likeliest tokens; 0 keeps all
    #[arg(long, value_name = "K", help_heading = "Answer")]
    pub(crate) top_k: Option<usize>,
    /// Keep the likeliest tokens that make up this much probability
    #[arg(long, value_name = "P", help_heading = "Answer", allow_negative_numbers = true)]
    pub(crate) top_p: Option<f64>,
    /// Drop tokens less likely than this part of the likeliest
    #[arg(long, value_name = "P", help_heading = "Answer", allow_negative_numbers = true)]
    pub(crate) min_p: Option<f64>,
    /// Make tokens that occurred before less likely; 1 changes nothing
    #[arg(long, value_name = "R", help_heading = "Answer", allow_negative_numbers = true)]
    pub(crate) repetition_penalty: Option<f64>,
    /// Tokens back that count as before; 0 counts all
    #[arg(long, value_name = "N", help_heading = "Answer")]
    pub(crate) repetition_window: Option<usize>,
    /// Start of the random sequence: the same seed gives the same answer [default: the time]
    #[arg(long, value_name = "N", help_heading = "Answer")]
    pub(crate) seed: Option<u64>,
    /// Continue the text as it is, without the chat template
    #[arg(long, help_heading = "Answer")]
    pub(crate) raw: bool,
}

/// Whether thoughts are printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub(crate) enum Think {
    #[default]
    Show,
    Hide,
}

/// What is printed beside the answer.
#[derive(Debug, Args)]
pub(crate) struct OutputArgs {
    /// Print speed, cache statistics and memory at the end
    #[arg(long, help_heading = "Output")]
    pub(crate) stats: bool,
    /// Print one JSON object per answer instead of its text
    #[arg(long, help_heading = "Output")]
    pub(crate) json: bool,
    /// Print nothing but the answer, warnings and errors
    #[arg(long, short, help_heading = "Output")]
    pub(crate) quiet: bool,
    /// What a model thinks before it answers: shown (dimmed on a terminal) or left out
    #[arg(long, value_name = "show|hide", default_value = "show", help_heading = "Output")]
    pub(crate) think: Think,
    /// Record which experts every token chose; see `comoe trace`
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub(crate) trace: Option<PathBuf>,
    /// Record, too, what the next layer's router says to each layer's input
    #[arg(long, requires = "trace", help_heading = "Output")]
    pub(crate) trace_stale_gate: bool,
}

impl OutputArgs {
    /// Sees that `--trace` can be written, beside the files of the model.
    ///
    /// # Errors
    /// As [`output_file::check`].
    pub(crate) fn check(&self, model: &ModelArgs) -> crate::error::Result<()> {
        self.trace
            .as_deref()
            .map_or(Ok(()), |path| output_file::check(Kind::Trace, ("--trace", path), &model.files()))
    }

    /// What a trace of the run holds besides the routing.
    pub(crate) fn contents(&self) -> Contents {
        Contents { weights: true, guesses: self.trace_stale_gate }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn generate(args: &[&str]) -> Result<GenerateArgs, clap::Error> {
        let all = ["comoe", "generate", "--prompt", "x"].iter().chain(args);
        match Cli::try_parse_from(all)?.command {
            Command::Generate(g) => Ok(g),
            other => unreachable!("generate was asked for, not {other:?}"),
        }
    }

    #[test]
    fn the_definition_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn room_is_asked_for_in_one_way() {
        let room = |args: &[&str]| generate(args).map(|g| g.model.capacities());
        assert_eq!(room(&[]).unwrap(), []);
        assert_eq!(room(&["--slots", "9"]).unwrap(), [Capacity::Slots(9)]);
        assert_eq!(room(&["--pool", "900K"]).unwrap(), [Capacity::Bytes(900 << 10)]);
        assert_eq!(room(&["--pool", "8G,4G"]).unwrap(), [8 << 30, 4 << 30].map(Capacity::Bytes));
        assert_eq!(room(&["--slots=9,3,1"]).unwrap(), [9, 3, 1].map(Capacity::Slots));
        assert_eq!(room(&["--resident"]).unwrap(), [Capacity::All]);
        assert_eq!(generate(&["--pool=1G", "--ring=256M"]).unwrap().model.ring, Some(256 << 20));
        assert_eq!(generate(&["--vram=8G,12G"]).unwrap().model.vram, [8 << 30, 12 << 30]);
        assert_eq!(generate(&["--pool=1G", "--ram=2G"]).unwrap().model.ram, Some(2 << 30));
        for two in [["--slots=9", "--resident"], ["--slots=9", "--pool=1G"], ["--pool=1G", "--resident"]] {
            assert_eq!(room(&two).unwrap_err().kind(), clap::error::ErrorKind::ArgumentConflict, "{two:?}");
        }
    }

    #[test]
    fn a_device_and_what_is_in_force_on_it() {
        let parsed = |args: &[&str]| generate(args).map(|g| g.model);
        let m = parsed(&[]).unwrap();
        assert_eq!((&m.device, m.compute, m.resident_format), (&DeviceChoice::Auto, None, None));
        assert_eq!((m.page_lock_limit(), m.check, m.no_graph), (None, None, false));
        assert!(parsed(&["--no-graph"]).unwrap().no_graph);
        assert_eq!(m.dense_format, DenseFormat::Plain);
        assert_eq!(parsed(&["--dense-format=int8"]).unwrap().dense_format, DenseFormat::Int8);
        assert_eq!(m.kv_format, KvFormat::Plain);
        assert_eq!(parsed(&["--kv-format=int8"]).unwrap().kv_format, KvFormat::Int8);
        let m = parsed(&["--device=cuda:1", "--compute=f32", "--resident-format=bf16", "--check=7"]).unwrap();
        assert_eq!((&m.device, m.compute), (&DeviceChoice::Cuda(1), Some(DType::F32)));
        assert_eq!((m.resident_format, m.check), (Some(ResidentFormat::Bf16), Some(7)));
        assert_eq!(parsed(&["--page-lock-limit=2G"]).unwrap().page_lock_limit(), Some(2 << 30));
        assert_eq!(parsed(&["--no-page-lock"]).unwrap().page_lock_limit(), Some(0));
        for bad in [
            &["--device=gpu"][..],
            &["--compute=f16"],
            &["--resident-format=int4"],
            &["--dense-format=int4"],
            &["--kv-format=int4"],
            &["--check=0"],
            &["--no-page-lock", "--page-lock-limit=1G"],
        ] {
            assert!(parsed(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_context_is_no_longer_than_its_limit() {
        let check = |args: &[&str]| generate(args).unwrap().model.check();
        for fine in
            [&["--context-limit=20"][..], &["--context=20", "--context-limit=20"], &["--context=21"], &[]]
        {
            check(fine).unwrap();
        }
        let e = check(&["--context=21", "--context-limit=20"]).unwrap_err().to_string();
        assert!(e.contains("--context 21") && e.contains("--context-limit 20"), "{e}");
    }

    #[test]
    fn sequences_side_by_side_are_bounded() {
        assert_eq!((parse_batch("1"), parse_batch("65536")), (Ok(1), Ok(1 << 16)));
        for bad in ["0", "65537", "4611686018427387904", "-1", "x", ""] {
            assert!(parse_batch(bad).unwrap_err().contains("1 to 65536"), "{bad}");
        }
    }

    #[test]
    fn names_are_those_of_the_library() {
        let g = generate(&[
            "m",
            "--format=int4-g32",
            "--policy=lfru",
            "--scope=global",
            "--prefetch=correlation",
            "--driver=host",
        ]);
        let m = g.unwrap().model;
        assert_eq!(m.model, Some("m".into()));
        assert_eq!(m.format, Format::Converted(ExpertFormat::Int4 { group: 32 }));
        assert_eq!((m.policy, m.scope, m.prefetch), (PolicyKind::Lfru, Scope::Global, Prefetch::Correlation));
        let plain = generate(&[]).unwrap().model;
        assert_eq!(
            (m.driver, plain.driver, plain.format),
            (DriverKind::Host, DriverKind::Auto, Format::Source)
        );
        let text = generate(&["--driver=gpu"]).unwrap_err().to_string();
        assert!(["auto", "host", "device"].iter().all(|choice| text.contains(choice)), "{text}");
        let mxfp4 = generate(&["--format=mxfp4"]).unwrap().model.format;
        assert_eq!(mxfp4, Format::Converted(ExpertFormat::Mxfp4));
        for bad in
            ["--format=fp4", "--policy=fifo", "--scope=all", "--prefetch=on", "--pool=big", "--slots=-1"]
        {
            assert!(generate(&[bad]).is_err(), "{bad}");
        }
    }
}
