//! Does prefetching pay? Judged layer by layer, guess by guess, while it runs.

/// What became of one guess.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Evidence {
    /// Prefetched, arrived in time, used: its stall was saved.
    Saved,
    /// Prefetched and used, but still on its way: part of its stall was saved.
    Late,
    /// Prefetched and not used.
    Wasted,
    /// Not prefetched, and the layer did miss it: it would have been used.
    WouldHaveSaved,
    /// Not prefetched, and rightly so.
    WouldHaveWasted,
}

/// How an [`EvidenceGate`] judges.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GateOptions {
    /// Most records prefetched for a layer.
    pub most: usize,
    /// Layer steps that are remembered (the time constant of the mean).
    pub memory: f32,
    /// A guess is prefetched once its rank earns more than this, in records per step.
    pub on: f32,
    /// And no longer once it earns less than this.
    pub off: f32,
    /// What a wasted record costs at least, in records: it used power, and a link that was idle may not be next time.
    pub least_price: f32,
}

impl GateOptions {
    /// For a layer whose tokens choose `top_k` experts.
    pub fn new(top_k: usize) -> Self {
        Self { most: top_k.max(1), memory: 64.0, on: 0.05, off: -0.05, least_price: 0.25 }
    }
}

/// Decides how many guesses are prefetched for each layer.
///
/// Guesses for a layer, those that are not in the cache, are ranked by likelihood. For each rank the gate keeps a decaying mean of what
/// it earned: a record that was there in time saved its own transfer (+1), one still on its way about half, one that was not used cost
/// its transfer times the chance that the layer had to fetch something else meanwhile, since only then somebody waited
/// behind it. Ranks that are off keep being judged by what they would have done, so that they come back. The first rank
/// that loses ends the prefetch: precision is bought with coverage. `on` and `off` differ, so that a rank at the border
/// does not flicker.
#[derive(Debug, Clone)]
pub struct EvidenceGate {
    options: GateOptions,
    layers: Vec<Layer>,
}

#[derive(Debug, Clone)]
struct Layer {
    /// Mean earnings by rank.
    earned: Vec<f32>,
    width: usize,
    /// Chance that the layer has something to fetch on demand.
    busy: f32,
    /// Part of the used records that were there in time.
    in_time: f32,
    steps: u32,
    switches: u64,
}

impl EvidenceGate {
    /// For `layers` layers; every one begins off.
    pub fn new(layers: usize, options: GateOptions) -> Self {
        let layer = Layer {
            earned: vec![0.0; options.most],
            width: 0,
            busy: 1.0,
            in_time: 1.0,
            steps: 0,
            switches: 0,
        };
        Self { options, layers: vec![layer; layers] }
    }

    /// Guesses to make and judge for each layer.
    pub fn most(&self) -> usize {
        self.options.most
    }

    /// Guesses to prefetch for `layer`, 0 when it loses.
    pub fn width(&self, layer: usize) -> usize {
        self.layers.get(layer).map_or(0, |l| l.width)
    }

    /// How often the width of `layer` left or reached 0.
    pub fn switches(&self, layer: usize) -> u64 {
        self.layers.get(layer).map_or(0, |l| l.switches)
    }

