//! What is tried again after a failure, and for how long.

use std::time::Duration;

use super::error::{Error, Result};

/// The first pause; each is twice the one before.
const FIRST: Duration = Duration::from_millis(250);
/// The longest pause of our own choice.
const LONGEST: Duration = Duration::from_secs(16);
/// The longest pause that a server may ask for.
const ASKED: Duration = Duration::from_secs(300);

/// How a request failed.
#[derive(Debug)]
pub(super) enum Failure {
    /// It may go better the next time, not before `after` if the server says so.
    Again { url: String, reason: String, after: Option<Duration> },
    /// It will not.
    Final(Error),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Final(error)
    }
}

/// Counts failures in a row.
#[derive(Debug)]
pub(super) struct Patience {
    tries: u32,
    failed: u32,
}

impl Patience {
    /// Gives up when `tries` requests in a row have failed.
    pub(super) fn new(tries: u32) -> Self {
        Self { tries, failed: 0 }
    }

    /// Something arrived: the row ends.
    pub(super) fn progress(&mut self) {
        self.failed = 0;
    }

    /// How long to wait before the next try.
    ///
    /// # Errors
    /// When there is none.
    pub(super) fn pause(&mut self, failure: Failure) -> Result<Duration> {
        let (url, reason, after) = match failure {
            Failure::Final(error) => return Err(error),
            Failure::Again { url, reason, after } => (url, reason, after),
        };
        self.failed += 1;
        if let Some(wait) = after.filter(|wait| *wait > ASKED) {
            return Err(Error::RateLimited { url, wait });
        }
        if self.failed >= self.tries {
            return Err(Error::Network { url, reason, tries: self.failed });
        }
        let own = (FIRST * 2u32.saturating_pow(self.failed - 1)).min(LONGEST);
        Ok(after.map_or(own, |wait| wait.max(own)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn again(after: Option<u64>) -> Failure {
        let after = after.map(Duration::from_secs);
        Failure::Again { url: "u".into(), reason: "cut".into(), after }
    }

    #[test]
    fn pauses_grow_and_end() {
        let mut patience = Patience::new(9);
        let waits: Vec<u128> = (0..8).map(|_| patience.pause(again(None)).unwrap().as_millis()).collect();
        assert_eq!(waits, [250, 500, 1000, 2000, 4000, 8000, 16000, 16000]);
        let e = patience.pause(again(None)).unwrap_err().to_string();
        assert!(e.contains("9 times") && e.contains("cut"), "{e}");
    }

    #[test]
    fn what_arrives_begins_a_new_row() {
        let mut patience = Patience::new(2);
        for _ in 0..5 {
            patience.pause(again(None)).unwrap();
            patience.progress();
        }
    }

    #[test]
    fn a_server_may_ask_for_a_pause_but_not_for_any() {
        let mut patience = Patience::new(9);
        assert_eq!(patience.pause(again(Some(20))).unwrap(), Duration::from_secs(20));
        assert_eq!(patience.pause(again(Some(0))).unwrap(), Duration::from_millis(500));
        assert!(matches!(patience.pause(again(Some(301))), Err(Error::RateLimited { .. })));
        let last = Failure::Final(Error::NoCacheFolder);
        assert!(matches!(patience.pause(last), Err(Error::NoCacheFolder)));
    }
}
