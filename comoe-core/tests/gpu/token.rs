//! Tokens that are run again until every expert is there, eager and captured in a graph.

use candle_core::{DType, Device, Tensor};
use comoe_core::backend::DriverKind;
use comoe_core::store::RecordIndex;
use comoe_core::{CudaOptions, Error, ExpertCache, ExpertFormat, ExpertSpec, Rules, TokenOutcome};

use crate::backend::{backend, cache, device, options, same};
use crate::capture::{captured, through};
use crate::conformance::{self, Experts, Noise};
use crate::device::driven;

/// Issue 4: records that are not page-locked. Tokens run again until all is there, with the bits, counts and tables of a
/// cache whose device brings everything itself, with delays and without.
#[test]
#[ignore = "needs a CUDA device"]
fn tokens_run_again_until_all_is_there() {
    for (device, limit, delay_seed) in [
        (device(), 0, None),
        (device(), 100_000, None),
        (device(), 100_000, Some(5)),
        (Device::new_cuda(0).expect("a GPU"), 100_000, None),
    ] {
        let whole = &|source| backend(&device, source, &CudaOptions::default());
        let partial = options(|o| {
            o.page_lock_limit = Some(limit);
            o.faults.delay_seed = delay_seed;
        });
        let partial = &|source| backend(&device, source, &partial);
        let make = |backend| conformance::Make::one(DriverKind::Device, backend);
        conformance::tokens_run_again_until_all_is_there(&device, make(whole), make(partial));
    }
}

/// A token that was captured in a graph runs again with the same graph. A transfer that breaks names the expert.
#[test]
#[ignore = "needs a CUDA device"]
fn a_captured_token_runs_again_and_a_broken_transfer_names_the_expert() {
    const LAYERS: usize = 3;
    let device = device();
    let experts = Experts::random(ExpertSpec::swiglu(64, 48), ExpertFormat::INT4, LAYERS, 8, 4);
    let resident =
        cache(&experts, &device, driven(24, 2, DriverKind::Host), &CudaOptions::default(), Rules::default());
    let new = |fail_half_way| {
        let partial = options(|o| {
            o.page_lock_limit = Some(20_000);
            o.faults.fail_half_way = fail_half_way;
        });
        cache(&experts, &device, driven(9, 2, DriverKind::Device), &partial, Rules::default())
    };
    let few = new(None);
    let mut noise = Noise(8);
    let x = Tensor::from_vec(noise.floats(64, 1.0), (1, 64), &device).expect("x");
    let weights = Tensor::from_vec(vec![0.75f32, 0.25], (1, 2), &device).expect("weights");
    let ids: Vec<Tensor> =
        (0..LAYERS).map(|_| Tensor::zeros((1, 2), DType::U32, &device).expect("ids")).collect();
    let steps = |cache: &ExpertCache| through(cache, &x, &ids, &weights);
    let put = |noise: &mut Noise| {
        for ids in &ids {
            let first = noise.below(8) as u32;
            let other = (first + 1 + noise.below(7) as u32) % 8;
            let new = Tensor::from_vec(vec![first, other], (1, 2), &device).expect("ids");
            ids.slice_set(&new, 0, 0).expect("ids");
        }
    };
    put(&mut noise);
    few.run_token(1, 2, || steps(&few)).expect("a token");
    let mut token = few.begin_token(1, 2).expect("a token");
    assert!(token.is_on_device());
    let (graph, y) = captured(&device, || steps(&few).expect("captured"));
    let (mut runs, mut tokens) = (0, 0);
    for round in 0..200 {
        put(&mut noise);
        let want = steps(&resident).and_then(|y| Ok(y.flatten_all()?.to_vec1::<f32>()?)).expect("resident");
        loop {
            runs += 1;
            graph.launch().expect("launch");
            if token.end().expect("a token") == TokenOutcome::Done {
                break;
            }
        }
        tokens += 1;
        let got: Vec<f32> = y.flatten_all().and_then(|y| y.to_vec1()).expect("y");
        assert!(same(&got, &want), "round {round}");
        drop(token);
        if round % 50 == 49 {
            few.check().expect("slots equal the store");
        }
        token = few.begin_token(1, 2).expect("a token");
    }
    drop(token);
    println!("{tokens} tokens in {runs} launches; {}", few.stats());
    assert!(runs > tokens + 100);
    assert_eq!(few.stats().accesses(), 2 * LAYERS as u64 * (tokens + 1));

    let broken = new(Some(RecordIndex(13)));
    let error = (0..100).find_map(|_| {
        put(&mut noise);
        broken.run_token(1, 2, || steps(&broken)).err()
    });
    let text = error.expect("record 13 is needed").to_string();
    assert!(text.contains("layer 1 expert 5"), "{text}");
    assert!(matches!(broken.run_token(1, 2, || steps(&broken)), Err(Error::Stopped { .. })));
}
