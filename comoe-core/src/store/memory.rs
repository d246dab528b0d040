//! Records kept in memory.

use super::{Directory, RecordIndex, RecordSource, check_record_len};
use crate::error::{Error, Result};

/// Records kept in memory, as opaque bytes.
#[derive(Debug)]
pub struct MemorySource {
    directory: Directory,
    records: Vec<Box<[u8]>>,
}

impl MemorySource {
    /// Takes one record per [`RecordIndex`], in order.
    ///
    /// # Errors
    /// [`Error::BadArgument`] when there are not as many as the directory lists, or one has another size.
    pub fn new(directory: Directory, records: Vec<Box<[u8]>>) -> Result<Self> {
        let bad = |reason| Error::BadArgument { what: "records", reason };
        if records.len() != directory.len() {
            return Err(bad(format!("expected {}, found {}", directory.len(), records.len())));
        }
        for (index, record) in (0..).map(RecordIndex).zip(&records) {
            let expected = directory.record_bytes(index);
            if record.len() != expected {
                let id = directory.id(index);
                return Err(bad(format!("{id} has {} bytes, expected {expected}", record.len())));
            }
        }
        Ok(Self { directory, records })
    }
}

impl RecordSource for MemorySource {
    fn directory(&self) -> &Directory {
        &self.directory
    }

    fn read(&self, record: RecordIndex, out: &mut [u8]) -> Result<()> {
        check_record_len(&self.directory, record, out)?;
        out.copy_from_slice(&self.records[record.0 as usize]);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_records_must_fit_their_directory() {
        let directory = || Directory::new([(3, 2, 4)]).unwrap();
        let record = |n: usize| vec![n as u8; n].into_boxed_slice();
        let source = MemorySource::new(directory(), vec![record(4), Box::new([1, 2, 3, 4])]).unwrap();
        let mut out = [0; 4];
        source.read(RecordIndex(1), &mut out).unwrap();
        assert_eq!(out, [1, 2, 3, 4]);
        assert!(source.read(RecordIndex(2), &mut out).is_err());
        assert!(MemorySource::new(directory(), vec![record(4)]).is_err());
        let error = MemorySource::new(directory(), vec![record(4), record(5)]).unwrap_err().to_string();
        assert!(error.contains("layer 3 expert 1 has 5 bytes"), "{error}");
    }
}
