//! `kernels/resolve.cu`, launched: routing that is on the GPU becomes work items on the GPU.

use std::sync::Arc;

use cudarc::driver::{CudaStream, DeviceRepr, LaunchConfig, PushKernelArg};

use super::kernels::{Kernels, launch_early};
use crate::backend::MOST_DEVICE_ASSIGNMENTS;
use crate::error::{Error, Result};

/// No slot, no record.
pub(super) const NONE: u32 = u32::MAX;
/// With a slot's record: it stays for good.
pub(super) const KEPT: u32 = 1 << 31;
/// Bytes of a layer's counters: four u64.
pub(super) const COUNTERS_BYTES: usize = 32;
/// Bytes of the fault word: kind, layer, token, value, u32 each.
pub(super) const FAULT_BYTES: usize = 16;
pub(super) const FAULT_BAD_WEIGHT: u32 = 1;
pub(super) const FAULT_UNKNOWN_EXPERT: u32 = 2;
pub(super) const FAULT_MISSING: u32 = 3;
pub(super) const FAULT_LATE: u32 = 4;
/// Bytes of what is known of a partition: clock (u64), where its slots begin in their list, and how many (u32 each).
pub(super) const PARTITION_BYTES: usize = 16;
/// Bytes of what is known of the token under way, u32 each: steps done, whether it is run again, records missed so far, of all
/// tokens, and nothing.
pub(super) const PROGRESS_BYTES: usize = 16;
/// Where the records that were missed are counted in it.
pub(super) const MISSED_AT: usize = 8;
/// Bytes of a record that only the host can bring, and its slot: u32 each.
pub(super) const MISSING_BYTES: usize = 8;
/// So few threads are not worth saving: they also search the slots.
const LEAST_THREADS: usize = 128;

/// Arguments of the kernel, mirrored by `struct Resolve` in kernels/resolve.cu, where fields are explained.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct Resolve {
    pub(super) ids: u64,
    pub(super) weights: u64,
    pub(super) numbers: u64,
    pub(super) slot_of: u64,
    pub(super) address: u64,
    pub(super) owner: u64,
    pub(super) stamp: u64,
    pub(super) score: u64,
    pub(super) partition: u64,
    pub(super) slots: u64,
    pub(super) place: u64,
    pub(super) counters: u64,
    pub(super) uses: u64,
    pub(super) progress: u64,
    pub(super) missing: u64,
    pub(super) fault: u64,
    pub(super) host: u64,
    pub(super) items: u64,
    pub(super) fills: u64,
    pub(super) list: u64,
    pub(super) factors: u64,
    pub(super) pool: u64,
    pub(super) stride: u64,
    pub(super) half_life: f64,
    pub(super) assignments: u32,
    pub(super) top_k: u32,
    pub(super) experts: u32,
    pub(super) first_record: u32,
    pub(super) layer: u32,
    pub(super) weight_on_input: u32,
    pub(super) ordinal: u32,
    pub(super) all: u32,
    pub(super) ahead: u64,
    pub(super) foresight: u64,
    pub(super) record_bytes: u32,
    pub(super) parts: u32,
    pub(super) log: u64,
}

// SAFETY: plain numbers without padding, mirrored field by field in kernels/resolve.cu.
unsafe impl DeviceRepr for Resolve {}

impl Kernels {
    /// Enqueues one step's schedule; see kernels/resolve.cu.
    ///
    /// # Errors
    /// [`Error::BadArgument`] for more assignments than a block can have, [`Error::Device`] when the launch
    /// fails.
    ///
    /// # Safety
    /// Every address must be valid on the stream's GPU, for the sizes that the kernel's source states, until it is
    /// done, and nobody else may write the tables meanwhile.
    pub(super) unsafe fn resolve(&self, stream: &Arc<CudaStream>, args: &Resolve) -> Result<()> {
        let config = args.launch_config(1)?;
        let launched = if self.starts_early() {
            let mut arguments = [std::ptr::from_ref(args).cast_mut().cast()];
            // SAFETY: the type is that of kernels/resolve.cu, which waits for the kernel before it first of all; the
            // addresses are the caller's promise.
            unsafe { launch_early(stream, self.resolve_function(), config, &mut arguments) }
        } else {
            let mut launch = stream.launch_builder(self.resolve_function());
            launch.arg(args);
            // SAFETY: the type is that of kernels/resolve.cu; the addresses are the caller's promise.
            unsafe { launch.launch(config) }.map(|_| ())
        };
        launched.map_err(|error| self.launch_error("resolve", error))
    }
}

impl Resolve {
    /// So many blocks of one thread for each assignment.
    ///
    /// # Errors
    /// [`Error::BadArgument`] for more assignments than a block can have.
    pub(super) fn launch_config(&self, blocks: u32) -> Result<LaunchConfig> {
        let assignments = self.assignments as usize;
        if assignments > MOST_DEVICE_ASSIGNMENTS || self.top_k == 0 {
            let reason = format!(
                "{assignments} assignments (top-{}): a device-driven step takes up to {MOST_DEVICE_ASSIGNMENTS}",
                self.top_k
            );
            return Err(Error::BadArgument { what: "step", reason });
        }
        Ok(LaunchConfig {
            grid_dim: (blocks, 1, 1),
            block_dim: (assignments.next_multiple_of(32).max(LEAST_THREADS) as u32, 1, 1),
            shared_mem_bytes: 0,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_as_long_as_on_the_device() {
        assert_eq!(size_of::<Resolve>(), 256);
    }
}
