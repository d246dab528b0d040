//! The conformance suite on the backends that need no device.

mod conformance;

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use comoe_core::backend::cpu::CpuBackend;
use comoe_core::backend::sim::SimBackend;
use comoe_core::backend::{Backend, DriverKind};
use comoe_core::store::{RecordIndex, RecordSource};
use comoe_core::{
    CacheOptions, Capacity, Error, ExpertCache, ExpertFormat, ExpertSpec, PolicyKind, Prefetch, RecordCache,
    Scope,
};

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

#[test]
fn simulated_tokens_run_again() {
    for seed in 0..4 {
        let whole = &move |source| Box::new(SimBackend::new(source, seed)) as Box<dyn Backend>;
        let n = 2 + seed as u32;
        let partial =
            &move |source| Box::new(SimBackend::new(source, seed).leaving_to_the_host(n)) as Box<dyn Backend>;
        let make = |backend| Make { driver: DriverKind::Device, backend };
        conformance::tokens_run_again_until_all_is_there(&Device::Cpu, make(whole), make(partial));
    }
}

#[test]
fn simulated_with_records_left_to_the_host() {
    let backend = &|source| Box::new(SimBackend::new(source, 1).leaving_to_the_host(2)) as Box<dyn Backend>;
    conformance::all(&Device::Cpu, Make { driver: DriverKind::Auto, backend });
}

/// A record that cannot be brought for a device-driven token is named, and stops the cache.
#[test]
fn a_fill_that_fails_in_a_token_names_the_expert() {
    let experts = Experts::random(ExpertSpec::swiglu(16, 16), ExpertFormat::INT8, 2, 4, 1);
    let backend = SimBackend::new(experts.clone(), 1).leaving_to_the_host(1).failing_at(RecordIndex(6));
    let cache = ExpertCache::builder(experts.store(), &Device::Cpu)
        .options(CacheOptions { capacity: Capacity::Slots(4), top_k: 2, ..CacheOptions::default() })
        .driver(DriverKind::Device)
        .backend(Box::new(backend))
        .build()
        .unwrap();
    let tensor = |dims, dtype| Tensor::ones(dims, dtype, &Device::Cpu).unwrap();
    let (x, weights) = (tensor((1, 16), DType::F32), tensor((1, 2), DType::F32));
    let token = |experts: [u32; 2]| {
        cache.run_token(1, 2, || {
            let ids = Tensor::from_vec(experts.to_vec(), (1, 2), &Device::Cpu)?;
            let y = cache.layer(0).forward(&x, &ids, &weights)?;
            cache.layer(1).forward(&y, &ids, &weights)
        })
    };
    token([0, 3]).unwrap();
    let error = token([1, 2]).unwrap_err();
    assert!(matches!(&error, Error::FillFailed { id, .. } if (id.layer, id.expert) == (1, 2)), "{error}");
    assert!(matches!(token([0, 3]), Err(Error::Stopped { .. })));
}

/// Where records are left to the host, the device drives only where it was asked for and tokens can be run again.
#[test]
fn records_that_only_the_host_can_bring_ask_for_slots_by_layer() {
    let experts = Experts::random(ExpertSpec::swiglu(16, 16), ExpertFormat::INT8, 2, 4, 1);
    let build = |driver, slots, scope| {
        let backend = SimBackend::new(experts.clone(), 1).leaving_to_the_host(3);
        let options = CacheOptions { capacity: Capacity::Slots(slots), top_k: 2, ..CacheOptions::default() };
        let builder = ExpertCache::builder(experts.store(), &Device::Cpu).options(options).scope(scope);
        builder.driver(driver).backend(Box::new(backend)).build()
    };
    assert_eq!(build(DriverKind::Device, 4, Scope::Layer).unwrap().driver(), DriverKind::Device);
    assert_eq!(build(DriverKind::Auto, 4, Scope::Layer).unwrap().driver(), DriverKind::Host);
    for (slots, scope) in [(4, Scope::Global), (3, Scope::Layer)] {
        let error = build(DriverKind::Device, slots, scope).map(drop).unwrap_err().to_string();
        assert!(error.contains("layers share their slots") && error.contains("use auto or host"), "{error}");
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
    for policy in [PolicyKind::Lru, PolicyKind::Lfru, PolicyKind::Aged, PolicyKind::Auto] {
        assert_eq!(simulated(policy, Prefetch::Off).unwrap().driver(), DriverKind::Device);
    }
    let error = simulated(PolicyKind::Lfu, Prefetch::Off).map(drop).unwrap_err().to_string();
    assert!(error.contains("the policy is lfu"), "{error}");
    let error = simulated(PolicyKind::Lru, Prefetch::Correlation).map(drop).unwrap_err().to_string();
    assert!(error.contains("prefetching"), "{error}");
    let records = RecordCache::builder(experts.clone() as Arc<dyn RecordSource>, &Device::Cpu);
    let error = records.driver(DriverKind::Device).build().map(drop).unwrap_err().to_string();
    assert!(error.contains("no experts"), "{error}");
}
