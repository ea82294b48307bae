//! Vector kernels of the CPU backend, for the instruction set found at run time.
//!
//! Each kernel is written once over the `Vector` trait and compiled once per level. Invariant: every output element is
//! one chain of operations in an order fixed by its own operands (ascending along the summed axis, a fixed number of
//! lanes, one fixed reduction), so its bits depend on the level and on nothing else: not on how many rows, tokens,
//! heads or keys a call has, nor on how they are split over threads. Levels may differ in the last bits. Products with
//! E2M1 weights sum the eight of a lane in a group before they join the chain; where that sum is exact, `digits` makes
//! it in integers.
//!
//! This is the only module of the backend with `unsafe`; what it exports is safe. It knows nothing of threads.

#![expect(
    clippy::multiple_unsafe_ops_per_block,
    reason = "a kernel's every operation rests on one contract, the instruction set and the checked sizes"
)]
#![expect(clippy::needless_range_loop, reason = "register tiles are several arrays walked by one index")]

mod attention;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod convert;
mod digits;
mod few;
mod gemm;
mod layout;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;
mod rows;
mod vector;

pub use attention::{accumulate, exp, scores};
pub(in crate::backend::cpu) use convert::scale;
pub use convert::{bf16_to_f32, e4m3_to_f32};
pub(in crate::backend::cpu) use digits::{DIGIT_COLS, DIGIT_TOKENS, DigitDots, Digits, FewDigitDots};
pub(in crate::backend::cpu) use few::Few;
pub(in crate::backend::cpu) use gemm::{Block, TOKEN_BLOCK};
pub(in crate::backend::cpu) use layout::{Form, K_BLOCK, permutation};
pub(in crate::backend::cpu) use rows::{Dots, Rows, Storage};

use std::fmt;

use crate::error::{Error, ErrorKind, Result};
use portable::Portable;
use vector::Vector;

/// An instruction set that kernels exist for, from the slowest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Level {
    /// Plain Rust, eight lanes, no fused multiply-add; every machine has it.
    Portable,
    /// aarch64 with NEON, eight lanes in two registers; same bits as `Avx2`.
    Neon,
    /// x86-64 with AVX2 and FMA, eight lanes.
    Avx2,
    /// x86-64 with AVX-512 F and BW, sixteen lanes.
    Avx512,
}

impl Level {
    /// All levels, those of other architectures included.
    pub const ALL: [Self; 4] = [Self::Portable, Self::Neon, Self::Avx2, Self::Avx512];

    /// Name as users write it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Neon => "neon",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
        }
    }

    fn is_available(self) -> bool {
        match self {
            Self::Portable => true,
            #[cfg(target_arch = "aarch64")]
            Self::Neon => std::arch::is_aarch64_feature_detected!("neon"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                Self::Avx2.is_available() && is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bw")
            }
            _ => false,
        }
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A level that this machine has. It can be had only by asking for it, so a kernel never meets an instruction that
/// the processor lacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Simd(Level);

impl Simd {
    /// The best level of this machine.
    pub fn detect() -> Self {
        let best = Level::ALL.into_iter().rev().find(|l| l.is_available());
        Self(best.unwrap_or(Level::Portable))
    }

    /// Every level of this machine, from the slowest.
    pub fn available() -> Vec<Self> {
        Level::ALL.into_iter().filter(|l| l.is_available()).map(Self).collect()
    }

    /// `level`, if this machine has it; `Unavailable` otherwise.
    pub fn new(level: Level) -> Result<Self> {
        if !level.is_available() {
            return Err(Error::new(ErrorKind::Unavailable, format!("this processor has no {level} instructions")));
        }
        Ok(Self(level))
    }

    /// Which level this is.
    pub fn level(self) -> Level {
        self.0
    }

    /// float32 lanes of a vector of this level.
    pub(in crate::backend::cpu) fn lanes(self) -> usize {
        match self.0 {
            Level::Avx512 => 16,
            Level::Portable | Level::Neon | Level::Avx2 => 8,
        }
    }

    /// Decoded E4M3 codes are their value times two to the minus this.
    pub(in crate::backend::cpu) fn e4m3_exponent(self) -> u32 {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => avx512::Avx512::E4M3_EXPONENT,
            _ => Portable::E4M3_EXPONENT,
        }
    }

    /// Runs `op` with the vectors of this level.
    fn dispatch<O: Op>(self, op: O) -> O::Output {
        match self.0 {
            // SAFETY: `Portable` needs no instructions beyond the target's own.
            Level::Portable => unsafe { op.run::<Portable>() },
            #[cfg(target_arch = "aarch64")]
            // SAFETY: a `Simd` of this level exists only where the processor has its features.
            Level::Neon => unsafe { run_neon(op) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: a `Simd` of this level exists only where the processor has its features.
            Level::Avx2 => unsafe { run_avx2(op) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: a `Simd` of this level exists only where the processor has its features.
            Level::Avx512 => unsafe { run_avx512(op) },
            _ => unreachable!("no Simd of another architecture can be made"),
        }
    }
}

/// A kernel with its arguments, compiled once per level by [`Simd::dispatch`].
trait Op {
    type Output;

    /// Does the work. Implementations are `#[inline(always)]`, so that they take the features of their caller.
    ///
    /// # Safety
    /// The processor has the instructions of `V`.
    unsafe fn run<V: Vector>(self) -> Self::Output;
}

/// # Safety
/// The processor has AVX2 and FMA.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn run_avx2<O: Op>(op: O) -> O::Output {
    // SAFETY: by contract.
    unsafe { op.run::<avx2::Avx2>() }
}

/// # Safety
/// The processor has AVX-512 F and BW.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx2,fma")]
unsafe fn run_avx512<O: Op>(op: O) -> O::Output {
    // SAFETY: by contract.
    unsafe { op.run::<avx512::Avx512>() }
}

/// # Safety
/// The processor has NEON.
#[cfg(target_arch = "aarch64")]
#[target_feature(enable = "neon")]
unsafe fn run_neon<O: Op>(op: O) -> O::Output {
    // SAFETY: by contract.
    unsafe { op.run::<neon::Neon>() }
}

#[cfg(test)]
mod tests;
