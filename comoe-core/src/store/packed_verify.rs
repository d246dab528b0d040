//! Compares a packed file with the checksums that were taken when it was written.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use rayon::prelude::*;

use super::packed::PackedFile;
use crate::error::Result;
use crate::expert::ExpertId;

/// A stretch of a packed file that has a checksum of its own.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum PackedPart {
    /// Everything before the data: names, sizes, places.
    Header,
    /// The record of an expert.
    Expert(ExpertId),
    /// A weight that is no expert's.
    Tensor(String),
    /// One of the model's other files.
    File(String),
}

impl fmt::Display for PackedPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Header => f.write_str("the header"),
            Self::Expert(id) => id.fmt(f),
            Self::Tensor(name) => write!(f, "tensor {name}"),
            Self::File(name) => write!(f, "file {name}"),
        }
    }
}

/// What [`PackedFile::verify`] found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verified {
    /// Records of experts that were read.
    pub experts: usize,
    /// Weights and files that were read, the header not counted.
    pub others: usize,
    /// Bytes of all of them, the header's included.
    pub bytes: u64,
    /// What is not as it was written, in the order of the file.
    pub differing: Vec<PackedPart>,
}

impl PackedFile {
    /// Reads everything and compares it with its checksum, on all threads. `progress` hears of the bytes read and the
    /// bytes in all, from several threads, in any order.
    ///
    /// A CRC-32 finds every change of up to 32 neighbouring bits, and misses one in four billion others. It says nothing
    /// about who made a change.
    ///
    /// # Errors
    /// [`Error::BadFile`](crate::Error::BadFile) for a file without checksums. Parts that differ are no error here:
    /// they are all listed.
    pub fn verify(&self, progress: Option<&(dyn Fn(u64, u64) + Sync)>) -> Result<Verified> {
        let parts = self.checksums()?;
        let total = parts.iter().map(|(_, range, _)| range.len() as u64).sum();
        let done = AtomicU64::new(0);
        let differing = parts.par_iter().filter(|(part, range, expected)| {
            let same = self.checksum_of(part, range.clone()) == *expected;
            let bytes = range.len() as u64;
            let done = done.fetch_add(bytes, Ordering::Relaxed) + bytes;
            if let Some(progress) = progress {
                progress(done, total);
            }
            !same
        });
        let differing = differing.map(|(part, ..)| part.clone()).collect();
        let experts = parts.iter().filter(|(part, ..)| matches!(part, PackedPart::Expert(_))).count();
        Ok(Verified { experts, others: parts.len() - experts - 1, bytes: total, differing })
    }
}
