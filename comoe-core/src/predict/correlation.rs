//! Co-activation of neighbouring layers, counted online.

use super::{Predictor, Scored};

/// How often expert `f` of layer `l + 1` was chosen by a token that chose `e` in layer `l`.
///
/// The guess for a set is the sum of the rows of its members, each row divided by its own total, so that a rare
/// expert speaks as loudly as a common one. Old observations fade: each observed token weighs `1 / decay` of the next.
#[derive(Debug)]
pub struct Correlation {
    /// One table per pair of neighbouring layers.
    tables: Vec<Table>,
    decay: f32,
    scratch: Vec<f32>,
}

#[derive(Debug)]
struct Table {
    to: usize,
    /// `[from experts, to experts]`
    counts: Vec<f32>,
    /// `[from experts]`
    totals: Vec<f32>,
    /// Weight of the next observation; grows instead of the table being scaled down each time.
    weight: f32,
}

/// Beyond this the table is scaled down, far from the limit of f32.
const RESCALE: f32 = 1e12;

impl Correlation {
    /// Weight of an observation relative to the one before it.
    pub const DECAY: f32 = 1.0 / 0.9995;

    /// `experts[l]` is the number of experts of the `l`-th layer that has experts.
    pub fn new(experts: &[usize]) -> Self {
        let table = |pair: &[usize]| Table {
            to: pair[1],
            counts: vec![0.0; pair[0] * pair[1]],
            totals: vec![0.0; pair[0]],
            weight: 1.0,
        };
        Self { tables: experts.windows(2).map(table).collect(), decay: Self::DECAY, scratch: Vec::new() }
    }
}

impl Predictor for Correlation {
    fn observe(&mut self, layer: usize, from: &[u32], to: &[u32]) {
        let Some(table) = self.tables.get_mut(layer) else { return };
        for &e in from {
            let row = &mut table.counts[e as usize * table.to..][..table.to];
            for &f in to {
                row[f as usize] += table.weight;
            }
            table.totals[e as usize] += table.weight * to.len() as f32;
        }
        table.weight *= self.decay;
        if table.weight > RESCALE {
            table.counts.iter_mut().chain(&mut table.totals).for_each(|c| *c /= RESCALE);
            table.weight /= RESCALE;
        }
    }

    fn predict(&mut self, layer: usize, from: &[u32], out: &mut Vec<Scored>) {
        out.clear();
        let Some(table) = self.tables.get(layer) else { return };
        self.scratch.clear();
        self.scratch.resize(table.to, 0.0);
        for &e in from {
            let total = table.totals[e as usize];
            if total > 0.0 {
                let row = &table.counts[e as usize * table.to..][..table.to];
                self.scratch.iter_mut().zip(row).for_each(|(s, c)| *s += c / total);
            }
        }
        let seen = self.scratch.iter().enumerate().filter(|(_, s)| **s > 0.0);
        out.extend(seen.map(|(f, &score)| Scored { expert: f as u32, score }));
        out.sort_unstable_by(|a, b| b.score.total_cmp(&a.score).then(a.expert.cmp(&b.expert)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guess(c: &mut Correlation, layer: usize, from: &[u32]) -> Vec<u32> {
        let mut out = Vec::new();
        c.predict(layer, from, &mut out);
        out.iter().map(|s| s.expert).collect()
    }

    #[test]
    fn learns_which_expert_follows_which() {
        let mut c = Correlation::new(&[4, 4, 4]);
        assert!(guess(&mut c, 0, &[1, 2]).is_empty());
        for _ in 0..10 {
            c.observe(0, &[0], &[3]);
            c.observe(0, &[1], &[2]);
        }
        c.observe(0, &[1], &[0]);
        assert_eq!(guess(&mut c, 0, &[0]), [3]);
        assert_eq!(guess(&mut c, 0, &[0, 1]), [3, 2, 0]);
        assert!(guess(&mut c, 1, &[0]).is_empty(), "layers have tables of their own");
        assert!(guess(&mut c, 2, &[0]).is_empty(), "the last layer has no next one");
    }

    #[test]
    fn old_habits_fade_and_the_table_stays_finite() {
        let mut c = Correlation::new(&[2, 2]);
        for _ in 0..3000 {
            c.observe(0, &[0], &[0]);
        }
        for _ in 0..3000 {
            c.observe(0, &[0], &[1]);
        }
        assert_eq!(guess(&mut c, 0, &[0]), [1, 0]);
        for _ in 0..200_000 {
            c.observe(0, &[0], &[1]);
        }
        let mut out = Vec::new();
        c.predict(0, &[0], &mut out);
        assert!(out.iter().all(|s| s.score.is_finite()) && out[0].expert == 1, "{out:?}");
    }
}
