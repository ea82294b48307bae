//! Where a value is between the steps that it is lent to.
#![forbid(unsafe_code)]

use std::ops::{Deref, DerefMut};
use std::time::{Duration, Instant};

/// A value that its owner's calls lend to whoever leads a step. It is at home whenever no call of the owner is running, so
/// the owner uses it as if it were the value.
pub(crate) struct Home<T> {
    value: Option<T>,
    member: u64,
    left: Option<Instant>,
}

/// Why the value can be used.
const AT_HOME: &str = "a call brings back what it lent before it returns";

impl<T> Home<T> {
    /// A home of `value`, known as `member` where it is lent to.
    pub(crate) fn new(value: T, member: u64) -> Self {
        Self { value: Some(value), member, left: None }
    }

    /// Its number.
    pub(crate) fn member(&self) -> u64 {
        self.member
    }

    /// Whether the owner called again within `patience` of the last result; at first it is taken to be one who does.
    pub(crate) fn is_prompt(&self, patience: Duration) -> bool {
        self.left.is_none_or(|left| left.elapsed() <= patience)
    }

    /// Lends the value to `call`, which gives it back with a result.
    pub(crate) fn lend<R>(&mut self, call: impl FnOnce(T) -> (T, R)) -> R {
        let (value, result) = call(self.value.take().expect(AT_HOME));
        self.value = Some(value);
        self.left = Some(Instant::now());
        result
    }
}

impl<T> Deref for Home<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.value.as_ref().expect(AT_HOME)
    }
}

impl<T> DerefMut for Home<T> {
    fn deref_mut(&mut self) -> &mut T {
        self.value.as_mut().expect(AT_HOME)
    }
}
