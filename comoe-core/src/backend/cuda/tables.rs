//! The residency tables in GPU memory, and how they are handed over. Kernels/resolve.cu says what each is for.

use std::mem::size_of;
use std::time::Duration;

use cudarc::driver::{CudaStream, result};

use super::backend::Workspace;
use super::context::{Doing, Gpu};
use super::kernels::DeviceItem;
use super::pinned::PinnedBuffer;
use super::resolve::{
    COUNTERS_BYTES, FAULT_BYTES, KEPT, MISSING_BYTES, NONE, PARTITION_BYTES, PROGRESS_BYTES,
};
use super::slab::Slab;
use super::upload::bytes_of;
use crate::backend::{Fill, MOST_DEVICE_ASSIGNMENTS, SlotId};
use crate::error::{Error, Result};
use crate::pool::{DecayedCounts, PoolShape, Residency};
use crate::store::{Directory, RecordIndex};

/// Where each table lies in the one allocation. `partitions` to `progress` is what an owner hands to the next.
pub(super) struct Offsets {
    pub(super) fault: usize,
    pub(super) counters: usize,
    pub(super) uses: usize,
    pub(super) address: usize,
    pub(super) items: usize,
    pub(super) fills: usize,
    pub(super) list: usize,
    pub(super) factors: usize,
    pub(super) missing: usize,
    pub(super) partitions: usize,
    pub(super) slots: usize,
    pub(super) place: usize,
    pub(super) stamp: usize,
    pub(super) score: usize,
    pub(super) slot_of: usize,
    pub(super) owner: usize,
    pub(super) progress: usize,
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
            uses: take(4 * records),
            address: take(8 * records),
            items: take(MOST_DEVICE_ASSIGNMENTS * size_of::<DeviceItem>()),
            fills: take(MOST_DEVICE_ASSIGNMENTS * size_of::<DeviceItem>()),
            list: take(4 * MOST_DEVICE_ASSIGNMENTS),
            factors: take(4 * MOST_DEVICE_ASSIGNMENTS),
            missing: take(MISSING_BYTES * MOST_DEVICE_ASSIGNMENTS),
            partitions: take(PARTITION_BYTES * partitions),
            slots: take(4 * slots),
            place: take(4 * slots),
            stamp: take(8 * slots),
            score: take(8 * records),
            slot_of: take(4 * records),
            owner: take(4 * slots),
            progress: take(PROGRESS_BYTES),
            end: take(0),
        }
    }
}

/// What the driver keeps on the GPU.
pub(super) struct Tables {
    pub(super) slab: Slab,
    pub(super) at: Offsets,
    /// The fault word as the host sees it.
    fault: PinnedBuffer,
    pub(super) fault_address: u64,
    hidden: Workspace,
    partial: Workspace,
    pub(super) shape: PoolShape,
    /// Slots of each partition, ascending.
    slots: Vec<Vec<u32>>,
    /// Slots that the tables have room for.
    most_slots: usize,
    records: usize,
    /// By partition, where decayed counts decide; else empty.
    pub(super) half_lives: Vec<f64>,
    /// Names of the devices that share steps with this one, by number; and how long they wait for each other.
    pub(super) together: Vec<String>,
    pub(super) deadline: Duration,
}

/// What the kernel says in the fault word.
pub(super) struct FaultWord {
    pub(super) kind: u32,
    pub(super) layer: usize,
    pub(super) token: usize,
    pub(super) value: u32,
}

impl Tables {
    /// For pools of up to `most_slots` slots. `addresses`: where kernels read each record, 0 where they cannot.
    pub(super) fn new(
        gpu: &Gpu,
        directory: &Directory,
        shape: &PoolShape,
        most_slots: usize,
        addresses: &[u64],
    ) -> Result<Self> {
        let at = Offsets::new(directory.layers().len(), directory.len(), shape.partitions.len(), most_slots);
        let slab = Slab::new(gpu, "residency tables", at.end)?;
        slab.write(0, &vec![0; at.end])?;
        slab.write(at.address, bytes_of(addresses))?;
        let fault = PinnedBuffer::new(gpu, FAULT_BYTES)
            .map_err(|e| gpu.explain_allocation("a page-locked word", FAULT_BYTES as u64, e))?;
        let fault_address = fault.device_address()?;
        Ok(Self {
            slab,
            at,
            fault,
            fault_address,
            hidden: Workspace::new(gpu, "the experts' hidden activations")?,
            partial: Workspace::new(gpu, "the experts' outputs")?,
            shape: shape.clone(),
            slots: Vec::new(),
            most_slots,
            records: directory.len(),
            half_lives: Vec::new(),
            together: Vec::new(),
            deadline: Duration::ZERO,
        })
    }

