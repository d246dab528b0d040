//! One cache over several devices: two pools on one GPU, two streams of one GPU, and, where there are two, two GPUs, by
//! each other's memory and through the host's.

use std::sync::Arc;
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Tensor};
use comoe_core::backend::cuda::Faults;
use comoe_core::backend::{Backend, DriverKind};
use comoe_core::store::RecordSource;
use comoe_core::{
    CacheOptions, Capacity, CudaOptions, Error, ExpertCache, ExpertFormat, ExpertSpec, PeerAccess, Rules,
    cuda_device, cuda_device_count,
};

use crate::backend::{backend, cache, device, same, with_faults};
use crate::capture::{captured, through};
use crate::conformance::{self, Experts, Make, Noise, Several};
use crate::device::driven;

/// What devices there can be here, and how they reach each other.
fn settings() -> Vec<(&'static str, Vec<Device>, PeerAccess)> {
    let one = device();
    let mut all = vec![
        ("one pool twice", vec![one.clone(), one.clone()], PeerAccess::Auto),
        ("three pools", vec![one.clone(), one.clone(), one.clone()], PeerAccess::Auto),
        ("two streams", vec![one.clone(), device()], PeerAccess::Auto),
    ];
    if cuda_device_count().expect("GPUs") > 1 {
        let two = vec![one, cuda_device(1).expect("a second GPU")];
        all.push(("two GPUs", two.clone(), PeerAccess::Auto));
        all.push(("two GPUs through the host", two, PeerAccess::Off));
    }
    all
}

