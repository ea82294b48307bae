//! Ctrl-C: the first one ends a generation in an orderly way, the second one the process.

#[cfg(unix)]
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use dsv4::CancelToken;

/// While it exists, the first Ctrl-C is remembered instead of ending the process.
pub(crate) struct Interrupt(());

#[cfg(unix)]
static SEEN: AtomicBool = AtomicBool::new(false);

#[cfg(unix)]
extern "C" fn remember(signal: libc::c_int) {
    SEEN.store(true, Ordering::Relaxed);
    // SAFETY: `signal` may be called from a signal handler; from now on the system's own action applies.
    unsafe { libc::signal(signal, libc::SIG_DFL) };
}

impl Interrupt {
    /// Starts to remember Ctrl-C. Where a system has no signals, Ctrl-C ends the process as always.
    pub(crate) fn arm() -> Self {
        #[cfg(unix)]
        {
            SEEN.store(false, Ordering::Relaxed);
            let handler = remember as extern "C" fn(libc::c_int);
            // SAFETY: the handler does only what is allowed in one: it stores to an atomic and calls `signal`.
            unsafe { libc::signal(libc::SIGINT, handler as libc::sighandler_t) };
        }
        Self(())
    }

    /// Whether Ctrl-C was pressed.
    pub(crate) fn seen(&self) -> bool {
        #[cfg(unix)]
        return SEEN.load(Ordering::Relaxed);
        #[cfg(not(unix))]
        false
    }
}

/// How often a running call is looked after.
const PERIOD: Duration = Duration::from_millis(50);

impl Interrupt {
    /// Does `work`, whose session `token` cancels when Ctrl-C is pressed: within a layer, where its own callbacks come
    /// only behind a chunk.
    pub(crate) fn cancels<T>(&self, token: &CancelToken, work: impl FnOnce() -> T) -> T {
        let (done, is_done) = channel::<()>();
        let result = thread::scope(|scope| {
            scope.spawn(move || {
                while is_done.recv_timeout(PERIOD) == Err(RecvTimeoutError::Timeout) {
                    if self.seen() {
                        return token.cancel();
                    }
                }
            });
            let result = work();
            // hanging up ends the watch
            drop(done);
            result
        });
        if self.seen() {
            // it may have come behind the end of the work; the next call of the session is not meant
            token.reset();
        }
        result
    }
}

impl Drop for Interrupt {
    fn drop(&mut self) {
        #[cfg(unix)]
        // SAFETY: gives the signal back its default action; there is no other handler in this program.
        unsafe {
            libc::signal(libc::SIGINT, libc::SIG_DFL);
        }
    }
}
