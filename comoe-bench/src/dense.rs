//! The dense part of a shape, random: a safetensors file as a checkpoint has it, without experts.

use std::borrow::Cow;
use std::path::Path;

use half::bf16;
use rayon::prelude::*;
use safetensors::{Dtype, View};

use crate::error::{Error, Result};
use crate::noise::Noise;
use crate::shape::Shape;

/// Bytes that one task fills.
const PART: usize = 1 << 20;

/// Writes the BF16 weights that surround `shape`'s experts to `path`; returns their bytes.
///
/// Matrices have deviation `1 / sqrt(columns)` and norms are 1, so that every block's output is about as large as its
/// normed input. The embedding has deviation 4: what random attention adds to all tokens alike stays small beside what
/// tells them apart, also after many layers, and routers choose every expert about as often.
///
/// # Errors
/// [`Error::NoDensePart`] where a shape's is not known, [`Error::Weights`] when the file cannot be written.
pub fn write_dense(path: &Path, shape: &Shape, seed: u64) -> Result<u64> {
    let tensors = tensors(shape)?;
    let bytes = tensors.iter().map(|(_, t)| t.bytes() as u64).sum();
    let views = tensors.into_iter().enumerate().map(|(i, (name, tensor))| {
        let seed = seed.wrapping_add(i as u64);
        (name, Random { seed, ..tensor })
    });
    safetensors::serialize_to_file(views, None, path)
        .map_err(|e| Error::Weights { path: path.to_owned(), reason: e.to_string() })?;
    Ok(bytes)
}

fn tensors(shape: &Shape) -> Result<Vec<(String, Random)>> {
    let dense = shape.dense_part()?;
    let hidden = shape.spec.hidden;
    let random = |dims: &[usize], deviation: f64| Random { dims: dims.to_vec(), deviation, seed: 0 };
    let matrix = |rows: usize, cols: usize| random(&[rows, cols], (cols as f64).powf(-0.5));
    let ones = |n: usize| random(&[n], 0.0);
    let mut all = vec![
        ("model.embed_tokens.weight".to_owned(), random(&[dense.vocab, hidden], 4.0)),
        ("model.norm.weight".to_owned(), ones(hidden)),
        ("lm_head.weight".to_owned(), matrix(dense.vocab, hidden)),
    ];
    let (q, kv) = (dense.heads * dense.head_dim, dense.kv_heads * dense.head_dim);
    for layer in 0..shape.first + shape.layers {
        let router = if dense.qk_norm { "mlp.gate" } else { "block_sparse_moe.gate" };
        let mut parts = vec![
            ("self_attn.q_proj", matrix(q, hidden)),
            ("self_attn.k_proj", matrix(kv, hidden)),
            ("self_attn.v_proj", matrix(kv, hidden)),
            ("self_attn.o_proj", matrix(hidden, q)),
            ("input_layernorm", ones(hidden)),
            ("post_attention_layernorm", ones(hidden)),
            (router, matrix(shape.experts, hidden)),
        ];
        if dense.qk_norm {
            parts.extend(["self_attn.q_norm", "self_attn.k_norm"].map(|name| (name, ones(dense.head_dim))));
        }
        all.extend(parts.into_iter().map(|(name, t)| (format!("model.layers.{layer}.{name}.weight"), t)));
    }
    Ok(all)
}

/// A tensor that is made when it is written.
struct Random {
    dims: Vec<usize>,
    /// Of the values; 0: all are one.
    deviation: f64,
    seed: u64,
}

impl Random {
    fn bytes(&self) -> usize {
        2 * self.dims.iter().product::<usize>()
    }
}

impl View for Random {
    fn dtype(&self) -> Dtype {
        Dtype::BF16
    }

    fn shape(&self) -> &[usize] {
        &self.dims
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let mut out = vec![0; self.bytes()];
        // Uniform in -1..1 has a deviation of 1 / sqrt(3).
        let scale = (self.deviation * 3f64.sqrt()) as f32;
        out.par_chunks_mut(PART).enumerate().for_each(|(i, part)| {
            let mut noise = Noise::of(self.seed, i as u64);
            for value in part.as_chunks_mut::<2>().0 {
                let v = if self.deviation == 0.0 { 1.0 } else { scale * noise.float() };
                *value = bf16::from_f32(v).to_le_bytes();
            }
        });
        Cow::Owned(out)
    }

    fn data_len(&self) -> usize {
        self.bytes()
    }
}