/// Runs `suite` over every setting and driver.
fn conforms(options: &CudaOptions, suite: impl Fn(Make<'_>, Several<'_>)) {
    for (what, devices, peer_access) in settings() {
        let begun = Instant::now();
        for driver in [DriverKind::Host, DriverKind::Auto] {
            let alone = |source| backend(&devices[0], source, options);
            let nth = |n: usize, source: Arc<dyn RecordSource>| -> Box<dyn Backend> {
                backend(&devices[n], source, options)
            };
            let several = Several { devices: &devices, peer_access, backend: &nth };
            suite(Make::one(driver, &alone), several);
        }
        println!("{what}: {:.1} s", begun.elapsed().as_secs_f64());
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn several_devices_conform() {
    conforms(&CudaOptions::default(), conformance::several_devices);
}

#[test]
#[ignore = "needs a CUDA device"]
fn several_devices_conform_with_delays() {
    let delayed = with_faults(Faults { delay_seed: Some(3), ..Faults::default() });
    conforms(&delayed, conformance::several_devices_in_brief);
}

fn shared(
    experts: &Arc<Experts>,
    devices: &[Device],
    peer_access: PeerAccess,
    slots: &[usize],
    options: CacheOptions,
) -> ExpertCache {
    let capacities: Vec<_> = slots.iter().map(|&n| Capacity::Slots(n)).collect();
    ExpertCache::builder(experts.store(), devices)
        .options(options)
        .capacities(&capacities)
        .peer_access(peer_access)
        .build()
        .expect("a cache")
}

/// A token captured as one graph over all devices, replayed with other experts each time: the bits of one GPU. Results are
/// allocated in the graph.
#[test]
#[ignore = "needs a CUDA device"]
fn a_captured_token_goes_over_all_devices() {
    captured_tokens(false);
}

/// As before, with results in room that the caller has, as decode graphs do.
#[test]
#[ignore = "needs a CUDA device"]
fn a_captured_token_with_room_for_results_goes_over_all_devices() {
    captured_tokens(true);
}

fn captured_tokens(has_room: bool) {
    const LAYERS: usize = 4;
    const TOP_K: usize = 3;
    // Equally long where graphs allocate them: behind a graph with shorter results compute-sanitizer takes the next one's for
    // as short (ARCHITECTURE.md, "Tests").
    let narrow = if has_room { 192 } else { 256 };
    for (what, devices, peer_access) in settings() {
        let device = &devices[0];
        for (format, hidden, first, others) in [
            (ExpertFormat::INT4, 256, 16, 16),
            (ExpertFormat::INT4, 256, 5, 14),
            (ExpertFormat::INT8, narrow, 20, 2),
        ] {
            let experts = Experts::random(ExpertSpec::swiglu(hidden, 128), format, LAYERS, 16, 4);
            let resident = driven(LAYERS * 16, TOP_K, DriverKind::Device);
            let resident = cache(&experts, device, resident, &CudaOptions::default(), Rules::default());
            let mut slots = vec![first];
            slots.resize(devices.len(), others);
            let few = driven(first, TOP_K, DriverKind::Device);
            let few = shared(&experts, &devices, peer_access, &slots, few);
            assert_eq!(few.driver(), DriverKind::Device);
            let mut noise = Noise(8);
            let x = Tensor::from_vec(noise.floats(hidden, 1.0), (1, hidden), device).expect("x");
            let weights = Tensor::from_vec(vec![0.5f32, 0.3, 0.2], (1, TOP_K), device).expect("weights");
            let ids: Vec<Tensor> =
                (0..LAYERS).map(|_| Tensor::zeros((1, TOP_K), DType::U32, device).expect("ids")).collect();
            let rooms: Vec<Tensor> = ids.iter().map(|_| x.zeros_like().expect("room")).collect();
            let steps = |cache: &ExpertCache| match has_room {
                false => through(cache, &x, &ids, &weights),
                true => ids.iter().zip(&rooms).enumerate().try_fold(x.clone(), |x, (layer, (ids, room))| {
                    cache.layer(layer).forward_to(&x, ids, &weights, room)
                }),
            };
            let put = |noise: &mut Noise| {
                for ids in &ids {
                    let from = noise.below(16) as u32;
                    let chosen: Vec<u32> = (0..TOP_K as u32).map(|j| (from + j * 3) % 16).collect();
                    let new = Tensor::from_vec(chosen, (1, TOP_K), device).expect("ids");
                    ids.slice_set(&new, 0, 0).expect("ids");
                }
            };
            println!("{what}, {format}, {slots:?}");
            put(&mut noise);
            few.run_token(1, TOP_K, || steps(&few)).expect("a token");
            few.flush().expect("a token");
            let mut token = few.begin_token(1, TOP_K).expect("a token");
            assert!(token.is_on_device());
            let (graph, y) = captured(device, || steps(&few).expect("captured"));
            for round in 0..150 {
                put(&mut noise);
                let want =
                    steps(&resident).and_then(|y| Ok(y.flatten_all()?.to_vec1::<f32>()?)).expect("resident");
                graph.launch().expect("launch");
                let done = token.end().expect("a token");
                assert_eq!(done, comoe_core::TokenOutcome::Done);
                let got: Vec<f32> = y.flatten_all().and_then(|y| y.to_vec1()).expect("y");
                assert!(same(&got, &want), "{what}, {format}, {slots:?}, round {round}");
                drop(token);
                if round % 50 == 49 {
                    few.check().expect("slots equal the store");
                    // A step of the host's in between.
                    let many = |t: &Tensor| t.repeat((40, 1)).expect("many");
                    let many = few.layer(0).forward(&many(&x), &many(&ids[0]), &many(&weights));
                    many.and_then(|y| Ok(y.flatten_all()?.to_vec1::<f32>()?)).expect("many");
                }
                token = few.begin_token(1, TOP_K).expect("a token");
            }
            drop(token);
            assert_eq!(
                few.stats().devices.iter().map(|d| d.accesses > 0).collect::<Vec<_>>(),
                vec![true; devices.len()]
            );
        }
    }
}

/// A device that does not come back in time is named, and the step fails instead of hanging.
#[test]
#[ignore = "needs a CUDA device"]
fn a_late_device_is_named() {
    for (what, devices, peer_access) in settings() {
        // Pools of one stream are never late for each other.
        if devices[0].same_device(&devices[1]) {
            continue;
        }
        let two_gpus = devices[0].location() != devices[1].location();
        for driver in [DriverKind::Host, DriverKind::Device] {
            // Two streams of one GPU wait for each other by events alone where the device drives.
            if driver == DriverKind::Device && !two_gpus {
                continue;
            }
            let experts = Experts::random(ExpertSpec::swiglu(64, 48), ExpertFormat::INT4, 2, 8, 4);
            // Before the last of its layers the third time: where the host drives, that is where it waits.
            let late = with_faults(Faults { stall: Some((6, Duration::from_secs(2))), ..Faults::default() });
            let few = ExpertCache::builder(experts.store(), &devices[..])
                .options(driven(8, 2, driver))
                .peer_access(peer_access)
                .deadline(Duration::from_millis(300))
                .build_with(|n, source| {
                    let options = if n == 1 { late.clone() } else { CudaOptions::default() };
                    Ok(backend(&devices[n], source, &options))
                })
                .expect("a cache");
            let tensor =
                |dims: (usize, usize), dtype| Tensor::ones(dims, dtype, &devices[0]).expect("a tensor");
            let (x, weights) = (tensor((1, 64), DType::F32), tensor((1, 2), DType::F32));
            let ids = Tensor::from_vec(vec![0u32, 1], (1, 2), &devices[0]).expect("ids");
            let begun = Instant::now();
            let error = (0..20).find_map(|step| {
                let y = few.layer(step % 2).forward(&x, &ids, &weights);
                y.and_then(|y| Ok(y.to_vec2::<f32>()?)).and_then(|_| few.flush()).err()
            });
            let error = error.expect("it is late");
            assert!(matches!(error, Error::DeviceLate { .. }), "{what}, {driver}: {error}");
            let name = if two_gpus { "cuda:1" } else { "cuda:0" };
            assert!(error.to_string().contains(name) && error.to_string().contains("0.3 s"), "{error}");
            assert!(begun.elapsed() < Duration::from_millis(1900), "{what}, {driver}: {:?}", begun.elapsed());
            let again = few.layer(0).forward(&x, &ids, &weights);
            assert!(matches!(again, Err(Error::Stopped { .. })), "{what}, {driver}");
        }
    }
}
