//! Where is a record on the host? A directory of keys, and sources that hand out a record's bytes.

mod checkpoint;
mod directory;
mod naming;
mod shard;
#[cfg(test)]
mod testing;

pub use checkpoint::{Checkpoint, TensorView};
pub use directory::{Directory, LayerEntry, RecordIndex};
pub use naming::{ExpertTensor, Matrix, Naming, StackedLayout, TensorRole};
/// Element type of a checkpoint's tensor.
pub use safetensors::Dtype;

use crate::error::Result;

/// Hands out records: opaque bytes under keys. Implementations read a checkpoint, a packed file, or memory.
///
/// A source is shared between threads: the copy worker reads while the model's thread looks things up.
pub trait RecordSource: Send + Sync {
    /// Which records there are and how large they are.
    fn directory(&self) -> &Directory;

    /// Writes the record to `out`, which is exactly [`Directory::record_bytes`] long. Fails, naming the expert,
    /// rather than hand out anything but the record's true bytes.
    fn read(&self, record: RecordIndex, out: &mut [u8]) -> Result<()>;
}
