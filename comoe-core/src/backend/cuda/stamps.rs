//! What time it is on a GPU when a stream comes to a point: told by a kernel of one thread, since an event waits for all that is
//! under way, records that another stream reads over the link included.

use std::sync::Arc;

use cudarc::driver::{CudaStream, LaunchConfig};

use super::context::Gpu;
use super::kernels::{Kernels, launch_early};
use super::slab::Slab;
use crate::error::{Error, Result};

/// Places for times, which a captured graph fills in anew at each replay. Dropping them waits for the GPU.
pub struct Stamps {
    kernels: Arc<Kernels>,
    slab: Slab,
    places: usize,
}

impl Stamps {
    pub(super) fn new(gpu: &Gpu, kernels: &Arc<Kernels>, places: usize) -> Result<Self> {
        let slab = Slab::new(gpu, "times of a step", 8 * places)?;
        Ok(Self { kernels: kernels.clone(), slab, places })
    }

    /// Takes down at `place` when `stream` has done what was enqueued so far.
    ///
    /// # Errors
    /// [`Error::BadArgument`] for a place that there is not, [`Error::Device`] when the launch fails.
    pub fn stamp(&self, stream: &Arc<CudaStream>, place: usize) -> Result<()> {
        if place >= self.places {
            let reason = format!("place {place} of {}", self.places);
            return Err(Error::BadArgument { what: "stamp", reason });
        }
        // SAFETY: 8 bytes of a slab whose drop waits for the GPU; whoever keeps a graph with this keeps the stamps.
        unsafe { self.kernels.tell_time(stream, self.slab.address() + 8 * place as u64) }
    }

    /// What is at the first `places` places: ns on the GPU's clock. Waits for the GPU.
    ///
    /// # Errors
    /// [`Error::Cuda`], and [`Error::BadArgument`] for more than there are.
    pub fn read(&self, places: usize) -> Result<Vec<u64>> {
        let mut bytes = vec![0; 8 * places];
        self.slab.read(0, &mut bytes)?;
        Ok(bytes.as_chunks().0.iter().map(|b| u64::from_le_bytes(*b)).collect())
    }
}

impl Kernels {
    /// Enqueues the telling of the time.
    ///
    /// # Errors
    /// [`Error::Device`] when the launch fails.
    ///
    /// # Safety
    /// `to` is the address of 8 bytes, aligned to as many, that are valid on the stream's GPU whenever the kernel runs.
    pub(super) unsafe fn tell_time(&self, stream: &CudaStream, to: u64) -> Result<()> {
        let config = LaunchConfig { grid_dim: (1, 1, 1), block_dim: (1, 1, 1), shared_mem_bytes: 0 };
        let mut arguments = [std::ptr::from_ref(&to).cast_mut().cast()];
        // SAFETY: the type is that of kernels/spans.cu, which waits for the kernel before it first of all; the address is the
        // caller's promise. Where the GPU starts nothing early, the attribute says nothing.
        unsafe { launch_early(stream, self.tell_time_function(), config, &mut arguments) }
            .map_err(|error| self.launch_error("tell_time", error))
    }
}
