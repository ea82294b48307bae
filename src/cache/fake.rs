//! A page memory for tests: host bytes that nothing reaches but calls, which are counted and can fail.
#![forbid(unsafe_code)]

use std::ops::Range;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use super::memory::{PageMemory, PageMove};
use crate::error::{Result, bail};

/// What a call that failed leaves where it was to write.
const TORN: u8 = 0xEE;

pub(super) struct FakeMemory {
    inner: Mutex<Inner>,
    /// Time from a copy's call to its beginning, in which others may do something.
    delay: Duration,
}

struct Inner {
    bytes: Vec<u8>,
    calls: u64,
    /// Calls until one fails, counting it; 0 when none is to.
    countdown: u64,
}

impl FakeMemory {
    /// `len` bytes of no meaning.
    pub(super) fn new(len: u64) -> Self {
        let inner = Mutex::new(Inner { bytes: vec![0xA5; len as usize], calls: 0, countdown: 0 });
        Self { inner, delay: Duration::ZERO }
    }

    /// The same with copies that begin late.
    pub(super) fn late(self, delay: Duration) -> Self {
        Self { delay, ..self }
    }

    /// Calls so far.
    pub(super) fn calls(&self) -> u64 {
        self.with(|inner| inner.calls)
    }

    /// Has the `n`th call from now fail, once; 0 has none fail.
    pub(super) fn fail_nth(&self, n: u64) {
        self.with(|inner| inner.countdown = n);
    }

    fn with<T>(&self, work: impl FnOnce(&mut Inner) -> T) -> T {
        work(&mut self.inner.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// A call that writes `targets`.
    fn call(&self, targets: &[Range<usize>], work: impl FnOnce(&mut [u8])) -> Result<()> {
        self.with(|inner| {
            inner.calls += 1;
            if inner.countdown == 1 {
                inner.countdown = 0;
                targets.iter().for_each(|target| inner.bytes[target.clone()].fill(TORN));
                bail!(Unavailable, "the device refused call {}", inner.calls);
            }
            inner.countdown = inner.countdown.saturating_sub(1);
            work(&mut inner.bytes);
            Ok(())
        })
    }
}

fn range(at: u64, len: u64) -> Range<usize> {
    at as usize..(at + len) as usize
}

impl PageMemory for FakeMemory {
    fn len(&self) -> u64 {
        self.with(|inner| inner.bytes.len() as u64)
    }

    fn read(&self, at: u64, out: &mut [u8]) -> Result<()> {
        let source = range(at, out.len() as u64);
        self.call(&[], |bytes| out.copy_from_slice(&bytes[source]))
    }

    fn write(&self, at: u64, from: &[u8]) -> Result<()> {
        let target = range(at, from.len() as u64);
        self.call(std::slice::from_ref(&target), |bytes| bytes[target.clone()].copy_from_slice(from))
    }

    fn copy(&self, moves: &[PageMove]) -> Result<()> {
        std::thread::sleep(self.delay);
        let targets: Vec<_> = moves.iter().map(|m| range(m.to, m.len)).collect();
        self.call(&targets, |bytes| {
            for (m, target) in moves.iter().zip(&targets) {
                let from = range(m.from, m.len);
                assert!(from.end <= target.start || target.end <= from.start, "{m:?} overlaps itself");
                bytes.copy_within(from, target.start);
            }
        })
    }

    fn fill(&self, at: u64, len: u64, byte: u8) -> Result<()> {
        let target = range(at, len);
        self.call(std::slice::from_ref(&target), |bytes| bytes[target.clone()].fill(byte))
    }
}
