//! Records that stay for good, in the tables on the GPU.

use candle_core::DType;
use comoe_core::backend::{DeviceStep, Queue};
use comoe_core::pool::{Pool, PoolShape};
use comoe_core::store::RecordIndex;
use comoe_core::{CudaOptions, ExpertFormat, ExpertSpec, PolicyKind};

use crate::backend::{Model, backend, device};
use crate::conformance::{Experts, Noise};

/// After each of 1,500 random steps the tables are those of the pure pool, which the records that are kept never leave,
/// and the device has counted every use.
#[test]
#[ignore = "needs a CUDA device"]
fn kept_records_stay_and_tables_equal_the_pools() {
    const LAYERS: usize = 3;
    const EXPERTS: usize = 12;
    let device = device();
    let experts = Experts::random(ExpertSpec::swiglu(32, 16), ExpertFormat::INT4, LAYERS, EXPERTS, 8);
    let model = Model { device: &device, hidden: 32, layers: LAYERS, experts: EXPERTS, top_k: 3 };
    let uneven = PoolShape { partitions: vec![5, 2, 7], partition_of: vec![0, 1, 2], staging: 0 };
    let global = PoolShape::global(11, LAYERS, 0);
    for (shape, policy) in [
        (&uneven, PolicyKind::Lru),
        (&uneven, PolicyKind::Aged),
        (&global, PolicyKind::Lru),
        (&global, PolicyKind::Lfru),
    ] {
        let name = format!("{policy}, {:?}", shape.partitions);
        let records = LAYERS * EXPERTS;
        let mut backend = backend(&device, experts.clone(), &CudaOptions::default());
        backend.allocate(shape.slots(), experts.layout.record_bytes).expect("slots");
        let mut pool = Pool::new(shape.clone(), records, |slots| policy.build(slots, records, 3));
        let mut fills = Vec::new();
        for record in [3, 7, 12, 25, 30, 35].map(RecordIndex) {
            let slot = pool.keep(record.0 as usize / EXPERTS, record).expect("a free slot");
            pool.arrived(slot);
            fills.push(comoe_core::backend::Fill { record, slot });
        }
        let ticket = backend.fill(Queue::Demand, &[], &fills).expect("fills");
        backend.wait(ticket).expect("filled");
        backend.synchronize().expect("filled");
        let driver = backend.device_driver().expect("a driver");
        driver.take_over(shape, &pool.residency()).expect("tables");
        let (mut noise, mut uses, mut surplus) = (Noise(6), vec![0u64; records], 0);
        for step in 0..1_500 {
            let layer = noise.below(LAYERS);
            let tokens = if noise.below(2) == 0 { 1 } else { 1 + noise.below(6) };
            let call = model.call(layer, tokens, DType::F32, &mut noise);
            let (spec, layout) = (&experts.spec, &experts.layout);
            let y = driver
                .step(DeviceStep {
                    layer,
                    spec,
                    layout,
                    x: &call.x,
                    ids: &call.ids,
                    weights: &call.weights,
                    ordinal: 0,
                    room: None,
                    guess: None,
                })
                .expect("a step");
            let y: Vec<f32> = y.flatten_all().and_then(|y| y.to_vec1()).expect("y");
            assert!(y.iter().all(|v| v.is_finite()), "{name}, step {step}");
            let mut set: Vec<RecordIndex> = Vec::new();
            for id in call.ids.flatten_all().and_then(|t| t.to_vec1::<u32>()).expect("ids") {
                let record = RecordIndex((layer * EXPERTS) as u32 + id);
                if !set.contains(&record) {
                    set.push(record);
                }
            }
            set.iter().for_each(|r| uses[r.0 as usize] += 1);
            surplus += pool.access(layer, &set).iter().filter(|(_, slot)| slot.is_none()).count();
            if step % 3 == 0 {
                assert_eq!(driver.residency().expect("tables"), pool.residency(), "{name}, step {step}");
            }
        }
        assert_eq!(driver.uses().expect("uses"), uses, "{name}");
        assert!(fills.iter().all(|f| pool.locate(f.record).is_some_and(|l| l.slot == f.slot)), "{name}");
        assert!(surplus > 0, "{name}: sets larger than what may leave occur");
        assert_eq!(driver.fault(true).expect("works"), None, "{name}");
    }
}
