//! One layer step's work on the CPU: `begin`, `run`, `finish`.

use std::ops::Deref;

use candle_core::{CpuStorage, DType, Device, Storage, Tensor};
use half::{bf16, f16};
use rayon::prelude::*;

use super::kernels::{self, Call, Inputs, Scratch, padded};
use crate::backend::{Work, WorkItem};
use crate::error::{Error, Result};
use crate::expert::{ExpertLayout, ExpertSpec, WeightOn};
use crate::store::Directory;

/// Floats that a buffer may keep between steps (64 MiB); what a long prompt needed goes back.
const KEEP_FLOATS: usize = 16 << 20;

/// Floats of a result above which it is combined on several threads.
const PARALLEL_FLOATS: usize = 1 << 17;

/// A step under way, and buffers kept from step to step.
#[derive(Default)]
pub(in crate::backend) struct Step {
    kind: Option<Kind>,
    /// Which assignments have been served.
    served: Vec<bool>,
    /// `[n, padded(hidden)]`, the input in F32.
    x: Vec<f32>,
    /// `[n * k]`
    weights: Vec<f32>,
    /// `[n * k, hidden]`: every assignment's result.
    partial: Vec<f32>,
    /// `[assignments, padded(hidden)]`: inputs with their weight multiplied in, for [`WeightOn::Input`].
    weighted: Vec<f32>,
    /// Rows of the input, item after item.
    rows: Vec<u32>,
    /// Result of a gather.
    gathered: Vec<u8>,
    scratch: Scratch,
}

#[derive(Clone, Copy)]
struct Ffn {
    spec: ExpertSpec,
    layout: ExpertLayout,
    tokens: usize,
    top_k: usize,
    dtype: DType,
}

#[expect(clippy::large_enum_variant, reason = "there is one, and boxing it would allocate in every step")]
enum Kind {
    Ffn(Ffn),
    Gather { bytes: usize, dtype: DType, shape: Vec<usize> },
}

fn refused(what: &'static str, reason: impl Into<String>) -> Error {
    Error::BadArgument { what, reason: reason.into() }
}

impl Step {
    pub(in crate::backend) fn begin(&mut self, work: Work<'_>) -> Result<()> {
        self.kind = None;
        self.served.clear();
        match work {
            Work::Ffn { spec, layout, x, weights, top_k } => {
                let (tokens, hidden) = x.dims2()?;
                if hidden != spec.hidden {
                    return Err(refused("x", format!("expected [n, {}], found [n, {hidden}]", spec.hidden)));
                }
                if weights.len() != tokens * top_k {
                    let found = weights.len();
                    let reason = format!("expected {tokens} tokens of {top_k} weights, found {found}");
                    return Err(refused("weights", reason));
                }
                if *layout != ExpertLayout::new(spec, layout.format) {
                    return Err(refused("layout", "the record's layout is not that of its spec"));
                }
                read_rows(x, padded(hidden), &mut self.x)?;
                self.weights.clear();
                self.weights.extend_from_slice(weights);
                self.partial.resize(weights.len() * hidden, 0.0);
                self.served.resize(weights.len(), false);
                self.kind =
                    Some(Kind::Ffn(Ffn { spec: *spec, layout: *layout, tokens, top_k, dtype: x.dtype() }));
            }
            Work::Gather { assignments, dtype, shape } => {
                let bytes = shape.iter().product::<usize>() * dtype.size_in_bytes();
                if bytes == 0 {
                    return Err(refused("shape", format!("{shape:?} of {dtype:?} has no bytes")));
                }
                self.gathered.resize(assignments * bytes, 0);
                self.served.resize(assignments, false);
                let shape = std::iter::once(assignments).chain(shape.iter().copied()).collect();
                self.kind = Some(Kind::Gather { bytes, dtype, shape });
            }
        }
        Ok(())
    }

