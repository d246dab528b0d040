//! The CUDA backend: the conformance suite in every memory situation, faults that must show or must not, and what is
//! printed for people.

use std::sync::Arc;
use std::time::Instant;

use candle_core::{DType, Device, Tensor};
use comoe_core::backend::cuda::measure::gpu_report;
use comoe_core::backend::cuda::{CudaBackend, Faults, ResidentFormat};
use comoe_core::backend::{Backend, DriverKind, Fill, Queue, SlotId};
use comoe_core::store::{Directory, RecordIndex, RecordSource};
use comoe_core::{
    CacheOptions, Capacity, CudaOptions, Error, ExpertCache, ExpertFormat, ExpertLayout, ExpertSpec,
    Prefetch, PrefetchTrigger, Result, Rules, cuda_device,
};
use cudarc::driver::{result, sys};

use crate::conformance::{self, Experts, Make, Noise};

pub(crate) fn backend(
    device: &Device,
    source: Arc<dyn RecordSource>,
    options: &CudaOptions,
) -> Box<dyn Backend> {
    let cuda = device.as_cuda_device().expect("a CUDA device");
    Box::new(CudaBackend::new(cuda, source, options.clone()).expect("a backend"))
}

pub(crate) fn options(change: impl FnOnce(&mut CudaOptions)) -> CudaOptions {
    let mut options = CudaOptions::default();
    change(&mut options);
    options
}

pub(crate) fn with_faults(faults: Faults) -> CudaOptions {
    options(|o| o.faults = faults)
}

fn conforms(device: &Device, options: CudaOptions) {
    let backend = |source| backend(device, source, &options);
    for driver in [DriverKind::Host, DriverKind::Auto] {
        conformance::all(device, Make::one(driver, &backend));
    }
}

pub(crate) fn device() -> Device {
    cuda_device(0).expect("a GPU")
}

#[test]
#[ignore = "needs a CUDA device"]
fn conforms_with_everything_page_locked() {
    conforms(&device(), CudaOptions::default());
}

#[test]
#[ignore = "needs a CUDA device"]
fn conforms_with_nothing_page_locked() {
    conforms(&device(), options(|o| o.page_lock_limit = Some(0)));
}

#[test]
#[ignore = "needs a CUDA device"]
fn conforms_with_a_partial_arena() {
    conforms(&device(), options(|o| o.page_lock_limit = Some(100_000)));
}

/// A driver that knows no batches.
#[test]
#[ignore = "needs a CUDA device"]
fn conforms_with_copies_one_by_one() {
    conforms(&device(), with_faults(Faults { no_batches: true, ..Faults::default() }));
}

/// The driver refuses half-way; cases.md 9 to 12.
#[test]
#[ignore = "needs a CUDA device"]
fn conforms_when_page_locking_is_refused() {
    conforms(&device(), options(|o| o.page_lock_fails_at = Some(0)));
}

/// A device that its author made without this crate: a stream per host thread, events tracked.
#[test]
#[ignore = "needs a CUDA device"]
fn conforms_on_a_plain_device() {
    conforms(&Device::new_cuda(0).expect("a GPU"), CudaOptions::default());
    // Its own stream, but candle's event tracking left on.
    conforms(&Device::new_cuda_with_stream(0).expect("a GPU"), CudaOptions::default());
}

pub(crate) fn cache(
    experts: &Arc<Experts>,
    device: &Device,
    cache: CacheOptions,
    cuda: &CudaOptions,
    rules: Rules,
) -> ExpertCache {
    ExpertCache::builder(experts.store(), device)
        .backend(backend(device, experts.clone(), cuda))
        .options(cache)
        .rules(rules)
        .build()
        .expect("a cache")
}

pub(crate) struct Call {
    pub(crate) layer: usize,
    pub(crate) x: Tensor,
    pub(crate) ids: Tensor,
    pub(crate) weights: Tensor,
}

