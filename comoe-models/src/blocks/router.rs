//! Which experts serve a token, and with which weights.

use candle_core::{DType, Device, Tensor};
use half::{bf16, f16};
use rayon::prelude::*;

use super::linear::Linear;
use super::norm::RmsNorm;
use super::step::Step;
use crate::arch::{GroupScore, Groups, Normalise, RouterPlan, RouterPrecision, Score};
use crate::error::{Error, Result};

/// Rows that one thread routes at a time: about 50 us with 128 experts.
const ROWS_A_TASK: usize = 32;

/// A router: projection, scores, choice, weights.
#[derive(Debug, Clone)]
pub struct Router {
    projection: Linear,
    extras: RouterExtras,
    on_device: OnDevice,
    plan: RouterPlan,
    layer: usize,
}

/// Numbers of [`RouterExtras`] where the projection is, `[experts]` in F32.
#[derive(Debug, Clone)]
#[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "read by kernels"))]
pub(super) struct OnDevice {
    pub(super) choice_bias: Option<Tensor>,
    pub(super) expert_scale: Option<Tensor>,
}

/// What some routers have besides their projection, where the plan says so.
#[derive(Debug, Clone, Default)]
pub struct RouterExtras {
    /// Added to the scores for the choice alone, `[experts]`.
    pub choice_bias: Option<Vec<f32>>,
    /// Factors on the experts' weights, `[experts]`.
    pub expert_scale: Option<Vec<f32>>,
    /// A norm over what the router sees.
    pub norm: Option<RmsNorm>,
}

impl Router {
    /// A router of the model's layer `layer` (for messages) with projection `[experts, hidden]`.
    ///
    /// # Errors
    /// Those of candle.
    pub fn new(projection: Linear, extras: RouterExtras, plan: RouterPlan, layer: usize) -> Result<Self> {
        let there = |numbers: &Option<Vec<f32>>| {
            numbers.as_ref().map(|n| Tensor::new(n.as_slice(), projection.device())).transpose()
        };
        let on_device =
            OnDevice { choice_bias: there(&extras.choice_bias)?, expert_scale: there(&extras.expert_scale)? };
        Ok(Self { projection, extras, on_device, plan, layer })
    }

    /// Experts that it chooses for a token.
    pub(super) fn top_k(&self) -> usize {
        self.plan.top_k
    }

    /// The same router, choosing `top_k` experts.
    pub(super) fn choosing(&self, top_k: usize) -> Self {
        Self { plan: RouterPlan { top_k, ..self.plan }, ..self.clone() }
    }

    /// Routes `x [tokens, hidden]`: expert ids `[tokens, top_k]` (U32) and weights `[tokens, top_k]` (F32), the first
    /// choice first.
    ///
    /// Both are host tensors whatever the model's device, because the cache's schedule decides on the host; in a fused
    /// step they stay on the device.
    ///
    /// # Errors
    /// [`Error::BadRouter`] when an output is not a number; in a fused step an error word says so, which the decoder
    /// looks at when the step is done.
    pub fn forward(&self, x: &Tensor, step: Step<'_>) -> Result<(Tensor, Tensor)> {
        let dtype = x.dtype();
        let mut input = match &self.extras.norm {
            Some(norm) => norm.forward(x, step)?,
            None => x.clone(),
        };
        // Fused kernels multiply in F32 in any case, and take the input as it is.
        let wide = matches!(self.plan.precision, RouterPrecision::F32 | RouterPrecision::F32Logits);
        if wide && matches!(step, Step::At(_)) {
            input = input.to_dtype(DType::F32)?;
        }
        let logits = self.projection.forward(&input, step)?;
        if let Step::Fused(fused) = step {
            return Ok(fused.route(&logits, dtype, &self.plan, &self.on_device, self.layer)?);
        }
        let (tokens, experts) = logits.dims2()?;
        let logits = logits.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
        let (ids, mut weights) = route(&logits, experts, &self.plan, &self.extras)
            .map_err(|token| Error::BadRouter { layer: self.layer, token })?;
        if matches!(self.plan.precision, RouterPrecision::Model | RouterPrecision::F32Logits) {
            match dtype {
                DType::BF16 => weights.iter_mut().for_each(|w| *w = bf16::from_f32(*w).to_f32()),
                DType::F16 => weights.iter_mut().for_each(|w| *w = f16::from_f32(*w).to_f32()),
                _ => {}
            }
        }
        let shape = (tokens, self.plan.top_k);
        Ok((Tensor::from_vec(ids, shape, &Device::Cpu)?, Tensor::from_vec(weights, shape, &Device::Cpu)?))
    }
}

