//! Steps that a caller records once, in a CUDA graph, and enqueues again and again.

use super::ExpertCache;
use crate::error::Result;

impl ExpertCache {
    /// Whether a step of `tokens` tokens with `top_k` experts each is driven by the device now: it then needs nothing of
    /// the host, and a CUDA graph may hold it. Not while there is an observer (see [`Self::observe`]).
    pub fn is_device_driven(&self, tokens: usize, top_k: usize) -> bool {
        !self.core.is_observed() && self.core.engine().device_serves(tokens, top_k)
    }

    /// Enqueues recorded steps: `f` launches a graph that was captured around calls of
    /// [`CacheLayer::forward`](super::CacheLayer::forward) which the device drove. Nobody else uses the cache meanwhile,
    /// and the residency tables are the device's, whoever had them before. `None`, and `f` is not run, when such steps
    /// are not the device's any more (see [`Self::is_device_driven`]).
    ///
    /// # Errors
    /// What was wrong with the routing of an earlier step; `f` is then not run.
    pub fn replay<R>(&self, tokens: usize, top_k: usize, f: impl FnOnce() -> R) -> Result<Option<R>> {
        let mut engine = self.core.engine();
        if self.core.is_observed() || !engine.device_serves(tokens, top_k) {
            return Ok(None);
        }
        engine.device_replay(f).map(Some)
    }

    /// What was wrong with the routing of the device-driven steps that are done by now, if anything. Waits for nothing.
    ///
    /// # Errors
    /// As [`CacheLayer::forward`](super::CacheLayer::forward).
    pub fn poll(&self) -> Result<()> {
        self.core.engine().report_fault(false)
    }
}
