//! A model's memory and traffic, from its configuration and headers alone: no weight is read.

use std::path::Path;
use std::sync::Arc;

use candle_core::{DType, Device};
use comoe_core::plan::{DeviceBytes, MemoryPlan, Room, SharedPlan, TokenBytes};
use comoe_core::store::Directory;
use comoe_core::{CacheOptions, ExpertFormat, ExpertLayout};

use super::needs::{KvPart, device_needs, kv_parts, needs_of_several, table_bytes};
use super::open::{check_dtype, checked_store, naming_of, plan_devices};
use super::{DenseWeights, LoadOptions, ModelFiles};
use crate::arch::{self, DecoderPlan};
use crate::error::Result;

/// What a model is planned for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Target {
    /// A GPU, or else the CPU.
    pub on_gpu: bool,
    /// Sequences at once, each with a cache of its own.
    pub batch: usize,
}

/// A model that is not loaded, and what it would take.
#[derive(Debug, Clone)]
pub struct ModelPlan {
    plan: DecoderPlan,
    target: Target,
    format: ExpertFormat,
    context: usize,
    directory: Directory,
    slot_bytes: usize,
    others: DeviceBytes,
    /// Of a device alone, besides.
    table: u64,
    dtype: DType,
    margin: u64,
    kv: Vec<KvPart>,
    /// Dense weights that a step reads.
    read: u64,
}

impl ModelPlan {
    /// Plans the model at `path` (a folder, a packed file or a GGUF file) as [`Decoder::open`](crate::Decoder::open) would
    /// load it with these options.
    ///
    /// # Errors
    /// As loading has before it reads weights.
    pub fn open(path: &Path, target: Target, options: &LoadOptions) -> Result<Self> {
        let files = ModelFiles::open(path)?;
        let plan = arch::plan(files.config())?;
        check_dtype(options.dtype, target.on_gpu)?;
        let context = options.planned_context(plan.max_positions);
        plan.check_context(context)?;
        let naming = naming_of(&plan, files.quantisation()?);
        let checkpoint = Arc::new(files.checkpoint()?);
        let store = checked_store(&plan, &files, &checkpoint, &naming)?;
        let format = options.format.unwrap_or(store.source_format());
        let layouts = store.specs().iter().map(|spec| ExpertLayout::new(spec, format));
        let layers = store.directory().layers().iter().zip(layouts.clone());
        let directory =
            Directory::new(layers.map(|(entry, layout)| (entry.layer, entry.experts, layout.record_bytes)))?;
        let slot_bytes = match target.on_gpu {
            true => {
                let experts = store.specs().iter().copied().zip(layouts);
                options.cuda.clone().with_experts(experts).slot_bytes(&directory)
            }
            false => directory.largest_record(),
        };
        let weights = DenseWeights::new(&checkpoint, &naming, options.dtype, &Device::Cpu, &|_| {})?;
        let weights = weights.counting(options.dense, &plan);
        let in_force = LoadOptions { format: Some(format), ..options.clone() };
        let (others, margin) =
            device_needs(&plan, &weights, &directory, context, target.batch, &in_force, target.on_gpu);
        // Of an embedding table a step reads some rows.
        let table = if plan.tied_head { 0 } else { plan.vocab * plan.hidden * options.dtype.size_in_bytes() };
        Ok(Self {
            kv: kv_parts(&plan, context, target.batch, options.dtype, options.kv),
            read: others.dense.saturating_sub(table as u64),
            table: table_bytes(&directory, &options.cache, target.on_gpu),
            plan,
            target,
            format,
            context,
            directory,
            dtype: options.dtype,
            slot_bytes,
            others,
            margin,
        })
    }

    /// What the model at `path` is made of, by its configuration.
    ///
    /// # Errors
    /// When there is none, or it is of a family that does not work.
    pub fn decoder_of(path: &Path) -> Result<DecoderPlan> {
        arch::plan(ModelFiles::open(path)?.config())
    }

