//! Opens a model folder: experts to their cache, the rest to the device.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::{DType, Device};
use comoe_core::plan::{DeviceBytes, DeviceNeeds, DevicePlan, MemoryPlan, Room, SharedPlan};
use comoe_core::store::{Checkpoint, ConvertOptions, Directory, ExpertStore, Naming, Quantisation};
use comoe_core::{CacheOptions, Capacity, CudaOptions, ExpertCache, ExpertFormat, PeerAccess, cuda_memory};

use super::needs::{device_needs, needs_of_several, table_bytes};
use super::{DenseFormat, DenseWeights, KvFormat, ModelFiles, Progress};
use crate::arch::{self, DecoderPlan, MoePlan};
use crate::decoder::Decoder;
use crate::error::{Error, Result};

/// Tokens that memory is planned for unless others are asked for; never more than the model's own limit.
pub const DEFAULT_CONTEXT: usize = 4096;

/// How a model is loaded.
#[derive(Debug, Clone)]
pub struct LoadOptions {
    /// What the dense part computes in, and what activations are between blocks: F32 everywhere, or BF16 on a GPU. BF16
    /// weights are widened exactly.
    pub dtype: DType,
    /// How the projections outside the experts are held.
    pub dense: DenseFormat,
    /// How keys and values of the tokens so far are held.
    pub kv: KvFormat,
    /// Tokens that memory is planned for, prompt and answer together; `None` is the model's limit, [`DEFAULT_CONTEXT`] or
    /// `most_context`, whichever is least. A longer sequence takes memory from the experts' slots.
    pub context: Option<usize>,
    /// Tokens that a sequence may grow to; `None` is the model's limit. Less than a `context` that was asked for counts as
    /// that, and 0 keeps sequences from growing.
    pub most_context: Option<usize>,
    /// How the expert cache is run. Its `top_k` is set by the model.
    pub cache: CacheOptions,
    /// The experts' format; `None` takes the one that fits the checkpoint's best (`ExpertStore::source_format`).
    pub format: Option<ExpertFormat>,
    /// Where converted experts are kept for the next start; `None` converts anew.
    pub cache_dir: Option<PathBuf>,
    /// How a GPU is used; other devices do not look at it.
    pub cuda: CudaOptions,
    /// Devices besides the model's own that hold experts, too.
    pub more_devices: Vec<Device>,
    /// How many experts each device holds, the model's own first, where that is not `cache.capacity` on all of them.
    pub capacities: Vec<Capacity>,
    /// The most memory that may be taken of each device, the model's own first, in bytes, where that is not `cache.budget` on
    /// all of them.
    pub budgets: Vec<u64>,
    /// How GPUs hand things to each other.
    pub peer_access: PeerAccess,
}

impl Default for LoadOptions {
    fn default() -> Self {
        Self {
            dtype: DType::F32,
            dense: DenseFormat::default(),
            kv: KvFormat::default(),
            context: None,
            most_context: None,
            cache: CacheOptions::default(),
            format: None,
            cache_dir: None,
            cuda: CudaOptions::default(),
            more_devices: Vec::new(),
            capacities: Vec::new(),
            budgets: Vec::new(),
            peer_access: PeerAccess::default(),
        }
    }
}

impl LoadOptions {
    /// Tokens that memory is planned for, of a model whose limit is `most`.
    pub(crate) fn planned_context(&self, most: usize) -> usize {
        let limit = self.most_context.filter(|limit| *limit > 0).unwrap_or(usize::MAX);
        self.context.unwrap_or(most.min(DEFAULT_CONTEXT).min(limit))
    }
}

impl Decoder {
    /// Loads a folder with `config.json` and safetensors shards, a packed file, or a GGUF file; no tokenizer is needed.
    ///
    /// # Errors
    /// Names the file, tensor or field that is missing or wrong, and what would work.
    pub fn open(
        folder: &Path,
        device: &Device,
        options: &LoadOptions,
        progress: &(dyn Fn(Progress) + Sync),
    ) -> Result<Self> {
        let files = ModelFiles::open(folder)?;
        open_decoder(arch::plan(files.config())?, &files, device, options, progress)
    }
}

