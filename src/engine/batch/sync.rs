//! What the leader and its followers wait with. `schedules` has the same names over again, where every lock and every wait is
//! a place at which another thread may go on.
#![forbid(unsafe_code)]

use std::sync::PoisonError;
use std::time::Duration;

pub(super) use std::sync::{Condvar, Mutex, MutexGuard};

/// Locks; what a panic left is whole, since nothing is called while state is half changed.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits until told, or for no reason.
pub(super) fn wait<'a, T>(condvar: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    condvar.wait(guard).unwrap_or_else(PoisonError::into_inner)
}

/// As [`wait`], for `limit` at most.
pub(super) fn wait_for<'a, T>(condvar: &Condvar, guard: MutexGuard<'a, T>, limit: Duration) -> MutexGuard<'a, T> {
    condvar.wait_timeout(guard, limit).unwrap_or_else(PoisonError::into_inner).0
}
