//! The way of records that have no place of their own in page-locked memory: read into a page-locked buffer by a worker, or
//! into a place of the RAM tier by one of its threads, and copied from there.

use std::sync::Arc;

use cudarc::driver::{CudaEvent, CudaStream};
use rayon::prelude::*;

use super::context::{Doing, Gpu};
use super::pinned::PinnedBuffer;
use super::tier::LockedTier;
use crate::error::{Error, Result};
use crate::store::{Held, RecordIndex, RecordSource};

/// Bytes of a buffer: enough to read some records side by side while others are copied.
const BYTES: usize = 128 << 20;
const MOST_PLACES: usize = 16;
/// Part of a tier's places that one half of a queue's copies may keep: two queues of two halves leave the other half.
const PART_OF_TIER: usize = 8;

/// Two halves of places for a record each: one is filled while the other is copied from.
pub(super) struct Bounce {
    memory: Memory,
    place_bytes: usize,
    half: usize,
    /// Which half is filled next.
    turn: usize,
    /// The last copy from each half is done.
    free: [CudaEvent; 2],
    sources: Vec<u64>,
}

enum Memory {
    Locked(PinnedBuffer),
    /// The driver locks nothing at all: slow, but right.
    Pageable(Vec<u8>),
    /// The places of a tier, and the records that each half keeps there.
    Tier(Arc<LockedTier>, [Vec<Held>; 2]),
}

impl Bounce {
    pub(super) fn new(gpu: &Gpu, largest_record: usize) -> Result<Self> {
        let place_bytes = largest_record.next_multiple_of(512);
        let half = (BYTES / place_bytes / 2).clamp(1, MOST_PLACES / 2);
        let bytes = 2 * half * place_bytes;
        let memory = match PinnedBuffer::new(gpu, bytes) {
            Ok(buffer) => Memory::Locked(buffer),
            Err(error) => {
                tracing::warn!(
                    "no page-locked memory at all ({error}): experts are copied from pageable memory"
                );
                let mut memory = Vec::new();
                memory.try_reserve_exact(bytes).map_err(|e| Error::HostMemory {
                    what: format!("a buffer of {bytes} bytes for copies"),
                    reason: e.to_string(),
                })?;
                memory.resize(bytes, 0);
                Memory::Pageable(memory)
            }
        };
        let event = || gpu.ctx.new_event(None).doing("making an event");
        Ok(Self { memory, place_bytes, half, turn: 0, free: [event()?, event()?], sources: Vec::new() })
    }

    /// The same over places that are page-locked already.
    pub(super) fn over(gpu: &Gpu, tier: &Arc<LockedTier>) -> Result<Self> {
        let event = || gpu.ctx.new_event(None).doing("making an event");
        let half = (tier.places() / PART_OF_TIER).clamp(1, MOST_PLACES / 2);
        let memory = Memory::Tier(tier.clone(), Default::default());
        Ok(Self { memory, place_bytes: 0, half, turn: 0, free: [event()?, event()?], sources: Vec::new() })
    }

    /// Most records that [`Self::read`] takes at once.
    pub(super) fn group(&self) -> usize {
        self.half
    }

    pub(super) fn is_locked(&self) -> bool {
        matches!(self.memory, Memory::Locked(_) | Memory::Tier(..))
    }

    /// What kernels add to an address that [`Self::read`] returned to find the same bytes.
    ///
    /// # Errors
    /// [`Error::Device`] when the buffer is not page-locked, so that kernels cannot read it.
    pub(super) fn device_offset(&self) -> Result<u64> {
        match &self.memory {
            Memory::Locked(buffer) => Ok(buffer.device_address()?.wrapping_sub(buffer.address() as u64)),
            Memory::Tier(tier, _) => Ok(tier.device_offset()),
            Memory::Pageable(_) => Err(Error::Device {
                asked: "experts expanded to bf16 on load".to_owned(),
                reason: "needs page-locked memory and the driver grants none: keep experts quantized"
                    .to_owned(),
            }),
        }
    }

    /// Waits until a half is free and reads up to [`Self::group`] records, `(record, bytes)`, into it side by side.
    /// Returns where each begins. The records stay until the copies that [`Self::hold_until`] is told about are done.
    pub(super) fn read(
        &mut self,
        source: &dyn RecordSource,
        records: impl IntoIterator<Item = (RecordIndex, usize)>,
    ) -> Result<&[u64]> {
        self.free[self.turn].synchronize().doing("waiting for copies")?;
        let (start, len) = (self.turn * self.half * self.place_bytes, self.half * self.place_bytes);
        let half = match &mut self.memory {
            Memory::Locked(buffer) => buffer.slice_mut(start, len),
            Memory::Pageable(bytes) => &mut bytes[start..start + len],
            Memory::Tier(tier, held) => {
                let held = &mut held[self.turn];
                held.clear();
                self.sources.clear();
                for (record, _) in records.into_iter().take(self.half) {
                    held.push(tier.hold(record)?);
                }
                self.sources.extend(held.iter().map(Held::address));
                return Ok(&self.sources);
            }
        };
        let parts: Vec<_> = records
            .into_iter()
            .zip(half.chunks_mut(self.place_bytes))
            .map(|((r, n), to)| (r, &mut to[..n]))
            .collect();
        self.sources.clear();
        self.sources.extend(parts.iter().map(|(_, to)| to.as_ptr() as u64));
        parts.into_par_iter().try_for_each(|(record, to)| {
            source.fetch(record, to).map_err(|error| match error {
                named @ Error::FillFailed { .. } => named,
                other => Error::FillFailed { id: source.directory().id(record), reason: other.to_string() },
            })
        })?;
        Ok(&self.sources)
    }

    /// What was read last is free again when `stream` has done everything enqueued so far.
    pub(super) fn hold_until(&mut self, stream: &CudaStream) -> Result<()> {
        self.free[self.turn].record(stream).doing("recording an event")?;
        self.turn = 1 - self.turn;
        Ok(())
    }
}
