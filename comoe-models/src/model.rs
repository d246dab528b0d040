//! The door: a model folder becomes a model that answers.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::{DType, Device};
use comoe_core::store::{Checkpoint, ConvertOptions, ExpertStore, Naming};
use comoe_core::{CacheOptions, ExpertCache, ExpertFormat};

use crate::arch::{self, DecoderPlan, MoePlan};
use crate::chat::{ChatTemplate, Conversation, Tokenizer};
use crate::decoder::Decoder;
use crate::error::{Error, Result};
use crate::generate::Session;
use crate::load::{ConfigFile, DenseWeights, Progress};

/// Longest sequence unless another is asked for, in tokens; never more than the model's own limit.
pub const DEFAULT_CONTEXT: usize = 4096;

/// How a model is loaded.
#[derive(Debug, Clone)]
pub struct LoadOptions {
    /// What the dense part computes in: F32 on the CPU; BF16 weights are widened exactly.
    pub dtype: DType,
    /// Longest sequence, prompt and answer together, in tokens; `None` is the model's limit or [`DEFAULT_CONTEXT`],
    /// whichever is less.
    pub context: Option<usize>,
    /// How the expert cache is run. Its `top_k` is set by the model.
    pub cache: CacheOptions,
    /// The experts' format; `None` keeps the checkpoint's.
    pub format: Option<ExpertFormat>,
    /// Where converted experts are kept for the next start; `None` converts anew.
    pub cache_dir: Option<PathBuf>,
}

impl Default for LoadOptions {
    fn default() -> Self {
        Self {
            dtype: DType::F32,
            context: None,
            cache: CacheOptions::default(),
            format: None,
            cache_dir: None,
        }
    }
}

/// A loaded model: the decoder with its expert cache, tokenizer, chat template and stop tokens.
pub struct Model {
    decoder: Decoder,
    tokenizer: Tokenizer,
    template: Option<ChatTemplate>,
    stop: Vec<u32>,
    notes: Vec<String>,
}

impl Model {
    /// Loads a folder in Hugging Face layout: `config.json`, `tokenizer.json`, safetensors shards and, where there
    /// are such, `generation_config.json`, `tokenizer_config.json` and `chat_template.jinja`.
    ///
    /// # Errors
    /// Names the file, tensor or field that is missing or wrong, and what would work.
    pub fn load(
        folder: &Path,
        device: &Device,
        options: &LoadOptions,
        progress: &(dyn Fn(Progress) + Sync),
    ) -> Result<Self> {
        if !folder.is_dir() {
            let reason = "no such folder; give the folder of a model, with config.json, tokenizer.json and \
                          .safetensors files";
            return Err(Error::bad_file(folder, reason));
        }
        let config = ConfigFile::read(&folder.join("config.json"))?;
        let plan = arch::plan(&config)?;
        let tokenizer_path = folder.join("tokenizer.json");
        let tokenizer = Tokenizer::read(&tokenizer_path)?;
        if tokenizer.vocab_size() > plan.vocab {
            let reason = format!(
                "has {} tokens, the model's vocabulary only {}: it belongs to another model",
                tokenizer.vocab_size(),
                plan.vocab
            );
            return Err(Error::bad_file(tokenizer_path, reason));
        }
        let template = ChatTemplate::find(folder)?;
        let stop = stop_tokens(folder, &config)?;

        let checkpoint = Arc::new(Checkpoint::open(&[folder])?);
        let naming = Naming::auto().with_layers(plan.layers.len());
        let (decoder, notes) = load_decoder(plan, &checkpoint, &naming, device, options, progress)?;
        Ok(Self { decoder, tokenizer, template, stop, notes })
    }

    /// Puts a model together from parts that were made otherwise. `stop` holds the ids that end an answer.
    pub fn from_parts(
        decoder: Decoder,
        tokenizer: Tokenizer,
        template: Option<ChatTemplate>,
        stop: Vec<u32>,
    ) -> Self {
        let notes = decoder.experts().notes().to_vec();
        Self { decoder, tokenizer, template, stop, notes }
    }

    /// The decoder.
    pub fn decoder(&self) -> &Decoder {
        &self.decoder
    }

    /// The cache that serves the experts.
    pub fn experts(&self) -> &ExpertCache {
        self.decoder.experts()
    }

