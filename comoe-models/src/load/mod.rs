//! From a model folder, a packed file or a GGUF file, to blocks: the configuration, the dense part, the experts.

mod buffers;
mod config;
mod dense;
mod files;
mod format;
mod gguf;
mod layers;
mod needs;
mod open;
mod pack;
mod plan;
mod side_files;
mod workspace;

pub use config::ConfigFile;
pub(crate) use config::MAX_SIZE;
pub use dense::DenseWeights;
pub(crate) use files::ModelFiles;
pub use format::{DenseFormat, KvFormat};
pub(crate) use gguf::GgufModel;
pub(crate) use layers::Builder;
pub use needs::{DEVICE_MARGIN, KvPart};
pub(crate) use open::open_decoder;
pub use open::{DEFAULT_CONTEXT, LoadOptions};
pub use pack::Packer;
pub use plan::{ModelPlan, Target};
pub(crate) use side_files::{SideFiles, TOKENIZER_BYTES, read_small, read_text};

/// How far loading has come. Reports of conversions come from several threads, in any order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Progress {
    /// Experts being converted to the format asked for, in records. Skipped when they are found converted.
    Convert {
        /// Records converted.
        done: usize,
        /// Records in all.
        total: usize,
    },
    /// Dense weights on their way to the device, in bytes of the checkpoint.
    Dense {
        /// Bytes loaded.
        done: u64,
        /// Bytes in all.
        total: u64,
    },
}
