//! What a device learns of routing is what the host would have learned, and so are its guesses.

use candle_core::{DType, Device, Tensor};
use comoe_core::predict::{Correlation, Predictor};
use comoe_core::{CacheOptions, Capacity, Error, ExpertCache, ExpertFormat, ExpertSpec, Prefetch, Result};

use super::{Call, Experts, Make, Noise, cache};

/// Routing in which a layer's experts mostly follow from those of the layer before.
pub(crate) struct Routing {
    pub(crate) layers: usize,
    pub(crate) experts: usize,
    pub(crate) top_k: usize,
    pub(crate) noise: Noise,
}

impl Routing {
    /// Experts of a token, `[layers, top_k]`: few are chosen often.
    pub(crate) fn token(&mut self) -> Vec<Vec<u32>> {
        let &mut Self { layers, experts, top_k, .. } = self;
        let topic = self.noise.below(experts).min(self.noise.below(experts));
        let of_layer = |layer: usize, noise: &mut Noise| {
            let mut chosen: Vec<u32> = Vec::new();
            while chosen.len() < top_k {
                let id = match noise.below(4) {
                    0 => noise.below(experts),
                    _ => (topic * (layer + 1) + chosen.len()) % experts,
                } as u32;
                // Now and then one is named twice.
                if !chosen.contains(&id) || noise.below(8) == 0 {
                    chosen.push(id);
                }
            }
            chosen
        };
        (0..layers).map(|layer| of_layer(layer, &mut self.noise)).collect()
    }
}

/// The file of a cache's table.
pub(crate) fn table_of(cache: &ExpertCache) -> Vec<u8> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.table");
    cache.save_predictor_table(&path, "m").unwrap();
    std::fs::read(path).unwrap()
}

/// What a predictor on its own is told and says.
struct Reference {
    table: Correlation,
    /// By layer, as far as a step of one token asked.
    guesses: Vec<Vec<u32>>,
}

impl Reference {
    fn observe(&mut self, call: &Call, top_k: usize) {
        let ids = call.ids.flatten_all().unwrap().to_vec1::<u32>().unwrap();
        self.table.observe(call.layer, &ids, top_k);
        if ids.len() == top_k && call.layer + 1 < self.guesses.len() {
            let mut scored = Vec::new();
            self.table.predict(call.layer + 1, &mut scored);
            self.guesses[call.layer + 1] = scored.iter().take(top_k).map(|s| s.expert).collect();
        }
    }
}

fn layers(cache: &ExpertCache, calls: &[Call]) -> Result<Vec<Vec<u32>>> {
    let bits = |call: &Call| {
        let y = cache.layer(call.layer).forward(&call.x, &call.ids, &call.weights)?;
        let y = y.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
        Ok(y.into_iter().map(f32::to_bits).collect())
    };
    calls.iter().map(bits).collect()
}

/// Beyond some weight tables are scaled down: on the device as on the host, to the bit.
pub(crate) fn what_was_learned_long_ago_is_scaled_down(on: &Device, host: Make<'_>, device: Make<'_>) {
    let experts = Experts::random(ExpertSpec::swiglu(16, 16), ExpertFormat::INT8, 2, 4, 31);
    let options = CacheOptions {
        capacity: Capacity::Slots(6),
        top_k: 2,
        prefetch: Prefetch::Correlation,
        ..CacheOptions::default()
    };
    let by_host = cache(&experts, on, host, options.clone());
    let by_device = cache(&experts, on, device, options);
    let mut routing = Routing { layers: 2, experts: 4, top_k: 2, noise: Noise(5) };
    // Each token weighs 1.0005 times the one before, and 55,248 of them 1e12 times.
    let prompts = [5_500; 10].into_iter();
    for rows in prompts.chain([32; 12]).chain([1; 20]) {
        let routed: Vec<_> = (0..rows).map(|_| routing.token()).collect();
        let x = Tensor::ones((rows, 16), DType::F32, on).unwrap();
        let weights = Tensor::ones((rows, 2), DType::F32, on).unwrap();
        for layer in 0..2 {
            let ids: Vec<u32> = routed.iter().flat_map(|token| token[layer].clone()).collect();
            let ids = Tensor::from_vec(ids, (rows, 2), on).unwrap();
            for cache in [&by_host, &by_device] {
                cache.layer(layer).forward(&x, &ids, &weights).unwrap();
            }
        }
        if rows < 100 {
            assert!(table_of(&by_device) == table_of(&by_host), "after {rows} tokens");
        }
    }
    assert_eq!(by_device.predictor_table(), Some(55_000 + 12 * 32 + 20));
    assert_eq!(by_device.stats().device_steps, 2 * 32);
}

