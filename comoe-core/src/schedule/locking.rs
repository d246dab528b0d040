//! Page-locking that goes on while steps are served.

use super::Engine;
use crate::backend::{DriverKind, PageLocking};
use crate::error::Result;

/// What waits for the end of it.
#[derive(Debug, Default)]
pub(super) struct Locking {
    pub(super) goes_on: bool,
    /// The device is offered to drive, then.
    pub(super) offer: Option<DriverKind>,
}

impl Engine {
    /// Between tokens: has steps use what was page-locked meanwhile. With the last of it, the device may drive.
    ///
    /// # Errors
    /// What kept a record from being read; as [`Engine::report_fault`].
    pub(crate) fn follow_page_locking(&mut self) -> Result<()> {
        if !self.locking.goes_on || self.is_in_token() {
            return Ok(());
        }
        self.report_fault(true)?;
        self.locking.goes_on = self.guarded(|this| this.backend.use_page_locked())?;
        if self.drive.offered {
            self.drive.limits = self.driver()?.limits();
        }
        if !self.locking.goes_on
            && let Some(asked) = self.locking.offer.take()
            && let Err(reason) = self.offer_device(asked, true)
        {
            tracing::warn!("every step is driven by the host: {reason}");
        }
        Ok(())
    }

    /// Whether the device will drive steps of few tokens when all records are page-locked, and not before.
    pub(crate) fn waits_to_drive(&self) -> bool {
        self.locking.offer.is_some()
    }

    /// Whether it does or will.
    pub(crate) fn is_a_devices(&self) -> bool {
        self.drive.offered || self.waits_to_drive()
    }

    /// How far records are page-locked, where that matters.
    pub(crate) fn page_locking(&self) -> Option<PageLocking> {
        self.backend.page_locking()
    }
}
