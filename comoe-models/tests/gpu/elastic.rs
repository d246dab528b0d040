//! A sequence that outgrows its plan on a GPU, under captured graphs: the experts' slots give up the memory and get it back.

use candle_core::DType;
use comoe_core::{CacheOptions, Capacity, DriverKind, ExpertFormat, cuda_give_back, cuda_memory};
use comoe_models::{Decoder, DeviceSteps, LoadOptions, Rows};
use cudarc::driver::result;

use crate::files::prompts;
use crate::graph::{Run, drawn, kept, open, same};
use crate::synthetic;
use crate::tiny::{GPU, converted};

/// `n` tokens of one sequence that grows as it goes, from its planned context on, and is then cut back.
fn grow(decoder: &Decoder, n: usize, graph: bool) -> (Run, usize) {
    let prompt = &prompts()[0];
    let mut kv = decoder.new_kv().expect("a KV cache");
    let mut steps = DeviceSteps::of(decoder).expect("memory").expect("fused steps");
    steps.begin(&drawn(3), prompt).expect("options");
    let logits = decoder.forward(prompt, &mut kv, Rows::Last).expect("a prompt");
    let mut tokens = vec![steps.choose(&logits, &mut kv).expect("a token")];
    let mut moves = 0;
    while tokens.len() < n {
        let replayed = if graph { steps.next(&mut kv, n - tokens.len()).expect("a step") } else { None };
        let next = match replayed {
            Some(token) => token,
            None => {
                if kv.len() == kv.capacity() {
                    steps.let_go();
                    decoder.make_room(&mut kv, prompt.len() + tokens.len()).expect("room");
                    steps.reach_to(kv.capacity()).expect("memory");
                    moves += 1;
                }
                let last = tokens[tokens.len() - 1];
                let logits = decoder.forward(&[last], &mut kv, Rows::Last).expect("a step");
                steps.choose(&logits, &mut kv).expect("a token")
            }
        };
        tokens.push(next);
    }
    steps.settle();
    let run =
        Run { tokens, kept: kept(&kv), replayed: steps.replayed(), note: steps.note().map(str::to_owned) };
    steps.let_go();
    kv.truncate(0);
    decoder.cut_back(&mut kv).expect("back to the plan");
    assert_eq!(kv.capacity(), decoder.context());
    (run, moves)
}

#[test]
#[ignore = "needs a CUDA device"]
fn a_context_that_grows_under_a_graph_takes_slots_and_gives_them_back() {
    // Slots leave in chunks of 2 MiB: of 60 in F32 those beyond the least can give up three.
    let n = 860 - prompts()[0].len();
    for (format, dtype, slots, driver) in [
        (None, DType::F32, 60, DriverKind::Auto),
        (None, DType::BF16, 60, DriverKind::Device),
        (Some(ExpertFormat::INT8), DType::BF16, 80, DriverKind::Device),
        (None, DType::F32, 60, DriverKind::Host),
    ] {
        let context = Some(prompts()[0].len() + 20);
        let cache_dir = Some(converted());
        let options = LoadOptions { format, dtype, context, cache_dir, ..LoadOptions::default() };
        let (want, _) = grow(&open(&options), n, false);
        let cache = CacheOptions { capacity: Capacity::Slots(slots), driver, ..CacheOptions::default() };
        let few = open(&LoadOptions { cache, ..options });
        let experts = few.experts();
        let whole = experts.slots_in_force();
        let (have, moves) = grow(&few, n, true);
        let what = format!("{format:?}, {dtype:?}, {slots} slots, driver {driver}");
        same(&have, &want, &what);
        let stats = experts.stats();
        println!(
            "{what}: {} of {n} tokens replayed, the cache moved {moves} times, {} slots at least, {} at most",
            have.replayed, stats.least_slots, stats.most_slots
        );
        // Keys and values in BF16 take half.
        let part = if dtype == DType::F32 { 2 * stats.least_slots } else { 4 * stats.least_slots / 3 };
        assert!(part <= slots, "{what}: {stats}");
        assert_eq!(experts.slots_in_force(), whole, "{what}");
        match driver {
            DriverKind::Host => assert_eq!(have.replayed, 0, "{what}"),
            // One of each kind runs one by one, and one each time the cache moves.
            _ => assert!(have.replayed + 4 * moves + 8 > n, "{what}: {:?}", have.note),
        }
        // Again, with the graphs gone and the slots back.
        let (again, _) = grow(&few, n, true);
        same(&again, &want, &what);
        experts.check().expect("slots equal the store");
    }
}

