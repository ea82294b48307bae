//! DeepSeek-V4 inside your own process: opens an official checkpoint folder and generates.

#[doc(hidden)]
pub mod alloc;
pub mod error;
pub mod model;
pub mod tensor;
pub mod weights;
