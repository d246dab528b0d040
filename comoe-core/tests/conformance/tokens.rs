//! Tokens that the device drives from their first layer to their last.

use candle_core::{Device, Tensor};
use comoe_core::backend::DriverKind;
use comoe_core::{CacheOptions, Capacity, Error, ExpertCache, ExpertFormat, ExpertSpec, PolicyKind, Result};

use super::{Call, Experts, Make, Noise, cache};

/// Where some records only the host can bring, a token is run again until all of them are there: same bits, same counts and
/// the same tables as where the device brings all by itself. Both are driven by the device.
pub(crate) fn tokens_run_again_until_all_is_there(device: &Device, whole: Make<'_>, partial: Make<'_>) {
    const TOP_K: usize = 3;
    let experts = Experts::random(ExpertSpec::swiglu(64, 48), ExpertFormat::INT8, 3, 8, 17);
    for (policy, slots) in [
        (PolicyKind::Lru, 9),
        (PolicyKind::Aged, 9),
        (PolicyKind::Lru, 13),
        (PolicyKind::Lfru, 17),
        (PolicyKind::Aged, 24),
    ] {
        let options = CacheOptions {
            capacity: Capacity::Slots(slots),
            top_k: TOP_K,
            policy,
            // What a prompt leaves behind depends on when its records arrived, with a ring: tables would differ.
            ring: Some(0),
            ..CacheOptions::default()
        };
        let resident = cache(&experts, device, whole, CacheOptions::default());
        let all = cache(&experts, device, whole, options.clone());
        let some = cache(&experts, device, partial, options);
        assert_eq!((all.driver(), some.driver()), (DriverKind::Device, DriverKind::Device));
        assert!(some.drives_tokens(1, TOP_K));
        let (mut noise, mut tokens, mut runs) = (Noise(slots as u64), 0, 0);
        for round in 0..60 {
            // Now and then a step of the host's in between.
            let rows = if round % 9 == 8 { 40 } else { 1 };
            let calls: Vec<_> =
                (0..3).map(|_| fixed_call(&experts, device, rows, TOP_K, &mut noise)).collect();
            let want = steps(&resident, &calls).unwrap();
            let of_all = all.run_token(rows, TOP_K, || steps(&all, &calls)).unwrap();
            let of_some = some.run_token(rows, TOP_K, || {
                runs += u64::from(rows == 1);
                steps(&some, &calls)
            });
            tokens += u64::from(rows == 1);
            assert_eq!(of_all, want, "{policy}, {slots} slots, round {round}");
            assert_eq!(of_some.unwrap(), want, "{policy}, {slots} slots, round {round}");
            let tables = |cache: &ExpertCache| cache.with_backend(|_, pool| pool.residency());
            assert_eq!(tables(&all), tables(&some), "{policy}, {slots} slots, round {round}");
        }
        assert!(runs > tokens, "{policy}, {slots} slots: nothing was ever missing");
        some.check().unwrap();
        let (a, b) = (all.stats(), some.stats());
        assert_eq!((a.accesses(), a.hits(), a.bytes_moved), (b.accesses(), b.hits(), b.bytes_moved));
        assert_eq!((a.device_steps, b.device_steps), (3 * tokens, 3 * tokens), "{a}\n{b}");
        // The host brought some of it, and that has a time.
        assert!(b.read_through_bytes < a.read_through_bytes, "{b}");

        // Outside of a token such steps are the host's; within one, only what it was begun for is served.
        let before = some.stats();
        let calls: Vec<_> = (0..3).map(|_| fixed_call(&experts, device, 1, TOP_K, &mut noise)).collect();
        assert_eq!(steps(&some, &calls).unwrap(), steps(&resident, &calls).unwrap());
        assert_eq!(some.stats().device_steps, before.device_steps);
        let wide = fixed_call(&experts, device, 40, TOP_K, &mut noise);
        let refused = some.run_token(1, TOP_K, || steps(&some, std::slice::from_ref(&wide)));
        let text = refused.unwrap_err().to_string();
        assert!(text.contains("within a token"), "{text}");
        // Routing that is wrong ends the token, missing records before it or not, and disturbs nothing.
        for _ in 0..3 {
            let mut calls: Vec<_> =
                (0..3).map(|_| fixed_call(&experts, device, 1, TOP_K, &mut noise)).collect();
            calls[1].weights = (&calls[1].weights * f64::NAN).unwrap();
            let refused = some.run_token(1, TOP_K, || steps(&some, &calls));
            assert!(
                matches!(refused, Err(Error::BadRoutingWeight { layer: 1, token: 0, .. })),
                "{refused:?}"
            );
        }
        // A token that was given up half-way, perhaps where something was missing, is no part of the next.
        for _ in 0..4 {
            let calls: Vec<_> = (0..3).map(|_| fixed_call(&experts, device, 1, TOP_K, &mut noise)).collect();
            let token = some.begin_token(1, TOP_K).unwrap();
            assert!(some.begin_token(1, TOP_K).is_err(), "this would wait for itself");
            steps(&some, &calls[..2]).unwrap();
            drop(token);
            let calls: Vec<_> = (0..3).map(|_| fixed_call(&experts, device, 1, TOP_K, &mut noise)).collect();
            let got = some.run_token(1, TOP_K, || steps(&some, &calls)).unwrap();
            assert_eq!(got, steps(&resident, &calls).unwrap());
        }
        some.check().unwrap();
        // Not the same token each time.
        let error = some.run_token(1, TOP_K, || {
            steps(
                &some,
                &(0..3).map(|_| fixed_call(&experts, device, 1, TOP_K, &mut noise)).collect::<Vec<_>>(),
            )
        });
        if let Err(error) = error {
            assert!(error.to_string().contains("the same steps"), "{error}");
        }
    }
}

/// Each of a token's steps works on what the one before made.
pub(super) fn steps(cache: &ExpertCache, calls: &[Call]) -> Result<Vec<f32>> {
    let mut x = calls[0].x.clone();
    for (layer, call) in calls.iter().enumerate() {
        x = (&x + cache.layer(layer).forward(&x, &call.ids, &call.weights)?)?;
    }
    Ok(x.flatten_all()?.to_vec1()?)
}

/// A call of `tokens` tokens, each with `top_k` different experts.
pub(super) fn fixed_call(
    experts: &Experts,
    device: &Device,
    tokens: usize,
    top_k: usize,
    noise: &mut Noise,
) -> Call {
    let (hidden, count) = (experts.spec.hidden, experts.directory.layers()[0].experts);
    let x = Tensor::from_vec(noise.floats(tokens * hidden, 1.0), (tokens, hidden), device).unwrap();
    let ids: Vec<u32> = (0..tokens)
        .flat_map(|_| {
            let mut left: Vec<u32> = (0..count as u32).collect();
            (0..top_k).map(|_| left.swap_remove(noise.below(left.len()))).collect::<Vec<_>>()
        })
        .collect();
    let weights: Vec<f32> = (0..tokens * top_k).map(|_| noise.float().abs()).collect();
    Call {
        layer: 0,
        x,
        ids: Tensor::from_vec(ids, (tokens, top_k), device).unwrap(),
        weights: Tensor::from_vec(weights, (tokens, top_k), device).unwrap(),
        raw: Default::default(),
    }
}
