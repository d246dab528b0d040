//! Dequant on load: the fill of a slot is a kernel that reads a stored record over the link and writes a BF16 one.

use std::sync::Arc;

use cudarc::driver::CudaStream;

use super::context::Gpu;
use super::kernels::{DequantArgs, DeviceItem, Kernels};
use super::options::Expansion;
use super::upload::{UploadRing, bytes_of};
use crate::error::Result;
use crate::store::{Directory, RecordIndex};

/// Fills of one copy queue.
pub(super) struct Expander {
    kernels: Arc<Kernels>,
    expansions: Arc<[Expansion]>,
    ring: UploadRing,
    /// Gathered and not yet enqueued: all of layer ordinal `layer`.
    items: Vec<DeviceItem>,
    layer: usize,
}

impl Expander {
    pub(super) fn new(gpu: &Gpu, kernels: &Arc<Kernels>, expansions: &Arc<[Expansion]>) -> Result<Self> {
        Ok(Self {
            kernels: kernels.clone(),
            expansions: expansions.clone(),
            ring: UploadRing::new(gpu, kernels)?,
            items: Vec::new(),
            layer: 0,
        })
    }

    /// Gathers the fill of `to` from the stored record at `from`, as kernels see it; enqueues what was gathered before
    /// when that is of another layer.
    ///
    /// # Safety
    /// `from` must be readable as a record and `to` writable as a slot until what is enqueued is done.
    pub(super) unsafe fn push(
        &mut self,
        stream: &Arc<CudaStream>,
        directory: &Directory,
        record: RecordIndex,
        from: u64,
        to: u64,
    ) -> Result<()> {
        let layer = directory.layers().partition_point(|e| e.first <= record.0) - 1;
        if layer != self.layer {
            self.enqueue(stream)?;
            self.layer = layer;
        }
        self.items.push(DeviceItem { src: from, dst: to, count: 1, ..DeviceItem::default() });
        Ok(())
    }

    /// Enqueues what was gathered.
    pub(super) fn enqueue(&mut self, stream: &Arc<CudaStream>) -> Result<()> {
        if self.items.is_empty() {
            return Ok(());
        }
        let bytes = bytes_of(&self.items);
        let items = self.ring.upload(stream, bytes.len(), |to| to.copy_from_slice(bytes))?;
        let Expansion { from, to } = &self.expansions[self.layer];
        let args = DequantArgs { from, to, items, len: self.items.len() };
        // SAFETY: sources and slots are valid as `push` asks; slots of one batch are different.
        let done = unsafe { self.kernels.dequant(stream, &args) };
        self.items.clear();
        done
    }
}