impl Call {
    /// Takes what `from` has to its own addresses, which a graph knows.
    pub(crate) fn take(&self, from: &Self) {
        for (into, from) in [(&self.ids, &from.ids), (&self.x, &from.x), (&self.weights, &from.weights)] {
            into.slice_set(from, 0, 0).expect("a copy");
        }
    }

    /// Room for its result.
    pub(crate) fn room(&self) -> Tensor {
        Tensor::zeros(self.x.dims(), self.x.dtype(), self.x.device()).expect("room")
    }
}

/// A result's numbers.
pub(crate) fn numbers(y: &Tensor) -> Vec<f32> {
    y.to_dtype(DType::F32).and_then(|y| y.flatten_all()?.to_vec1()).expect("y")
}

/// Random calls of a model of `layers` layers of `experts` experts, each with `top_k` different ones a token.
pub(crate) struct Model<'a> {
    pub(crate) device: &'a Device,
    pub(crate) hidden: usize,
    pub(crate) layers: usize,
    pub(crate) experts: usize,
    pub(crate) top_k: usize,
}

impl Model<'_> {
    /// Call number `step`: the layers take turns.
    pub(crate) fn call(&self, step: usize, tokens: usize, dtype: DType, noise: &mut Noise) -> Call {
        let &Self { device, hidden, layers, experts, top_k } = self;
        let x = Tensor::from_vec(noise.floats(tokens * hidden, 1.0), (tokens, hidden), device).expect("x");
        let mut ids = Vec::new();
        for _ in 0..tokens {
            let mut left: Vec<u32> = (0..experts as u32).collect();
            ids.extend((0..top_k).map(|_| left.swap_remove(noise.below(left.len()))));
        }
        let weights = (0..tokens * top_k).map(|_| noise.float().abs()).collect::<Vec<_>>();
        Call {
            layer: step % layers,
            x: x.to_dtype(dtype).expect("x"),
            ids: Tensor::from_vec(ids, (tokens, top_k), device).expect("ids"),
            weights: Tensor::from_vec(weights, (tokens, top_k), device).expect("weights"),
        }
    }

    /// The first token of `call`, `tokens` times.
    pub(crate) fn wide(&self, call: &Call, tokens: usize) -> Call {
        let wide = |t: &Tensor| {
            let first = t.narrow(0, 0, 1).and_then(|t| t.repeat((tokens, 1)));
            first.and_then(|t| t.contiguous()).expect("repeated rows")
        };
        Call { layer: call.layer, x: wide(&call.x), ids: wide(&call.ids), weights: wide(&call.weights) }
    }
}

pub(crate) fn forward(cache: &ExpertCache, call: &Call) -> Result<Vec<f32>> {
    let y = cache.layer(call.layer).forward(&call.x, &call.ids, &call.weights)?;
    Ok(y.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?)
}

