//! Tokens that are run as a whole, eagerly or as a captured graph.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};

use super::ExpertCache;
use crate::error::{Error, Result};

/// Whose turn it is to run a token as a whole.
#[derive(Default)]
pub(super) struct Turns {
    turn: Mutex<()>,
    /// The thread that has it.
    holder: Mutex<Option<ThreadId>>,
}

impl Turns {
    fn holder(&self) -> MutexGuard<'_, Option<ThreadId>> {
        self.holder.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self) -> Result<MutexGuard<'_, ()>> {
        let me = Some(thread::current().id());
        if *self.holder() == me {
            let reason = "this thread has begun another one: end and drop that first".to_owned();
            return Err(Error::BadArgument { what: "token", reason });
        }
        let turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        *self.holder() = me;
        Ok(turn)
    }
}

/// What became of a run of a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[must_use]
pub enum TokenOutcome {
    /// Its results count.
    Done,
    /// A step missed an expert that only the host could bring. It is there now: make the same steps again from the same
    /// inputs. What this run computed behind that step is NaN; what was said about it (a router that refuses NaN) is to
    /// be forgotten. Steps that were done are not counted twice, and leave the tables as they are.
    Replay,
}

/// A token under way: see [`ExpertCache::begin_token`].
#[must_use]
pub struct Token<'a> {
    cache: &'a ExpertCache,
    on_device: bool,
    /// Tokens take turns.
    _turn: MutexGuard<'a, ()>,
}

impl ExpertCache {
    /// Whether the device would drive all layer steps of such a token (or batch of tokens): then they can be captured in a
    /// graph between [`Self::begin_token`] and [`Token::end`]. An observer needs the host.
    pub fn drives_tokens(&self, tokens: usize, top_k: usize) -> bool {
        !self.core.is_observed() && self.core.device_fits(tokens, top_k)
    }

    /// Begins a token, or `tokens` of them side by side: each of its layer steps has as many rows, and `top_k` experts for
    /// each. From here to [`Token::end`] the layer steps are its own, made one by one or by replaying a graph that captured
    /// them in such a place; the tables that say which expert is where are on the device by then, whoever had them
    /// before. Where the device does not drive such tokens this changes nothing, and `end` says `Done`.
    ///
    /// Needed to capture and to replay a graph, and for the device to drive at all where some experts are not
    /// page-locked. Waits for another thread's token.
    ///
    /// # Errors
    /// What was wrong with an earlier device-driven step; [`Error::BadArgument`] while this thread has another token.
    pub fn begin_token(&self, tokens: usize, top_k: usize) -> Result<Token<'_>> {
        let mut token = Token { cache: self, on_device: false, _turn: self.tokens.take()? };
        if !self.core.is_observed() {
            token.on_device = self.core.begin_token(tokens, top_k)?;
        }
        Ok(token)
    }

    /// Keeps tokens from beginning for as long as it lives.
    ///
    /// # Errors
    /// As [`Self::begin_token`].
    pub(super) fn between_tokens(&self) -> Result<Token<'_>> {
        Ok(Token { cache: self, on_device: false, _turn: self.tokens.take()? })
    }

    /// Makes a token's steps with `run`, again and again until no expert was missing, and hands out what it returned last.
    ///
    /// # Errors
    /// As [`Self::begin_token`] and [`Token::end`]; an error of `run` counts only if its run does.
    pub fn run_token<R, E: From<Error>>(
        &self,
        tokens: usize,
        top_k: usize,
        mut run: impl FnMut() -> std::result::Result<R, E>,
    ) -> std::result::Result<R, E> {
        let mut token = self.begin_token(tokens, top_k)?;
        loop {
            let result = run();
            if token.end()? == TokenOutcome::Done {
                return result;
            }
        }
    }
}

impl Token<'_> {
    /// Whether the device drives it.
    pub fn is_on_device(&self) -> bool {
        self.on_device
    }

    /// Ends a run of the token. After [`TokenOutcome::Replay`] it is under way again. Waits for the device where some
    /// experts are not page-locked, for nothing elsewhere.
    ///
    /// # Errors
    /// [`Error::UnknownExpert`] and [`Error::BadRoutingWeight`] for routing that is wrong, as far as that is known without
    /// waiting; [`Error::FillFailed`] when an expert cannot be brought, and the cache then stays stopped;
    /// [`Error::BadArgument`] when the token is not the same each time.
    pub fn end(&mut self) -> Result<TokenOutcome> {
        if !self.on_device {
            return Ok(TokenOutcome::Done);
        }
        let done = self.cache.core.end_token()?;
        Ok(if done { TokenOutcome::Done } else { TokenOutcome::Replay })
    }
}

impl Drop for Token<'_> {
    fn drop(&mut self) {
        if self.on_device {
            self.cache.core.leave_token();
        }
        // Before the turn itself is given back.
        *self.cache.tokens.holder() = None;
    }
}
