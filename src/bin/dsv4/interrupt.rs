//! Ctrl-C: the first one ends a generation in an orderly way, the second one the process.

#[cfg(unix)]
use std::sync::atomic::{AtomicBool, Ordering};

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

impl Drop for Interrupt {
    fn drop(&mut self) {
        #[cfg(unix)]
        // SAFETY: gives the signal back its default action; there is no other handler in this program.
        unsafe {
            libc::signal(libc::SIGINT, libc::SIG_DFL);
        }
    }
}
