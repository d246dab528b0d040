//! Whether replayed steps ask for guesses: with `auto` the clock says. What is brought ahead is judged by the cache, guess by
//! guess; what asking itself costs is the same whether a guess is right or not, and nobody but the clock knows it.

use std::collections::VecDeque;
use std::time::Duration;

/// Steps alike that follow each other. The first is not timed: it follows one of the other kind.
const RUN: u64 = 8;
/// Steps of a trial, half of them of either kind.
const TRIAL: u64 = 128;
/// Steps from one trial to the next.
const CYCLE: u64 = 1024;
/// Steps that are remembered: those of two trials.
const KEPT: usize = (2 * TRIAL / RUN * (RUN - 1)) as usize;
/// Fewer of either kind decide nothing.
const LEAST: usize = KEPT / 8;

/// Lets steps ask and not ask in turn for a while, and then do what took less time; then again. Which step asks follows
/// from its number alone, but for what is decided.
#[derive(Debug)]
pub(crate) struct Trial {
    /// Steps begun and ended so far.
    begun: u64,
    ended: u64,
    asks: Option<bool>,
    timed: VecDeque<Timed>,
}

#[derive(Debug, Clone, Copy)]
struct Timed {
    asked: bool,
    /// Records that it missed.
    misses: f64,
    /// Seconds.
    took: f64,
}

impl Trial {
    pub(crate) fn new() -> Self {
        Self { begun: 0, ended: 0, asks: None, timed: VecDeque::new() }
    }

    /// Whether the next step asks.
    pub(crate) fn next_asks(&self) -> bool {
        match self.begun % CYCLE {
            in_trial if in_trial < TRIAL => asks_in_trial(in_trial),
            // Until something is decided.
            _ => self.asks.unwrap_or(true),
        }
    }

    /// What was decided last.
    pub(crate) fn asks(&self) -> Option<bool> {
        self.asks
    }

    /// The next step was begun.
    pub(crate) fn begin(&mut self) {
        self.begun += 1;
        if self.begun % CYCLE == TRIAL {
            let timed: Vec<Timed> = self.timed.iter().copied().collect();
            self.asks = cost_of_asking(&timed).map(|cost| cost <= 0.0).or(self.asks);
        }
    }

    /// The oldest step that was begun has ended; how long it took and how many records it missed, if that is known.
    pub(crate) fn end(&mut self, found: Option<(Duration, u32)>) {
        let number = self.ended % CYCLE;
        self.ended += 1;
        let Some((took, misses)) = found.filter(|_| number < TRIAL && !number.is_multiple_of(RUN)) else {
            return;
        };
        if self.timed.len() == KEPT {
            self.timed.pop_front();
        }
        let (took, misses) = (took.as_secs_f64(), misses.into());
        self.timed.push_back(Timed { asked: asks_in_trial(number), misses, took });
    }

    /// Of the steps under way nobody hears any more.
    pub(crate) fn forget_begun(&mut self) {
        self.ended = self.begun;
    }
}

fn asks_in_trial(number: u64) -> bool {
    (number / RUN).is_multiple_of(2)
}

/// Seconds that a step takes longer when it asks, for steps that miss alike; `None` where too few are known.
///
/// What a step misses decides most of its time and differs from token to token, whoever asks. So times are compared at the same number
/// of misses: least squares with one slope for both kinds (analysis of covariance). The tenth that lies furthest from that
/// has waited for the host or for a graph to be recorded, and is left out of the second look.
fn cost_of_asking(timed: &[Timed]) -> Option<f64> {
    let first = Line::through(timed)?;
    let mut kept = timed.to_vec();
    kept.sort_by(|a, b| first.distance(a).total_cmp(&first.distance(b)));
    kept.truncate(timed.len() - timed.len() / 10);
    let Line { slope, means: [without, with] } = Line::through(&kept)?;
    Some(with.1 - without.1 - slope * (with.0 - without.0))
}

/// Time by misses.
struct Line {
    slope: f64,
    /// Mean misses and time of steps without asking, and with.
    means: [(f64, f64); 2],
}

