//! The CPU backend.

pub mod linear;
pub mod simd;
