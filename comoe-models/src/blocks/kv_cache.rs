//! Keys and values of the tokens so far, preallocated for as many as were planned.

use candle_core::{DType, Device, Tensor};

use super::int8_rows::Int8Rows;
use crate::arch::DecoderPlan;
use crate::error::{Error, Result};
use crate::load::KvFormat;
use crate::memory::Held;

/// What the layers keep of one sequence's tokens: keys and values, `[kv_heads, capacity, width]` each; written in
/// place, and moved only by [`Decoder::make_room`](crate::Decoder::make_room) and when it is cut back. Layers without keys
/// and values keep what they need in their place.
#[derive(Debug)]
pub struct KvCache {
    layers: Vec<LayerKv>,
    len: usize,
    capacity: usize,
    place: Option<Place>,
    /// Bytes that the experts' slots gave up for it.
    pub(crate) lent: u64,
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
    k: Cached,
    /// `None` where values are part of the keys.
    v: Option<Cached>,
}

/// Keys or values, `[kv_heads, positions, width]`.
#[derive(Debug, Clone)]
pub enum Cached {
    /// In the model's dtype.
    Plain(Tensor),
    /// In INT8.
    Int8(Int8Rows),
}

impl Cached {
    /// What holds the elements, `[kv_heads, positions, width]`, and in INT8 their scales, `[kv_heads, positions]`.
    pub fn parts(&self) -> (&Tensor, Option<&Tensor>) {
        match self {
            Self::Plain(rows) => (rows, None),
            Self::Int8(rows) => (rows.q(), Some(rows.scales())),
        }
    }

    /// As it was asked for.
    pub fn format(&self) -> KvFormat {
        match self {
            Self::Plain(_) => KvFormat::Plain,
            Self::Int8(_) => KvFormat::Int8,
        }
    }

    /// Heads, positions, width.
    ///
    /// # Errors
    /// For a tensor of other dimensions.
    pub fn dims3(&self) -> candle_core::Result<(usize, usize, usize)> {
        self.parts().0.dims3()
    }

    /// The first `len` positions in memory of its own, with room for `capacity`.
    fn moved(&self, len: usize, capacity: usize) -> candle_core::Result<Self> {
        Ok(match self {
            Self::Plain(rows) => Self::Plain(moved(rows, len, capacity)?),
            Self::Int8(rows) => Self::Int8(rows.moved(len, capacity)?),
        })
    }

    /// Writes `x [kv_heads, tokens, width]` at `position`, and returns a view of positions `0..position + tokens`.
    fn append(&self, position: usize, x: &Tensor) -> candle_core::Result<Self> {
        let ((heads, ..), seen) = (self.dims3()?, position + x.dim(1)?);
        Ok(match self {
            Self::Plain(rows) => {
                rows.slice_set(x, 1, position)?;
                Self::Plain(rows.narrow(1, 0, seen)?)
            }
            Self::Int8(rows) => {
                rows.write(position, x)?;
                Self::Int8(rows.part((0, heads), (0, seen))?)
            }
        })
    }
}

/// `t [heads, positions, ..]`, its first `len` positions, in memory of its own with room for `capacity`.
pub(super) fn moved(t: &Tensor, len: usize, capacity: usize) -> candle_core::Result<Tensor> {
    let mut dims = t.dims().to_vec();
    dims[1] = capacity;
    let wider = Tensor::zeros(dims, t.dtype(), t.device())?;
    if len > 0 {
        wider.slice_set(&t.narrow(1, 0, len)?.contiguous()?, 1, 0)?;
    }
    Ok(wider)
}

