//! In place of [`fused`](super::fused) in a build without GPU kernels: nothing of it can be made.

use std::marker::PhantomData;

use candle_core::{DType, Device, Result, Tensor};
use comoe_core::Activation;
use comoe_core::backend::DeviceGuess;

use super::attend::Attend;
use super::heads::HeadSplit;
use super::int8_matrix::Int8Matrix;
use super::kv_cache::{Cached, LayerKv};
use super::norm::RmsNorm;
use super::rope::RotaryTable;
use super::router::OnDevice;
use crate::arch::{DecoderPlan, RouterPlan, TemperaturePlan};

/// Kernels and buffers of a decoder's fused steps.
pub enum Fused {}

/// One fused step.
#[derive(Clone, Copy)]
pub enum Step<'a> {
    #[doc(hidden)]
    Never(std::convert::Infallible, PhantomData<&'a ()>),
}

/// What stands between an attention layer's projections and its attention.
#[expect(dead_code, reason = "read by kernels")]
pub(super) struct Heads<'a> {
    pub(super) split: &'a HeadSplit,
    pub(super) clip: Option<f64>,
    pub(super) rope: Option<&'a RotaryTable>,
    pub(super) temperature: Option<TemperaturePlan>,
}

/// Routing that is replayed in place of the routers' choice, for measuring.
#[derive(Debug, Clone)]
pub struct GivenRouting {
    /// `[tokens, layers, top_k]`, U32: the experts of the model's layers.
    pub ids: Tensor,
    /// The same for what the layer before guesses of each, in place of the stale gate's guess.
    pub guesses: Option<Tensor>,
    /// Position of the first token. Behind the last one it begins anew.
    pub first: usize,
}

impl Fused {
    pub(crate) fn takes(_: usize) -> bool {
        false
    }

    pub(crate) fn for_plan(
        _: &DecoderPlan,
        _: DType,
        _: &Device,
    ) -> std::result::Result<Option<Self>, String> {
        Ok(None)
    }

    pub(crate) fn with_step<R>(
        &mut self,
        _: &Tensor,
        _: usize,
        _: usize,
        _: impl FnOnce(&Step<'_>) -> R,
    ) -> R {
        match *self {}
    }

    pub(crate) fn reach(_: usize, capacity: usize) -> usize {
        capacity
    }

    pub(crate) fn give_routing(&mut self, _: Option<GivenRouting>) {
        match *self {}
    }

    pub(crate) fn made_ready(&mut self, _: usize) {
        match *self {}
    }

    pub(crate) fn held_bytes(&self) -> u64 {
        match *self {}
    }

    pub(crate) fn forget_errors(&self) -> Result<()> {
        match *self {}
    }

    pub(crate) fn check(&mut self) -> crate::Result<()> {
        match *self {}
    }
}

impl Step<'_> {
    pub(super) fn beside<R>(&self, _: impl FnOnce(&Step<'_>) -> crate::Result<R>) -> crate::Result<R> {
        match self {
            Self::Never(never, _) => match *never {},
        }
    }

    pub(super) fn guess<'g>(&'g self, _: &'g Tensor) -> DeviceGuess<'g> {
        match self {
            Self::Never(never, _) => match *never {},
        }
    }
}

macro_rules! never {
    ($vis:vis, $($name:ident($($arg:ty),*) -> $result:ty;)*) => {
        impl Step<'_> {
            $($vis fn $name(&self, $(_: $arg),*) -> $result {
                match self {
                    Self::Never(never, _) => match *never {},
                }
            })*
        }
    };
}

never! { pub(crate),
    next_layer() -> ();
    mark(&str, usize) -> Result<()>;
    room_like(&Tensor) -> Result<Tensor>;
    embed(&Tensor, &Tensor, f64) -> Result<Tensor>;
}

never! { pub(super),
    asks() -> bool;
    linear(&Tensor, &Tensor, Option<&Tensor>) -> Result<Tensor>;
    linear_int8(&Tensor, &Int8Matrix, Option<&Tensor>) -> Result<Tensor>;
    rms_norm(&Tensor, &Tensor, f32) -> Result<Tensor>;
    layer_norm(&Tensor, &Tensor, &Tensor, f32) -> Result<Tensor>;
    add_rms_norm(&Tensor, &Tensor, &Tensor, f32) -> Result<(Tensor, Tensor)>;
    gated(&Tensor, Activation) -> Result<Tensor>;
    add(&Tensor, &Tensor, Option<&Tensor>) -> Result<Tensor>;
    split_append(&Tensor, &Heads<'_>, &LayerKv) -> Result<Tensor>;
    attend(&Tensor, &Attend, &Cached, &Cached) -> Result<Tensor>;
    latent(&Tensor, &Tensor, &RmsNorm, &Tensor, &RotaryTable, &LayerKv) -> Result<Tensor>;
    latent_values(&Tensor, &Tensor) -> Result<Tensor>;
    short_conv(&Tensor, &Tensor, Option<&Tensor>, &LayerKv) -> Result<Tensor>;
    route(&Tensor, DType, &RouterPlan, &OnDevice, usize) -> Result<(Tensor, Tensor)>;
}
