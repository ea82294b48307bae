//! What ends a call before its time: a cancel from another thread, or a deadline.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use crate::error::{Result, bail};

/// Cancels the running call of one session, or its next call if none is running. Cheap to clone and to send.
///
/// ```
/// # use dsv4::{Engine, EngineOptions, Model, Session, SessionOptions};
/// # let engine = Engine::new(&Model::open("examples/models/tiny-v4")?, EngineOptions::default())?;
/// # let mut session = Session::new(&engine, SessionOptions::default())?;
/// use std::thread;
/// # use dsv4::ErrorKind;
/// let cancel = session.cancel_token();
/// // from any thread, at any time; here before the call that it ends
/// thread::spawn(move || cancel.cancel()).join().expect("no panic");
/// assert_eq!(session.feed(&[300; 40]).unwrap_err().kind(), ErrorKind::Cancelled);
/// session.feed(&[300; 40])?; // used up
/// # Ok::<(), dsv4::Error>(())
/// ```
///
/// A call alone in its step looks between layers, so it returns within the time of one layer of one chunk; the chunk in
/// flight is dropped, earlier ones stay in the session. A chunk that shares a step with other sessions' is completed and
/// stays too. A save looks between parts of a few megabytes and leaves the old file. A cancel is used up by the call that it
/// ends. One that comes when its call has just ended counts for the
/// next: [`CancelToken::reset`] and [`Session::clear`](crate::Session::clear) take it back.
#[derive(Clone, Debug, Default)]
pub struct CancelToken {
    flag: Arc<AtomicBool>,
}

/// What may end one call.
#[derive(Clone, Debug, Default)]
pub(crate) struct Stop {
    /// Of the call's session.
    pub(crate) cancel: CancelToken,
    /// When the call's time is up.
    pub(crate) deadline: Option<Instant>,
}

impl Stop {
    /// Whether the call is to end.
    pub(crate) fn is_asked(&self) -> bool {
        self.cancel.flag.load(Ordering::Relaxed) || self.is_late()
    }

    /// `Cancelled` if a call that feeds is to end; a cancel is used up then.
    pub(crate) fn check(&self) -> Result<()> {
        match self.reason() {
            Some(reason) => bail!(Cancelled, "{reason}; the tokens that were complete stay in the session"),
            None => Ok(()),
        }
    }

    /// Why the call is to end, if it is; a cancel is used up then.
    pub(crate) fn reason(&self) -> Option<&'static str> {
        if self.cancel.take() {
            return Some("cancelled");
        }
        self.is_late().then_some("the call's time limit has passed")
    }

    fn is_late(&self) -> bool {
        self.deadline.is_some_and(|deadline| Instant::now() >= deadline)
    }
}

impl CancelToken {
    /// Asks the session's call to end.
    pub fn cancel(&self) {
        self.flag.store(true, Ordering::Relaxed);
    }

    /// Takes back a cancel that no call has seen yet.
    pub fn reset(&self) {
        self.flag.store(false, Ordering::Relaxed);
    }

    /// Whether it was asked for; then no longer.
    fn take(&self) -> bool {
        self.flag.load(Ordering::Relaxed) && self.flag.swap(false, Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cancel_is_used_up_and_its_message_fits_a_prompt_and_a_generation() {
        let stop = Stop::default();
        stop.cancel.cancel();
        let error = stop.check().unwrap_err();
        assert_eq!(error.message(), "cancelled; the tokens that were complete stay in the session");
        stop.check().unwrap();
        stop.cancel.cancel();
        stop.cancel.reset();
        stop.check().unwrap();
    }

    #[test]
    fn a_deadline_stops_until_its_call_is_over_and_uses_no_cancel_up() {
        let now = Instant::now();
        let stop = Stop { deadline: Some(now), ..Stop::default() };
        assert!(stop.is_asked());
        assert!(stop.check().unwrap_err().message().starts_with("the call's time limit has passed"));
        assert!(stop.is_asked(), "it stays late");
        let later = Stop { deadline: Some(now + std::time::Duration::from_secs(3600)), ..Stop::default() };
        assert!(!later.is_asked());
        later.cancel.cancel();
        assert!(later.is_asked());
        later.check().unwrap_err();
        later.check().unwrap();
    }
}