    /// Shares out the memory of `room` (its own reserve does not count) as loading would with these options.
    ///
    /// # Errors
    /// As [`MemoryPlan::new`].
    pub fn memory(&self, room: &Room, options: &CacheOptions) -> Result<MemoryPlan> {
        let options = CacheOptions { top_k: self.top_k(), ..options.clone() };
        let needs = (self.needs(1)[0], self.margin + options.reserve);
        Ok(MemoryPlan::new(room, needs, &options, &self.directory, self.slot_bytes)?)
    }

    /// The same over several devices, of which the first has everything that is not experts; `rooms` are theirs.
    ///
    /// # Errors
    /// As [`SharedPlan::new`]; [`comoe_core::Error::BadArgument`] where a device is asked to drive that cannot.
    pub fn shared_memory(&self, rooms: &[Room], options: &LoadOptions) -> Result<SharedPlan> {
        options.cache.check_driver(self.target.on_gpu)?;
        let margin = self.margin + options.cache.reserve;
        let cache = CacheOptions { top_k: self.top_k(), ..options.cache.clone() };
        let needs = self.needs(rooms.len()).map(|needs| (needs, margin));
        plan_devices(rooms, needs, options, &cache, &self.directory, self.slot_bytes)
    }

    /// Memory of everything but slots on the first of so many devices, and on every other one.
    pub fn needs(&self, devices: usize) -> [DeviceBytes; 2] {
        let sizes = (self.context, self.dtype);
        let [mut first, other] =
            needs_of_several(&self.plan, self.others, &self.directory, sizes, devices, self.target.on_gpu);
        let table = if devices == 1 { self.table } else { 0 };
        first.buffers = first.buffers.saturating_add(table);
        [first, other]
    }

    /// Most experts that a token uses in a layer.
    pub fn top_k(&self) -> usize {
        self.plan.moe_layers().map(|(_, moe)| moe.router.top_k).max().unwrap_or(0)
    }

    /// What a token of every sequence makes a step read, in the middle of the context. Sequences choose their experts apart
    /// from each other, all experts alike.
    pub fn token_bytes(&self) -> TokenBytes {
        let chosen = |(layer, moe): (usize, &arch::MoePlan)| {
            let bytes = self.directory.ordinal(layer).map_or(0, |o| self.directory.layers()[o].record_bytes);
            let (experts, top_k) = (moe.experts as f64, moe.router.top_k as f64);
            let spared = (1.0 - top_k / experts).powi(i32::try_from(self.target.batch).unwrap_or(i32::MAX));
            (experts * (1.0 - spared) * bytes as f64).round() as u64
        };
        TokenBytes {
            dense: self.read.saturating_add(self.others.kv / 2),
            experts: self.plan.moe_layers().map(chosen).sum(),
            layers: if self.target.on_gpu { self.plan.layers.len() } else { 0 },
            batch: self.target.batch,
        }
    }

    /// What the model is made of.
    pub fn decoder(&self) -> &DecoderPlan {
        &self.plan
    }

    /// What it is planned for.
    pub fn target(&self) -> Target {
        self.target
    }

    /// The experts' format.
    pub fn format(&self) -> ExpertFormat {
        self.format
    }

    /// Tokens of a sequence.
    pub fn context(&self) -> usize {
        self.context
    }

    /// The experts' records in that format.
    pub fn directory(&self) -> &Directory {
        &self.directory
    }

    /// Bytes of a slot.
    pub fn slot_bytes(&self) -> usize {
        self.slot_bytes
    }

    /// Device memory of everything but slots.
    pub fn others(&self) -> &DeviceBytes {
        &self.others
    }

    /// Kept of the device's memory for what cannot be computed.
    pub fn margin(&self) -> u64 {
        self.margin
    }

    /// What sequences keep, by kind of layer.
    pub fn kv(&self) -> &[KvPart] {
        &self.kv
    }
}
