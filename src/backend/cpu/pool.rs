//! The engine's own threads. The host program's rayon pool is never touched.
//!
//! Threads sleep when there is nothing to do, and waking one takes as long as a small product. Where short pieces of work
//! follow each other at short distances, [`Pool::awake`] has them look for work in between instead.
#![forbid(unsafe_code)]

use std::hint::spin_loop;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rayon::prelude::*;

use crate::error::{Error, ErrorKind, Result};

/// How long a thread looks for work before it sleeps, and a caller for the last of its work to be done.
const PATIENCE: Duration = Duration::from_millis(2);

/// A fixed set of worker threads, or none: with one thread all work runs on the caller.
pub struct Pool {
    workers: Option<rayon::ThreadPool>,
    /// Threads that work at once, a caller included that works with them.
    threads: usize,
    /// How many [`Awake`] there are.
    wanted: Arc<AtomicUsize>,
}

/// While it lives, the pool's threads are awake.
pub struct Awake(Arc<AtomicUsize>);

impl Drop for Awake {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Pool {
    /// A pool of `threads` workers; 0 means one per available core. Callers wait while they work.
    pub fn new(threads: usize) -> Result<Self> {
        let threads = count(threads);
        Self::with_workers(threads, if threads == 1 { 0 } else { threads })
    }

    /// A pool for `threads` threads of which one is the caller's, which is never put to sleep by [`Self::share`].
    pub fn beside_caller(threads: usize) -> Result<Self> {
        let threads = count(threads);
        Self::with_workers(threads, threads - 1)
    }

    fn with_workers(threads: usize, workers: usize) -> Result<Self> {
        let build = || {
            rayon::ThreadPoolBuilder::new()
                .num_threads(workers)
                .thread_name(|i| format!("dsv4-{i}"))
                .build()
                .map_err(|e| Error::new(ErrorKind::Unavailable, format!("cannot start {workers} threads: {e}")))
        };
        let workers = if workers == 0 { None } else { Some(build()?) };
        Ok(Self { workers, threads, wanted: Arc::default() })
    }

    /// Number of threads that work at once.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Keeps the workers awake until the result is dropped, or nothing was to be done for some time.
    pub fn awake(&self) -> Awake {
        self.wanted.fetch_add(1, Ordering::Relaxed);
        if let Some(workers) = &self.workers {
            let wanted = Arc::clone(&self.wanted);
            // the first wakes the others, which takes a while
            workers.spawn(move || rayon::spawn_broadcast(move |_| look_for_work(&wanted)));
        }
        Awake(Arc::clone(&self.wanted))
    }

    /// Least size of work, in values that are looked at, for which it pays to have others help.
    pub fn least_values(&self) -> usize {
        if self.wanted.load(Ordering::Relaxed) > 0 { 2 << 10 } else { 64 << 10 }
    }

    /// Runs `f` on one of the workers, so that the calls below need not wake one each time; or here, if callers work.
    pub fn enter<R: Send>(&self, f: impl FnOnce() -> R + Send) -> R {
        match &self.workers {
            Some(workers) if workers.current_num_threads() == self.threads => workers.install(f),
            _ => f(),
        }
    }

    /// Calls `f(index, chunk)` for every `size` elements of `data`; chunks run in any order, at once where they can.
    pub fn chunks<T: Send>(
        &self,
        data: &mut [T],
        size: usize,
        f: impl Fn(usize, &mut [T]) -> Result<()> + Sync,
    ) -> Result<()> {
        match &self.workers {
            Some(workers) if data.len() > size => {
                workers.install(|| data.par_chunks_mut(size).enumerate().try_for_each(|(i, c)| f(i, c)))
            }
            _ => data.chunks_mut(size).enumerate().try_for_each(|(i, c)| f(i, c)),
        }
    }

    /// Runs every unit with one of the workers' states; a thread takes the next unit when it is done with one, in order.
    pub fn share<U: Send, W: Send>(&self, states: &mut [W], units: &mut [U], run: impl Fn(&mut U, &mut W) + Sync) {
        let count = states.len().min(units.len());
        let Some((first, others)) = states[..count].split_first_mut() else { return };
        let workers = match &self.workers {
            Some(workers) if !others.is_empty() => workers,
            _ => return units.iter_mut().for_each(|unit| run(unit, first)),
        };
        let queue = Mutex::new(units.iter_mut());
        let work = |state: &mut W| {
            loop {
                let next = queue.lock().unwrap_or_else(PoisonError::into_inner).next();
                let Some(unit) = next else { return };
                run(unit, state);
            }
        };
        let (work, left) = (&work, &AtomicUsize::new(others.len()));
        workers.in_place_scope(|scope| {
            for state in others {
                scope.spawn(move |_| {
                    work(state);
                    left.fetch_sub(1, Ordering::Release);
                });
            }
            work(first);
            // a worker finds other work by itself, and any other thread would be put to sleep
            if rayon::current_thread_index().is_none() {
                wait_until(|| left.load(Ordering::Acquire) == 0);
            }
        });
    }

