//! The device-driven driver: residency tables in GPU memory, steps without a host round trip.
//!
//! A step is its launches and nothing else: resolve (see kernels/resolve.cu), then gate_up and down, which read a miss
//! through from page-locked memory into its slot, then the weighted sum. All addresses hold from step to step, so that
//! a graph may replay them.

use std::mem::size_of;

use candle_core::Tensor;
use cudarc::driver::{CudaStream, result};

use super::backend::{CudaBackend, Workspace};
use super::compute::address_of;
use super::context::{Doing, Gpu};
use super::kernels::{CombineArgs, DeviceItem, DownArgs, GateUpArgs, Items};
use super::pinned::PinnedBuffer;
use super::resolve::{COUNTERS_BYTES, FAULT_BAD_WEIGHT, FAULT_BYTES, FAULT_UNKNOWN_EXPERT, NONE, Resolve};
use super::slab::Slab;
use super::upload::bytes_of;
use crate::backend::{
    DeviceCounters, DeviceDriver, DeviceStep, MOST_DEVICE_ASSIGNMENTS, MOST_DEVICE_SLOTS, MOST_DEVICE_TOKENS,
    RoutingFault, SlotId,
};
use crate::error::{Error, Result};
use crate::expert::WeightOn;
use crate::pool::{PoolShape, Residency};
use crate::store::{Directory, RecordIndex};

/// Where each table lies in the one allocation. `clock` to `owner` is what an owner hands to the next.
struct Offsets {
    fault: usize,
    counters: usize,
    address: usize,
    items: usize,
    list: usize,
    factors: usize,
    clock: usize,
    stamp: usize,
    slot_of: usize,
    owner: usize,
    end: usize,
}

impl Offsets {
    fn new(layers: usize, records: usize, partitions: usize, slots: usize) -> Self {
        let mut at = 0;
        let mut take = |bytes: usize| {
            let start = at;
            at += bytes.next_multiple_of(256);
            start
        };
        Self {
            fault: take(FAULT_BYTES),
            counters: take(layers * COUNTERS_BYTES),
            address: take(8 * records),
            items: take(MOST_DEVICE_ASSIGNMENTS * size_of::<DeviceItem>()),
            list: take(4 * MOST_DEVICE_ASSIGNMENTS),
            factors: take(4 * MOST_DEVICE_ASSIGNMENTS),
            clock: take(8 * partitions),
            stamp: take(8 * slots),
            slot_of: take(4 * records),
            owner: take(4 * slots),
            end: take(0),
        }
    }
}

/// What the driver keeps on the GPU.
pub(super) struct Tables {
    slab: Slab,
    at: Offsets,
    /// The fault word as the host sees it.
    fault: PinnedBuffer,
    fault_address: u64,
    hidden: Workspace,
    partial: Workspace,
    shape: PoolShape,
    /// First slot of each partition.
    first_slot: Vec<u32>,
}

impl Tables {
    fn new(gpu: &Gpu, directory: &Directory, shape: &PoolShape, addresses: &[u64]) -> Result<Self> {
        let at =
            Offsets::new(directory.layers().len(), directory.len(), shape.partitions.len(), shape.slots());
        let slab = Slab::new(gpu, "residency tables", at.end)?;
        slab.write(0, &vec![0; at.end])?;
        slab.write(at.address, bytes_of(addresses))?;
        let fault = PinnedBuffer::new(gpu, FAULT_BYTES)
            .map_err(|e| gpu.explain_allocation("a page-locked word", FAULT_BYTES as u64, e))?;
        let fault_address = fault.device_address()?;
        let starts = shape.partitions.iter().scan(0, |next, &slots| {
            let first = *next;
            *next += slots as u32;
            Some(first)
        });
        Ok(Self {
            slab,
            at,
            fault,
            fault_address,
            hidden: Workspace::new(gpu, "the experts' hidden activations")?,
            partial: Workspace::new(gpu, "the experts' outputs")?,
            first_slot: starts.collect(),
            shape: shape.clone(),
        })
    }

    fn address(&self, offset: usize) -> u64 {
        self.slab.address() + offset as u64
    }

