//! Gathers fills and enqueues them together: as a batch of copies, or as kernels that expand records.

use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::{CudaEvent, CudaStream};

use super::batch::Batch;
use super::context::Gpu;
use super::expand::Expander;
use super::kernels::Kernels;
use super::options::CudaOptions;
use super::spans::Spans;
use super::timeline::Sampler;
use crate::backend::Queue;
use crate::error::Result;
use crate::expert::ExpertId;
use crate::store::{Directory, RecordIndex};

/// One fill, or a part of one.
#[derive(Clone, Copy)]
pub(super) struct Piece {
    pub(super) record: RecordIndex,
    /// Address in the slot.
    pub(super) to: u64,
    /// Address in host memory.
    pub(super) from: u64,
    /// What kernels add to `from` to find the same bytes.
    pub(super) device_offset: u64,
    pub(super) bytes: usize,
}

/// The sending end of a copy queue.
pub(super) struct Sender {
    batch: Batch,
    /// Present when slots hold expanded records.
    expander: Option<Expander>,
    sampler: Sampler,
    gathered: u64,
    spans: Arc<Spans>,
    queue: Queue,
    singly: bool,
    /// While it is taken down when this is sent.
    sent: Option<Sent>,
}

/// What was gathered so far.
struct Sent {
    begin: CudaEvent,
    first: ExpertId,
    pieces: usize,
}

impl Sender {
    pub(super) fn new(
        gpu: &Gpu,
        kernels: &Arc<Kernels>,
        options: &CudaOptions,
        spans: &Arc<Spans>,
        queue: Queue,
    ) -> Result<Self> {
        let expander = match options.expansions.is_empty() {
            true => None,
            false => Some(Expander::new(gpu, kernels, &options.expansions)?),
        };
        Ok(Self {
            batch: Batch::default(),
            expander,
            sampler: Sampler::new(gpu)?,
            gathered: 0,
            spans: spans.clone(),
            queue,
            singly: options.faults.no_batches,
            sent: None,
        })
    }

    /// Whether fills are kernels, which take whole records and read page-locked memory only.
    pub(super) fn expands(&self) -> bool {
        self.expander.is_some()
    }

    /// Gathers a piece; expanding, whole records only.
    ///
    /// # Safety
    /// The source must be readable and the slot writable until what is enqueued is done.
    pub(super) unsafe fn push(
        &mut self,
        stream: &Arc<CudaStream>,
        directory: &Directory,
        piece: Piece,
    ) -> Result<()> {
        let Piece { record, to, from, device_offset, bytes } = piece;
        if self.gathered == 0 {
            // Here and not in `flush`: the expander enqueues by itself when a batch spans layers.
            self.sampler.begin(stream)?;
            let first = directory.id(record);
            self.sent = self.spans.begin(stream)?.map(|begin| Sent { begin, first, pieces: 0 });
        }
        if let Some(sent) = &mut self.sent {
            sent.pieces += 1;
        }
        self.gathered += bytes as u64;
        // SAFETY: the caller's promise.
        unsafe {
            match &mut self.expander {
                Some(expander) => {
                    expander.push(stream, directory, record, from.wrapping_add(device_offset), to)?;
                }
                None => self.batch.push(to, from, bytes),
            }
        }
        Ok(())
    }

    /// Enqueues what was gathered; `single`: copy by copy, as pageable memory needs.
    pub(super) fn flush(&mut self, stream: &Arc<CudaStream>, single: bool) -> Result<()> {
        if self.gathered == 0 {
            return Ok(());
        }
        match &mut self.expander {
            Some(expander) => expander.enqueue(stream)?,
            None => self.batch.enqueue(stream, single || self.singly)?,
        }
        let bytes = std::mem::take(&mut self.gathered);
        if let Some(Sent { begin, first, pieces }) = self.sent.take() {
            let what = || match pieces {
                1 => first.to_string(),
                _ => format!("layer {}: {pieces} experts", first.layer),
            };
            self.spans.end(stream, Some(begin), self.queue, bytes, what)?;
        }
        self.sampler.end(stream, bytes)
    }

    /// How long fills have kept the link busy, estimated.
    pub(super) fn time(&self) -> Duration {
        self.sampler.total()
    }
}
