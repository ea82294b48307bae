//! Handles: what the opaque pointers of the C API point to.
//!
//! Invariant: a [`Shared`] object is reached by any number of threads at once, an [`Exclusive`] one by one thread at a
//! time, and a second one is told `BUSY` instead of waiting. A panic while an object is in use poisons it, and from then
//! on every use is refused with `POISONED`; freeing it works. What needs an engine's threads is bound to the process: in a
//! fork of it every use is refused with `UNAVAILABLE` before any lock is taken, and freeing it does nothing.

use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::panicking;

use super::guard::injection_point;
use crate::engine::Process;
use crate::error::{Result, bail};

/// An object for concurrent use.
pub(super) struct Shared<T> {
    what: &'static str,
    made_in: Option<Process>,
    poisoned: AtomicBool,
    value: T,
}

/// A use of a [`Shared`] object.
pub(super) struct SharedUse<'a, T> {
    object: &'a Shared<T>,
    panicking_before: bool,
}

impl<T> Shared<T> {
    /// `what` names the object in messages, with its article: "the model".
    pub(super) fn new(what: &'static str, value: T) -> Self {
        Self { what, made_in: None, poisoned: AtomicBool::new(false), value }
    }

    /// The same, of use in this process only.
    pub(super) fn bound(self) -> Self {
        Self { made_in: Some(Process::current()), ..self }
    }

    /// Whether it came here by a fork and is of no use.
    pub(super) fn is_inherited(&self) -> bool {
        self.made_in.is_some_and(Process::is_other)
    }

    pub(super) fn get(&self) -> Result<SharedUse<'_, T>> {
        self.made_in.map_or(Ok(()), |process| process.check(self.what))?;
        if self.poisoned.load(Ordering::Acquire) {
            return poisoned(self.what);
        }
        let using = SharedUse { object: self, panicking_before: panicking() };
        injection_point();
        Ok(using)
    }
}

impl<T> Deref for SharedUse<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.object.value
    }
}

impl<T> Drop for SharedUse<'_, T> {
    fn drop(&mut self) {
        if panicking() && !self.panicking_before {
            self.object.poisoned.store(true, Ordering::Release);
        }
    }
}

/// An object for one thread at a time.
pub(super) struct Exclusive<T> {
    what: &'static str,
    made_in: Option<Process>,
    value: Mutex<Held<T>>,
    /// Whether a call on it waits for a callback, which may only read it.
    held: AtomicBool,
}

/// What the handle of an [`Exclusive`] object holds.
enum Held<T> {
    Here(T),
    /// A submitted call has it.
    Lent,
    /// It was lost in a panic of such a call.
    Lost,
}

/// While it lives, its object can only be read.
pub(super) struct Hold<'a>(&'a AtomicBool);

impl Drop for Hold<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

/// The use of an [`Exclusive`] object; others are refused until it is dropped.
pub(super) struct ExclusiveUse<'a, T>(MutexGuard<'a, Held<T>>);

impl<T> Exclusive<T> {
    /// `what` as for [`Shared::new`].
    pub(super) fn new(what: &'static str, value: T) -> Self {
        Self { what, made_in: None, value: Mutex::new(Held::Here(value)), held: AtomicBool::new(false) }
    }

    /// As [`Shared::bound`].
    pub(super) fn bound(self) -> Self {
        Self { made_in: Some(Process::current()), ..self }
    }

    /// As [`Shared::is_inherited`].
    pub(super) fn is_inherited(&self) -> bool {
        self.made_in.is_some_and(Process::is_other)
    }

    /// For a call that does not use the object right now but goes on with it after a callback.
    pub(super) fn hold(&self) -> Hold<'_> {
        self.held.store(true, Ordering::Release);
        Hold(&self.held)
    }

    pub(super) fn get(&self) -> Result<ExclusiveUse<'_, T>> {
        if self.held.load(Ordering::Acquire) {
            bail!(Busy, "{} is in use by the call that runs this callback: only reading is possible", self.what);
        }
        self.read()
    }

    /// As [`Self::get`], to look at the object only: possible in callbacks too.
    pub(super) fn read(&self) -> Result<ExclusiveUse<'_, T>> {
        self.made_in.map_or(Ok(()), |process| process.check(self.what))?;
        let using = match self.value.try_lock() {
            Ok(lock) => match *lock {
                Held::Here(_) => ExclusiveUse(lock),
                Held::Lent => {
                    bail!(Busy, "{} is in use by a request, until that has told its end or is freed", self.what)
                }
                Held::Lost => return poisoned(self.what),
            },
            Err(TryLockError::WouldBlock) => bail!(Busy, "{} is in use by another thread", self.what),
            Err(TryLockError::Poisoned(_)) => return poisoned(self.what),
        };
        injection_point();
        Ok(using)
    }

    /// Puts back what was [lent](ExclusiveUse::lend); without it, the object is lost.
    pub(super) fn give_back(&self, value: Option<T>) {
        let mut held = self.value.lock().unwrap_or_else(PoisonError::into_inner);
        *held = value.map_or(Held::Lost, Held::Here);
    }
}