    /// Runs `items`, whose slots' bytes `open` hands out.
    pub(in crate::backend) fn run<S: Deref<Target = [u8]>>(
        &mut self,
        directory: &Directory,
        items: &[WorkItem],
        open: impl Fn(&WorkItem) -> Result<S>,
    ) -> Result<()> {
        let kind = self.kind.as_ref().ok_or_else(|| refused("run", "no work was begun"))?;
        let mut slots = Vec::with_capacity(items.len());
        for item in items {
            slots.push(open(item)?);
            for &a in &item.assignments {
                match self.served.get_mut(a as usize) {
                    Some(served) if !*served => *served = true,
                    Some(_) => return Err(refused("run", format!("assignment {a} is served twice"))),
                    None => {
                        let n = self.served.len();
                        return Err(refused("run", format!("there is no assignment {a}, only {n}")));
                    }
                }
            }
        }
        match *kind {
            Kind::Gather { bytes, .. } => {
                for (item, slot) in items.iter().zip(&slots) {
                    let record_bytes = directory.record_bytes(item.record);
                    if bytes > record_bytes {
                        let reason = format!("{bytes} bytes asked of records of {record_bytes}");
                        return Err(refused("shape", reason));
                    }
                    for &a in &item.assignments {
                        self.gathered[a as usize * bytes..][..bytes].copy_from_slice(&slot[..bytes]);
                    }
                }
                Ok(())
            }
            Kind::Ffn(ffn) => self.ffn(&ffn, items, &slots),
        }
    }

    fn ffn<S: Deref<Target = [u8]>>(&mut self, ffn: &Ffn, items: &[WorkItem], slots: &[S]) -> Result<()> {
        let Ffn { spec, layout, top_k, .. } = *ffn;
        if let Some(slot) = slots.iter().find(|slot| slot.len() < layout.record_bytes) {
            let reason = format!("a record of {} bytes, slots of {}", layout.record_bytes, slot.len());
            return Err(refused("layout", reason));
        }
        let stride = padded(spec.hidden);
        let assignments = items.iter().flat_map(|item| &item.assignments);
        self.rows.clear();
        let data = match spec.weight_on {
            WeightOn::Output => {
                self.rows.extend(assignments.map(|a| a / top_k as u32));
                &self.x
            }
            WeightOn::Input => {
                self.weighted.clear();
                for &a in assignments {
                    let x = &self.x[a as usize / top_k * stride..][..stride];
                    let weight = self.weights[a as usize];
                    self.weighted.extend(x.iter().map(|x| x * weight));
                }
                self.rows.extend(0..(self.weighted.len() / stride) as u32);
                &self.weighted
            }
        };
        let mut at = 0;
        let calls: Vec<_> = items
            .iter()
            .zip(slots)
            .map(|(item, slot)| {
                let rows = &self.rows[at..at + item.assignments.len()];
                at += rows.len();
                Call { record: &slot[..layout.record_bytes], rows }
            })
            .collect();
        let (partial, hidden) = (&mut self.partial, spec.hidden);
        let inputs = Inputs { data, stride };
        kernels::ffn(&layout, spec.activation, inputs, &calls, &mut self.scratch, |call, i, y| {
            let a = items[call].assignments[i] as usize;
            partial[a * hidden..][..hidden].copy_from_slice(y);
        });
        Ok(())
    }

    pub(in crate::backend) fn finish(&mut self) -> Result<Tensor> {
        let kind = self.kind.take().ok_or_else(|| refused("finish", "no work was begun"))?;
        if let Some(a) = self.served.iter().position(|served| !served) {
            let n = self.served.len();
            return Err(refused("finish", format!("assignment {a} of {n} was not served")));
        }
        let y = match kind {
            Kind::Gather { dtype, shape, .. } => {
                Tensor::from_raw_buffer(&self.gathered, dtype, &shape, &Device::Cpu)?
            }
            Kind::Ffn(Ffn { spec, tokens, top_k, dtype, .. }) => {
                let y = self.combine(&spec, tokens, top_k);
                let shape = (tokens, spec.hidden);
                match dtype {
                    DType::BF16 => {
                        Tensor::from_vec(y.into_iter().map(bf16::from_f32).collect(), shape, &Device::Cpu)?
                    }
                    DType::F16 => {
                        Tensor::from_vec(y.into_iter().map(f16::from_f32).collect(), shape, &Device::Cpu)?
                    }
                    _ => Tensor::from_vec(y, shape, &Device::Cpu)?,
                }
            }
        };
        self.shrink();
        Ok(y)
    }

