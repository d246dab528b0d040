//! Routing.

use candle_core::DType;
use comoe_models::arch::{GroupScore, Groups, Normalise, RouterPlan, RouterPrecision, Score};
use comoe_models::cuda::RouteArgs;

use super::{GPU, Memory, random, round};

struct Extras<'a> {
    bias: Option<&'a [f32]>,
    expert_scale: Option<&'a [f32]>,
}

/// What F64 says: keys that experts are chosen by, ids and weights of one token.
fn reference(logits: &[f64], plan: &RouterPlan, extras: &Extras<'_>) -> (Vec<f64>, Vec<u32>, Vec<f64>) {
    let best = |keys: &[f64]| {
        let better = |a: usize, b: usize| {
            if keys[b] > keys[a] || keys[a].is_nan() && !keys[b].is_nan() { b } else { a }
        };
        (0..keys.len()).reduce(better).expect("experts")
    };
    let greatest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let score: Vec<f64> = match plan.score {
        Score::Softmax => {
            let e: Vec<f64> = logits.iter().map(|l| (l - greatest).exp()).collect();
            let sum: f64 = e.iter().sum();
            e.iter().map(|e| e / sum).collect()
        }
        Score::Sigmoid => logits.iter().map(|l| 1.0 / (1.0 + (-l).exp())).collect(),
        _ => logits.to_vec(),
    };
    let mut keys: Vec<f64> =
        score.iter().enumerate().map(|(e, s)| s + extras.bias.map_or(0.0, |b| f64::from(b[e]))).collect();
    if let Some(groups) = plan.groups {
        let size = keys.len() / groups.count;
        let mut judged: Vec<f64> = keys
            .chunks(size)
            .map(|g| {
                let mut g = g.to_vec();
                g.sort_by(|a, b| b.total_cmp(a));
                if groups.by == GroupScore::Best { g[0] } else { g[0] + g[1] }
            })
            .collect();
        let kept: Vec<usize> = (0..groups.keep)
            .map(|_| {
                let g = best(&judged);
                judged[g] = f64::NAN;
                g
            })
            .collect();
        for (g, group) in keys.chunks_mut(size).enumerate() {
            if !kept.contains(&g) {
                group.fill(f64::NEG_INFINITY);
            }
        }
    }
    let all = keys.clone();
    let (mut ids, mut weights) = (Vec::new(), Vec::new());
    for _ in 0..plan.top_k {
        let e = best(&keys);
        ids.push(e as u32);
        weights.push(match plan.score {
            Score::SparseMixer { tolerance } => {
                let near = |l: f64| keys[e] - l <= 2.0 * tolerance * l.abs().max(keys[e]);
                let left = keys.iter().filter(|l| !l.is_nan() && near(**l));
                1.0 / left.map(|l| (l - keys[e]).exp()).sum::<f64>()
            }
            _ => score[e],
        });
        keys[e] = f64::NAN;
    }
    if plan.score == Score::SoftmaxOfChosen {
        let top = weights.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        weights.iter_mut().for_each(|w| *w = (*w - top).exp());
        let sum: f64 = weights.iter().sum();
        weights.iter_mut().for_each(|w| *w /= sum);
    }
    let sum: f64 = weights.iter().sum();
    let divisor = match plan.normalise {
        Normalise::No => 1.0,
        Normalise::Sum { eps } => sum + eps,
        Normalise::AtLeast(least) => sum.max(least),
    };
    for (w, e) in weights.iter_mut().zip(&ids) {
        *w = *w / divisor * plan.scale * extras.expert_scale.map_or(1.0, |s| f64::from(s[*e as usize]));
    }
    (all, ids, weights)
}

