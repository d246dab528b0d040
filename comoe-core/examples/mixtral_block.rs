//! Another candle project's MoE block, with its experts handed to an [`ExpertCache`].
//!
//! The shape is that of candle-transformers' Mixtral, made small, with random weights. What a project changes is
//! between the two rulers: it keeps its router and gives everything after top-k to the cache.
//!
//! `cargo run --release -p comoe-core --example mixtral_block`, and on a GPU
//! `cargo run --release -p comoe-core --example mixtral_block --features cuda -- cuda`

use std::collections::HashMap;

use candle_core::{D, DType, Device, Module, Result, Tensor};
use candle_nn::{Linear, VarBuilder, linear_no_bias};
use comoe_core::store::Naming;
use comoe_core::{Capacity, ExpertCache, ExpertStore, PolicyKind};

const HIDDEN: usize = 256;
const INTERMEDIATE: usize = 896;
const EXPERTS: usize = 8;
const TOP_K: usize = 2;

// ---------------------------------------------------------------------------------------------------------------
struct MoeBlock<'a> {
    gate: Linear,
    experts: &'a ExpertCache,
    layer: usize,
}

impl<'a> MoeBlock<'a> {
    fn new(vb: VarBuilder, experts: &'a ExpertCache, layer: usize) -> Result<Self> {
        Ok(Self { gate: linear_no_bias(HIDDEN, EXPERTS, vb.pp("gate"))?, experts, layer })
    }

    /// `[tokens, hidden]` to `[tokens, hidden]`.
    fn forward(&self, x: &Tensor) -> comoe_core::Result<Tensor> {
        let probabilities = candle_nn::ops::softmax_last_dim(&self.gate.forward(x)?)?;
        let ids = probabilities.arg_sort_last_dim(false)?.narrow(D::Minus1, 0, TOP_K)?.contiguous()?;
        let weights = probabilities.gather(&ids, D::Minus1)?;
        let weights = weights.broadcast_div(&weights.sum_keepdim(D::Minus1)?)?;
        self.experts.layer(self.layer).forward(x, &ids, &weights)
    }
}
// ---------------------------------------------------------------------------------------------------------------

/// What the block computes, written with candle's own operations over all experts.
fn reference(weights: &HashMap<String, Tensor>, x: &Tensor) -> Result<Tensor> {
    let w =
        |name: &str| weights[&format!("model.layers.0.block_sparse_moe.{name}.weight")].to_dtype(DType::F32);
    let probabilities = candle_nn::ops::softmax_last_dim(&x.matmul(&w("gate")?.t()?)?)?;
    let sorted = probabilities.arg_sort_last_dim(false)?.to_vec2::<u32>()?;
    let probabilities = probabilities.to_vec2::<f32>()?;
    let mut rows = Vec::new();
    for (t, order) in sorted.iter().enumerate() {
        let x = x.narrow(0, t, 1)?;
        let total: f32 = order[..TOP_K].iter().map(|&e| probabilities[t][e as usize]).sum();
        let mut y = x.zeros_like()?;
        for &e in &order[..TOP_K] {
            let part = |n: &str| w(&format!("experts.{e}.{n}"));
            let h = (x.matmul(&part("w1")?.t()?)?.silu()? * x.matmul(&part("w3")?.t()?)?)?;
            y = (y + (h.matmul(&part("w2")?.t()?)? * f64::from(probabilities[t][e as usize] / total))?)?;
        }
        rows.push(y);
    }
    Tensor::cat(&rows, 0)
}

fn main() -> comoe_core::Result<()> {
    // A plain device, as any candle project makes it.
    let device = match std::env::args().nth(1).as_deref() {
        Some("cuda") => Device::new_cuda(0)?,
        _ => Device::Cpu,
    };
    let prefix = "model.layers.0.block_sparse_moe";
    let random = |rows: usize, cols: usize| {
        Tensor::randn(0f32, 1.0 / (cols as f32).sqrt(), (rows, cols), &device)?.to_dtype(DType::BF16)
    };
    let mut weights = HashMap::from([(format!("{prefix}.gate.weight"), random(EXPERTS, HIDDEN)?)]);
    for e in 0..EXPERTS {
        weights.insert(format!("{prefix}.experts.{e}.w1.weight"), random(INTERMEDIATE, HIDDEN)?);
        weights.insert(format!("{prefix}.experts.{e}.w3.weight"), random(INTERMEDIATE, HIDDEN)?);
        weights.insert(format!("{prefix}.experts.{e}.w2.weight"), random(HIDDEN, INTERMEDIATE)?);
    }
    let file = std::env::temp_dir().join(format!("mixtral-block-{}.safetensors", std::process::id()));
    candle_core::safetensors::save(&weights, &file)?;

    let store = ExpertStore::open(&[&file], &Naming::mixtral())?;
    let cache = ExpertCache::builder(store, &device)
        .capacity(Capacity::Fraction(0.5))
        .policy(PolicyKind::Lru)
        .top_k(TOP_K)
        .build()?;
    let vb = VarBuilder::from_tensors(weights.clone(), DType::F32, &device).pp(prefix);
    let block = MoeBlock::new(vb, &cache, 0)?;

    let mut worst = 0f32;
    for _ in 0..64 {
        let x = Tensor::randn(0f32, 1.0, (3, HIDDEN), &device)?;
        let difference =
            (block.forward(&x)? - reference(&weights, &x)?)?.abs()?.max_all()?.to_scalar::<f32>()?;
        worst = worst.max(difference);
    }
    println!("on {}\n{}", cache.backend_info().device, cache.stats());
    println!("largest difference from plain candle: {worst:.1e}");
    assert!(worst < 1e-4);
    let _ = std::fs::remove_file(&file);
    Ok(())
}
