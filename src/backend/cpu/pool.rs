//! The engine's own threads. The host program's rayon pool is never touched.
#![forbid(unsafe_code)]

use std::sync::{Mutex, PoisonError};

use rayon::prelude::*;

use crate::error::{Error, ErrorKind, Result};

/// A fixed set of worker threads, or none: with one thread all work runs on the caller.
pub struct Pool {
    workers: Option<rayon::ThreadPool>,
}

impl Pool {
    /// A pool of `threads` workers; 0 means one per available core.
    pub fn new(threads: usize) -> Result<Self> {
        let threads = if threads == 0 { std::thread::available_parallelism().map_or(1, usize::from) } else { threads };
        if threads == 1 {
            return Ok(Self { workers: None });
        }
        let workers = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|i| format!("dsv4-{i}"))
            .build()
            .map_err(|e| Error::new(ErrorKind::Unavailable, format!("cannot start {threads} threads: {e}")))?;
        Ok(Self { workers: Some(workers) })
    }

    /// Number of threads that work at once.
    pub fn threads(&self) -> usize {
        self.workers.as_ref().map_or(1, rayon::ThreadPool::current_num_threads)
    }

    /// Runs `f` on one of the workers, so that the calls below need not wake one each time.
    pub fn enter<R: Send>(&self, f: impl FnOnce() -> R + Send) -> R {
        match &self.workers {
            Some(workers) => workers.install(f),
            None => f(),
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
        let work = &work;
        workers.scope(|scope| {
            for state in others {
                scope.spawn(move |_| work(state));
            }
            work(first);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_chunk_is_visited_once_with_any_number_of_threads() {
        for threads in [1, 2, 3] {
            let pool = Pool::new(threads).unwrap();
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
