//! What every backend must do, whatever it is: run by `backends.rs` for the CPU and the simulation, and by `gpu.rs` for
//! CUDA. A backend is given as a function from a source to itself.

pub(crate) mod learned;
mod locking;
mod pins;
mod resize;
mod several;
mod tokens;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use candle_core::{DType, Device, Tensor};
use comoe_core::backend::{Backend, DeviceGuess, DriverKind};
use comoe_core::format::record::{ExpertBiases, ExpertWeights, Weights, pack_expert, unpack_expert};
use comoe_core::store::{Directory, RecordIndex, RecordSource};
use comoe_core::{
    Activation, CacheOptions, Capacity, Error, ExpertCache, ExpertFormat, ExpertLayout, ExpertSpec,
    ExpertStore, PeerAccess, PolicyKind, Prefetch, PrefetchTrigger, RecordCache, Result, Scope, WeightOn,
};

pub(crate) use learned::{a_device_learns_what_the_host_would, what_was_learned_long_ago_is_scaled_down};
pub(crate) use locking::tokens_are_served_while_pages_are_locked;
pub(crate) use resize::slots_come_and_go;
pub(crate) use several::{several_devices, several_devices_in_brief};
pub(crate) use tokens::tokens_run_again_until_all_is_there;

/// Makes the backend under test, which is driven so.
#[derive(Clone, Copy)]
pub(crate) struct Make<'a> {
    pub(crate) driver: DriverKind,
    pub(crate) backend: &'a dyn Fn(Arc<dyn RecordSource>) -> Box<dyn Backend>,
    pub(crate) several: Option<Several<'a>>,
}

impl<'a> Make<'a> {
    /// For one device.
    pub(crate) fn one(
        driver: DriverKind,
        backend: &'a dyn Fn(Arc<dyn RecordSource>) -> Box<dyn Backend>,
    ) -> Self {
        Self { driver, backend, several: None }
    }
}

/// Several devices under one cache, in place of the one that a test is given: of the first on.
#[derive(Clone, Copy)]
pub(crate) struct Several<'a> {
    pub(crate) devices: &'a [Device],
    pub(crate) peer_access: PeerAccess,
    /// Of the device with this number.
    pub(crate) backend: &'a dyn Fn(usize, Arc<dyn RecordSource>) -> Box<dyn Backend>,
}

/// SplitMix64.
pub(crate) struct Noise(pub(crate) u64);

impl Noise {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// Uniform in -1..1.
    pub(crate) fn float(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    pub(crate) fn floats(&mut self, n: usize, scale: f32) -> Vec<f32> {
        (0..n).map(|_| scale * self.float()).collect()
    }
}

/// Random experts in memory, whose store can be made unreadable.
pub(crate) struct Experts {
    pub(crate) spec: ExpertSpec,
    pub(crate) layout: ExpertLayout,
    directory: Directory,
    records: Vec<Vec<u8>>,
    unreadable: AtomicBool,
}

impl Experts {
    pub(crate) fn random(
        spec: ExpertSpec,
        format: ExpertFormat,
        layers: usize,
        experts: usize,
        seed: u64,
    ) -> Arc<Self> {
        let layout = ExpertLayout::new(&spec, format);
        let mut noise = Noise(seed);
        let records = (0..layers * experts)
            .map(|_| {
                let (wide, narrow) =
                    (1.0 / (spec.hidden as f32).sqrt(), 1.0 / (spec.intermediate as f32).sqrt());
                let gate = noise.floats(spec.hidden * spec.intermediate, wide);
                let up = noise.floats(spec.hidden * spec.intermediate, wide);
                let down = noise.floats(spec.hidden * spec.intermediate, narrow);
                let bias = [spec.intermediate, spec.intermediate, spec.hidden].map(|n| noise.floats(n, 0.1));
                let weights = ExpertWeights {
                    gate: Weights::F32(&gate),
                    up: Weights::F32(&up),
                    down: Weights::F32(&down),
                    bias: spec.bias.then(|| ExpertBiases {
                        gate: Weights::F32(&bias[0]),
                        up: Weights::F32(&bias[1]),
                        down: Weights::F32(&bias[2]),
                    }),
                };
                let mut record = vec![0; layout.record_bytes];
                pack_expert(&layout, &weights, &mut record).unwrap();
                record
            })
            .collect();
        let directory = Directory::new((0..layers).map(|l| (l, experts, layout.record_bytes))).unwrap();
        Arc::new(Self { spec, layout, directory, records, unreadable: AtomicBool::new(false) })
    }

