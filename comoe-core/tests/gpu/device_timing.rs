//! What device-driven steps cost, printed and not asserted: the experts' part of one token of Qwen3-30B-A3B (48 layers x
//! 128 experts, top-8, hidden 2048, intermediate 768, INT4), captured in a graph and replayed with ids that a copy puts
//! in place before each replay. Routing is simulated: uniform, or Zipf over a ranking of its own per layer.

use std::sync::Arc;
use std::time::Instant;

use candle_core::{DType, Device, Tensor};
use comoe_core::backend::cuda::CudaBackend;
use comoe_core::backend::{Backend, DeviceCounters, DeviceStep, DriverKind};
use comoe_core::pool::{Pool, PoolShape};
use comoe_core::store::{Directory, RecordIndex, RecordSource};
use comoe_core::{
    CacheOptions, Capacity, CudaOptions, ExpertCache, ExpertFormat, ExpertLayout, ExpertSpec, ExpertStore,
    PolicyKind, Result, cuda_device,
};
use cudarc::driver::result;

use crate::capture::captured;
use crate::conformance::{Experts, Noise};

const LAYERS: usize = 48;
const EXPERTS: usize = 128;
const TOP_K: usize = 8;
const HIDDEN: usize = 2048;
const IDS: usize = LAYERS * TOP_K;
const WARM: usize = 60;
const TIMED: usize = 60;

/// One random record under many names, so that memory fills at the speed of a copy.
struct Alike {
    directory: Directory,
    record: Vec<u8>,
}

impl RecordSource for Alike {
    fn directory(&self) -> &Directory {
        &self.directory
    }

    fn read(&self, _: RecordIndex, out: &mut [u8]) -> Result<()> {
        out.copy_from_slice(&self.record);
        Ok(())
    }
}

/// `[steps, LAYERS, TOP_K]` different experts a layer, drawn with weight `1 / rank^exponent`.
fn routing(steps: usize, exponent: f64, noise: &mut Noise) -> Vec<u32> {
    let rankings: Vec<Vec<u32>> = (0..LAYERS)
        .map(|_| {
            let mut left: Vec<u32> = (0..EXPERTS as u32).collect();
            (0..EXPERTS).map(|_| left.swap_remove(noise.below(left.len()))).collect()
        })
        .collect();
    let cumulative: Vec<f64> = (1..=EXPERTS)
        .scan(0.0, |sum, rank| {
            *sum += (rank as f64).powf(-exponent);
            Some(*sum)
        })
        .collect();
    let total = cumulative[EXPERTS - 1];
    let mut ids = Vec::with_capacity(steps * IDS);
    for _ in 0..steps {
        for ranking in &rankings {
            let start = ids.len();
            while ids.len() < start + TOP_K {
                let at = f64::from(noise.float().abs()) * total;
                let id = ranking[cumulative.partition_point(|&c| c < at).min(EXPERTS - 1)];
                if !ids[start..].contains(&id) {
                    ids.push(id);
                }
            }
        }
    }
    ids
}

fn sum(counters: &[DeviceCounters]) -> (u64, u64) {
    counters.iter().fold((0, 0), |s, c| (s.0 + c.accesses, s.1 + c.hits))
}

/// Copies one step's ids to where the graph reads them.
fn put(device: &Device, to: u64, from: u64) {
    let stream = device.as_cuda_device().expect("cuda").cuda_stream();
    // SAFETY: both are `IDS` u32 of tensors that outlive the test's last synchronisation.
    unsafe { result::memcpy_dtod_async(to, from, 4 * IDS, stream.cu_stream()) }.expect("a copy");
}

fn address(tensor: &Tensor) -> u64 {
    use cudarc::driver::DevicePtr;
    let (storage, _) = tensor.storage_and_layout();
    let candle_core::Storage::Cuda(storage) = &*storage else { panic!("not on the GPU") };
    let stream = storage.device.cuda_stream();
    storage.as_cuda_slice::<u32>().expect("u32").device_ptr(&stream).0
}

