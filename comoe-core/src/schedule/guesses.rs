//! Whose guesses a device that drives steps brings: the caller's, or those of a table. There is one table: it goes to the
//! device with the residency tables, which learns on, and comes back with them, or when it is asked for.

use super::{Engine, Seen};
use crate::backend::DeviceStep;
use crate::error::Result;
use crate::predict::{Correlation, Predictor};

/// Whose guesses are brought.
pub(super) enum Guesses {
    Callers,
    Table(Box<Correlation>),
    /// `auto`: the first step of one token tells.
    Open(Box<Correlation>),
}

impl Guesses {
    /// As `predictor` would guess on the host.
    pub(super) fn of(predictor: &mut dyn Predictor) -> Self {
        let hints = predictor.takes_hints();
        match predictor.table().cloned() {
            None => Self::Callers,
            Some(table) if hints => Self::Open(Box::new(table)),
            Some(table) => Self::Table(Box::new(table)),
        }
    }

    /// Whether a caller's guess would be used.
    pub(super) fn may_be_callers(&self) -> bool {
        !matches!(self, Self::Table(_))
    }

    /// The table that may be in force.
    fn table(&mut self) -> Option<&mut Correlation> {
        match self {
            Self::Callers => None,
            Self::Table(table) | Self::Open(table) => Some(table),
        }
    }
}

impl Engine {
    /// The device's table, as the host knows it.
    pub(super) fn device_table(&mut self) -> Option<&mut Correlation> {
        self.drive.ahead.as_mut().and_then(|ahead| ahead.guesses.table())
    }

    /// A step that the host drives teaches the device's table, too.
    pub(super) fn teach(&mut self, seen: Seen<'_>) {
        if let Some(table) = self.device_table() {
            table.observe(seen.layer, seen.choices, seen.top_k);
        }
    }

    /// Settles, where that is open, whose guesses are brought, with the first step that would have one.
    pub(super) fn settle_guesses(&mut self, step: &DeviceStep<'_>) -> Result<()> {
        let has_next = step.layer + 1 < self.directory.layers().len();
        let Some(ahead) = &mut self.drive.ahead else { return Ok(()) };
        if !matches!(ahead.guesses, Guesses::Open(_)) || !has_next || step.ids.dim(0)? != 1 {
            return Ok(());
        }
        match std::mem::replace(&mut ahead.guesses, Guesses::Callers) {
            Guesses::Open(table) if step.guess.is_none() => ahead.guesses = Guesses::Table(table),
            _ => {}
        }
        // What goes over with the residency tables is late where these have gone.
        match self.drive.owns {
            true => self.device_learns(),
            false => Ok(()),
        }
    }

    /// The device goes on from what the host has learned.
    pub(super) fn device_learns(&mut self) -> Result<()> {
        let Some(ahead) = &self.drive.ahead else { return Ok(()) };
        let Guesses::Table(table) = &ahead.guesses else { return Ok(()) };
        let learned = table.learned();
        self.driver()?.learn(&learned)
    }

    /// The host goes on from what the device has learned, which the device knows still.
    pub(super) fn hear_what_was_learned(&mut self) -> Result<()> {
        if !self.drive.ahead.as_ref().is_some_and(|a| matches!(a.guesses, Guesses::Table(_))) {
            return Ok(());
        }
        let learned = self.driver()?.learned()?;
        self.device_table().map_or(Ok(()), |table| table.set_learned(&learned))
    }

    /// Has the table that the prefetch in force learns up to date, whoever drives.
    ///
    /// # Errors
    /// When the device stopped working.
    pub(crate) fn update_predictor_table(&mut self) -> Result<()> {
        match self.drive.owns {
            true => self.guarded(Self::hear_what_was_learned),
            false => Ok(()),
        }
    }

    /// The table that the prefetch in force learns, if it does.
    pub(crate) fn predictor_table(&mut self) -> Option<&mut Correlation> {
        if self.prefetch.is_none() {
            return self.device_table();
        }
        self.prefetch.as_mut().and_then(|prefetch| prefetch.predictor.table())
    }
}