#[test]
#[ignore = "needs a CUDA device"]
fn routing_is_what_f64_says() {
    let plain = |top_k: usize, score: Score, normalise: Normalise| RouterPlan {
        score,
        normalise,
        precision: RouterPrecision::ModelLogits,
        ..RouterPlan::softmax(top_k, false)
    };
    let sum = Normalise::Sum { eps: 1e-20 };
    let groups = |count, keep, by| Some(Groups { count, keep, by });
    let plans = [
        (128, plain(8, Score::Softmax, sum), false, false),
        (60, plain(4, Score::Softmax, Normalise::No), false, false),
        (
            256,
            RouterPlan {
                scale: 2.5,
                groups: groups(8, 4, GroupScore::BestTwo),
                ..plain(8, Score::Sigmoid, sum)
            },
            true,
            false,
        ),
        (
            160,
            RouterPlan {
                scale: 16.0,
                groups: groups(8, 3, GroupScore::Best),
                ..plain(6, Score::Softmax, Normalise::No)
            },
            false,
            false,
        ),
        (33, plain(33, Score::Sigmoid, Normalise::AtLeast(1e-12)), false, true),
        (16, plain(1, Score::Sigmoid, Normalise::No), false, false),
        (32, plain(4, Score::SoftmaxOfChosen, Normalise::No), false, true),
        (16, plain(2, Score::SparseMixer { tolerance: 0.01 }, Normalise::No), false, false),
        (1024, plain(2, Score::Softmax, sum), false, false),
        (1, plain(1, Score::Softmax, sum), false, false),
        (
            512,
            RouterPlan { precision: RouterPrecision::Model, ..plain(10, Score::Softmax, sum) },
            false,
            false,
        ),
    ];
    for (case, (experts, plan, biased, scaled)) in plans.into_iter().enumerate() {
        let (tokens, dtype) = (37, [DType::F32, DType::BF16, DType::F16][case % 3]);
        let top_k = plan.top_k;
        // A coarse grid, so that keys that differ do so by far more than F32 rounds, and ties are many.
        let mut values: Vec<f32> = random(tokens * experts, case as u64 + 1, DType::F32)
            .iter()
            .map(|v| (v * 32.0).round() / 8.0)
            .collect();
        let bias: Vec<f32> =
            random(experts, 99, DType::F32).iter().map(|v| (v * 4.0).round() / 4.0).collect();
        let factors: Vec<f32> = random(experts, 98, DType::F32).iter().map(|v| v + 2.0).collect();
        // A masked expert is allowed, where others are left.
        if experts > top_k && plan.groups.is_none() {
            values[experts] = f32::NEG_INFINITY;
        }
        let route = |values: &[f32]| {
            let tokens = values.len() / experts;
            let logits = Memory::floats(values, dtype);
            let (bias_on, factors_on) =
                (Memory::floats(&bias, DType::F32), Memory::floats(&factors, DType::F32));
            let (ids, weights) = (Memory::result(4 * tokens * top_k), Memory::result(4 * tokens * top_k));
            let error = Memory::zeros(4);
            let args = RouteArgs {
                logits: logits.address(),
                logits_dtype: dtype,
                model_dtype: DType::BF16,
                choice_bias: if biased { bias_on.address() } else { 0 },
                expert_scale: if scaled { factors_on.address() } else { 0 },
                tokens,
                experts,
                plan,
                ids: ids.address(),
                weights: weights.address(),
                given: None,
                error: error.address(),
            };
            // SAFETY: every buffer is as long as documented and lives until the downloads have waited.
            unsafe { GPU.kernels.route(&GPU.stream, &args) }.expect("route");
            (ids.read_words(), weights.read_floats(DType::F32), error.read_words()[0])
        };
        let what = format!("{experts} experts, {plan:?}, {dtype:?}");
        let (ids, weights, error) = route(&values);
        assert_eq!(error, 0, "{what}");
        let extras = Extras { bias: biased.then_some(&bias), expert_scale: scaled.then_some(&factors) };
        for t in 0..tokens {
            let logits: Vec<f64> =
                values[t * experts..(t + 1) * experts].iter().map(|v| f64::from(*v)).collect();
            let (keys, want_ids, want) = reference(&logits, &plan, &extras);
            let range = t * top_k..(t + 1) * top_k;
            // With a bias, two different sums may lie within F32's rounding of each other; without, never.
            if !biased {
                assert_eq!(ids[range.clone()], want_ids, "{what}: token {t}");
                for (have, want) in weights[range.clone()].iter().zip(&want) {
                    let (want, tolerance) = match plan.precision {
                        RouterPrecision::Model => (round(*want, DType::BF16), 1.0 / 200.0),
                        _ => (*want, 4e-6),
                    };
                    let off = (f64::from(*have) - want).abs();
                    assert!(off <= tolerance * want.abs(), "{what}: token {t}: {have}, want {want}");
                }
            } else {
                let mut seen = ids[range.clone()].to_vec();
                seen.sort_unstable();
                seen.dedup();
                assert_eq!(seen.len(), top_k, "{what}: token {t} chose an expert twice");
                for (have, want) in ids[range.clone()].iter().zip(&want_ids) {
                    let (have, want) = (keys[*have as usize], keys[*want as usize]);
                    assert!((have - want).abs() < 1e-6, "{what}: token {t}: {have}, want {want}");
                }
            }
            // Alone, the token gets the same bits.
            let alone = route(&values[t * experts..(t + 1) * experts]);
            assert_eq!(
                (&alone.0[..], &alone.1[..]),
                (&ids[range.clone()], &weights[range]),
                "{what}: token {t}"
            );
        }
        // A NaN is reported, and the ids stay usable.
        for bad in [f32::NAN, f32::INFINITY] {
            let mut broken = values[..3 * experts].to_vec();
            broken[2 * experts + experts / 2] = bad;
            let (ids, _, error) = route(&broken);
            assert_eq!(error, 3, "{what}");
            assert!(ids.iter().all(|id| (*id as usize) < experts), "{what}");
        }
    }
}