pub(crate) fn same(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

/// What is prefetched, the host prefetches: `ahead` and `correlate` are about the device.
pub(crate) fn few_slots(slots: usize, prefetch: Prefetch) -> CacheOptions {
    let driver = if prefetch == Prefetch::Off { DriverKind::Auto } else { DriverKind::Host };
    CacheOptions { capacity: Capacity::Slots(slots), prefetch, top_k: 2, driver, ..CacheOptions::default() }
}

/// Issue 3: slots are NaN before each fill; 10,000 steps of random routing; no NaN, and slots equal the store.
#[test]
#[ignore = "needs a CUDA device"]
fn a_slot_is_never_read_before_its_fill() {
    const LAYERS: usize = 4;
    const EXPERTS: usize = 16;
    let device = device();
    let spec = ExpertSpec::swiglu(128, 96);
    let model = Model { device: &device, hidden: 128, layers: LAYERS, experts: EXPERTS, top_k: 2 };
    for (format, limit) in [(ExpertFormat::INT4, None), (ExpertFormat::Bf16, Some(100_000))] {
        let experts = Experts::random(spec, format, LAYERS, EXPERTS, 21);
        let cuda = options(|o| {
            o.faults.poison = true;
            o.page_lock_limit = limit;
        });
        let options = CacheOptions {
            prefetch_trigger: PrefetchTrigger::EndOfLayer,
            ..few_slots(LAYERS * EXPERTS / 2, Prefetch::Correlation)
        };
        let cache = cache(&experts, &device, options, &cuda, Rules::default());
        let mut noise = Noise(5);
        for step in 0..5_000 {
            let tokens = if step % 50 == 0 { 40 } else { 1 + noise.below(2) };
            let dtype = if step % 3 == 0 { DType::F32 } else { DType::BF16 };
            let call = model.call(step, tokens, dtype, &mut noise);
            let y = forward(&cache, &call).expect("a step");
            assert!(y.iter().all(|v| v.is_finite()), "{format}: NaN at step {step}");
            if step % 500 == 499 {
                cache.check().expect("slots equal the store");
            }
        }
        let stats = cache.stats();
        println!("poison test, {format}:\n{stats}");
        assert!(stats.records_moved > 1000 && stats.prefetched > 100, "{stats}");
    }
}

const DELAY_LAYERS: usize = 3;
const DELAY_EXPERTS: usize = 8;

/// 60 steps under delays drawn from `seed`, compared with the resident run.
fn right_under_delays(device: &Device, seed: u64, rules: Rules) -> bool {
    let spec = ExpertSpec::swiglu(256, 192);
    let experts = Experts::random(spec, ExpertFormat::INT8, DELAY_LAYERS, DELAY_EXPERTS, 3);
    let resident =
        cache(&experts, device, CacheOptions::default(), &CudaOptions::default(), Rules::default());
    let faults = Faults { delay_seed: Some(seed), poison: true, ..Faults::default() };
    let delayed = cache(&experts, device, few_slots(7, Prefetch::Correlation), &with_faults(faults), rules);
    let model = Model { device, hidden: 256, layers: DELAY_LAYERS, experts: DELAY_EXPERTS, top_k: 2 };
    let mut noise = Noise(seed);
    (0..60).all(|step| {
        // Now and then more experts than slots, so that slots are refilled within a step.
        let tokens = if step % 4 == 3 { 8 } else { 1 };
        let call = model.call(step, tokens, DType::F32, &mut noise);
        let want = forward(&resident, &call).expect("resident");
        same(&forward(&delayed, &call).expect("delayed"), &want)
    })
}

/// Design section 10: random delays on every queue change nothing; without one of the waits they do.
#[test]
#[ignore = "needs a CUDA device"]
fn delays_change_nothing_unless_a_wait_is_dropped() {
    for device in [device(), Device::new_cuda(0).expect("a GPU")] {
        for seed in 0..4 {
            assert!(right_under_delays(&device, seed, Rules::default()), "seed {seed}");
        }
        let caught = |rules: Rules| (0..20).find(|&seed| !right_under_delays(&device, seed, rules));
        let read = caught(Rules { wait_before_read: false, ..Rules::default() });
        println!("dropping the wait before a read is caught by seed {read:?}");
        assert!(read.is_some());
        let refill = caught(Rules { wait_before_refill: false, ..Rules::default() });
        println!("dropping the wait before a refill is caught by seed {refill:?}");
        assert!(refill.is_some());
    }
}

/// More than 32 tokens take the dense path; its bits do not depend on slots either.
#[test]
#[ignore = "needs a CUDA device"]
fn many_tokens_give_the_same_bits_for_every_pool() {
    let device = device();
    let spec = ExpertSpec::swiglu(256, 160);
    let model = Model { device: &device, hidden: 256, layers: 2, experts: 12, top_k: 3 };
    for format in [ExpertFormat::Bf16, ExpertFormat::INT8, ExpertFormat::INT4] {
        let experts = Experts::random(spec, format, 2, 12, 9);
        let resident =
            cache(&experts, &device, CacheOptions::default(), &CudaOptions::default(), Rules::default());
        for slots in [3, 7, 13, 24] {
            let cache = cache(
                &experts,
                &device,
                few_slots(slots, Prefetch::Off),
                &CudaOptions::default(),
                Rules::default(),
            );
            let mut noise = Noise(17);
            for (step, tokens) in [33, 64, 100, 257].into_iter().enumerate() {
                let call = model.call(step, tokens, DType::BF16, &mut noise);
                let want = forward(&resident, &call).expect("resident");
                let got = forward(&cache, &call).expect("few slots");
                assert!(same(&got, &want), "{format}, {slots} slots, {tokens} tokens");

                // In F32 the same step takes the exact kernels: near, not equal.
                let exact = Call { x: call.x.to_dtype(DType::F32).expect("f32"), ..call };
                let exact = forward(&resident, &exact).expect("exact");
                let norm = exact.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt();
                let off = got.iter().zip(&exact).map(|(g, e)| f64::from(g - e).powi(2)).sum::<f64>().sqrt();
                assert!(off < 1e-2 * norm, "{format}, {tokens} tokens: {off} of {norm}");
            }
        }
    }
}

/// `--resident-format bf16`: slots hold expanded records, whole arena or partial; bits do not depend on slots, the
/// result is near that of the quantised records, and slots equal the store's records expanded on the CPU.
#[test]
#[ignore = "needs a CUDA device"]
fn records_are_expanded_on_load() {
    let device = device();
    let spec = ExpertSpec::swiglu(256, 160);
    let model = Model { device: &device, hidden: 256, layers: 2, experts: 8, top_k: 2 };
    for format in [ExpertFormat::INT8, ExpertFormat::Int4 { group: 32 }] {
        let experts = Experts::random(spec, format, 2, 8, 12);
        let quantised =
            cache(&experts, &device, CacheOptions::default(), &CudaOptions::default(), Rules::default());
        let expanded = |slots, limit| {
            let cuda = options(|o| {
                o.resident = ResidentFormat::Bf16;
                o.page_lock_limit = limit;
                o.faults.poison = true;
            });
            let builder = ExpertCache::builder(experts.store(), &device);
            builder.cuda(cuda).options(few_slots(slots, Prefetch::Correlation)).build().expect("a cache")
        };
        let resident = expanded(16, None);
        for (slots, limit) in [(2, None), (9, None), (9, Some(0)), (9, Some(300_000))] {
            let few = expanded(slots, limit);
            assert_eq!(few.stats().slot_bytes, 3 * 2 * 256 * 160);
            let mut noise = Noise(23);
            for step in 0..60 {
                let tokens = if step % 10 == 9 { 40 } else { 1 + step % 3 };
                let call = model.call(step, tokens, DType::BF16, &mut noise);
                let want = forward(&resident, &call).expect("resident");
                let got = forward(&few, &call).expect("few slots");
                assert!(same(&got, &want), "{format}, {slots} slots, step {step}");
                let near = forward(&quantised, &call).expect("quantised");
                let norm = near.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt();
                let off = got.iter().zip(&near).map(|(g, n)| f64::from(g - n).powi(2)).sum::<f64>().sqrt();
                assert!(off < 1e-2 * norm, "{format}, step {step}: {off} of {norm}");
            }
            few.check().expect("slots equal the expanded store");
        }
    }
}

/// Each thread makes its own tensors on its own stream of a plain device.
#[test]
#[ignore = "needs a CUDA device"]
fn two_host_threads_share_a_cache() {
    let spec = ExpertSpec::swiglu(128, 96);
    let experts = Experts::random(spec, ExpertFormat::INT4, 2, 8, 4);
    for device in [device(), Device::new_cuda(0).expect("a GPU")] {
        let resident =
            cache(&experts, &device, CacheOptions::default(), &CudaOptions::default(), Rules::default());
        let shared =
            cache(&experts, &device, few_slots(6, Prefetch::Off), &CudaOptions::default(), Rules::default());
        std::thread::scope(|scope| {
            for seed in [1, 2] {
                let model = Model { device: &device, hidden: 128, layers: 2, experts: 8, top_k: 2 };
                let (shared, resident) = (&shared, &resident);
                scope.spawn(move || {
                    let mut noise = Noise(seed);
                    for step in 0..300 {
                        let call = model.call(step, 1, DType::F32, &mut noise);
                        let want = forward(resident, &call).expect("resident");
                        assert!(
                            same(&forward(shared, &call).expect("shared"), &want),
                            "thread {seed}, step {step}"
                        );
                    }
                });
            }
        });
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn a_transfer_that_breaks_half_way_stops_the_cache_with_the_experts_name() {
    let device = device();
    let experts = Experts::random(ExpertSpec::swiglu(64, 64), ExpertFormat::Bf16, 1, 8, 2);
    for limit in [None, Some(0)] {
        let cuda = options(|o| {
            o.faults.fail_half_way = Some(RecordIndex(5));
            o.page_lock_limit = limit;
        });
        let host = CacheOptions { driver: DriverKind::Host, ..CacheOptions::default() };
        let cache = cache(&experts, &device, host, &cuda, Rules::default());
        let ask = |expert: u32| {
            let x = Tensor::ones((1, 64), DType::F32, &device)?;
            let ids = Tensor::from_vec(vec![expert], (1, 1), &device)?;
            let weights = Tensor::ones((1, 1), DType::F32, &device)?;
            cache.layer(0).forward(&x, &ids, &weights)
        };
        ask(4).expect("another expert");
        let error = ask(5).expect_err("a broken transfer").to_string();
        assert!(error.contains("layer 0 expert 5") && error.contains("injected"), "{error}");
        assert!(matches!(ask(4), Err(Error::Stopped { .. })));
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn what_cannot_be_had_is_refused_with_numbers() {
    let error = cuda_device(99).expect_err("no such GPU").to_string();
    println!("{error}");
    assert!(error.contains("cuda:99") && error.contains("cuda:0"), "{error}");

    let device = device();
    let experts = Experts::random(ExpertSpec::swiglu(64, 64), ExpertFormat::Bf16, 1, 8, 2);
    let mut backend = backend(&device, experts, &CudaOptions::default());
    let error = backend.allocate(1 << 20, 1 << 20).expect_err("a TiB");
    println!("{error}");
    let Error::OutOfDeviceMemory { asked, free, total, .. } = error else { panic!("{error}") };
    assert_eq!(asked, 1 << 40);
    assert!(0 < free && free <= total);
    backend.allocate(2, 1 << 20).expect("the GPU is still usable");
    println!("{:?}", backend.info());
}

/// Records of arbitrary bytes.
struct Raw {
    directory: Directory,
    records: Vec<u8>,
}

impl RecordSource for Raw {
    fn directory(&self) -> &Directory {
        &self.directory
    }

    fn read(&self, record: RecordIndex, out: &mut [u8]) -> Result<()> {
        out.copy_from_slice(&self.records[record.0 as usize * out.len()..][..out.len()]);
        Ok(())
    }
}

/// Issue 3: a batch of missing records moves at 90 % of what `doctor` measures. Printed, not asserted.
#[test]
#[ignore = "needs a CUDA device"]
fn prints_the_bandwidth_of_batches() {
    let report = gpu_report(0).expect("a report");
    println!("{}", serde_json::to_string_pretty(&report).expect("json"));
    assert!(report.self_tests.iter().all(|t| t.passed), "{:?}", report.self_tests);
    assert!(report.transfers.iter().all(|t| t.locked > 0.0 && t.pageable > 0.0) && report.kernel_read > 0.0);

    const COUNT: usize = 128;
    let bytes = ExpertLayout::new(&ExpertSpec::swiglu(2048, 768), ExpertFormat::INT4).record_bytes;
    let mut noise = Noise(8);
    let records: Vec<u8> = (0..COUNT * bytes / 8).flat_map(|_| noise.next().to_le_bytes()).collect();
    let source: Arc<dyn RecordSource> =
        Arc::new(Raw { directory: Directory::new([(0, COUNT, bytes)]).expect("directory"), records });
    let device = device();
    for (what, limit) in [("page-locked", None), ("through the bounce buffer", Some(0))] {
        let mut backend = backend(&device, source.clone(), &options(|o| o.page_lock_limit = limit));
        backend.allocate(COUNT, bytes).expect("slots");
        for batch in [1, 2, 4, 8, 16, 32, 64, 128] {
            let rounds = (512 / batch).min(64);
            let mut best = f64::INFINITY;
            for _ in 0..3 {
                backend.synchronize().expect("idle");
                let start = Instant::now();
                for round in 0..rounds {
                    let fills: Vec<_> = (0..batch)
                        .map(|i| (round * batch + i) % COUNT)
                        .map(|n| Fill { record: RecordIndex(n as u32), slot: SlotId(n as u32) })
                        .collect();
                    backend.fill(Queue::Demand, &[], &fills).expect("fill");
                }
                backend.synchronize().expect("copied");
                best = best.min(start.elapsed().as_secs_f64());
            }
            let rate = (rounds * batch * bytes) as f64 / best / 1e9;
            println!(
                "{what}: {batch:3} records of {bytes} bytes a batch: {rate:5.1} GB/s, {:3.0} % of doctor's best",
                100.0 * rate / report.best_locked()
            );
        }
        let moved: f64 =
            [1, 2, 4, 8, 16, 32, 64, 128].iter().map(|b| (3 * (512 / b).min(64) * b * bytes) as f64).sum();
        let time = backend.transfer_time();
        println!("{what}: by the queue's own clock {:.1} GB/s", moved / time.demand.as_secs_f64() / 1e9);
        let (mut have, mut want) = (vec![0; bytes], vec![0; bytes]);
        for n in [0, 77, 127] {
            backend.read_slot(SlotId(n), &mut have).expect("read");
            source.read(RecordIndex(n), &mut want).expect("read");
            assert!(have == want, "{what}: record {n} did not arrive");
        }
    }
}

/// GPU memory in use: the whole device's, and candle's pool's.
pub(crate) fn memory(device: &Device) -> (usize, u64) {
    let stream = device.as_cuda_device().expect("cuda").cuda_stream();
    let ctx = stream.context();
    stream.synchronize().expect("idle");
    ctx.synchronize().expect("idle");
    let mut used = 0u64;
    // SAFETY: the device is open, and the attribute is a u64.
    unsafe {
        let pool = result::device::get_default_mem_pool(ctx.cu_device()).expect("a pool");
        let attribute = sys::CUmemPool_attribute_enum::CU_MEMPOOL_ATTR_USED_MEM_CURRENT;
        sys::cuMemPoolGetAttribute(pool, attribute, (&raw mut used).cast()).result().expect("an attribute");
    }
    (ctx.mem_get_info().expect("memory").0, used)
}

/// Issue 3: not one allocation per token in the expert path. Prints the time of a step, too.
#[test]
#[ignore = "needs a CUDA device"]
fn a_thousand_steps_allocate_nothing() {
    let device = device();
    let spec = ExpertSpec::swiglu(512, 256);
    let experts = Experts::random(spec, ExpertFormat::INT4, 4, 16, 6);
    let cache = cache(
        &experts,
        &device,
        few_slots(32, Prefetch::Correlation),
        &CudaOptions::default(),
        Rules::default(),
    );
    let mut noise = Noise(3);
    let model = Model { device: &device, hidden: 512, layers: 4, experts: 16, top_k: 2 };
    let calls: Vec<_> = (0..200).map(|s| model.call(s, 1, DType::BF16, &mut noise)).collect();
    calls.iter().for_each(|c| drop(forward(&cache, c).expect("warm-up")));
    let before = memory(&device);
    let start = Instant::now();
    for _ in 0..5 {
        calls.iter().for_each(|c| drop(forward(&cache, c).expect("a step")));
    }
    let micros = start.elapsed().as_secs_f64() * 1e6 / 1000.0;
    let after = memory(&device);
    println!(
        "{micros:.1} us a layer step, half of the experts resident; memory (free, pool) {before:?} -> {after:?}"
    );
    println!("{}", cache.stats());
    assert_eq!(before, after);
}