    /// Bytes on the GPU, workspaces of steps included.
    pub(super) fn bytes(&self) -> usize {
        self.slab.bytes() + self.hidden.bytes() + self.partial.bytes()
    }

    pub(super) fn address(&self, offset: usize) -> u64 {
        self.slab.address() + offset as u64
    }

    /// Whether a pool of this shape can have these tables, at the addresses where they are.
    pub(super) fn fit(&self, shape: &PoolShape) -> bool {
        shape.partition_of == self.shape.partition_of && shape.slots() <= self.most_slots
    }

    /// Starts from `residency` in slots of `shape`.
    pub(super) fn load(&mut self, shape: &PoolShape, residency: &Residency) -> Result<()> {
        self.slots = vec![Vec::new(); shape.partitions.len()];
        shape.dealt().enumerate().for_each(|(slot, p)| self.slots[p].push(slot as u32));
        self.shape = shape.clone();
        let image = self.image(residency)?;
        self.slab.write(self.at.partitions, &image)?;
        self.half_lives = residency.counts.as_ref().map_or_else(Vec::new, |c| c.half_lives.clone());
        Ok(())
    }

    /// The tables as the kernel reads them, for slots that hold `residency`.
    fn image(&self, residency: &Residency) -> Result<Vec<u8>> {
        let (slots, records, partitions) = (self.shape.slots(), self.records, self.shape.partitions.len());
        let (mut clock, mut stamp) = (vec![1u64; partitions], vec![0u64; slots]);
        let mut score = vec![0u64; records];
        let (mut slot_of, mut owner) = (vec![NONE; records], vec![NONE; slots]);
        if let Some(counts) = &residency.counts {
            let lengths = (counts.half_lives.len(), counts.ticks.len(), counts.scores.len());
            if lengths != (partitions, partitions, records) {
                let reason =
                    format!("counts of {lengths:?}, expected {:?}", (partitions, partitions, records));
                return Err(Error::BadArgument { what: "residency", reason });
            }
            clock.iter_mut().zip(&counts.ticks).for_each(|(clock, tick)| *clock = tick + 1);
            score.copy_from_slice(&counts.scores);
        }
        for (p, held) in residency.partitions.iter().enumerate() {
            for &(record, slot) in held {
                if self.slots[p].binary_search(&slot.0).is_err() || record.0 as usize >= records {
                    let reason = format!("{record:?} in {slot:?}, which is not of partition {p}");
                    return Err(Error::BadArgument { what: "residency", reason });
                }
                stamp[slot.0 as usize] = match residency.counts {
                    Some(_) => score[record.0 as usize],
                    None => {
                        clock[p] += 1;
                        clock[p] - 1
                    }
                };
                slot_of[record.0 as usize] = slot.0;
                owner[slot.0 as usize] = record.0;
            }
        }
        for record in &residency.kept {
            match slot_of.get(record.0 as usize).and_then(|&slot| owner.get_mut(slot as usize)) {
                Some(owner) if records < KEPT as usize => *owner |= KEPT,
                _ => {
                    let reason = format!("{record:?} of {records} cannot stay for good: it is in no slot");
                    return Err(Error::BadArgument { what: "residency", reason });
                }
            }
        }
        let (mut places, mut first) = (vec![NONE; slots], 0);
        let mut parts = Vec::with_capacity(4 * partitions);
        for (clock, own) in clock.iter().zip(&self.slots) {
            parts.extend([*clock as u32, (clock >> 32) as u32, first, own.len() as u32]);
            first += own.len() as u32;
            own.iter().zip(0..).for_each(|(&slot, place)| places[slot as usize] = place);
        }
        let listed: Vec<u32> = self.slots.concat();
        let mut image = vec![0; self.at.end - self.at.partitions];
        for (offset, bytes) in [
            (self.at.partitions, bytes_of(&parts)),
            (self.at.slots, bytes_of(&listed)),
            (self.at.place, bytes_of(&places)),
            (self.at.stamp, bytes_of(&stamp)),
            (self.at.score, bytes_of(&score)),
            (self.at.slot_of, bytes_of(&slot_of)),
            (self.at.owner, bytes_of(&owner)),
        ] {
            let start = offset - self.at.partitions;
            image[start..start + bytes.len()].copy_from_slice(bytes);
        }
        Ok(image)
    }

