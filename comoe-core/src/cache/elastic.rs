//! Slots that come and go while the cache lives.

use super::ExpertCache;
use crate::error::{Error, Result};
pub use crate::schedule::SlotsInForce;

/// Between tokens the number of slots may change; output does not depend on it, and graphs that were captured hold. The
/// slots that leave are every layer's alike, and never more than leaves a token its experts: layers x top-k, where layers
/// have slots of their own. Records that lose their slot are misses the next time. Memory goes back to the system in chunks
/// (2 MiB and more on a GPU), and comes from there; no address changes. Of several devices it is the first that lends.
impl ExpertCache {
    /// Makes it `slots` slots, less those whose memory is lent, and says what is in force: as many as were asked for, within
    /// the fewest that work and the number that the cache was built with, and as far as there is memory. Waits for steps under
    /// way.
    ///
    /// # Errors
    /// [`Error::FixedSlots`](crate::Error::FixedSlots) where slots cannot come and go,
    /// [`Error::BadArgument`](crate::Error::BadArgument) within a token of this thread, and what went wrong in earlier steps.
    pub fn resize(&self, slots: usize) -> Result<SlotsInForce> {
        let _between = self.between_tokens()?;
        if self.core.fleet.is_some() {
            let reason = "several devices share this cache, whose shares are fixed".to_owned();
            return Err(Error::FixedSlots { reason });
        }
        self.core.engine().resize(slots)
    }

    /// Gives `bytes` bytes of device memory to something else (a longer KV cache), as many slots as that takes; what is lent
    /// adds up.
    ///
    /// # Errors
    /// [`Error::NothingToLend`](crate::Error::NothingToLend) when a token would not find slots for its experts any more, and
    /// then nothing has changed; as [`Self::resize`].
    pub fn lend(&self, bytes: u64) -> Result<SlotsInForce> {
        let _between = self.between_tokens()?;
        self.core.engine().lend(bytes)
    }

    /// Takes back what was lent, once it is free again. Slots that find no memory stay away until the next call.
    ///
    /// # Errors
    /// As [`Self::resize`].
    pub fn take_back(&self, bytes: u64) -> Result<SlotsInForce> {
        let _between = self.between_tokens()?;
        self.core.engine().take_back(bytes)
    }

    /// What is in force.
    pub fn slots_in_force(&self) -> SlotsInForce {
        self.core.engine().slots_in_force()
    }
}