    pub(crate) fn store(self: &Arc<Self>) -> ExpertStore {
        let specs = vec![self.spec; self.directory.layers().len()];
        ExpertStore::from_source(self.clone(), specs, self.layout.format).unwrap()
    }

    /// `y[t]` by F64 arithmetic over the unpacked weights.
    pub(crate) fn reference(&self, layer: usize, x: &[f32], ids: &[u32], weights: &[f32]) -> Vec<f64> {
        let ExpertSpec { hidden, intermediate, .. } = self.spec;
        let (tokens, top_k) = (x.len() / hidden, ids.len() / (x.len() / hidden));
        let first = self.directory.layers()[layer].first;
        let mut y = vec![0f64; x.len()];
        for (a, (&id, &weight)) in ids.iter().zip(weights).enumerate() {
            let e = unpack_expert(&self.layout, &self.records[(first + id) as usize]).unwrap();
            let t = a / top_k;
            assert!(t < tokens);
            let on_input = if self.spec.weight_on == WeightOn::Input { f64::from(weight) } else { 1.0 };
            let xt: Vec<f64> = x[t * hidden..][..hidden].iter().map(|&v| f64::from(v) * on_input).collect();
            let row = |m: &[f32], bias: Option<&[f32]>, r: usize, v: &[f64]| -> f64 {
                let dot: f64 =
                    m[r * v.len()..][..v.len()].iter().zip(v).map(|(&w, v)| f64::from(w) * v).sum();
                dot + bias.map_or(0.0, |b| f64::from(b[r]))
            };
            let [gb, ub, db] = [0, 1, 2].map(|part| e.bias.as_ref().map(|b| &b[part][..]));
            let h: Vec<f64> = (0..intermediate)
                .map(|r| activate(self.spec.activation, row(&e.gate, gb, r, &xt), row(&e.up, ub, r, &xt)))
                .collect();
            let after = if self.spec.weight_on == WeightOn::Output { f64::from(weight) } else { 1.0 };
            for r in 0..hidden {
                y[t * hidden + r] += after * row(&e.down, db, r, &h);
            }
        }
        y
    }
}

fn activate(activation: Activation, gate: f64, up: f64) -> f64 {
    let sigmoid = |v: f64| 1.0 / (1.0 + (-v).exp());
    match activation {
        Activation::Silu => gate * sigmoid(gate) * up,
        Activation::GeluTanh => {
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (gate + 0.044_715 * gate.powi(3));
            0.5 * gate * (1.0 + inner.tanh()) * up
        }
        Activation::SwigluClamped { limit, alpha } => {
            let (limit, alpha) = (f64::from(limit), f64::from(alpha));
            let g = gate.min(limit);
            (up.clamp(-limit, limit) + 1.0) * g * sigmoid(alpha * g)
        }
        other => unreachable!("{other:?} has no reference"),
    }
}

impl RecordSource for Experts {
    fn directory(&self) -> &Directory {
        &self.directory
    }

