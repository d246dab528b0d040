//! When what the cache does on its device happens.

use super::ExpertCache;
use crate::backend::{DeviceSpans, SpanZero};
use crate::error::{Error, Result};

/// For questions of speed: events around each piece of work, and kernels that take their own times. Only work that is enqueued,
/// and graphs that are recorded, between the two calls is seen. It costs a few microseconds a piece, up to 100,000 of them.
impl ExpertCache {
    /// From here on it is taken down what runs when on the device, in place of what was before; hands out the moment from which times
    /// count. `None` where the device does not do that: on the CPU, whose clock is the host's. Waits for what is under way.
    ///
    /// # Errors
    /// [`Error::BadArgument`] where there are several devices, [`Error::OutOfDeviceMemory`], and what went wrong in earlier
    /// steps.
    pub fn begin_spans(&self) -> Result<Option<SpanZero>> {
        if let Some(placement) = self.placement() {
            let reason =
                format!("times are taken down on one device, this cache has {}", placement.devices());
            return Err(Error::BadArgument { what: "spans", reason });
        }
        self.core.engine().shared_backend().begin_spans()
    }

    /// What was taken down since [`Self::begin_spans`], which ends with it. Waits for what is under way.
    ///
    /// # Errors
    /// What went wrong in earlier steps.
    pub fn take_spans(&self) -> Result<DeviceSpans> {
        self.core.engine().shared_backend().take_spans()
    }

    /// Places for times that its kernels tell on any stream of the device, captured or not. `None` where it is no GPU.
    ///
    /// # Errors
    /// [`Error::OutOfDeviceMemory`].
    #[cfg(feature = "cuda")]
    pub fn stamps(&self, places: usize) -> Result<Option<crate::backend::cuda::Stamps>> {
        let mut engine = self.core.engine();
        let backend = engine.shared_backend().as_any();
        let backend = backend.and_then(|b| b.downcast_mut::<crate::backend::cuda::CudaBackend>());
        backend.map(|backend| backend.stamps(places)).transpose()
    }
}
