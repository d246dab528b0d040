//! The conformance suite on the backends that need no device.

mod conformance;

use candle_core::Device;
use comoe_core::backend::cpu::CpuBackend;
use comoe_core::backend::sim::SimBackend;

#[test]
fn cpu() {
    conformance::all(&Device::Cpu, &|source| Box::new(CpuBackend::new(source)));
}

#[test]
fn simulated() {
    for seed in 0..5 {
        conformance::all(&Device::Cpu, &move |source| Box::new(SimBackend::new(source, seed)));
    }
}
