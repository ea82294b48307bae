//! DeepSeek-V4 inside your own process.

pub mod chat;
pub mod error;
pub mod sampler;
pub mod session;
pub mod tensor;
pub mod tokenizer;

pub use error::{Error, ErrorKind, Result};

/// Index of a token in the model's vocabulary (row of the embedding, column of the logits).
pub type TokenId = u32;