    fn words(&self, offset: usize, len: usize) -> Result<Vec<u32>> {
        let mut bytes = vec![0; 4 * len];
        self.slab.read(offset, &mut bytes)?;
        Ok(bytes.as_chunks().0.iter().map(|b| u32::from_le_bytes(*b)).collect())
    }

    pub(super) fn long_words(&self, offset: usize, len: usize) -> Result<Vec<u64>> {
        let mut bytes = vec![0; 8 * len];
        self.slab.read(offset, &mut bytes)?;
        Ok(bytes.as_chunks().0.iter().map(|b| u64::from_le_bytes(*b)).collect())
    }

    /// What is in the slots, once the GPU is idle.
    pub(super) fn residency(&self) -> Result<Residency> {
        let slots = self.shape.slots();
        let stamp = self.long_words(self.at.stamp, slots)?;
        let mut owner = self.words(self.at.owner, slots)?;
        let mut kept = Vec::new();
        for owner in owner.iter_mut().filter(|o| **o != NONE && **o & KEPT != 0) {
            *owner &= !KEPT;
            kept.push(RecordIndex(*owner));
        }
        kept.sort_unstable();
        let held = |own: &Vec<u32>| {
            let mut slots: Vec<u32> = own.iter().copied().filter(|&s| owner[s as usize] != NONE).collect();
            slots.sort_by_key(|&s| (stamp[s as usize], owner[s as usize]));
            slots.into_iter().map(|s| (RecordIndex(owner[s as usize]), SlotId(s))).collect()
        };
        let partitions = self.slots.iter().map(held).collect();
        let counts = match self.half_lives.is_empty() {
            true => None,
            false => {
                let parts = self.long_words(self.at.partitions, 2 * self.half_lives.len())?;
                Some(DecayedCounts {
                    half_lives: self.half_lives.clone(),
                    ticks: parts.iter().step_by(2).map(|next| next - 1).collect(),
                    scores: self.long_words(self.at.score, self.records)?,
                })
            }
        };
        Ok(Residency { partitions, counts, kept })
    }

    /// How often steps have used each record, once the GPU is idle.
    pub(super) fn uses(&self) -> Result<Vec<u64>> {
        Ok(self.words(self.at.uses, self.records)?.into_iter().map(u64::from).collect())
    }

    /// Whether the kernel has said anything in the fault word, read from where it wrote it.
    pub(super) fn has_fault(&self) -> bool {
        // SAFETY: page-locked memory of at least 4 bytes, aligned by the page, that only the GPU writes; volatile,
        // because it does so at any time.
        unsafe { self.fault.address().cast::<u32>().read_volatile() != 0 }
    }

    /// Takes the fault word, once the GPU is idle, so that steps run again.
    pub(super) fn take_fault(&mut self) -> Result<FaultWord> {
        let bytes = self.fault.slice_mut(0, FAULT_BYTES);
        let word = |i: usize| {
            u32::from_le_bytes([bytes[4 * i], bytes[4 * i + 1], bytes[4 * i + 2], bytes[4 * i + 3]])
        };
        let fault =
            FaultWord { kind: word(0), layer: word(1) as usize, token: word(2) as usize, value: word(3) };
        bytes.fill(0);
        self.slab.write(self.at.fault, &[0; FAULT_BYTES])?;
        Ok(fault)
    }

    /// The `count` records that the last step left to the host. The next step 0 is of the same token.
    pub(super) fn take_missing(&mut self, count: usize) -> Result<Vec<Fill>> {
        self.slab.write(self.at.progress + 4, &1u32.to_le_bytes())?;
        let words = self.words(self.at.missing, 2 * count.min(MOST_DEVICE_ASSIGNMENTS))?;
        let fill = |&[record, slot]: &[u32; 2]| match slot {
            NONE => {
                let reason = "more experts than slots, and only the host can bring one of them".to_owned();
                Err(Error::BadArgument { what: "step", reason })
            }
            slot => Ok(Fill { record: RecordIndex(record), slot: SlotId(slot) }),
        };
        words.as_chunks().0.iter().map(fill).collect()
    }

    /// Where activations `[rows, intermediate]` and outputs `[rows, hidden]` go. Zeroed when it is new: a step that
    /// cannot be served sums what is there, times NaN.
    pub(super) fn reserve(
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
