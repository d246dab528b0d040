//! The experts' work of a step that the host drives: begun, run for whatever records are at hand, and summed.

use std::sync::Arc;

use candle_core::{DType, Tensor};
use cudarc::driver::CudaStream;

use super::backend::CudaBackend;
use super::compute::address_of;
use super::copies::Slots;
use super::kernels::{CombineArgs, DeviceItem, DownArgs, GateUpArgs, Items, gemm_stride};
use super::many::GemmX;
use super::upload::bytes_of;
use super::workspace::MOST_GEMV_TOKENS;
use crate::backend::{Queue, WorkItem};
use crate::error::{Error, Result};
use crate::expert::{ExpertLayout, ExpertSpec, WeightOn};
use crate::format::ExpertFormat;

/// A step between `begin` and `finish`.
pub(super) struct Ffn {
    pub(super) spec: ExpertSpec,
    pub(super) layout: ExpertLayout,
    /// Kept so that its memory is not reused before the kernels that read it are ordered.
    pub(super) x: Tensor,
    pub(super) x_address: u64,
    pub(super) y: Tensor,
    pub(super) y_address: u64,
    pub(super) weights: Vec<f32>,
    pub(super) tokens: usize,
    pub(super) top_k: usize,
    /// The weighted sum was part of the one launch that served every assignment.
    pub(super) summed: bool,
    /// It is another device's: results are wanted before the sum.
    pub(super) rows: bool,
    /// Present where the GEMM multiplies.
    pub(super) gemm: Option<GemmX>,
    pub(super) caller: Arc<CudaStream>,
}

impl CudaBackend {
    pub(super) fn begin_ffn(
        &mut self,
        spec: &ExpertSpec,
        layout: &ExpertLayout,
        x: &Tensor,
        weights: &[f32],
        top_k: usize,
    ) -> Result<Ffn> {
        let (tokens, width) = x.dims2()?;
        if width != spec.hidden || weights.len() != tokens * top_k {
            let reason = format!(
                "expected x [n, {}] and n * {top_k} weights, got {:?} and {}",
                spec.hidden,
                x.dims(),
                weights.len()
            );
            return Err(Error::BadArgument { what: "x and weights", reason });
        }
        let caller = self.gpu.candle_stream();
        let x = x.contiguous()?;
        let y = match self.result.take().filter(|y| y.dims() == x.dims() && y.dtype() == x.dtype()) {
            Some(y) => y,
            // SAFETY: `combine` writes every element before anyone reads one.
            None => unsafe { Tensor::empty((tokens, spec.hidden), x.dtype(), x.device()) }?,
        };
        let (x_address, y_address) = (address_of(&x, &caller)?, address_of(&y, &caller)?);
        let many = self.reserve_ffn(spec, x.dtype(), tokens, top_k)?;
        self.compute.enter(&caller)?;
        let mut ffn = Ffn {
            spec: *spec,
            layout: match self.options.expansions.is_empty() {
                true => *layout,
                false => ExpertLayout::new(spec, ExpertFormat::Bf16),
            },
            x,
            x_address,
            y,
            y_address,
            weights: weights.to_vec(),
            tokens,
            top_k,
            summed: false,
            rows: false,
            gemm: None,
            caller,
        };
        if many {
            ffn.gemm = Some(self.prepare_x(&ffn)?);
        }
        Ok(ffn)
    }

    /// Memory for the activations of a step; says whether the GEMM multiplies.
    pub(super) fn reserve_ffn(
        &mut self,
        spec: &ExpertSpec,
        dtype: DType,
        tokens: usize,
        top_k: usize,
    ) -> Result<bool> {
        // F32 asks for precision, which the GEMM, in BF16, does not have.
        let many = tokens > MOST_GEMV_TOKENS && dtype != DType::F32;
        let h_row = if many { 2 * gemm_stride(spec.intermediate) } else { 4 * spec.intermediate };
        let rows = tokens * top_k;
        self.hidden.reserve(&self.gpu, rows * h_row)?;
        self.partial.reserve(&self.gpu, 4 * rows * spec.hidden)?;
        let on_input = spec.weight_on == WeightOn::Input;
        if many && (dtype != DType::BF16 || on_input || spec.hidden != gemm_stride(spec.hidden)) {
            let rows = if on_input { rows } else { tokens };
            self.rounded.reserve(&self.gpu, 2 * rows * gemm_stride(spec.hidden))?;
        }
        Ok(many)
    }

    /// Enqueues work, and with all of the step's work its sum: then `true`.
    pub(super) fn run_ffn(&mut self, ffn: &Ffn, work: &[WorkItem]) -> Result<bool> {
        let rows = (ffn.tokens * ffn.top_k) as u32;
        if let Some(bad) = work.iter().flat_map(|w| &w.assignments).find(|&&a| a >= rows) {
            let reason = format!("assignment {bad} of {rows}");
            return Err(Error::BadArgument { what: "work items", reason });
        }
        let (items, assignments) = device_items(&self.slots()?, work, ffn.layout.record_bytes)?;
        match ffn.gemm {
            Some(x) => self.multiply_many(ffn, x, &items, &assignments).map(|()| false),
            None => self.multiply(ffn, &items, &assignments),
        }
    }

