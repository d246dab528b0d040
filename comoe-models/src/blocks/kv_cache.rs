//! Keys and values of the tokens so far, preallocated.

use candle_core::{DType, Device, Tensor};

use crate::arch::DecoderPlan;
use crate::error::{Error, Result};

/// Keys and values of one sequence, for every layer `[kv_heads, capacity, head_dim]`; written in place, never
/// reallocated.
#[derive(Debug)]
pub struct KvCache {
    layers: Vec<LayerKv>,
    len: usize,
    capacity: usize,
}

/// Keys and values of one layer.
#[derive(Debug)]
pub struct LayerKv {
    k: Tensor,
    v: Tensor,
}

impl KvCache {
    /// Room for `capacity` tokens of a model.
    ///
    /// # Errors
    /// When the device has no memory for it.
    pub fn new(plan: &DecoderPlan, capacity: usize, dtype: DType, device: &Device) -> Result<Self> {
        let layers = plan.layers.iter().map(|l| {
            let shape = (l.attention.kv_heads, capacity, l.attention.head_dim);
            Ok(LayerKv { k: Tensor::zeros(shape, dtype, device)?, v: Tensor::zeros(shape, dtype, device)? })
        });
        Ok(Self { layers: layers.collect::<Result<_>>()?, len: 0, capacity })
    }

    /// Tokens held.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no token is held.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Tokens that fit.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Forgets all but the first `len` tokens (all are kept when there are fewer).
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Checks that `tokens` more fit.
    pub(crate) fn reserve(&self, tokens: usize) -> Result<()> {
        if tokens > self.capacity - self.len {
            return Err(Error::ContextExceeded { tokens, position: self.len, context: self.capacity });
        }
        Ok(())
    }

    /// Counts `tokens` that every layer has written.
    pub(crate) fn advance(&mut self, tokens: usize) {
        self.len += tokens;
    }

    pub(crate) fn layer(&self, layer: usize) -> &LayerKv {
        &self.layers[layer]
    }
}

impl LayerKv {
    /// Writes `k` and `v`, `[kv_heads, tokens, head_dim]`, at `position`, and returns the keys and values of
    /// positions `0..position + tokens` as views.
    ///
    /// # Errors
    /// Those of candle.
    pub fn append(&self, position: usize, k: &Tensor, v: &Tensor) -> candle_core::Result<(Tensor, Tensor)> {
        let tokens = k.dim(1)?;
        self.k.slice_set(k, 1, position)?;
        self.v.slice_set(v, 1, position)?;
        Ok((self.k.narrow(1, 0, position + tokens)?, self.v.narrow(1, 0, position + tokens)?))
    }
}
