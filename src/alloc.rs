//! Fallible allocation for everything whose size comes from a model, a context, a batch or a file.
//!
//! Invariant: a request that cannot be met is an [`ErrorKind::OutOfMemory`](crate::error::ErrorKind::OutOfMemory) error
//! with the bytes asked for, never an abort. Small allocations of fixed size do not come through here.
//!
//! Tests can have the nth request refused with [`fail_nth`].

#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::error::{Error, Result};

/// Requests until the injected failure, counting it; 0 when none is armed.
static COUNTDOWN: AtomicU64 = AtomicU64::new(0);
/// Held by the one [`FailNth`] that may exist.
static INJECTION: Mutex<()> = Mutex::new(());

/// An empty vector with room for `n` elements of `what`.
///
/// # Errors
/// [`ErrorKind::OutOfMemory`](crate::error::ErrorKind::OutOfMemory) with the bytes asked for.
pub fn with_capacity<T>(what: &str, n: usize) -> Result<Vec<T>> {
    let refused = || Error::out_of_memory(what, (n as u64).saturating_mul(size_of::<T>() as u64));
    if is_refused() {
        return Err(refused());
    }
    let mut vec = Vec::new();
    vec.try_reserve_exact(n).map_err(|_| refused())?;
    Ok(vec)
}

/// `len` default values of `what`.
///
/// # Errors
/// As [`with_capacity`].
pub fn zeroed<T: Copy + Default>(what: &str, len: usize) -> Result<Vec<T>> {
    filled(what, len, T::default())
}

/// `len` copies of `value` of `what`.
///
/// # Errors
/// As [`with_capacity`].
pub fn filled<T: Copy>(what: &str, len: usize, value: T) -> Result<Vec<T>> {
    let mut vec = with_capacity(what, len)?;
    vec.resize(len, value);
    Ok(vec)
}

/// `len` zeros of `what`.
///
/// # Errors
/// As [`with_capacity`].
pub fn vec_f32(what: &str, len: usize) -> Result<Vec<f32>> {
    zeroed(what, len)
}

/// A copy of `values`.
///
/// # Errors
/// As [`with_capacity`].
pub fn copied<T: Copy>(what: &str, values: &[T]) -> Result<Vec<T>> {
    let mut vec = with_capacity(what, values.len())?;
    vec.extend_from_slice(values);
    Ok(vec)
}

/// Room for `more` elements beyond those in `vec`, growing by doubling.
///
/// # Errors
/// As [`with_capacity`]; `vec` is unchanged.
pub fn reserve<T>(what: &str, vec: &mut Vec<T>, more: usize) -> Result<()> {
    if vec.capacity() - vec.len() >= more {
        return Ok(());
    }
    let bytes = ((vec.len() + more) as u64).saturating_mul(size_of::<T>() as u64);
    if is_refused() || vec.try_reserve(more).is_err() {
        return Err(Error::out_of_memory(what, bytes));
    }
    Ok(())
}

/// As [`reserve`], for text.
///
/// # Errors
/// As [`with_capacity`]; `text` is unchanged.
pub fn reserve_text(what: &str, text: &mut String, more: usize) -> Result<()> {
    if text.capacity() - text.len() >= more {
        return Ok(());
    }
    if is_refused() || text.try_reserve(more).is_err() {
        return Err(Error::out_of_memory(what, (text.len() + more) as u64));
    }
    Ok(())
}

/// A copy of `text`.
///
/// # Errors
/// As [`with_capacity`].
pub fn copied_text(what: &str, text: &str) -> Result<String> {
    let mut copy = String::new();
    reserve_text(what, &mut copy, text.len())?;
    copy.push_str(text);
    Ok(copy)
}

/// Asks for `bytes` and gives them back: before work in a crate that allocates without asking and whose memory grows
/// with its input. What is there now may be gone a moment later, but what is not there is an error instead of an abort.
///
/// # Errors
/// As [`with_capacity`].
pub fn probe(what: &str, bytes: usize) -> Result<()> {
    with_capacity::<u8>(what, bytes).map(drop)
}

/// Has the `n`th request from now (1 is the next one), of any thread of the process, refused; later ones succeed again.
///
/// Process-wide, because worker threads allocate too: a test that uses it belongs in a test binary of its own, or
/// shares one only with tests that use it as well. A second call waits until the first guard is dropped.
pub fn fail_nth(n: u64) -> FailNth {
    let lock = INJECTION.lock().unwrap_or_else(PoisonError::into_inner);
    COUNTDOWN.store(n, Ordering::SeqCst);
    FailNth { _lock: lock }
}

/// An armed failure; dropping it disarms.
#[derive(Debug)]
pub struct FailNth {
    _lock: MutexGuard<'static, ()>,
}

impl FailNth {
    /// Whether the failure has happened.
    pub fn fired(&self) -> bool {
        COUNTDOWN.load(Ordering::SeqCst) == 0
    }
}

impl Drop for FailNth {
    fn drop(&mut self) {
        COUNTDOWN.store(0, Ordering::SeqCst);
    }
}

/// Counts one request; true for the one to refuse.
fn is_refused() -> bool {
    COUNTDOWN.load(Ordering::Relaxed) != 0
        && COUNTDOWN.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)) == Ok(1)
}