/// The device learns, through prompts of the host's, tokens that are run again and such as are refused, what the host alone
/// does, and the same as a predictor on its own: tables are the same file, guesses the same list, results the same bits.
/// `host` makes what the host drives, `device` what the device drives, whose tokens may be `run_again`.
pub(crate) fn a_device_learns_what_the_host_would(
    on: &Device,
    host: Make<'_>,
    (device, run_again): (Make<'_>, bool),
    tokens: usize,
) {
    const LAYERS: usize = 4;
    const EXPERTS: usize = 12;
    const TOP_K: usize = 3;
    let experts = Experts::random(ExpertSpec::swiglu(64, 48), ExpertFormat::INT8, LAYERS, EXPERTS, 29);
    let options = CacheOptions {
        capacity: Capacity::Slots(24),
        top_k: TOP_K,
        prefetch: Prefetch::Correlation,
        ring: Some(0),
        ..CacheOptions::default()
    };
    let (by_host, by_device) =
        (cache(&experts, on, host, options.clone()), cache(&experts, on, device, options));
    assert!(!by_device.layer(0).wants_device_guess(1, TOP_K), "the table guesses");
    let mut routing = Routing { layers: LAYERS, experts: EXPERTS, top_k: TOP_K, noise: Noise(3) };
    let mut alone =
        Reference { table: Correlation::new(&[EXPERTS; LAYERS], 1), guesses: vec![Vec::new(); LAYERS] };
    let mut noise = Noise(7);
    let mut compared = 0;
    for token in 0..tokens {
        // Several tokens at once, and prompts, of whose last layer only the last row is computed.
        let rows = [1, 1, 1, 1, 1, 3, 1, 1, 40][token % 9];
        let routed: Vec<_> = (0..rows).map(|_| routing.token()).collect();
        let mut calls: Vec<Call> = (0..LAYERS)
            .map(|layer| {
                let last = layer + 1 == LAYERS;
                let rows = if last { 1 } else { rows };
                let of = &routed[routed.len() - rows..];
                let ids: Vec<u32> = of.iter().flat_map(|token| token[layer].clone()).collect();
                let weights: Vec<f32> = (0..ids.len()).map(|_| noise.float().abs()).collect();
                let x = noise.floats(rows * 64, 1.0);
                let shape = (rows, TOP_K);
                Call {
                    layer,
                    x: Tensor::from_vec(x, (rows, 64), on).unwrap(),
                    ids: Tensor::from_vec(ids, shape, on).unwrap(),
                    weights: Tensor::from_vec(weights, shape, on).unwrap(),
                    raw: Default::default(),
                }
            })
            .collect();
        let refused = token % 31 == 17;
        if refused {
            calls[1].weights = (&calls[1].weights * f64::NAN).unwrap();
        }
        let want = layers(&by_host, &calls);
        let mut have = by_device.run_token(rows, TOP_K, || layers(&by_device, &calls));
        if refused {
            // What is wrong may be known later.
            have = by_device.flush().and(have);
        }
        let done = match refused {
            true => {
                for result in [&want, &have] {
                    assert!(matches!(result, Err(Error::BadRoutingWeight { layer: 1, .. })), "{result:?}");
                }
                1
            }
            false => {
                assert_eq!(have.unwrap(), want.unwrap(), "token {token}");
                LAYERS
            }
        };
        calls[..done].iter().for_each(|call| alone.observe(call, TOP_K));
        if rows == 1 && !refused && token % 9 == [0, 3, 6][token / 9 % 3] {
            // The host has the tables then.
            let guesses = by_device
                .with_backend(|backend, _| backend.device_driver()?.guesses().map_err(|e| e.to_string()))
                .unwrap();
            for (layer, want) in alone.guesses.iter().enumerate().skip(1) {
                let used_up = run_again && guesses[layer].is_empty();
                assert!(
                    used_up || guesses[layer] == *want,
                    "token {token}, layer {layer}: {guesses:?}, not {want:?}"
                );
            }
            compared += 1;
        }
        if token % 23 == 11 {
            assert_eq!(by_device.predictor_table(), Some(alone.table.tokens()));
            assert!(table_of(&by_device) == table_of(&by_host), "token {token}");
        }
        if token % 120 == 90 {
            // A table that was kept replaces what was learned, whoever drives.
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("a.table");
            by_host.save_predictor_table(&path, "m").unwrap();
            by_host.load_predictor_table(&path, "m").unwrap();
            by_device.load_predictor_table(&path, "m").unwrap();
            alone.table.load(&path, "m", by_host.directory()).unwrap();
        }
    }
    assert!(compared * 9 > tokens / 2, "{compared}");
    assert!(table_of(&by_device) == table_of(&by_host));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("alone.table");
    alone.table.save(&path, "m", by_host.directory()).unwrap();
    assert!(table_of(&by_device) == std::fs::read(&path).unwrap());
    by_device.check().unwrap();
    let stats = by_device.stats();
    assert!(stats.device_steps > 2 * tokens as u64, "{stats}");
    assert!(stats.guessed_right > 0, "{stats}");
    assert!(run_again || stats.guessed_right * 4 > stats.guessed && stats.guessed > tokens as u64, "{stats}");
    println!(
        "{} of {} guesses right, {} brought, {} used",
        stats.guessed_right, stats.guessed, stats.prefetched, stats.prefetch_used
    );
}
