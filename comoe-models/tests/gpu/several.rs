//! Issue 8: whole models whose experts are spread over several GPUs, in any split: tokens, logits, keys and values are those
//! of one GPU, bit for bit.

use candle_core::Device;
use comoe_core::{CacheOptions, Capacity, DriverKind, PeerAccess, cuda_device, cuda_device_count};
use comoe_models::{Decoder, LoadOptions};

use crate::exactness::cases;
use crate::tiny::GPU;

/// What devices there can be here besides the first, and how they reach it: a second pool on the same GPU, and a second
/// GPU where there is one.
fn settings() -> Vec<(&'static str, Device, PeerAccess)> {
    let mut all = vec![("two pools of one GPU", GPU.clone(), PeerAccess::Auto)];
    if cuda_device_count().expect("GPUs") > 1 {
        let second = cuda_device(1).expect("a second GPU");
        all.push(("two GPUs", second.clone(), PeerAccess::Auto));
        all.push(("two GPUs through the host", second, PeerAccess::Off));
    }
    all
}

#[test]
#[ignore = "needs a CUDA device"]
fn every_split_over_several_gpus_gives_one_gpus_bits() {
    let folder = tempfile::tempdir().expect("a folder");
    let n = 32;
    for (case, resident) in cases(folder.path()) {
        let want = case.run(&resident, n, false);
        let all = case.layers * case.experts;
        let mut splits = 0;
        for (what, second, peer_access) in settings() {
            for driver in [DriverKind::Device, DriverKind::Host] {
                // Everything resident on both; half of it; nearly all on either; few on both.
                for (first, other) in [
                    (all, all),
                    (all / 4, all / 4),
                    (all / 2, all / 16),
                    (all / 16, all / 2),
                    (all / 8, all / 8),
                ] {
                    let options = LoadOptions {
                        cache: CacheOptions { driver, ..case.options.cache.clone() },
                        more_devices: vec![second.clone()],
                        capacities: [first, other].map(Capacity::Slots).to_vec(),
                        peer_access,
                        ..case.options.clone()
                    };
                    let decoder = Decoder::open(&case.folder, &GPU, &options, &|_| {}).expect("two pools");
                    assert_eq!(decoder.experts().driver(), driver);
                    let graphs: &[bool] =
                        if driver == DriverKind::Device { &[false, true] } else { &[false] };
                    let way = format!("{what}, {driver}, {first} + {other} slots");
                    case.compare(&decoder, &way, n, graphs, &want);
                    let stats = decoder.experts().stats();
                    assert!(stats.devices.iter().all(|d| d.accesses > 0), "{way}: {:?}", stats.devices);
                    splits += 1;
                }
            }
        }
        println!("{}: {splits} splits of {n} tokens, each bit for bit as one GPU", case.name);
    }
}