const HERE: &str = "a use begins with an object that is here, and lending it ends the use";

impl<T> ExclusiveUse<'_, T> {
    /// Takes the object out for a submitted call: until it is [given back](Exclusive::give_back), every use is refused.
    pub(super) fn lend(mut self) -> T {
        match std::mem::replace(&mut *self.0, Held::Lent) {
            Held::Here(value) => value,
            Held::Lent | Held::Lost => unreachable!("{HERE}"),
        }
    }
}

impl<T> Deref for ExclusiveUse<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        match &*self.0 {
            Held::Here(value) => value,
            Held::Lent | Held::Lost => unreachable!("{HERE}"),
        }
    }
}

impl<T> DerefMut for ExclusiveUse<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        match &mut *self.0 {
            Held::Here(value) => value,
            Held::Lent | Held::Lost => unreachable!("{HERE}"),
        }
    }
}

fn poisoned<T>(what: &str) -> Result<T> {
    bail!(Poisoned, "{what} was broken by a panic in an earlier call; it can only be freed")
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;
    use crate::error::ErrorKind;
    use crate::ffi::guard::guard_value;

    #[test]
    fn a_panic_during_use_poisons_a_shared_object_and_no_other() {
        let (object, other) = (Shared::new("the object", 1), Shared::new("the other", 2));
        guard_value("dsv4_test", (), || {
            let _using = object.get();
            panic!("in use");
        });
        assert_eq!(object.get().err().expect("poisoned").kind(), ErrorKind::Poisoned);
        assert_eq!(*other.get().expect("untouched"), 2);
    }

    #[test]
    fn use_while_the_thread_is_already_panicking_does_not_poison() {
        struct Cleanup<'a>(&'a Shared<i32>);
        impl Drop for Cleanup<'_> {
            fn drop(&mut self) {
                assert!(self.0.get().is_ok());
            }
        }
        let object = Shared::new("the object", 1);
        guard_value("dsv4_test", (), || {
            let _cleanup = Cleanup(&object);
            panic!("elsewhere");
        });
        assert!(object.get().is_ok());
    }

    #[test]
    fn a_held_object_can_be_read_but_not_used() {
        let object = Exclusive::new("the object", 1);
        let hold = object.hold();
        assert_eq!(object.get().err().expect("held").kind(), ErrorKind::Busy);
        assert_eq!(*object.read().expect("readable"), 1);
        drop(hold);
        *object.get().expect("free") += 1;
    }

    #[test]
    fn a_lent_object_is_busy_until_it_is_given_back_and_poisoned_if_it_is_lost() {
        let object = Exclusive::new("the object", 1);
        let lent = object.get().expect("free").lend();
        assert_eq!([object.get().err(), object.read().err()].map(|e| e.expect("lent").kind()), [ErrorKind::Busy; 2]);
        object.give_back(Some(lent + 1));
        assert_eq!(object.get().expect("free again").lend(), 2);
        object.give_back(None);
        assert_eq!(object.get().err().expect("lost").kind(), ErrorKind::Poisoned);
    }

    #[test]
    fn an_exclusive_object_is_busy_during_use_and_poisoned_after_a_panic() {
        let object = Exclusive::new("the object", 1);
        let using = object.get().expect("free");
        assert_eq!(object.get().err().expect("busy").kind(), ErrorKind::Busy);
        drop(using);
        *object.get().expect("free again") += 1;
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            let _using = object.get();
            panic!("in use, printed by the test harness");
        }));
        assert!(panicked.is_err());
        assert_eq!(object.get().err().expect("poisoned").kind(), ErrorKind::Poisoned);
    }
}
