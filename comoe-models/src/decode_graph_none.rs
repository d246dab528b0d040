//! In place of `decode_graph` in a build without GPU kernels: nothing of it can be made.

use std::marker::PhantomData;

use candle_core::Tensor;

use crate::blocks::kv_cache::KvCache;
use crate::decoder::Decoder;
use crate::error::Result;
use crate::sampler::SamplerOptions;

/// Decodes one sequence on a GPU.
pub(crate) struct DeviceSteps<'m> {
    never: std::convert::Infallible,
    decoder: PhantomData<&'m Decoder>,
}

impl<'m> DeviceSteps<'m> {
    pub(crate) fn of(_: &'m Decoder) -> Result<Option<Self>> {
        Ok(None)
    }

    pub(crate) fn note(&self) -> Option<&str> {
        match self.never {}
    }

    pub(crate) fn replayed(&self) -> usize {
        match self.never {}
    }

    pub(crate) fn begin(&mut self, _: &SamplerOptions, _: &[u32]) -> Result<()> {
        match self.never {}
    }

    pub(crate) fn choose(&mut self, _: &Tensor) -> Result<u32> {
        match self.never {}
    }

    pub(crate) fn next(&mut self, _: &mut KvCache, _: usize) -> Result<Option<u32>> {
        match self.never {}
    }

    pub(crate) fn settle(&mut self) {
        match self.never {}
    }
}