#[test]
#[ignore = "needs a CUDA device"]
fn timing_of_device_driven_decode() {
    let device = cuda_device(0).expect("a GPU");
    let spec = ExpertSpec::swiglu(HIDDEN, 768);
    let sample = Experts::random(spec, ExpertFormat::INT4, 1, 1, 7);
    let layout: ExpertLayout = sample.layout;
    let bytes = layout.record_bytes;
    let mut record = vec![0; bytes];
    sample.read(RecordIndex(0), &mut record).expect("a record");
    let directory = Directory::new((0..LAYERS).map(|l| (l, EXPERTS, bytes))).expect("a directory");
    let source = Arc::new(Alike { directory, record });
    let start = Instant::now();
    let cuda = device.as_cuda_device().expect("cuda");
    let mut backend = CudaBackend::new(cuda, source, CudaOptions::default()).expect("a backend");
    println!("{:?} in {:.1} s", backend.info(), start.elapsed().as_secs_f64());
    backend.allocate(LAYERS * EXPERTS, bytes).expect("slots");

    let mut noise = Noise(2);
    let x = Tensor::from_vec(noise.floats(HIDDEN, 1.0), (1, HIDDEN), &device).expect("x");
    let x = x.to_dtype(DType::BF16).expect("x");
    let weights = Tensor::from_vec(vec![0.125f32; TOP_K], (1, TOP_K), &device).expect("weights");
    let ids = Tensor::zeros((LAYERS, TOP_K), DType::U32, &device).expect("ids");
    let of_layer: Vec<Tensor> = (0..LAYERS).map(|l| ids.narrow(0, l, 1).expect("a row")).collect();
    println!("routing slots policy hit rate steps/s  us/layer  GB/s missed");
    for (name, exponent) in [("zipf", 1.0), ("uniform", 0.0)] {
        let trace = routing(WARM + TIMED, exponent, &mut noise);
        let trace = Tensor::from_vec(trace, (WARM + TIMED, IDS), &device).expect("a trace");
        let (to, from) = (address(&ids), address(&trace));
        let at = |step: usize| from + (4 * IDS * step) as u64;
        let slots = [128, 64, 32, 16, 8].into_iter();
        for (slots, policy) in slots.flat_map(|n| [(n, PolicyKind::Lru), (n, PolicyKind::Aged)]) {
            let shape = PoolShape::by_layer(slots * LAYERS, &[EXPERTS; LAYERS], 0);
            let records = LAYERS * EXPERTS;
            let empty = Pool::new(shape.clone(), records, |slots| policy.build(slots, records, TOP_K));
            let empty = empty.residency();
            let driver = backend.device_driver().expect("a driver");
            driver.take_over(&shape, &empty).expect("tables");
            let mut token = || {
                for (layer, ids) in of_layer.iter().enumerate() {
                    let (spec, layout, weights) = (&spec, &layout, &weights);
                    let step = DeviceStep {
                        layer,
                        spec,
                        layout,
                        x: &x,
                        ids,
                        weights,
                        ordinal: 0,
                        room: None,
                        guess: None,
                    };
                    driver.step(step).expect("a step");
                }
            };
            put(&device, to, at(0));
            token();
            let stream = cuda.cuda_stream();
            stream.synchronize().expect("warm");
            let (graph, ()) = captured(&device, token);
            let replay = |steps: std::ops::Range<usize>| {
                let start = Instant::now();
                for step in steps {
                    put(&device, to, at(step));
                    graph.launch().expect("launch");
                }
                stream.synchronize().expect("done");
                start.elapsed().as_secs_f64()
            };
            replay(1..WARM);
            let before = sum(&driver.counters().expect("counters"));
            let seconds = replay(WARM..WARM + TIMED);
            let after = sum(&driver.counters().expect("counters"));
            assert_eq!(driver.fault(true).expect("works"), None);
            let (accesses, hits) = (after.0 - before.0, after.1 - before.1);
            assert_eq!(accesses, (TIMED * IDS) as u64, "every replay was counted");
            println!(
                "{name:<8} {slots:>4} {policy:<5} {:>5.1} % {:>9.1} {:>9.2} {:>8.1}",
                100.0 * hits as f64 / accesses as f64,
                TIMED as f64 / seconds,
                seconds * 1e6 / (TIMED * LAYERS) as f64,
                (accesses - hits) as f64 * bytes as f64 / seconds / 1e9
            );
        }
    }
}