/// The number of slots changes between replays of one graph, which stays good.
#[test]
#[ignore = "needs a CUDA device"]
fn a_graph_holds_while_slots_come_and_go() {
    let prompt = &prompts()[0];
    let decoder = |slots| {
        let cache = CacheOptions {
            capacity: Capacity::Slots(slots),
            driver: DriverKind::Device,
            ..CacheOptions::default()
        };
        open(&LoadOptions { dtype: DType::BF16, cache, ..LoadOptions::default() })
    };
    let (resident, few) = (decoder(96), decoder(72));
    let run = |decoder: &Decoder, resize: bool| {
        let mut kv = decoder.new_kv().expect("a KV cache");
        let mut steps = DeviceSteps::of(decoder).expect("memory").expect("fused steps");
        steps.begin(&drawn(5), prompt).expect("options");
        let logits = decoder.forward(prompt, &mut kv, Rows::Last).expect("a prompt");
        let mut tokens = vec![steps.choose(&logits, &mut kv).expect("a token")];
        let mut nodes = Vec::new();
        // Within one reach of attention, so that one graph is good for all.
        while prompt.len() + tokens.len() < 500 {
            if resize && tokens.len() % 10 == 0 {
                decoder.experts().resize(12 + 37 * tokens.len() % 61).expect("slots");
            }
            let left = 500 - prompt.len() - tokens.len();
            let next = match steps.next(&mut kv, left).expect("a step") {
                Some(token) => token,
                None => {
                    let logits =
                        decoder.forward(&tokens[tokens.len() - 1..], &mut kv, Rows::Last).expect("a step");
                    steps.choose(&logits, &mut kv).expect("a token")
                }
            };
            nodes.extend(steps.nodes());
            tokens.push(next);
        }
        steps.settle();
        (Run { tokens, kept: kept(&kv), replayed: steps.replayed(), note: None }, nodes)
    };
    let ((want, _), (have, nodes)) = (run(&resident, false), run(&few, true));
    same(&have, &want, "slots that come and go");
    assert!(have.replayed + 3 > have.tokens.len() && nodes.windows(2).all(|n| n[0] == n[1]));
    let stats = few.experts().stats();
    println!(
        "{} replays, {} resizes, {} to {} slots",
        have.replayed, stats.resizes, stats.least_slots, stats.most_slots
    );
    assert!(stats.resizes > 20 && stats.least_slots < 20, "{stats}");
    few.experts().check().expect("slots equal the store");
}

/// Another program's memory: all of the GPU's but `left` bytes.
struct Hog(Vec<u64>);

impl Hog {
    fn all_but(left: u64) -> Self {
        let mut held = Vec::new();
        for piece in [1 << 30, 64 << 20, 2 << 20] {
            while cuda_memory(&GPU).expect("a GPU").0 >= left + piece {
                // SAFETY: the device is open and its context bound; `Drop` frees it once.
                let Ok(at) = (unsafe { result::malloc_sync(piece as usize) }) else { break };
                held.push(at);
            }
        }
        Self(held)
    }
}

impl Drop for Hog {
    fn drop(&mut self) {
        for at in self.0.drain(..) {
            // SAFETY: allocated by `all_but`, and used by nobody.
            let _ = unsafe { result::free_sync(at) };
        }
    }
}

/// Issue 7: memory that is gone when a prompt's activations want it, in the middle of a sequence, comes from the slots.
#[test]
#[ignore = "needs a CUDA device"]
fn a_step_that_finds_no_memory_is_made_again_with_that_of_slots() {
    // Experts of 3 MiB: slots give up more than the driver's pool takes in one piece, wherever pieces lie.
    let folder = tempfile::tempdir().expect("a folder");
    synthetic::write(folder.path(), 2048);
    let prompt = synthetic::tokens(1000, 7);
    for driver in [DriverKind::Device, DriverKind::Host] {
        let cache = CacheOptions { capacity: Capacity::Slots(60), driver, ..CacheOptions::default() };
        // In F32 attention keeps scores, which the slack of the driver's pool has no room for.
        let options = LoadOptions { dtype: DType::F32, cache, ..LoadOptions::default() };
        let decoder = Decoder::open(folder.path(), &GPU, &options, &|_| {}).expect("the model loads");
        let logits = |decoder: &Decoder| -> comoe_models::Result<Vec<f32>> {
            let mut kv = decoder.new_kv()?;
            let (first, rest) = prompt.split_at(9);
            decoder.forward(first, &mut kv, Rows::Last)?;
            Ok(decoder.forward(rest, &mut kv, Rows::Last)?.flatten_all()?.to_vec1()?)
        };
        // Kernels are loaded, and what only grows has grown, before memory is gone.
        let want = logits(&decoder).expect("a prompt");
        let mut kv = decoder.new_kv().expect("a KV cache");
        decoder.forward(&prompt[..9], &mut kv, Rows::Last).expect("a prompt");
        let mut lent = None;
        // From what the driver's pool is content with to nothing.
        for left in (0..25u64).rev().map(|n| n * (8 << 20)) {
            cuda_give_back(&GPU).expect("a GPU");
            let hog = Hog::all_but(left);
            let got = decoder.forward(&prompt[9..], &mut kv, Rows::Last);
            let force = decoder.experts().slots_in_force();
            let how = got.as_ref().err().map_or("done".to_owned(), ToString::to_string);
            println!("{driver}: {} MiB left: {} of {} slots, {how}", left >> 20, force.slots, force.most);
            drop(hog);
            let got = got.and_then(|y| Ok(y.flatten_all()?.to_vec1::<f32>()?)).expect("slots make room");
            assert!(got.iter().zip(&want).all(|(a, b)| a.to_bits() == b.to_bits()), "{driver}, {left} left");
            kv.truncate(9);
            if force.slots < force.most {
                lent = Some(force.slots);
                break;
            }
        }
        assert!(lent.is_some(), "{driver}: memory never ran out");
        decoder.experts().check().expect("slots equal the store");
    }
}