    fn read(&self, record: RecordIndex, out: &mut [u8]) -> Result<()> {
        if self.unreadable.load(Ordering::SeqCst) {
            let id = self.directory.id(record);
            return Err(Error::FillFailed { id, reason: "the store was made unreadable".to_owned() });
        }
        out.copy_from_slice(&self.records[record.0 as usize]);
        Ok(())
    }
}

/// A step: layer, input, ids and weights.
struct Call {
    layer: usize,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    raw: (Vec<f32>, Vec<u32>, Vec<f32>),
}

fn calls(
    experts: &Experts,
    device: &Device,
    dtype: DType,
    steps: usize,
    most_tokens: usize,
    seed: u64,
) -> Vec<Call> {
    let mut noise = Noise(seed);
    let layers = experts.directory.layers().len();
    let count = experts.directory.layers()[0].experts;
    let hidden = experts.spec.hidden;
    (0..steps)
        .map(|step| {
            let (tokens, top_k) = (1 + noise.below(most_tokens), 1 + noise.below(3.min(count)));
            let x =
                Tensor::from_vec(noise.floats(tokens * hidden, 1.0), (tokens, hidden), &Device::Cpu).unwrap();
            let x = x.to_dtype(dtype).unwrap();
            let exact = x.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap();
            // Now and then the same expert twice for one token.
            let ids: Vec<u32> = (0..tokens * top_k).map(|_| noise.below(count) as u32).collect();
            let weights: Vec<f32> = (0..tokens * top_k).map(|_| noise.float().abs()).collect();
            Call {
                layer: step % layers,
                x: x.to_device(device).unwrap(),
                ids: Tensor::from_vec(ids.clone(), (tokens, top_k), device).unwrap(),
                weights: Tensor::from_vec(weights.clone(), (tokens, top_k), device).unwrap(),
                raw: (exact, ids, weights),
            }
        })
        .collect()
}

fn run(cache: &ExpertCache, call: &Call) -> Vec<f32> {
    // Any guess will do: it must not matter.
    let layer = cache.layer(call.layer).with_guess(&[5, 0, 3, 2]);
    let y = layer.forward(&call.x, &call.ids, &call.weights).unwrap();
    assert_eq!((y.dims(), y.dtype()), (call.x.dims(), call.x.dtype()));
    y.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

fn cache(experts: &Arc<Experts>, device: &Device, make: Make<'_>, options: CacheOptions) -> ExpertCache {
    let Some(several) = make.several else {
        let builder = ExpertCache::builder(experts.store(), device).backend((make.backend)(experts.clone()));
        return builder.options(options).driver(make.driver).build().unwrap();
    };
    let builder = ExpertCache::builder(experts.store(), several.devices).options(options).driver(make.driver);
    let builder = builder.peer_access(several.peer_access);
    builder.build_with(|number, source| Ok((several.backend)(number, source))).unwrap()
}

fn specs() -> Vec<ExpertSpec> {
    let clamped = Activation::SwigluClamped { limit: 7.0, alpha: 1.702 };
    vec![
        ExpertSpec::swiglu(64, 96),
        ExpertSpec { activation: Activation::GeluTanh, ..ExpertSpec::swiglu(80, 48) },
        ExpertSpec { activation: clamped, bias: true, ..ExpertSpec::swiglu(72, 40) },
        ExpertSpec { weight_on: WeightOn::Input, ..ExpertSpec::swiglu(20, 36) },
    ]
}

/// All of the suite.
pub(crate) fn all(device: &Device, make: Make<'_>) {
    agrees_with_the_f64_reference(device, make);
    output_never_depends_on_the_pool(device, make);
    all_that_a_step_misses_moves_in_one_transfer(device, make);
    what_one_driver_brought_the_other_finds(device, make);
    pins::pinned_experts_never_leave(device, make);
    gathers_what_was_asked_for(device, make);
    slots_hold_copies(device, make);
    a_failing_source_names_the_expert(device, make);
    bad_arguments_leave_the_cache_usable(device, make);
    callers_take_turns(device, make);
    slots_come_and_go(device, make);
}

pub(crate) fn agrees_with_the_f64_reference(device: &Device, make: Make<'_>) {
    for (i, spec) in specs().into_iter().enumerate() {
        for format in
            [ExpertFormat::Bf16, ExpertFormat::INT8, ExpertFormat::Int4 { group: 32 }, ExpertFormat::Mxfp4]
        {
            for (dtype, tolerance) in [(DType::F32, 2e-5), (DType::BF16, 8e-3), (DType::F16, 1e-3)] {
                let experts = Experts::random(spec, format, 2, 6, 7 + i as u64);
                let cache = cache(&experts, device, make, CacheOptions::default());
                for call in calls(&experts, device, dtype, 6, 5, 3) {
                    let got = run(&cache, &call);
                    let want = experts.reference(call.layer, &call.raw.0, &call.raw.1, &call.raw.2);
                    let norm = want.iter().map(|w| w * w).sum::<f64>().sqrt();
                    let off =
                        got.iter().zip(&want).map(|(g, w)| (f64::from(*g) - w).powi(2)).sum::<f64>().sqrt();
                    assert!(off <= tolerance * norm, "{spec:?} {format} {dtype:?}: {off:e} of {norm:e}");
                }
            }
        }
    }
}

/// Every slot count, policy, scope, prefetch and trigger gives the resident run's bits, for sets that fit and sets that
/// do not, and the counters add up.
pub(crate) fn output_never_depends_on_the_pool(device: &Device, make: Make<'_>) {
    let formats = [ExpertFormat::Bf16, ExpertFormat::INT8, ExpertFormat::INT4, ExpertFormat::Mxfp4];
    output_is_the_same_for_every_nth_pool(device, make, &formats, 1);
}

fn output_is_the_same_for_every_nth_pool(
    device: &Device,
    make: Make<'_>,
    formats: &[ExpertFormat],
    nth: usize,
) {
    for &format in formats {
        let experts = Experts::random(ExpertSpec::swiglu(64, 48), format, 3, 8, 11);
        let mut calls = calls(&experts, device, DType::F32, 24, 3, 5);
        calls.extend(self::calls(&experts, device, DType::F32, 3, 40, 6));
        let resident = cache(&experts, device, make, CacheOptions::default());
        let want: Vec<_> = calls.iter().map(|c| run(&resident, c)).collect();
        for (i, slots) in (3..=24).step_by(nth).enumerate() {
            let options = CacheOptions {
                capacity: Capacity::Slots(slots),
                policy: [
                    PolicyKind::Lru,
                    PolicyKind::Lfu,
                    PolicyKind::Lfru,
                    PolicyKind::Aged,
                    PolicyKind::Blend,
                ][i % 5],
                scope: [Scope::Layer, Scope::Global][i % 2],
                prefetch: Prefetch::ALL[i / 2 % Prefetch::ALL.len()],
                prefetch_trigger: [
                    PrefetchTrigger::AfterRouting,
                    PrefetchTrigger::MidLayer,
                    PrefetchTrigger::EndOfLayer,
                ][i / 4 % 3],
                top_k: 3,
                // None, one record, less than a layer, more than one.
                ring: Some([0, 1, 5, 11][i / 2 % 4] * experts.layout.record_bytes as u64),
                ..CacheOptions::default()
            };
            let cache = cache(&experts, device, make, options.clone());
            for (n, (call, want)) in calls.iter().zip(&want).enumerate() {
                let got = run(&cache, call);
                assert!(
                    got.iter().zip(want).all(|(a, b)| a.to_bits() == b.to_bits()),
                    "call {n} with {options:?}"
                );
            }
            cache.check().unwrap();
            let stats = cache.stats();
            assert_eq!(stats.hits() + stats.misses(), stats.accesses());
            assert_eq!(stats.records_moved + stats.late(), stats.misses());
            let all = stats.records_moved * experts.layout.record_bytes as u64;
            // What the device brought ahead by itself, it did not read again.
            let ahead = match stats.device_steps {
                0 => 0,
                _ => stats.prefetched_bytes - stats.prefetch_wasted_bytes,
            };
            assert!(stats.bytes_moved <= all && stats.bytes_moved + ahead >= all, "{options:?}: {stats}");
        }
    }
}

/// As many transfers as layer steps with a miss: all that is missing goes in one batch, and hits cause none.
pub(crate) fn all_that_a_step_misses_moves_in_one_transfer(device: &Device, make: Make<'_>) {
    let experts = Experts::random(ExpertSpec::swiglu(32, 32), ExpertFormat::INT8, 3, 12, 4);
    // 3 tokens choose at most 9 experts of a layer: every set fits its layer's slots.
    let options = CacheOptions { capacity: Capacity::Slots(30), top_k: 3, ..CacheOptions::default() };
    let cache = cache(&experts, device, make, options);
    let (mut with_a_miss, mut several) = (0, 0);
    for call in calls(&experts, device, DType::F32, 60, 3, 8) {
        let before = cache.stats();
        run(&cache, &call);
        let after = cache.stats();
        let misses = after.misses() - before.misses();
        assert_eq!(after.transfers - before.transfers, u64::from(misses > 0), "{misses} misses");
        with_a_miss += u64::from(misses > 0);
        several += u64::from(misses > 1);
    }
    let stats = cache.stats();
    assert_eq!((stats.transfers, stats.steps_with_transfer), (with_a_miss, with_a_miss));
    assert!(several > 0 && with_a_miss < stats.steps, "{with_a_miss} of {} steps, {several}", stats.steps);
}

/// Steps of many tokens are the host's, steps of few perhaps the device's: the slots are the same.
pub(crate) fn what_one_driver_brought_the_other_finds(device: &Device, make: Make<'_>) {
    let experts = Experts::random(ExpertSpec::swiglu(64, 48), ExpertFormat::INT8, 3, 8, 13);
    let resident = cache(&experts, device, make, CacheOptions::default());
    for slots in [9, 16, 24] {
        let options = CacheOptions { capacity: Capacity::Slots(slots), top_k: 3, ..CacheOptions::default() };
        let few = cache(&experts, device, make, options);
        for call in calls(&experts, device, DType::F32, 40, 1, slots as u64) {
            let repeat = |t: &Tensor| t.repeat((40, 1)).unwrap();
            let many = Call {
                x: repeat(&call.x),
                ids: repeat(&call.ids),
                weights: repeat(&call.weights),
                raw: Default::default(),
                layer: call.layer,
            };
            let want = [run(&resident, &call), run(&resident, &many)];
            assert_eq!(run(&few, &call), want[0]);
            let before = few.stats();
            assert_eq!(run(&few, &many), want[1]);
            assert_eq!(run(&few, &call), want[0]);
            let after = few.stats();
            assert_eq!((after.misses(), after.bytes_moved), (before.misses(), before.bytes_moved));
            assert_eq!(after.steps, before.steps + 2);
        }
        few.check().unwrap();
        let stats = few.stats();
        let driven = few.backend_info().notes.iter().any(|n| n.contains("driven by the device"));
        assert_eq!(stats.device_steps, if driven { 80 } else { 0 });
        assert!(!driven || make.driver != DriverKind::Host);
    }
}

pub(crate) fn gathers_what_was_asked_for(device: &Device, make: Make<'_>) {
    let experts = Experts::random(ExpertSpec::swiglu(16, 16), ExpertFormat::Bf16, 2, 9, 1);
    let cache = RecordCache::builder(experts.clone() as Arc<dyn RecordSource>, device)
        .backend((make.backend)(experts.clone()))
        .capacity(Capacity::Slots(5))
        .build()
        .unwrap();
    let mut noise = Noise(4);
    for _ in 0..40 {
        let (layer, n) = (noise.below(2), 1 + noise.below(12));
        let ids: Vec<u32> = (0..n).map(|_| noise.below(9) as u32).collect();
        let got = cache.gather(layer, &ids, DType::U8, &[100]).unwrap().to_vec2::<u8>().unwrap();
        for (row, id) in got.iter().zip(&ids) {
            assert_eq!(row[..], experts.records[layer * 9 + *id as usize][..100]);
        }
    }
    let words = cache.gather(1, &[3], DType::F32, &[2, 5]).unwrap();
    assert_eq!(words.dims(), [1, 2, 5]);
}

/// Design rule 8: a byte flipped in a slot shows, and a store that becomes unreadable once all is resident does not.
pub(crate) fn slots_hold_copies(device: &Device, make: Make<'_>) {
    let experts = Experts::random(ExpertSpec::swiglu(32, 32), ExpertFormat::INT8, 1, 4, 2);
    let cache = cache(&experts, device, make, CacheOptions::default());
    let calls = calls(&experts, device, DType::F32, 20, 4, 9);
    let before: Vec<_> = calls.iter().map(|c| run(&cache, c)).collect();
    assert_eq!(cache.check().unwrap(), 4, "all is resident");

    experts.unreadable.store(true, Ordering::SeqCst);
    let after: Vec<_> = calls.iter().map(|c| run(&cache, c)).collect();
    assert_eq!(before, after);
    experts.unreadable.store(false, Ordering::SeqCst);

    let victim = RecordIndex(calls[0].raw.1[0]);
    cache.with_backend(|backend, pool| {
        let slot = pool.locate(victim).unwrap().slot;
        let mut bytes = vec![0; experts.layout.record_bytes];
        backend.synchronize().unwrap();
        backend.read_slot(slot, &mut bytes).unwrap();
        assert_eq!(bytes, experts.records[victim.0 as usize]);
        bytes[experts.layout.down.weights] ^= 0x40;
        backend.write_slot(slot, &bytes).unwrap();
    });
    assert_ne!(run(&cache, &calls[0]), before[0]);
    assert!(matches!(cache.check(), Err(Error::SlotDiffers { .. })));
}

pub(crate) fn a_failing_source_names_the_expert(device: &Device, make: Make<'_>) {
    let experts = Experts::random(ExpertSpec::swiglu(32, 32), ExpertFormat::Bf16, 1, 4, 2);
    let options = CacheOptions { capacity: Capacity::Slots(2), ..CacheOptions::default() };
    let cache = cache(&experts, device, make, options);
    let x = Tensor::ones((1, 32), DType::F32, device).unwrap();
    let ask = |e: u32| {
        let ids = Tensor::from_vec(vec![e], (1, 1), device).unwrap();
        let weights = Tensor::ones((1, 1), DType::F32, device).unwrap();
        cache.layer(0).forward(&x, &ids, &weights)
    };
    ask(0).unwrap();
    experts.unreadable.store(true, Ordering::SeqCst);
    let Err(first) = ask(3) else {
        // A backend that keeps the whole store in an arena of its own no longer reads it.
        return;
    };
    assert!(first.to_string().contains("layer 0 expert 3"), "{first}");
    experts.unreadable.store(false, Ordering::SeqCst);
    assert!(matches!(ask(0), Err(Error::Stopped { .. })), "nothing in the slots is trusted any more");
}

pub(crate) fn bad_arguments_leave_the_cache_usable(device: &Device, make: Make<'_>) {
    let experts = Experts::random(ExpertSpec::swiglu(32, 32), ExpertFormat::Bf16, 1, 4, 2);
    let cache = cache(&experts, device, make, CacheOptions::default());
    let call = &calls(&experts, device, DType::F32, 1, 1, 1)[0];
    let good = run(&cache, call);
    let ones = |dims: (usize, usize), dtype| Tensor::ones(dims, dtype, device).unwrap();
    let layer = cache.layer(0);
    let x = ones((2, 32), DType::F32);
    let (ids, w) = (ones((2, 1), DType::U32), ones((2, 1), DType::F32));
    let said = |r: Result<Tensor>| r.unwrap_err().to_string();
    // A device that drives a step looks at its routing after `forward` has returned.
    let flushed = |r: Result<Tensor>| r.and_then(|y| cache.flush().map(|()| y));
    assert!(said(layer.forward(&ones((2, 31), DType::F32), &ids, &w)).contains("[n, 32]"));
    assert!(said(layer.forward(&ones((3, 32), DType::F32), &ids, &w)).contains("[3, 32]"));
    assert!(said(layer.forward(&x, &ids, &ones((2, 2), DType::F32))).contains("like ids"));
    assert!(said(layer.forward(&ones((2, 32), DType::U32), &ids, &w)).contains("F32, F16 or BF16"));
    let wide = (ids.clone() * 9.0).unwrap();
    assert!(said(flushed(layer.forward(&x, &wide, &w))).contains("layer 0 expert 9"));
    assert!(said(cache.layer(3).forward(&x, &ids, &w)).contains("layer 3 has 0 experts"));
    let nan = (w.clone() * f64::NAN).unwrap();
    let nan = flushed(layer.forward(&x, &ids, &nan));
    assert!(matches!(nan, Err(Error::BadRoutingWeight { token: 0, .. })));
    let none = layer.forward(
        &x.narrow(0, 0, 0).unwrap(),
        &ids.narrow(0, 0, 0).unwrap(),
        &w.narrow(0, 0, 0).unwrap(),
    );
    assert_eq!(none.unwrap().dims(), [0, 32]);
    // Room for the result changes nothing but, where the device drives, its place.
    let values = |y: Result<Tensor>| y.unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
    let with_room = layer.forward_to(&x, &ids, &w, &x.zeros_like().unwrap());
    assert_eq!(values(with_room), values(layer.forward(&x, &ids, &w)));
    let narrow = Tensor::zeros((2, 16), DType::F32, device).unwrap();
    assert!(said(layer.forward_to(&x, &ids, &w, &narrow)).contains("like x"));
    let guess = Tensor::zeros((1, 1), DType::I64, device).unwrap();
    let guess = DeviceGuess {
        ids: &guess,
        #[cfg(feature = "cuda")]
        stream: None,
    };
    let guessing = cache.layer(0).with_device_guess(guess);
    assert!(said(guessing.forward(&x, &ids, &w)).contains("U32"));
    assert_eq!(run(&cache, call), good);
}

pub(crate) fn callers_take_turns(device: &Device, make: Make<'_>) {
    let experts = Experts::random(ExpertSpec::swiglu(64, 48), ExpertFormat::INT4, 3, 8, 11);
    let calls = calls(&experts, device, DType::F32, 30, 3, 5);
    let resident = cache(&experts, device, make, CacheOptions::default());
    let want: Vec<_> = calls.iter().map(|c| run(&resident, c)).collect();
    let options = CacheOptions { capacity: Capacity::Slots(9), ..CacheOptions::default() };
    let cache = cache(&experts, device, make, options);
    let wrong = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for thread in 0..3 {
            let (cache, calls, want, wrong) = (&cache, &calls, &want, &wrong);
            scope.spawn(move || {
                for i in 0..calls.len() {
                    let i = (i * 7 + thread * 11) % calls.len();
                    if run(cache, &calls[i]) != want[i] {
                        wrong.lock().unwrap().push((thread, i));
                    }
                }
            });
        }
    });
    assert_eq!(wrong.into_inner().unwrap(), []);
}