/// Which driver is the faster by the size of a record: layers of 8 experts, top-2, half of them in slots, uniform routing,
/// hidden 4096, INT4; the last row is Mixtral-8x7B's. Eager steps, a token is waited for. What `auto` goes by
/// (`COPIED_RECORD_BYTES`) is read off here.
#[test]
#[ignore = "needs a CUDA device"]
fn timing_of_both_drivers_by_record_size() {
    const LAYERS: usize = 4;
    const EXPERTS: usize = 8;
    const HIDDEN: usize = 4096;
    let device = cuda_device(0).expect("a GPU");
    let mut noise = Noise(5);
    println!("MB a record  missed/layer   host us/layer GB/s   device us/layer GB/s   device/host");
    for intermediate in [448, 896, 1792, 3584, 7168, 14336] {
        let spec = ExpertSpec::swiglu(HIDDEN, intermediate);
        let layout = ExpertLayout::new(&spec, ExpertFormat::INT4);
        let bytes = layout.record_bytes;
        let directory = Directory::new((0..LAYERS).map(|l| (l, EXPERTS, bytes))).expect("a directory");
        // Any bytes will do: nothing is looked at but the time. Scales of 0 make all weights 0.
        let source = Arc::new(Alike { directory, record: vec![0; bytes] });
        let x = Tensor::from_vec(noise.floats(HIDDEN, 1.0), (1, HIDDEN), &device).expect("x");
        let x = x.to_dtype(DType::BF16).expect("x");
        let weights = Tensor::from_vec(vec![0.5f32; 2], (1, 2), &device).expect("weights");
        let tokens = if intermediate > 4000 { 40 } else { 150 };
        let ids: Vec<Vec<Tensor>> = (0..tokens)
            .map(|_| {
                let layer = |_| {
                    let first = noise.below(EXPERTS);
                    let other = (first + 1 + noise.below(EXPERTS - 1)) % EXPERTS;
                    Tensor::from_vec(vec![first as u32, other as u32], (1, 2), &device).expect("ids")
                };
                (0..LAYERS).map(layer).collect()
            })
            .collect();
        let run = |driver| {
            let store = ExpertStore::from_source(source.clone(), vec![spec; LAYERS], ExpertFormat::INT4);
            let cache = ExpertCache::builder(store.expect("a store"), &device)
                .options(CacheOptions {
                    capacity: Capacity::Slots(LAYERS * EXPERTS / 2),
                    top_k: 2,
                    ..CacheOptions::default()
                })
                .policy(PolicyKind::Lru)
                .driver(driver)
                .build()
                .expect("a cache");
            let token = |ids: &[Tensor]| {
                let mut y = x.clone();
                for (layer, ids) in ids.iter().enumerate() {
                    y = cache.layer(layer).forward(&x, ids, &weights).expect("a step");
                }
                y.to_dtype(DType::F32).and_then(|y| y.flatten_all()?.to_vec1::<f32>()).expect("y");
            };
            ids.iter().take(tokens / 4).for_each(|ids| token(ids));
            cache.reset_stats();
            let start = Instant::now();
            ids.iter().skip(tokens / 4).for_each(|ids| token(ids));
            let seconds = start.elapsed().as_secs_f64();
            let stats = cache.stats();
            let steps = stats.steps as f64;
            (1e6 * seconds / steps, stats.misses() as f64 / steps, stats.bytes_moved as f64 / seconds / 1e9)
        };
        let ((host, missed, host_rate), (dev, again, dev_rate)) =
            (run(DriverKind::Host), run(DriverKind::Device));
        println!(
            "{:>11.1} {missed:>6.3} {again:>6.3} {host:>14.1} {host_rate:>5.1} {dev:>16.1} {dev_rate:>5.1} {:>12.3}",
            bytes as f64 / 1e6,
            dev / host
        );
    }
}