/// Routes rows of `experts` logits, those of a prompt on every thread. The error is the first row with an output that is
/// no number.
fn route(
    logits: &[f32],
    experts: usize,
    plan: &RouterPlan,
    extras: &RouterExtras,
) -> std::result::Result<(Vec<u32>, Vec<f32>), usize> {
    if logits.len() <= ROWS_A_TASK * experts {
        return route_rows(logits, experts, plan, extras);
    }
    let tasks = logits.par_chunks(ROWS_A_TASK * experts).enumerate();
    let parts: Vec<_> = tasks
        .map(|(i, rows)| route_rows(rows, experts, plan, extras).map_err(|token| i * ROWS_A_TASK + token))
        .collect();
    let (mut ids, mut weights) = (Vec::new(), Vec::new());
    for part in parts {
        let (part_ids, part_weights) = part?;
        ids.extend(part_ids);
        weights.extend(part_weights);
    }
    Ok((ids, weights))
}

fn route_rows(
    logits: &[f32],
    experts: usize,
    plan: &RouterPlan,
    extras: &RouterExtras,
) -> std::result::Result<(Vec<u32>, Vec<f32>), usize> {
    let tokens = logits.len() / experts;
    let mut ids = Vec::with_capacity(tokens * plan.top_k);
    let mut weights = Vec::with_capacity(tokens * plan.top_k);
    let (mut scores, mut keys) = (vec![0f32; experts], vec![0f32; experts]);
    for (token, row) in logits.chunks_exact(experts).enumerate() {
        let top = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        if !top.is_finite() || row.iter().any(|l| l.is_nan()) {
            return Err(token);
        }
        let first = weights.len();
        if let Score::SparseMixer { tolerance } = plan.score {
            sparse_mixer(row, 2.0 * tolerance as f32, plan.top_k, &mut keys, &mut ids, &mut weights);
        } else {
            score(plan.score, row, top, &mut scores);
            keys.copy_from_slice(&scores);
            match &extras.choice_bias {
                Some(bias) => keys.iter_mut().zip(bias).for_each(|(key, bias)| *key += bias),
                // The order of sigmoids is that of logits, which do not saturate.
                None if plan.groups.is_none() && plan.score == Score::Sigmoid => keys.copy_from_slice(row),
                None => {}
            }
            if let Some(groups) = plan.groups {
                drop_groups(groups, &mut keys);
            }
            for _ in 0..plan.top_k {
                let best = take_best(&mut keys);
                ids.push(best as u32);
                weights.push(scores[best]);
            }
        }
        let weights = &mut weights[first..];
        if plan.score == Score::SoftmaxOfChosen {
            let top = weights.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            weights.iter_mut().for_each(|w| *w = (*w - top).exp());
            divide_by(weights.iter().sum(), weights);
        }
        match plan.normalise {
            Normalise::No => {}
            Normalise::Sum { eps } => divide_by(weights.iter().sum::<f32>() + eps as f32, weights),
            Normalise::AtLeast(least) => divide_by(weights.iter().sum::<f32>().max(least as f32), weights),
        }
        if plan.scale != 1.0 {
            weights.iter_mut().for_each(|w| *w *= plan.scale as f32);
        }
        if let Some(scale) = &extras.expert_scale {
            weights.iter_mut().zip(&ids[first..]).for_each(|(w, e)| *w *= scale[*e as usize]);
        }
    }
    Ok((ids, weights))
}

fn divide_by(sum: f32, weights: &mut [f32]) {
    weights.iter_mut().for_each(|w| *w /= sum);
}

/// Scores of a row of logits, whose largest is `top`.
fn score(score: Score, row: &[f32], top: f32, out: &mut [f32]) {
    match score {
        Score::Softmax => {
            out.iter_mut().zip(row).for_each(|(p, l)| *p = (l - top).exp());
            divide_by(out.iter().sum(), out);
        }
        Score::Sigmoid => out.iter_mut().zip(row).for_each(|(s, l)| *s = 1.0 / (1.0 + (-l).exp())),
        Score::SoftmaxOfChosen | Score::SparseMixer { .. } => out.copy_from_slice(row),
    }
}

/// The first of the largest; it is marked as taken.
fn take_best(keys: &mut [f32]) -> usize {
    let mut best = 0;
    for (e, key) in keys.iter().enumerate() {
        if *key > keys[best] || keys[best].is_nan() && !key.is_nan() {
            best = e;
        }
    }
    keys[best] = f32::NAN;
    best
}