    /// Enqueues the GEMVs, and with all of the step's work its sum: then `true`.
    fn multiply(&mut self, ffn: &Ffn, items: &[DeviceItem], assignments: &[u32]) -> Result<bool> {
        let most = items.iter().map(|i| i.count as usize).max().unwrap_or(0);
        let len = items.len();
        let on_input = ffn.spec.weight_on == WeightOn::Input;
        // Every assignment is served once, so this launch is then the only one.
        let whole = assignments.len() == ffn.weights.len() && !ffn.rows;
        let weights: &[f32] = if on_input || whole { &ffn.weights } else { &[] };
        let [items, assignments, weights] =
            self.upload_parts([bytes_of(items), bytes_of(assignments), bytes_of(weights)])?;
        let items = Items { layout: &ffn.layout, items, len, assignments, most, tokens: ffn.tokens };
        let h = self.hidden.address();
        let gate_up = GateUpArgs {
            items,
            activation: ffn.spec.activation,
            x: ffn.x_address,
            x_dtype: ffn.x.dtype(),
            top_k: ffn.top_k,
            input_weights: if on_input { weights } else { 0 },
            h,
        };
        let down = DownArgs { items, h, partial: self.partial.address() };
        let combine = self.combine_args(ffn, if on_input { 0 } else { weights });
        let stream = self.compute.stream();
        // SAFETY: x and y live in the step; items, assignments and weights were just uploaded on this stream; h and
        // partial have a row per assignment, which `run_ffn` checked; records are in slots that compute was made to
        // wait for.
        unsafe {
            self.kernels.gate_up(stream, &gate_up)?;
            match whole {
                true => self.kernels.down_combine(stream, &down, &combine)?,
                false => self.kernels.down(stream, &down)?,
            }
        }
        Ok(whole)
    }

    fn combine_args(&self, ffn: &Ffn, weights: u64) -> CombineArgs {
        CombineArgs {
            partial: self.partial.address(),
            weights,
            tokens: ffn.tokens,
            top_k: ffn.top_k,
            hidden: ffn.spec.hidden,
            y_dtype: ffn.y.dtype(),
            y: ffn.y_address,
        }
    }

    pub(super) fn finish_ffn(&mut self, ffn: Ffn) -> Result<Tensor> {
        if !ffn.summed {
            let weights = match ffn.spec.weight_on {
                WeightOn::Input => 0,
                WeightOn::Output => self.upload_parts([bytes_of(&ffn.weights)])?[0],
            };
            let args = self.combine_args(&ffn, weights);
            let stream = self.compute.stream();
            let begun = self.spans.begin(stream)?;
            // SAFETY: partial has a row per assignment, each written by `run`; y is `[tokens, hidden]` of its dtype.
            unsafe { self.kernels.combine(stream, &args) }?;
            self.spans.end(stream, begun, Queue::Compute, 0, || "sum".to_owned())?;
        }
        self.compute.leave(&ffn.caller)?;
        Ok(ffn.y)
    }

    /// Copies results of `assignments`, one row each, from the step's to `rows` (`pack`) or back.
    pub(super) fn move_rows(
        &mut self,
        ffn: &Ffn,
        assignments: &[u32],
        rows: &Tensor,
        pack: bool,
    ) -> Result<()> {
        let hidden = ffn.spec.hidden;
        let most = (ffn.tokens * ffn.top_k) as u32;
        if rows.dims() != [assignments.len(), hidden] || assignments.iter().any(|&a| a >= most) {
            let reason = format!("rows {:?} for {} of {most} assignments", rows.dims(), assignments.len());
            return Err(Error::BadArgument { what: "rows", reason });
        }
        let rows = address_of(rows, &ffn.caller)?;
        let [list] = self.upload_parts([bytes_of(assignments)])?;
        let partial = self.partial.address();
        let (from, to) = if pack { (partial, rows) } else { (rows, partial) };
        // SAFETY: both have rows of `hidden` floats, as many as was just checked; the list was just uploaded.
        unsafe {
            let stream = self.compute.stream();
            self.kernels.move_rows(stream, (from, to, list), (assignments.len(), hidden), pack)
        }
    }
}

/// Work items as the kernels read them, and their assignments in one list.
pub(super) fn device_items(
    slots: &Slots,
    work: &[WorkItem],
    bytes: usize,
) -> Result<(Vec<DeviceItem>, Vec<u32>)> {
    let mut items = Vec::with_capacity(work.len());
    let mut assignments = Vec::with_capacity(work.iter().map(|w| w.assignments.len()).sum());
    for item in work {
        items.push(DeviceItem {
            src: slots.address(item.slot, bytes)?,
            first: assignments.len() as u32,
            count: item.assignments.len() as u32,
            ..DeviceItem::default()
        });
        assignments.extend_from_slice(&item.assignments);
    }
    Ok((items, assignments))
}
