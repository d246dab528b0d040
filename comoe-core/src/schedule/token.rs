//! Tokens that the device drives from their first layer to their last, and that are run again when a step misses a record
//! that only the host can bring.

use super::{Engine, device};
use crate::backend::{Fill, Queue, StepFault};
use crate::error::{Error, Result};

/// A token under way.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Token {
    /// Steps of this run.
    steps: u32,
    /// How often it was run again.
    replays: usize,
    /// Records were brought since this run began: its results do not count.
    due: bool,
}

impl device::Drive {
    /// The next step's number in its token. Where nothing is ever run again it does not matter, and callers on several
    /// threads may mix their tokens.
    pub(super) fn next_ordinal(&mut self) -> u32 {
        match &mut self.token {
            Some(token) if self.limits.partial.is_some() => {
                token.steps += 1;
                token.steps - 1
            }
            _ => 0,
        }
    }
}

impl Engine {
    /// The layer steps from here on are those of one token; says whether the device drives them. An earlier token that
    /// was not ended is given up.
    ///
    /// # Errors
    /// As [`Engine::device_step`].
    pub(crate) fn begin_token(&mut self, tokens: usize, top_k: usize) -> Result<bool> {
        self.leave_token();
        self.follow_page_locking()?;
        if !self.drive.offered || !self.device_fits(tokens, top_k) {
            return Ok(false);
        }
        if std::mem::take(&mut self.drive.left_open) {
            // The device still counts on that token's steps; new tables know nothing of it.
            self.host_owns()?;
        }
        self.report_fault(false)?;
        self.with_memory(Self::device_owns)?;
        self.guarded(|this| this.driver()?.begin_token())?;
        self.drive.token = Some(Token::default());
        Ok(true)
    }

    /// Ends the token's run: `true` when its results count, `false` when its steps must be run again. Waits for the
    /// device only where that can happen.
    ///
    /// # Errors
    /// What was wrong with the token's routing; [`Error::FillFailed`] when a record cannot be brought.
    pub(crate) fn end_token(&mut self) -> Result<bool> {
        if self.drive.token.is_none() {
            return Ok(true);
        }
        self.report_fault(self.drive.limits.partial.is_some())?;
        let most = self.directory.layers().len();
        let Some(token) = self.drive.token.as_mut().filter(|t| t.due) else {
            self.drive.token = None;
            return Ok(true);
        };
        *token = Token { replays: token.replays + 1, ..Token::default() };
        if token.replays > most {
            // Every run that is cut short brings one more layer's records, which stay.
            let reason = format!(
                "it was run {} times and chose other experts each time: a token that is run again must make the same \
                 steps from the same inputs",
                token.replays
            );
            return Err(Error::BadArgument { what: "token", reason });
        }
        self.with_memory(Self::device_owns)?;
        Ok(false)
    }

    /// Gives up a token that was not ended.
    pub(crate) fn leave_token(&mut self) {
        let open = self.drive.token.take().is_some();
        self.drive.left_open |= open && self.drive.limits.partial.is_some();
    }

    /// Hears what the device stopped for, as far as it has come, or after waiting for it: records that are missing are
    /// brought, and a token under way is due again.
    ///
    /// # Errors
    /// Routing that cannot be followed, once; it does not stop the cache, as nothing was changed by it.
    pub(crate) fn report_fault(&mut self, wait: bool) -> Result<()> {
        if !self.drive.owns {
            return Ok(());
        }
        match self.guarded(|this| this.driver()?.fault(wait))? {
            None => Ok(()),
            Some(StepFault::Routing(fault)) => Err(fault.error(&self.directory)),
            Some(StepFault::Missing(fills)) => {
                if let Some(token) = &mut self.drive.token {
                    token.due = true;
                }
                self.guarded(|this| this.bring(&fills))
            }
        }
    }

    /// Fills slots that the device has given to records, and waits for it, so that whatever runs next finds them there.
    fn bring(&mut self, fills: &[Fill]) -> Result<()> {
        let ticket = self.fill(Queue::Demand, fills)?;
        self.compute_waits(ticket)?;
        self.backend.synchronize()?;
        self.drive.brought_bytes += self.bytes(fills);
        Ok(())
    }
}
