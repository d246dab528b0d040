//! What the kernels take by value, as kernels/record.cuh has it.

use cudarc::driver::DeviceRepr;

use crate::expert::{Activation, ExpertLayout, MatrixLayout};
use crate::format::ExpertFormat;

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Matrix {
    weights: u64,
    scales: u64,
    rows: u32,
    cols: u32,
    row_bytes: u32,
    scale_row_bytes: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Record {
    gate: Matrix,
    up: Matrix,
    down: Matrix,
    gate_bias: u64,
    up_bias: u64,
    down_bias: u64,
    tail: u64,
    bytes: u64,
    has_bias: u32,
    group_shift: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Input {
    pub(super) data: u64,
    pub(super) row_weights: u64,
    pub(super) dtype: u32,
    pub(super) per_row: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Act {
    kind: u32,
    limit: f32,
    alpha: f32,
}

// SAFETY: plain numbers without padding, mirrored field by field in kernels/record.cuh.
unsafe impl DeviceRepr for Record {}
// SAFETY: as above.
unsafe impl DeviceRepr for Input {}
// SAFETY: as above.
unsafe impl DeviceRepr for Act {}

impl Record {
    pub(super) fn new(l: &ExpertLayout) -> Self {
        let matrix = |m: &MatrixLayout| Matrix {
            weights: m.weights as u64,
            scales: m.scales as u64,
            rows: m.rows as u32,
            cols: m.cols as u32,
            row_bytes: m.row_bytes as u32,
            scale_row_bytes: m.scale_row_bytes as u32,
        };
        let tail = match l.format {
            ExpertFormat::Bf16 => l.down.weights + l.down.rows * l.down.row_bytes,
            _ => l.down.scales + l.down.rows * l.down.scale_row_bytes,
        };
        Self {
            gate: matrix(&l.gate),
            up: matrix(&l.up),
            down: matrix(&l.down),
            gate_bias: l.bias.map_or(0, |b| b.gate as u64),
            up_bias: l.bias.map_or(0, |b| b.up as u64),
            down_bias: l.bias.map_or(0, |b| b.down as u64),
            tail: tail as u64,
            bytes: l.record_bytes as u64,
            has_bias: l.bias.is_some().into(),
            group_shift: l.format.group().map_or(0, usize::ilog2),
        }
    }
}

impl Act {
    pub(super) fn new(activation: Activation) -> Self {
        match activation {
            Activation::Silu => Self { kind: 0, limit: 0.0, alpha: 0.0 },
            Activation::GeluTanh => Self { kind: 1, limit: 0.0, alpha: 0.0 },
            Activation::SwigluClamped { limit, alpha } => Self { kind: 2, limit, alpha },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::DeviceItem;
    use super::*;

    #[test]
    fn structs_are_as_long_as_on_the_device() {
        assert_eq!(size_of::<DeviceItem>(), 48);
        assert_eq!(size_of::<Matrix>(), 32);
        assert_eq!(size_of::<Record>(), 3 * 32 + 5 * 8 + 2 * 4);
        assert_eq!(size_of::<Input>(), 24);
        assert_eq!(size_of::<Act>(), 12);
    }
}
