//! What a [`Correlation`] knows, taken apart. Whoever drives a layer step learns from it, the host or a device, so what was
//! learned goes from one to the other.

use super::Correlation;
use crate::error::{Error, Result};

/// The state of a [`Correlation`] that looks one layer ahead: whoever has it goes on as the one that it was taken from.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Learned {
    /// By layer, the weight of its next observation.
    pub weights: Vec<f32>,
    /// Layer by layer: how often each expert of the layer before it was chosen, `[from]` (for the first layer the last
    /// one, of the token before), then how often each of its own with that, `[from, experts]`. Sums of weights.
    pub counts: Vec<f32>,
    /// Tokens that it was learned from.
    pub tokens: u64,
    /// What the next layer step is learned from.
    pub last: Option<LastStep>,
}

/// The layer step that was observed last.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LastStep {
    /// Layer ordinal.
    pub layer: usize,
    /// `[tokens, top_k]` experts.
    pub choices: Vec<u32>,
    /// Experts of a token.
    pub top_k: usize,
}

impl Learned {
    /// Whether the last step chose experts that there are, in layers of so many.
    pub(crate) fn check_last(&self, experts: &[usize]) -> Result<()> {
        let Some(last) = &self.last else { return Ok(()) };
        let own = experts.get(last.layer).copied().unwrap_or(0);
        if last.top_k == 0 || last.choices.iter().any(|&id| id as usize >= own) {
            let reason = format!("its last step chose experts that layer {} does not have", last.layer);
            return Err(Error::BadArgument { what: "learned", reason });
        }
        Ok(())
    }
}

impl Correlation {
    /// What it knows, for who goes on with it.
    pub fn learned(&self) -> Learned {
        let parts = self.tables.iter().flat_map(|t| t.totals.iter().chain(&t.counts));
        Learned {
            weights: self.tables.iter().map(|t| t.weight).collect(),
            counts: parts.copied().collect(),
            tokens: self.tokens,
            last: self.last_step(),
        }
    }

    /// Goes on from what `learned` knows.
    ///
    /// # Errors
    /// [`Error::BadArgument`] where that is about other layers or experts than this table. It is then as before.
    pub fn set_learned(&mut self, learned: &Learned) -> Result<()> {
        let sizes = |this: &Self| [this.tables.len(), this.floats()];
        let (mine, theirs) = (sizes(self), [learned.weights.len(), learned.counts.len()]);
        if mine != theirs {
            let reason = format!("{theirs:?} layers and counts where its layers have {mine:?}");
            return Err(Error::BadArgument { what: "learned", reason });
        }
        let experts: Vec<usize> = self.tables.iter().map(|table| table.to).collect();
        learned.check_last(&experts)?;
        let mut rest = learned.counts.as_slice();
        for (table, &weight) in self.tables.iter_mut().zip(&learned.weights) {
            for part in [&mut table.totals, &mut table.counts] {
                let (now, after) = rest.split_at(part.len());
                part.copy_from_slice(now);
                rest = after;
            }
            table.weight = weight;
        }
        self.tokens = learned.tokens;
        // Without a step in between, more is known of what came before the last one than `learned` tells.
        if let Some(last) = learned.last.as_ref().filter(|last| self.last_step().as_ref() != Some(last)) {
            self.history.observe(last.layer, &last.choices, last.top_k);
        }
        Ok(())
    }

    fn last_step(&self) -> Option<LastStep> {
        let (layer, choices, top_k) = self.history.last_step()?;
        Some(LastStep { layer, choices: choices.to_vec(), top_k })
    }
}

#[cfg(test)]
mod tests {
    use super::super::Predictor;
    use super::*;

    /// Two that take turns know what one alone does.
    #[test]
    fn who_goes_on_learns_and_guesses_as_the_one_before_would() {
        let experts = [4, 6, 4];
        let new = || Correlation::new(&experts, 1);
        let (mut alone, mut turns) = (new(), [new(), new()]);
        let mut state = 7u32;
        let mut below = |n: usize| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 16) % n as u32
        };
        let (mut whose, mut guessed) = (0, 0);
        for token in 0..300 {
            // Now and then a prompt, of whose last layer only the last row is computed.
            let rows = if token % 7 == 3 { 5 } else { 1 };
            for (layer, &n) in experts.iter().enumerate() {
                if below(4) == 0 {
                    let learned = turns[whose].learned();
                    whose = 1 - whose;
                    turns[whose].set_learned(&learned).unwrap();
                    assert_eq!(turns[whose].learned(), learned);
                }
                let rows = if layer == 2 { 1 } else { rows };
                let choices: Vec<u32> = (0..2 * rows).map(|_| below(n)).collect();
                alone.observe(layer, &choices, 2);
                turns[whose].observe(layer, &choices, 2);
                let (mut want, mut have) = (Vec::new(), Vec::new());
                alone.predict((layer + 1) % 3, &mut want);
                turns[whose].predict((layer + 1) % 3, &mut have);
                assert_eq!(have, want, "token {token}, layer {layer}");
                guessed += want.len();
            }
        }
        assert!(guessed > 1000);
        assert_eq!(turns[whose].learned(), alone.learned());
        let e = new().set_learned(&Correlation::new(&[4, 4], 1).learned()).unwrap_err().to_string();
        assert!(e.contains("[2, 40]") && e.contains("[3, 78]"), "{e}");
        let known = alone.learned();
        for (layer, choices, top_k) in [(0, vec![4], 1), (3, vec![0], 1), (1, vec![0], 0)] {
            let last = Some(LastStep { layer, choices, top_k });
            assert!(new().set_learned(&Learned { last, ..known.clone() }).is_err());
        }
    }
}
