//! The end of threads that loop until others are done.

use std::sync::atomic::{AtomicBool, Ordering};

/// Ends the loops when it goes out of scope, also where a check fails: a scope waits for its threads before it says so.
pub struct AtEnd<'a>(pub &'a AtomicBool);

impl Drop for AtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
