//! Dense weights in INT8 on the CPU: the error stated, the same bits for every slot count, and every family.

mod distance;
mod files;

use std::path::Path;
use std::sync::{Arc, Mutex};

use candle_core::{DType, Device};
use comoe_core::store::{Checkpoint, Naming};
use comoe_core::trace::{Routed, RoutingObserver};
use comoe_core::{CacheOptions, Capacity, Scope};
use comoe_models::blocks::int8::Int8Layout;
use comoe_models::evaluate::divergence;
use comoe_models::load::{ConfigFile, DenseWeights};
use comoe_models::{Decoder, DenseFormat, LoadOptions, arch};

use distance::{largest_difference, logits};
use files::{Family, families, prompts, tiny};

fn open(folder: &Path, options: &LoadOptions) -> Decoder {
    Decoder::open(folder, &Device::Cpu, options, &|_| {})
        .unwrap_or_else(|e| panic!("{}: {e}", folder.display()))
}

fn int8() -> LoadOptions {
    LoadOptions { dense: DenseFormat::Int8, ..LoadOptions::default() }
}

/// The experts of every token, by layer, in one pass.
struct Choices(Arc<Mutex<Vec<Vec<Vec<u32>>>>>);

impl RoutingObserver for Choices {
    fn step(&mut self, step: &Routed<'_>) {
        let sorted = |chosen: &[u32]| {
            let mut chosen = chosen.to_vec();
            chosen.sort_unstable();
            chosen
        };
        self.0.lock().unwrap().push(step.choices.chunks(step.top_k).map(sorted).collect());
    }
}

/// Logits of a prompt, and the experts `[layer][token]`.
fn observed(decoder: &Decoder, ids: &[u32]) -> (Vec<Vec<f32>>, Vec<Vec<Vec<u32>>>) {
    let seen = Arc::new(Mutex::new(Vec::new()));
    decoder.experts().observe(Some(Box::new(Choices(seen.clone()))));
    let rows = logits(decoder, ids, ids.len());
    decoder.experts().observe(None);
    let seen = seen.lock().unwrap().clone();
    (rows, seen)
}

/// What INT8 moves is little, until it moves a token whose router hesitates to another expert: from there on a sequence is
/// another one. Both are stated, apart.
#[test]
fn the_error_of_int8_is_small_and_stated() {
    let (plain, packed) = (open(&tiny(), &LoadOptions::default()), open(&tiny(), &int8()));
    // Positions whose sequence went through the same experts so far, and the others.
    let mut worst = [0f32; 2];
    let mut divergences = [Vec::new(), Vec::new()];
    let (mut n, mut same) = (0, 0);
    for ids in prompts() {
        let ((want, experts), (have, now)) = (observed(&plain, &ids), observed(&packed, &ids));
        let moved = |t: &usize| experts.iter().zip(&now).any(|(a, b)| a[*t] != b[*t]);
        let first = (0..ids.len()).find(moved).unwrap_or(ids.len());
        for (t, (p, q)) in want.iter().zip(&have).enumerate() {
            let other = usize::from(t >= first);
            let off = p.iter().zip(q).map(|(p, q)| (p - q).abs()).fold(0.0, f32::max);
            worst[other] = worst[other].max(off);
            divergences[other].push(divergence(p, q));
            let best = |row: &[f32]| (0..row.len()).max_by(|a, b| row[*a].total_cmp(&row[*b]));
            n += 1;
            same += usize::from(best(p) == best(q));
        }
    }
    let stated = |which: usize| {
        let d = &divergences[which];
        let mean = d.iter().sum::<f64>() / d.len().max(1) as f64;
        (mean, d.iter().fold(0f64, |m, d| m.max(*d)))
    };
    for (which, what) in ["the same experts", "other experts"].into_iter().enumerate() {
        let (mean, most) = stated(which);
        println!(
            "dense INT8, {} positions after {what}: logits differ by at most {:.3}, KL {mean:.2e} in the mean and {most:.2e} \
             at most",
            divergences[which].len(),
            worst[which]
        );
    }
    let all = divergences.iter().flatten().sum::<f64>() / n as f64;
    println!("all {n}: KL {all:.2e} in the mean, the likeliest token is the same at {same}");
    assert!(worst[0] > 0.0, "INT8 is not the same");
    assert!(divergences[0].len() * 2 > n, "{} of {n} went through the same experts", divergences[0].len());
    let (mean, most) = stated(0);
    assert!(worst[0] < 0.5 && mean < 5e-4 && most < 1e-2, "{} {mean} {most}", worst[0]);
    assert!(all < 5e-2 && same * 100 >= 95 * n, "KL {all}, {same} of {n}");
}

#[test]
fn bits_do_not_depend_on_the_slots() {
    let ids: Vec<u32> = prompts().into_iter().flatten().take(40).collect();
    let bits = |capacity, scope| {
        let cache = CacheOptions { capacity, scope, ..CacheOptions::default() };
        let decoder = open(&tiny(), &LoadOptions { cache, ..int8() });
        let rows = [ids.len(), 7, 1].into_iter().flat_map(|step| logits(&decoder, &ids, step));
        rows.flatten().map(f32::to_bits).collect::<Vec<_>>()
    };
    let want = bits(Capacity::All, Scope::Layer);
    for (slots, scope) in [(2, Scope::Global), (13, Scope::Layer), (40, Scope::Global), (95, Scope::Layer)] {
        assert!(bits(Capacity::Slots(slots), scope) == want, "{slots} slots, scope {scope}");
    }
}

#[test]
fn every_family_gives_the_same_logits_however_the_tokens_come() {
    for Family { name, folder, ids, logits: plain } in families() {
        let decoder = open(&folder, &int8());
        let whole = logits(&decoder, &ids, ids.len());
        let by_one = largest_difference(&whole, &logits(&decoder, &ids, 1));
        let off = largest_difference(&whole, &plain);
        println!("{name}: {by_one:.1e} one by one, {off:.1e} from the plain model");
        assert!(by_one < 1e-4, "{name}: {by_one}");
        assert!(off > 1e-4, "{name}: nothing is in INT8");
    }
}

#[test]
fn planned_bytes_are_those_of_the_packed_matrices() {
    let files = [1, 2].map(|n| tiny().join(format!("model-0000{n}-of-00002.safetensors")));
    let checkpoint = Checkpoint::open(&files).unwrap();
    let text = std::fs::read_to_string(tiny().join("config.json")).unwrap();
    let plan = arch::plan(&ConfigFile::parse(Path::new("config.json"), &text).unwrap()).unwrap();
    let naming = Naming::auto();
    let bytes = |format| {
        let weights = DenseWeights::new(&checkpoint, &naming, DType::F32, &Device::Cpu, &|_| {}).unwrap();
        weights.with_format(format, &plan).unwrap().device_bytes()
    };
    let mut saved = 0;
    for layer in &plan.layers {
        let arch::MixerPlan::Attention(a) = &layer.mixer else { panic!("attention") };
        let widths = [a.heads, a.kv_heads, a.kv_heads].map(|heads| heads * a.head_dim);
        let matrices = widths.iter().map(|rows| (*rows, plan.hidden)).chain([(plan.hidden, widths[0])]);
        for (rows, columns) in matrices {
            saved += (4 * rows * columns - Int8Layout::new(rows, columns).bytes) as u64;
        }
    }
    if !plan.tied_head {
        saved += (4 * plan.vocab * plan.hidden - Int8Layout::new(plan.vocab, plan.hidden).bytes) as u64;
    }
    assert_eq!(bytes(DenseFormat::Plain) - bytes(DenseFormat::Int8), saved);
}
