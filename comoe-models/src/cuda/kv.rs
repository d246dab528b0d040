//! Where the kernels find keys and values.

use candle_core::DType;
use comoe_core::Result;

use super::{bad, dtype_code};

/// How cached keys and values are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvFormat {
    /// In the model's dtype: F32, BF16 or F16.
    Plain(DType),
    /// `scale * q` with q in -127..=127 and one f16 scale for a row of a head: the least that clips nothing.
    Int8,
}

impl KvFormat {
    /// Bytes of one element, scales aside.
    pub fn element_bytes(self) -> usize {
        match self {
            Self::Plain(dtype) => dtype.size_in_bytes(),
            Self::Int8 => 1,
        }
    }

    /// The number by which the kernels know it.
    pub(super) fn code(self) -> Result<u32> {
        match self {
            Self::Plain(dtype) => dtype_code("a KV cache", dtype),
            Self::Int8 => Ok(3),
        }
    }
}

/// Rows of all heads of a cache, `[heads, capacity, width]`: device memory.
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
