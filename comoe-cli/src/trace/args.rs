//! Arguments of `comoe trace`.

use std::path::PathBuf;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, Subcommand};
use comoe_core::Scope;
use comoe_core::policy::PolicyKind;
use comoe_core::replay::{Eviction, Grouping, PredictorKind, ReplayPolicy, Span};
use comoe_core::size::parse_size;

use crate::args::{ModelArgs, SamplerArgs, parse_positive};

#[derive(Debug, Subcommand)]
pub(crate) enum TraceCommand {
    /// Answer prompts and record which experts every token chose.
    Record(Box<RecordArgs>),
    /// Show what a trace looks like: use, entropy, reuse and overlap by layer.
    Show(ShowArgs),
    /// Play eviction policies over a trace.
    Replay(ReplayArgs),
    /// Try predictors of the next layer's experts on a trace.
    Predict(PredictArgs),
    /// Draw a trace: use of experts, hit rates, recall.
    Plot(PlotArgs),
}

#[derive(Debug, Args)]
pub(crate) struct RecordArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// Prompts to answer, one a line, each a conversation of its own; - reads standard input
    #[arg(long, value_name = "FILE")]
    pub(crate) prompts: PathBuf,
    /// File to write
    #[arg(long, short, value_name = "FILE")]
    pub(crate) output: PathBuf,
    /// Leave the routing weights out
    #[arg(long)]
    pub(crate) no_weights: bool,
    /// Record, too, what the next layer's router says to each layer's input, for `trace predict`
    #[arg(long)]
    pub(crate) stale_gate: bool,
    #[command(flatten)]
    pub(crate) sampler: SamplerArgs,
    /// Print nothing but warnings and errors
    #[arg(long, short)]
    pub(crate) quiet: bool,
}

/// Which trace.
#[derive(Debug, Args)]
pub(crate) struct FileArgs {
    /// The trace: a file of `comoe trace record`, or a CSV (route_trace v1)
    pub(crate) trace: PathBuf,
    /// Folder of the model that the trace should be of; another one is refused
    #[arg(long, value_name = "MODEL")]
    pub(crate) model: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct ShowArgs {
    #[command(flatten)]
    pub(crate) file: FileArgs,
    /// Compare the residency column of a CSV with one global LRU of so many bytes, such as 4000M
    #[arg(long, value_name = "SIZE", value_parser = parse_size, conflicts_with = "json")]
    pub(crate) check_residency: Option<u64>,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct ReplayArgs {
    #[command(flatten)]
    pub(crate) file: FileArgs,
    /// Slots of each layer, several separated by commas
    #[arg(
        long, visible_alias = "slots", value_name = "N,..", value_delimiter = ',', value_parser = parse_positive,
        default_value = "8,16,32,64"
    )]
    pub(crate) slots_per_layer: Vec<usize>,
    /// Policies: lru, lfu, lfru, aged, blend, belady, static, lfru-admit, or lfru:T with a half-life of T tokens [default:
    /// the first seven; with --pin or --batch the first five, which need no foresight]
    #[arg(long, value_name = "P,..", value_delimiter = ',')]
    policy: Vec<ReplayPolicy>,
    /// Whether each layer has slots of its own or all layers share them
    #[arg(
        long, default_value = "layer", value_delimiter = ',',
        value_parser = PossibleValuesParser::new(["layer", "global"]).try_map(|s| s.parse::<Scope>())
    )]
    pub(crate) scope: Vec<Scope>,
    /// Which generated tokens count; those before them warm
    #[arg(long, default_value = "all", value_parser = parse_span, value_name = "all|first-half|second-half")]
    pub(crate) count: Span,
    /// Pin the hottest experts of the first half in up to these parts of the slots, 0 to 1, several separated by commas;
    /// the second half counts. For policies that need no foresight
    #[arg(
        long, value_name = "PART,..", value_delimiter = ',', value_parser = parse_part,
        conflicts_with_all = ["count", "batch"]
    )]
    pub(crate) pin: Vec<f64>,
    /// Play so many sequences at a time, several separated by commas; they are the trace's turns, or runs of its
    /// generated tokens
    #[arg(long, value_name = "B,..", value_delimiter = ',', value_parser = parse_positive)]
    pub(crate) batch: Vec<usize>,
    /// Which sequences share a batch: the same always, or those whose last sets overlap most
    #[arg(long, default_value = "none", value_parser = parse_grouping, requires = "batch", value_name = "none|similar")]
    pub(crate) group: Grouping,
    /// What leaves in a batched replay: one expert, or all that was last used together with it
    #[arg(long, default_value = "expert", value_parser = parse_eviction, requires = "batch", value_name = "expert|group")]
    pub(crate) evict: Eviction,
    /// Print one JSON array
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct PredictArgs {
    #[command(flatten)]
    pub(crate) file: FileArgs,
    /// Predictors to try [default: all; stale-gate where the trace has guesses, and one layer ahead]
    #[arg(
        long, value_name = "P,..", value_delimiter = ',',
        value_parser = PossibleValuesParser::new(["previous", "frequency", "correlation", "combined", "stale-gate"])
            .try_map(|s| s.parse::<PredictorKind>())
    )]
    pub(crate) predictor: Vec<PredictorKind>,
    /// Slots of each layer's LRU, whose misses are what a prefetch could save
    #[arg(
        long, visible_alias = "slots-per-layer", value_name = "N,..", value_delimiter = ',',
        value_parser = parse_positive, default_value = "16,32,64"
    )]
    pub(crate) slots: Vec<usize>,
    /// Layers ahead
    #[arg(long, value_name = "D,..", value_delimiter = ',', value_parser = parse_positive, default_value = "1")]
    pub(crate) depth: Vec<usize>,
    /// Guesses per layer [default: the model's top-k, and twice that]
    #[arg(long, value_name = "K,..", value_delimiter = ',', value_parser = parse_positive)]
    pub(crate) k: Vec<usize>,
    /// Print one JSON array
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct PlotArgs {
    #[command(flatten)]
    pub(crate) file: FileArgs,
    /// The picture to write (SVG)
    #[arg(long, short, value_name = "FILE")]
    pub(crate) output: PathBuf,
    /// Policies to compare; belady is always drawn, as the ceiling
    #[arg(long, value_name = "P,..", value_delimiter = ',', default_value = "lru,lfu,lfru,aged,blend")]
    pub(crate) policy: Vec<ReplayPolicy>,
    /// Slots of each layer's LRU for recall on misses [default: a quarter of the experts]
    #[arg(long, value_name = "N", value_parser = parse_positive)]
    pub(crate) slots: Option<usize>,
}

