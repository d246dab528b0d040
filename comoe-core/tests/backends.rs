//! The conformance suite on the backends that need no device.

mod conformance;

use std::sync::Arc;

use candle_core::Device;
use comoe_core::backend::cpu::CpuBackend;
use comoe_core::backend::sim::SimBackend;
use comoe_core::backend::{Backend, DriverKind};
use comoe_core::store::RecordSource;
use comoe_core::{Capacity, ExpertCache, ExpertFormat, ExpertSpec, PolicyKind, Prefetch, RecordCache};

use crate::conformance::{Experts, Make};

#[test]
fn cpu() {
    let backend = &|source| Box::new(CpuBackend::new(source)) as Box<dyn Backend>;
    conformance::all(&Device::Cpu, Make { driver: DriverKind::Auto, backend });
}

#[test]
fn simulated() {
    for seed in 0..5 {
        let backend = &move |source| Box::new(SimBackend::new(source, seed)) as Box<dyn Backend>;
        let driver = if seed % 2 == 0 { DriverKind::Auto } else { DriverKind::Host };
        conformance::all(&Device::Cpu, Make { driver, backend });
    }
}

/// The CPU has no driver of its own; `auto` is the host there, without a word.
#[test]
fn a_driver_that_cannot_be_had_is_refused() {
    let experts = Experts::random(ExpertSpec::swiglu(16, 16), ExpertFormat::INT8, 2, 4, 1);
    let build = |driver| ExpertCache::builder(experts.store(), &Device::Cpu).driver(driver).build();
    let error = build(DriverKind::Device).map(drop).unwrap_err().to_string();
    assert!(error.contains("cpu") && error.contains("use auto or host"), "{error}");
    for driver in [DriverKind::Auto, DriverKind::Host] {
        assert_eq!(build(driver).unwrap().notes(), [] as [String; 0]);
    }
    let simulated = |policy, prefetch| {
        let builder = ExpertCache::builder(experts.store(), &Device::Cpu).driver(DriverKind::Device);
        let builder = builder.capacity(Capacity::Slots(4)).policy(policy).prefetch(prefetch);
        builder.backend(Box::new(SimBackend::new(experts.clone(), 1))).build()
    };
    assert!(simulated(PolicyKind::Lru, Prefetch::Off).is_ok());
    let error = simulated(PolicyKind::Lfu, Prefetch::Off).map(drop).unwrap_err().to_string();
    assert!(error.contains("the policy is lfu"), "{error}");
    let error = simulated(PolicyKind::Lru, Prefetch::Correlation).map(drop).unwrap_err().to_string();
    assert!(error.contains("prefetching"), "{error}");
    let records = RecordCache::builder(experts.clone() as Arc<dyn RecordSource>, &Device::Cpu);
    let error = records.driver(DriverKind::Device).build().map(drop).unwrap_err().to_string();
    assert!(error.contains("no experts"), "{error}");
}
