//! Number formats and matrix views: what the bytes of a checkpoint mean. Knows nothing of files or devices.

mod dtype;
pub mod format;
mod matrix;

pub use dtype::DType;
pub use matrix::{MatrixFormat, MatrixRef, Scales};