    /// The tables as the kernel reads them, for slots that hold `residency`.
    fn image(&self, residency: &Residency, records: usize) -> Result<Vec<u8>> {
        let slots = self.shape.slots();
        let (mut clock, mut stamp) = (vec![1u64; self.shape.partitions.len()], vec![0u64; slots]);
        let (mut slot_of, mut owner) = (vec![NONE; records], vec![NONE; slots]);
        for (p, held) in residency.partitions.iter().enumerate() {
            for &(record, slot) in held {
                let room = self.first_slot[p]..self.first_slot[p] + self.shape.partitions[p] as u32;
                if !room.contains(&slot.0) || record.0 as usize >= records {
                    let reason = format!("{record:?} in {slot:?}: partition {p} has {room:?}");
                    return Err(Error::BadArgument { what: "residency", reason });
                }
                stamp[slot.0 as usize] = clock[p];
                clock[p] += 1;
                slot_of[record.0 as usize] = slot.0;
                owner[slot.0 as usize] = record.0;
            }
        }
        let mut image = vec![0; self.at.end - self.at.clock];
        for (offset, bytes) in [
            (self.at.clock, bytes_of(&clock)),
            (self.at.stamp, bytes_of(&stamp)),
            (self.at.slot_of, bytes_of(&slot_of)),
            (self.at.owner, bytes_of(&owner)),
        ] {
            let start = offset - self.at.clock;
            image[start..start + bytes.len()].copy_from_slice(bytes);
        }
        Ok(image)
    }

    /// The kernel's word for a fault, read from where it wrote it.
    fn fault_kind(&self) -> u32 {
        // SAFETY: page-locked memory of at least 4 bytes, aligned by the page, that only the GPU writes; volatile,
        // because it does so at any time.
        unsafe { self.fault.address().cast::<u32>().read_volatile() }
    }

    /// Where activations `[rows, intermediate]` and outputs `[rows, hidden]` go. Zeroed when it is new: a step that
    /// cannot be served sums what is there, times NaN.
    fn reserve(
        &mut self,
        gpu: &Gpu,
        stream: &CudaStream,
        rows: usize,
        (intermediate, hidden): (usize, usize),
    ) -> Result<(u64, u64)> {
        let clean = |space: &mut Workspace, bytes: usize| {
            let is_new = bytes > space.bytes();
            let address = space.reserve(gpu, bytes)?;
            if is_new {
                // SAFETY: just allocated, at least `bytes` long; kernels that use it come later on the same stream.
                unsafe { result::memset_d8_async(address, 0, bytes, stream.cu_stream()) }
                    .doing("clearing a workspace")?;
            }
            Ok::<_, Error>(address)
        };
        Ok((clean(&mut self.hidden, 4 * rows * intermediate)?, clean(&mut self.partial, 4 * rows * hidden)?))
    }
}

fn no_tables() -> Error {
    Error::BadArgument { what: "device driver", reason: "step before take_over".to_owned() }
}

impl CudaBackend {
    fn tables(&self) -> Result<&Tables> {
        self.tables.as_ref().ok_or_else(no_tables)
    }

    /// Why steps cannot be driven by the GPU, if so.
    pub(super) fn cannot_drive(&self) -> Option<String> {
        if !self.arena.is_whole() {
            return Some(self.arena.note());
        }
        if !self.options.expansions.is_empty() {
            return Some("slots hold experts expanded to bf16, which only the host driver fills".to_owned());
        }
        self.slab.is_none().then(|| "slots are not allocated yet".to_owned())
    }
}

impl DeviceDriver for CudaBackend {
    fn take_over(&mut self, shape: &PoolShape, residency: &Residency) -> Result<()> {
        let directory = self.source.directory();
        let (slots, most) = (self.slots()?, shape.partitions.iter().max().copied().unwrap_or(0));
        if shape.staging > 0 || most > MOST_DEVICE_SLOTS || shape.slots() > slots.count {
            let reason = format!(
                "{} staging slots and up to {most} slots a partition, {} of {} in all: the device drives none and up \
                 to {MOST_DEVICE_SLOTS}",
                shape.staging,
                shape.slots(),
                slots.count
            );
            return Err(Error::BadArgument { what: "pool", reason });
        }
        if self.tables.as_ref().is_none_or(|t| t.shape != *shape) {
            let place = |r| self.arena.place(RecordIndex(r)).map(|p| p.device);
            let addresses: Option<Vec<u64>> = (0..directory.len() as u32).map(place).collect();
            let addresses = addresses
                .ok_or_else(|| Error::BadArgument { what: "device driver", reason: self.arena.note() })?;
            self.tables = Some(Tables::new(&self.gpu, directory, shape, &addresses)?);
        }
        let tables = self.tables()?;
        tables.slab.write(tables.at.clock, &tables.image(residency, directory.len())?)
    }

