//! The next layer's router, asked one layer early.

use candle_core::Tensor;

use super::fused;
use super::moe::Moe;
use super::router::Router;
use super::step::Step;
use crate::arch::DecoderPlan;
use crate::error::Result;

/// Guesses which experts a token will choose in the next layer with experts: that layer's router, applied to this layer's
/// router input (Eliseev and Mazur, "Fast Inference of Mixture-of-Experts Language Models with Offloading", 2023).
#[derive(Debug, Clone)]
pub struct StaleGate {
    router: Router,
    /// The same, choosing as many as the layer will.
    near: Router,
}

impl StaleGate {
    /// Twice as many experts as the layer will choose, likeliest first, for a token whose router input in the layer before
    /// is `x [1, hidden]`.
    ///
    /// # Errors
    /// As [`Router::forward`].
    pub fn guess(&self, x: &Tensor) -> Result<Vec<u32>> {
        // Guesses are for the host, and a router asks for no position.
        let (ids, _) = self.router.forward(x, Step::At(0))?;
        Ok(ids.flatten_all()?.to_vec1()?)
    }

    /// As many experts as the layer will choose, `[1, top_k]` U32 on the device, made beside the step `step`.
    ///
    /// # Errors
    /// Those of candle and of the driver.
    pub(super) fn guess_beside(&self, x: &Tensor, step: &fused::Step<'_>) -> Result<Tensor> {
        step.beside(|step| Ok(self.near.forward(x, Step::Fused(step))?.0))
    }
}

/// Gives every layer of `moes`, which are those of `plan` in order, the router of the one after it.
pub fn connect<'m>(moes: impl Iterator<Item = &'m mut Moe>, plan: &DecoderPlan) {
    let mut before: Option<&mut Moe> = None;
    for (moe, (_, plan)) in moes.zip(plan.moe_layers()) {
        if let Some(before) = before {
            let (near, twice) = (moe.router().clone(), (2 * plan.router.top_k).min(plan.experts));
            before.look_ahead(StaleGate { router: near.choosing(twice), near });
        }
        before = Some(moe);
    }
}

#[cfg(test)]
mod tests {
    use super::super::linear::Linear;
    use super::super::router::RouterExtras;
    use super::*;
    use crate::arch::RouterPlan;
    use crate::testing::random;

    #[test]
    fn a_guess_begins_with_what_the_router_would_choose_for_the_same_input() {
        let projection = Linear::new(&random(&[8, 16], 1), None).unwrap();
        let router =
            Router::new(projection, RouterExtras::default(), RouterPlan::softmax(3, true), 0).unwrap();
        let gate = StaleGate { router: router.choosing(6), near: router.clone() };
        for seed in 2..12 {
            let x = random(&[1, 16], seed);
            let guess = gate.guess(&x).unwrap();
            let chosen =
                router.forward(&x, Step::At(0)).unwrap().0.flatten_all().unwrap().to_vec1::<u32>().unwrap();
            assert_eq!(guess[..3], chosen);
            let mut all = guess.clone();
            all.sort_unstable();
            all.dedup();
            assert_eq!(all.len(), 6, "{guess:?}");
        }
    }
}
