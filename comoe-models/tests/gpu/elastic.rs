//! A sequence that outgrows its plan on a GPU, under captured graphs: the experts' slots give up the memory and get it back.

use candle_core::DType;
use comoe_core::{CacheOptions, Capacity, DriverKind, ExpertFormat};
use comoe_models::{Decoder, DeviceSteps, LoadOptions, Rows};

use crate::files::prompts;
use crate::graph::{Run, drawn, kept, open, same};
use crate::tiny::converted;

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