    fn residency(&mut self) -> Result<Residency> {
        self.compute.stream().synchronize().doing("waiting for kernels")?;
        let tables = self.tables()?;
        let slots = tables.shape.slots();
        let (mut stamp, mut owner) = (vec![0; 8 * slots], vec![0; 4 * slots]);
        tables.slab.read(tables.at.stamp, &mut stamp)?;
        tables.slab.read(tables.at.owner, &mut owner)?;
        let stamp: Vec<_> = stamp.as_chunks().0.iter().map(|b| u64::from_le_bytes(*b)).collect();
        let owner: Vec<_> = owner.as_chunks().0.iter().map(|b| u32::from_le_bytes(*b)).collect();
        let held = |(p, &first): (usize, &u32)| {
            let mut slots: Vec<u32> = (first..first + tables.shape.partitions[p] as u32)
                .filter(|&s| owner[s as usize] != NONE)
                .collect();
            slots.sort_by_key(|&s| stamp[s as usize]);
            slots.into_iter().map(|s| (RecordIndex(owner[s as usize]), SlotId(s))).collect()
        };
        Ok(Residency { partitions: tables.first_slot.iter().enumerate().map(held).collect() })
    }

    fn step(&mut self, step: DeviceStep<'_>) -> Result<Tensor> {
        let DeviceStep { layer, spec, layout, x, ids, weights } = step;
        self.gpu.bind()?;
        let ((tokens, width), (rows, top_k)) = (x.dims2()?, ids.dims2()?);
        if width != spec.hidden
            || rows != tokens
            || weights.dims() != ids.dims()
            || tokens > MOST_DEVICE_TOKENS
        {
            let reason = format!(
                "expected x [n <= {MOST_DEVICE_TOKENS}, {}] and [n, k] of both others, got {:?}, {:?} and {:?}",
                spec.hidden,
                x.dims(),
                ids.dims(),
                weights.dims()
            );
            return Err(Error::BadArgument { what: "x, ids and weights", reason });
        }
        let caller = self.gpu.candle_stream();
        let x = x.contiguous()?;
        // SAFETY: `combine` writes every element before anyone reads one.
        let y = unsafe { Tensor::empty((tokens, spec.hidden), x.dtype(), x.device()) }?;
        let [x_at, y_at, ids_at, weights_at] = [&x, &y, ids, weights].map(|t| address_of(t, &caller));
        let (x_at, y_at, ids_at, weights_at) = (x_at?, y_at?, ids_at?, weights_at?);

        let entry = &self.source.directory().layers()[layer];
        let slots = self.slots()?;
        let tables = self.tables.as_mut().ok_or_else(no_tables)?;
        // For the most tokens, whatever their number now, so that addresses stay as they are.
        let most_rows = MOST_DEVICE_TOKENS * top_k;
        let stream = self.compute.stream();
        let (h, partial) = tables.reserve(&self.gpu, stream, most_rows, (spec.intermediate, spec.hidden))?;
        let partition = tables.shape.partition_of[layer];
        let (on_input, at) = (spec.weight_on == WeightOn::Input, &tables.at);
        let (items, list, factors) =
            (tables.address(at.items), tables.address(at.list), tables.address(at.factors));
        let resolve = Resolve {
            ids: ids_at,
            weights: weights_at,
            slot_of: tables.address(at.slot_of),
            address: tables.address(at.address),
            owner: tables.address(at.owner),
            stamp: tables.address(at.stamp),
            clock: tables.address(at.clock + 8 * partition),
            counters: tables.address(at.counters + COUNTERS_BYTES * layer),
            fault: tables.address(at.fault),
            host: tables.fault_address,
            items,
            list,
            factors,
            pool: slots.base,
            stride: slots.stride as u64,
            assignments: (tokens * top_k) as u32,
            top_k: top_k as u32,
            experts: entry.experts as u32,
            first_record: entry.first,
            first_slot: tables.first_slot[partition],
            slots: tables.shape.partitions[partition] as u32,
            layer: layer as u32,
            weight_on_input: on_input.into(),
        };
        let items = Items {
            layout,
            items,
            len: (tokens * top_k).min(entry.experts),
            assignments: list,
            most: tokens,
            tokens,
        };
        let gate_up = GateUpArgs {
            items,
            activation: spec.activation,
            x: x_at,
            x_dtype: x.dtype(),
            top_k,
            input_weights: if on_input { weights_at } else { 0 },
            h,
        };
        let down = DownArgs { items, h, partial };
        let combine = CombineArgs {
            partial,
            weights: factors,
            tokens,
            top_k,
            hidden: spec.hidden,
            y_dtype: y.dtype(),
            y: y_at,
        };

        self.compute.enter(&caller)?;
        self.runs += 1;
        self.options.faults.delay(self.compute.stream(), self.runs)?;
        let stream = self.compute.stream();
        // SAFETY: x, ids, weights and y are tensors of the shapes that were checked, ordered before and after by
        // `enter` and `leave`; tables, h and partial are as large as the most tokens need; `resolve` writes one item
        // per record of the step, whose sources are slots of the pool or the whole arena and whose destinations are
        // slots that no other item names; nobody else touches tables or slots while the device owns them.
        unsafe {
            self.kernels.resolve(stream, &resolve)?;
            self.kernels.gate_up(stream, &gate_up)?;
            self.kernels.down_combine(stream, &down, &combine)?;
        }
        self.compute.leave(&caller)?;
        Ok(y)
    }

