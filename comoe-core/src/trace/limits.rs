//! How large a trace may be. What plays over it takes memory for every expert that its header names and for every choice
//! that it decompresses to, so that neither may be what a few bytes claim.

use super::TraceInfo;

/// Bytes of a file.
pub(super) const FILE_BYTES: u64 = 1 << 30;
/// Experts of all layers: fifty times those of the largest published models.
const RECORDS: usize = 1 << 20;
/// Choices and guesses of all tokens, and tokens times layers: 4 GB in memory at most, and 300,000 tokens of a model of 48
/// layers that choose 8.
pub(super) const CHOICES: usize = 1 << 27;

/// Sees that a model could be like this.
pub(super) fn check(info: &TraceInfo) -> Result<(), String> {
    let records = info.directory.len();
    if records > RECORDS {
        return Err(format!("{records} experts are more than any model has; the limit is {RECORDS}"));
    }
    let most = info.directory.layers().iter().map(|l| l.experts).max().unwrap_or(0);
    match info.top_k > most {
        true => Err(format!("{} experts a token of at most {most} in a layer", info.top_k)),
        false => Ok(()),
    }
}

/// What is left of [`CHOICES`].
#[derive(Debug)]
pub(super) struct Budget(usize);

impl Budget {
    pub(super) fn new(choices: usize) -> Self {
        Self(choices)
    }

    /// Takes what tokens of so many choices and guesses in all take.
    pub(super) fn take(&mut self, tokens: usize, layers: usize, choices: usize) -> Result<(), String> {
        let needed = tokens.checked_mul(layers).and_then(|n| n.checked_add(choices));
        let left = needed.and_then(|needed| self.0.checked_sub(needed));
        self.0 = left.ok_or("the trace is longer than fits into memory; record fewer tokens")?;
        Ok(())
    }
}
