//! What the leader and its followers wait with. `schedules` has the same again, where every lock and every wait is a place at
//! which another thread may go on.
#![forbid(unsafe_code)]

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// A value behind a lock, and threads that wait until it changes.
pub(super) struct Monitor<T> {
    value: Mutex<T>,
    changed: Condvar,
}

/// While it lives, nobody else has the value.
pub(super) type Guard<'a, T> = MutexGuard<'a, T>;

impl<T> Monitor<T> {
    pub(super) fn new(value: T) -> Self {
        Self { value: Mutex::new(value), changed: Condvar::new() }
    }

    /// Waits for the value. What a panic left is whole: nothing is called while it is half changed.
    pub(super) fn lock(&self) -> Guard<'_, T> {
        self.value.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets others have the value until one of them [tells](Self::tell), or for no reason.
    pub(super) fn wait<'a>(&'a self, guard: Guard<'a, T>) -> Guard<'a, T> {
        self.changed.wait(guard).unwrap_or_else(PoisonError::into_inner)
    }

    /// As [`Self::wait`], for `limit` at most.
    pub(super) fn wait_for<'a>(&'a self, guard: Guard<'a, T>, limit: Duration) -> Guard<'a, T> {
        self.changed.wait_timeout(guard, limit).unwrap_or_else(PoisonError::into_inner).0
    }

    /// Ends one thread's wait, if one waits.
    pub(super) fn tell(&self) {
        self.changed.notify_one();
    }
}

/// Lets other threads run while `goes_on`, for `limit` at most, without going to sleep.
pub(super) fn attend(limit: Duration, goes_on: impl Fn() -> bool) {
    let start = Instant::now();
    while goes_on() && start.elapsed() < limit {
        thread::yield_now();
    }
}