    /// Judges one step of `layer`: what became of its guesses, by rank, and whether the layer had something to fetch on
    /// demand all the same.
    pub fn judge(&mut self, layer: usize, guesses: &[Evidence], fetched: bool) {
        let Some(this) = self.layers.get_mut(layer) else { return };
        let GateOptions { memory, on, off, least_price, .. } = self.options;
        this.steps = this.steps.saturating_add(1);
        // A plain mean at first, a decaying one later.
        let rate = 1.0 / memory.min(this.steps as f32);
        this.busy += rate * (f32::from(u8::from(fetched)) - this.busy);
        let price = this.busy.max(least_price);
        for evidence in guesses {
            match evidence {
                Evidence::Saved => this.in_time += (1.0 - this.in_time) / memory,
                Evidence::Late => this.in_time += (0.0 - this.in_time) / memory,
                _ => {}
            }
        }
        // A late record still came sooner than on demand: half of it, for want of a clock.
        let used = 0.5 + 0.5 * this.in_time;
        for (rank, earned) in this.earned.iter_mut().enumerate() {
            let now = match guesses.get(rank) {
                Some(Evidence::Saved) => 1.0,
                Some(Evidence::Late) => 0.5,
                Some(Evidence::WouldHaveSaved) => used,
                Some(Evidence::Wasted | Evidence::WouldHaveWasted) => -price,
                None => 0.0,
            };
            *earned += rate * (now - *earned);
        }
        if (this.steps as f32) < memory / 2.0 {
            return;
        }
        let was = this.width;
        let stays = |(rank, &earned): (usize, &f32)| earned > if rank < was { off } else { on };
        this.width = this.earned.iter().enumerate().take_while(|&r| stays(r)).count();
        this.switches += u64::from((was == 0) != (this.width == 0));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gate() -> EvidenceGate {
        EvidenceGate::new(2, GateOptions::new(2))
    }

    #[test]
    fn starts_off_and_opens_for_the_layer_and_the_rank_that_pay() {
        let mut g = gate();
        for step in 0..200 {
            // The first guess is right three times of four, the second once of four.
            let first = if step % 4 != 0 { Evidence::WouldHaveSaved } else { Evidence::WouldHaveWasted };
            let second = if step % 4 == 1 { Evidence::WouldHaveSaved } else { Evidence::WouldHaveWasted };
            g.judge(0, &[first, second], true);
            g.judge(1, &[second, second], true);
            assert!(step > 20 || g.width(0) == 0, "evidence first");
        }
        assert_eq!((g.width(0), g.width(1)), (1, 0));
        assert_eq!((g.switches(0), g.switches(1)), (1, 0));
    }

    #[test]
    fn closes_when_the_habit_breaks_and_opens_again() {
        let mut g = gate();
        let play = |g: &mut EvidenceGate, right: bool| {
            for _ in 0..300 {
                let on = g.width(0) > 0;
                g.judge(
                    0,
                    &[match (right, on) {
                        (true, true) => Evidence::Saved,
                        (true, false) => Evidence::WouldHaveSaved,
                        (false, true) => Evidence::Wasted,
                        (false, false) => Evidence::WouldHaveWasted,
                    }],
                    true,
                );
            }
            g.width(0)
        };
        assert_eq!([true, false, true].map(|right| play(&mut g, right)), [1, 0, 1]);
        assert_eq!(g.switches(0), 3);
    }

    #[test]
    fn does_not_flicker_at_the_border() {
        // Right every second time: the earnings swing around 0 inside the dead band.
        let mut g = gate();
        for step in 0..1000 {
            let right = if step % 2 == 0 { Evidence::WouldHaveSaved } else { Evidence::WouldHaveWasted };
            g.judge(0, &[right], true);
        }
        assert!(g.switches(0) <= 1, "{}", g.switches(0));
    }

    #[test]
    fn waste_is_cheap_on_an_idle_link_and_late_guesses_are_worth_less() {
        let right_once_of_three = |step: usize, yes, no| if step.is_multiple_of(3) { yes } else { no };
        let mut g = gate();
        for step in 0..300 {
            let e = right_once_of_three(step, Evidence::WouldHaveSaved, Evidence::WouldHaveWasted);
            g.judge(0, &[e], false);
            g.judge(1, &[e], true);
        }
        assert_eq!((g.width(0), g.width(1)), (1, 0));
        // 0.6 * 1 - 0.4 * 1 would pay; 0.6 * 0.5 - 0.4 does not.
        let mut g = gate();
        for step in 0..600 {
            let e = if step % 5 < 3 { Evidence::Late } else { Evidence::Wasted };
            g.judge(0, &[e], true);
        }
        assert_eq!(g.width(0), 0);
    }
}