    /// Ends work of which only `assignments` were served: their results, `[assignments, hidden]`.
    pub(in crate::backend) fn finish_rows(&mut self, assignments: &[u32]) -> Result<Tensor> {
        let Some(Kind::Ffn(Ffn { spec, .. })) = self.kind.take() else {
            return Err(refused("finish", "no experts' work was begun"));
        };
        let served = self.served.iter().filter(|served| **served).count();
        if served != assignments.len()
            || !assignments.iter().all(|&a| self.served.get(a as usize) == Some(&true))
        {
            let reason = format!("{served} assignments were served, {} are asked for", assignments.len());
            return Err(refused("finish", reason));
        }
        let row = |&a: &u32| &self.partial[a as usize * spec.hidden..][..spec.hidden];
        let rows: Vec<f32> = assignments.iter().flat_map(row).copied().collect();
        self.shrink();
        Ok(Tensor::from_vec(rows, (assignments.len(), spec.hidden), &Device::Cpu)?)
    }

    /// Takes results of assignments that were served elsewhere.
    pub(in crate::backend) fn accept(&mut self, assignments: &[u32], rows: &Tensor) -> Result<()> {
        let Some(Kind::Ffn(Ffn { spec, .. })) = &self.kind else {
            return Err(refused("accept", "no experts' work was begun"));
        };
        let expected = [assignments.len(), spec.hidden];
        if rows.dims() != expected {
            return Err(refused("accept", format!("expected rows {expected:?}, found {:?}", rows.dims())));
        }
        let values = rows.flatten_all()?.to_vec1::<f32>()?;
        for (&a, row) in assignments.iter().zip(values.chunks(spec.hidden)) {
            match self.served.get_mut(a as usize) {
                Some(served) if !*served => *served = true,
                _ => {
                    return Err(refused(
                        "accept",
                        format!("assignment {a} is served already, or there is none"),
                    ));
                }
            }
            self.partial[a as usize * spec.hidden..][..spec.hidden].copy_from_slice(row);
        }
        Ok(())
    }

    /// Gives back what a long prompt needed.
    fn shrink(&mut self) {
        for buffer in [&mut self.x, &mut self.partial, &mut self.weighted] {
            if buffer.capacity() > KEEP_FLOATS {
                *buffer = Vec::new();
            }
        }
        if self.gathered.capacity() > 4 * KEEP_FLOATS {
            self.gathered = Vec::new();
        }
        self.scratch.shrink(KEEP_FLOATS);
    }

    /// `y[t] = sum over j = 0, 1, .. of weights[t, j] * partial[t, j]`, or without the weights when they are in the
    /// input already.
    fn combine(&self, spec: &ExpertSpec, tokens: usize, top_k: usize) -> Vec<f32> {
        let hidden = spec.hidden;
        let mut y = vec![0.0; tokens * hidden];
        let token = |t: usize, y: &mut [f32]| {
            for (j, part) in self.partial[t * top_k * hidden..][..top_k * hidden].chunks(hidden).enumerate() {
                let weight = match spec.weight_on {
                    WeightOn::Output => self.weights[t * top_k + j],
                    WeightOn::Input => 1.0,
                };
                for (y, p) in y.iter_mut().zip(part) {
                    *y += weight * p;
                }
            }
        };
        if y.len() < PARALLEL_FLOATS {
            y.chunks_mut(hidden.max(1)).enumerate().for_each(|(t, y)| token(t, y));
        } else {
            y.par_chunks_mut(hidden).enumerate().for_each(|(t, y)| token(t, y));
        }
        y
    }
}

/// Copies `x`, `[n, hidden]`, to rows of `stride` floats, padded with zeros.
fn read_rows(x: &Tensor, stride: usize, out: &mut Vec<f32>) -> Result<()> {
    let x = x.contiguous()?;
    let (tokens, hidden) = x.dims2()?;
    let (storage, layout) = x.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else {
        return Err(refused(
            "x",
            format!("it is on {:?}, the experts are on the CPU", x.device().location()),
        ));
    };
    let from = layout.start_offset();
    out.clear();
    out.reserve(tokens * stride);
    let row = |t: usize| from + t * hidden..from + (t + 1) * hidden;
    for t in 0..tokens {
        match storage {
            CpuStorage::F32(v) => out.extend_from_slice(&v[row(t)]),
            CpuStorage::F16(v) => out.extend(v[row(t)].iter().map(|v| v.to_f32())),
            CpuStorage::BF16(v) => out.extend(v[row(t)].iter().map(|v| v.to_f32())),
            _ => return Err(refused("x", format!("{:?}; use F32, F16 or BF16", x.dtype()))),
        }
        out.resize((t + 1) * stride, 0.0);
    }
    Ok(())
}
