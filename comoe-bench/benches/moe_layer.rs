//! One MoE layer of Qwen3-30B-A3B's shape, INT4, one token, top-8 of 128 experts uniform at random, by number of slots:
//! with all 128 (the resident run, against which the others stand) down to 8, where next to nothing hits. On the CPU,
//! and on the first GPU when there is one and feature `cuda` is on.

use std::sync::Arc;
use std::time::Duration;

use candle_core::{DType, Device, Tensor};
use comoe_bench::noise::Noise;
use comoe_bench::shape::Shape;
use comoe_bench::synth::{self, SynthSource};
use comoe_core::store::RecordSource;
use comoe_core::{Capacity, ExpertCache, ExpertFormat};
use criterion::{BatchSize, Criterion, criterion_group, criterion_main};

fn moe_layer(c: &mut Criterion) {
    let shape = Shape::named("qwen3-30b-a3b").and_then(|s| s.with_layers(1)).expect("a known shape");
    let format = ExpertFormat::INT4;
    let source = SynthSource::new(&shape, format, 1).and_then(SynthSource::into_memory).expect("experts");
    let source: Arc<dyn RecordSource> = Arc::new(source);
    let mut noise = Noise::new(2);
    let x =
        Tensor::from_vec(noise.floats(shape.spec.hidden), (1, shape.spec.hidden), &Device::Cpu).expect("x");
    let weights = Tensor::full(0.125f32, (1, shape.top_k), &Device::Cpu).expect("weights");
    for device in std::iter::once(Device::Cpu).chain(comoe_core::cuda_device(0).ok()) {
        let name = if device.is_cpu() { "cpu" } else { "cuda" };
        let mut group = c.benchmark_group(format!("moe_layer/{name}"));
        let dtype = if device.is_cpu() { DType::F32 } else { DType::BF16 };
        let x = x.to_dtype(dtype).and_then(|x| x.to_device(&device)).expect("x");
        for slots in [128, 64, 32, 16, 8] {
            let store = synth::store(&shape, format, source.clone()).expect("a store");
            let cache = ExpertCache::builder(store, &device)
                .capacity(Capacity::Slots(slots))
                .top_k(shape.top_k)
                .build()
                .expect("a cache");
            let step = |ids: Vec<u32>| {
                let ids = Tensor::from_vec(ids, (1, shape.top_k), &Device::Cpu).expect("ids");
                let y = cache.layer(0).forward(&x, &ids, &weights).expect("a step");
                device.synchronize().expect("the step runs");
                y
            };
            // Every expert once, so that nothing is missing that has a slot.
            (0..16).for_each(|i| drop(step((8 * i..8 * i + 8).collect())));
            group.bench_function(format!("{slots} slots"), |b| {
                b.iter_batched(|| noise.distinct(shape.experts, shape.top_k), step, BatchSize::SmallInput);
            });
        }
        group.finish();
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_millis(1500));
    targets = moe_layer
}
criterion_main!(benches);
