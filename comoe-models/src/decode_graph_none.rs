//! In place of `decode_graph` in a build without GPU kernels: nothing of it can be made.

use std::convert::Infallible;
use std::marker::PhantomData;

use candle_core::Tensor;

use crate::blocks::kv_cache::KvCache;
use crate::decoder::Decoder;
use crate::error::Result;
use crate::sampler::SamplerOptions;
use crate::step_profile::Profile;

/// Decodes one sequence on a GPU.
pub struct DeviceSteps<'m> {
    never: Infallible,
    decoder: PhantomData<&'m Decoder>,
}

impl<'m> DeviceSteps<'m> {
    /// `None`: this build has no kernels.
    ///
    /// # Errors
    /// None.
    pub fn of(_: &'m Decoder) -> Result<Option<Self>> {
        Ok(None)
    }

    /// Why the last step was not replayed, if that is so.
    pub fn note(&self) -> Option<&str> {
        match self.never {}
    }

    /// Steps replayed since [`Self::begin`].
    pub fn replayed(&self) -> usize {
        match self.never {}
    }

    /// Whether steps guess ahead.
    pub fn asks(&self) -> Option<bool> {
        match self.never {}
    }

    /// How long the host took to enqueue the steps replayed since [`Self::begin`].
    pub fn launching(&self) -> std::time::Duration {
        match self.never {}
    }

    /// Enqueues `n` steps by replaying a graph, and waits for the last.
    ///
    /// # Errors
    /// None.
    #[doc(hidden)]
    pub fn run_blind(&mut self, _: &mut KvCache, _: usize) -> Result<bool> {
        match self.never {}
    }

    /// Where the time of a replayed step goes, part by part.
    ///
    /// # Errors
    /// None.
    pub fn profile(&mut self, _: &mut KvCache, _: usize) -> Result<Option<Profile>> {
        match self.never {}
    }

    /// Nodes of the graph that was replayed last.
    pub fn nodes(&self) -> Option<usize> {
        match self.never {}
    }

    /// Begins an answer to `prompt`.
    ///
    /// # Errors
    /// None.
    pub fn begin(&mut self, _: &SamplerOptions, _: &[u32]) -> Result<()> {
        match self.never {}
    }

    /// Chooses the token behind those in a cache from logits `[1, vocab]`.
    ///
    /// # Errors
    /// None.
    pub fn choose(&mut self, _: &Tensor, _: &mut KvCache) -> Result<u32> {
        match self.never {}
    }

    /// Runs the token that was chosen last, and chooses the one behind it.
    ///
    /// # Errors
    /// None.
    pub fn next(&mut self, _: &mut KvCache, _: usize) -> Result<Option<u32>> {
        match self.never {}
    }

    /// Lets go of all graphs, so that the KV cache can move.
    pub fn let_go(&mut self) {
        match self.never {}
    }

    /// The sequence may have more tokens from now on.
    ///
    /// # Errors
    /// None.
    pub fn reach_to(&mut self, _: usize) -> Result<()> {
        match self.never {}
    }

    /// Waits for what is under way.
    pub fn settle(&mut self) {
        match self.never {}
    }
}
