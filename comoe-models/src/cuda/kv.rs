//! Where the kernels find keys and values.

use comoe_core::Result;

use super::bad;
use crate::load::KvFormat;

/// Rows of all heads of a cache, `[heads, capacity, width]`: device memory, in the model's dtype or, of an INT8 cache, q in
/// bytes.
#[derive(Debug, Clone, Copy)]
pub struct KvRows {
    /// Address of the first head's first row.
    pub data: u64,
    /// Elements from one head to the next.
    pub head_stride: usize,
    /// Elements from one row to the next.
    pub row_stride: usize,
    /// Address of the scales `[heads, capacity]`, f16; unused but for [`KvFormat::Int8`].
    pub scales: u64,
}

impl KvRows {
    /// Rows without gaps.
    pub fn dense(data: u64, scales: u64, capacity: usize, width: usize) -> Self {
        Self { data, head_stride: capacity * width, row_stride: width, scales }
    }

    pub(super) fn check(&self, format: KvFormat) -> Result<()> {
        if format == KvFormat::Int8 && self.scales == 0 {
            return bad("an INT8 KV cache", "expected an address of its scales, found 0".to_owned());
        }
        Ok(())
    }
}
