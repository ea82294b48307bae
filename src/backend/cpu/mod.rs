//! The CPU backend: one file an operation, float32 arithmetic, SIMD chosen at run time.
//!
//! Invariant: no result depends on the number of threads or on what else is in a call. Every sum has one order, fixed
//! by positions and dimensions; work is split between threads only where outputs are independent.

pub mod attention;
pub mod compressor;
pub mod hyper;
pub mod indexer;
pub mod linear;
pub mod moe;
pub mod norm;
mod pool;
pub mod rope;
pub mod simd;

pub use pool::Pool;

use std::sync::{Mutex, PoisonError};

use crate::error::Result;

use linear::Job;
use simd::Simd;

/// Threads and instruction set of one engine.
pub struct Cpu {
    /// The engine's own threads.
    pub pool: Pool,
    /// The instruction set in use.
    pub simd: Simd,
    /// Scratch of products; one for each call in flight, reused.
    scratch: Mutex<Vec<linear::Scratch>>,
}

impl Cpu {
    /// A backend with `threads` threads (0: one per core) and the best instruction set of this machine.
    pub fn new(threads: usize) -> Result<Self> {
        Ok(Self { pool: Pool::new(threads)?, simd: Simd::detect(), scratch: Mutex::new(Vec::new()) })
    }

    /// Several products in one parallel region.
    pub fn linear(&self, jobs: &mut [Job<'_>]) -> Result<()> {
        let idle = || self.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        let mut scratch = idle().pop().unwrap_or_default();
        let result = linear::run(&self.pool, self.simd, &mut scratch, jobs);
        idle().push(scratch);
        result
    }
}
