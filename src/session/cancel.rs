//! Cancelling a call from another thread.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::{Result, bail};

/// Cancels the running call of one session, or its next call if none is running. Cheap to clone and to send.
///
/// The call looks between layers, so it returns within the time of one layer of one chunk; the chunk in flight is
/// dropped, earlier ones stay in the session. A cancel is used up by the call that it ends. One that comes when its call
/// has just ended counts for the next: [`CancelToken::reset`] and [`Session::clear`](super::Session::clear) take it back.
#[derive(Clone, Debug, Default)]
pub struct CancelToken {
    flag: Arc<AtomicBool>,
}

impl CancelToken {
    pub(super) fn new() -> Self {
        Self::default()
    }

    /// Asks the session's call to end.
    pub fn cancel(&self) {
        self.flag.store(true, Ordering::Relaxed);
    }

    /// Takes back a cancel that no call has seen yet.
    pub fn reset(&self) {
        self.flag.store(false, Ordering::Relaxed);
    }

    /// `Cancelled` if asked for, and then no longer.
    pub(super) fn check(&self) -> Result<()> {
        if self.flag.load(Ordering::Relaxed) && self.flag.swap(false, Ordering::Relaxed) {
            bail!(Cancelled, "cancelled; the tokens that were complete stay in the session");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cancel_is_used_up_and_its_message_fits_a_prompt_and_a_generation() {
        let token = CancelToken::new();
        token.cancel();
        let error = token.check().unwrap_err();
        assert_eq!(error.message(), "cancelled; the tokens that were complete stay in the session");
        token.check().unwrap();
        token.cancel();
        token.reset();
        token.check().unwrap();
    }
}