/// Puts the keys of all but the best groups below every other key.
fn drop_groups(groups: Groups, keys: &mut [f32]) {
    let size = keys.len() / groups.count;
    let judge = |group: &[f32]| {
        let (mut best, mut second) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
        for key in group {
            if *key > best {
                (best, second) = (*key, best);
            } else if *key > second {
                second = *key;
            }
        }
        match groups.by {
            GroupScore::Best => best,
            GroupScore::BestTwo => best + second,
        }
    };
    let mut judged: Vec<f32> = keys.chunks_exact(size).map(judge).collect();
    let kept: Vec<usize> = (0..groups.keep).map(|_| take_best(&mut judged)).collect();
    for (g, group) in keys.chunks_exact_mut(size).enumerate() {
        if !kept.contains(&g) {
            group.fill(f32::NEG_INFINITY);
        }
    }
}

/// SparseMixer at inference: choices one after the other, each weighted by a softmax over the experts that are left
/// and whose logit is within `tolerance` of the largest left, relative to the larger of the two.
fn sparse_mixer(
    row: &[f32],
    tolerance: f32,
    top_k: usize,
    left: &mut [f32],
    ids: &mut Vec<u32>,
    weights: &mut Vec<f32>,
) {
    left.copy_from_slice(row);
    for _ in 0..top_k {
        let top = left.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let best = left.iter().position(|l| *l == top).unwrap_or(0);
        let near = |l: f32| l > f32::NEG_INFINITY && top - l <= tolerance * l.abs().max(top);
        let sum: f32 = left.iter().filter(|l| near(**l)).map(|l| (l - top).exp()).sum();
        ids.push(best as u32);
        // The best is near itself, and its term of the sum is 1.
        weights.push(1.0 / sum);
        left[best] = f32::NEG_INFINITY;
    }
}

#[cfg(test)]
mod tests {
    use candle_core::D;

    use super::*;
    use crate::testing::{close, random};

    #[test]
    fn agrees_with_candle_operations() {
        let (tokens, hidden, experts) = (9, 32, 16);
        let (x, w) = (random(&[tokens, hidden], 1), random(&[experts, hidden], 2));
        for normalise in [false, true] {
            let router = Router::new(
                Linear::new(&w, None).unwrap(),
                RouterExtras::default(),
                RouterPlan::softmax(4, normalise),
                0,
            )
            .unwrap();
            let (ids, weights) = router.forward(&x, Step::At(0)).unwrap();
            let p = candle_nn::ops::softmax(&x.matmul(&w.t().unwrap()).unwrap(), D::Minus1).unwrap();
            let want_ids = p.arg_sort_last_dim(false).unwrap().narrow(1, 0, 4).unwrap().contiguous().unwrap();
            let mut want = p.gather(&want_ids, 1).unwrap();
            if normalise {
                want = want.broadcast_div(&want.sum_keepdim(1).unwrap()).unwrap();
            }
            assert_eq!(ids.to_vec2::<u32>().unwrap(), want_ids.to_vec2::<u32>().unwrap());
            close(&weights, &want, 1e-6);
        }
    }

    fn choose(logits: &[f32], plan: RouterPlan) -> (Vec<u32>, Vec<f32>) {
        route(logits, logits.len(), &plan, &RouterExtras::default()).unwrap()
    }

    #[test]
    fn ties_go_to_the_lowest_number_and_all_experts_can_be_chosen() {
        let plan = |top_k| RouterPlan::softmax(top_k, true);
        assert_eq!(choose(&[1.0, 2.0, 2.0, 2.0], plan(2)).0, [1, 2]);
        assert_eq!(choose(&[-0.0, 0.0], plan(1)).0, [0]);
        let (ids, w) = choose(&[0.0, -200.0, 5.0], plan(3));
        assert_eq!(ids, [2, 0, 1]);
        assert!((w.iter().sum::<f32>() - 1.0).abs() < 1e-6);
        // Sigmoids that are 1 in F32 are still told apart by their logits.
        let sigmoid = RouterPlan { score: Score::Sigmoid, ..RouterPlan::softmax(1, false) };
        assert_eq!(choose(&[30.0, 40.0], sigmoid), (vec![1], vec![1.0]));
    }

