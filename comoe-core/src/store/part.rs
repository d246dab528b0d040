//! A part of a source's records, as a source of its own: what one of several devices owns.

use std::sync::Arc;

use super::{Directory, RecordIndex, RecordSource, check_record_len};
use crate::error::Result;

/// Those of another source's records that were taken, numbered anew.
pub(crate) struct PartSource {
    source: Arc<dyn RecordSource>,
    directory: Directory,
    /// Which record of `source` each is.
    records: Vec<RecordIndex>,
}

impl PartSource {
    pub(crate) fn new(source: Arc<dyn RecordSource>, takes: impl Fn(RecordIndex) -> bool) -> Self {
        let (directory, records) = source.directory().part(takes);
        Self { source, directory, records }
    }
}

impl RecordSource for PartSource {
    fn directory(&self) -> &Directory {
        &self.directory
    }

    fn read(&self, record: RecordIndex, out: &mut [u8]) -> Result<()> {
        check_record_len(&self.directory, record, out)?;
        self.source.read(self.records[record.0 as usize], out)
    }

    fn fetch(&self, record: RecordIndex, out: &mut [u8]) -> Result<()> {
        check_record_len(&self.directory, record, out)?;
        self.source.fetch(self.records[record.0 as usize], out)
    }
}