/// Opens the experts, builds their cache, and loads the dense part.
pub(crate) fn open_decoder(
    plan: DecoderPlan,
    files: &ModelFiles,
    device: &Device,
    options: &LoadOptions,
    progress: &(dyn Fn(Progress) + Sync),
) -> Result<Decoder> {
    check_dtype(options.dtype, device.is_cuda())?;
    let context = options.planned_context(plan.max_positions);
    plan.check_context(context)?;
    let naming = naming_of(&plan, files.quantisation()?);
    let checkpoint = Arc::new(files.checkpoint()?);
    let store = checked_store(&plan, files, &checkpoint, &naming)?;
    let store = in_format(store, options, progress)?;
    let format = Some(store.format());
    let notes = store.notes().to_vec();
    let top_k = plan.moe_layers().map(|(_, moe)| moe.router.top_k).max().unwrap_or(0);
    let weights = DenseWeights::new(&checkpoint, &naming, options.dtype, device, progress)?;
    let mut weights = weights.with_format(options.dense, &plan)?;
    let on_gpu = device.is_cuda();
    let in_force = LoadOptions { format, ..options.clone() };
    let (alone, margin) = device_needs(&plan, &weights, store.directory(), context, 1, &in_force, on_gpu);
    let devices: Vec<Device> = std::iter::once(device).chain(&options.more_devices).cloned().collect();
    let sizes = (context, options.dtype);
    let [mut others, elsewhere] =
        needs_of_several(&plan, alone, store.directory(), sizes, devices.len(), on_gpu);
    if devices.len() == 1 {
        others.buffers += table_bytes(store.directory(), &options.cache, on_gpu);
    }
    let mut cache = CacheOptions { top_k, ..options.cache.clone() };
    let margin = margin + cache.reserve;
    cache.reserve = others.total() + margin;
    let slot_bytes = slot_bytes(&store, &options.cuda, on_gpu);
    let rooms = (0..devices.len()).map(|n| cache.room_of(&devices, n, &options.budgets));
    let memory = match rooms.collect::<comoe_core::Result<Option<Vec<_>>>>()? {
        // Nobody knows how much there is.
        None => Vec::new(),
        Some(rooms) => {
            let needs = [(others, margin), (elsewhere, margin)];
            plan_devices(&rooms, needs, options, &cache, store.directory(), slot_bytes)?.devices
        }
    };
    let free = if on_gpu { Some(cuda_memory(device)?.0) } else { None };
    let experts = ExpertCache::builder(store, devices)
        .options(cache)
        .capacities(&options.capacities)
        .budgets(&options.budgets)
        .reserve_elsewhere(elsewhere.total() + margin)
        .peer_access(options.peer_access)
        .cuda(options.cuda.clone())
        .build()?;
    let decoder = Decoder::load(plan, &mut weights, experts, context, options.dtype, device)?;
    for (pattern, count) in weights.ignored() {
        tracing::info!("ignored, since the model does not use it: {pattern} ({count} tensors)");
    }
    let decoder = decoder.with_kv_format(options.kv);
    let decoder = decoder.with_most_context(options.most_context.unwrap_or(usize::MAX));
    let decoder = decoder.with_budget(options.cache.budget.is_some() || !options.budgets.is_empty());
    Ok(decoder.with_notes(notes).with_plans(memory, free))
}