impl Line {
    fn through(timed: &[Timed]) -> Option<Self> {
        let mut means = [(0.0, 0.0); 2];
        for (asked, mean) in [false, true].into_iter().zip(&mut means) {
            let own = || timed.iter().filter(|t| t.asked == asked);
            let n = own().count();
            if n < LEAST {
                return None;
            }
            let sum = own().fold((0.0, 0.0), |sum, t| (sum.0 + t.misses, sum.1 + t.took));
            *mean = (sum.0 / n as f64, sum.1 / n as f64);
        }
        let (mut of_both, mut of_misses) = (0.0, 0.0);
        for t in timed {
            let (misses, took) = means[usize::from(t.asked)];
            of_both += (t.misses - misses) * (t.took - took);
            of_misses += (t.misses - misses).powi(2);
        }
        let slope = if of_misses > 0.0 { of_both / of_misses } else { 0.0 };
        Some(Self { slope, means })
    }

    fn distance(&self, t: &Timed) -> f64 {
        let (misses, took) = self.means[usize::from(t.asked)];
        (t.took - took - self.slope * (t.misses - misses)).abs()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What steps take, us: without asking and with, and for each record that they miss.
    #[derive(Clone, Copy)]
    struct Costs([f64; 2], f64);

    /// Plays `n` steps, two under way; how many asked.
    fn play(trial: &mut Trial, n: u64, Costs(fixed, miss): Costs) -> u64 {
        let mut under_way = VecDeque::new();
        let mut asked = 0;
        for step in 0..n {
            let asks = trial.next_asks();
            asked += u64::from(asks);
            trial.begin();
            // Misses come and go, and while steps ask there happen to be more of them. One step in fifty waits for the host.
            let misses = (step * 37 % 61) as u32 + if asks { 25 } else { 0 };
            let late = if step % 50 == 49 { 9e3 } else { 0.0 };
            let us = fixed[usize::from(asks)] + miss * f64::from(misses) + (step * 23 % 41) as f64 + late;
            under_way.push_back((Duration::from_secs_f64(us / 1e6), misses));
            if under_way.len() == 2 {
                trial.end(under_way.pop_front());
            }
        }
        trial.end(under_way.pop_front());
        asked
    }

    #[test]
    fn steps_do_what_takes_less_time_whatever_they_happen_to_miss() {
        for (costs, asks) in [
            (Costs([2000.0, 1960.0], 50.0), true),
            (Costs([2000.0, 2040.0], 50.0), false),
            (Costs([180.0, 150.0], 3.0), true),
            // Nothing is ever waited for: misses cost nothing.
            (Costs([180.0, 200.0], 0.0), false),
        ] {
            let mut trial = Trial::new();
            assert_eq!(play(&mut trial, TRIAL, costs), TRIAL / 2, "half of a trial");
            assert_eq!(trial.asks(), Some(asks));
            let rest = CYCLE - TRIAL;
            assert_eq!(play(&mut trial, rest, costs), if asks { rest } else { 0 });
        }
    }

    #[test]
    fn another_trial_finds_that_it_has_changed() {
        let mut trial = Trial::new();
        play(&mut trial, CYCLE, Costs([1000.0, 900.0], 50.0));
        assert_eq!(trial.asks(), Some(true));
        // What is remembered of before is gone after two.
        play(&mut trial, 2 * CYCLE, Costs([1000.0, 1200.0], 50.0));
        assert_eq!(trial.asks(), Some(false));
        play(&mut trial, 2 * CYCLE, Costs([1000.0, 900.0], 50.0));
        assert_eq!(trial.asks(), Some(true));
    }

    #[test]
    fn steps_that_nobody_timed_decide_nothing() {
        let mut trial = Trial::new();
        for step in 0..CYCLE {
            assert_eq!(trial.next_asks(), step >= TRIAL || asks_in_trial(step));
            trial.begin();
            trial.end(None);
        }
        // Steps that are given up do not shift the count of those that are timed.
        let mut trial = Trial::new();
        for _ in 0..TRIAL - RUN {
            trial.begin();
        }
        trial.forget_begun();
        assert!(!trial.next_asks(), "the last run of a trial");
        play(&mut trial, RUN, Costs([1.0, 2.0], 0.0));
        assert_eq!(trial.timed.len(), RUN as usize - 1);
        assert!(trial.timed.iter().all(|t| !t.asked) && trial.asks().is_none());
    }
}
