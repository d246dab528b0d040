//! Memory by owner on a GPU: as it was planned, and as it is.

use std::ops::ControlFlow;

use comoe_core::{CacheOptions, Capacity};
use comoe_models::{GenerateOptions, LoadOptions, Model};

use crate::files::tiny;
use crate::tiny::GPU;

/// comoe-tiny within a limit: owners that are known to the byte are what was planned, buffers of decode steps are no more
/// than planned and no less than half, and nothing takes more than the limit.
#[test]
#[ignore = "needs a CUDA device"]
fn owners_hold_what_was_planned() {
    const LIMIT: u64 = 1 << 30;
    for dtype in [candle_core::DType::F32, candle_core::DType::BF16] {
        let cache = CacheOptions { capacity: Capacity::Fit, budget: Some(LIMIT), ..CacheOptions::default() };
        let options = LoadOptions { cache, dtype, context: Some(1024), ..LoadOptions::default() };
        let model = Model::load(&tiny(), &GPU, &options, &|_| {}).expect("comoe-tiny");
        let decoder = model.decoder();
        let plan = *decoder.memory_plan().expect("a plan");
        assert!(plan.device.total() + plan.margin <= LIMIT && plan.margin > 0, "{plan:?}");
        decoder.warm_up().expect("a warm-up");
        let mut session = model.session().expect("a session");
        for prompt in [&[5, 9, 70][..], &[9; 700]] {
            session.reset().expect("the planned cache");
            let options = GenerateOptions { max_tokens: Some(40), ..GenerateOptions::default() };
            session.generate(prompt, &options, &mut |_| ControlFlow::Continue(())).expect("an answer");
        }
        let measured = decoder.measure_memory().expect("the GPU says");
        let (now, planned) = (measured.device.now, plan.device);
        println!(
            "{dtype:?}\nplanned {planned:?}\nnow     {now:?}\npeak    {:?}\n{measured:?}",
            measured.device.peak
        );
        assert_eq!((now.slots, now.staging, now.ring), (planned.slots, planned.staging, planned.ring));
        assert_eq!(now.kv, planned.kv);
        let close = |a: u64, b: u64| a.abs_diff(b) * 50 <= b;
        assert!(close(now.dense, planned.dense), "{} of {}", now.dense, planned.dense);
        assert!(now.buffers <= planned.buffers && 2 * now.buffers >= planned.buffers, "{now:?} {planned:?}");
        let taken = measured.taken.expect("of a GPU").peak;
        assert!(taken <= LIMIT, "{taken}");
    }
}
