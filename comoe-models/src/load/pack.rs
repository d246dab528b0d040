//! A model as one packed file: experts in one format, everything else beside them.

use std::path::Path;
use std::sync::Arc;

use comoe_core::ExpertFormat;
use comoe_core::store::{
    Checkpoint, ExpertStore, Naming, PackReport, PackedFile, PackedTensor, TensorRole, WeightErrors,
};

use super::ModelFiles;
use super::open::{checked_store, naming_of};
use crate::arch;
use crate::error::{Error, Result};

/// The files of a model that loading reads, beside its weights and its tokenizer. They are not all there.
const FILES: [&str; 6] = [
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
];

/// A model that is about to be packed: everything is found and checked, nothing of its weights is read.
#[derive(Debug)]
pub struct Packer {
    checkpoint: Arc<Checkpoint>,
    naming: Naming,
    store: ExpertStore,
    format: ExpertFormat,
    files: Vec<(&'static str, Vec<u8>)>,
}

impl Packer {
    /// Opens a model's folder, or a packed file. `format` is that of the experts; `None` takes what fits the
    /// checkpoint best.
    ///
    /// # Errors
    /// Those of loading; [`Error::BadFile`] for a GGUF file, which is one file already.
    pub fn open(model: &Path, format: Option<ExpertFormat>) -> Result<Self> {
        let files = ModelFiles::open(model)?;
        let Some(side) = files.side() else {
            let reason = "is a GGUF file: one file already, that every command takes as it is; to pack the model in \
                          another format, give the folder of its release in safetensors";
            return Err(Error::bad_file(model, reason));
        };
        let plan = arch::plan(files.config())?;
        let naming = naming_of(&plan, files.quantisation()?);
        let checkpoint = Arc::new(files.checkpoint()?);
        let store = checked_store(&plan, &files, &checkpoint, &naming)?;
        let mut kept = vec![("tokenizer.json", files.tokenizer_json()?)];
        for name in FILES {
            kept.extend(side.read(name)?.map(|bytes| (name, bytes)));
        }
        let format = format.unwrap_or(store.source_format());
        Ok(Self { checkpoint, naming, store, format, files: kept })
    }

    /// The experts' format in the file.
    pub fn format(&self) -> ExpertFormat {
        self.format
    }

    /// What the experts are read in, with nothing lost beyond that: BF16, or what keeps the checkpoint's own encoding.
    pub fn source_format(&self) -> ExpertFormat {
        self.store.format()
    }

    /// How far the experts of a packed file are from those of this model; see [`ExpertStore::errors_against`], which also
    /// says what `progress` hears.
    ///
    /// # Errors
    /// As [`ExpertStore::errors_against`].
    pub fn errors_of(
        &self,
        file: PackedFile,
        progress: &(dyn Fn(usize, usize) + Sync),
    ) -> Result<WeightErrors> {
        Ok(ExpertStore::from_packed(file).errors_against(&self.store, Some(progress))?)
    }

    /// Bytes of the file, its header left out.
    ///
    /// # Errors
    /// As [`Self::write`] before it writes.
    pub fn bytes(&self) -> Result<u64> {
        let others: u64 = self.tensors()?.iter().map(|t| t.bytes().len() as u64).sum();
        Ok(self.store.bytes_in(self.format)? + others)
    }

    /// Writes the file; see [`ExpertStore::pack`], which also says what `progress` hears.
    ///
    /// # Errors
    /// As [`ExpertStore::pack`].
    pub fn write(&self, file: &Path, progress: &(dyn Fn(usize, usize) + Sync)) -> Result<PackReport> {
        Ok(self.store.pack(file, self.format, self.tensors()?, Some(progress))?)
    }

    /// Every weight that is no expert's, and the files.
    fn tensors(&self) -> Result<Vec<PackedTensor<'_>>> {
        let mut tensors = Vec::new();
        for name in self.checkpoint.names() {
            if self.naming.classify(name)? == TensorRole::Dense {
                tensors.push(PackedTensor::weight(name, &self.checkpoint.tensor(name)?)?);
            }
        }
        tensors.extend(self.files.iter().map(|(name, bytes)| PackedTensor::file(name, bytes)));
        Ok(tensors)
    }
}
