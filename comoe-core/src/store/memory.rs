//! Records that are no experts of a checkpoint: bytes in memory, and the rows of a big table.

use std::sync::Arc;

use super::checkpoint::{Checkpoint, Region};
use super::{Directory, RecordIndex, RecordSource, check_record_len};
use crate::error::{Error, Result};
use crate::expert::RECORD_ALIGN;

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

/// The rows of one tensor `[rows, ..]` of a checkpoint, such as an embedding table: row `r` is the record of layer 0,
/// expert `r`. Rows are read in place from the mapped file and padded with zeros to [`RECORD_ALIGN`] bytes.
#[derive(Debug)]
pub struct RowSource {
    checkpoint: Arc<Checkpoint>,
    table: Region,
    row_bytes: usize,
    directory: Directory,
}

impl RowSource {
    /// Makes a record of each row of the tensor `name`.
    ///
    /// # Errors
    /// [`Error::BadTensor`] when there is no such tensor, or it has no rows of whole bytes.
    pub fn new(checkpoint: Arc<Checkpoint>, name: &str) -> Result<Self> {
        let tensor = checkpoint.tensor(name)?;
        let rows = match *tensor.shape {
            [rows, _, ..]
                if rows > 0 && !tensor.bytes.is_empty() && tensor.bytes.len().is_multiple_of(rows) =>
            {
                rows
            }
            _ => {
                let reason = format!("expected a table [rows, columns], found shape {:?}", tensor.shape);
                return Err(Error::bad_tensor(name, reason));
            }
        };
        let row_bytes = tensor.bytes.len() / rows;
        let directory = Directory::new([(0, rows, row_bytes.next_multiple_of(RECORD_ALIGN))])?;
        let table = checkpoint.region(name)?;
        Ok(Self { checkpoint, table, row_bytes, directory })
    }

    /// Bytes of a row without its padding.
    pub fn row_bytes(&self) -> usize {
        self.row_bytes
    }
}

impl RecordSource for RowSource {
    fn directory(&self) -> &Directory {
        &self.directory
    }

    fn read(&self, record: RecordIndex, out: &mut [u8]) -> Result<()> {
        check_record_len(&self.directory, record, out)?;
        let start = record.0 as usize * self.row_bytes;
        let (row, padding) = out.split_at_mut(self.row_bytes);
        row.copy_from_slice(&self.checkpoint.bytes(self.table)[start..start + self.row_bytes]);
        padding.fill(0);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use safetensors::Dtype;

    use super::super::testing::{Shards, bf16};
    use super::*;

    #[test]
    fn rows_of_a_table_are_padded_records() {
        let values: Vec<f32> = (0..15).map(|v| v as f32).collect();
        let made = Shards::new()
            .with("a.safetensors", "table", Dtype::BF16, &[5, 3], &bf16(&values))
            .with("a.safetensors", "flat", Dtype::BF16, &[15], &bf16(&values))
            .with("a.safetensors", "none", Dtype::BF16, &[0, 3], &[])
            .write();
        let checkpoint = Arc::new(Checkpoint::open(&[made.path()]).unwrap());
        let source = RowSource::new(checkpoint.clone(), "table").unwrap();
        assert_eq!((source.directory().len(), source.row_bytes()), (5, 6));
        let mut out = vec![7; 512];
        source.read(RecordIndex(2), &mut out).unwrap();
        assert_eq!(out[..6], bf16(&[6.0, 7.0, 8.0]));
        assert_eq!(out[6..], [0; 506]);
        assert!(source.read(RecordIndex(5), &mut out).is_err());
        assert!(source.read(RecordIndex(0), &mut out[..6]).is_err());
        for bad in ["flat", "none", "missing"] {
            assert!(RowSource::new(checkpoint.clone(), bad).unwrap_err().to_string().contains(bad));
        }
    }

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