/// Shares out the memory of `rooms` as building the cache will: `needs` are the first device's and every other one's, all
/// but slots and what is kept.
pub(super) fn plan_devices(
    rooms: &[Room],
    needs: [(DeviceBytes, u64); 2],
    options: &LoadOptions,
    cache: &CacheOptions,
    directory: &Directory,
    slot_bytes: usize,
) -> Result<SharedPlan> {
    if let [room] = rooms {
        let memory = MemoryPlan::new(room, needs[0], cache, directory, slot_bytes)?;
        return Ok(SharedPlan { devices: vec![DevicePlan { number: 0, memory }], notes: Vec::new() });
    }
    let capacities = &options.capacities;
    let device = |(number, room): (usize, &Room)| {
        let (others, margin) = needs[number.min(1)];
        let capacity = capacities.get(number).or(capacities.last()).copied().unwrap_or(cache.capacity);
        DeviceNeeds { room: room.clone(), capacity, others, margin }
    };
    let devices: Vec<_> = rooms.iter().enumerate().map(device).collect();
    Ok(SharedPlan::new(&devices, cache, directory, slot_bytes)?)
}

/// Bytes of a slot for the records of a store.
pub(super) fn slot_bytes(store: &ExpertStore, cuda: &CudaOptions, on_gpu: bool) -> usize {
    let directory = store.directory();
    match on_gpu {
        true => {
            let experts = store.specs().iter().enumerate().map(|(o, spec)| (*spec, *store.layout(o)));
            cuda.clone().with_experts(experts).slot_bytes(directory)
        }
        false => directory.largest_record(),
    }
}

pub(super) fn check_dtype(dtype: DType, on_gpu: bool) -> Result<()> {
    match (dtype, on_gpu) {
        (DType::F32, _) | (DType::BF16, true) => Ok(()),
        (dtype, _) => Err(Error::BadOption {
            option: "dtype (--compute)",
            value: dtype.as_str().to_owned(),
            expected: "expected f32, or bf16 on a GPU",
        }),
    }
}

/// How a model's tensors are called.
pub(super) fn naming_of(plan: &DecoderPlan, quantisation: Quantisation) -> Naming {
    let naming = Naming::auto().with_layers(plan.layers.len()).with_quantisation(quantisation);
    match plan.stacked_experts {
        Some(layout) => naming.with_stacked_layout(layout),
        None => naming,
    }
}

/// The experts of a model as they are stored, checked against the plan.
pub(super) fn checked_store(
    plan: &DecoderPlan,
    files: &ModelFiles,
    checkpoint: &Arc<Checkpoint>,
    naming: &Naming,
) -> Result<ExpertStore> {
    let store = match (files.packed(), plan.moe_layers().next()) {
        (Some(packed), _) => ExpertStore::from_packed(packed.clone()),
        (None, None) => ExpertStore::from_checkpoint(checkpoint.clone(), naming)?,
        // Layers differ in nothing but size in the families that are implemented.
        (None, Some((_, moe))) => ExpertStore::from_checkpoint(checkpoint.clone(), naming)?
            .with_activation(moe.expert.activation)
            .with_weight_on(moe.expert.weight_on),
    };
    for (layer, moe) in plan.moe_layers() {
        let Some(ordinal) = store.directory().ordinal(layer) else {
            return Err(Error::ExpertMismatch {
                layer,
                config: moe.describe(),
                checkpoint: "none".to_owned(),
            });
        };
        let experts = store.directory().layers()[ordinal].experts;
        let found = MoePlan { experts, expert: *store.spec(ordinal), ..*moe };
        if found.experts != moe.experts || found.expert != moe.expert {
            let (config, checkpoint) = (moe.describe(), found.describe());
            return Err(Error::ExpertMismatch { layer, config, checkpoint });
        }
    }
    Ok(store)
}

/// The experts in the format asked for.
fn in_format(
    store: ExpertStore,
    options: &LoadOptions,
    progress: &(dyn Fn(Progress) + Sync),
) -> Result<ExpertStore> {
    let convert = ConvertOptions {
        cache_dir: options.cache_dir.clone(),
        progress: Some(&|done, total| progress(Progress::Convert { done, total })),
    };
    let format = options.format.unwrap_or(store.source_format());
    Ok(store.into_format_with(format, &convert)?)
}
