//! What packing costs: the error of the weights, layer by layer, and what the model says then, beside what it said before.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device};
use clap::Args;
use comoe_core::machine::ram_available;
use comoe_core::stats::human_bytes;
use comoe_core::store::{LayerError, WeightErrors};
use comoe_core::{CacheOptions, Capacity, ExpertFormat, cuda_memory};
use comoe_models::evaluate::{Evaluation, EvaluationText, evaluate};
use comoe_models::{Decoder, LoadOptions};
use serde::Serialize;

use crate::device::{self, DeviceChoice, Opened};
use crate::error::{Error, Result};
use crate::load::{Bar, share_of};
use crate::output::say;

/// What `pack` and `verify` measure besides.
#[derive(Debug, Args)]
pub(crate) struct QualityArgs {
    /// Text by which both models are measured, perplexity and KL divergence: plain, or conversations, one
    /// {"messages": [{"role": .., "content": ..}, ..]} a line in a file .jsonl, whose answers count
    #[arg(long, value_name = "FILE")]
    pub(crate) evaluate: Option<PathBuf>,
    /// Where to compute for it: cpu, cuda, cuda:N, or auto
    #[arg(long, value_name = "DEVICE", default_value = "auto", requires = "evaluate")]
    pub(crate) device: DeviceChoice,
    /// Print one JSON object: files, errors, and what was measured
    #[arg(long)]
    pub(crate) json: bool,
}

/// What a measurement is made with, all that can be wrong with it seen before there is work to lose.
#[derive(Debug)]
pub(crate) struct Measure {
    opened: Opened,
    text: EvaluationText,
    /// Notes would not be seen.
    json: bool,
}

impl Measure {
    /// The device and the text asked for, read as the model of `source` reads it; `None` where nothing is to be measured.
    ///
    /// # Errors
    /// For a device that cannot be used, a text that cannot be read or has nothing to measure, and a model without a
    /// tokenizer.
    pub(crate) fn open(args: &QualityArgs, source: &Path) -> Result<Option<Self>> {
        let Some(path) = &args.evaluate else { return Ok(None) };
        let opened = device::open(&args.device)?;
        let text = EvaluationText::read(path, source).map_err(|e| match e {
            comoe_models::Error::Io { path: of, source }
            | comoe_models::Error::Core(comoe_core::Error::Io { path: of, source })
                if of == *path =>
            {
                Error::EvaluateText { path: of, source }
            }
            e => e.into(),
        })?;
        Ok(Some(Self { opened, text, json: args.json }))
    }
}

/// What was measured, as `--json` has it.
#[derive(Debug, Serialize)]
pub(crate) struct Quality {
    /// Of all weights of experts: root mean square of the differences over that of the weights.
    error: f64,
    layers: Vec<Layer>,
    #[serde(skip_serializing_if = "Option::is_none")]
    evaluation: Option<Evaluated>,
}

/// A layer's experts.
#[derive(Debug, Serialize)]
struct Layer {
    layer: usize,
    format: String,
    bytes: u64,
    error: f64,
    worst_error: f64,
    worst_expert: usize,
}

#[derive(Debug, Serialize)]
struct Evaluated {
    /// The experts' format that the file's was compared with.
    reference_format: String,
    #[serde(flatten)]
    evaluation: Evaluation,
}

impl From<&LayerError> for Layer {
    fn from(of: &LayerError) -> Self {
        let ((worst_error, worst_expert), format) = (of.worst, of.format.to_string());
        Self { layer: of.layer, format, bytes: of.bytes, error: of.error, worst_error, worst_expert }
    }
}

impl Quality {
    pub(crate) fn new(errors: &WeightErrors) -> Self {
        Self { error: errors.all, layers: errors.layers.iter().map(Layer::from).collect(), evaluation: None }
    }

    /// Runs the model of `source`, its experts in `format` as they are read, and that of `file` over the text.
    pub(crate) fn measure(
        &mut self,
        (source, format): (&Path, ExpertFormat),
        file: &Path,
        Measure { opened, text, json }: Measure,
    ) -> Result<()> {
        let device = opened.device;
        let bar = Bar::new();
        let reference = Decoder::open(source, &device, &options(&device, format, 1)?, &|p| bar.show(p))?;
        let options = LoadOptions { format: None, ..options(&device, format, 0)? };
        let other = Decoder::open(file, &device, &options, &|p| bar.show(p))?;
        let measured = evaluate(&reference, &other, &text, &|done, total| bar.evaluating(done, total));
        bar.clear();
        let evaluation = measured?;
        // An evaluation needs one device; of several it takes the first.
        for note in opened.notes.iter().filter(|_| !json) {
            say!("note: {note}");
        }
        self.evaluation = Some(Evaluated { reference_format: format.to_string(), evaluation });
        Ok(())
    }

    /// For a person.
    pub(crate) fn table(&self) -> String {
        let mut out = String::from("layer  format          bytes  error %   worst expert %\n");
        for l in &self.layers {
            let bytes = human_bytes(l.bytes);
            let (error, worst) = (100.0 * l.error, 100.0 * l.worst_error);
            let _ = writeln!(
                out,
                "{:>5}  {:<9} {bytes:>11}  {error:>7.3}  {worst:>7.3} ({})",
                l.layer, l.format, l.worst_expert
            );
        }
        let _ = write!(
            out,
            "weights of experts: {:.3} % off (root mean square, relative to the weights)",
            100.0 * self.error
        );
        if let Some(Evaluated { reference_format, evaluation: e }) = &self.evaluation {
            let more = 100.0 * (e.perplexity / e.reference_perplexity - 1.0);
            let _ = write!(
                out,
                "\nperplexity {:.4}, {:.4} in {reference_format} ({more:+.2} %); KL divergence {:.2e} nats in the mean, \
                 {:.2e} at most; the likeliest token is the same for {:.2} % of {} tokens",
                e.perplexity,
                e.reference_perplexity,
                e.kl,
                e.worst_kl,
                100.0 * e.same_choice,
                e.tokens
            );
        }
        out
    }
}

/// F32 everywhere, so that nothing but the experts' format differs. `others` models will need room besides.
fn options(device: &Device, format: ExpertFormat, others: u64) -> Result<LoadOptions> {
    let (capacity, reserve) = match device {
        Device::Cuda(_) => (Capacity::Fit, others * cuda_memory(device)?.0 / 2),
        _ => (share_of(ram_available()), 0),
    };
    let mut options = LoadOptions {
        dtype: DType::F32,
        cache: CacheOptions { capacity, reserve, ..CacheOptions::default() },
        format: Some(format),
        ..LoadOptions::default()
    };
    // Two models' experts would be page-locked, for one reading.
    options.cuda.page_lock_limit = Some(0);
    Ok(options)
}