    fn fault(&mut self, wait: bool) -> Result<Option<RoutingFault>> {
        if self.tables.is_none() {
            return Ok(None);
        }
        self.gpu.bind()?;
        if wait {
            self.compute.stream().synchronize().doing("waiting for kernels")?;
        }
        let tables = self.tables.as_mut().ok_or_else(no_tables)?;
        if tables.fault_kind() == 0 {
            return Ok(None);
        }
        // Until the word is clear no step does anything; those that were enqueued meanwhile must have seen it.
        self.compute.stream().synchronize().doing("waiting for kernels")?;
        let bytes = tables.fault.slice_mut(0, FAULT_BYTES);
        let word = |i: usize| {
            u32::from_le_bytes([bytes[4 * i], bytes[4 * i + 1], bytes[4 * i + 2], bytes[4 * i + 3]])
        };
        let (kind, layer, token, value) = (word(0), word(1) as usize, word(2) as usize, word(3));
        bytes.fill(0);
        tables.slab.write(tables.at.fault, &[0; FAULT_BYTES])?;
        match kind {
            FAULT_BAD_WEIGHT => {
                Ok(Some(RoutingFault::BadWeight { layer, token, value: f32::from_bits(value) }))
            }
            FAULT_UNKNOWN_EXPERT => Ok(Some(RoutingFault::UnknownExpert { layer, expert: value as usize })),
            other => Err(Error::Cuda {
                what: "driving a step on the GPU".to_owned(),
                reason: format!("it reported the unknown fault {other}"),
            }),
        }
    }

    fn counters(&mut self) -> Result<Vec<DeviceCounters>> {
        let layers = self.source.directory().layers().len();
        let Some(tables) = &self.tables else { return Ok(vec![DeviceCounters::default(); layers]) };
        self.compute.stream().synchronize().doing("waiting for kernels")?;
        let mut bytes = vec![0; layers * COUNTERS_BYTES];
        tables.slab.read(tables.at.counters, &mut bytes)?;
        let words: Vec<_> = bytes.as_chunks().0.iter().map(|b| u64::from_le_bytes(*b)).collect();
        let of =
            |c: &[u64; 4]| DeviceCounters { steps: c[0], steps_with_miss: c[1], accesses: c[2], hits: c[3] };
        Ok(words.as_chunks().0.iter().map(of).collect())
    }
}