impl KvCache {
    /// Room for `capacity` tokens of a model that computes in `dtype`.
    ///
    /// # Errors
    /// When the device has no memory for it, or this build no kernels for the format there.
    pub fn new(
        plan: &DecoderPlan,
        capacity: usize,
        dtype: DType,
        format: KvFormat,
        device: &Device,
    ) -> Result<Self> {
        let layers = plan.layers.iter().map(|l| {
            let (heads, key, value) = l.mixer.cached();
            let zeros = |width: usize| {
                Ok::<_, Error>(match l.mixer.kept_in(format) {
                    KvFormat::Plain => Cached::Plain(Tensor::zeros((heads, capacity, width), dtype, device)?),
                    KvFormat::Int8 => Cached::Int8(Int8Rows::zeros(heads, capacity, width, device)?),
                })
            };
            Ok(LayerKv { k: zeros(key)?, v: if value > 0 { Some(zeros(value)?) } else { None } })
        });
        let place = match device {
            Device::Cuda(_) => Some(Place { buffer: Tensor::zeros(1, DType::U32, device)?, holds: Some(0) }),
            _ => None,
        };
        Ok(Self { layers: layers.collect::<Result<_>>()?, len: 0, capacity, place, lent: 0, held: None })
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

    /// Makes room for `capacity` tokens, of which there are no more than that now: every layer in turn moves to memory of
    /// its own, and `moved` is called behind each. Graphs that hold addresses of the old memory are of no use afterwards.
    ///
    /// # Errors
    /// When the device has no memory for it; the cache then holds what it held, and some layers have room for more than
    /// counts.
    pub(crate) fn set_capacity(
        &mut self,
        capacity: usize,
        mut moved: impl FnMut() -> Result<()>,
    ) -> Result<()> {
        debug_assert!(self.len <= capacity);
        let len = self.len;
        self.capacity = self.capacity.min(capacity);
        let moving = |kept: &Cached| kept.moved(len, capacity);
        for layer in self.layers.iter_mut().filter(|l| l.k.parts().0.dims()[1] != capacity) {
            *layer = LayerKv { k: moving(&layer.k)?, v: layer.v.as_ref().map(moving).transpose()? };
            moved()?;
        }
        self.capacity = capacity;
        let bytes = self.bytes();
        if let Some(held) = &mut self.held {
            held.set(bytes);
        }
        Ok(())
    }

    /// Bytes of all that layers keep.
    pub(crate) fn bytes(&self) -> u64 {
        self.tensors().map(|t| (t.elem_count() * t.dtype().size_in_bytes()) as u64).sum()
    }

    /// All that layers keep, `[heads, capacity, width]` each and scales `[heads, capacity]`, first layer first. For tests
    /// that look into it.
    #[doc(hidden)]
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        let kept = self.layers.iter().flat_map(|l| std::iter::once(&l.k).chain(&l.v));
        kept.flat_map(|cached| {
            let (rows, scales) = cached.parts();
            std::iter::once(rows).chain(scales)
        })
    }

    /// Checks that `tokens` more fit.
    pub(crate) fn reserve(&self, tokens: usize) -> Result<()> {
        if tokens > self.capacity.saturating_sub(self.len) {
            return Err(Error::ContextExceeded { tokens, position: self.len, context: self.capacity });
        }
        Ok(())
    }

    /// Bytes of the largest layer.
    pub(crate) fn largest_layer(&self) -> usize {
        let bytes = |kept: &Cached| {
            let (rows, scales) = kept.parts();
            std::iter::once(rows)
                .chain(scales)
                .map(|t| t.elem_count() * t.dtype().size_in_bytes())
                .sum::<usize>()
        };
        let of = |l: &LayerKv| bytes(&l.k) + l.v.as_ref().map_or(0, bytes);
        self.layers.iter().map(of).max().unwrap_or(0)
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
    /// What a layer that keeps one thing of each token has kept, `[heads, capacity, width]`.
    ///
    /// # Errors
    /// When it is not in the model's dtype.
    pub fn rows(&self) -> candle_core::Result<&Tensor> {
        match &self.k {
            Cached::Plain(rows) => Ok(rows),
            Cached::Int8(_) => candle_core::bail!("this layer keeps keys and values in INT8"),
        }
    }

    /// Keys and values of all positions.
    ///
    /// # Errors
    /// When the layer keeps no values.
    pub fn whole(&self) -> candle_core::Result<(&Cached, &Cached)> {
        match &self.v {
            Some(v) => Ok((&self.k, v)),
            None => candle_core::bail!("this layer keeps no values"),
        }
    }

    /// Writes `k` and `v`, `[kv_heads, tokens, head_dim]`, at `position`, and returns the keys and values of
    /// positions `0..position + tokens` as views: what is held of them, also of these tokens.
    ///
    /// # Errors
    /// Those of candle.
    pub fn append(&self, position: usize, k: &Tensor, v: &Tensor) -> candle_core::Result<(Cached, Cached)> {
        let (keys, values) = self.whole()?;
        Ok((keys.append(position, k)?, values.append(position, v)?))
    }

    /// The same for a layer that keeps one thing of each token, `[heads, tokens, width]`.
    ///
    /// # Errors
    /// Those of candle.
    pub fn append_row(&self, position: usize, row: &Tensor) -> candle_core::Result<Tensor> {
        let rows = self.rows()?;
        rows.slice_set(row, 1, position)?;
        rows.narrow(1, 0, position + row.dim(1)?)
    }
}
