//! Keys and values of the tokens so far, preallocated.

use candle_core::{DType, Device, Tensor};

use crate::arch::DecoderPlan;
use crate::error::{Error, Result};
use crate::memory::Held;

/// What the layers keep of one sequence's tokens: keys and values, `[kv_heads, capacity, width]` each; written in
/// place, never reallocated. Layers without keys and values keep what they need in their place.
#[derive(Debug)]
pub struct KvCache {
    layers: Vec<LayerKv>,
    len: usize,
    capacity: usize,
    place: Option<Place>,
    /// Its bytes, counted while it lives.
    held: Option<Held>,
}

/// The position as kernels of fused steps read it.
#[derive(Debug)]
struct Place {
    /// `[1]`, U32.
    buffer: Tensor,
    /// What it holds once all that was enqueued is done; `None`: not known.
    holds: Option<usize>,
}

/// Keys and values of one layer.
#[derive(Debug, Clone)]
pub struct LayerKv {
    k: Tensor,
    /// `None` where values are part of the keys.
    v: Option<Tensor>,
}

impl KvCache {
    /// Room for `capacity` tokens of a model.
    ///
    /// # Errors
    /// When the device has no memory for it.
    pub fn new(plan: &DecoderPlan, capacity: usize, dtype: DType, device: &Device) -> Result<Self> {
        let layers = plan.layers.iter().map(|l| {
            let (heads, key, value) = l.mixer.cached();
            let zeros = |width: usize| Tensor::zeros((heads, capacity, width), dtype, device);
            Ok(LayerKv { k: zeros(key)?, v: if value > 0 { Some(zeros(value)?) } else { None } })
        });
        let place = match device {
            Device::Cuda(_) => Some(Place { buffer: Tensor::zeros(1, DType::U32, device)?, holds: Some(0) }),
            _ => None,
        };
        Ok(Self { layers: layers.collect::<Result<_>>()?, len: 0, capacity, place, held: None })
    }

    /// Counted as these bytes.
    pub(crate) fn counted(mut self, held: Held) -> Self {
        self.held = Some(held);
        self
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

    /// Counts `tokens` that nobody has written: their keys and values are what is there, zeros in a new cache. For
    /// measuring at a length of one's choice.
    ///
    /// # Errors
    /// [`Error::ContextExceeded`].
    #[doc(hidden)]
    pub fn pretend(&mut self, tokens: usize) -> Result<()> {
        self.reserve(tokens)?;
        self.len += tokens;
        Ok(())
    }

    /// Forgets all but the first `len` tokens (all are kept when there are fewer).
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// All that layers keep, `[heads, capacity, width]` each, first layer first. For tests that look into it.
    #[doc(hidden)]
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.layers.iter().flat_map(|l| std::iter::once(&l.k).chain(&l.v))
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

    pub(crate) fn layers(&self) -> &[LayerKv] {
        &self.layers
    }

    /// The position in the device's memory, `[1]` U32, made to hold `position` when everything enqueued so far is done.
    pub(crate) fn place(&mut self, position: usize) -> Result<Tensor> {
        let Some(place) = &mut self.place else {
            return Err(candle_core::Error::msg("a KV cache of the CPU has its position on the host").into());
        };
        if place.holds != Some(position) {
            let now = Tensor::new(&[position as u32], place.buffer.device())?;
            place.buffer.slice_set(&now, 0, 0)?;
            place.holds = Some(position);
        }
        Ok(place.buffer.clone())
    }

    /// What was enqueued moves the position to the end of the sequence itself.
    #[cfg(feature = "cuda")]
    pub(crate) fn place_moved(&mut self) {
        if let Some(place) = &mut self.place {
            place.holds = Some(self.len);
        }
    }

    /// Some step may not have moved the position as was expected.
    #[cfg(feature = "cuda")]
    pub(crate) fn forget_place(&mut self) {
        if let Some(place) = &mut self.place {
            place.holds = None;
        }
    }
}

impl LayerKv {
    /// Keys of all positions, `[kv_heads, capacity, width]`.
    pub fn keys(&self) -> &Tensor {
        &self.k
    }

    /// Keys and values of all positions.
    ///
    /// # Errors
    /// When the layer keeps no values.
    pub fn whole(&self) -> candle_core::Result<(&Tensor, &Tensor)> {
        match &self.v {
            Some(v) => Ok((&self.k, v)),
            None => candle_core::bail!("this layer keeps no values"),
        }
    }

    /// Writes `k` and `v`, `[kv_heads, tokens, head_dim]`, at `position`, and returns the keys and values of
    /// positions `0..position + tokens` as views.
    ///
    /// # Errors
    /// Those of candle.
    pub fn append(&self, position: usize, k: &Tensor, v: &Tensor) -> candle_core::Result<(Tensor, Tensor)> {
        let keys = self.append_key(position, k)?;
        let Some(values) = &self.v else { candle_core::bail!("this layer keeps no values") };
        values.slice_set(v, 1, position)?;
        Ok((keys, values.narrow(1, 0, position + v.dim(1)?)?))
    }

    /// The same for a layer that keeps one thing of each token, `[heads, tokens, width]`.
    ///
    /// # Errors
    /// Those of candle.
    pub fn append_key(&self, position: usize, k: &Tensor) -> candle_core::Result<Tensor> {
        self.k.slice_set(k, 1, position)?;
        self.k.narrow(1, 0, position + k.dim(1)?)
    }
}
