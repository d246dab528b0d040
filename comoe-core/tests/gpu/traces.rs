//! The device's decisions on recorded routing.

use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use comoe_core::backend::DeviceStep;
use comoe_core::pool::{Pool, PoolShape};
use comoe_core::store::RecordIndex;
use comoe_core::trace::Trace;
use comoe_core::{CudaOptions, ExpertFormat, ExpertSpec, PolicyKind};

use crate::backend::{backend, device};
use crate::conformance::Experts;

/// The committed trace of comoe-tiny (found from `COMOE_ASSETS` where the tests run elsewhere than they were built), and
/// those named in `COMOE_TRACES`, separated by colons.
fn traces() -> Vec<PathBuf> {
    let assets = std::env::var_os("COMOE_ASSETS").map(PathBuf::from);
    let assets = assets.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../assets"));
    let more = std::env::var_os("COMOE_TRACES").unwrap_or_default();
    // No variable is one empty path.
    let more = std::env::split_paths(&more).filter(|path| !path.as_os_str().is_empty());
    std::iter::once(assets.join("fixtures/comoe_tiny.trace")).chain(more).collect()
}

/// Issue 6: on every trace, with prefetch off, the device's tables after each step of a token are those of the pure
/// policy, and it hits as often.
#[test]
#[ignore = "needs a CUDA device"]
fn decisions_on_traces_are_the_pure_policys() {
    let device = device();
    for path in traces() {
        let trace = Trace::open(&path).expect("a trace");
        let layers = trace.info().directory.layers();
        let experts = layers.iter().map(|l| l.experts).max().expect("layers");
        assert!(layers.iter().all(|l| l.experts == experts), "{}: layers differ", path.display());
        let per_layer: Vec<usize> = [experts / 16, experts / 4, experts / 2]
            .into_iter()
            .filter(|&n| n >= trace.info().top_k)
            .collect();
        for slots in per_layer {
            let by_layer = PoolShape::by_layer(slots * layers.len(), &vec![experts; layers.len()], 0);
            for policy in [PolicyKind::Lru, PolicyKind::Aged] {
                let what = format!("{}, {policy}, {slots} slots a layer", path.display());
                follow(&device, &trace, by_layer.clone(), policy, &what);
            }
        }
        // One pool for all layers, of two tokens or so.
        let slots = (2 * trace.info().top_k * layers.len()).min(experts);
        let global = PoolShape::global(slots, layers.len(), 0);
        let what = format!("{}, {slots} slots in all", path.display());
        follow(&device, &trace, global, PolicyKind::Lru, &what);
    }
}

/// Plays `trace` through a device and a pool, side by side.
fn follow(device: &Device, trace: &Trace, shape: PoolShape, policy: PolicyKind, what: &str) {
    let (layers, hidden) = (trace.layers(), 32);
    let experts = trace.info().directory.layers()[0].experts;
    let store = Experts::random(ExpertSpec::swiglu(hidden, 16), ExpertFormat::INT4, layers, experts, 8);
    let records = layers * experts;
    let mut backend = backend(device, store.clone(), &CudaOptions::default());
    backend.allocate(shape.slots(), store.layout.record_bytes).expect("slots");
    let sharing = layers / shape.partitions.len();
    let per_token = trace.info().top_k * sharing;
    let mut pool = Pool::new(shape.clone(), records, |slots| policy.build(slots, records, per_token));
    let driver = backend.device_driver().expect("a driver");
    driver.take_over(&shape, &pool.residency()).expect("tables");
    let x = Tensor::zeros((1, hidden), DType::F32, device).expect("x");
    let mut misses = 0;
    for token in 0..trace.tokens().len() {
        for layer in 0..layers {
            let chosen = trace.chosen(token, layer);
            if chosen.is_empty() {
                continue;
            }
            let ids = Tensor::new(chosen, device).and_then(|t| t.unsqueeze(0)).expect("ids");
            let weights = Tensor::ones((1, chosen.len()), DType::F32, device).expect("weights");
            let (spec, layout) = (&store.spec, &store.layout);
            let step = DeviceStep {
                layer,
                spec,
                layout,
                x: &x,
                ids: &ids,
                weights: &weights,
                ordinal: 0,
                room: None,
                guess: None,
            };
            driver.step(step).expect("a step");
            let set: Vec<_> = chosen.iter().map(|e| RecordIndex((layer * experts) as u32 + e)).collect();
            misses += pool.access(layer, &set).len() as u64;
            // Reading the tables back takes longer than the step; every one of them was behind the one that is compared.
            if (token + layer).is_multiple_of(7) {
                let tables = driver.residency().expect("tables");
                assert_eq!(tables, pool.residency(), "{what}: token {token}, layer {layer}");
            }
        }
    }
    assert_eq!(driver.fault(true).expect("a word"), None, "{what}");
    let counters = driver.counters().expect("counters");
    let missed: u64 = counters.iter().map(|c| c.accesses - c.hits).sum();
    assert_eq!(missed, misses, "{what}");
}
