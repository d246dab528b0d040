//! Slots that come and go while the cache lives.

use super::ExpertCache;
use crate::error::Result;
pub use crate::schedule::SlotsInForce;

/// Between tokens the number of slots may change; output does not depend on it, and graphs that were captured hold. The
/// slots that leave are every layer's alike, and never more than leaves a token its experts: layers x top-k, where layers
/// have slots of their own. Records that lose their slot are misses the next time. Memory goes back to the system in chunks
/// (2 MiB and more on a GPU), and comes from there; no address changes. Several devices keep the proportion in which they
/// were built; the first lends, since what is not experts is its.
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
        let built: Vec<usize> = self.core.each_engine(|engine, _| engine.slots_in_force().most);
        let all: usize = built.iter().sum();
        // Shares of the sum so far, so that all of them together are what was asked for.
        let (mut before, mut given) = (0, 0);
        let shares = built.iter().map(|most| {
            before += most;
            let share = slots.min(all) * before / all.max(1) - given;
            given += share;
            share
        });
        let mut shares = shares.collect::<Vec<_>>().into_iter();
        let resized = self.core.each_engine(|engine, _| engine.resize(shares.next().unwrap_or(0)));
        Ok(SlotsInForce::of_all(resized.into_iter().collect::<Result<Vec<_>>>()?))
    }

    /// Gives `bytes` bytes of device memory to something else (a longer KV cache), as many slots as that takes; what is lent
    /// adds up.
    ///
    /// # Errors
    /// [`Error::NothingToLend`](crate::Error::NothingToLend) when a token would not find slots for its experts any more, and
    /// then nothing has changed; as [`Self::resize`].
    pub fn lend(&self, bytes: u64) -> Result<SlotsInForce> {
        let _between = self.between_tokens()?;
        // What was wrong with earlier steps is all devices' to hear, and no reason to have lent anything.
        self.core.report_faults(true)?;
        self.core.engine().lend(bytes)?;
        Ok(self.slots_in_force())
    }

    /// Takes back what was lent, once it is free again. Slots that find no memory stay away until the next call.
    ///
    /// # Errors
    /// As [`Self::resize`].
    pub fn take_back(&self, bytes: u64) -> Result<SlotsInForce> {
        let _between = self.between_tokens()?;
        self.core.report_faults(true)?;
        self.core.engine().take_back(bytes)?;
        Ok(self.slots_in_force())
    }

    /// What is in force, on all devices together.
    pub fn slots_in_force(&self) -> SlotsInForce {
        SlotsInForce::of_all(self.core.each_engine(|engine, _| engine.slots_in_force()))
    }
}
