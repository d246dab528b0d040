//! Where is a record on the host? A directory of keys, and sources that hand out a record's bytes.

mod directory;

pub use directory::{Directory, LayerEntry, RecordIndex};

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
