//! What the host driver decides on recorded routing is what a replay of it says, for every policy and both scopes: numbers
//! of `comoe trace replay` are those of a run.

use std::path::Path;
use std::sync::Arc;

use candle_core::{DType, Device};
use comoe_core::policy::PolicyKind;
use comoe_core::replay::{ReplayPolicy, replay};
use comoe_core::store::{Directory, RecordIndex, RecordSource};
use comoe_core::trace::{Phase, Trace};
use comoe_core::{Capacity, RecordCache, Result, Scope};

/// Small records for the layers that a trace was recorded from.
struct Records(Directory);

impl RecordSource for Records {
    fn directory(&self) -> &Directory {
        &self.0
    }

    fn read(&self, record: RecordIndex, out: &mut [u8]) -> Result<()> {
        out.fill(record.0 as u8);
        Ok(())
    }
}

fn committed() -> Trace {
    Trace::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../assets/fixtures/comoe_tiny.trace")).unwrap()
}

/// Hits and accesses of generated tokens when a cache serves the trace, token by token.
fn served(trace: &Trace, policy: PolicyKind, scope: Scope, slots_per_layer: usize) -> (u64, u64) {
    let layers = trace.info().directory.layers();
    let records = Records(Directory::new(layers.iter().map(|l| (l.layer, l.experts, 512))).unwrap());
    let cache = RecordCache::builder(Arc::new(records) as Arc<dyn RecordSource>, &Device::Cpu)
        .capacity(Capacity::Slots(slots_per_layer * layers.len()))
        .policy(policy)
        .scope(scope)
        .top_k(trace.info().top_k)
        .build()
        .unwrap();
    let (mut hits, mut accesses) = (0, 0);
    for phase in trace.tokens().iter().enumerate().collect::<Vec<_>>().chunk_by(|a, b| a.1.phase == b.1.phase)
    {
        cache.reset_stats();
        for &(token, _) in phase {
            for (layer, entry) in layers.iter().enumerate() {
                let set = trace.chosen(token, layer);
                if !set.is_empty() {
                    cache.gather(entry.layer, set, DType::U8, &[4]).unwrap();
                }
            }
        }
        if phase[0].1.phase == Phase::Decode {
            let stats = cache.stats();
            (hits, accesses) = (hits + stats.hits(), accesses + stats.accesses());
        }
    }
    (hits, accesses)
}

#[test]
fn a_cache_that_serves_a_trace_hits_as_often_as_its_replay() {
    let trace = committed();
    for scope in [Scope::Layer, Scope::Global] {
        for policy in PolicyKind::ALL {
            // A slot for every expert of a layer would make every policy alike.
            for slots in [2, 3, 5, 8] {
                let score = replay(&trace, ReplayPolicy::Online(policy), scope, slots);
                let what = format!("{policy}, scope {scope}, {slots} slots a layer");
                assert_eq!(served(&trace, policy, scope, slots), (score.hits, score.accesses), "{what}");
            }
        }
    }
}