    /// Calls `f(index)` for every index below `count`, in any order, at once where it can.
    pub fn indices(&self, count: usize, f: impl Fn(usize) -> Result<()> + Sync) -> Result<()> {
        match &self.workers {
            Some(workers) if count > 1 => workers.install(|| (0..count).into_par_iter().try_for_each(&f)),
            _ => (0..count).try_for_each(f),
        }
    }
}

/// `threads`, or one per available core.
fn count(threads: usize) -> usize {
    if threads == 0 { std::thread::available_parallelism().map_or(1, usize::from) } else { threads }
}

/// Does what a worker finds to do while somebody wants it awake.
fn look_for_work(wanted: &AtomicUsize) {
    let mut since = Instant::now();
    while wanted.load(Ordering::Relaxed) > 0 {
        if rayon::yield_now() == Some(rayon::Yield::Executed) {
            since = Instant::now();
        } else if since.elapsed() > PATIENCE {
            return;
        }
        spin_loop();
    }
}

/// Waits, but not long, for what other threads are about to do.
fn wait_until(is_done: impl Fn() -> bool) {
    let since = Instant::now();
    while !is_done() && since.elapsed() < PATIENCE {
        spin_loop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_chunk_is_visited_once_with_any_number_of_threads() {
        for (threads, pool) in pools() {
            assert_eq!(pool.threads(), threads);
            let mut data = vec![0usize; 1003];
            pool.chunks(&mut data, 10, |i, chunk| {
                chunk.iter_mut().for_each(|v| *v += i + 1);
                Ok(())
            })
            .unwrap();
            assert!(data.iter().enumerate().all(|(i, &v)| v == i / 10 + 1));
        }
    }

    fn pools() -> impl Iterator<Item = (usize, Pool)> {
        let kinds = [Pool::new, Pool::beside_caller];
        kinds.into_iter().flat_map(|kind| (1..4).map(move |threads| (threads, kind(threads).unwrap())))
    }

    #[test]
    fn every_unit_is_run_once_whether_threads_sleep_or_not() {
        for (threads, pool) in pools() {
            for is_awake in [false, true, false] {
                let awake = is_awake.then(|| pool.awake());
                for round in 0..200 {
                    let mut states = vec![0usize; threads];
                    let mut units = vec![0usize; round % 7];
                    pool.share(&mut states, &mut units, |unit, state| {
                        *unit += 1;
                        *state += 1;
                    });
                    assert!(units.iter().all(|&unit| unit == 1), "{threads} threads");
                    assert_eq!(states.iter().sum::<usize>(), units.len());
                }
                drop(awake);
            }
        }
    }

    #[test]
    fn threads_that_are_awake_sleep_when_nobody_wants_them() {
        let pool = Pool::beside_caller(3).unwrap();
        for _ in 0..2 {
            let awake = pool.awake();
            pool.share(&mut [(); 3], &mut [(); 100], |(), ()| std::thread::sleep(Duration::from_micros(10)));
            drop(awake);
            assert_eq!(pool.wanted.load(Ordering::Relaxed), 0);
            // what the workers look at goes when the last of them has left
            let since = Instant::now();
            while Arc::strong_count(&pool.wanted) > 1 && since.elapsed() < Duration::from_secs(10) {
                std::thread::yield_now();
            }
            assert_eq!(Arc::strong_count(&pool.wanted), 1);
        }
    }

    #[test]
    fn a_panic_in_a_unit_reaches_the_caller() {
        let pool = Pool::beside_caller(3).unwrap();
        let awake = pool.awake();
        let mut units: Vec<usize> = (0..30).collect();
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            pool.share(&mut [(); 3], &mut units, |&mut unit, ()| assert!(unit != 20, "unit 20"));
        }));
        assert!(result.is_err());
        drop(awake);
        let mut units = vec![0; 30];
        pool.share(&mut [(); 3], &mut units, |unit, ()| *unit += 1);
        assert!(units.iter().all(|&unit| unit == 1), "the pool goes on");
    }

    #[test]
    fn an_error_in_a_worker_reaches_the_caller() {
        let pool = Pool::new(2).unwrap();
        let result = pool.indices(100, |i| match i {
            57 => Err(Error::new(ErrorKind::Numeric, "index 57")),
            _ => Ok(()),
        });
        assert_eq!(result.unwrap_err().message(), "index 57");
    }
}