    /// Written-out examples, computed by hand.
    #[test]
    fn groups_are_judged_by_their_best_or_their_best_two() {
        let logits = [3.0, -9.0, 2.0, 2.0, 1.0, 1.5, -1.0, -1.0];
        let plan = |keep, by| RouterPlan {
            groups: Some(Groups { count: 4, keep, by }),
            score: Score::SoftmaxOfChosen,
            ..RouterPlan::softmax(2, false)
        };
        // Bests are 3, 2, 1.5, -1; sums of two -6, 4, 2.5, -2.
        assert_eq!(choose(&logits, plan(1, GroupScore::Best)).0, [0, 1]);
        assert_eq!(choose(&logits, plan(1, GroupScore::BestTwo)).0, [2, 3]);
        assert_eq!(choose(&logits, plan(2, GroupScore::BestTwo)).0, [2, 3]);
        assert_eq!(choose(&logits, plan(4, GroupScore::BestTwo)).0, [0, 2]);
    }

    #[test]
    fn a_bias_chooses_and_does_not_weigh() {
        let plan = RouterPlan {
            score: Score::Sigmoid,
            choice_bias: true,
            normalise: Normalise::Sum { eps: 0.0 },
            scale: 2.5,
            ..RouterPlan::softmax(2, true)
        };
        let extras = RouterExtras { choice_bias: Some(vec![0.0, 0.0, 5.0, 0.0]), ..RouterExtras::default() };
        let (ids, weights) = route(&[0.0, 1.0, -1.0, -2.0], 4, &plan, &extras).unwrap();
        assert_eq!(ids, [2, 1]);
        let sigmoid = |x: f32| 1.0 / (1.0 + (-x).exp());
        let sum = sigmoid(-1.0) + sigmoid(1.0);
        assert!((weights[0] - 2.5 * sigmoid(-1.0) / sum).abs() < 1e-6);
        assert!((weights[1] - 2.5 * sigmoid(1.0) / sum).abs() < 1e-6);
    }

    #[test]
    fn sparse_mixer_weighs_by_what_is_near() {
        let plan =
            RouterPlan { score: Score::SparseMixer { tolerance: 0.1 }, ..RouterPlan::softmax(2, false) };
        // 4 is alone within a fifth; of the rest 3 and 2.9 are near each other, 1 is not.
        let (ids, weights) = choose(&[3.0, 1.0, 4.0, 2.9], plan);
        assert_eq!(ids, [2, 0]);
        assert!((weights[0] - 1.0).abs() < 1e-6);
        assert!((weights[1] - 1.0 / (1.0 + (-0.1f32).exp())).abs() < 1e-6);
        assert_eq!(choose(&[0.0, 0.0], plan), (vec![0, 1], vec![0.5, 1.0]));
    }

    #[test]
    fn what_is_not_a_number_is_reported_with_its_row() {
        let plan = RouterPlan::softmax(1, false);
        let route = |logits: &[f32]| route(logits, 2, &plan, &RouterExtras::default());
        for bad in [f32::NAN, f32::INFINITY] {
            assert_eq!(route(&[0.0, 1.0, 2.0, bad]), Err(1));
        }
        assert_eq!(route(&[f32::NEG_INFINITY; 2]), Err(0));
        let w = Tensor::zeros((4, 8), DType::F32, &Device::Cpu).unwrap();
        let router = Router::new(Linear::new(&w, None).unwrap(), RouterExtras::default(), plan, 3).unwrap();
        let x = (random(&[2, 8], 1) * f64::NAN).unwrap();
        let e = router.forward(&x, Step::At(0)).unwrap_err().to_string();
        assert!(e.contains("layer 3") && e.contains("token 0"), "{e}");
    }
    #[test]
    fn rows_of_a_prompt_are_routed_as_they_would_be_alone() {
        let (rows, experts) = (3 * ROWS_A_TASK + 5, 16);
        let plan = RouterPlan::softmax(4, true);
        let mut logits = random(&[rows * experts], 5).to_vec1::<f32>().unwrap();
        let together = route(&logits, experts, &plan, &RouterExtras::default()).unwrap();
        let alone =
            logits.chunks(experts).map(|r| route(r, experts, &plan, &RouterExtras::default()).unwrap());
        let (ids, weights): (Vec<_>, Vec<_>) = alone.unzip();
        assert_eq!(together, (ids.concat(), weights.concat()));
        for bad in [2 * ROWS_A_TASK + 7, ROWS_A_TASK] {
            logits[bad * experts + 3] = f32::NAN;
            assert_eq!(
                route(&logits, experts, &plan, &RouterExtras::default()),
                Err(bad),
                "the first is told"
            );
        }
    }
}
