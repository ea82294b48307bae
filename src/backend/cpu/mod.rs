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
    /// Products get the noise of other orders of summation.
    noise: bool,
}

impl Cpu {
    /// A backend with `threads` threads (0: one per core) and the best instruction set of this machine.
    pub fn new(threads: usize) -> Result<Self> {
        Ok(Self::with_pool(Pool::new(threads)?))
    }

    /// The same, where one of the threads is the caller's ([`Pool::beside_caller`]).
    pub fn beside_caller(threads: usize) -> Result<Self> {
        Ok(Self::with_pool(Pool::beside_caller(threads)?))
    }

    fn with_pool(pool: Pool) -> Self {
        Self { pool, simd: Simd::detect(), scratch: Mutex::new(Vec::new()), noise: false }
    }

    /// Adds to every product what other orders of its float32 sum would change: for tests that ask whether a difference is
    /// more than that.
    pub(crate) fn add_noise(&mut self) {
        self.noise = true;
    }

    /// Several products in one parallel region.
    pub fn linear(&self, jobs: &mut [Job<'_>]) -> Result<()> {
        let idle = || self.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        let mut scratch = idle().pop().unwrap_or_default();
        let result = linear::run(&self.pool, self.simd, &mut scratch, jobs);
        idle().push(scratch);
        if self.noise {
            jobs.iter_mut().for_each(disturb);
        }
        result
    }
}

/// Noise of a standard deviation of 4e-8 of the row's root mean square for 128 terms, growing with the root of their
/// number as rounding errors do; for 128 terms it is that of the goldens' tolerances (tests/goldens/make.py).
fn disturb(job: &mut Job<'_>) {
    let size = 4e-8 * (job.weight.cols as f64 / 128.0).sqrt();
    for row in job.output.chunks_exact_mut(job.weight.rows.max(1)) {
        let squares: f64 = row.iter().map(|&v| f64::from(v).powi(2)).sum();
        let sigma = size * (squares / row.len() as f64).sqrt();
        for (i, v) in row.iter_mut().enumerate() {
            // the sum of three uniform numbers of a hash of value and place, of variance 1
            let mut z = (u64::from(v.to_bits()) << 32 | i as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
            z = (z ^ (z >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            let uniform = |shift: u32| ((z >> shift) & 0xFFFF) as f64 / 32_768.0 - 1.0;
            *v += (sigma * (uniform(0) + uniform(16) + uniform(32))) as f32;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::{MatrixFormat, MatrixRef, Scales};

    #[test]
    fn noise_has_the_size_of_rounding_errors() {
        let (rows, cols) = (4096, 512);
        let data = vec![0; rows * cols * 2];
        let weight = MatrixRef {
            format: MatrixFormat::Bf16,
            rows,
            cols,
            data: &data,
            scales: Scales::None,
            first_row: 0,
            round_to_bf16: false,
        };
        let input = vec![0.0; cols];
        let before: Vec<f32> = (0..rows).map(|i| (i as f32 * 0.37).sin()).collect();
        let mut output = before.clone();
        disturb(&mut Job::new(weight, &input, &mut output));
        let rms = |values: &[f64]| (values.iter().map(|v| v * v).sum::<f64>() / values.len() as f64).sqrt();
        let wide = |v: &[f32]| v.iter().map(|&v| f64::from(v)).collect::<Vec<_>>();
        let noise: Vec<f64> = wide(&output).iter().zip(wide(&before)).map(|(a, b)| a - b).collect();
        let relative = rms(&noise) / rms(&wide(&before));
        assert!((6e-8..1.1e-7).contains(&relative), "{relative:e}, with the rounding to float32");
    }
}
