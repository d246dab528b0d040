//! Where is a record on the host? A directory of keys, and sources that hand out a record's bytes.

mod checkpoint;
mod convert;
mod directory;
mod errors;
mod experts;
mod fingerprint;
mod gather;
mod gguf;
mod lost_pages;
mod memory;
mod naming;
mod packed;
#[cfg(test)]
mod packed_tests;
mod packed_verify;
mod packed_writer;
mod part;
mod quant;
mod shard;
mod small;
mod survey;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
mod tier;

pub use checkpoint::{Checkpoint, Encoding, TensorView};
pub use convert::{ConvertOptions, PackReport};
pub use directory::{Directory, LayerEntry, RecordIndex};
pub use errors::{LayerError, WeightErrors};
pub use experts::ExpertStore;
pub use gguf::{ARCHITECTURES, Ggml, GgmlType, Gguf, GgufValue};
pub use lost_pages::exit_on_lost_pages;
pub use memory::MemorySource;
pub use naming::{ExpertTensor, Matrix, Naming, StackedLayout, TensorKind, TensorRole};
pub use packed::{PackedFile, PackedInfo, PackedLayer, PackedTensor};
pub use packed_verify::{PackedPart, Verified};
pub use packed_writer::PackedWriter;
pub(crate) use part::PartSource;
pub use quant::{Quantisation, QuantisedMatrix};
/// Element type of a checkpoint's tensor.
pub use safetensors::Dtype;
pub use small::read_small;
#[cfg(feature = "cuda")]
pub(crate) use tier::Held;
pub use tier::{TierOptions, TierStats, TieredSource};

use crate::error::{Error, Result};

/// Hands out records: opaque bytes under keys. Implementations read a checkpoint, a packed file, or memory.
///
/// A source is shared between threads: the copy worker reads while the model's thread looks things up.
pub trait RecordSource: Send + Sync {
    /// Which records there are and how large they are.
    fn directory(&self) -> &Directory;

    /// Writes the record to `out`, which is exactly [`Directory::record_bytes`] long. Fails, naming the expert,
    /// rather than hand out anything but the record's true bytes.
    fn read(&self, record: RecordIndex, out: &mut [u8]) -> Result<()>;

    /// As [`Self::read`], by a thread that may wait for a disk and does not come back for the same record soon. A source of
    /// files asks the system for all of the record at once and leaves no pages of it mapped.
    fn fetch(&self, record: RecordIndex, out: &mut [u8]) -> Result<()> {
        self.read(record, out)
    }

    /// Says that `records` will be read soon: together, by a step that waits for them, or `ahead` of use. A source that
    /// brings them from somewhere slow begins now, on threads of its own. Never waits.
    fn announce(&self, _records: &mut dyn Iterator<Item = RecordIndex>, _ahead: bool) {}

    /// Says that the caller has a copy of every record, so that the system's own, of files, may go.
    fn release(&self) {}
}

/// Checks that `record` is of `directory` and `bytes` as long as it.
fn check_record_len(directory: &Directory, record: RecordIndex, bytes: &[u8]) -> Result<()> {
    let bad = |reason| Error::BadArgument { what: "record", reason };
    if record.0 as usize >= directory.len() {
        return Err(bad(format!("number {} of a store of {} records", record.0, directory.len())));
    }
    let expected = directory.record_bytes(record);
    if bytes.len() != expected {
        let id = directory.id(record);
        return Err(bad(format!("{id} takes {expected} bytes, the buffer has {}", bytes.len())));
    }
    Ok(())
}
