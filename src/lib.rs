//! DeepSeek-V4 inside your own process.

pub mod backend;
pub mod error;
pub mod tensor;
