//! The dense part of a checkpoint: everything that every token needs. Experts are refused here.

use candle_core::{DType, Device, Tensor};
use comoe_core::store::{Checkpoint, Naming, TensorRole, TensorView};
use half::f16;
use safetensors::Dtype;

use super::Progress;
use crate::error::{Error, Result};

/// Loads dense weights from a checkpoint to a device, in the dtype that the model computes in.
pub struct DenseWeights<'a> {
    checkpoint: &'a Checkpoint,
    naming: &'a Naming,
    dtype: DType,
    device: &'a Device,
    done: u64,
    total: u64,
    elements: u64,
    progress: &'a (dyn Fn(Progress) + Sync),
}

impl<'a> DenseWeights<'a> {
    /// A loader over `checkpoint`, whose expert tensors `naming` knows. `progress` hears of every tensor.
    ///
    /// # Errors
    /// [`Error::Core`] for a tensor name that looks like an expert's but is none that `naming` knows.
    pub fn new(
        checkpoint: &'a Checkpoint,
        naming: &'a Naming,
        dtype: DType,
        device: &'a Device,
        progress: &'a (dyn Fn(Progress) + Sync),
    ) -> Result<Self> {
        let (mut total, mut elements) = (0, 0);
        for name in checkpoint.names() {
            if naming.classify(name)? == TensorRole::Dense {
                let view = checkpoint.tensor(name)?;
                total += view.bytes.len() as u64;
                elements += view.shape.iter().map(|d| *d as u64).product::<u64>();
            }
        }
        Ok(Self { checkpoint, naming, dtype, device, done: 0, total, elements, progress })
    }

    /// Bytes that all of the checkpoint's dense weights take on the device.
    pub fn device_bytes(&self) -> u64 {
        self.elements * self.dtype.size_in_bytes() as u64
    }

    /// Whether the checkpoint holds `name`.
    pub fn contains(&self, name: &str) -> bool {
        self.checkpoint.contains(name)
    }

    /// Whether the checkpoint holds `name` in this shape.
    pub fn has_shape(&self, name: &str, shape: &[usize]) -> bool {
        self.checkpoint.tensor(name).is_ok_and(|view| view.shape == shape)
    }

    /// What tensors are loaded as, unless another dtype is asked for.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The tensor `name`, which must have this shape.
    ///
    /// # Errors
    /// [`Error::ExpertAsDense`] for an expert's tensor; [`Error::Core`] when it is missing, of another shape, or no
    /// floating-point tensor.
    pub fn tensor(&mut self, name: &str, shape: &[usize]) -> Result<Tensor> {
        self.tensor_as(name, shape, self.dtype)
    }

    /// The same, in another dtype than the model's.
    ///
    /// # Errors
    /// As [`Self::tensor`].
    pub fn tensor_as(&mut self, name: &str, shape: &[usize], dtype: DType) -> Result<Tensor> {
        self.stacked_as(&[(name.to_owned(), shape[0])], &shape[1..], dtype)
    }

    /// Tensors with equal trailing dimensions, one above the other as one tensor: `(name, rows)` each.
    ///
    /// # Errors
    /// As [`Self::tensor`].
    pub fn stacked(&mut self, parts: &[(String, usize)], trailing: &[usize]) -> Result<Tensor> {
        self.stacked_as(parts, trailing, self.dtype)
    }

    fn stacked_as(&mut self, parts: &[(String, usize)], trailing: &[usize], dtype: DType) -> Result<Tensor> {
        let views = parts
            .iter()
            .map(|(name, rows)| Ok((name.as_str(), self.view(name, *rows, trailing)?)))
            .collect::<Result<Vec<_>>>()?;
        let mut shape = vec![parts.iter().map(|(_, rows)| rows).sum()];
        shape.extend_from_slice(trailing);
        let bytes: usize = views.iter().map(|(_, v)| v.bytes.len()).sum();

        let stored = candle_dtype(views[0].1.dtype);
        let tensor = if stored == Some(dtype) && views.iter().all(|(_, v)| v.dtype == views[0].1.dtype) {
            match views.as_slice() {
                [(_, one)] => Tensor::from_raw_buffer(one.bytes, dtype, &shape, self.device)?,
                many => {
                    let joined: Vec<&[u8]> = many.iter().map(|(_, v)| v.bytes).collect();
                    Tensor::from_raw_buffer(&joined.concat(), dtype, &shape, self.device)?
                }
            }
        } else {
            let mut values = Vec::with_capacity(shape.iter().product());
            for (name, view) in &views {
                widen(name, view, &mut values)?;
            }
            Tensor::from_vec(values, shape, &Device::Cpu)?.to_dtype(dtype)?.to_device(self.device)?
        };
        self.done += bytes as u64;
        (self.progress)(Progress::Dense { done: self.done, total: self.total });
        Ok(tensor)
    }

    fn view(&self, name: &str, rows: usize, trailing: &[usize]) -> Result<TensorView<'a>> {
        if matches!(self.naming.classify(name)?, TensorRole::Expert(_)) {
            return Err(Error::ExpertAsDense { name: name.to_owned() });
        }
        let view = self.checkpoint.tensor(name)?;
        if view.shape.split_first() != Some((&rows, trailing)) {
            let mut expected = vec![rows];
            expected.extend_from_slice(trailing);
            let reason = format!(
                "expected shape {expected:?} by config.json, found {:?} in {}",
                view.shape,
                view.file.display()
            );
            return Err(comoe_core::Error::bad_tensor(name, reason).into());
        }
        Ok(view)
    }
}

fn candle_dtype(dtype: Dtype) -> Option<DType> {
    match dtype {
        Dtype::F32 => Some(DType::F32),
        Dtype::BF16 => Some(DType::BF16),
        Dtype::F16 => Some(DType::F16),
        _ => None,
    }
}

/// Appends the elements of a tensor as F32: exact for BF16, F16 and F32.
fn widen(name: &str, view: &TensorView<'_>, out: &mut Vec<f32>) -> Result<()> {
    let pairs = view.bytes.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]]));
    match view.dtype {
        Dtype::BF16 => out.extend(pairs.map(|b| f32::from_bits(u32::from(b) << 16))),
        Dtype::F16 => out.extend(pairs.map(|b| f16::from_bits(b).to_f32())),
        Dtype::F32 => {
            let words = view.bytes.chunks_exact(4);
            out.extend(words.map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])));
        }
        other => {
            let reason = format!(
                "expected BF16, F16 or F32, found {other:?} in {}: quantised dense weights are not supported",
                view.file.display()
            );
            return Err(comoe_core::Error::bad_tensor(name, reason).into());
        }
    }
    Ok(())
}