    /// Where what is in force differs from what was asked, and why: of the experts' store and of their cache.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// The chat template, where the model has one.
    pub fn template(&self) -> Option<&ChatTemplate> {
        self.template.as_ref()
    }

    /// The ids that end an answer.
    pub fn stop_tokens(&self) -> &[u32] {
        &self.stop
    }

    /// Whether `id` ends an answer.
    pub fn is_stop(&self, id: u32) -> bool {
        self.stop.contains(&id)
    }

    /// An empty sequence, for prompts without a chat template.
    ///
    /// # Errors
    /// When there is no memory for its KV cache.
    pub fn session(&self) -> Result<Session<'_>> {
        Session::new(self)
    }

    /// An empty conversation.
    ///
    /// # Errors
    /// [`Error::NoTemplate`] when the model has no chat template.
    pub fn conversation(&self, system: Option<&str>) -> Result<Conversation<'_>> {
        Conversation::new(self, system)
    }
}

/// Opens the experts, builds their cache, and loads the dense part. Also says what is in force that was not asked.
fn load_decoder(
    plan: DecoderPlan,
    checkpoint: &Arc<Checkpoint>,
    naming: &Naming,
    device: &Device,
    options: &LoadOptions,
    progress: &(dyn Fn(Progress) + Sync),
) -> Result<(Decoder, Vec<String>)> {
    let context = options.context.unwrap_or(plan.max_positions.min(DEFAULT_CONTEXT));
    plan.check_context(context)?;
    let store = expert_store(&plan, checkpoint, naming, options, progress)?;
    let mut notes = store.notes().to_vec();
    let top_k = plan.moe_layers().map(|(_, moe)| moe.router.top_k).max().unwrap_or(0);
    let cache = CacheOptions { top_k, ..options.cache.clone() };
    let experts = ExpertCache::builder(store, device).options(cache).build()?;
    notes.extend_from_slice(experts.notes());
    let mut weights = DenseWeights::new(checkpoint, naming, options.dtype, device, progress)?;
    let decoder = Decoder::load(plan, &mut weights, experts, context, options.dtype, device)?;
    Ok((decoder, notes))
}

/// The experts of a checkpoint, checked against the plan, in the format asked for.
fn expert_store(
    plan: &DecoderPlan,
    checkpoint: &Arc<Checkpoint>,
    naming: &Naming,
    options: &LoadOptions,
    progress: &(dyn Fn(Progress) + Sync),
) -> Result<ExpertStore> {
    let mut store = ExpertStore::from_checkpoint(checkpoint.clone(), naming)?;
    if let Some((_, moe)) = plan.moe_layers().next() {
        // Layers differ in nothing but size in the families that are implemented.
        store = store.with_activation(moe.expert.activation).with_weight_on(moe.expert.weight_on);
    }
    for (layer, moe) in plan.moe_layers() {
        let Some(ordinal) = store.directory().ordinal(layer) else {
            return Err(Error::ExpertMismatch {
                layer,
                config: moe.describe(),
                checkpoint: "none".to_owned(),
            });
        };
        let experts = store.directory().layers()[ordinal].experts;
        let found = MoePlan { experts, router: moe.router, expert: *store.spec(ordinal) };
        if found.experts != moe.experts || found.expert != moe.expert {
            let (config, checkpoint) = (moe.describe(), found.describe());
            return Err(Error::ExpertMismatch { layer, config, checkpoint });
        }
    }
    match options.format {
        Some(format) => {
            let convert = ConvertOptions {
                cache_dir: options.cache_dir.clone(),
                progress: Some(&|done, total| progress(Progress::Convert { done, total })),
            };
            Ok(store.into_format_with(format, &convert)?)
        }
        None => Ok(store),
    }
}

/// The ids under `eos_token_id` of `generation_config.json` (where there is one) and of `config.json`.
fn stop_tokens(folder: &Path, config: &ConfigFile) -> Result<Vec<u32>> {
    let mut ids = config.token_ids("eos_token_id")?;
    let path = folder.join("generation_config.json");
    if path.exists() {
        ids.extend(ConfigFile::read(&path)?.token_ids("eos_token_id")?);
    }
    ids.sort_unstable();
    ids.dedup();
    Ok(ids)
}
