//! Packing one expert of Qwen3-30B-A3B's shape (hidden 2048, intermediate 768: 4.7 million weights) from BF16, as a
//! checkpoint has it, into a record of each format, and decoding the record again. Throughput counts weights, so that
//! the formats stand beside each other; BF16, which only copies, is the floor. All of rayon's threads.

use std::hint::black_box;
use std::time::Duration;

use comoe_bench::noise::Noise;
use comoe_bench::shape::Shape;
use comoe_core::format::record::{ExpertWeights, Weights, pack_expert, unpack_expert};
use comoe_core::{ExpertFormat, ExpertLayout};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use half::bf16;

fn record_packing(c: &mut Criterion) {
    let spec = Shape::named("qwen3-30b-a3b").expect("a known shape").spec;
    let mut noise = Noise::new(1);
    let mut matrix = || -> Vec<bf16> {
        noise.floats(spec.hidden * spec.intermediate).into_iter().map(|v| bf16::from_f32(0.03 * v)).collect()
    };
    let [gate, up, down] = [matrix(), matrix(), matrix()];
    let weights = ExpertWeights {
        gate: Weights::Bf16(&gate),
        up: Weights::Bf16(&up),
        down: Weights::Bf16(&down),
        bias: None,
    };
    let mut group = c.benchmark_group("record_packing");
    group.throughput(Throughput::Elements(3 * (spec.hidden * spec.intermediate) as u64));
    for format in [ExpertFormat::Bf16, ExpertFormat::INT8, ExpertFormat::INT4] {
        let layout = ExpertLayout::new(&spec, format);
        let mut record = vec![0; layout.record_bytes];
        group.bench_function(format!("pack/{format}"), |b| {
            b.iter(|| pack_expert(&layout, black_box(&weights), &mut record).expect("finite weights"));
        });
        group.bench_function(format!("unpack/{format}"), |b| {
            b.iter(|| unpack_expert(&layout, black_box(&record)).expect("a whole record"));
        });
    }
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_millis(1200));
    targets = record_packing
}
criterion_main!(benches);