fn parse_span(text: &str) -> Result<Span, String> {
    match text {
        "all" => Ok(Span::All),
        "first-half" => Ok(Span::FirstHalf),
        "second-half" => Ok(Span::SecondHalf),
        _ => Err("use all, first-half or second-half".into()),
    }
}

fn parse_grouping(text: &str) -> Result<Grouping, String> {
    match text {
        "none" => Ok(Grouping::None),
        "similar" => Ok(Grouping::Similar),
        _ => Err("use none or similar".into()),
    }
}

fn parse_eviction(text: &str) -> Result<Eviction, String> {
    match text {
        "expert" => Ok(Eviction::Expert),
        "group" => Ok(Eviction::Group),
        _ => Err("use expert or group".into()),
    }
}

fn parse_part(s: &str) -> Result<f64, String> {
    let part = s.parse().ok().filter(|part| (0.0..=1.0).contains(part));
    part.ok_or_else(|| "expected a part of the slots, 0 to 1".to_owned())
}

/// Live policies that are played unless others are asked for.
const ONLINE: [PolicyKind; 5] =
    [PolicyKind::Lru, PolicyKind::Lfu, PolicyKind::Lfru, PolicyKind::Aged, PolicyKind::Blend];

impl ReplayArgs {
    /// The policies asked for, or else those that compare best.
    pub(crate) fn policies(&self) -> Vec<ReplayPolicy> {
        if !self.policy.is_empty() {
            return self.policy.clone();
        }
        let online = ONLINE.map(ReplayPolicy::Online);
        online.into_iter().chain([ReplayPolicy::Belady, ReplayPolicy::Static]).collect()
    }

    /// The policies as live ones, as batched replays need them; those that are not live are an error where they were asked
    /// for.
    pub(crate) fn online(&self) -> Result<Vec<PolicyKind>, String> {
        if self.policy.is_empty() {
            return Ok(ONLINE.to_vec());
        }
        let online = |p: &ReplayPolicy| match p {
            ReplayPolicy::Online(kind) => Ok(*kind),
            other => Err(other.to_string()),
        };
        self.policy.iter().map(online).collect()
    }
}
